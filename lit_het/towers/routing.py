"""Routing of tokens to experts: gates, auxiliary losses, capacity and slots (V-MoE; e3 Sec. 2.1, App. C).

Dimensions: ``g`` groups that are routed independently, ``t`` tokens per group, ``e`` experts, ``k`` selected experts
per token, ``c`` slots per expert. An efficient ensemble routes each member's tokens to the member's own experts: it has
more groups and fewer experts.

Tokens that are not ``present`` are padding of texts and groups: they take no slots and are not part of any loss.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lit_het import sharding

# Slots come in multiples of this many (V-MoE).
SLOT_MULTIPLE = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gates:
    """Gates and auxiliary losses of a batch of groups.

    Attributes:
        probability: softmax of the (noisy) logits; never renormalised over the chosen experts.
        importance_loss, load_loss: squared coefficients of variation over experts, mean over groups.
    """

    probability: Float[Array, "g t e"]
    importance_loss: Float[Array, ""]
    load_loss: Float[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Choices:
    """The selected experts and slots of tokens.

    Attributes:
        expert: experts of each token by descending gate; of equal gates the lower index comes first.
        slot: position among the tokens of the expert; the token is dropped if it is not below the capacity.
        gate: weight of the expert's output.
    """

    expert: Int[Array, "g t k"]
    slot: Int[Array, "g t k"]
    gate: Float[Array, "g t k"]


def route(
    logits: Float[Array, "g t e"],
    num_selected: int,
    noise: Float[Array, "g t e"] | None,
    noise_scale: float,
    present: Bool[Array, "g t"] | None = None,
) -> Gates:
    """Returns the gates for a router's logits.

    ``gates = softmax(logits + σ ε)`` with ``σ = noise_scale / e``; the importance loss is ``CV²(Σ_t softmax(logits))``,
    the load loss ``CV²(Σ_t Φ((logits - T) / σ))``, where T is a token's k-th largest noisy logit (Riquelme et al.
    2021, App. A). Without noise there is no load loss.

    Args:
        logits: of every token and expert, in float32.
        num_selected: k.
        noise: standard normals, or None.
        noise_scale: as in ``σ`` above.
        present: False marks padding; None for no padding.
    """
    where = None if present is None else present[..., None]
    clean = jax.nn.softmax(logits, axis=-1)
    importance_loss = jnp.mean(_squared_variation(jnp.sum(clean, axis=1, where=where)))
    if noise is None:
        return Gates(clean, importance_loss, jnp.zeros(()))
    scale = noise_scale / logits.shape[-1]
    noisy = logits + scale * noise
    threshold = _largest(noisy, num_selected)[0][..., -1:]
    # The threshold counts as a constant of the noise: the chance is that of selecting the expert again if only its own
    # noise were drawn anew (V-MoE App. A). It is smooth in the logits, unlike the number of selected tokens.
    chance = jax.scipy.stats.norm.cdf((logits - threshold) / scale)
    load_loss = jnp.mean(_squared_variation(jnp.sum(chance, axis=1, where=where)))
    return Gates(jax.nn.softmax(noisy, axis=-1), importance_loss, load_loss)


def _largest(x: Float[Array, "g t e"], k: int) -> tuple[Float[Array, "g t k"], Int[Array, "g t k"]]:
    """Returns the k largest values of each token and their indices."""
    # Per device: the compiler does not split top_k, and would gather all groups on every device.
    found = sharding.map_shards(lambda x, *_: jax.lax.top_k(x, k), x, ())
    values, places = (part.reshape(*x.shape[:2], k) for part in found)
    return values, places


def _squared_variation(x: Float[Array, "g e"]) -> Float[Array, " g"]:
    # By the variance, as the gradient of a standard deviation at 0 is infinite. A group of padding only has the mean 0.
    mean = jnp.mean(x, axis=-1)
    return jnp.var(x, axis=-1) / jnp.where(mean > 0, mean, 1.0) ** 2


def capacity(num_tokens: int, num_selected: int, num_experts: int, factor: float) -> int:
    """Returns the number of slots per expert: ``ceil(t k f / e)``, rounded up to a multiple of 4."""
    slots = math.ceil(num_tokens * num_selected * factor / num_experts)
    return -(-slots // SLOT_MULTIPLE) * SLOT_MULTIPLE


def select(
    probability: Float[Array, "g t e"],
    num_selected: int,
    *,
    batch_priority: bool = False,
    present: Bool[Array, "g t"] | None = None,
) -> Choices:
    """Returns each token's experts and slots; padding has the gate 0 and no slot.

    All first choices get slots before any second choice; within a choice in the order of tokens, or with batch
    priority by descending largest gate (V-MoE Sec. 4.1).
    """
    # Gates are not renormalised over the selected experts: with K = 1 they would always be 1, and the router would get
    # no gradient from the task.
    gate, expert = _largest(probability, num_selected)
    present = jnp.ones(gate.shape[:2], bool) if present is None else present
    gate = jnp.where(present[..., None], gate, 0.0)
    num_experts = probability.shape[-1]
    if not batch_priority:
        return Choices(expert, _slots(expert, present, num_experts), gate)
    # A stable sort, so that ties are decided in the same way on every kind of device.
    order = jnp.argsort(-gate[:, :, 0], axis=1, stable=True)
    in_order = jnp.take_along_axis(expert, order[:, :, None], axis=1)
    slots = _slots(in_order, jnp.take_along_axis(present, order, axis=1), num_experts)
    # The permutation that undoes ``order``.
    back = jnp.argsort(order, axis=1)
    return Choices(expert, jnp.take_along_axis(slots, back[:, :, None], axis=1), gate)


def _slots(expert: Int[Array, "g t k"], present: Bool[Array, "g t"], num_experts: int) -> Int[Array, "g t k"]:
    """Returns the number of earlier choices of the same expert, ordered by choice, then by token."""
    g, t, k = expert.shape
    # Choices come before tokens: the first choice of the last token is served before the second choice of the first
    # one.
    in_turn = expert.swapaxes(1, 2).reshape(g, k * t)
    chosen = jax.nn.one_hot(in_turn, num_experts, dtype=jnp.int32) * jnp.tile(present, (1, k))[..., None]
    taken = jnp.cumsum(chosen, axis=1)
    slot = jnp.take_along_axis(taken, in_turn[:, :, None], axis=2)[:, :, 0] - 1
    # Padding gets the slot t, beyond any capacity: no expert has more slots than tokens.
    return jnp.where(present[..., None], slot.reshape(g, k, t).swapaxes(1, 2), t)


def places(
    choices: Choices, num_experts: int, num_slots: int, *, apart: bool = False
) -> tuple[Float[Array, "g t e c"], ...]:
    """Returns one-hot vectors of tokens' slots, and the same weighted by the gates: their sum, or each choice apart."""
    # One-hot vectors of slots beyond the capacity are zero, which drops the token.
    each = [
        jax.nn.one_hot(choices.expert[..., k], num_experts)[..., None]
        * jax.nn.one_hot(choices.slot[..., k], num_slots)[..., None, :]
        for k in range(choices.expert.shape[-1])
    ]
    weighted = [choices.gate[..., k][..., None, None] * place for k, place in enumerate(each)]
    return functools.reduce(jnp.add, each), *(weighted if apart else [functools.reduce(jnp.add, weighted)])
