"""Quantities that a trained model predicts for each image; a new one is a function here and its use in an evaluator.

They are pure functions of a model and of features ``[b f]``, compiled and distributed by `lit_het.models.predictor`.
Each is a program of its own: programs with several results were observed to round differently on one device and on
eight.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from lit_het.losses.classification import mean_log_probabilities
from lit_het.types import LogitSamples


@dataclasses.dataclass(frozen=True)
class ImageClassifier:
    """A model over k classes: a classifier, or an image-text model with the embeddings of class names.

    Attributes:
        inputs: features of images to inputs of the head, one per image or one per member of an ensemble.
        logits: inputs, a random key and S to samples of logits, of which an input may have those of several members;
            without a key to one sample without noise.
        log_probabilities: logits to log-probabilities, over the last axis.
        scores: logits to a score of each class that does not depend on other classes.
        mean_scores: scores of all members ``[b m k]`` to those of the ensemble.
        embeddings: inputs of the members of each image to its embedding, which is compared with those of texts; of a
            classifier the mean of the inputs.
        noise_norm: inputs to ``sqrt(tr Σ(x))``.
        noise_spectrum: inputs to standard deviations of the noise along its principal axes, descending.
        kernel_alignment: inputs to the cosines of `HetClassifier.kernel_alignment`; None of other heads than HET.
        pair_bias: added to the logit of an image and a text before the sigmoid of the loss (SigLIP).
    """

    inputs: Callable[[Float[Array, "b f"]], Float[Array, "_ d"]]
    logits: Callable[[Float[Array, "n d"], Key[Array, ""] | None, int], LogitSamples]
    log_probabilities: Callable[[Float[Array, "*rows k"]], Float[Array, "*rows k"]]
    scores: Callable[[Float[Array, "*rows k"]], Float[Array, "*rows k"]]
    mean_scores: Callable[[Float[Array, "b m k"]], Float[Array, "b k"]]
    embeddings: Callable[[Float[Array, "b m d"]], Float[Array, "b d"]]
    noise_norm: Callable[[Float[Array, "n d"]], Float[Array, " n"]]
    noise_spectrum: Callable[[Float[Array, "n d"]], Float[Array, "n _"]]
    kernel_alignment: Callable[[Float[Array, "n d"]], Float[Array, "n two"]] | None = None
    pair_bias: Float[Array, ""] | float = 0.0


@dataclasses.dataclass(frozen=True)
class ImageSegmenter:
    """A model of panoptic segmentation.

    Attributes:
        masks: features of images to the class and the number of the instance of each pixel, as `Batch.masks`.
    """

    masks: Callable[[Float[Array, "b f"]], Int[Array, "b h w 2"]]


# (model, features [b f]) to [b ...]; quantities with noise also take a random key and S, which is 0 for no noise.
Quantity: TypeAlias = Callable[..., Array]


def log_probabilities(
    model: ImageClassifier, features: Float[Array, "b f"], key: Key[Array, ""], num_samples: int
) -> Float[Array, "b k"]:
    """Returns the log of the mean probability over S noise samples (HET-XL Eq. 2) and members (e3 Sec. 4.1)."""
    samples = _samples(model, features, key, num_samples)
    by_member = mean_log_probabilities(samples, model.log_probabilities)
    return jax.nn.logmeanexp(_of_members(by_member, features), axis=1)


def member_log_probabilities(
    model: ImageClassifier, features: Float[Array, "b f"], key: Key[Array, ""], num_samples: int
) -> Float[Array, "b m k"]:
    """Returns the log-probabilities of every member or, with noise, of the first sample of every member, and so on."""
    return _each_sample(model, features, key, num_samples, model.log_probabilities)


def member_class_log_probabilities(
    model: ImageClassifier, features: Float[Array, "b f"], key: Key[Array, ""], num_samples: int
) -> Float[Array, "b m two k"]:
    """Returns ``log σ(±(u_k + bias))`` of each class and its absence, for every member or, with noise, its S samples.

    Both are computed, since ``1 - p`` of a probability near 1 has lost its digits.
    """

    def log_sigmoids(logits: Float[Array, "n k"]) -> Float[Array, "n two k"]:
        biased = logits + model.pair_bias
        return jnp.stack([jax.nn.log_sigmoid(biased), jax.nn.log_sigmoid(-biased)], axis=1)

    return _each_sample(model, features, key, num_samples, log_sigmoids)


def class_log_probabilities(
    model: ImageClassifier, features: Float[Array, "b f"], key: Key[Array, ""], num_samples: int
) -> Float[Array, "b two k"]:
    """Returns the log of the mean of ``σ(±(u_k + bias))`` over S noise samples and members, as a sigmoid loss has it.

    Of 1,000 samples and 21,843 classes, `member_class_log_probabilities` would be 175 MB per image.
    """

    def log_sigmoids(logits: Float[Array, "n t k"]) -> Float[Array, "n t two_k"]:
        biased = logits + model.pair_bias
        return jnp.concatenate([jax.nn.log_sigmoid(biased), jax.nn.log_sigmoid(-biased)], axis=-1)

    by_member = mean_log_probabilities(_samples(model, features, key, num_samples), log_sigmoids)
    return jax.nn.logmeanexp(_of_members(by_member, features), axis=1).reshape(len(features), 2, -1)


def scores(model: ImageClassifier, features: Float[Array, "b f"]) -> Float[Array, "b k"]:
    """Returns a score of each class without noise that does not depend on other classes."""
    by_member = mean_log_probabilities(_samples(model, features), model.scores)
    return model.mean_scores(_of_members(by_member, features))


def logits(model: ImageClassifier, features: Float[Array, "b f"]) -> Float[Array, "b k"]:
    """Returns the logits without noise, which are their mean over it, divided by τ; the mean over members."""
    by_member = mean_log_probabilities(_samples(model, features), lambda logits: logits)
    return _of_members(by_member, features).mean(axis=1)


def pair_probabilities(model: ImageClassifier, features: Float[Array, "b f"]) -> Float[Array, "b k"]:
    """Returns ``sigmoid(u_k + bias)`` of the logits without noise, independent of other texts; means over members."""

    def log_sigmoid(logits: Float[Array, "n t k"]) -> Float[Array, "n t k"]:
        return jax.nn.log_sigmoid(logits + model.pair_bias)

    by_member = mean_log_probabilities(_samples(model, features), log_sigmoid)
    return jnp.exp(jax.nn.logmeanexp(_of_members(by_member, features), axis=1))


def log_normalizer(model: ImageClassifier, features: Float[Array, "b f"]) -> Float[Array, " b"]:
    """Returns ``log Σ_k exp(u_k)`` of the logits without noise, the mean over members."""

    def normalizer(logits: Float[Array, "n t k"]) -> Float[Array, "n t one"]:
        return jax.nn.logsumexp(logits, axis=-1, keepdims=True)

    by_member = mean_log_probabilities(_samples(model, features), normalizer)
    return _of_members(by_member, features)[..., 0].mean(axis=1)


def embeddings(model: ImageClassifier, features: Float[Array, "b f"]) -> Float[Array, "b d"]:
    """Returns embeddings without noise, the mean over members; unit vectors for image-text models."""
    return model.embeddings(_of_members(model.inputs(features), features))


def masks(model: ImageSegmenter, features: Float[Array, "b f"]) -> Int[Array, "b h w 2"]:
    """Returns the class and the number of the instance of each pixel, as `lit_het.types.Batch.masks`."""
    return model.masks(features)


def noise_norm(model: ImageClassifier, features: Float[Array, "b f"]) -> Float[Array, " b"]:
    """Returns ``sqrt(tr Σ(x))``, the mean over members; zeros for a deterministic head."""
    return _of_members(model.noise_norm(model.inputs(features)), features).mean(axis=1)


def noise_spectrum(model: ImageClassifier, features: Float[Array, "b f"]) -> Float[Array, "b r"]:
    """Returns standard deviations of the noise along its principal axes, descending; means over members."""
    return _of_members(model.noise_spectrum(model.inputs(features)), features).mean(axis=1)


def kernel_alignment(model: ImageClassifier, features: Float[Array, "b f"]) -> Float[Array, "b _"]:
    """Returns how well the noise fits the kernel, means over members; no columns for other heads than HET."""
    if model.kernel_alignment is None:
        return jnp.zeros((features.shape[0], 0))
    return _of_members(model.kernel_alignment(model.inputs(features)), features).mean(axis=1)


def _samples(
    model: ImageClassifier, features: Float[Array, "b f"], key: Key[Array, ""] | None = None, num_samples: int = 0
) -> LogitSamples:
    """Returns S samples of the logits, or with S = 0 one without noise."""
    return model.logits(model.inputs(features), key if num_samples else None, num_samples)


def _each_sample(
    model: ImageClassifier,
    features: Float[Array, "b f"],
    key: Key[Array, ""],
    num_samples: int,
    activation: Callable[[Float[Array, "n k"]], Float[Array, "n *rest"]],
) -> Float[Array, "b m *rest"]:
    """Returns a function of the logits of every member or, with noise, of the S samples of every member."""
    samples = _samples(model, features, key, num_samples)
    common = samples.prepare(samples.features)

    def sample(index: Array) -> Float[Array, "n *rest"]:
        logits = samples.logits(common, samples.keys, index[None])
        return activation(logits.reshape(len(logits) * samples.num_members, -1))

    # Blocks of samples bound the memory of the noise; only the result has the size S k.
    found = jax.lax.map(sample, jnp.arange(samples.num_samples), batch_size=samples.samples_per_block)
    by_sample = jax.vmap(lambda rows: _of_members(rows, features))(found)
    return by_sample.swapaxes(0, 1).reshape(len(features), -1, *found.shape[2:])


def _of_members(rows: Float[Array, "n *rest"], features: Float[Array, "b f"]) -> Float[Array, "b m *rest"]:
    """Separates the members of an ensemble; their rows are adjacent."""
    # Not `len`: the number of images is a symbol where programs are exported for any number.
    b = features.shape[0]
    return rows.reshape(b, rows.shape[0] // b, *rows.shape[1:])
