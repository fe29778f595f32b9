"""A mixture of experts in place of an MLP (V-MoE, Riquelme et al. 2021), also partitioned for an ensemble (e3)."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from lit_het.errors import UserError, require_at_least, require_choice
from lit_het.towers import dispatch, routing
from lit_het.towers.groups import group_images
from lit_het.towers.layers import Mlp
from lit_het.towers.rank_one import RankOneConfig, RankOneLinear
from lit_het.towers.routing import Choices, Gates

Dispatch: TypeAlias = Literal["einsum", "ragged"]


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """Which blocks of an encoder have experts, and how tokens are routed to them.

    Attributes:
        num_experts: E.
        num_selected: K, number of experts per token (e3: per token of each member).
        num_blocks: number of blocks with experts, the last odd ones counting from 0 ("last-n"); None for every odd one.
        num_members: M; with more than one the tower is an efficient ensemble (e3): the batch is repeated M times before
            the first block with experts, and each copy has its own E / M experts.
        tiled: whether images are repeated for the members. If not, each token selects K experts of every member, whose
            outputs are summed, and there is one prediction (e3 Sec. 4.2.1, "partitioning").
        overlap: number of experts that belong to all members (e3 Sec. 4.2.3); all of them, for copies of a single model
            that differ in the router's noise only (Sec. 4.2.2, "tiling").
        multi_pred: whether the outputs of a token's K experts are not summed in the last of these blocks, which gives K
            predictions (e3 Sec. 4.2.4).
        capacity_factor: slots of all experts in training, per selected expert of a token.
        eval_capacity_factor: the same in evaluation and in a locked tower.
        batch_priority: whether tokens with larger gates get slots first, instead of earlier tokens.
        dispatch: "einsum" has a capacity, and can split experts over devices; "ragged" sorts tokens by expert, has no
            capacity, so that no token is dropped, and gathers all experts on each device.
        noise_scale: the router's noise has the standard deviation noise_scale M / E; 0 means no noise and no load loss.
        auxiliary_weight: weight of the mean of importance and load loss.
        dropout_rate: dropout of the experts' hidden layer and output, in training.
        dropout_samples: predictions of an image in evaluation, each with dropout masks of its own (Monte Carlo dropout,
            e3 App. G.2); 1 for one without dropout.
        initial_noise: standard deviation of Gaussian noise on the experts' initial weights (e3 App. H.2).
        rank_one: for experts that share their kernels; with as many members as experts the tower is a BatchEnsemble
            (e3 App. F), which has no router.
        permutation: seed of a random order of the experts of loaded weights (e3 App. H.3); None for theirs.
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
    tiled: bool = True
    overlap: int = 0
    multi_pred: bool = False
    dropout_samples: int = 1
    initial_noise: float = 0.0
    rank_one: RankOneConfig | None = None
    permutation: int | None = None

    def __post_init__(self) -> None:
        require_at_least(1, self, "num_experts", "num_selected", "num_members", "tokens_per_group", "dropout_samples")
        require_at_least(0, self, "noise_scale", "auxiliary_weight", "dropout_rate", "overlap", "initial_noise")
        if self.dropout_rate >= 1:
            raise UserError(f"ExpertsConfig: dropout_rate = {self.dropout_rate} must be below 1")
        require_choice(self, "dispatch")
        if self.overlap > self.num_experts or (self.num_experts - self.overlap) % self.num_members:
            shared = f" with overlap = {self.overlap}" if self.overlap else ""
            raise UserError(
                f"ExpertsConfig: num_experts = {self.num_experts}{shared} cannot be split in {self.num_members} members"
            )
        if self.dropout_samples > 1 and not self.dropout_rate:
            raise UserError(f"ExpertsConfig: dropout_samples = {self.dropout_samples} needs a dropout_rate above 0")
        if self.rank_one is not None and (self.overlap or self.initial_noise):
            raise UserError("ExpertsConfig: rank_one goes with neither overlap nor initial_noise")
        if self.multi_pred and not self.tiled:
            raise UserError("ExpertsConfig: multi_pred = True needs tiled = True")
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
        """E / M, or with an overlap of o experts (E - o) / M + o."""
        return (self.num_experts - self.overlap) // self.num_members + self.overlap

    @property
    def members(self) -> Int[np.ndarray, "m e"]:
        """The numbers of each member's experts: its own, then those of all members."""
        own = np.arange(self.num_experts - self.overlap).reshape(self.num_members, -1)
        of_all = np.arange(self.num_experts - self.overlap, self.num_experts)
        return np.concatenate([own, np.broadcast_to(of_all, (self.num_members, self.overlap))], axis=1)

    @property
    def num_predictions(self) -> int:
        """The number of predictions of an image, in evaluation."""
        return self.num_copies(training=False) * (self.num_selected if self.multi_pred else 1)

    def num_copies(self, *, training: bool) -> int:
        """Returns how often an image is repeated before the first block with experts."""
        return (self.num_members if self.tiled else 1) * (1 if training else self.dropout_samples)

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
            mix = dispatch.by_sorting if config.rank_one is None else dispatch.with_shared_kernels
            mixed = mix(config, self._mlp, tokens, choices, keys.dropout, apart=apart)
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
    for layer in (mlp.up, mlp.down) if scale else ():
        layer.kernel[...] += scale * jax.random.normal(rngs.params(), layer.kernel.shape)
    return mlp
