"""The configuration of mixtures of experts."""

import dataclasses
from typing import Literal, TypeAlias

import numpy as np
from jaxtyping import Int

from lit_het.errors import UserError, require_at_least, require_choice

Dispatch: TypeAlias = Literal["einsum", "ragged"]


@dataclasses.dataclass(frozen=True)
class RankOneConfig:
    """Experts that share a kernel U: expert e has ``U ∘ (r_e s_eᵀ)`` and a bias of its own.

    Attributes:
        initial: r and s are at first random signs, or normal with mean 1 and standard deviation 0.5.
        learning_rate_factor: of r and s (the paper's grid is 0.5, 1 and 2).
    """

    initial: Literal["signs", "normal"] = "signs"
    learning_rate_factor: float = 1.0

    def __post_init__(self) -> None:
        require_choice(self, "initial")
        require_at_least(0, self, "learning_rate_factor")


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
            that differ in the router's noise only (Sec. 4.2.2, "tiling"), which evaluation is without.
        multi_pred: whether the outputs of a token's K experts are not summed in the last of these blocks, which gives K
            predictions (e3 Sec. 4.2.4).
        capacity_factor: slots of all experts in training, per selected expert of a token.
        eval_capacity_factor: the same in evaluation and in a locked tower.
        batch_priority: whether tokens with larger gates get slots first, instead of earlier tokens.
        dispatch: "einsum" has a capacity, and can split experts over devices; "ragged" sorts tokens by expert, has no
            capacity, so that no token is dropped, and gathers all experts on each device. Experts of rank one share
            their kernels, and need neither.
        noise_scale: the router's noise has the standard deviation noise_scale over the number of a member's experts,
            noise_scale M / E without overlap; 0 means no noise and no load loss.
        auxiliary_weight: weight of the mean of importance and load loss.
        dropout_rate: dropout of the experts' hidden layer and output, in training.
        dropout_samples: predictions of an image in evaluation, each with dropout masks of its own (Monte Carlo dropout,
            e3 App. G.2); 1 for one without dropout.
        initial_noise: standard deviation of Gaussian noise on the initial kernels of experts that are drawn, not
            loaded (e3 App. H.2).
        rank_one: for experts that share their kernels; with as many members as experts the tower is a BatchEnsemble
            (e3 App. F), which has no router.
        permutation: seed of a random order of the experts of loaded weights (e3 App. H.3); None for theirs.
        tokens_per_group: maximum number of tokens that are routed together; a group has whole images.
        blocks: numbers of the blocks with experts, counting from 0, in place of ``num_blocks``; None for the last odd.
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
        if self.multi_pred and not (self.tiled and self.num_selected > 1):
            raise UserError("ExpertsConfig: multi_pred = True needs tiled = True, and num_selected of at least 2")
        if not self.tiled and self.num_members == 1:
            raise UserError("ExpertsConfig: tiled = False needs several members; set num_members, or leave it out")
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
        """Returns the indices of the blocks with experts among ``depth`` blocks."""
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
