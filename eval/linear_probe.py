"""Linear probe: a linear classifier trained on the features of a frozen tower (SoViT App. E.2, Table 9).

The optimizer is SGD with momentum on the sigmoid cross-entropy. It trains a grid of learning rates, weight decays and
numbers of epochs, and the setting that is best on *minival*, a random part of the training images, is the probe.
Settings with the same number of epochs see the same batches and are trained together: one matrix product computes the
logits of a batch for all of them. Features stay on the host in their own precision, and are copied to the device a few
steps at a time.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from lit_het.errors import UserError
from lit_het.eval.fits import LinearProbeOptions
from lit_het.eval.metrics.calibration import check_labels, correctness
from lit_het.training.durations import Duration, RunLength
from lit_het.training.schedules import Schedule
from lit_het.types import Params

_MOMENTUM = 0.9
_WARMUP = Duration(10, "percent")
_STEPS_PER_CHUNK = 32
_BLOCK_ROWS = 4096


@dataclasses.dataclass(frozen=True)
class ProbeSetting:
    """One setting of the grid, and its scores on minival.

    Attributes:
        learning_rate, weight_decay, epochs: the setting.
        accuracy: on minival; ties count as the expectation over random choices.
        loss: sigmoid cross-entropy on minival, summed over classes.
    """

    learning_rate: float
    weight_decay: float
    epochs: int
    accuracy: float
    loss: float


@dataclasses.dataclass(frozen=True)
class LinearProbe:
    """The best classifier of a grid.

    Attributes:
        kernel: maps features to logits.
        bias: of each class.
        best: its setting.
        grid: all settings.
    """

    kernel: Float[np.ndarray, "f k"]
    bias: Float[np.ndarray, " k"]
    best: ProbeSetting
    grid: tuple[ProbeSetting, ...]

    def logits(self, features: Float[np.ndarray, "t f"]) -> Float[np.ndarray, "t k"]:
        """Returns logits of independent classes; their sigmoids are probabilities."""
        logits = np.empty((len(features), len(self.bias)), np.float32)
        # Blocks of rows bound the memory of the float32 copy of the features.
        for start in range(0, len(features), _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            logits[block] = features[block].astype(np.float32) @ self.kernel + self.bias
        return logits


def train_linear_probe(
    features: Float[np.ndarray, "n f"],
    labels: Int[np.ndarray, " n"],
    num_classes: int,
    options: LinearProbeOptions | None = None,
    advance: Callable[[int], object] = lambda count: None,
) -> LinearProbe:
    """Trains every setting of the grid, and returns the most accurate on minival; ties go to the lower loss.

    Args:
        features: of the training images, in float32 or float16.
        labels: their classes.
        num_classes: k.
        options: the grid; None for the paper's.
        advance: called with the number of steps just finished; the total is ``options.num_steps(n)``.
    """
    options = options or LinearProbeOptions()
    check_labels(labels, num_classes)
    if len(labels) < 2:
        raise UserError("linear probe: one training image leaves none for minival; use more training images")
    # A random part, not the end: shards may be sorted by class (docs/paper_map.md, 41).
    order = np.random.default_rng(options.seed).permutation(len(labels))
    minival, train = np.split(order, [options.num_minival(len(labels))])
    pairs = list(itertools.product(options.learning_rates, options.weight_decays))
    grid: list[ProbeSetting] = []
    best: tuple[ProbeSetting, np.ndarray, np.ndarray] | None = None
    for epochs in options.epochs:
        kernels, biases = _train(features, labels, num_classes, train, pairs, epochs, options, advance)
        for (learning_rate, weight_decay), kernel, bias in zip(pairs, kernels, biases, strict=True):
            accuracy, loss = _evaluate(features, labels, minival, kernel, bias)
            setting = ProbeSetting(learning_rate, weight_decay, epochs, accuracy, loss)
            grid.append(setting)
            if np.isfinite(loss) and (best is None or (accuracy, -loss) > (best[0].accuracy, -best[0].loss)):
                best = setting, kernel, bias
    if best is None:
        raise UserError("linear probe: no setting has a finite loss; check the features, or lower the learning rates")
    setting, kernel, bias = best
    return LinearProbe(kernel, bias, setting, tuple(grid))


def _train(
    features: Float[np.ndarray, "n f"],
    labels: Int[np.ndarray, " n"],
    num_classes: int,
    rows: Int[np.ndarray, " train"],
    pairs: Sequence[tuple[float, float]],
    epochs: int,
    options: LinearProbeOptions,
    advance: Callable[[int], object],
) -> tuple[Float[np.ndarray, "s f k"], Float[np.ndarray, "s k"]]:
    """Returns trained kernels and biases, one for each pair of learning rate and weight decay."""
    batches = _batches(rows, min(options.images_per_step, len(rows)), epochs, options.seed)
    num_steps = len(batches)
    schedule = Schedule(1.0, _WARMUP).build(RunLength(num_steps, options.images_per_step))
    rates = np.asarray(schedule(jnp.arange(num_steps)))
    params = {
        # Zeros with a negative bias: all probabilities start near those of rare classes, as in fine-tuning (SoViT Table
        # 8).
        "kernel": jnp.zeros((len(pairs), features.shape[1], num_classes)),
        "bias": jnp.full((len(pairs), num_classes), options.initial_bias),
    }
    state = (params, optax.trace(_MOMENTUM).init(params))
    learning_rates, weight_decays = jnp.array(pairs).T
    for start in range(0, num_steps, _STEPS_PER_CHUNK):
        chunk = batches[start : start + _STEPS_PER_CHUNK]
        # JAX dispatches asynchronously: the device trains on the last chunk while the host gathers this one.
        data = (features[chunk], labels[chunk].astype(np.int32), rates[start : start + len(chunk)])
        state = _take_steps(state, data, learning_rates, weight_decays)
        advance(len(chunk))
    return np.asarray(state[0]["kernel"]), np.asarray(state[0]["bias"])


def _batches(rows: Int[np.ndarray, " n"], size: int, epochs: int, seed: int) -> Int[np.ndarray, "steps b"]:
    """Returns the full batches of every epoch; each epoch has its own random order."""
    generator = np.random.default_rng((seed, epochs))
    count = len(rows) // size
    orders = [generator.permutation(rows)[: count * size].reshape(count, size) for _ in range(epochs)]
    return np.concatenate(orders)


# The state is donated: parameters and momentum are updated in place.
@functools.partial(jax.jit, donate_argnums=0)
def _take_steps(state: Any, data: Any, learning_rates: Float[Array, " s"], weight_decays: Float[Array, " s"]) -> Any:
    """Trains all settings on a chunk of batches."""
    momentum = optax.trace(_MOMENTUM)

    def loss(params: Params, features: Float[Array, "b f"], labels: Int[Array, " b"]) -> Float[Array, ""]:
        return jnp.mean(_cross_entropy(features.astype(jnp.float32) @ params["kernel"] + params["bias"][None], labels))

    def step(state: Any, batch: Any) -> tuple[Any, None]:
        params, velocity = state
        features, labels, rate = batch
        # A vmap over settings makes one product of all kernels: the batch is read once, not once per setting.
        gradients = jax.vmap(jax.grad(loss), (0, None, None))(params, features, labels)
        updates, velocity = momentum.update(gradients, velocity)
        decay = {"kernel": weight_decays[:, None, None] * params["kernel"], "bias": 0.0}

        def updated(old: Array, update: Array, decay: Array | float) -> Array:
            by_setting = learning_rates.reshape(-1, *[1] * (old.ndim - 1))
            # ``rate`` runs from 0 to 1: it multiplies the peak learning rates of all settings, and their decay too, as
            # in `lit_het.training.optimizers`.
            return old - rate * (by_setting * update + decay)

        return (jax.tree.map(updated, params, updates, decay), velocity), None

    return jax.lax.scan(step, state, data)[0]


def _cross_entropy(logits: Float[Array, "b k"], labels: Int[Array, " b"]) -> Float[Array, " b"]:
    """Returns the sum over classes of the binary cross-entropies: Σ softplus(z) - z_label."""
    label_logits = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    # -log σ(z) for the label is softplus(z) - z, and -log σ(-z) for the others is softplus(z).
    return jnp.sum(jax.nn.softplus(logits), axis=1) - label_logits


# Settings that diverged have infinite or NaN logits; their loss is then not finite, and they are never chosen.
@np.errstate(invalid="ignore", over="ignore")
def _evaluate(
    features: np.ndarray, labels: np.ndarray, rows: np.ndarray, kernel: np.ndarray, bias: np.ndarray
) -> tuple[float, float]:
    """Returns accuracy and loss on the given rows."""
    hits, losses = [], []
    for start in range(0, len(rows), _BLOCK_ROWS):
        block = rows[start : start + _BLOCK_ROWS]
        logits = features[block].astype(np.float32) @ kernel + bias
        label_logits = np.take_along_axis(logits, labels[block][:, None], axis=1)[:, 0]
        hits.append(correctness(logits, labels[block]))
        losses.append(np.logaddexp(0, logits).sum(axis=1) - label_logits)
    return float(np.concatenate(hits).mean()), float(np.concatenate(losses).mean())
