"""The gradient of a learned temperature τ from rows that are held out of every batch (HET-XL App. G.2).

All other parameters Θ are trained on the rest of the batch, with τ as it is.
"""

import dataclasses
from collections.abc import Callable

import jax
import optax
from jaxtyping import Array, ArrayLike, Float, Int

from lit_het import parameters
from lit_het.random import Keys
from lit_het.tasks import held_out
from lit_het.tasks.base import Gradient, Loss, LossAndGradient
from lit_het.tasks.temperature_gradient_config import TEMPERATURE, Method
from lit_het.types import Batch, Metrics, Params

# Of log τ, or of t in Eq. 16. The error of a central difference is of the order of its square; a smaller one would lose
# the digits of float32.
_SHIFT = 1e-2


def held_out_gradient(method: Method, fraction: float, learning_rate: Callable[[ArrayLike], ArrayLike]) -> Gradient:
    """Returns what `TemperatureGradient.build` does, of the same arguments."""
    of_temperature = _simple if method == "simple" else _luketina

    def gradient(loss: Loss, params: Params, batch: Batch, keys: Keys, step: Int[Array, ""]) -> LossAndGradient:
        tau, rest = parameters.partition(params, [TEMPERATURE])
        rows, held_out_rows = held_out.split(batch, fraction)
        # Noise of its own: equal keys would give both parts the same.
        held_out_keys = Keys(keys("held_out"))

        def training(tau: Params, rest: Params) -> tuple[Float[Array, ""], Metrics]:
            return loss(parameters.merge(tau, rest), rows, keys)

        def validation(tau: Params, rest: Params) -> Float[Array, ""]:
            return loss(parameters.merge(tau, rest), held_out_rows, held_out_keys)[0]

        (value, metrics), rest_grad = jax.value_and_grad(training, argnums=1, has_aux=True)(tau, rest)
        found = _Step(training, validation, tau, rest, rest_grad, learning_rate(step))
        held_out_loss, tau_grad = of_temperature(found)
        return (value, {**metrics, "held_out_loss": held_out_loss}), parameters.merge(tau_grad, rest_grad)

    return gradient


@dataclasses.dataclass(frozen=True)
class _Step:
    """A step of training.

    Attributes:
        training: F_train(τ, Θ) and metrics.
        validation: F_val(τ, Θ).
        tau: τ, or what it is a function of, a tree with one number.
        rest: Θ.
        gradient: ∇_Θ F_train(τ, Θ).
        learning_rate: s.
    """

    training: Callable[[Params, Params], tuple[Float[Array, ""], Metrics]]
    validation: Callable[[Params, Params], Float[Array, ""]]
    tau: Params
    rest: Params
    gradient: Params
    learning_rate: ArrayLike


def _simple(step: _Step) -> tuple[Float[Array, ""], Params]:
    """Returns F_val(τ, Θ), and its gradient by τ."""
    return jax.value_and_grad(step.validation)(step.tau, step.rest)


def _luketina(step: _Step) -> tuple[Float[Array, ""], Params]:
    """Returns F_val(τ, Θ - s ∇_Θ F_train(τ, Θ)), and its derivative by τ."""
    rate = step.learning_rate
    after = jax.tree.map(lambda x, g: x - rate * g, step.rest, step.gradient)
    value, (direct, of_after) = jax.value_and_grad(step.validation, argnums=(0, 1))(step.tau, after)

    def gradient_at(shift: float) -> Params:
        tau = jax.tree.map(lambda x: x + shift, step.tau)
        return jax.grad(step.training, argnums=1, has_aux=True)(tau, step.rest)[0]

    # Of ∂(∇_Θ F_train)/∂τ, the only second derivative, as τ is a number a difference of two gradients is enough. They
    # need the memory of one, where those of autodiff would hold all logits, and are right for every loss: the closed
    # forms of `lit_het.losses.contrastive.normalizers` have no second derivative.
    difference = jax.tree.map(lambda x, y: x - y, gradient_at(_SHIFT), gradient_at(-_SHIFT))
    through_step = rate * optax.tree.vdot(difference, of_after) / (2 * _SHIFT)
    return value, jax.tree.map(lambda x: x - through_step, direct)
