"""The Transformer encoder of image and text towers, with scans over blocks and rematerialization."""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from lit_het import sharding
from lit_het.towers.encoder_config import LOWER, EncoderConfig
from lit_het.towers.experts import ExpertKeys, Experts, Routing
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.layers import NO_DROPOUT, Dropout, DropoutRates
from lit_het.towers.rotary import Rotation
from lit_het.types import Metrics, Size

_Module = TypeVar("_Module", bound=nnx.Module)
_Options: TypeAlias = Callable[[Int[Array, ""]], Mapping[str, Any]]

# "dots" saves the outputs of dense layers, the most expensive values to recompute, but not attention's products, which
# have batch dimensions and grow with the square of the number of tokens.
REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


class Block(nnx.Module):
    """Attention and an MLP or experts with residual connections: ``x + f(norm(x))``, or ``norm(x + f(x))``."""

    def __init__(self, config: EncoderConfig, experts: ExpertsConfig | None, rngs: nnx.Rngs):
        self.causal = config.causal
        self.norms_before = config.norm_placement == "before"
        self.attention_norm = config.build_norm(rngs)
        self.attention = config.build_attention(rngs)
        self.mlp_norm = config.build_norm(rngs)
        self.mlp = config.build_mlp(rngs) if experts is None else None
        self.mixture = None if experts is None else Experts(experts, config.width, config.build_mlp, rngs)
        scales = jnp.full(config.width, config.initial_layer_scale, jnp.float32)
        self.attention_scale = nnx.Param(scales) if config.layer_scale else None
        self.mlp_scale = nnx.Param(scales) if config.layer_scale else None

    def __call__(
        self,
        x: Float[Array, "bn d"],
        b: Size,
        present: Bool[Array, "b n"] | None,
        keys: ExpertKeys,
        *,
        dropout: DropoutRates = NO_DROPOUT,
        apart: bool = False,
        rotation: Rotation | None = None,
        bias: Float[Array, "#h n n"] | None = None,
        normalised: Bool[Array, ""] | None = None,
    ) -> tuple[Float[Array, "_ d"], Routing | None]:
        """Maps the tokens of ``b`` examples; with ``apart`` experts give K copies of each, see `Experts`.

        Where the tokens are ``normalised`` already, the norm before the attention is left out.
        """
        drop = Dropout(dropout, keys.dropout)
        seen = self.attention_norm(x) if self.norms_before else x
        if normalised is not None:
            seen = jnp.where(normalised, x, seen)
        options: dict[str, Any] = {"causal": self.causal, "rotation": rotation, "bias": bias}
        update = drop(self.attention(seen, seen, b, present, dropout=drop.of_weights(0), **options), 0)
        x = self._add(x, update, self.attention_scale, self.attention_norm)
        seen, routing = self.mlp_norm(x) if self.norms_before else x, None
        if self.mixture is not None:
            update, routing = self.mixture(seen, b, keys, present, apart=apart)
            if apart:
                x = jnp.repeat(x.reshape(b, -1, x.shape[1]), len(update) // len(x), axis=0).reshape(update.shape)
        else:
            assert self.mlp is not None
            update = drop(self.mlp(seen), 1)
        return self._add(x, update, self.mlp_scale, self.mlp_norm), routing

    def _add(
        self,
        x: Float[Array, "bn d"],
        update: Float[Array, "bn d"],
        scale: nnx.Param | None,
        norm: nnx.LayerNorm | nnx.RMSNorm,
    ) -> Float[Array, "bn d"]:
        if scale is not None:
            # The cast keeps bfloat16 activations: float32 times bfloat16 would be float32 from here on.
            update = update * scale[...].astype(update.dtype)[None]
        return x + update if self.norms_before else norm(x + update).astype(x.dtype)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EncoderOutput:
    """What an encoder returns.

    Attributes:
        tokens: normalised, in float32; M for each example where experts form an ensemble, members adjacent.
        auxiliary_losses: to be added to the loss; none unless experts are trained.
        metrics: statistics of the routing.
    """

    tokens: Float[Array, "bm n d"]
    auxiliary_losses: Metrics
    metrics: Metrics


class Encoder(nnx.Module):
    """``depth`` blocks and a final norm; parameters of blocks of a kind are stacked along a leading axis.

    Attributes:
        blocks, expert_blocks: the stacks, without and with experts, of those kinds that there are.
    """

    blocks: Block
    expert_blocks: Block

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs):
        self.config = config
        # Blocks below those that are trained, see `lit_het.towers.tuning`.
        self.num_lower = 0
        for name, numbers in config.stacks.items():
            experts = config.experts if name == "expert_blocks" else None
            setattr(self, name, stack(lambda rngs, experts=experts: Block(config, experts, rngs), len(numbers), rngs))
        if config.norm_placement == "before":
            self.norm = config.build_norm(rngs)

    def __call__(
        self,
        tokens: Float[Array, "b n d"],
        key: Key[Array, ""] | None = None,
        present: Bool[Array, "b n"] | None = None,
        dropout: DropoutRates = NO_DROPOUT,
        rotation: Rotation | None = None,
        bias: Float[Array, "#h n n"] | Float[Array, "k #h n n"] | None = None,
        kinds: Sequence[int] | None = None,
    ) -> EncoderOutput:
        """Returns the encoded tokens.

        Args:
            tokens: input tokens.
            key: random key of training; without it routing is deterministic and adds no loss.
            present: False marks padding, to which no token attends; None for no padding.
            dropout: what is dropped, with a key and without experts.
            rotation: turns queries and keys of every block by their positions, without experts; None for none.
            bias: added to the logits of attention in every block, without experts; None for none.
            kinds: of each block, which of several rotations and biases, along their first axes, it has; None if all
                have the same ones.
        """
        b, n, d = tokens.shape
        x = tokens.reshape(b * n, d).astype(self.config.compute_type)

        def options(block: Int[Array, ""]) -> dict[str, Any]:
            kind = None if kinds is None else jnp.asarray(kinds)[block]
            turns, added = (rotation, bias) if kind is None else jax.tree.map(lambda x: x[kind], (rotation, bias))
            normalised = None if self.config.first_norm else block == 0
            return {"dropout": dropout, "rotation": turns, "bias": added, "normalised": normalised}

        x, routings = self._run_all(x, b, present, key, options)
        if self.config.experts is None:
            return EncoderOutput(self._finish(x, n), {}, {})
        routing = jax.tree.map(lambda *of_segments: jnp.concatenate(of_segments), *routings)
        losses, metrics = _summary(routing, self.config.experts)
        return EncoderOutput(self._finish(x, n), {} if key is None else losses, metrics)

    def _finish(self, x: Float[Array, "bmn d"], n: int) -> Float[Array, "bm n d"]:
        x = self.norm(x) if self.config.norm_placement == "before" else x.astype(jnp.float32)
        return x.reshape(-1, n, x.shape[-1])

    def _run_all(
        self,
        x: Float[Array, "bn d"],
        b: Size,
        present: Bool[Array, "b n"] | None,
        key: Key[Array, ""] | None,
        options: _Options,
    ) -> tuple[Float[Array, "bmn d"], list[Routing]]:
        """Runs one scan for each segment of blocks, see `_segments`; returns the routing in those with experts.

        The options are those of a block, see `Block`, by its number.
        """
        experts, stacks = self.config.experts, self._stacks()
        copies = 1 if experts is None else experts.num_copies(training=key is not None)
        multi_pred = experts is not None and experts.multi_pred
        done, routings = collections.Counter[str](), []
        for names, count in _segments(stacks, last_alone=multi_pred):
            has_experts = any("expert_blocks" in name for name in names)
            if has_experts and not routings and copies > 1:
                # Members are adjacent, so that all copies of an image stay on its device. They are tiled only before
                # the first experts: the blocks before would compute the same for every copy (e3 Sec. 4.1).
                x = jnp.repeat(x.reshape(b, -1, x.shape[-1]), copies, axis=0).reshape(-1, x.shape[-1])
                b *= copies
                assert present is None, "texts, which have padding, have no ensembles"
            parts = [
                _Part(getattr(self, name), done[name], done[name] + count, stacks.count(f"{LOWER}{name}"))
                for name in names
            ]
            done.update({name: count for name in names})
            rest = sum("expert_blocks" in name for name in stacks[done.total() :])
            before = x.shape[0]  # of a traced batch, which has no len
            apart = multi_pred and has_experts and not rest
            x, routing = self._run(x, b, present, key, *parts, apart=apart, options=options)
            b *= x.shape[0] // before
            routings += [] if routing is None else [routing]
        return x, routings

    def _stacks(self) -> tuple[str, ...]:
        """Returns the name of the stack of each block."""
        names = {number: name for name, numbers in self.config.stacks.items() for number in numbers}
        return tuple((LOWER if number < self.num_lower else "") + names[number] for number in range(len(names)))

    def _run(
        self,
        x: Float[Array, "bn d"],
        b: Size,
        present: Bool[Array, "b n"] | None,
        key: Key[Array, ""] | None,
        *parts: "_Part",
        apart: bool,
        options: _Options,
    ) -> tuple[Float[Array, "_ d"], Routing | None]:
        """Runs the first block of each part, then the second of each, and so on; parts have equal lengths."""
        length = parts[0].stop - parts[0].start
        graphs, stacked = zip(*(part.split() for part in parts), strict=True)

        def blocks(x: Float[Array, "bn d"], inputs: Any) -> tuple[Float[Array, "_ d"], Routing | None]:
            params, keys, number = inputs
            of_block = options(number)
            routing = None
            # Constrained at every block: without it the compiler may split activations like sharded kernels.
            for graph, block_params in zip(graphs, params, strict=True):
                merged = nnx.merge(graph, block_params)
                x, block_routing = merged(sharding.as_batch(x), b, present, keys, apart=apart, **of_block)
                routing = block_routing or routing
            return sharding.as_batch(x), routing

        if self.config.remat != "none":
            # A scan prevents the merging of recomputed values (CSE) by itself; blocks without one need the option.
            alone = self.config.unrolled or apart
            blocks = jax.checkpoint(blocks, policy=REMAT_POLICIES[self.config.remat], prevent_cse=alone)
        # Keys depend on the index among blocks with experts, so that they do not change with the way blocks are run.
        numbers = parts[0].first + np.arange(parts[0].start, parts[0].stop, dtype=np.int32)
        inputs = stacked, jax.vmap(lambda i: self._keys(key, i))(numbers), numbers
        if apart:
            # Not a scan, whose steps must keep the number of rows.
            x, routing = blocks(x, jax.tree.map(lambda leaf: leaf[0], inputs))
            return x, jax.tree.map(lambda leaf: leaf[None], routing)
        return jax.lax.scan(blocks, x, inputs, unroll=length if self.config.unrolled else 1)

    def _keys(self, key: Key[Array, ""] | None, block: Int[Array, ""]) -> ExpertKeys:
        """Returns the keys of a block; in evaluation only those of Monte Carlo dropout, which never change."""
        if key is not None:
            noise, dropout = jax.random.split(jax.random.fold_in(key, block))
            return ExpertKeys(noise, dropout)
        if self.config.experts is None or self.config.experts.dropout_samples == 1:
            return ExpertKeys()
        return ExpertKeys(dropout=jax.random.fold_in(jax.random.key(0), block))


def _segments(stacks: Sequence[str], *, last_alone: bool = False) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yields segments of consecutive blocks: the stacks whose blocks take turns in it, and how often they do.

    Experts in every other block are pairs of an expert block and a plain one: few scans at any depth. With
    ``last_alone`` the last block with experts is a segment of its own.
    """
    last = (
        max((number for number, name in enumerate(stacks) if "expert_blocks" in name), default=-1) if last_alone else -1
    )
    start = 0
    while start < len(stacks):
        pair = stacks[start], stacks[start].replace("expert_", "")
        names = pair if pair[0] != pair[1] and stacks[start : start + 2] == pair and start != last else pair[:1]
        count = 0
        while stacks[start : start + len(names)] == names and not (count and start == last):
            start, count = start + len(names), count + 1
        yield names, count


@dataclasses.dataclass(frozen=True)
class _Part:
    """A range of the blocks of a stack.

    Attributes:
        blocks: the stack.
        start, stop: the range.
        first: number of the stack's first block among all of its kind.
    """

    blocks: Block
    start: int
    stop: int
    first: int = 0

    def split(self) -> tuple[nnx.GraphDef, nnx.State]:
        graph, stacked = nnx.split(self.blocks)
        if self.start == 0 and all(len(leaf) == self.stop for leaf in jax.tree.leaves(stacked)):
            return graph, stacked
        return graph, jax.tree.map(lambda leaf: leaf[self.start : self.stop], stacked)


def stack(build: Callable[[nnx.Rngs], _Module], count: int, rngs: nnx.Rngs) -> _Module:
    """Returns blocks whose parameters are stacked along a leading axis, each with random numbers of its own."""

    # One initialisation for all blocks, with a key for each: compilation takes as long as for one block.
    @nnx.split_rngs(splits=count)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def stacked(rngs: nnx.Rngs) -> _Module:
        return build(rngs)

    return stacked(rngs)


def _summary(routing: Routing, config: ExpertsConfig) -> tuple[Metrics, Metrics]:
    """Returns the weighted auxiliary loss, summed over blocks, and metrics."""
    # The mean of importance and load loss, as in V-MoE App. A.
    loss = config.auxiliary_weight * jnp.sum(routing.importance_loss + routing.load_loss) / 2
    metrics = {
        "importance_loss": jnp.sum(routing.importance_loss),
        "load_loss": jnp.sum(routing.load_loss),
        "dropped_tokens": jnp.mean(routing.dropped),
        "busiest_expert": jnp.mean(routing.busiest),
    }
    return {"experts": loss}, metrics
