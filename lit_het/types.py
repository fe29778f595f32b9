"""Contracts between the rooms, and the glossary of dimensions.

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
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, UInt8

# A plain nested dict of arrays; parameters never travel in any other form outside modules.
Params: TypeAlias = dict[str, Any]
Metrics: TypeAlias = dict[str, Array]

_Class = TypeVar("_Class", bound=type)


def tree_of_arrays(cls: _Class) -> _Class:
    """Makes a dataclass a tree of its fields, those with the metadata ``static`` apart.

    Unlike `jax.tree_util.register_dataclass` it does not go through ``__init__``, whose annotations hold for arrays
    alone: JAX rebuilds trees of shapes, of stacked blocks and of placeholders too.
    """
    static = [field.name for field in dataclasses.fields(cls) if field.metadata.get("static")]
    names = [field.name for field in dataclasses.fields(cls) if field.name not in static]

    def flatten(tree: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(getattr(tree, name) for name in names), tuple(getattr(tree, name) for name in static)

    def flatten_with_keys(tree: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        children, fixed = flatten(tree)
        keys = (jax.tree_util.GetAttrKey(name) for name in names)
        return tuple(zip(keys, children, strict=True)), fixed

    def unflatten(fixed: tuple[Any, ...], children: Iterable[Any]) -> Any:
        tree = object.__new__(cls)
        for name, value in zip((*names, *static), (*children, *fixed), strict=True):
            object.__setattr__(tree, name, value)
        return tree

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """One batch of examples, on the host (NumPy) or on devices (JAX).

    Attributes:
        valid: False marks a row that pads the batch or whose sample could not be read; such rows take
            no part in losses or metrics.
        image: pixels as stored; towers normalise them on the device.
        image_embedding: what a locked image tower once made, in place of ``image``; of an ensemble's members side by
            side.
        text: token ids.
        label: class indices ``[b]``, or target probabilities in [0, 1] ``[b k]`` for multi-label data.
    """

    valid: Bool[Any, " b"]
    image: UInt8[Any, "b h w c"] | None = None
    image_embedding: Float[Any, "b d"] | None = None
    text: Int[Any, "b l"] | None = None
    label: Int[Any, " b"] | Float[Any, "b k"] | None = None

    @property
    def view(self) -> Any:
        """What there is for the image tower: pixels, or its stored embeddings."""
        return self.image if self.image_embedding is None else self.image_embedding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TowerOutput:
    """What a tower returns.

    Attributes:
        embedding: one per example, or M where the members of an ensemble stay apart, those of an example adjacent.
        tokens: what the encoder made of patches or words; their width may be another one.
        auxiliary_losses: to be added to the loss.
        metrics: to be logged.
    """

    embedding: Float[Array, "b d"]
    tokens: Float[Array, "_ n width"]
    auxiliary_losses: Metrics
    metrics: Metrics


@dataclasses.dataclass(frozen=True)
class LogitSamples:
    """S noise samples of the logits of a batch, which exist only in blocks: some examples, some samples.

    Attributes:
        features: what the logits are a function of.
        keys: one random key per example; the noise of an example depends on its key and the sample's number alone,
            not on blocks or devices. None where there is no noise.
        prepare: features of some examples ``[n d]`` to what their samples have in common, a tree of float arrays.
        logits: that tree, keys ``[n]`` and numbers of samples ``[t]`` to logits divided by τ ``[n t k]``.
        num_samples: S.
        examples_per_block, samples_per_block: how much exists at a time, per device.
    """

    features: Float[Array, "b d"]
    keys: Key[Array, " b"] | None
    prepare: Callable[[Float[Array, "n d"]], Any]
    logits: Callable[[Any, Key[Array, " n"] | None, Int[Array, " t"]], Float[Array, "n t k"]]
    num_samples: int
    examples_per_block: int
    samples_per_block: int


@tree_of_arrays
@dataclasses.dataclass(frozen=True)
class Queries:
    """S noisy embeddings per example: ``query_s = (samples_s + normals_s @ factors) * scale_s``.

    Attributes:
        samples: the queries themselves, or in factored form, with ``s = 1``, their mean.
        factors: rows of V(x) and d(x), each as long as an embedding; None if samples are held one by one.
        normals: the standard normals of every sample; None without factors.
        scale: a factor for every sample (normalisation after the noise), or None.
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
        """How many vectors of an example meet the keys: its queries, or their mean, factors and products."""
        return self.num_samples + (0 if self.factors is None else self.factors.shape[1] + 1)

    def products(self, keys: Float[Array, "m d"]) -> Float[Array, "b s m"]:
        """Returns the inner products of all samples with all keys.

        In factored form ``K^T (β + V ξ) = K^T β + (K^T V) ξ``: the factors meet the keys once, whatever S is.
        """
        products = _rows_times(self.samples, keys)
        if self.factors is not None and self.normals is not None:
            products = products + jnp.einsum("bsr,brm->bsm", self.normals, _rows_times(self.factors, keys))
        return products if self.scale is None else products * self.scale[:, :, None]


def _rows_times(rows: Float[Array, "b s d"], keys: Float[Array, "m d"]) -> Float[Array, "b s m"]:
    # Flat: XLA's CPU code is slow on products with two leading dimensions.
    b, s, d = rows.shape
    return (rows.reshape(b * s, d) @ keys.T).reshape(b, s, -1)


@tree_of_arrays
@dataclasses.dataclass(frozen=True)
class EmbeddingSamples:
    """A contrastive head's view of one batch: noiseless keys and noisy queries (HET-XL Sec. 5.2).

    Attributes:
        image, text: keys, never noisy.
        image_queries, text_queries: samples of the same embeddings with noise; None where there is none, so that the
            keys are the queries.
        temperature: τ, which divides inner products.
        bias: added to logits after the division (sigmoid loss), or None.
    """

    image: Float[Array, "b d"]
    text: Float[Array, "b d"]
    image_queries: Queries | None
    text_queries: Queries | None
    temperature: Float[Array, ""]
    bias: Float[Array, ""] | None = None


@tree_of_arrays
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that training changes: the optimizer's view holds no locked parameter.

    Attributes:
        step: optimizer updates done, a scalar int32. The same tree also carries shapes and shardings, hence Any.
        params: trainable parameters.
        opt_state: the optimizer's.
        average: moving average of ``params``, or None for none.
    """

    step: Any
    params: Params
    opt_state: Any
    average: Params | None = None

    @property
    def evaluated(self) -> Params:
        """The parameters that others use: the average where there is one."""
        return self.params if self.average is None else self.average


@dataclasses.dataclass(frozen=True)
class ImageFeatures:
    """An image tower as evaluators see it: the one costly step of all evaluations.

    Attributes:
        extract: this process's rows of `Batch.view` to features of the rows of all processes ``[b f]`` float32, members
            of an ensemble side by side. It returns before they are computed.
        num_members: m.
        num_shares: over how many devices a batch is split; its rows are a multiple of them.
        tower: equal for towers that make the same features.
    """

    extract: Callable[[np.ndarray], Array | np.ndarray]
    num_members: int
    num_shares: int
    tower: str


@tree_of_arrays
@dataclasses.dataclass(frozen=True)
class HeadOutput:
    """What a head says of images.

    Attributes:
        log_probabilities: log of the mean probability over noise samples and members.
        log_normalizer: ``log Σ exp`` of the logits without noise, mean over members.
        noise_norm: ``sqrt(tr Σ(x))``, mean over members; zeros where there is no noise.
    """

    log_probabilities: Float[Any, "b k"]
    log_normalizer: Float[Any, " b"]
    noise_norm: Float[Any, " b"]


@dataclasses.dataclass(frozen=True)
class Encoder:
    """A trained contrastive model as evaluators see it; every function returns NumPy float32.

    Attributes:
        features: the image tower.
        image: features ``[b f]`` to unit embeddings ``[b d]``.
        choose: blocks of features ``[n b f]``, a seed for each ``[n]``, S and embeddings of names ``[k d]`` to what the
            model says of all images; the mean is over S noise samples, 0 leaves the noise out. There are as many
            blocks as ``features.num_shares``, each on a device of its own, or one.
        members: of the same, the log-probabilities of every noise sample ``[b s k]``; of one prediction without noise
            where S is 0 or the head has none for images.
        alone: blocks of features and embeddings of names to what is said of each name by itself ``[b k]``.
        image_noise_norm: features to ``sqrt(tr Σ(x))`` ``[b]``, the root mean square norm of the noise; zeros where the
            head is deterministic.
        image_spectrum: features to the square roots of the largest eigenvalues of Σ(x) ``[b r]``, falling.
        text: token ids ``[b l]``, in multiples of ``features.num_shares``, to unit embeddings ``[b d]``.
        tokenize: captions to token ids ``[b l]`` int32.
        temperature: τ, which divides inner products.
        text_tower: equal for models that embed texts alike; empty while the text tower is trained.
    """

    features: ImageFeatures
    image: Callable[[np.ndarray], np.ndarray]
    choose: Callable[[np.ndarray, np.ndarray, int, np.ndarray], HeadOutput]
    members: Callable[[np.ndarray, np.ndarray, int, np.ndarray], np.ndarray]
    alone: Callable[[np.ndarray, np.ndarray], np.ndarray]
    image_noise_norm: Callable[[np.ndarray], np.ndarray]
    image_spectrum: Callable[[np.ndarray], np.ndarray]
    text: Callable[[np.ndarray], np.ndarray]
    tokenize: Callable[[list[str]], np.ndarray]
    temperature: float
    text_tower: str = ""


@dataclasses.dataclass(frozen=True)
class Classifier:
    """A trained classifier as evaluators see it; every function returns NumPy float32.

    Attributes:
        features: the image tower.
        choose: blocks of features ``[n b f]``, a seed for each ``[n]`` and S to what the model says of all images;
            the mean is over members and S noise samples, 0 leaves the noise out. There are as many blocks as
            ``features.num_shares``, each on a device of its own, or one.
        members: of the same, the log-probabilities of every member, or of S noise samples of each ``[b m k]``.
        alone: blocks of features to what is said of each class by itself ``[b k]``.
        image_spectrum: features to the square roots of the largest eigenvalues of Σ(x) ``[b r]``, falling.
        num_samples: S that the head was made for; 0 of a deterministic one.
        num_classes: k; 0 of an image tower that was imported without a head.
    """

    features: ImageFeatures
    choose: Callable[[np.ndarray, np.ndarray, int], HeadOutput]
    members: Callable[[np.ndarray, np.ndarray, int], np.ndarray]
    alone: Callable[[np.ndarray], np.ndarray]
    image_spectrum: Callable[[np.ndarray], np.ndarray]
    num_samples: int
    num_classes: int


EvaluatedModel: TypeAlias = Encoder | Classifier
