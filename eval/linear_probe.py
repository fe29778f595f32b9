"""Linear probe: a linear classifier trained on the stored features of a frozen tower (SoViT App. E.2, Table 9).

Stochastic gradient descent with momentum on the sigmoid cross-entropy, over a grid of learning rates, weight decays and
numbers of epochs. The best setting on *minival*, a part of the training images drawn at random, is the probe. Those
with equally many epochs see the same batches and are trained together: one product of matrices scores a batch for all
of them. Features stay on the host, in the precision they have, and reach the device some steps at a time.
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

from lit_het.durations import Duration, RunLength
from lit_het.errors import UserError, require_at_least
from lit_het.eval.calibration import check_labels, correctness
from lit_het.schedules import Schedule
from lit_het.types import Params

_MOMENTUM = 0.9
_WARMUP = Duration(10, "percent")
_STEPS_AT_A_TIME = 32
_BLOCK_ROWS = 4096


@dataclasses.dataclass(frozen=True)
class LinearProbeOptions:
    """The grid, and what its settings share.

    Attributes:
        learning_rates: peaks of the schedules.
        weight_decays: the fraction of the kernel that a step at the peak removes.
        epochs: passes over the training images.
        images_per_step: images of a step; all, where there are fewer.
        minival: the part of the training images that chooses among settings.
        initial_bias: of every class; the kernel starts at 0.
        seed: of the split and of the order of images.

    Raises:
        UserError: an empty grid, or a value out of range.
    """

    learning_rates: tuple[float, ...] = (1e-3, 3e-4, 1e-4)
    weight_decays: tuple[float, ...] = (1e-4, 0.0)
    epochs: tuple[int, ...] = (1, 3, 10)
    images_per_step: int = 512
    minival: float = 0.02
    initial_bias: float = -6.9
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("learning_rates", 0.0), ("weight_decays", 0.0), ("epochs", 1)):
            values = getattr(self, name)
            if not values:
                raise UserError(f"linear probe: {name} is empty; name at least one")
            if min(values) < least:
                raise UserError(f"linear probe: {name} = {min(values)} must be at least {least}")
        if not 0 < self.minival < 1:
            raise UserError(f"linear probe: minival = {self.minival} must lie between 0 and 1")
        require_at_least(1, self, "images_per_step")

    def num_steps(self, num_images: int) -> int:
        """How often ``advance`` counts for that many training images: the steps of all epochs of the grid."""
        num_train = num_images - self.num_minival(num_images)
        return sum(self.epochs) * (num_train // min(self.images_per_step, num_train))

    def num_minival(self, num_images: int) -> int:
        """How many of the training images choose among settings."""
        return min(max(1, round(self.minival * num_images)), num_images - 1)


@dataclasses.dataclass(frozen=True)
class ProbeSetting:
    """One setting of the grid and how good it is on minival.

    Attributes:
        learning_rate, weight_decay, epochs: the setting.
        accuracy: on minival; classes that tie share the answer.
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
        kernel: from features to logits.
        bias: of each class.
        best: its setting.
        grid: all settings.
    """

    kernel: Float[np.ndarray, "f k"]
    bias: Float[np.ndarray, " k"]
    best: ProbeSetting
    grid: tuple[ProbeSetting, ...]

    def logits(self, features: Float[np.ndarray, "t f"]) -> Float[np.ndarray, "t k"]:
        """Logits of each class, independent of one another; their sigmoids are probabilities."""
        logits = np.empty((len(features), len(self.bias)), np.float32)
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
    """Trains every setting of the grid and returns the best on minival; of equal accuracies, the one of least loss.

    Args:
        features: of the training images, in float32 or float16.
        labels: their classes.
        num_classes: k.
        options: the grid; None for the paper's.
        advance: called with the number of steps just done, ``options.num_steps(n)`` in all.

    Raises:
        UserError: fewer than two images, a label outside the classes, or no setting with a finite loss.
    """
    options = options or LinearProbeOptions()
    check_labels(labels, num_classes)
    if len(labels) < 2:
        raise UserError("linear probe: one training image leaves none to choose among settings; take more")
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
    """Kernels and biases after some epochs, one for each pair of learning rate and weight decay."""
    batches = _batches(rows, min(options.images_per_step, len(rows)), epochs, options.seed)
    num_steps = len(batches)
    schedule = Schedule(1.0, _WARMUP).build(RunLength(num_steps, options.images_per_step))
    rates = np.asarray(schedule(jnp.arange(num_steps)))
    params = {
        "kernel": jnp.zeros((len(pairs), features.shape[1], num_classes)),
        "bias": jnp.full((len(pairs), num_classes), options.initial_bias),
    }
    state = (params, optax.trace(_MOMENTUM).init(params))
    learning_rates, weight_decays = jnp.array(pairs).T
    for start in range(0, num_steps, _STEPS_AT_A_TIME):
        chunk = batches[start : start + _STEPS_AT_A_TIME]
        # The device works on the last chunk while the host gathers this one.
        data = (features[chunk], labels[chunk].astype(np.int32), rates[start : start + len(chunk)])
        state = _take_steps(state, data, learning_rates, weight_decays)
        advance(len(chunk))
    return np.asarray(state[0]["kernel"]), np.asarray(state[0]["bias"])


def _batches(rows: Int[np.ndarray, " n"], size: int, epochs: int, seed: int) -> Int[np.ndarray, "steps b"]:
    """Whole batches of every epoch, each in an order of its own."""
    generator = np.random.default_rng((seed, epochs))
    count = len(rows) // size
    orders = [generator.permutation(rows)[: count * size].reshape(count, size) for _ in range(epochs)]
    return np.concatenate(orders)


@functools.partial(jax.jit, donate_argnums=0)
def _take_steps(state: Any, data: Any, learning_rates: Float[Array, " s"], weight_decays: Float[Array, " s"]) -> Any:
    """Runs all settings over some batches."""
    momentum = optax.trace(_MOMENTUM)

    def loss(params: Params, features: Float[Array, "b f"], labels: Int[Array, " b"]) -> Float[Array, ""]:
        return jnp.mean(_cross_entropy(features.astype(jnp.float32) @ params["kernel"] + params["bias"][None], labels))

    def step(state: Any, batch: Any) -> tuple[Any, None]:
        params, velocity = state
        features, labels, rate = batch
        gradients = jax.vmap(jax.grad(loss), (0, None, None))(params, features, labels)
        updates, velocity = momentum.update(gradients, velocity)
        decay = {"kernel": weight_decays[:, None, None] * params["kernel"], "bias": 0.0}

        def moved(old: Array, update: Array, decay: Array | float) -> Array:
            of_setting = learning_rates.reshape(-1, *[1] * (old.ndim - 1))
            return old - rate * (of_setting * update + decay)

        return (jax.tree.map(moved, params, updates, decay), velocity), None

    return jax.lax.scan(step, state, data)[0]


def _cross_entropy(logits: Float[Array, "b k"], labels: Int[Array, " b"]) -> Float[Array, " b"]:
    """Sum over classes of the binary cross-entropies: Σ softplus(z) - z_label."""
    of_label = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jnp.sum(jax.nn.softplus(logits), axis=1) - of_label


@np.errstate(invalid="ignore", over="ignore")  # of settings that diverged
def _evaluate(
    features: np.ndarray, labels: np.ndarray, rows: np.ndarray, kernel: np.ndarray, bias: np.ndarray
) -> tuple[float, float]:
    """Accuracy and loss on some rows."""
    hits, losses = [], []
    for start in range(0, len(rows), _BLOCK_ROWS):
        block = rows[start : start + _BLOCK_ROWS]
        logits = features[block].astype(np.float32) @ kernel + bias
        of_label = np.take_along_axis(logits, labels[block][:, None], axis=1)[:, 0]
        hits.append(correctness(logits, labels[block]))
        losses.append(np.logaddexp(0, logits).sum(axis=1) - of_label)
    return float(np.concatenate(hits).mean()), float(np.concatenate(losses).mean())
