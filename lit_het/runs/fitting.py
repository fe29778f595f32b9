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

from lit_het import sharding
from lit_het.checkpoints.native import checksums
from lit_het.checkpoints.native.folders import complete_steps
from lit_het.checkpoints.native.saving import save_imported
from lit_het.configs.experiment import ExperimentConfig
from lit_het.console import Bar, message
from lit_het.data_pipelines.loader import Loader
from lit_het.errors import UserError
from lit_het.heads import laplace
from lit_het.heads.bayes_vlm import BayesVLMContrastiveConfig
from lit_het.heads.contrastive import unit
from lit_het.heads.laplace import Factors
from lit_het.losses.contrastive import SigmoidLoss
from lit_het.losses.contrastive.gauss_newton import sigmoid_hessian, softmax_hessian
from lit_het.runs.checks import check_data, check_embeddings, check_run_dir
from lit_het.runs.directory import checkpoint_dir, config_path
from lit_het.runs.files import write_run_files
from lit_het.runs.initialization import initial_params
from lit_het.runs.saved_calibration import read_calibration
from lit_het.runs.tower_fingerprints import tower_fingerprint
from lit_het.runs.training import calibrate_held_out, identity, open_data
from lit_het.tasks.contrastive import ContrastiveTask, TwoTowers
from lit_het.training.run_lock import locked
from lit_het.types import Params

# Cosines of a block of queries with all keys of a batch, on all devices together.
_COSINES = 2**24
# (unit embeddings of one side, of the other side, 1 for rows that count) to Σ φ φᵀ and Σ H.
_Hessian: TypeAlias = Callable[[Array, Array, Array], tuple[Array, Array]]


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
    posteriors = _posteriors(task, loader, head["head"], mesh)
    write_run_files(config, tokenizer)
    info = {"position": 0, **identity(loader, checksums.digest(frozen))}
    save_imported(checkpoint_dir(config.run_dir), {"head": {**head["head"], **posteriors}}, info)


def _posteriors(task: ContrastiveTask, loader: Loader, head: Params, mesh: Mesh) -> Params:
    """Returns the parameters of both posteriors of a head, whose other parameters are given."""
    config = task.config.head
    assert isinstance(config, BayesVLMContrastiveConfig)
    if loader.num_samples < 2:
        raise UserError(f"{loader.config.shards[0]} has {loader.num_samples} pair; a posterior needs two or more")
    size, hessian = min(config.num_negatives, loader.num_samples), _hessian(task, head)
    totals, count = None, 0
    with Bar("fitting the posterior", loader.num_samples, "pairs") as bar:
        for image, text in _batches(loader, task, size):
            some = pair_factors(image, text, hessian, mesh), pair_factors(text, image, hessian, mesh)
            totals = some if totals is None else jax.tree.map(np.add, totals, some)
            count += size
            bar.advance(size)
    if totals is None:
        raise UserError(f"fewer than {size:,} pairs can be read; lower --task.head.num-negatives")
    found = {}
    for side, factors in zip(("image", "text"), totals, strict=True):
        means = Factors(*(factor / np.sqrt(count) for factor in factors))
        # The squared norm of the identity is its size.
        posterior = laplace.fit(means, float(len(means.outputs)), config.pseudo_data_count, side)
        message(f"posterior of the {side} side: {count:,} pairs, prior precision {posterior.precision:.4g}")
        parts = {"input_root": posterior.input_root, "output_variance": posterior.output_variance}
        found[f"{side}_posterior"] = parts
    return found


def _hessian(task: ContrastiveTask, params: Params) -> _Hessian:
    """Returns the compiled sums of a block of queries."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: TwoTowers(task.config, nnx.Rngs(0)).head))
    head = nnx.merge(graph, params)
    temperature, bias = head.temperature(), 0.0 if head.bias is None else head.bias[...]

    @jax.jit
    def sums(queries: Float[Array, "b d"], keys: Float[Array, "k d"], counted: Float[Array, " b"]) -> tuple:
        # The division by τ would amplify rounding errors of the products.
        with jax.default_matmul_precision("highest"):
            if isinstance(task.config.loss, SigmoidLoss):
                outputs = sigmoid_hessian(queries, keys, counted, temperature, jnp.float32(bias))
            else:
                outputs = softmax_hessian(queries, keys, counted, temperature)
            return queries.T @ queries, outputs  # padding is zero

    return sums


def _batches(
    loader: Loader, task: ContrastiveTask, size: int
) -> Iterator[tuple[Float[np.ndarray, "size d"], Float[np.ndarray, "size d"]]]:
    """Yields unit embeddings of both sides of all pairs, in the shuffled order of training; the last few are left out.

    A batch of fewer pairs would have fewer candidates, and so another Hessian.
    """
    rows, left = loader.config.batch_size, loader.num_samples
    held: list[np.ndarray] = []
    with contextlib.closing(loader.batches()) as batches:
        for batch in itertools.islice(batches, -(-left // rows)):
            assert batch.image_embedding is not None
            assert batch.text_embedding is not None
            image = task.features.embedding(jnp.asarray(batch.image_embedding, jnp.float32))
            sides = np.stack([unit(image), unit(jnp.asarray(batch.text_embedding, jnp.float32))], axis=1)
            # The stream is endless: the last batch ends in the next epoch.
            held.append(sides[:left][batch.valid[:left]])
            left -= rows
            while sum(map(len, held)) >= size:
                joined = np.concatenate(held)
                yield joined[:size, 0], joined[:size, 1]
                held = [joined[size:]]


def pair_factors(
    queries: Float[np.ndarray, "n d"], keys: Float[np.ndarray, "n d"], hessian: _Hessian, mesh: Mesh
) -> Factors:
    """Returns ``Σ φ φᵀ`` and ``Σ H`` of one side of a batch of unit embeddings; each row's key is among the candidates.

    The cosines of a block of rows exist at a time; the rows are split over the devices of the mesh.
    """
    shards = sharding.num_batch_shards(mesh)
    rows = -(-min(len(queries), max(1, _COSINES // len(keys))) // shards) * shards
    placed = jax.device_put(keys, sharding.replicated(mesh))
    inputs, outputs = (np.zeros((queries.shape[1],) * 2) for _ in range(2))
    for start in range(0, len(queries), rows):
        some = queries[start : start + rows]
        # Padded to one size, so that JAX compiles once.
        counted_rows = (np.arange(rows) < len(some)).astype(np.float32)
        padded = np.pad(some, ((0, rows - len(some)), (0, 0)))
        block = jax.device_put((padded, counted_rows), sharding.batch_sharding(mesh))
        of_inputs, of_outputs = hessian(block[0], placed, block[1])
        inputs += np.asarray(of_inputs, np.float64)
        outputs += np.asarray(of_outputs, np.float64)
    return Factors(inputs, outputs)
