"""Trains a text tower and a head on pairs in memory, and measures the model: one cell of the study."""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from lit_het import parameters
from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.texts.tokenizers import Tokenizer
from lit_het.eval.metrics import scores
from lit_het.eval.metrics.out_of_distribution import detection_figures
from lit_het.eval.predictions import Predictions
from lit_het.random import shuffled_batches
from lit_het.tasks import quantities
from lit_het.tasks.two_towers import ContrastiveTask
from lit_het.training.durations import RunLength
from lit_het.training.step import initial_state, make_step, of_trainable
from lit_het.types import Batch, Params
from scripts.studies.noise.classifiers import FeatureClassifier
from scripts.studies.noise.pairs import PairSet

_BLOCK = 256
NUM_EVAL_SAMPLES = 32


@dataclasses.dataclass(frozen=True)
class Trained:
    """A trained model.

    Attributes:
        task: computes with the parameters.
        params: of all parts.
        tokens: of every name.
        metrics: of training, averages over the last 50 steps.
    """

    task: ContrastiveTask | FeatureClassifier
    params: Params
    tokens: Int[np.ndarray, "k l"]
    metrics: dict[str, float]

    @functools.cached_property
    def names(self) -> Float[Array, "k d"] | None:
        """Unit embeddings of all names; None for a classifier, whose classes are the names."""
        if isinstance(self.task, FeatureClassifier):
            return None
        embed = self.task.encode_text
        return jnp.asarray(_by_blocks(lambda block: embed(self.params, block), self.tokens))

    def predict(self, pairs: PairSet, names: Int[np.ndarray, " k"], num_samples: int = 0, seed: int = 0) -> Predictions:
        """Returns predictions of the captions among some names; with samples by Monte Carlo."""

        @jax.jit
        def predict_block(features: Array, classes: Array | None, key: Array) -> Array:
            model = self.task.image_classifier(self.params, classes)
            return quantities.log_probabilities(model, features, key, num_samples)

        keys = jax.random.split(jax.random.key(seed), 1 + len(pairs.captions) // _BLOCK)
        classes = None if self.names is None else self.names[names]
        blocks = zip(_padded(pairs.features), keys, strict=False)
        log_p = np.concatenate([predict_block(block, classes, key) for block, key in blocks])[: len(pairs.captions)]
        place = {name: index for index, name in enumerate(names.tolist())}
        labels = np.array([place[caption] for caption in pairs.captions.tolist()])
        nothing = np.zeros(len(labels))
        return Predictions(log_p, labels, np.arange(len(labels)), nothing, self.noise_norm(pairs))

    def similarity(self, pairs: PairSet) -> Float[np.ndarray, " n"]:
        """Returns the cosine of every image and its caption, the CLIP score; not of a classifier."""
        names = self.names
        assert names is not None

        def block_similarity(features: Array, captions: Array) -> Array:
            images = quantities.embeddings(self.task.image_classifier(self.params), features)
            return jnp.sum(images * names[captions], axis=1)

        return _by_blocks(block_similarity, pairs.features, pairs.captions)

    def noise_norm(self, pairs: PairSet) -> Float[np.ndarray, " n"]:
        """Returns the noise norm of every image."""
        model = self.task.image_classifier
        return _by_blocks(lambda block: quantities.noise_norm(model(self.params), block), pairs.features)


def train(
    config: ExperimentConfig,
    locked: Params,
    pairs: PairSet,
    tokenizer: Tokenizer,
    seed: int,
    advance: Callable[[int], None],
    order: int | None = None,
) -> Trained:
    """Trains on pairs, whose images are already features.

    Args:
        config: of the task, the optimizer, the schedule and the length.
        locked: parameters of the image tower, which is not computed.
        pairs: training pairs.
        tokenizer: of the captions.
        seed: of the initial parameters, the order and the noise.
        advance: called with 1 after every step.
        order: seed of the order in its place, which members of one run share.
    """
    task: Any = config.task.build()
    locked = {} if isinstance(task, FeatureClassifier) else locked  # it has no tower
    tokens = tokenizer(list(pairs.names))
    run = RunLength.resolve(config.length, config.data.batch_size, len(pairs.captions))
    optimizer = config.optimizer.build(config.schedule, run, task.layers_above, task.learning_rates)
    draw = jax.jit(lambda key: parameters.partition(task.initialize(key), task.locked)[1])
    state = initial_state(draw(jax.random.key(seed)), optimizer)
    step = jax.jit(make_step(of_trainable(task.loss), optimizer, seed), donate_argnums=0)
    last: list[dict[str, Array]] = []
    batches = shuffled_batches(len(pairs.captions), config.data.batch_size, seed if order is None else order)
    for rows in itertools.islice(batches, run.num_steps):
        batch = Batch(
            jnp.ones(len(rows), bool),
            image_embedding=jnp.asarray(pairs.features[rows]),
            label=jnp.asarray(pairs.captions[rows]),
            text=jnp.asarray(tokens[pairs.captions[rows]]),
        )
        state, metrics = step(state, locked, batch)
        last = [*last[-49:], metrics]
        advance(1)
    averages = {name: float(np.mean([metrics[name] for metrics in last])) for name in last[-1]}
    return Trained(task, parameters.merge(locked, state.params), tokens, averages)


def figures(predictions: Predictions, name: str) -> dict[str, float]:
    """Returns figures as they are, and with a temperature that was fitted on the other half of the images."""
    fitted, factor = scores.calibrated(predictions, name)
    found = {}
    for prefix, one in (("", predictions), ("fitted_", fitted)):
        values, _ = scores.figures(one)
        found |= {f"{prefix}{metric}": values[metric] for metric in ("top1", "nll", "ece")}
    return {**found, "temperature_factor": factor}


def auroc(values: Float[np.ndarray, " n"], is_positive: Bool[np.ndarray, " n"]) -> float:
    """Returns the probability that a positive has the larger value, ties counted as half; NaN without both kinds."""
    if is_positive.all() or not is_positive.any():
        return float("nan")
    return detection_figures(values[~is_positive], values[is_positive])["auroc"]


def _by_blocks(function: Callable[..., Array], *rows: np.ndarray) -> np.ndarray:
    """Returns the rows of a function of rows, compiled for blocks of equal size."""
    blocks = zip(*map(_padded, rows), strict=True)
    compiled = jax.jit(function)
    return np.concatenate([compiled(*block) for block in blocks])[: len(rows[0])]


def _padded(rows: np.ndarray) -> list[np.ndarray]:
    """Returns blocks of equal size; the last is padded with zeros."""
    padding = np.zeros((-len(rows) % _BLOCK, *rows.shape[1:]), rows.dtype)
    return list(np.concatenate([rows, padding]).reshape(-1, _BLOCK, *rows.shape[1:]))
