"""Trains a head on a table of features, until its loss on held-out rows no longer falls."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from lit_het.errors import UserError, require_at_least
from lit_het.heads import DeterministicConfig, HetXLConfig
from lit_het.losses import LabelMixture, SoftmaxCrossEntropy, mean_log_probabilities
from lit_het.random import shuffled_batches
from lit_het.tasks.base import learning_rate_groups
from lit_het.training.durations import Duration, RunLength
from lit_het.training.optimizers_config import AdamW, Optimizer
from lit_het.training.schedules import Schedule
from lit_het.types import Params

# Rows that are predicted at a time: programs have fixed shapes, so that a table of any length compiles nothing new.
_BLOCK = 256


class Table(NamedTuple):
    """Rows to learn from, in NumPy or in JAX.

    Attributes:
        features: standardised; a head expects a norm of about √d.
        labels: class indices.
        weight: of each row, with a mean of about 1.
    """

    features: Float[Any, "n d"]
    labels: Int[Any, " n"]
    weight: Float[Any, " n"]

    def take(self, rows: np.ndarray) -> "Table":
        """Returns some rows, by indices or by a mask."""
        return Table(*(column[rows] for column in self))


@dataclasses.dataclass(frozen=True)
class HeadTraining:
    """How a head is trained.

    Attributes:
        head: maps features to a distribution of logits.
        feature_size, num_classes: d and k.
        learning_rate: at its peak, after a tenth of ``max_epochs``; then it falls to 0 along a cosine.
        weight_decay: fraction of the kernels that a step at the peak removes.
        batch_size: rows per step.
        max_epochs: passes through the table, at most.
        patience: passes without a lower loss on held-out rows after which training ends.
    """

    head: HetXLConfig | DeterministicConfig
    feature_size: int
    num_classes: int
    learning_rate: float
    weight_decay: float
    batch_size: int
    max_epochs: int
    patience: int

    def __post_init__(self) -> None:
        require_at_least(1, self, "batch_size", "max_epochs", "patience")

    def fit(self, train: Table, held_out: Table, seed: int) -> tuple["TrainedHead", int]:
        """Returns the head of lowest loss on held-out rows, and the number of passes; without rows the last head."""
        steps_per_epoch = max(1, len(train.labels) // self.batch_size)
        initial_state, step = _programs(self, self.max_epochs * steps_per_epoch)
        key = jax.random.key(seed)
        params, state = initial_state(key)
        best, best_loss, best_epoch, epoch = TrainedHead(self, params, seed), np.inf, 0, 0
        batches = shuffled_batches(len(train.labels), self.batch_size, seed)
        for epoch in range(1, self.max_epochs + 1):
            for index in range(steps_per_epoch):
                number = (epoch - 1) * steps_per_epoch + index
                params, state = step(params, state, train.take(next(batches)), key, number)
            now = TrainedHead(self, params, seed)
            if not len(held_out.labels):
                best = now
            elif (loss := now.loss(held_out)) < best_loss:
                best, best_loss, best_epoch = now, loss, epoch
            elif epoch - best_epoch >= self.patience:
                break
        best = dataclasses.replace(best, params=jax.tree.map(np.asarray, best.params))
        if not all(np.isfinite(array).all() for array in jax.tree.leaves(best.params)):
            raise UserError(f"training diverged with learning_rate = {self.learning_rate}; lower it")
        return best, epoch


@dataclasses.dataclass(frozen=True)
class TrainedHead:
    """A head and its parameters.

    Attributes:
        training: how it was trained.
        params: of the head.
        seed: of the noise of predictions.
    """

    training: HeadTraining
    params: Params
    seed: int

    def log_probabilities(self, features: Float[np.ndarray, "n d"], num_samples: int) -> Float[np.ndarray, "n k"]:
        """Returns the log of the mean probability over S noise samples; 0 for predictions without noise."""
        program = _log_probabilities(self.training.head, self.training.feature_size, self.training.num_classes)
        return self._by_blocks(lambda block: program(self.params, block, self.seed, num_samples), features)

    def loss(self, table: Table) -> float:
        """Returns the mean negative log-likelihood, with the noise of `log_probabilities`: the same in every call."""
        head = self.training.head
        num_samples = 0 if head.sampling is None else head.sampling.num_samples
        log_p = self.log_probabilities(table.features, num_samples)
        return float(-np.average(log_p[np.arange(len(log_p)), table.labels], weights=table.weight))

    def noise_norm(self, features: Float[np.ndarray, "n d"]) -> Float[np.ndarray, " n"]:
        """Returns ``sqrt(tr Σ(x))``."""
        program = _noise_norm(self.training.head, self.training.feature_size, self.training.num_classes)
        return self._by_blocks(lambda block: program(self.params, block), features)

    @staticmethod
    def _by_blocks(program: Any, features: Float[np.ndarray, "n d"]) -> np.ndarray:
        padded = np.pad(features, ((0, -len(features) % _BLOCK), (0, 0)))
        blocks = padded.reshape(-1, _BLOCK, features.shape[1])
        return np.concatenate([program(block) for block in blocks])[: len(features)]


# Programs belong to settings, not to estimators, so that a search over seeds or folds compiles once.
@functools.lru_cache(maxsize=32)
def _graph(head: HetXLConfig | DeterministicConfig, feature_size: int, num_classes: int) -> tuple[Any, Any]:
    abstract = nnx.eval_shape(lambda: head.build(feature_size, num_classes, nnx.Rngs(0)))
    return nnx.graphdef(abstract), learning_rate_groups(abstract)


@functools.lru_cache(maxsize=32)
def _programs(training: HeadTraining, num_steps: int) -> tuple[Any, Any]:
    """Returns the first parameters and state, and a step, compiled."""
    graph, learning_rates = _graph(training.head, training.feature_size, training.num_classes)
    schedule = Schedule(training.learning_rate, warmup=Duration(10, "percent"))
    optimizer = Optimizer(AdamW(), training.weight_decay).build(
        schedule, RunLength(num_steps, training.batch_size), learning_rates=learning_rates
    )

    def mean_loss(params: Params, rows: Table, key: Key[Array, ""]) -> Float[Array, ""]:
        samples = nnx.merge(graph, params)(rows.features, key)
        return SoftmaxCrossEntropy()(samples, LabelMixture(rows.labels[:, None], rows.weight[:, None])).loss

    @jax.jit
    def initial_state(key: Key[Array, ""]) -> tuple[Params, Any]:
        head = training.head.build(training.feature_size, training.num_classes, nnx.Rngs(params=key))
        params = nnx.to_pure_dict(nnx.state(head))
        return params, optimizer.init(params)

    @jax.jit
    def step(params: Params, state: Any, rows: Table, key: Key[Array, ""], number: Any) -> tuple[Params, Any]:
        gradient = jax.grad(mean_loss)(params, rows, jax.random.fold_in(key, number))
        updates, state = optimizer.update(gradient, state, params)
        updated: Any = optax.apply_updates(params, updates)
        return updated, state

    return initial_state, step


@functools.lru_cache(maxsize=32)
def _log_probabilities(head: HetXLConfig | DeterministicConfig, feature_size: int, num_classes: int) -> Any:
    graph, _ = _graph(head, feature_size, num_classes)

    @functools.partial(jax.jit, static_argnums=3)
    def program(params: Params, features: Float[Array, "n d"], seed: Any, num_samples: int) -> Float[Array, "n k"]:
        samples = nnx.merge(graph, params)(features, jax.random.key(seed) if num_samples else None, num_samples)
        if samples.keys is not None:
            # One key for all rows: a prediction is a function of the row alone, wherever in a table it stands.
            samples = dataclasses.replace(samples, keys=jnp.repeat(samples.keys[:1], len(features)))
        return mean_log_probabilities(samples, jax.nn.log_softmax)

    return program


@functools.lru_cache(maxsize=32)
def _noise_norm(head: HetXLConfig | DeterministicConfig, feature_size: int, num_classes: int) -> Any:
    graph, _ = _graph(head, feature_size, num_classes)
    return jax.jit(lambda params, features: nnx.merge(graph, params).noise_norm(features))
