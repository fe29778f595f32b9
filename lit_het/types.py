"""Types that modules exchange, and the glossary of dimensions.

Dimension letters, everywhere in the project:

===== ================================ ===== ================================
``b`` batch                            ``r`` covariance rank
``h w c`` image height, width, channel ``q`` size of the noise space
``n`` patches (or tokens of a tower)   ``k`` classes
``l`` text tokens                      ``s`` Monte-Carlo noise samples
``d`` embedding                        ``m`` ensemble members
===== ================================ ===== ================================
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8, UInt32

from lit_het.calibrations import Calibration
from lit_het.mixtures import LabelMixture, MixedImages
from lit_het.texts import TextWriter
from lit_het.trees import tree_of_arrays

# A nested dict of arrays, the only form of parameters outside Flax modules.
Params: TypeAlias = dict[str, Any]
Metrics: TypeAlias = dict[str, Array]
# A number of examples: an int, or where a program is traced for any number of them an expression of `jax.export`.
Size: TypeAlias = Any

MASKED = -1e30
"""In place of minus infinity in masked logits: differences and gradients of finite numbers are never NaN."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """One batch of examples, on the host (NumPy) or on devices (JAX).

    Attributes:
        valid: False marks padding and samples that could not be read; losses and metrics ignore these rows.
        image: pixels as stored ``[b h w c]``, or patches ``[b n c]`` of images of any shape, see `lit_het.patches`;
            towers normalise them on the device.
        image_embedding: precomputed features of a locked image tower, in place of ``image``; those of an ensemble's
            members are concatenated.
        source: token ids of texts to translate, in place of ``image``.
        text: token ids.
        text_embedding: precomputed embeddings of a locked text tower, in place of ``text``.
        teacher_image, teacher_text: precomputed embeddings of another model, beside ``image`` and ``text``.
        teacher_logits: precomputed logits of another classifier.
        text_target: which tokens of ``text`` a decoder is to predict; others are its prompt, or padding.
        image_id, text_id: hashes of the sample and of its token ids, equal for rows with the same image or text.
        label: class indices ``[b]``, or target probabilities in [0, 1] ``[b k]`` for multi-label data; mixed ones where
            images are mixed.
        masks: of each pixel of ``image`` the class (0 for void, then from 1), and the number of its instance: from 1
            over all classes, 0 for void and for stuff, such as sky.
        weight: of each row in the mean loss; None for 1. Metrics do not use it.
        mixed: what the images are mixed of; None where they are not mixed.
    """

    valid: Bool[Any, " b"]
    image: UInt8[Any, "b *image"] | None = None
    image_embedding: Float[Any, "b d"] | None = None
    source: Int[Any, "b n"] | None = None
    text: Int[Any, "b l"] | None = None
    text_embedding: Float[Any, "b text_d"] | None = None
    teacher_image: Float[Any, "b teacher_d"] | None = None
    teacher_text: Float[Any, "b teacher_text_d"] | None = None
    teacher_logits: Float[Any, "b classes"] | None = None
    text_target: Bool[Any, "b l"] | None = None
    image_id: UInt32[Any, "b 2"] | None = None
    text_id: UInt32[Any, "b 2"] | None = None
    label: Int[Any, " b"] | Float[Any, "b k"] | LabelMixture | None = None
    masks: Int[Any, "b h w 2"] | None = None
    weight: Float[Any, " b"] | None = None
    mixed: MixedImages | None = None

    @property
    def ids(self) -> list[Any]:
        """The hashes of images and of texts that there are."""
        return [ids for ids in (self.image_id, self.text_id) if ids is not None]

    @property
    def view(self) -> Any:
        """The input of the image tower: pixels, or its precomputed embeddings; or the texts to translate."""
        if self.source is not None:
            return self.source
        return self.image if self.image_embedding is None else self.image_embedding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TowerOutput:
    """The output of a tower.

    Attributes:
        embedding: one per example; with separate members of an ensemble M per example, adjacent.
        tokens: the encoder's outputs for patches or words; their width may differ from that of the embedding.
        auxiliary_losses: scalars to add to the loss.
        metrics: scalars to log.
    """

    embedding: Float[Array, "b d"]
    tokens: Float[Array, "_ n width"]
    auxiliary_losses: Metrics
    metrics: Metrics


@dataclasses.dataclass(frozen=True)
class LogitSamples:
    """S noise samples of the logits of a batch, computed lazily for blocks of n examples and t samples.

    Without samples they are normally distributed: the one sample is then ``1 + r`` rows, the mean and the factors of
    the logits, of which `lit_het.losses.sample_free` takes the probabilities.

    Attributes:
        features: inputs of the head ``[b *m d]``, a tree of float arrays.
        keys: one random key per example, or per member of it ``[b *m]``; the noise depends only on the key and the
            sample's index, not on blocks or devices. None without noise.
        prepare: features of a block ``[n d]`` to values that all samples share, a tree of float arrays.
        logits: shared values, keys ``[n]`` and sample indices ``[t]`` to logits divided by τ ``[n t k]``.
        num_samples: S.
        examples_per_block, samples_per_block: size of a block on each device.
        num_members: m, predictions of an example; the logits of several are side by side, ``[n t m*k]``.
        num_factors: r; 0 for samples.
        of_labels: label of each row to samples of the logits of fewer outcomes, the first of which is the label: what
            is trained where there are too many classes. None to train with all.
    """

    features: Any
    keys: Any
    prepare: Callable[[Any], Any]
    logits: Callable[[Any, Any, Int[Array, " t"]], Float[Array, "n t k"]]
    num_samples: int
    examples_per_block: Size
    samples_per_block: int
    num_members: int = 1
    num_factors: int = 0
    of_labels: Callable[[Int[Array, " b"]], "LogitSamples"] | None = None


@tree_of_arrays
@dataclasses.dataclass(frozen=True)
class Queries:
    """S noisy embeddings per example, ``query_s = (samples_s + normals_s @ factors) * scale_s``, or their distribution.

    Attributes:
        samples: the queries, or in factored form their mean ``[b 1 d]``.
        factors: rows of V(x) and d(x); None unless in factored form.
        normals: standard normals of every sample; None unless in factored form, and where the mean and the factors
            stand for the distribution, of which no samples are drawn.
        scale: factor of every sample (normalisation after the noise), or None.
    """

    samples: Float[Array, "b _ d"]
    factors: Float[Array, "b r d"] | None = None
    normals: Float[Array, "b s r"] | None = None
    scale: Float[Array, "b s"] | None = None

    @property
    def num_samples(self) -> int:
        """S."""
        return self.samples.shape[1] if self.normals is None else self.normals.shape[1]

    @property
    def num_vectors(self) -> int:
        """Vectors of logits per example: those of its queries, and in factored form of the mean and the factors."""
        return self.num_samples + (0 if self.factors is None else self.factors.shape[1] + 1)

    def products(self, keys: Float[Array, "m d"]) -> Float[Array, "b s m"]:
        """Returns the inner products of all samples with all keys.

        In factored form ``Kᵀ (β + V ξ) = Kᵀ β + (Kᵀ V) ξ``: the products of factors and keys do not depend on S.
        """
        products = _rows_times(self.samples, keys)
        if self.normals is not None:
            products = products + jnp.einsum("bsr,brm->bsm", self.normals, self.factor_products(keys))
        return products if self.scale is None else products * self.scale[:, :, None]

    def materialize(self) -> Float[Array, "b s d"]:
        """Returns the S queries of each example."""
        rows = self.samples
        if self.normals is not None:
            rows = rows + jnp.einsum("bsr,brd->bsd", self.normals, self.factors)
        return rows if self.scale is None else rows * self.scale[:, :, None]

    def factor_products(self, keys: Float[Array, "m d"]) -> Float[Array, "b r m"]:
        """Returns the inner products of the factors with all keys."""
        assert self.factors is not None
        return _rows_times(self.factors, keys)


def _rows_times(rows: Float[Array, "b s d"], keys: Float[Array, "m d"]) -> Float[Array, "b s m"]:
    # Flattened, as XLA's CPU backend is slow at products with two leading dimensions.
    b, s, d = rows.shape
    return (rows.reshape(b * s, d) @ keys.T).reshape(b, s, -1)


@tree_of_arrays
@dataclasses.dataclass(frozen=True)
class EmbeddingSamples:
    """The output of a contrastive head: noiseless keys and noisy queries (HET-XL Sec. 5.2).

    Attributes:
        image, text: keys, without noise; a loss takes an image's keys from the m members of an ensemble ``[b m d]``.
        image_queries, text_queries: samples of the same embeddings with noise; None without noise, where the
            deterministic embeddings are used as queries and as keys.
        temperature: τ, which divides inner products.
        bias: added to logits after the division (sigmoid loss), or None.
    """

    image: Float[Array, "n *m d"]
    text: Float[Array, "b d"]
    image_queries: Queries | None
    text_queries: Queries | None
    temperature: Float[Array, ""]
    bias: Float[Array, ""] | None = None


@tree_of_arrays
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that training changes; locked parameters are not part of it.

    Attributes:
        step: number of optimizer updates, a scalar int32; Any, as the same tree also holds shapes and shardings.
        params: trainable parameters.
        opt_state: state of the optimizer.
        average: moving average of ``params``, or None.
    """

    step: Any
    params: Params
    opt_state: Any
    average: Params | None = None

    @property
    def evaluated(self) -> Params:
        """The parameters to evaluate: the moving average if there is one."""
        return self.params if self.average is None else self.average


@dataclasses.dataclass(frozen=True)
class ImageFeatures:
    """An image tower as evaluators see it: the one costly step of all evaluations.

    Attributes:
        extract: this process's rows of `Batch.view` to features of the rows of all processes ``[b f]`` float32, members
            of an ensemble side by side. It returns before they are computed.
        num_members: m.
        num_shards: over how many devices a batch is split; its rows are a multiple of them.
        tower: equal for towers that make the same features.
        mean_size: the entries of a member's features that are its (mean) embedding; None for all. Others follow that
            only a head reads: log σ² (ProLIP), or the input of the last layer.
    """

    extract: Callable[[np.ndarray], Array | np.ndarray]
    num_members: int
    num_shards: int
    tower: str
    mean_size: int | None = None


Knows: TypeAlias = Callable[[Sequence[str], Sequence[str]], Bool[np.ndarray, " k"]]
"""Which names training captions had, given prompts with the placeholder ``{c}``."""


@dataclasses.dataclass(frozen=True)
class TextEncoder:
    """The texts' side of an image-text model, as evaluators see it.

    Attributes:
        embed: token ids ``[b l]``, in multiples of `ImageFeatures.num_shards`, to unit embeddings ``[b d]``, in NumPy.
        tokenize: captions to token ids ``[b l]`` int32.
        join: embeddings of the t prompts of each class name to that of the name.
        tower: equal for models that embed texts alike; empty while the text tower is trained.
        variances: of embeddings of texts, for Gaussian ones.
        knows: which names training captions had; None if that is unknown.
    """

    embed: Callable[[np.ndarray], np.ndarray]
    tokenize: Callable[[list[str]], np.ndarray]
    join: Callable[[Float[np.ndarray, "k t d"]], Float[np.ndarray, "k d"]]
    tower: str = ""
    variances: Callable[[Float[np.ndarray, "*n d"]], Float[np.ndarray, "*n"]] | None = None
    knows: Knows | None = None


@runtime_checkable
class EvaluatedModel(Protocol):
    """A trained model as evaluators, ``classify``, the demo and exports see it."""

    @property
    def features(self) -> ImageFeatures:
        """The image tower."""
        ...

    @property
    def text(self) -> TextEncoder | None:
        """The text tower and its tokenizer; None for a classifier."""
        ...

    @property
    def writer(self) -> TextWriter | None:
        """The decoder; None for other models."""
        ...

    @property
    def num_classes(self) -> int | None:
        """The number of a classifier's own classes; 0 without a head, None for an image-text model."""
        ...

    @property
    def mask_classes(self) -> int | None:
        """The number of classes of the masks that are predicted of images, without void; None for other models."""
        ...

    @property
    def num_predictions(self) -> int:
        """How many predictions of an image are averaged: of members of its towers, and of heads."""
        ...

    @property
    def has_noise(self) -> bool:
        """Whether the head has noise for images."""
        ...

    @property
    def has_class_probabilities(self) -> bool:
        """Whether the loss gives every class, or pair of image and text, a probability of its own, by a sigmoid."""
        ...

    @property
    def calibration(self) -> Calibration | None:
        """The temperatures that predictions are scaled by; None leaves them as trained."""
        ...

    def check_samples(self, num_samples: int) -> None:
        """Checks that the head can draw S noise samples, before images are read."""
        ...

    def __call__(
        self,
        quantity: Callable[..., Array],
        blocks: Float[np.ndarray, "n b f"],
        *,
        seeds: Int[np.ndarray, " n"] | None = None,
        num_samples: int = 0,
        classes: Float[np.ndarray, "k d"] | None = None,
    ) -> np.ndarray:
        """Computes a quantity of `lit_het.tasks.quantities` for all images, in NumPy float32.

        Args:
            quantity: the quantity.
            blocks: features, as many blocks as `ImageFeatures.num_shards`, each on a device of its own, or one block.
            seeds: one per block, for quantities with noise.
            num_samples: S; 0 leaves the noise out.
            classes: unit embeddings of class names, for image-text models.
        """
        ...
