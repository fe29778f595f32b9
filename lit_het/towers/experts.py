"""A mixture of experts in place of an MLP (V-MoE, Riquelme et al. 2021), also partitioned for an ensemble (e3)."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Key

from lit_het.towers import dispatch, routing
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.groups import group_images
from lit_het.towers.layers import GATES, Mlp
from lit_het.towers.rank_one import RankOneLinear
from lit_het.towers.routing import Choices, Gates


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ExpertKeys:
    """Random keys of one block, or of several.

    Attributes:
        noise: of the router, in training; without it routing is deterministic, with the capacity of evaluation.
        dropout: of the experts; None for no dropout.
    """

    noise: Key[Array, "*blocks"] | None = None
    dropout: Key[Array, "*blocks"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
    """Losses and metrics of the routing of one block, or of several.

    Attributes:
        importance_loss, load_loss: means over groups and members.
        dropped: fraction of (token, choice) without a slot.
        busiest: tokens of the busiest expert, divided by the mean over experts.
    """

    importance_loss: Float[Array, "*blocks"]
    load_loss: Float[Array, "*blocks"]
    dropped: Float[Array, "*blocks"]
    busiest: Float[Array, "*blocks"]


class Experts(nnx.Module):
    """A router and E MLPs; an ensemble has the same parameters as a single model (e3 Sec. 4.1)."""

    def __init__(self, config: ExpertsConfig, width: int, build_mlp: Callable[..., Mlp], rngs: nnx.Rngs):
        self.config = config
        init, is_routed = nnx.initializers.normal(0.02), config.rank_one is None or config.experts_per_member > 1
        # Always float32: rounding in bfloat16 could change which experts are selected.
        router = nnx.Linear(width, config.num_experts, use_bias=False, kernel_init=init, rngs=rngs)
        self.router = router if is_routed else None
        if config.rank_one is not None:
            self.rank_one = build_mlp(rngs, functools.partial(RankOneLinear, config.rank_one, config.num_experts))
            return

        # Stacked along a leading axis, so that one product computes all experts and the mesh axis ``expert`` can split
        # them.
        @nnx.split_rngs(splits=config.num_experts)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs: nnx.Rngs) -> Mlp:
            return _with_noise(build_mlp(rngs), config.initial_noise, rngs)

        self.experts = stack(rngs)

    @property
    def _mlp(self) -> Mlp:
        return self.experts if self.config.rank_one is None else self.rank_one

    def __call__(
        self,
        x: Float[Array, "bn d"],
        b: int,
        keys: ExpertKeys,
        present: Bool[Array, "b n"] | None = None,
        *,
        apart: bool = False,
    ) -> tuple[Float[Array, "_ d"], Routing]:
        """Returns the weighted sum of the selected experts' outputs, and losses and metrics of routing.

        Args:
            x: tokens of ``b`` examples; the copies of an image for the members of an ensemble are adjacent.
            b: number of examples.
            keys: random keys.
            present: False marks padding, which no expert processes; None for no padding.
            apart: whether the weighted outputs are not summed: K copies of every example, adjacent.
        """
        config = self.config
        if config.tiled:
            return self._mix(x, b, keys, present, apart=apart)
        # The same tokens for the experts of every member, and the sum of what they return.
        m, n = config.num_members, x.shape[0] // b
        copies = jnp.repeat(x.reshape(b, n, -1), m, axis=0).reshape(m * b * n, -1)
        mixed, routing = self._mix(copies, m * b, keys, None if present is None else jnp.repeat(present, m, axis=0))
        return mixed.reshape(b, m, n, -1).sum(axis=1).reshape(x.shape), routing

    def _mix(
        self,
        x: Float[Array, "bn d"],
        b: int,
        keys: ExpertKeys,
        present: Bool[Array, "b n"] | None,
        *,
        apart: bool = False,
    ) -> tuple[Float[Array, "_ d"], Routing]:
        config = self.config
        # Routing sees one group at a time. Capacity is then a constant of the compiled program, and the one-hot arrays
        # grow linearly with the batch instead of quadratically.
        groups = group_images(b, x.shape[0] // b, config.num_members, config.tokens_per_group)
        tokens = groups.split(x)
        if groups.is_filled_up or present is not None:
            present = jnp.ones((b, groups.tokens), bool) if present is None else present
            present = groups.split(present.reshape(-1, 1))[..., 0]
        gates = self._gates(tokens, present, keys.noise)
        choices = routing.select(
            gates.probability, config.num_selected, batch_priority=config.batch_priority, present=present
        )
        tokens, num_slots = tokens.astype(self._mlp.up.dtype), tokens.shape[1]
        if config.rank_one is not None or config.dispatch == "ragged":
            mixed = dispatch.by_rows(config, self._mlp, tokens, choices, keys.dropout, apart=apart)
        else:
            # Training drops tokens to save time; evaluation has enough slots to drop hardly any.
            factor = config.eval_capacity_factor if keys.noise is None else config.capacity_factor
            slots = routing.capacity(num_slots, config.num_selected, config.experts_per_member, factor)
            # A token selects an expert at most once.
            num_slots = min(slots, num_slots)
            mixed = dispatch.by_products(config, self._mlp, tokens, choices, num_slots, keys.dropout, apart=apart)
        metrics = self._metrics(choices, present, num_slots)
        by_choice = jnp.stack([groups.join(part).reshape(b, -1, x.shape[1]) for part in mixed], axis=1)
        return by_choice.reshape(-1, x.shape[1]), Routing(gates.importance_loss, gates.load_loss, *metrics)

    def _gates(
        self, tokens: Float[Array, "gm t d"], present: Bool[Array, "gm t"] | None, key: Key[Array, ""] | None
    ) -> Gates:
        config, (gm, t, d) = self.config, tokens.shape
        if self.router is None:
            # The only expert of a member has the gate 1.
            return routing.route(jnp.zeros((gm, t, 1)), 1, None, 0.0, present)
        kernel = dispatch.of_members(config, self.router.kernel[...], axis=1)
        kernel = kernel.reshape(d, config.num_members, config.experts_per_member)
        # Each member of an ensemble has its own columns of the router's kernel, so that its tokens reach only its own
        # experts (e3 Sec. 4.1). The authors route all members together with gates of zero: docs/paper_map.md, 27.
        by_member = tokens.astype(jnp.float32).reshape(-1, config.num_members, t, d)
        logits = jnp.einsum("gmtd,dme->gmte", by_member, kernel).reshape(gm, t, -1)
        noise = jax.random.normal(key, logits.shape) if key is not None and config.noise_scale else None
        return routing.route(logits, config.num_selected, noise, config.noise_scale, present)

    def _metrics(
        self, choices: Choices, present: Bool[Array, "gm t"] | None, num_slots: int
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Returns the fraction of dropped tokens and the load of the busiest expert."""
        weight = jnp.ones(choices.slot.shape)
        if present is not None:
            weight *= present[..., None]
        # At least 1: a batch may consist of padding only.
        total = jnp.maximum(jnp.sum(weight), 1.0)
        dropped = jnp.sum(weight * (choices.slot >= num_slots)) / total
        taken = jnp.bincount(
            dispatch.numbers(self.config, choices).reshape(-1), weight.reshape(-1), length=self.config.num_experts
        )
        return dropped, jnp.max(taken) * self.config.num_experts / total


def _with_noise(mlp: Mlp, scale: float, rngs: nnx.Rngs) -> Mlp:
    layers = [mlp.up, mlp.down, *([mlp.gate] if mlp.activation in GATES else [])]
    for layer in layers if scale else ():
        layer.kernel[...] += scale * jax.random.normal(rngs.params(), layer.kernel.shape)
    return mlp
