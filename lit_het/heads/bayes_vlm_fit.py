"""Fits the posterior of `lit_het.heads.bayes_vlm`: one pass over the outputs of both towers, and nothing is trained."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from lit_het import parameters, sharding
from lit_het.console import Bar, message
from lit_het.heads import laplace
from lit_het.heads.base import Pairs, unit
from lit_het.heads.bayes_vlm import BayesVLMContrastive, LastLayer, last_layer
from lit_het.heads.laplace import Factors
from lit_het.types import Params

# Cosines of a block of queries with all keys of a batch, on all devices together.
_COSINES = 2**24
# (the last layer of one side, embeddings of the other side, 1 for rows that count) to Σ φ φᵀ and Σ H.
_Hessian: TypeAlias = Callable[[LastLayer, Array, Array], tuple[Array, Array]]


def posteriors(head: BayesVLMContrastive, pairs: Pairs) -> Params:
    """Returns the parameters of the posteriors of both sides; see `lit_het.heads.laplace.fit` for errors."""
    hessian, totals, count = _hessian(head, pairs), None, 0
    # Batches of one size, so that hardly a pair is left over.
    size = pairs.count // -(-pairs.count // head.config.num_negatives)
    with Bar("fitting the posterior", pairs.count, "pairs") as bar:
        for batch in pairs.batches(size):
            image, text = (last_layer(jnp.asarray(outputs), head.embedding_size) for outputs in batch)
            sides = (image, text.outputs), (text, image.outputs)
            some = {
                name: pair_factors(*side, hessian, pairs.mesh)
                for name, side in zip(("image", "text"), sides, strict=True)
            }
            totals = some if totals is None else jax.tree.map(np.add, totals, some)
            count += len(text.outputs)
            bar.advance(len(text.outputs))
    assert totals is not None, "batches are never none"
    return {f"{side}_posterior": _posterior(head, pairs, totals[side], count, side) for side in totals}


def _posterior(head: BayesVLMContrastive, pairs: Pairs, totals: Factors, count: int, side: str) -> Params:
    inputs, outputs = (factor / np.sqrt(count) for factor in totals)
    tower = pairs.towers[side]
    squared_norm, has_bias = float(len(outputs)), True  # of the identity
    if tower.input_size:
        layer = parameters.flatten(pairs.params[f"{side}_tower"])
        kernel, bias = (np.asarray(layer[f"{tower.last_layer}/{name}"], np.float64) for name in ("kernel", "bias"))
        squared_norm, has_bias = float(np.sum(kernel**2) + np.sum(bias**2)), bool(bias.any())
    # CLIP's projections have no bias: theirs is zero.
    kept = len(inputs) if has_bias else len(inputs) - 1
    means = Factors(inputs[:kept, :kept], outputs)
    posterior = laplace.fit(means, squared_norm, head.config.pseudo_data_count, side)
    message(f"posterior of the {side} side: {count:,} pairs, prior precision {posterior.precision:.4g}")
    root = np.pad(posterior.input_root, (0, len(inputs) - kept))
    return {"input_root": root, "output_variance": posterior.output_variance}


def _hessian(head: BayesVLMContrastive, pairs: Pairs) -> _Hessian:
    """Returns the compiled sums of a block of queries."""
    temperature, bias = head.temperature(), jnp.float32(0.0 if head.bias is None else head.bias[...])

    @jax.jit
    def sums(layer: LastLayer, others: Float[Array, "k d"], counted: Float[Array, " b"]) -> tuple:
        # The division by τ would amplify rounding errors of the products.
        with jax.default_matmul_precision("highest"):
            outputs = pairs.hessian(layer.outputs, unit(others), counted, temperature, bias)
            return layer.inputs.T @ layer.inputs, outputs  # padding is zero

    return sums


def pair_factors(layer: LastLayer, others: Float[Array, "n d"], hessian: _Hessian, mesh: Mesh) -> Factors:
    """Returns ``Σ φ φᵀ`` and ``Σ H`` of one side of a batch; the embeddings of the other side are the candidates.

    The cosines of a block of rows exist at a time; the rows are split over the devices of the mesh.
    """
    n, shards = len(others), sharding.num_batch_shards(mesh)
    rows = -(-min(n, max(1, _COSINES // n)) // shards) * shards
    placed = jax.device_put(others, sharding.replicated(mesh))
    outputs, inputs = (np.zeros((side.shape[1],) * 2) for side in layer)
    for start in range(0, n, rows):
        some = [side[start : start + rows] for side in layer]
        # Padded to one size, so that JAX compiles once.
        counted_rows = (np.arange(rows) < len(some[0])).astype(np.float32)
        padded = LastLayer(*(jnp.pad(side, ((0, rows - len(side)), (0, 0))) for side in some))
        block = jax.device_put((padded, counted_rows), sharding.batch_sharding(mesh))
        of_inputs, of_outputs = hessian(block[0], placed, block[1])
        inputs += np.asarray(of_inputs, np.float64)
        outputs += np.asarray(of_outputs, np.float64)
    return Factors(inputs, outputs)
