"""Moves tokens to their experts and the weighted outputs back, in several ways with the same result."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from lit_het import sharding
from lit_het.towers import routing
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.layers import Mlp
from lit_het.towers.routing import Choices

DISPATCH = "one_hot_dispatch"
"""The scope, in traced programs, of the products with one-hot vectors that move tokens to experts and back."""


def numbers(config: ExpertsConfig, choices: Choices) -> Int[Array, "gm t k"]:
    """Returns the indices of choices among all E experts."""
    # Groups of the members of an ensemble alternate, see `Groups.split`.
    member = jnp.arange(choices.expert.shape[0]) % config.num_members
    found = choices.expert + (member * config.experts_per_member)[:, None, None]
    return jnp.asarray(config.members.reshape(-1))[found] if config.overlap else found


def of_members(config: ExpertsConfig, x: Array, axis: int) -> Array:
    """Returns what belongs to the experts of each member in turn: those of all members are repeated."""
    return jnp.take(x, config.members.reshape(-1), axis) if config.overlap else x


def by_products(
    config: ExpertsConfig,
    experts: Mlp,
    tokens: Float[Array, "gm t d"],
    choices: Choices,
    num_slots: int,
    key: Key[Array, ""] | None,
    *,
    apart: bool,
) -> Float[Array, "parts gm t d"]:
    """Moves tokens to slots of experts and back by products with one-hot vectors; returns their sum, or K parts."""
    _, t, d = tokens.shape
    m, e = config.num_members, config.experts_per_member
    # Products with one-hot vectors, as in V-MoE: accelerators compute products faster than gathers and scatters, and
    # their gradients are products too.
    place, *weights = (
        x.astype(tokens.dtype).reshape(-1, m, t, e, num_slots)
        for x in routing.places(choices, e, num_slots, apart=apart)
    )
    with jax.named_scope(DISPATCH):
        slots = jnp.einsum("gmtd,gmtec->megcd", tokens.reshape(-1, m, t, d), place)
    # Tokens travel to the devices of their experts; parameters of experts stay where they are.
    slots = sharding.to_experts(slots.reshape(m * e, *slots.shape[2:]))
    graph, params = nnx.split(experts)
    params = jax.tree.map(lambda x: of_members(config, x, axis=0), params)
    keys = None if key is None else jax.random.split(key, m * e)

    # Each expert sees the slots of all groups at once: few large products instead of many small ones.
    def expert(params: nnx.State, x: Float[Array, "g c d"], key: Key[Array, ""] | None) -> Float[Array, "g c d"]:
        drop = _dropout(config.dropout_rate, key)
        return nnx.merge(graph, params)(x.reshape(-1, d), drop=drop).reshape(x.shape)

    outputs = sharding.from_experts(jax.vmap(expert)(params, slots, keys))
    outputs = outputs.reshape(m, e, *outputs.shape[1:])
    with jax.named_scope(DISPATCH):
        mixed = [jnp.einsum("megcd,gmtec->gmtd", outputs, weight) for weight in weights]
    return jnp.stack(mixed).reshape(-1, *tokens.shape)


def by_rows(
    config: ExpertsConfig,
    experts: Mlp,
    tokens: Float[Array, "gm t d"],
    choices: Choices,
    key: Key[Array, ""] | None,
    *,
    apart: bool,
) -> Float[Array, "parts gm t d"]:
    """Applies the chosen experts to rows of tokens, of which each device has its own; returns their sum, or K parts."""
    graph, params = nnx.split(experts)
    k, outputs = config.num_selected, _by_sorting if config.rank_one is None else _with_shared_kernels

    # Per device: sorting the tokens of all devices would move them between devices.
    def weighted(rows: Any, shared: Any, axes: tuple[str, ...]) -> Float[Array, "n _ d"]:
        (tokens, expert, gate), (params, key) = rows, shared
        if key is not None and axes:
            # Every device needs its own dropout mask.
            key = jax.random.fold_in(key, jax.lax.axis_index(axes))
        found = outputs(nnx.merge(graph, params), tokens, expert, _dropout(config.dropout_rate, key))
        by_choice = found.reshape(len(tokens), k, -1) * gate[..., None].astype(found.dtype)
        return by_choice if apart else jnp.sum(by_choice, axis=1, keepdims=True)

    chosen = (x.reshape(-1, k) for x in (numbers(config, choices), choices.gate))
    mixed = sharding.map_shards(weighted, (tokens.reshape(-1, tokens.shape[-1]), *chosen), (params, key))
    return jnp.moveaxis(mixed.reshape(-1, *mixed.shape[2:]), 1, 0).reshape(-1, *tokens.shape)


def _by_sorting(
    experts: Mlp, tokens: Float[Array, "n d"], expert: Int[Array, "n k"], drop: Callable[[Array, int], Array]
) -> Float[Array, "nk d"]:
    """Returns the outputs of experts; rows are sorted by expert, so that each multiplies adjacent ones."""
    k = expert.shape[1]
    order = jnp.argsort(expert.reshape(-1))
    expert = expert.reshape(-1)[order]
    num_experts = experts.up.kernel.shape[0]
    sizes = jnp.bincount(expert, length=num_experts).astype(jnp.int32)

    def apply(layer: nnx.Linear, x: Float[Array, "n i"]) -> Float[Array, "n o"]:
        assert layer.bias is not None
        x, kernel, bias = layer.promote_dtype((x, layer.kernel[...], layer.bias[...]), dtype=layer.dtype)
        # `Mlp` sees stacked kernels here: row i is multiplied by the kernel of its expert, of which there are sizes[e]
        # rows.
        return jax.lax.ragged_dot(x, kernel, sizes) + bias[expert]

    # Choice j of token i is row i * k + j before sorting, so ``order // k`` is the token of every sorted row.
    found = experts(tokens[order // k], apply, drop)
    return jnp.zeros_like(found).at[order].set(found)


def _with_shared_kernels(
    experts: Mlp, tokens: Float[Array, "n d"], expert: Int[Array, "n k"], drop: Callable[[Array, int], Array]
) -> Float[Array, "nk d"]:
    """Returns the outputs of experts of rank one, which need no order: their kernels are the same."""
    rows = jnp.repeat(tokens, expert.shape[1], axis=0)
    return experts(rows, lambda layer, x: layer(x, expert.reshape(-1)), drop)


def _dropout(rate: float, key: Key[Array, ""] | None) -> Callable[[Array, int], Array]:
    def drop(x: Array, number: int) -> Array:
        if key is None or rate == 0:
            return x
        # Inverted dropout: survivors are scaled here, so that evaluation needs no factor.
        survives = jax.random.bernoulli(jax.random.fold_in(key, number), 1 - rate, x.shape)
        return jnp.where(survives, x / (1 - rate), 0)

    return drop
