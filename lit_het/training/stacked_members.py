"""Members whose parameters are stacked along a leading axis: what is done for each of them as if it were alone."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float


def of_each(optimizer: optax.GradientTransformationExtraArgs) -> optax.GradientTransformationExtraArgs:
    """Returns the optimizer of stacked members: clipping, too, is by the norm of each member's gradient."""

    def update(updates: Any, state: Any, params: Any = None, **shared: Any) -> tuple[Any, Any]:
        return jax.vmap(lambda *of_member: optimizer.update(*of_member, **shared))(updates, state, params)

    return optax.GradientTransformationExtraArgs(jax.vmap(optimizer.init), update)


def mean_of_each(measure: Callable[[Any, str], Array | None]) -> Callable[[Any, str], Float[Array, ""] | None]:
    """Returns the mean over members of a number that is measured in the state of a member's optimizer."""

    def mean(state: Any, pattern: str) -> Float[Array, ""] | None:
        values = jax.vmap(lambda of_member: measure(of_member, pattern))(state)
        return None if values is None else jnp.mean(values)

    return mean
