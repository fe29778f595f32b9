"""Optimizers with decoupled weight decay.

``weight_decay`` is the fraction of a decayed parameter that one step at the peak of the schedule removes (the
convention of LiT and big_vision). PyTorch's and optax's AdamW multiply theirs by the learning rate: divide
ours by the peak learning rate to get theirs.
"""

import dataclasses
import re
from typing import TypeAlias

import jax.numpy as jnp
import optax
from jaxtyping import ArrayLike

from lit_het import parameters
from lit_het.schedules import CosineSchedule
from lit_het.types import Params

# Weight decay acts on kernels, as in big_vision: not on token embeddings, biases, norms, positions, temperatures.
DECAYED = r".*/kernel"


@dataclasses.dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay and clipping by global norm.

    Attributes:
        first_decay, second_decay: β1 and β2 of the moments.
        weight_decay: see the module's docstring.
        clip_norm: largest global norm of the gradient.
    """

    first_decay: float = 0.9
    second_decay: float = 0.999
    weight_decay: float = 1e-4
    clip_norm: float = 1.0

    def build(self, schedule: CosineSchedule, num_steps: int) -> optax.GradientTransformation:
        """Returns the optimizer for a run of ``num_steps`` steps."""
        moments = optax.scale_by_adam(b1=self.first_decay, b2=self.second_decay)
        return _chain(moments, self.clip_norm, self.weight_decay, schedule, num_steps)


@dataclasses.dataclass(frozen=True)
class Adafactor:
    """Adafactor as LiT uses it: factored second moment, capped β2, bfloat16 momentum, no relative step.

    Attributes:
        momentum: decay of the first moment, kept in bfloat16.
        second_decay_cap: largest β2; β2 at step t is min(cap, 1 - t^-0.8).
        weight_decay: see the module's docstring.
        clip_norm: largest global norm of the gradient.
    """

    momentum: float = 0.9
    second_decay_cap: float = 0.999
    weight_decay: float = 1e-4
    clip_norm: float = 1.0

    def build(self, schedule: CosineSchedule, num_steps: int) -> optax.GradientTransformation:
        """Returns the optimizer for a run of ``num_steps`` steps."""

        def second_decay(step: ArrayLike, exponent: ArrayLike) -> ArrayLike:
            return jnp.minimum(self.second_decay_cap, 1.0 - (jnp.asarray(step) + 1.0) ** -jnp.asarray(exponent))

        moments = optax.chain(
            optax.scale_by_factored_rms(decay_rate=0.8, min_dim_size_to_factor=32, decay_rate_fn=second_decay),
            optax.ema(self.momentum, debias=False, accumulator_dtype=jnp.bfloat16),
        )
        return _chain(moments, self.clip_norm, self.weight_decay, schedule, num_steps)


Optimizer: TypeAlias = AdamW | Adafactor


def decay_mask(params: Params) -> Params:
    """Returns a tree of booleans: True where weight decay acts."""
    return parameters.unflatten({path: bool(re.fullmatch(DECAYED, path)) for path in parameters.flatten(params)})


def _chain(
    moments: optax.GradientTransformation,
    clip_norm: float,
    weight_decay: float,
    schedule: CosineSchedule,
    num_steps: int,
) -> optax.GradientTransformation:
    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        moments,
        optax.add_decayed_weights(weight_decay / schedule.learning_rate, mask=decay_mask),
        optax.scale_by_learning_rate(schedule.build(num_steps)),
    )
