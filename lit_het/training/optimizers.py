"""Optimizers with decoupled weight decay, and with learning rates per parameter group and per layer.

``weight_decay`` is the fraction of a decayed parameter that one step at the peak of the schedule removes (the
convention of LiT and big_vision). PyTorch's and optax's AdamW multiply theirs by the learning rate: divide
ours by the peak learning rate to get theirs.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float

from lit_het import parameters
from lit_het.errors import FieldError, UserError, require_at_least
from lit_het.training.durations import RunLength
from lit_het.training.schedules import Schedule
from lit_het.types import Params

# Weight decay acts on kernels only, as in big_vision: not on token embeddings, biases, norms, positions, temperatures.
DECAYED = r".*/kernel"


def _require_decays(config: Any, *fields: str) -> None:
    for field in fields:
        if not 0 <= (value := getattr(config, field)) < 1:
            raise FieldError(config, field, f"{value} must be at least 0 and less than 1")


class Moments(NamedTuple):
    """Moving averages of a gradient g, corrected for their start at zero.

    Attributes:
        decay: β of the mean.
        steps: t, their number.
        mean: of g, an array for each parameter.
        square: of ``|g|²``.
    """

    decay: float
    steps: Array
    mean: Any
    square: Any


@dataclasses.dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay, like all rules here.

    Attributes:
        first_decay, second_decay: β1 and β2 of the moments.
        epsilon: added to the root of the second moment.
    """

    first_decay: float = 0.9
    second_decay: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        _require_decays(self, "first_decay", "second_decay")
        if not self.epsilon > 0:
            raise FieldError(self, "epsilon", f"{self.epsilon} must be more than 0")

    def build(self) -> optax.GradientTransformation:
        """Returns the transformation from gradients to updates."""
        # Without optax's own weight decay: `Optimizer` adds it for all rules, scaled by the schedule.
        return optax.scale_by_adam(b1=self.first_decay, b2=self.second_decay, eps=self.epsilon)

    def moments(self, state: Any, pattern: str) -> "Moments | None":
        """Returns the moments of the gradient of some parameters; None if no path matches."""
        for adam in _states(state, optax.ScaleByAdamState):
            first, second = (_matching(moment, pattern) for moment in (adam.mu, adam.nu))
            if first:
                mean = optax.tree.bias_correction(first, self.first_decay, adam.count)
                square = optax.tree.sum(optax.tree.bias_correction(second, self.second_decay, adam.count))
                return Moments(self.first_decay, adam.count, mean, square)
        return None


@dataclasses.dataclass(frozen=True)
class Adafactor:
    """Adafactor as LiT uses it: factored second moment, capped β2, bfloat16 momentum, no relative step.

    Attributes:
        momentum: decay of the first moment, stored in bfloat16.
        second_decay_cap: largest β2; β2 at step t is min(cap, 1 - t^-0.8).
    """

    momentum: float = 0.9
    second_decay_cap: float = 0.999

    def __post_init__(self) -> None:
        _require_decays(self, "momentum", "second_decay_cap")

    def build(self) -> optax.GradientTransformation:
        """Returns the transformation from gradients to updates."""

        # optax has no cap on β2: without one, the second moment of a long run would hardly move.
        def second_decay(step: ArrayLike, exponent: ArrayLike) -> ArrayLike:
            # optax counts steps from 0, the formula from 1.
            return jnp.minimum(self.second_decay_cap, 1.0 - (jnp.asarray(step) + 1.0) ** -jnp.asarray(exponent))

        return optax.chain(
            # Both together take half the memory of the parameters; Adam's moments take twice theirs.
            optax.scale_by_factored_rms(decay_rate=0.8, min_dim_size_to_factor=32, decay_rate_fn=second_decay),
            optax.ema(self.momentum, debias=False, accumulator_dtype=jnp.bfloat16),
        )

    def moments(self, state: Any, pattern: str) -> "Moments | None":
        """Returns the moments of the gradient of some parameters; None if no path matches."""
        for average in _states(state, optax.EmaState):
            if first := _matching(average.ema, pattern):
                mean = optax.tree.bias_correction(optax.tree.cast(first, jnp.float32), self.momentum, average.count)
                # Of gradients that were divided by the root of their second moment: the mean of their squares is 1.
                return Moments(self.momentum, average.count, mean, jnp.float32(optax.tree.size(first)))
        return None


@dataclasses.dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum in half precision, as ViT and V-MoE are fine-tuned.

    Attributes:
        momentum: decay of the sum of gradients, stored in bfloat16.
    """

    momentum: float = 0.9

    def __post_init__(self) -> None:
        _require_decays(self, "momentum")

    def build(self) -> optax.GradientTransformation:
        """Returns the transformation from gradients to updates."""
        return optax.trace(self.momentum, accumulator_dtype=jnp.bfloat16)

    def moments(self, state: Any, pattern: str) -> None:
        """Returns None: there is no second moment."""


@dataclasses.dataclass(frozen=True)
class ParameterGroup:
    """Parameters with their own learning rate and weight decay.

    Attributes:
        pattern: regular expression that matches the whole path of a parameter.
        learning_rate_factor: multiplies the schedule's learning rate, but not weight decay.
        weight_decay_factor: multiplies the optimizer's weight decay.
    """

    pattern: str
    learning_rate_factor: float = 1.0
    weight_decay_factor: float = 1.0

    def __post_init__(self) -> None:
        require_at_least(0, self, "learning_rate_factor", "weight_decay_factor")
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise FieldError(self, "pattern", f"{self.pattern!r} is not a regular expression: {error}") from error


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Gradient clipping, then an update rule, then weight decay and learning rates.

    Attributes:
        rule: gradients to updates.
        weight_decay: see the module's docstring.
        clip_norm: maximum global norm of the gradient of all parameters; None does not clip.
        groups: a parameter belongs to the first group whose pattern matches; without a group its factors are those of
            its module, such as ``head.covariance.learning_rate_factor``, or 1.
        layer_decay: factor of the learning rate from a layer to the one below it; the head has the factor 1.
    """

    rule: AdamW | Adafactor | SGD = AdamW()
    weight_decay: float = 1e-4
    clip_norm: float | None = 1.0
    groups: tuple[ParameterGroup, ...] = ()
    layer_decay: float = 1.0

    def __post_init__(self) -> None:
        require_at_least(0, self, "weight_decay", "layer_decay")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise FieldError(self, "clip_norm", f"{self.clip_norm} must be more than 0; None does not clip")

    def build(
        self,
        schedule: Schedule,
        run: RunLength,
        layers_above: Callable[[Params], Params] | None = None,
        learning_rates: tuple[ParameterGroup, ...] = (),
        late: Mapping[str, int] | None = None,
    ) -> optax.GradientTransformationExtraArgs:
        """Returns the optimizer for a run; its updates take the number of the step as ``train_step``.

        Args:
            schedule: the learning rate.
            run: the length of the run.
            layers_above: trainable parameters to the number of layers between each and the output, see
                `lit_het.tasks.base.Task`; needed for ``layer_decay``.
            learning_rates: groups of the task, for parameters that belong to none of this optimizer.
            late: parts of the parameters, by the first names of their paths, with the step from which they are trained.

        Raises:
            UserError: the schedule does not fit the run; at initialization, a group has no parameter.
        """
        late = late or {}

        def init(params: Params) -> optax.EmptyState:
            self._check_groups(params)
            return optax.EmptyState()

        def update(updates: Any, state: optax.EmptyState, params: Any = None) -> tuple[Any, optax.EmptyState]:
            factors = self._factors(params, layers_above, learning_rates)
            decays = self._decays(params, schedule.learning_rate)
            return jax.tree.map(_scaled_and_decayed, updates, params, factors, decays), state

        rule = self.rule.build()
        scaling = optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]
        return optax.chain(
            # Clipped first: the moments must not see a gradient that is clipped later.
            optax.identity() if self.clip_norm is None else optax.clip_by_global_norm(self.clip_norm),
            _beginning(rule, late) if late else rule,
            scaling,
            # Weight decay would shrink parameters that are not trained yet.
            *([_held_back(late)] if late else []),
            optax.scale_by_learning_rate(schedule.build(run)),
        )

    def signal_to_noise(self, state: Any, pattern: str) -> Float[Array, ""] | None:
        """Estimates ``|E g|² / tr Var g`` of the gradients g of some parameters from the moments of the update rule.

        The corrected average ``m = (1 - β) / (1 - β^t) Σ_k β^k g_k`` of t independent gradients has the share
        ``f = (1 - β) (1 + β^t) / ((1 + β) (1 - β^t))`` of their variance. So with ``ρ = |m|² / E |g|²`` the ratio is
        ``(ρ - f) / (1 - ρ)``. Around 0, where an estimate may be negative, the parameters make a random walk. Gradients
        of Adafactor are those divided by the root of their second moment.

        Args:
            state: of the optimizer that `build` returns.
            pattern: regular expression that matches the whole paths of the parameters.

        Returns:
            The ratio; None if no parameter matches, or the rule has no second moment.
        """
        moments = self.rule.moments(state, pattern)
        if moments is None:
            return None
        rho = optax.tree.norm(moments.mean, squared=True) / moments.square
        rest = moments.decay**moments.steps
        share = (1 - moments.decay) * (1 + rest) / ((1 + moments.decay) * (1 - rest))
        return (rho - share) / (1 - rho)

    def _factors(
        self,
        params: Params,
        layers_above: Callable[[Params], Params] | None,
        learning_rates: tuple[ParameterGroup, ...],
    ) -> Params:
        """Returns learning-rate factors: a number per parameter, or ``[layers 1 ...]`` for stacked layers."""
        factors: dict[str, Any] = {
            path: self._group(path, learning_rates).learning_rate_factor for path in parameters.flatten(params)
        }
        if self.layer_decay != 1.0:
            assert layers_above is not None
            above = parameters.flatten(layers_above(params))
            factors = {path: factor * self.layer_decay ** above[path] for path, factor in factors.items()}
        return parameters.unflatten(factors)

    def _decays(self, params: Params, peak: float) -> Params:
        """Returns the fraction of each parameter that is added to its update."""
        # Divided by the peak, as the learning rate multiplies it later: at the peak a step removes ``weight_decay``.
        return parameters.unflatten(
            {
                path: self.weight_decay / peak * self._group(path).weight_decay_factor
                if re.fullmatch(DECAYED, path)
                else 0.0
                for path in parameters.flatten(params)
            }
        )

    def _group(self, path: str, others: tuple[ParameterGroup, ...] = ()) -> ParameterGroup:
        groups = (*self.groups, *others, ParameterGroup(".*"))
        return next(group for group in groups if re.fullmatch(group.pattern, path))

    def _check_groups(self, params: Params) -> None:
        deciding = [self._group(path) for path in parameters.flatten(params)]
        for group in self.groups:
            if group not in deciding:
                tops = ", ".join(sorted(params))
                raise UserError(
                    f"optimizer.groups: the pattern {group.pattern!r} matches no trained parameter, or only parameters "
                    f"of earlier groups; their paths begin with {tops}"
                )


def _beginning(rule: optax.GradientTransformation, late: Mapping[str, int]) -> optax.GradientTransformationExtraArgs:
    """Returns an update rule whose moments of late parts begin with their training.

    Moments of gradients of zero before it would make the first updates several times too large: the correction of
    their start at zero would have worn off.
    """

    def begun(start: int) -> Callable[..., Array]:
        # By the step of training, not by a count of updates: skipped steps count, too.
        return lambda _, *, train_step, **__: train_step >= start

    rules = {
        part: optax.conditionally_mask(rule, begun(start), forward_extra_args=True) for part, start in late.items()
    }
    return optax.partition({**rules, "": rule}, lambda params: {part: part if part in late else "" for part in params})


def _held_back(late: Mapping[str, int]) -> optax.GradientTransformationExtraArgs:
    """Returns a transformation of updates to zero, of late parts before their training."""

    def update(updates: Any, state: optax.EmptyState, params: Any = None, *, train_step: Array, **_: Any) -> Any:
        held = {
            part: jax.tree.map(lambda x, begun=train_step >= start: x * begun, updates[part])
            for part, start in late.items()
        }
        return {**updates, **held}, state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)  # pyright: ignore[reportArgumentType]


def _states(state: Any, kind: type[Any]) -> list[Any]:
    """Returns the states of transformations of a kind, wherever they are in that of an optimizer."""
    found = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kind))
    return [node for node in found if isinstance(node, kind)]


def _matching(params: Params, pattern: str) -> dict[str, Any]:
    found = {path: value for path, value in parameters.flatten(params).items() if re.fullmatch(pattern, path)}
    # The state of one part has placeholders for the parameters of others.
    return {path: value for path, value in found.items() if not isinstance(value, optax.MaskedNode)}


def _scaled_and_decayed(update: Any, param: Any, factor: Any, decay: float) -> Any:
    # No product with 1 and no sum with 0: updates of plain optimizers stay equal to big_vision's bit by bit.
    scaled = update if isinstance(factor, float) and factor == 1.0 else update * factor
    return scaled + decay * param if decay else scaled
