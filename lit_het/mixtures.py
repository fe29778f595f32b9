"""What mixed examples are mixed of."""

import dataclasses

from jaxtyping import Array, Float, Int, UInt32

from lit_het.trees import tree_of_arrays


@tree_of_arrays
@dataclasses.dataclass(frozen=True)
class MixedImages:
    """What the images of a batch are mixed of: each is λ of its own row, and 1 - λ of another.

    Attributes:
        share: λ, at least 1/2; 1 for an image that is not mixed.
        index: the other row, its position in the batch.
        ids: hashes of the other row's image and text, where a loss is given those of the rows.
    """

    share: Float[Array, " b"]
    index: Int[Array, " b"]
    ids: tuple[UInt32[Array, "b 2"], ...] = ()


@tree_of_arrays
@dataclasses.dataclass(frozen=True)
class LabelMixture:
    """The classes of examples that are mixed from several others.

    Attributes:
        label: class indices, beginning with the class of the largest weight.
        weight: weight of each class; the weights of an example sum to 1.
    """

    label: Int[Array, "b *m c"]
    weight: Float[Array, "b *m c"]
