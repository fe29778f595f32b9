"""Linear probe: a linear classifier trained on the features of a frozen tower (SoViT App. E.2, Table 9).

The optimizer is SGD with momentum on the sigmoid cross-entropy. It trains a grid of learning rates, weight decays and
numbers of epochs on one or more kinds of views, and the setting that is best on *minival*, a random part of the
training images, is the probe. All settings see the same batches, the longer ones more of them, and those with the same
number of epochs are trained together: one matrix product computes the logits of a batch for all of them. Features stay
on the host in their own precision, and are copied to the device a few steps at a time.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from lit_het.errors import UserError
from lit_het.eval.fits import Crop, LinearProbeOptions
from lit_het.eval.metrics.calibration import check_labels, correctness
from lit_het.eval.views import Examples, Plan
from lit_het.losses.base import masked_mean
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
        crop, learning_rate, weight_decay, epochs: the setting.
        accuracy: on minival; ties count as the expectation over random choices.
        loss: sigmoid cross-entropy on minival, summed over classes.
    """

    crop: Crop
    learning_rate: float
    weight_decay: float
    epochs: int
    accuracy: float
    loss: float

    @property
    def is_finite(self) -> bool:
        """Whether the training did not diverge."""
        return math.isfinite(self.loss)


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
    views: Callable[[Crop, Plan], Iterator[Examples]] | None = None,
) -> LinearProbe:
    """Trains every setting of the grid, and returns the most accurate on minival; ties go to the lower loss.

    Args:
        features: of the training images as evaluation sees them, in float32 or float16.
        labels: their classes.
        num_classes: k.
        options: the grid; None for the paper's, on these features alone.
        advance: called with the number of steps just finished; the total is ``options.num_steps(n)``.
        views: returns the features of random views, see `lit_het.eval.views.Views`; only ``options.crops`` other than
            "whole" need it.
    """
    options = options or LinearProbeOptions()
    check_labels(labels, num_classes)
    if len(labels) < 2:
        raise UserError("linear probe: one training image leaves none for minival; use more training images")
    # A random part, not the end: shards may be sorted by class (docs/paper_map.md, 41).
    order = np.random.default_rng(options.seed).permutation(len(labels))
    minival, train = np.split(order, [options.num_minival(len(labels))])
    plan = _plan(train, options)
    grid: list[ProbeSetting] = []
    best: tuple[ProbeSetting, np.ndarray, np.ndarray] | None = None
    for crop in options.crops:
        if crop == "whole":
            examples = _whole(features, labels, plan)
        else:
            assert views is not None, "these features are not of random views"
            examples = views(crop, plan)
        for epochs, kernels, biases in _train(examples, plan, features.shape[1], num_classes, options, advance):
            for (rate, decay), kernel, bias in zip(_pairs(options), kernels, biases, strict=True):
                accuracy, loss = _evaluate(features, labels, minival, kernel, bias)
                setting = ProbeSetting(crop, rate, decay, epochs, accuracy, loss)
                grid.append(setting)
                if setting.is_finite and (best is None or (accuracy, -loss) > (best[0].accuracy, -best[0].loss)):
                    best = setting, kernel, bias
    if best is None:
        raise UserError("linear probe: no setting has a finite loss; check the features, or lower the learning rates")
    setting, kernel, bias = best
    return LinearProbe(kernel, bias, setting, tuple(grid))


def _pairs(options: LinearProbeOptions) -> list[tuple[float, float]]:
    """Returns learning rate and weight decay of the settings that are trained together."""
    return list(itertools.product(options.learning_rates, options.weight_decays))


def _plan(rows: Int[np.ndarray, " n"], options: LinearProbeOptions) -> Plan:
    """Returns the full batches of every epoch; each epoch has its own random order."""
    generator, size = np.random.default_rng((options.seed, 0)), min(options.images_per_step, len(rows))
    count = len(rows) // size
    orders = [generator.permutation(rows)[: count * size].reshape(count, size) for _ in range(max(options.epochs))]
    return Plan(np.concatenate(orders), count, _STEPS_PER_CHUNK)


def _whole(features: Float[np.ndarray, "n f"], labels: Int[np.ndarray, " n"], plan: Plan) -> Iterator[Examples]:
    """Yields the examples of each chunk of a plan, as evaluation sees them."""
    for steps in plan.chunks():
        rows = plan.images[steps]
        yield Examples(features[rows], labels[rows][:, :, None], np.ones((*rows.shape, 1), np.float32))


def _train(
    examples: Iterator[Examples],
    plan: Plan,
    size: int,
    num_classes: int,
    options: LinearProbeOptions,
    advance: Callable[[int], object],
) -> Iterator[tuple[int, Float[np.ndarray, "s f k"], Float[np.ndarray, "s k"]]]:
    """Yields each number of epochs with its trained kernels and biases, one for each of `_pairs`."""
    pairs = _pairs(options)
    learning_rates, weight_decays = jnp.array(pairs).T
    rates, states = dict[int, np.ndarray](), dict[int, Any]()
    for epochs in options.epochs:
        num_steps = epochs * plan.steps_per_epoch
        schedule = Schedule(1.0, _WARMUP).build(RunLength(num_steps, options.images_per_step))
        rates[epochs] = np.asarray(schedule(jnp.arange(num_steps)))
        params = {
            # Zeros with a negative bias: all probabilities start near those of rare classes, as in fine-tuning (SoViT
            # Table 8).
            "kernel": jnp.zeros((len(pairs), size, num_classes)),
            "bias": jnp.full((len(pairs), num_classes), options.initial_bias),
        }
        states[epochs] = (params, optax.trace(_MOMENTUM).init(params))
    for steps, chunk in zip(plan.chunks(), examples, strict=True):
        for epochs, rate in rates.items():
            # A shorter training ends within the chunk, or before.
            of_chunk = rate[steps]
            if len(of_chunk):
                data = (*(part[: len(of_chunk)] for part in chunk), of_chunk)
                # JAX dispatches asynchronously: the device trains on this chunk while the host gathers the next.
                states[epochs] = _take_steps(states[epochs], data, learning_rates, weight_decays)
                advance(len(of_chunk))
    for epochs, (params, _) in states.items():
        yield epochs, np.asarray(params["kernel"]), np.asarray(params["bias"])


# The state is donated: parameters and momentum are updated in place.
@functools.partial(jax.jit, donate_argnums=0)
def _take_steps(state: Any, data: Any, learning_rates: Float[Array, " s"], weight_decays: Float[Array, " s"]) -> Any:
    """Trains all settings on a chunk of batches."""
    momentum = optax.trace(_MOMENTUM)

    def loss(
        params: Params, features: Float[Array, "b f"], labels: Int[Array, "b m"], weights: Float[Array, "b m"]
    ) -> Float[Array, ""]:
        logits = features.astype(jnp.float32) @ params["kernel"] + params["bias"][None]
        is_read = jnp.sum(weights, axis=1) > 0
        return masked_mean(_cross_entropy(logits, labels, weights), is_read)

    def step(state: Any, batch: Any) -> tuple[Any, None]:
        params, velocity = state
        features, labels, weights, rate = batch
        # A vmap over settings makes one product of all kernels: the batch is read once, not once per setting.
        gradients = jax.vmap(jax.grad(loss), (0, None, None, None))(params, features, labels, weights)
        updates, velocity = momentum.update(gradients, velocity)
        decay = {"kernel": weight_decays[:, None, None] * params["kernel"], "bias": 0.0}

        def updated(old: Array, update: Array, decay: Array | float) -> Array:
            by_setting = learning_rates.reshape(-1, *[1] * (old.ndim - 1))
            # ``rate`` runs from 0 to 1: it multiplies the peak learning rates of all settings, and their decay too, as
            # in `lit_het.training.optimizers`.
            return old - rate * (by_setting * update + decay)

        return (jax.tree.map(updated, params, updates, decay), velocity), None

    return jax.lax.scan(step, state, data)[0]


def _cross_entropy(
    logits: Float[Array, "b k"], labels: Int[Array, "b m"], weights: Float[Array, "b m"]
) -> Float[Array, " b"]:
    """Returns the sum over classes of the binary cross-entropies: Σ softplus(z) - Σ w z_label."""
    label_logits = jnp.take_along_axis(logits, labels, axis=1)
    # -t log σ(z) - (1 - t) log σ(-z) is softplus(z) - t z, and the targets t are sums of the weights of labels.
    return jnp.sum(jax.nn.softplus(logits), axis=1) - jnp.sum(weights * label_logits, axis=1)


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
