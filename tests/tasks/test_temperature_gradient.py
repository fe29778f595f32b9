"""τ learns from held-out rows, the other parameters from the rest (HET-XL App. G.2)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.heads.classification_config import DeterministicConfig
from lit_het.heads.contrastive import DeterministicContrastiveConfig
from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.het_xl import HetXLConfig
from lit_het.heads.sampling import SamplingConfig
from lit_het.heads.temperature import BoundedTemperature, FixedTemperature, LogTemperature
from lit_het.losses.contrastive import SigmoidLoss, SoftmaxLoss
from lit_het.random import Keys, keys_at
from lit_het.sharding import MeshConfig, batch_sharding
from lit_het.tasks import held_out
from lit_het.tasks.classification import ClassificationConfig
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.tasks.temperature_gradient_config import TemperatureGradient, check_temperature, held_out_fraction
from lit_het.training.step import initial_state, make_step, of_trainable, skipping_nonfinite
from lit_het.types import Batch
from tests.tasks.meshes import assert_same, placed, start
from tests.training.tiny_run import TASK, host_batches

KEYS, STEP = keys_at(0, 0), jnp.int32(0)
RATE, FRACTION = 0.3, 0.25
METHODS = ("simple", "luketina")


def gradient_of(method, fraction=FRACTION):
    return TemperatureGradient(method, fraction).build(fraction, lambda step: RATE)


def tau_of(params):
    [tau] = jax.tree.leaves(params["head"]["temperature"])
    return float(tau)


class Plain:
    """A softmax over a linear function of embeddings, divided by exp(t): in JAX, and in NumPy with float64."""

    num_classes, size, locked = 3, 4, ()

    def __init__(self, rows=16):
        random = np.random.default_rng(0)
        self.w, self.t = random.normal(size=(self.size, self.num_classes)), 0.4
        self.x, self.y = random.normal(size=(rows, self.size)), random.integers(0, self.num_classes, rows)

    @property
    def params(self):
        return {"head": {"w": jnp.float32(self.w), "temperature": {"t": jnp.float32(self.t)}}}

    @property
    def batch(self) -> Any:
        return Batch(np.ones(len(self.y), bool), image_embedding=np.float32(self.x), label=np.int32(self.y))

    def initialize(self, key):
        return self.params

    def layers_above(self, params):
        return jax.tree.map(lambda _: 0, params)

    def loss(self, params, batch, keys, progress=None):
        logits = batch.image_embedding @ params["head"]["w"] / jnp.exp(params["head"]["temperature"]["t"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch.label).mean(), {}

    def value(self, t, w, rows):
        logits = self.x[rows] @ w / np.exp(t)
        return np.mean(np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(rows)), self.y[rows]])

    def by_w(self, t, w, rows):
        logits = self.x[rows] @ w / np.exp(t)
        p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        p[np.arange(len(rows)), self.y[rows]] -= 1
        return self.x[rows].T @ p / np.exp(t) / len(rows)

    def by_t(self, method, training, validation, small=1e-6):
        """Returns d F_val / dt by a difference quotient, through a step of SGD for Luketina et al."""

        def validation_loss(t):
            rate = RATE if method == "luketina" else 0.0
            return self.value(t, self.w - rate * self.by_w(t, self.w, training), validation)

        return (validation_loss(self.t + small) - validation_loss(self.t - small)) / (2 * small)


@pytest.mark.parametrize("method", METHODS)
def test_the_gradients_are_those_of_a_slow_reference(method):
    plain = Plain()
    numbers = np.arange(len(plain.y))
    training, validation = numbers[numbers % 4 < 3], numbers[numbers % 4 == 3]
    step = jax.jit(lambda params, batch: gradient_of(method)(plain.loss, params, batch, KEYS, STEP))
    (value, metrics), gradient = step(plain.params, plain.batch)
    assert float(value) == pytest.approx(plain.value(plain.t, plain.w, training), rel=1e-5)
    np.testing.assert_allclose(gradient["head"]["w"], plain.by_w(plain.t, plain.w, training), rtol=1e-4, atol=1e-6)
    assert tau_of(gradient) == pytest.approx(plain.by_t(method, training, validation), rel=2e-4)
    w = plain.w - (RATE if method == "luketina" else 0.0) * plain.by_w(plain.t, plain.w, training)
    assert float(metrics["held_out_loss"]) == pytest.approx(plain.value(plain.t, w, validation), rel=1e-5)
    # Both methods differ, or the test above would show nothing.
    assert abs(plain.by_t("simple", training, validation) - plain.by_t("luketina", training, validation)) > 1e-3


def test_with_the_same_rows_held_out_the_simple_gradient_is_that_of_simple_training():
    plain = Plain()
    rows = np.repeat(np.arange(8), 2)
    batch = jax.tree.map(lambda x: x[rows], plain.batch)
    step = jax.jit(lambda params, batch: gradient_of("simple", 0.5)(plain.loss, params, batch, KEYS, STEP))
    _, found = step(plain.params, batch)
    expected = jax.jit(jax.grad(lambda params, batch: plain.loss(params, batch, KEYS)[0]))(plain.params, batch)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7), found, expected)


CLASSIFIER = ClassificationConfig(
    TASK.image_tower,
    HetXLConfig(CovarianceConfig(2, "efficient", initial_noise_norm=0.5), sampling=SamplingConfig(4, block_size=8)),
    num_classes=3,
)
PAIRS = dataclasses.replace(TASK, head=DeterministicContrastiveConfig(initial_bias=-1.0))


def embedded(batch) -> Any:
    """Returns a batch with embeddings in place of images, whose tower is locked."""
    embedding = np.random.default_rng(1).normal(size=(len(batch.valid), 16)).astype(np.float32)
    return dataclasses.replace(batch, image=None, image_embedding=embedding)


@functools.cache
def setting(config):
    """Returns the loss of a task's trainable parameters, these, and a batch."""
    task, params = start(config)
    locked, trainable = parameters.partition(params, task.locked)
    batch: Any = next(host_batches())
    if isinstance(config, ClassificationConfig):
        batch = dataclasses.replace(batch, text=None, label=np.arange(len(batch.valid), dtype=np.int32) % 3)
    else:
        batch = embedded(batch)

    # Compiled, so that the gradients of a step trace it once.
    @jax.jit
    def loss(params, batch, keys):
        return task.loss(parameters.merge(locked, params), batch, keys)

    return loss, trainable, batch


@functools.cache
def step_of(config, method):
    """Returns a compiled function of parameters and a batch, with the loss and the gradient of a method."""
    loss, _, _ = setting(config)
    return jax.jit(lambda params, batch: gradient_of(method)(loss, params, batch, KEYS, STEP))


@pytest.mark.slow
def test_luketinas_gradient_is_the_difference_quotient_through_a_step():
    """Of a loss whose gradient is a closed form, which has no second derivative."""
    pairs = dataclasses.replace(PAIRS, loss=SigmoidLoss("ring", block_size=4))
    loss, params, batch = setting(pairs)

    @jax.jit
    def after_a_step(shift):
        rows, held_out_rows = held_out.split(jax.tree.map(jnp.asarray, batch), FRACTION)
        tau, rest = parameters.partition(params, ["head/temperature/.*"])
        tau = jax.tree.map(lambda x: x + shift, tau)
        slopes = jax.grad(lambda rest: loss(parameters.merge(tau, rest), rows, KEYS)[0])(rest)
        after = jax.tree.map(lambda x, slope: x - RATE * slope, rest, slopes)
        return loss(parameters.merge(tau, after), held_out_rows, Keys(KEYS("held_out")))[0]

    expected = (after_a_step(3e-3) - after_a_step(-3e-3)) / 6e-3
    (_, metrics), gradient = step_of(pairs, "luketina")(params, batch)
    assert tau_of(gradient) == pytest.approx(float(expected), rel=0.02, abs=1e-4)
    assert float(metrics["held_out_loss"]) == pytest.approx(float(after_a_step(0.0)), rel=1e-4)


@pytest.mark.slow
def test_other_parameters_do_not_see_held_out_rows():
    (_, params, batch), step = setting(CLASSIFIER), step_of(CLASSIFIER, "simple")
    is_held_out = np.arange(len(batch.valid)) % 4 == 3
    other = dataclasses.replace(
        batch,
        image=np.where(is_held_out[:, None, None, None], 255 - batch.image, batch.image),
        label=np.where(is_held_out, (batch.label + 1) % 3, batch.label),
    )
    ((first, _), one), ((second, _), another) = step(params, batch), step(params, other)
    assert first == second
    assert tau_of(one) != tau_of(another)
    (_, one), (_, another) = (parameters.partition(x, ["head/temperature/.*"]) for x in (one, another))
    jax.tree.map(np.testing.assert_array_equal, one, another)


@pytest.mark.devices
@pytest.mark.slow
def test_four_devices_and_microbatches_have_the_gradient_of_one_device():
    """A row of each part on each device. Luketina's; the simple one is a part of it."""
    _, params, batch = setting(PAIRS)
    mesh = MeshConfig(data=4).build(jax.devices()[:4])

    def run(config, params, batch):
        loss, _, _ = setting(config)
        way = gradient_of("luketina", 0.5)
        return jax.jit(lambda params, batch: way(loss, params, batch, KEYS, STEP))(params, batch)

    expected = run(PAIRS, params, batch)
    with jax.set_mesh(mesh):
        rows = jax.device_put(batch, batch_sharding(mesh))
        found = run(dataclasses.replace(PAIRS, microbatches=2), placed(params, mesh), rows)
    # A difference of two gradients, over a small number.
    assert_same(found, expected, atol=1e-4)
    assert expected[0][1]["held_out_loss"] != expected[0][0]
    np.testing.assert_allclose(found[0][1]["held_out_loss"], expected[0][1]["held_out_loss"], rtol=1e-5)
    assert set(found[1]) == {"text_tower", "head"}


def test_a_step_whose_held_out_rows_are_not_finite_is_skipped():
    optimizer = optax.sgd(0.1)
    step = jax.jit(skipping_nonfinite(make_step(of_trainable(Plain().loss, gradient_of("simple")), optimizer, 0)))
    state, batch = initial_state(Plain().params, optimizer), Plain().batch
    embedding = np.where(np.arange(len(batch.valid))[:, None] == 3, np.inf, batch.image_embedding).astype(np.float32)
    spoilt = dataclasses.replace(batch, image_embedding=embedding)
    after, metrics = step(state, {}, spoilt)
    assert metrics["skipped"]
    assert np.isfinite(metrics["loss"])
    jax.tree.map(np.testing.assert_array_equal, after.params, state.params)
    assert not step(state, {}, batch)[1]["skipped"]


def test_a_classifier_on_stored_embeddings_has_the_loss_of_the_pixels():
    loss, params, batch = setting(dataclasses.replace(CLASSIFIER, head=DeterministicConfig(LogTemperature())))

    @jax.jit
    def both(params, batch):
        embedding = CLASSIFIER.build().features(params, batch.image)
        stored = dataclasses.replace(batch, image=None, image_embedding=embedding)
        return [loss(params, rows, KEYS)[0] for rows in (batch, stored)]

    of_pixels, of_stored = map(float, both(params, batch))
    assert of_stored == pytest.approx(of_pixels, rel=1e-5)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5, float("nan")])
def test_a_fraction_that_is_none_is_refused(fraction):
    with pytest.raises(UserError, match=r"held_out = .* must be more than 0 and less than 1, such as 0.125"):
        TemperatureGradient(held_out=fraction)


@pytest.mark.parametrize(
    "config",
    [
        ClassificationConfig(TASK.image_tower, DeterministicConfig(FixedTemperature())),
        ContrastiveConfig(
            TASK.image_tower, TASK.text_tower, DeterministicContrastiveConfig(FixedTemperature()), SoftmaxLoss()
        ),
        ClassificationConfig(TASK.image_tower, DeterministicConfig(BoundedTemperature()), locked=("head/temp.*",)),
    ],
    ids=["a classifier's is fixed", "an image-text model's is fixed", "locked"],
)
def test_a_temperature_that_is_not_trained_is_refused(config):
    with pytest.raises(UserError, match=r"temperature_gradient trains τ, which is fixed or locked; take another"):
        dataclasses.replace(config, temperature_gradient=TemperatureGradient()).build()
    check_temperature(None, {})


def test_rows_are_held_out_either_of_every_batch_or_from_a_data_set():
    whole, named = TemperatureGradient(held_out=0.25), TemperatureGradient(held_out=None)
    assert held_out_fraction(whole, None) == 0.25
    assert held_out_fraction(named, 0.125) == 0.125
    assert held_out_fraction(None, None) is None
    for config, share, problem in (
        (whole, 0.1, "both"),
        (named, None, "neither"),
        (None, 0.1, "only task.temperature"),
    ):
        with pytest.raises(UserError, match=problem):
            held_out_fraction(config, share)
