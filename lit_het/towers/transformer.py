"""The Transformer encoder of image and text towers, with scans over blocks and rematerialization."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from lit_het import sharding
from lit_het.towers.encoder_config import EncoderConfig
from lit_het.towers.experts import ExpertKeys, Experts, Routing
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.layers import layer_dropout, layer_norm
from lit_het.types import Metrics, Size

_Module = TypeVar("_Module", bound=nnx.Module)

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
        self.attention_norm = layer_norm(config.width, config.norm_epsilon, rngs)
        self.attention = config.build_attention(rngs)
        self.mlp_norm = layer_norm(config.width, config.norm_epsilon, rngs)
        self.mlp = config.build_mlp(rngs) if experts is None else None
        self.mixture = None if experts is None else Experts(experts, config.width, config.build_mlp, rngs)
        self.attention_scale = nnx.Param(jnp.ones(config.width, jnp.float32)) if config.layer_scale else None
        self.mlp_scale = nnx.Param(jnp.ones(config.width, jnp.float32)) if config.layer_scale else None

    def __call__(
        self,
        x: Float[Array, "bn d"],
        b: Size,
        present: Bool[Array, "b n"] | None,
        keys: ExpertKeys,
        *,
        dropout: float = 0.0,
        apart: bool = False,
    ) -> tuple[Float[Array, "_ d"], Routing | None]:
        """Maps the tokens of ``b`` examples; with ``apart`` experts give K copies of each, see `Experts`."""
        drop = layer_dropout(dropout, keys.dropout)
        seen = self.attention_norm(x) if self.norms_before else x
        update = drop(self.attention(seen, seen, b, present, causal=self.causal), 0)
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
        self, x: Float[Array, "bn d"], update: Float[Array, "bn d"], scale: nnx.Param | None, norm: nnx.LayerNorm
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
    """``depth`` blocks and a final norm; parameters of blocks of a kind are stacked along a leading axis."""

    def __init__(self, config: EncoderConfig, rngs: nnx.Rngs):
        self.config = config
        numbers = () if config.experts is None else config.experts.block_numbers(config.depth)
        if len(numbers) < config.depth:
            self.blocks = stack(lambda rngs: Block(config, None, rngs), config.depth - len(numbers), rngs)
        if numbers:
            self.expert_blocks = stack(lambda rngs: Block(config, config.experts, rngs), len(numbers), rngs)
        if config.norm_placement == "before":
            self.norm = layer_norm(config.width, config.norm_epsilon, rngs)

    def __call__(
        self,
        tokens: Float[Array, "b n d"],
        key: Key[Array, ""] | None = None,
        present: Bool[Array, "b n"] | None = None,
        dropout: float = 0.0,
    ) -> EncoderOutput:
        """Returns the encoded tokens.

        Args:
            tokens: input tokens.
            key: random key of training; without it routing is deterministic and adds no loss.
            present: False marks padding, to which no token attends; None for no padding.
            dropout: rate at which outputs of layers are dropped before they are added, with a key and without experts.
        """
        b, n, d = tokens.shape
        x = tokens.reshape(b * n, d).astype(self.config.compute_type)
        if self.config.experts is None:
            x, _ = self._run(x, b, present, key, _Part(self.blocks, 0, self.config.depth), dropout=dropout)
            return EncoderOutput(self._finish(x, n), {}, {})
        x, routing = self._run_with_experts(x, b, present, key)
        losses, metrics = _summary(routing, self.config.experts)
        return EncoderOutput(self._finish(x, n), {} if key is None else losses, metrics)

    def _finish(self, x: Float[Array, "bmn d"], n: int) -> Float[Array, "bm n d"]:
        x = self.norm(x) if self.config.norm_placement == "before" else x.astype(jnp.float32)
        return x.reshape(-1, n, x.shape[-1])

    def _run_with_experts(
        self, x: Float[Array, "bn d"], b: Size, present: Bool[Array, "b n"] | None, key: Key[Array, ""] | None
    ) -> tuple[Float[Array, "bmn d"], Routing]:
        """Runs one scan for each segment of blocks, see `_segments`."""
        experts = self.config.experts
        assert experts is not None
        numbers, copies = experts.block_numbers(self.config.depth), experts.num_copies(training=key is not None)
        done, routings = {True: 0, False: 0}, []
        for kinds, count in _segments(numbers, self.config.depth, last_alone=experts.multi_pred):
            if True in kinds and not routings and copies > 1:
                # Members are adjacent, so that all copies of an image stay on its device. They are tiled only before
                # the first experts: the blocks before would compute the same for every copy (e3 Sec. 4.1).
                x = jnp.repeat(x.reshape(b, -1, x.shape[-1]), copies, axis=0).reshape(-1, x.shape[-1])
                b *= copies
                assert present is None, "texts, which have padding, have no ensembles"
            parts = [
                _Part(self.expert_blocks if kind else self.blocks, done[kind], done[kind] + count) for kind in kinds
            ]
            done |= {kind: done[kind] + count for kind in kinds}
            apart = experts.multi_pred and kinds == (True,) and done[True] == len(numbers)
            before = len(x)
            x, routing = self._run(x, b, present, key, *parts, apart=apart)
            b *= len(x) // before
            routings += [] if routing is None else [routing]
        return x, jax.tree.map(lambda *of_segments: jnp.concatenate(of_segments), *routings)

    def _run(
        self,
        x: Float[Array, "bn d"],
        b: Size,
        present: Bool[Array, "b n"] | None,
        key: Key[Array, ""] | None,
        *parts: "_Part",
        dropout: float = 0.0,
        apart: bool = False,
    ) -> tuple[Float[Array, "_ d"], Routing | None]:
        """Runs the first block of each part, then the second of each, and so on; parts have equal lengths."""
        length = parts[0].stop - parts[0].start
        graphs, stacked = zip(*(part.split() for part in parts), strict=True)

        def blocks(x: Float[Array, "bn d"], inputs: Any) -> tuple[Float[Array, "_ d"], Routing | None]:
            params, keys = inputs
            routing = None
            # Constrained at every block: without it the compiler may split activations like sharded kernels.
            for graph, block_params in zip(graphs, params, strict=True):
                merged = nnx.merge(graph, block_params)
                x, block_routing = merged(sharding.as_batch(x), b, present, keys, dropout=dropout, apart=apart)
                routing = block_routing or routing
            return sharding.as_batch(x), routing

        if self.config.remat != "none":
            # A scan prevents the merging of recomputed values (CSE) by itself; blocks without one need the option.
            alone = self.config.unrolled or apart
            blocks = jax.checkpoint(blocks, policy=REMAT_POLICIES[self.config.remat], prevent_cse=alone)
        # Keys depend on the index among blocks with experts, so that they do not change with the way blocks are run.
        keys = jax.vmap(lambda i: self._keys(key, i))(jnp.arange(parts[0].start, parts[0].stop))
        if apart:
            # Not a scan, whose steps must keep the number of rows.
            x, routing = blocks(x, jax.tree.map(lambda leaf: leaf[0], (stacked, keys)))
            return x, jax.tree.map(lambda leaf: leaf[None], routing)
        return jax.lax.scan(blocks, x, (stacked, keys), unroll=length if self.config.unrolled else 1)

    def _keys(self, key: Key[Array, ""] | None, block: Int[Array, ""]) -> ExpertKeys:
        """Returns the keys of a block; in evaluation only those of Monte Carlo dropout, which never change."""
        if key is not None:
            noise, dropout = jax.random.split(jax.random.fold_in(key, block))
            return ExpertKeys(noise, dropout)
        if self.config.experts is None or self.config.experts.dropout_samples == 1:
            return ExpertKeys()
        return ExpertKeys(dropout=jax.random.fold_in(jax.random.key(0), block))


def _segments(
    with_experts: tuple[int, ...], depth: int, *, last_alone: bool = False
) -> Iterator[tuple[tuple[bool, ...], int]]:
    """Yields segments of consecutive blocks: the kinds that repeat in it (True has experts), and how often they do.

    Experts in every other block are pairs of an expert block and a plain one: few scans at any depth. With
    ``last_alone`` the last block with experts is a segment of its own.
    """
    blocks, start = tuple(number in with_experts for number in range(depth)), 0
    while start < depth:
        kinds = (True, False) if blocks[start : start + 2] == (True, False) else blocks[start : start + 1]
        if last_alone and start == with_experts[-1]:
            kinds = (True,)
        count = 0
        while blocks[start : start + len(kinds)] == kinds and not (last_alone and count and start == with_experts[-1]):
            start, count = start + len(kinds), count + 1
        yield kinds, count


@dataclasses.dataclass(frozen=True)
class _Part:
    """A range of stacked blocks."""

    blocks: Block
    start: int
    stop: int

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
