"""The work of optimizers: their rules, learning rates and weight decay, and the noise of their gradients."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.training import optax_table
from lit_het.training.durations import RunLength
from lit_het.training.optimizers_config import SGD, Adafactor, AdamW, Optax, Optimizer, ParameterGroup
from lit_het.training.schedules import Schedule
from lit_het.types import Params

# Weight decay acts on kernels only, as in big_vision: not on token embeddings, biases, norms, positions, temperatures.
DECAYED = r".*/kernel"


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


class Rule(NamedTuple):
    """An update rule.

    Attributes:
        transformation: from gradients to updates.
        moments: its state and a pattern to the moments of the gradient of the parameters whose paths match; None if no
            path matches, or the mean square is not known.
    """

    transformation: optax.GradientTransformation
    moments: Callable[[Any, str], Moments | None]


def adamw(config: AdamW) -> Rule:
    """Returns the rule."""

    def moments(state: Any, pattern: str) -> Moments | None:
        for adam in _states(state, optax.ScaleByAdamState):
            first, second = (_matching(moment, pattern) for moment in (adam.mu, adam.nu))
            if first:
                mean = optax.tree.bias_correction(first, config.first_decay, adam.count)
                square = optax.tree.sum(optax.tree.bias_correction(second, config.second_decay, adam.count))
                return Moments(config.first_decay, adam.count, mean, square)
        return None

    # Without optax's own weight decay: it is added for all rules, scaled by the schedule.
    return Rule(optax.scale_by_adam(b1=config.first_decay, b2=config.second_decay, eps=config.epsilon), moments)


def adafactor(config: Adafactor) -> Rule:
    """Returns the rule."""

    # optax has no cap on β2: without one, the second moment of a long run would hardly move.
    def second_decay(step: ArrayLike, exponent: ArrayLike) -> ArrayLike:
        # optax counts steps from 0, the formula from 1.
        return jnp.minimum(config.second_decay_cap, 1.0 - (jnp.asarray(step) + 1.0) ** -jnp.asarray(exponent))

    def moments(state: Any, pattern: str) -> Moments | None:
        # The mean square of what is clipped is not known.
        for average in _states(state, optax.EmaState) if config.clip_rms is None else ():
            if first := _matching(average.ema, pattern):
                mean = optax.tree.bias_correction(optax.tree.cast(first, jnp.float32), config.momentum, average.count)
                # Of gradients that were divided by the root of their second moment: the mean of their squares is 1.
                return Moments(config.momentum, average.count, mean, jnp.float32(optax.tree.size(first)))
        return None

    transformation = optax.chain(
        # Both together take half the memory of the parameters; Adam's moments take twice theirs.
        optax.scale_by_factored_rms(decay_rate=0.8, min_dim_size_to_factor=32, decay_rate_fn=second_decay),
        *([] if config.clip_rms is None else [_clip_by_rms(config.clip_rms)]),
        optax.ema(config.momentum, debias=False, accumulator_dtype=jnp.dtype(config.momentum_type)),
    )
    return Rule(transformation, moments)


def _clip_by_rms(limit: float) -> optax.GradientTransformation:
    """Returns `optax.clip_by_block_rms`, for which each block of a stack is an array of its own."""
    clip = optax.clip_by_block_rms(limit)

    def clipped(path: Any, update: Array) -> Any:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return (jax.vmap(clip.update) if parameters.is_stacked(name) else clip.update)(update, optax.EmptyState())[0]

    def update(updates: Any, state: optax.EmptyState, params: Any = None) -> tuple[Any, optax.EmptyState]:
        return jax.tree_util.tree_map_with_path(clipped, updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)  # pyright: ignore[reportArgumentType]


def sgd(config: SGD) -> Rule:
    """Returns the rule."""
    return Rule(optax.trace(config.momentum, accumulator_dtype=jnp.bfloat16), lambda *_: None)


def of_optax(config: Optax) -> Rule:
    """Returns the rule of a transformation of optax."""
    options = optax_table.options(config)
    if config.name == "scale_by_muon":
        # One transformation of kernels and another of the rest. Both subtract, and so do learning rates here.
        whole = optax.contrib.muon(1.0, muon_weight_dimension_numbers=_matrices, **options)
        return Rule(optax.chain(whole, optax.scale(-1.0)), lambda *_: None)
    make = getattr(optax, config.name, None) or getattr(optax.contrib, config.name)
    return Rule(make(**options), lambda *_: None)


def _matrices(params: Any) -> Any:
    """Returns where the kernels of a tree have their inputs and outputs; None for parameters that are none."""

    def axes(path: Any, array: Array) -> optax.contrib.MuonDimensionNumbers | None:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        # Axes before the last two are blocks, experts or, of convolutions, places: a matrix of each.
        is_matrix = re.fullmatch(DECAYED, name) and array.ndim - parameters.is_stacked(name) >= 2
        return optax.contrib.MuonDimensionNumbers(-2, -1) if is_matrix else None

    return jax.tree_util.tree_map_with_path(axes, params)


def build(
    config: Optimizer,
    schedule: Schedule,
    run: RunLength,
    layers_above: Callable[[Params], Params] | None,
    learning_rates: tuple[ParameterGroup, ...],
    late: Mapping[str, int],
) -> optax.GradientTransformationExtraArgs:
    """Returns what `Optimizer.build` does, of the same arguments."""

    def init(params: Params) -> optax.EmptyState:
        _check_groups(config, params)
        return optax.EmptyState()

    def update(updates: Any, state: optax.EmptyState, params: Any = None) -> tuple[Any, optax.EmptyState]:
        factors = _factors(config, params, layers_above, learning_rates)
        decays = _decays(config, params, schedule.learning_rate)
        return jax.tree.map(_scaled_and_decayed, updates, params, factors, decays), state

    rule = config.rule.build().transformation
    scaling = optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]
    return optax.chain(
        # Clipped first: the moments must not see a gradient that is clipped later.
        optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm),
        _beginning(rule, late) if late else rule,
        scaling,
        # Weight decay would shrink parameters that are not trained yet.
        *([_held_back(late)] if late else []),
        optax.scale_by_learning_rate(schedule.build(run)),
    )


def signal_to_noise(config: Optimizer, state: Any, pattern: str) -> Float[Array, ""] | None:
    """Estimates ``|E g|² / tr Var g`` of the gradients g of some parameters from the moments of the update rule.

    The corrected average ``m = (1 - β) / (1 - β^t) Σ_k β^k g_k`` of t independent gradients has the share
    ``f = (1 - β) (1 + β^t) / ((1 + β) (1 - β^t))`` of their variance. So with ``ρ = |m|² / E |g|²`` the ratio is
    ``(ρ - f) / (1 - ρ)``. Around 0, where an estimate may be negative, the parameters make a random walk. Gradients
    of Adafactor are those divided by the root of their second moment.

    Args:
        config: of the optimizer.
        state: of the optimizer that `build` returns.
        pattern: regular expression that matches the whole paths of the parameters.

    Returns:
        The ratio; None if no parameter matches, or the rule has no second moment, or clips updates.
    """
    moments = config.rule.build().moments(state, pattern)
    if moments is None:
        return None
    rho = optax.tree.norm(moments.mean, squared=True) / moments.square
    rest = moments.decay**moments.steps
    share = (1 - moments.decay) * (1 + rest) / ((1 + moments.decay) * (1 - rest))
    return (rho - share) / (1 - rho)


def _factors(
    config: Optimizer,
    params: Params,
    layers_above: Callable[[Params], Params] | None,
    learning_rates: tuple[ParameterGroup, ...],
) -> Params:
    """Returns learning-rate factors: a number per parameter, or ``[layers 1 ...]`` for stacked layers."""
    factors: dict[str, Any] = {
        path: _group(config, path, learning_rates).learning_rate_factor for path in parameters.flatten(params)
    }
    if config.layer_decay != 1.0:
        assert layers_above is not None
        above = parameters.flatten(layers_above(params))
        factors = {path: factor * config.layer_decay ** above[path] for path, factor in factors.items()}
    return parameters.unflatten(factors)


def _decays(config: Optimizer, params: Params, peak: float) -> Params:
    """Returns the fraction of each parameter that is added to its update."""
    # Divided by the peak, as the learning rate multiplies it later: at the peak a step removes ``weight_decay``.
    return parameters.unflatten(
        {
            path: config.weight_decay / peak * _group(config, path).weight_decay_factor
            if re.fullmatch(DECAYED, path)
            else 0.0
            for path in parameters.flatten(params)
        }
    )


def _group(config: Optimizer, path: str, others: tuple[ParameterGroup, ...] = ()) -> ParameterGroup:
    groups = (*config.groups, *others, ParameterGroup(".*"))
    return next(group for group in groups if re.fullmatch(group.pattern, path))


def _check_groups(config: Optimizer, params: Params) -> None:
    deciding = [_group(config, path) for path in parameters.flatten(params)]
    for group in config.groups:
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
