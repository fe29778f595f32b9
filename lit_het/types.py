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
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8

# A plain nested dict of arrays; parameters never travel in any other form outside modules.
Params: TypeAlias = dict[str, Any]
Metrics: TypeAlias = dict[str, Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """One batch of examples, on the host (NumPy) or on devices (JAX).

    Attributes:
        valid: False marks a row that pads the batch or whose sample could not be read; such rows take
            no part in losses or metrics.
        image: pixels as stored; towers normalise them on the device.
        image_embedding: the output of a locked image tower, in place of ``image``.
        text: token ids.
        label: class indices ``[b]``, or target probabilities in [0, 1] ``[b k]`` for multi-label data.
    """

    valid: Bool[Any, " b"]
    image: UInt8[Any, "b h w c"] | None = None
    image_embedding: Float[Any, "b d"] | None = None
    text: Int[Any, "b l"] | None = None
    label: Int[Any, " b"] | Float[Any, "b k"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TowerOutput:
    """What a tower returns: one embedding per example and its tokens, whose width may be another one."""

    embedding: Float[Array, "b d"]
    tokens: Float[Array, "b n width"]
    auxiliary_losses: Metrics


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EmbeddingSamples:
    """A contrastive head's view of one batch: noiseless keys and noisy queries (HET-XL Sec. 5.2).

    Attributes:
        image, text: keys, never noisy.
        image_queries, text_queries: samples of the same embeddings with noise; a deterministic head
            returns its keys with ``s = 1``.
        temperature: τ, which divides inner products.
        bias: added to logits after the division (sigmoid loss), or None.
    """

    image: Float[Array, "b d"]
    text: Float[Array, "b d"]
    image_queries: Float[Array, "s_image b d"]
    text_queries: Float[Array, "s_text b d"]
    temperature: Float[Array, ""]
    bias: Float[Array, ""] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that training changes: the optimizer's view holds no locked parameter.

    Attributes:
        step: optimizer updates done, a scalar int32. The same tree also carries shapes and shardings, hence Any.
        params: trainable parameters.
        opt_state: the optimizer's.
    """

    step: Any
    params: Params
    opt_state: Any


@dataclasses.dataclass(frozen=True)
class Encoder:
    """A trained contrastive model as evaluators see it: NumPy in, NumPy out, no noise.

    Attributes:
        image: pixels ``[b h w c]`` uint8 to unit embeddings ``[b d]`` float32.
        text: token ids ``[b l]`` to unit embeddings ``[b d]`` float32.
        image_noise_norm, text_noise_norm: the same inputs to ``sqrt(tr Σ(x))`` ``[b]``, the root mean
            square norm of the noise; zeros where the head is deterministic.
        tokenize: captions to token ids ``[b l]`` int32.
        temperature: τ, which divides inner products.
    """

    image: Callable[[np.ndarray], np.ndarray]
    text: Callable[[np.ndarray], np.ndarray]
    image_noise_norm: Callable[[np.ndarray], np.ndarray]
    text_noise_norm: Callable[[np.ndarray], np.ndarray]
    tokenize: Callable[[list[str]], np.ndarray]
    temperature: float


@runtime_checkable
class Evaluator(Protocol):
    """Measures a model; returns metric names such as ``zero_shot/pets/top1`` with their values."""

    def __call__(self, encoder: Encoder) -> Mapping[str, float]:
        """Returns metrics by name."""
        ...
