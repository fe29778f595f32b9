"""Fits the posterior of a BayesVLM head: one pass over stored embeddings, and nothing is trained."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float

from lit_het import parameters, sharding
from lit_het.configs.experiment import ExperimentConfig
from lit_het.console import Bar, message
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.errors import UserError
from lit_het.heads import laplace
from lit_het.heads.bayes_vlm import LastLayer, last_layer
from lit_het.heads.contrastive import unit
from lit_het.heads.contrastive_config import BayesVLMContrastiveConfig
from lit_het.heads.laplace import Factors
from lit_het.losses.contrastive import SigmoidLoss
from lit_het.losses.contrastive.gauss_newton import sigmoid_hessian, softmax_hessian
from lit_het.models.calibration.saved import read_calibration
from lit_het.models.tower_fingerprints import tower_fingerprint
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.tasks.two_towers import ContrastiveTask, TwoTowers
from lit_het.training.checks import check_data, check_embeddings, check_run_dir
from lit_het.training.directory import checkpoint_dir, config_path
from lit_het.training.files import write_run_files
from lit_het.training.initialization import initial_params
from lit_het.training.lock import locked
from lit_het.training.train import calibrate_held_out, identity, open_data
from lit_het.types import Params
from lit_het.weights.native import checksums
from lit_het.weights.native.folders import complete_steps
from lit_het.weights.native.saving import save_imported

# Cosines of a block of queries with all keys of a batch, on all devices together.
_COSINES = 2**24
# (the last layer of one side, embeddings of the other side, 1 for rows that count) to Σ φ φᵀ and Σ H.
_Hessian: TypeAlias = Callable[[LastLayer, Array, Array], tuple[Array, Array]]


def fit_unless_done(config: ExperimentConfig) -> None:
    """Fits the posterior of a run and calibrates it; does nothing where that is done.

    Raises:
        UserError: as `check_fitted`; the data or the run directory cannot be used, or there are too few pairs.
    """
    check_fitted(config)
    # An interrupted pass starts again: the embeddings, which take the time, are stored.
    if config_path(config.run_dir).exists():
        check_run_dir(config, resume=True)
    with locked(config.run_dir, message):
        is_done = config_path(config.run_dir).exists() and complete_steps(checkpoint_dir(config.run_dir))
        if not is_done:
            _fit(config)
    if config.calibration is not None and read_calibration(config.run_dir, 0) is None:
        calibrate_held_out(config, 0, open_data(config, None, allow_commands=False)[1])
    if is_done:
        message(f"{config.run_dir} is finished")


def check_fitted(config: ExperimentConfig) -> None:
    """Checks that a posterior can be fitted, before anything is embedded.

    Raises:
        UserError: embeddings are not stored, or several processes run.
    """
    for field in ("embeddings", "text_embeddings"):
        if getattr(config.data, field) is None:
            flag = field.replace("_", "-")
            raise UserError(f"a posterior is fitted to stored embeddings; leave out --data.{flag} None")
    if jax.process_count() > 1:
        raise UserError("a posterior is fitted by a single process; start one")


def _fit(config: ExperimentConfig) -> None:
    """Writes the run with the posterior of the head."""
    mesh, tokenizer = config.mesh.build(), config.tokenizer.build() if config.tokenizer else None
    loader, _ = open_data(config, tokenizer, allow_commands=False)
    assert isinstance(loader, Loader)
    check_data(config, loader, tokenizer)
    task = config.task.build()
    assert isinstance(task, ContrastiveTask)
    frozen, head = initial_params(config, task, mesh)
    check_embeddings(
        loader, task, lambda: tower_fingerprint(config, frozen), lambda: tower_fingerprint(config, frozen, tokenizer)
    )
    factors, count = _factors(task, loader, _hessian(task, head["head"]), mesh)
    posteriors = {}
    for side, of_side in zip(("image", "text"), factors, strict=True):
        posteriors[f"{side}_posterior"] = _posterior(task.config, frozen, of_side, count, side)
    write_run_files(config, tokenizer)
    info = {"position": 0, **identity(loader, checksums.digest(frozen))}
    save_imported(checkpoint_dir(config.run_dir), {"head": {**head["head"], **posteriors}}, info)


def _factors(
    task: ContrastiveTask, loader: Loader, hessian: _Hessian, mesh: Mesh
) -> tuple[tuple[Factors, Factors], int]:
    """Returns ``Σ φ φᵀ`` and ``Σ H`` of images and of texts, and the number of pairs that were read."""
    config = task.config.head
    assert isinstance(config, BayesVLMContrastiveConfig)
    totals, count = None, 0
    # Batches of one size, so that hardly a pair is left over.
    size = loader.num_samples // -(-loader.num_samples // config.num_negatives)
    with Bar("fitting the posterior", loader.num_samples, "pairs") as bar:
        for image, text in _batches(loader, task, size):
            some = pair_factors(image, text.outputs, hessian, mesh), pair_factors(text, image.outputs, hessian, mesh)
            totals = some if totals is None else jax.tree.map(np.add, totals, some)
            count += len(text.outputs)
            bar.advance(len(text.outputs))
    if totals is None:
        raise UserError(f"fewer than two pairs of {loader.config.shards[0]} can be read; a posterior needs two or more")
    return totals, count


def _posterior(config: ContrastiveConfig, towers: Params, totals: Factors, count: int, side: str) -> Params:
    """Returns the parameters of the posterior of a side; the last layer is among those of the towers."""
    assert isinstance(config.head, BayesVLMContrastiveConfig)
    inputs, outputs = (factor / np.sqrt(count) for factor in totals)
    tower = getattr(config, f"{side}_tower")
    squared_norm, has_bias = float(len(outputs)), True  # of the identity
    if tower.input_size:
        layer = parameters.flatten(towers[f"{side}_tower"])
        kernel, bias = (np.asarray(layer[f"{tower.last_layer}/{name}"], np.float64) for name in ("kernel", "bias"))
        squared_norm, has_bias = float(np.sum(kernel**2) + np.sum(bias**2)), bool(bias.any())
    # CLIP's projections have no bias: theirs is zero.
    kept = len(inputs) if has_bias else len(inputs) - 1
    means = Factors(inputs[:kept, :kept], outputs)
    posterior = laplace.fit(means, squared_norm, config.head.pseudo_data_count, side)
    message(f"posterior of the {side} side: {count:,} pairs, prior precision {posterior.precision:.4g}")
    root = np.pad(posterior.input_root, (0, len(inputs) - kept))
    return {"input_root": root, "output_variance": posterior.output_variance}


def _hessian(task: ContrastiveTask, params: Params) -> _Hessian:
    """Returns the compiled sums of a block of queries."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: TwoTowers(task.config, nnx.Rngs(0)).head))
    head = nnx.merge(graph, params)
    temperature, bias = head.temperature(), 0.0 if head.bias is None else head.bias[...]

    @jax.jit
    def sums(layer: LastLayer, others: Float[Array, "k d"], counted: Float[Array, " b"]) -> tuple:
        # The division by τ would amplify rounding errors of the products.
        with jax.default_matmul_precision("highest"):
            if isinstance(task.config.loss, SigmoidLoss):
                outputs = sigmoid_hessian(layer.outputs, unit(others), counted, temperature, jnp.float32(bias))
            else:
                outputs = softmax_hessian(layer.outputs, unit(others), counted, temperature)
            return layer.inputs.T @ layer.inputs, outputs  # padding is zero

    return sums


def _batches(loader: Loader, task: ContrastiveTask, size: int) -> Iterator[tuple[LastLayer, LastLayer]]:
    """Yields the last layers of both sides of all pairs, in the shuffled order of training; the last few are left out.

    A batch of fewer pairs would have fewer candidates, and so another Hessian: it is there only if no batch is filled.
    """
    d = task.config.image_tower.embedding_size
    held: list[tuple[np.ndarray, np.ndarray]] = []
    is_filled = False

    def batch() -> tuple[tuple[LastLayer, LastLayer], tuple[np.ndarray, np.ndarray]]:
        image, text = (np.concatenate(side) for side in zip(*held, strict=True))
        first = last_layer(jnp.asarray(image[:size]), d), last_layer(jnp.asarray(text[:size]), d)
        return first, (image[size:], text[size:])

    for pairs in _pairs(loader, task):
        held.append(pairs)
        while sum(len(image) for image, _ in held) >= size:
            first, rest = batch()
            yield first
            held, is_filled = [rest], True
    if not is_filled and sum(len(image) for image, _ in held) > 1:
        yield batch()[0]


def _pairs(loader: Loader, task: ContrastiveTask) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields embeddings of images and texts, once of every pair that can be read."""
    rows, left = loader.config.batch_size, loader.num_samples
    with contextlib.closing(loader.batches()) as batches:
        for batch in itertools.islice(batches, -(-left // rows)):
            assert batch.image_embedding is not None
            assert batch.text_embedding is not None
            image = task.features.embedding(jnp.asarray(batch.image_embedding, jnp.float32))
            # The stream is endless: the last batch ends in the next epoch.
            valid = batch.valid[:left]
            yield np.asarray(image)[:left][valid], np.asarray(batch.text_embedding, np.float32)[:left][valid]
            left -= rows


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
