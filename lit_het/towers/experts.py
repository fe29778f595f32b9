"""A mixture of experts in place of an MLP (V-MoE, Riquelme et al. 2021), also partitioned for an ensemble (e3)."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from lit_het import sharding
from lit_het.errors import UserError, require_at_least, require_choice
from lit_het.towers import routing
from lit_het.towers.layers import Mlp
from lit_het.towers.routing import Choices, Gates

Dispatch: TypeAlias = Literal["einsum", "ragged"]

DISPATCH = "one_hot_dispatch"
"""The scope, in traced programs, of the products with one-hot vectors that move tokens to experts and back."""


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """Which blocks of an encoder have experts, and how tokens are routed to them.

    Attributes:
        num_experts: E.
        num_selected: K, number of experts per token (e3: per token of each member).
        num_blocks: number of blocks with experts, the last odd ones counting from 0 ("last-n"); None for every odd one.
        num_members: M; with more than one the tower is an efficient ensemble (e3): the batch is repeated M times before
            the first block with experts, and each copy has its own E / M experts.
        capacity_factor: slots of all experts in training, per selected expert of a token.
        eval_capacity_factor: the same in evaluation and in a locked tower.
        batch_priority: whether tokens with larger gates get slots first, instead of earlier tokens.
        dispatch: "einsum" has a capacity, and can split experts over devices; "ragged" sorts tokens by expert, has no
            capacity, so that no token is dropped, and gathers all experts on each device.
        noise_scale: the router's noise has the standard deviation noise_scale M / E; 0 means no noise and no load loss.
        auxiliary_weight: weight of the mean of importance and load loss.
        dropout_rate: dropout of the experts' hidden layer and output, in training.
        tokens_per_group: maximum number of tokens that are routed together; a group has whole images.
        blocks: numbers of the blocks with experts, counting from 0, in place of ``num_blocks``; None for the last odd.

    Raises:
        UserError: inconsistent numbers, or an unknown dispatch.
    """

    num_experts: int = 32
    num_selected: int = 2
    num_blocks: int | None = 2
    num_members: int = 1
    capacity_factor: float = 1.05
    eval_capacity_factor: float = 8.0
    batch_priority: bool = False
    dispatch: Dispatch = "einsum"
    noise_scale: float = 1.0
    auxiliary_weight: float = 0.01
    dropout_rate: float = 0.0
    tokens_per_group: int = 1024
    blocks: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        require_at_least(1, self, "num_experts", "num_selected", "num_members", "tokens_per_group")
        require_at_least(0, self, "noise_scale", "auxiliary_weight", "dropout_rate")
        if self.dropout_rate >= 1:
            raise UserError(f"ExpertsConfig: dropout_rate = {self.dropout_rate} must be below 1")
        require_choice(self, "dispatch")
        if self.num_experts % self.num_members:
            raise UserError(
                f"ExpertsConfig: num_experts = {self.num_experts} cannot be split in {self.num_members} members"
            )
        if self.num_selected > self.experts_per_member:
            raise UserError(
                f"ExpertsConfig: num_selected = {self.num_selected} is more than a member's "
                f"{self.experts_per_member} experts"
            )
        for field in ("capacity_factor", "eval_capacity_factor"):
            if getattr(self, field) <= 0:
                raise UserError(f"ExpertsConfig: {field} = {getattr(self, field)} must be more than 0")

    @property
    def experts_per_member(self) -> int:
        """E / M."""
        return self.num_experts // self.num_members

    def block_numbers(self, depth: int) -> tuple[int, ...]:
        """Returns the indices of the blocks with experts among ``depth`` blocks.

        Raises:
            UserError: there are fewer than ``num_blocks`` odd blocks, or ``blocks`` are not ascending numbers below the
                depth.
        """
        if self.blocks is not None:
            if not self.blocks or list(self.blocks) != sorted(set(self.blocks) & set(range(depth))):
                raise UserError(
                    f"ExpertsConfig: blocks = {self.blocks} must be ascending numbers from 0 to {depth - 1}, for an "
                    f"encoder of {depth} blocks"
                )
            return self.blocks
        # V-MoE has experts in every other block, or only in the last n of those (e3 Sec. 2.1).
        odd = tuple(range(1, depth, 2))
        count = len(odd) if self.num_blocks is None else self.num_blocks
        if not 1 <= count <= len(odd):
            raise UserError(f"ExpertsConfig: num_blocks = {count}, but {depth} blocks have {len(odd)} odd ones")
        return odd[-count:]


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

    def __init__(self, config: ExpertsConfig, width: int, build_mlp: Callable[[nnx.Rngs], Mlp], rngs: nnx.Rngs):
        self.config = config
        init = nnx.initializers.normal(0.02)
        # Always float32: rounding in bfloat16 could change which experts are selected.
        self.router = nnx.Linear(width, config.num_experts, use_bias=False, kernel_init=init, rngs=rngs)

        # Stacked along a leading axis, so that one product computes all experts and the mesh axis ``expert`` can split
        # them.
        @nnx.split_rngs(splits=config.num_experts)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def stack(rngs: nnx.Rngs) -> Mlp:
            return build_mlp(rngs)

        self.experts = stack(rngs)

    def __call__(
        self,
        x: Float[Array, "bn d"],
        b: int,
        key: Key[Array, ""] | None,
        present: Bool[Array, "b n"] | None = None,
    ) -> tuple[Float[Array, "bn d"], Routing]:
        """Returns the weighted sum of the selected experts' outputs, and losses and metrics of routing.

        Args:
            x: tokens of ``b`` examples; the copies of an image for the members of an ensemble are adjacent.
            b: number of examples.
            key: random key of training; without it routing is deterministic, with the capacity of evaluation.
            present: False marks padding, which no expert processes; None for no padding.
        """
        config = self.config
        # Routing sees one group at a time. Capacity is then a constant of the compiled program, and the one-hot arrays
        # grow linearly with the batch instead of quadratically.
        groups = _groups(b, x.shape[0] // b, config)
        tokens = groups.split(x)
        if groups.is_filled_up or present is not None:
            present = jnp.ones((b, groups.tokens), bool) if present is None else present
            present = groups.split(present.reshape(-1, 1))[..., 0]
        noise_key, dropout_key = (None, None) if key is None else jax.random.split(key)
        gates = self._gates(tokens, present, noise_key)
        choices = routing.select(
            gates.probability, config.num_selected, batch_priority=config.batch_priority, present=present
        )
        tokens = tokens.astype(self.experts.up.dtype)
        if config.dispatch == "ragged":
            num_slots = tokens.shape[1]
            mixed = self._ragged(tokens, choices, dropout_key)
        else:
            # Training drops tokens to save time; evaluation has enough slots to drop hardly any.
            factor = config.eval_capacity_factor if key is None else config.capacity_factor
            num_slots = routing.capacity(tokens.shape[1], config.num_selected, config.experts_per_member, factor)
            # A token selects an expert at most once.
            num_slots = min(num_slots, tokens.shape[1])
            mixed = self._einsum(tokens, choices, num_slots, dropout_key)
        metrics = self._metrics(choices, present, num_slots)
        return groups.join(mixed), Routing(gates.importance_loss, gates.load_loss, *metrics)

    def _gates(
        self, tokens: Float[Array, "gm t d"], present: Bool[Array, "gm t"] | None, key: Key[Array, ""] | None
    ) -> Gates:
        config, (gm, t, d) = self.config, tokens.shape
        kernel = self.router.kernel[...].reshape(d, config.num_members, config.experts_per_member)
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
        taken = jnp.bincount(self._number(choices).reshape(-1), weight.reshape(-1), length=self.config.num_experts)
        return dropped, jnp.max(taken) * self.config.num_experts / total

    def _einsum(
        self, tokens: Float[Array, "gm t d"], choices: Choices, num_slots: int, key: Key[Array, ""] | None
    ) -> Float[Array, "gm t d"]:
        """Moves tokens to slots of experts and back by products with one-hot vectors."""
        config, (_, t, d) = self.config, tokens.shape
        m, e = config.num_members, config.experts_per_member
        # Products with one-hot vectors, as in V-MoE: accelerators compute products faster than gathers and scatters,
        # and their gradients are products too.
        place, weight = (
            x.astype(tokens.dtype).reshape(-1, m, t, e, num_slots)
            for x in routing.places(choices, config.experts_per_member, num_slots)
        )
        with jax.named_scope(DISPATCH):
            slots = jnp.einsum("gmtd,gmtec->megcd", tokens.reshape(-1, m, t, d), place)
        # Tokens travel to the devices of their experts; parameters of experts stay where they are.
        slots = sharding.to_experts(slots.reshape(config.num_experts, *slots.shape[2:]))
        graph, params = nnx.split(self.experts)
        keys = None if key is None else jax.random.split(key, config.num_experts)

        # Each expert sees the slots of all groups at once: few large products instead of many small ones.
        def expert(params: nnx.State, x: Float[Array, "g c d"], key: Key[Array, ""] | None) -> Float[Array, "g c d"]:
            drop = _dropout(config.dropout_rate, key)
            return nnx.merge(graph, params)(x.reshape(-1, d), drop=drop).reshape(x.shape)

        outputs = sharding.from_experts(jax.vmap(expert)(params, slots, keys))
        outputs = outputs.reshape(m, e, *outputs.shape[1:])
        with jax.named_scope(DISPATCH):
            mixed = jnp.einsum("megcd,gmtec->gmtd", outputs, weight)
        return mixed.reshape(tokens.shape)

    def _ragged(
        self, tokens: Float[Array, "gm t d"], choices: Choices, key: Key[Array, ""] | None
    ) -> Float[Array, "gm t d"]:
        """Sorts tokens by expert, so that each expert multiplies adjacent rows."""
        graph, params = nnx.split(self.experts)
        k, num_experts = self.config.num_selected, self.config.num_experts

        # Per device: sorting the tokens of all devices would move them between devices.
        def apply_experts(rows: Any, shared: Any, axes: tuple[str, ...]) -> Float[Array, "n d"]:
            (tokens, expert, gate), (params, key) = rows, shared
            if key is not None and axes:
                # Every device needs its own dropout mask.
                key = jax.random.fold_in(key, jax.lax.axis_index(axes))
            order = jnp.argsort(expert.reshape(-1))
            expert = expert.reshape(-1)[order]
            sizes = jnp.bincount(expert, length=num_experts).astype(jnp.int32)

            def apply(layer: nnx.Linear, x: Float[Array, "n i"]) -> Float[Array, "n o"]:
                assert layer.bias is not None
                x, kernel, bias = layer.promote_dtype((x, layer.kernel[...], layer.bias[...]), dtype=layer.dtype)
                # `Mlp` sees stacked kernels here: row i is multiplied by the kernel of its expert, of which there are
                # sizes[e] rows.
                return jax.lax.ragged_dot(x, kernel, sizes) + bias[expert]

            drop = _dropout(self.config.dropout_rate, key)
            # Choice j of token i is row i * k + j before sorting, so ``order // k`` is the token of every sorted row.
            outputs = nnx.merge(graph, params)(tokens[order // k], apply, drop)
            weighted = outputs * gate.reshape(-1)[order][:, None].astype(outputs.dtype)
            back = jnp.zeros_like(weighted).at[order].set(weighted)
            return jnp.sum(back.reshape(tokens.shape[0], k, -1), axis=1)

        flat = (
            tokens.reshape(-1, tokens.shape[-1]),
            *(x.reshape(-1, k) for x in (self._number(choices), choices.gate)),
        )
        return sharding.map_shards(apply_experts, flat, (params, key)).reshape(tokens.shape)

    def _number(self, choices: Choices) -> Int[Array, "gm t k"]:
        """Returns the indices of choices among all E experts."""
        config = self.config
        # Groups of the members of an ensemble alternate, see `_Groups.split`.
        member = jnp.arange(choices.expert.shape[0]) % config.num_members
        return choices.expert + (member * config.experts_per_member)[:, None, None]


@dataclasses.dataclass(frozen=True)
class _Groups:
    """A batch as groups of whole images, which are routed independently, for each member of an ensemble.

    Groups have equal sizes; the last one of each device is padded with zeros if necessary.

    Attributes:
        shards: number of parts of the batch, one per device; no group spans two devices.
        images: images per shard.
        groups: groups per shard.
        images_of_group: images per group.
        members: M.
        tokens: tokens per image.
    """

    shards: int
    images: int
    groups: int
    images_of_group: int
    members: int
    tokens: int

    @property
    def is_filled_up(self) -> bool:
        return self.groups * self.images_of_group > self.images

    def split(self, x: Array) -> Array:
        """Returns ``[groups*members tokens_of_group d]`` for ``[b*n d]``."""
        x = x.reshape(self.shards, self.images, self.members, self.tokens, -1)
        fill = self.groups * self.images_of_group - self.images
        x = jnp.pad(x, ((0, 0), (0, fill), (0, 0), (0, 0), (0, 0)))
        x = x.reshape(-1, self.images_of_group, self.members, self.tokens, x.shape[-1]).swapaxes(1, 2)
        return x.reshape(-1, self.images_of_group * self.tokens, x.shape[-1])

    def join(self, x: Array) -> Array:
        """The inverse of `split`."""
        x = x.reshape(-1, self.members, self.images_of_group, self.tokens, x.shape[-1]).swapaxes(1, 2)
        x = x.reshape(self.shards, -1, self.members, self.tokens, x.shape[-1])[:, : self.images]
        return x.reshape(-1, x.shape[-1])


def _groups(b: int, tokens: int, config: ExpertsConfig) -> _Groups:
    """Returns the smallest number of groups of ``b`` examples that ``tokens_per_group`` allows."""
    images, shards = b // config.num_members, sharding.num_automatic_shards()
    shards = shards if images % shards == 0 else 1
    images //= shards
    # At least one image per group, even if an image has more tokens than a group should.
    groups = -(-images // max(1, config.tokens_per_group // tokens))
    return _Groups(shards, images, groups, -(-images // groups), config.num_members, tokens)


def _dropout(rate: float, key: Key[Array, ""] | None) -> Callable[[Array, int], Array]:
    def drop(x: Array, number: int) -> Array:
        if key is None or rate == 0:
            return x
        # Inverted dropout: survivors are scaled here, so that evaluation needs no factor.
        survives = jax.random.bernoulli(jax.random.fold_in(key, number), 1 - rate, x.shape)
        return jnp.where(survives, x / (1 - rate), 0)

    return drop
