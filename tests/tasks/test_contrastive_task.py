"""Contrastive training as a whole: the same on a mesh of devices; and what noise does to probabilities."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import special

from lit_het import distributed, parameters, sharding
from lit_het.errors import UserError
from lit_het.heads.contrastive import DeterministicContrastiveConfig, HetXLContrastive, HetXLContrastiveConfig
from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.temperature import LogTemperature
from lit_het.losses.contrastive import SigmoidLoss, SoftmaxLoss
from lit_het.random import keys_at
from lit_het.sharding import MeshConfig
from lit_het.tasks import quantities
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from lit_het.types import Batch
from tests.heads.references import held_singly

B = 16
ENCODER = EncoderConfig(width=16, depth=1, mlp_width=32, num_heads=2, compute_type="float32")
CONFIG = ContrastiveConfig(
    image_tower=ViTConfig(8, 4, ENCODER, pooling="mean"),
    text_tower=TextConfig(vocabulary_size=20, length=4, embedding_size=16, encoder=ENCODER),
    head=HetXLContrastiveConfig(CovarianceConfig(3, initial_noise_norm=0.5), num_samples=3, initial_bias=-1.0),
    locked=(),
)
ONE_DEVICE = MeshConfig(data=1).build(jax.devices()[:1])
EIGHT_DEVICES = MeshConfig(data=2, fsdp=4)


def host_batch():
    """Both rows of one of eight devices are invalid, and another row; some rows share an image or a text."""
    random = np.random.default_rng(0)
    valid = np.ones(B, bool)
    valid[[4, 5, 9]] = False
    return Batch(
        valid=valid,
        image=random.integers(0, 256, (B, 8, 8, 3), dtype=np.uint8),
        text=random.integers(0, 20, (B, 4)).astype(np.int32),
        image_id=random.integers(0, 8, (B, 1), dtype=np.uint32).repeat(2, axis=1),
        text_id=random.integers(0, 8, (B, 1), dtype=np.uint32).repeat(2, axis=1),
    )


@functools.cache
def initial(config):
    """Returns parameters, which neither the loss nor the number of microbatches changes."""
    if isinstance(config, ContrastiveConfig) and config != (plain := dataclasses.replace(config, loss=SoftmaxLoss())):
        return initial(plain)
    if config.microbatches > 1:
        return initial(dataclasses.replace(config, microbatches=1))
    return jax.jit(config.build().initialize)(jax.random.key(0))


@functools.cache
def expected_of(loss):
    """Returns the loss, metrics and gradient of one device, with all logits at once."""
    task = dataclasses.replace(CONFIG, loss=type(loss)("dense")).build()
    return loss_and_gradient(task, initial(CONFIG), ONE_DEVICE)


def loss_and_gradient(task, params, mesh):
    params = jax.device_put(params, sharding.tree_shardings(params, mesh))
    batch = distributed.to_global(host_batch(), mesh)
    with jax.set_mesh(mesh):
        return jax.jit(jax.value_and_grad(task.loss, has_aux=True))(params, batch, keys_at(0, 0))


@pytest.mark.parametrize("loss", [SoftmaxLoss("gather", 3), SoftmaxLoss("ring", 3), SigmoidLoss("ring", 3)], ids=str)
def test_a_mesh_of_eight_devices_has_loss_metrics_and_gradient_of_one_device(loss):
    task = dataclasses.replace(CONFIG, loss=loss).build()
    (expected_loss, expected_metrics), expected = expected_of(type(loss)())
    (actual_loss, metrics), gradient = loss_and_gradient(task, initial(CONFIG), EIGHT_DEVICES.build())
    np.testing.assert_allclose(actual_loss, expected_loss, rtol=1e-5)
    for name, metric in expected_metrics.items():
        np.testing.assert_allclose(metrics[name], metric, rtol=1e-5, err_msg=name)
    gradient, expected = (
        {path: np.asarray(array) for path, array in parameters.flatten(tree).items()} for tree in (gradient, expected)
    )
    assert gradient.keys() == expected.keys()
    for path, array in expected.items():
        # Some gradients are 0 but for rounding: those of a softmax's bias and of keys' biases in attention.
        atol = max(1e-5 * np.abs(array).max(), 1e-6)
        np.testing.assert_allclose(gradient[path], array, rtol=0, atol=atol, err_msg=path)
    moved = {path.split("/")[0] for path, array in expected.items() if np.abs(array).max() > 1e-4}
    assert moved == {"image_tower", "text_tower", "head"}


@pytest.mark.parametrize("field", ["image_id", "text_id"])
def test_rows_with_the_same_image_or_text_are_positives_unless_they_are_to_be_negatives(field):
    def loss_of(duplicates, **ids):
        task = dataclasses.replace(CONFIG, loss=SigmoidLoss(duplicates=duplicates)).build()
        batch = dataclasses.replace(host_batch(), **{"image_id": None, "text_id": None, **ids})
        batch = jax.tree.map(jnp.asarray, batch)
        return float(task.loss(initial(CONFIG), batch, keys_at(0, 0))[0])

    distinct = np.arange(2 * B, dtype=np.uint32).reshape(B, 2)
    shared = {field: getattr(host_batch(), field)}
    assert loss_of("negatives", **shared) == loss_of("positives") == loss_of("positives", **{field: distinct})
    assert abs(loss_of("positives", **shared) - loss_of("positives")) > 0.1


def test_weights_of_rows_change_the_loss_and_no_metric():
    task, params = CONFIG.build(), initial(CONFIG)
    program = jax.jit(task.loss)
    weight = np.where(np.arange(B) % 2, 0.3, 1.0).astype(np.float32)
    found = [
        program(params, dataclasses.replace(host_batch(), weight=rows), keys_at(0, 0))
        for rows in (None, np.ones(B, np.float32), weight)
    ]
    assert float(found[0][0]) == float(found[1][0])
    assert abs(float(found[0][0]) - float(found[2][0])) > 1e-3
    for name, metric in found[0][1].items():
        assert float(found[2][1][name]) == pytest.approx(float(metric), rel=1e-6), name


def test_the_noise_is_measured_on_sixteen_rows_of_a_large_batch():
    task, batch = CONFIG.build(), jax.tree.map(jnp.asarray, host_batch())
    params = initial(CONFIG)
    large = jax.tree.map(lambda rows: jnp.concatenate([rows, jnp.roll(rows, 5, axis=0), rows[::-1]]), batch)
    part = jax.tree.map(lambda rows: rows[::3], large)
    found, expected = (jax.jit(task.loss)(params, rows, keys_at(0, 0))[1] for rows in (large, part))
    for side in ("image", "text"):
        for form in ("norm", "alignment", "rank"):
            name = f"{side}_noise_{form}"
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, err_msg=name)


def test_mean_probabilities_over_noise_approach_those_without_noise_as_it_vanishes():
    """The mean over noise samples of the softmax over texts (HET-XL App. M)."""
    task, batch = CONFIG.build(), jax.tree.map(jnp.asarray, host_batch())

    @jax.jit
    def probabilities(params):
        features = task.features(params, batch.image)
        text = task.encode_text(params, batch.text)
        model, key = task.image_classifier(params, text), jax.random.key(1)
        noisy, quiet = (quantities.log_probabilities(model, features, key, samples) for samples in (64, 0))
        return jnp.exp(noisy), jnp.exp(quiet)

    deviations = []
    for norm in (2.0, 0.2, 0.02):
        head = HetXLContrastiveConfig(CovarianceConfig(3, initial_noise_norm=norm), initial_bias=-1.0)
        params = initial(dataclasses.replace(CONFIG, head=head))
        noisy, quiet = probabilities(params)
        np.testing.assert_allclose(noisy.sum(axis=1), 1, rtol=1e-5)
        deviations.append(float(jnp.max(jnp.abs(noisy - quiet))))
    assert deviations[0] > 3 * deviations[1] > 9 * deviations[2], deviations
    assert deviations[2] < 2e-3


def test_probabilities_of_texts_are_the_softmax_of_cosines_of_noise_samples():
    """1/S Σ_s softmax((α + ε_s) · β / τ) from the head's own samples, one at a time (HET-XL App. M)."""
    task, batch = CONFIG.build(), jax.tree.map(jnp.asarray, host_batch())

    @jax.jit
    def found(params):
        features, key = task.features(params, batch.image), jax.random.key(1)
        text, model = task.encode_text(params, batch.text), nnx.merge(task.graph, params)
        assert isinstance(model.head, HetXLContrastive)
        queries = model.head.image_queries(task.features.embedding(features), key, 6)
        assert queries is not None
        classifier, temperature = task.image_classifier(params, text), model.head.temperature()
        logits = jnp.einsum("bsd,kd->bsk", held_singly(queries), text) / temperature
        quiet = quantities.embeddings(classifier, features) @ text.T / temperature
        noisy = (quantities.member_log_probabilities, quantities.log_probabilities)
        others = (quantities.scores, quantities.log_normalizer, quantities.noise_norm)
        return (
            logits,
            *(quantity(classifier, features, key, 6) for quantity in noisy),
            quiet,
            *(quantity(classifier, features) for quantity in others),
        )

    params = initial(CONFIG)
    logits, of_samples, mean, quiet, scores, log_normalizer, noise_norm = found(params)
    expected = special.softmax(np.asarray(logits, np.float64), axis=2)
    np.testing.assert_allclose(np.exp(of_samples), expected, rtol=1e-4)
    np.testing.assert_allclose(np.exp(mean), expected.mean(axis=1), rtol=1e-4)
    np.testing.assert_allclose(scores, quiet, rtol=1e-5)
    np.testing.assert_allclose(np.exp(log_normalizer), np.exp(quiet).sum(axis=1), rtol=1e-5)
    assert (noise_norm > 0).all()


def test_noise_samples_may_be_computed_in_parts(monkeypatch):
    """The mean is that of as many samples at once."""
    task, batch = CONFIG.build(), jax.tree.map(jnp.asarray, host_batch())
    params = initial(CONFIG)

    @jax.jit
    def found(params):
        features, key = task.features(params, batch.image), jax.random.key(1)
        text = task.encode_text(params, batch.text)
        model, noisy = task.image_classifier(params, text), (features, key, 600)
        return quantities.log_probabilities(model, *noisy), quantities.member_log_probabilities(model, *noisy)

    monkeypatch.setattr("lit_het.heads.contrastive.EVALUATED_LOGITS", 7 * len(batch.text))
    mean, of_samples = found(params)
    p = np.exp(np.asarray(of_samples, np.float64))
    np.testing.assert_allclose(np.exp(mean).sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(np.exp(mean), p.mean(axis=1), rtol=1e-4)


def test_a_head_without_noise_has_one_prediction_for_any_number_of_samples():
    task, image = dataclasses.replace(CONFIG, head=DeterministicContrastiveConfig()).build(), host_batch().image

    @jax.jit
    def found(image):
        params = task.initialize(jax.random.key(0))
        features = task.features(params, image)
        names = jnp.eye(4, CONFIG.text_tower.embedding_size)
        model, key = task.image_classifier(params, names), jax.random.key(1)
        return [quantities.member_log_probabilities(model, features, key, samples) for samples in (5, 0)]

    noisy, quiet = found(jnp.asarray(image))
    assert noisy.shape[1] == 1
    np.testing.assert_array_equal(noisy, quiet)


def test_the_likelihood_and_the_number_of_samples_fit_each_other():
    towers = {"image_tower": CONFIG.image_tower, "text_tower": CONFIG.text_tower}
    free = SoftmaxLoss(likelihood="delta")
    with pytest.raises(UserError, match=r"likelihood = 'delta' does not fit task.head.num_samples = 1: .* = 0, and"):
        ContrastiveConfig(**towers, head=HetXLContrastiveConfig(num_samples=1), loss=free)
    with pytest.raises(UserError, match="does not fit"):
        ContrastiveConfig(**towers, loss=free)
    with pytest.raises(UserError, match="does not fit"):
        ContrastiveConfig(**towers, head=HetXLContrastiveConfig(num_samples=0))


def test_covariances_and_temperatures_have_learning_rates_of_their_own():
    covariance, temperature = CovarianceConfig(2, learning_rate_factor=0.5), LogTemperature(learning_rate_factor=2.0)
    head = HetXLContrastiveConfig(covariance, temperature)
    groups = dataclasses.replace(CONFIG, head=head).build().learning_rates
    assert {tuple(group.pattern.split("/")[:2]): group.learning_rate_factor for group in groups} == {
        ("head", "image_covariance"): 0.5,
        ("head", "text_covariance"): 0.5,
        ("head", "temperature"): 2.0,
    }
