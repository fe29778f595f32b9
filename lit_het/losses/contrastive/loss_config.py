"""The contrastive losses, as configurations name them; `lit_het.losses.contrastive.loss` computes them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, TypeAlias

from jaxtyping import Array, Bool, Float, UInt32

from lit_het.errors import UserError, require_at_least, require_choice, require_share
from lit_het.mixtures import MixedImages
from lit_het.types import EmbeddingSamples

Form = Literal["dense", "gather", "ring"]

Duplicates = Literal["positives", "negatives"]


@dataclasses.dataclass(frozen=True)
class SoftmaxLoss:
    """``-log p`` of the right partner among the batch, half the sum of both directions.

    ``p(b_n|a_n) = 1/S Σ_s softmax_i(β_i · (α_n + ε_s(a_n)) / τ)_n``, and with α and β exchanged for ``p(a_n|b_n)``.
    With duplicates it is the sum of the probabilities of all positives (`lit_het.losses.contrastive.dense.softmax`).

    Attributes:
        form: "gather" brings all keys to every device, O(b d) memory; "ring" passes them around, O(b d / devices), for
            one more product of logits; "dense" holds all logits, O(b²). All are equal.
        block_size: vectors of logits that exist at a time on a device: one for every query, or factor of queries.
        likelihood: "samples" takes the mean over the head's noise samples; the others approximate the expectation from
            the covariance, see `lit_het.losses.gaussian`, and need a head with ``num_samples = 0``.
        duplicates: whether examples of the batch with the same image or an equal text are "positives", as a right
            caption cannot also be a wrong answer; "negatives" is the loss of the papers.
        label_smoothing: share α of the uniform distribution over all keys of the batch in the target (Szegedy et al.
            2016, Sec. 7), for logits without noise (`lit_het.losses.contrastive.dense.softmax`).
        has_class_probabilities: whether each pair has a probability of its own.

    Raises:
        UserError: an unknown form or likelihood, a block without queries, a ring without samples, or smoothing outside
            of [0, 1).
    """

    form: Form = "gather"
    block_size: int = 1024
    likelihood: Literal["samples", "delta", "mean_field", "pairwise_probit", "unscented", "tilted"] = "samples"
    duplicates: Duplicates = "positives"
    label_smoothing: float = 0.0

    has_class_probabilities: ClassVar[bool] = False

    @property
    def takes_members(self) -> bool:
        """Whether an image may have several keys."""
        return self.likelihood == "samples"

    def __post_init__(self) -> None:
        require_at_least(1, self, "block_size")
        require_choice(self, "form", "likelihood", "duplicates")
        if self.form == "ring" and self.likelihood not in ("samples", "unscented"):
            raise UserError(
                f"SoftmaxLoss: likelihood = {self.likelihood!r} needs the keys of a whole batch at once; set form to "
                "'gather'"
            )
        require_share(self, "label_smoothing")

    def __call__(
        self,
        samples: EmbeddingSamples,
        valid: Bool[Array, " b"] | None = None,
        ids: Sequence[UInt32[Array, "b 2"]] = (),
        weight: Float[Array, " b"] | None = None,
    ) -> Float[Array, ""]:
        """Returns the mean loss over valid rows, by default all.

        Args:
            samples: what the head returns.
            valid: which rows count; None for all.
            ids: hashes of images or of texts; equal rows of one have the same image or text.
            weight: of each row's own losses in the mean (`lit_het.losses.base.weights`), None for equal weights; a row
                of any weight is a key of the others.
        """
        from lit_het.losses.contrastive.loss import Rows, softmax_loss

        return softmax_loss(self, samples, Rows(valid, tuple(ids), weight))

    @property
    def hessian(self) -> Callable[..., Float[Array, "d d"]]:
        """The Gauss-Newton Hessian of one direction without noise, see `gauss_newton.softmax_hessian`."""
        from lit_het.losses.contrastive.gauss_newton import softmax_hessian

        return softmax_hessian


@dataclasses.dataclass(frozen=True)
class SigmoidLoss:
    """``-log σ(z_ij (logit_ij + bias))``, z = 1 for positives and -1 otherwise (SigLIP; SoViT Table 7).

    Each query's losses are summed over keys and averaged over queries; with noise σ is averaged over samples.
    The loss is half the sum of both directions, which are equal without noise.

    Attributes:
        form, block_size: as in `SoftmaxLoss`; the ring needs no additional product.
        likelihood: "samples", "probit" for `lit_het.losses.contrastive.sample_free.probit`, or "unscented".
        duplicates: as in `SoftmaxLoss`.
        label_smoothing: share α of the uniform distribution over both labels in the target, of each pair: 1 becomes
            ``1 - α/2``, and 0 becomes ``α/2``. A batch has b negatives of a query, so α counts b times.
        pseudo_positives: weight α of a second loss, whose positives are also all keys that fit a query at least as well
            as its partner (`lit_het.losses.contrastive.pseudo_positives`); PCME++ uses 0.1.

    Raises:
        UserError: an unknown form or likelihood, a block without queries, a negative weight, or smoothing outside of
            [0, 1).
    """

    form: Form = "gather"
    block_size: int = 1024
    likelihood: Literal["samples", "probit", "unscented"] = "samples"
    duplicates: Duplicates = "positives"
    pseudo_positives: float = 0.0
    label_smoothing: float = 0.0

    takes_members: ClassVar[bool] = False
    has_class_probabilities: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_at_least(1, self, "block_size")
        require_at_least(0, self, "pseudo_positives")
        require_choice(self, "form", "likelihood", "duplicates")
        require_share(self, "label_smoothing")

    def __call__(
        self,
        samples: EmbeddingSamples,
        valid: Bool[Array, " b"] | None = None,
        ids: Sequence[UInt32[Array, "b 2"]] = (),
        weight: Float[Array, " b"] | None = None,
        mixed: MixedImages | None = None,
    ) -> Float[Array, ""]:
        """Returns the mean loss over valid rows, by default all.

        Args:
            samples: what the head returns.
            valid: which rows count; None for all.
            ids: hashes of images or of texts; equal rows of one have the same image or text.
            weight: of each row in the mean (`lit_het.losses.base.weights`), None for equal weights; as each direction
                weights its queries, a pair has the mean weight of its image's and its text's rows.
            mixed: what the images are mixed of, with as many hashes as ``ids``; None where they are not mixed. A mixed
                image has the weight of its own row.
        """
        from lit_het.losses.contrastive.loss import Rows, sigmoid_loss

        return sigmoid_loss(self, samples, Rows(valid, tuple(ids), weight, mixed))

    @property
    def hessian(self) -> Callable[..., Float[Array, "d d"]]:
        """The Gauss-Newton Hessian without noise, see `gauss_newton.sigmoid_hessian`."""
        from lit_het.losses.contrastive.gauss_newton import sigmoid_hessian

        return sigmoid_hessian


ContrastiveLoss: TypeAlias = SoftmaxLoss | SigmoidLoss
