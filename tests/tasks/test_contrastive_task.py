"""Contrastive training as a whole: the same on a mesh of devices; and what noise does to probabilities."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy import special, stats

from lit_het.errors import UserError
from lit_het.heads.contrastive import DeterministicContrastiveConfig, HetXLContrastiveConfig
from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.gaussian import GaussianContrastiveConfig
from lit_het.heads.temperature import LogTemperature
from lit_het.losses.contrastive import SigmoidLoss, SoftmaxLoss
from lit_het.objectives.mixing import Mixing, boxes
from lit_het.sharding import batch_sharding
from lit_het.tasks import quantities
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from lit_het.types import Batch
from tests.heads.references import held_singly
from tests.tasks.meshes import (
    EIGHT_DEVICES,
    KEYS,
    assert_same_loss,
    forward,
    on_devices,
    start,
    task_of,
)

B = 16
ENCODER = EncoderConfig(width=16, depth=1, mlp_width=32, num_heads=2, compute_type="float32")
CONFIG = ContrastiveConfig(
    image_tower=ViTConfig(8, 4, ENCODER, pooling="mean"),
    text_tower=TextConfig(vocabulary_size=20, length=4, embedding_size=16, encoder=ENCODER),
    head=HetXLContrastiveConfig(CovarianceConfig(3, initial_noise_norm=0.5), num_samples=3, initial_bias=-1.0),
    locked=(),
)


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


def loss_of(config, batch):
    """Returns the loss and the metrics; parameters depend on towers and head alone."""
    return forward(task_of(config).loss)(start(CONFIG)[1], batch, KEYS)


def test_rows_with_the_same_image_or_text_are_positives_unless_they_are_to_be_negatives():
    def found(duplicates, **ids):
        config = dataclasses.replace(CONFIG, loss=SigmoidLoss(duplicates=duplicates))
        return float(loss_of(config, dataclasses.replace(host_batch(), **ids))[0])

    distinct = dict.fromkeys(("image_id", "text_id"), np.arange(2 * B, dtype=np.uint32).reshape(B, 2))
    plain = found("positives", image_id=None, text_id=None)
    assert found("positives", **distinct) == plain
    for field in distinct:
        shared = distinct | {field: getattr(host_batch(), field)}
        assert found("negatives", **shared) == plain
        assert abs(found("positives", **shared) - plain) > 0.1


@pytest.mark.slow
def test_weights_of_rows_change_the_loss_and_no_metric():
    weight = np.where(np.arange(B) % 2, 0.3, 1.0).astype(np.float32)
    batches = [dataclasses.replace(host_batch(), weight=rows) for rows in (None, np.ones(B, np.float32), weight)]
    found = [loss_of(CONFIG, batch) for batch in batches]
    assert float(found[0][0]) == float(found[1][0])
    assert abs(float(found[0][0]) - float(found[2][0])) > 1e-3
    for name, metric in found[0][1].items():
        assert float(found[2][1][name]) == pytest.approx(float(metric), rel=1e-6), name


@pytest.mark.slow
def test_the_noise_is_measured_on_sixteen_rows_of_a_large_batch():
    large = jax.tree.map(lambda rows: np.concatenate([rows, np.roll(rows, 5, axis=0), rows[::-1]]), host_batch())
    found, expected = (loss_of(CONFIG, rows)[1] for rows in (large, jax.tree.map(lambda rows: rows[::3], large)))
    for side in ("image", "text"):
        for form in ("norm", "alignment", "rank"):
            name = f"{side}_noise_{form}"
            np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, err_msg=name)


def classifier(task, params):
    """Returns the classifier of the batch's texts, and the features of its images."""
    batch = jax.tree.map(jnp.asarray, host_batch())
    return task.image_classifier(params, task.encode_text(params, batch.text)), task.features(params, batch.image)


def test_mean_probabilities_over_noise_approach_those_without_noise_as_it_vanishes():
    """The mean over noise samples of the softmax over texts (HET-XL App. M)."""
    task = task_of(CONFIG)

    @jax.jit
    def probabilities(params):
        model, features, key = *classifier(task, params), jax.random.key(1)
        return [jnp.exp(quantities.log_probabilities(model, features, key, samples)) for samples in (64, 0)]

    norms, deviations = (2.0, 0.2, 0.02), []
    heads = [HetXLContrastiveConfig(CovarianceConfig(3, initial_noise_norm=norm), initial_bias=-1.0) for norm in norms]
    of_heads = jax.jit(lambda: [nnx.to_pure_dict(nnx.state(one.build(16, nnx.Rngs(0)))) for one in heads])
    for head in of_heads():
        noisy, quiet = map(np.asarray, probabilities({**start(CONFIG)[1], "head": head}))
        np.testing.assert_allclose(noisy.sum(axis=1), 1, rtol=1e-5)
        deviations.append(np.abs(noisy - quiet).max())
    assert deviations[0] > 3 * deviations[1] > 9 * deviations[2], deviations
    assert deviations[2] < 2e-3


def test_probabilities_of_texts_are_the_softmax_of_cosines_of_noise_samples():
    """1/S Σ_s softmax((α + ε_s) · β / τ) from the head's own samples, one at a time (HET-XL App. M)."""
    task, params = start(CONFIG)

    @jax.jit
    def found(params):
        head: Any = nnx.merge(task.graph, params).head
        (classes, features), key = classifier(task, params), jax.random.key(1)
        text = task.encode_text(params, jnp.asarray(host_batch().text))
        queries = head.image_queries(task.features.embedding(features), key, 6)
        logits = jnp.einsum("bsd,kd->bsk", held_singly(queries), text) / head.temperature()
        quiet = quantities.embeddings(classes, features) @ text.T / head.temperature()
        noisy = (quantities.member_log_probabilities, quantities.log_probabilities)
        others = (quantities.scores, quantities.log_normalizer, quantities.noise_norm)
        of_noise = (quantity(classes, features, key, 6) for quantity in noisy)
        return logits, *of_noise, quiet, *(quantity(classes, features) for quantity in others)

    logits, of_samples, mean, quiet, scores, log_normalizer, noise_norm = found(params)
    expected = special.softmax(np.asarray(logits, np.float64), axis=2)
    np.testing.assert_allclose(np.exp(of_samples), expected, rtol=1e-4)
    np.testing.assert_allclose(np.exp(mean), expected.mean(axis=1), rtol=1e-4)
    np.testing.assert_allclose(scores, quiet, rtol=1e-5)
    np.testing.assert_allclose(np.exp(log_normalizer), np.exp(quiet).sum(axis=1), rtol=1e-5)
    assert (noise_norm > 0).all()


def test_noise_samples_may_be_computed_in_parts(monkeypatch):
    """The mean is that of as many samples at once."""
    task, params = start(CONFIG)

    @jax.jit
    def found(params):
        noisy = *classifier(task, params), jax.random.key(1), 600
        return quantities.log_probabilities(*noisy), quantities.member_log_probabilities(*noisy)

    monkeypatch.setattr("lit_het.heads.contrastive.EVALUATED_LOGITS", 7 * B)
    mean, of_samples = found(params)
    p = np.exp(np.asarray(of_samples, np.float64))
    np.testing.assert_allclose(np.exp(mean).sum(axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(np.exp(mean), p.mean(axis=1), rtol=1e-4)


def test_a_head_without_noise_has_one_prediction_for_any_number_of_samples():
    task, params = start(dataclasses.replace(CONFIG, head=DeterministicContrastiveConfig()))

    @jax.jit
    def found(params, image):
        features = task.features(params, image)
        names = jnp.eye(4, CONFIG.text_tower.embedding_size)
        model, key = task.image_classifier(params, names), jax.random.key(1)
        return [quantities.member_log_probabilities(model, features, key, samples) for samples in (5, 0)]

    noisy, quiet = found(params, host_batch().image)
    assert noisy.shape[1] == 1
    np.testing.assert_array_equal(noisy, quiet)


def test_the_likelihood_and_the_number_of_samples_fit_each_other():
    towers, default = {"image_tower": CONFIG.image_tower, "text_tower": CONFIG.text_tower}, ContrastiveConfig()
    one, free = HetXLContrastiveConfig(num_samples=1), SoftmaxLoss(likelihood="delta")
    for head, loss, message in (
        (one, free, r"likelihood = 'delta' does not fit task.head.num_samples = 1: .* = 0, and"),
        (default.head, free, "does not fit"),
        (HetXLContrastiveConfig(num_samples=0), default.loss, "does not fit"),
    ):
        with pytest.raises(UserError, match=message):
            ContrastiveConfig(**towers, head=head, loss=loss)


def test_covariances_and_temperatures_have_learning_rates_of_their_own():
    covariance, temperature = CovarianceConfig(2, learning_rate_factor=0.5), LogTemperature(learning_rate_factor=2.0)
    head = HetXLContrastiveConfig(covariance, temperature)
    groups = dataclasses.replace(CONFIG, head=head).build().learning_rates
    assert {tuple(group.pattern.split("/")[:2]): group.learning_rate_factor for group in groups} == {
        ("head", "image_covariance"): 0.5,
        ("head", "text_covariance"): 0.5,
        ("head", "temperature"): 2.0,
    }


# Mixup and CutMix of image-text pairs: pixels and shares agree.

SIZE = 8
KEY = jax.random.key(1)
IMAGE = np.random.default_rng(0).integers(0, 256, (B, SIZE, SIZE, 3)).astype(np.uint8)
MIXED_ROWS = np.arange(B) % 6 != 3
IDS = (jnp.asarray(np.random.default_rng(1).integers(0, 9, (B, 2)), jnp.uint32),)
# More mixed images than in a usual batch, so that every form is among the sixteen.
MIXING = Mixing(fraction=0.75)
TASK = dataclasses.replace(
    CONFIG,
    head=GaussianContrastiveConfig(initial_bias=-1.0),
    loss=SigmoidLoss(pseudo_positives=0.1),
    mixing=MIXING,
)

PLAIN = dataclasses.replace(TASK, mixing=None)


def mixed(config=MIXING):
    found, of = jax.jit(lambda image, valid: config(image, valid, IDS, KEY))(
        jnp.asarray(IMAGE), jnp.asarray(MIXED_ROWS)
    )
    return np.asarray(found), jax.tree.map(np.asarray, of)


@pytest.mark.slow
def test_an_image_has_its_share_of_its_own_pixels_and_the_rest_of_the_row_before():
    found, of = mixed()
    forms = set()
    for row, pixels in enumerate(found.astype(np.float64)):
        own, other, share = IMAGE[row].astype(np.float64), IMAGE[row - 1].astype(np.float64), float(of.share[row])
        is_own, is_other = np.all(pixels == own, axis=2), np.all(pixels == other, axis=2)
        if share == 1:
            assert is_own.all()
        elif np.logical_or(is_own, is_other).all():
            np.testing.assert_allclose(is_own.mean(), share, rtol=1e-6)
            inside = np.argwhere(~is_own)
            assert len(inside) == np.prod(np.ptp(inside, axis=0) + 1)  # a box without holes
            forms.add("cut")
        else:
            assert np.abs(pixels - (share * own + (1 - share) * other)).max() <= 0.5 + 1e-4
            forms.add("mean")
        assert share >= 0.5
    assert forms == {"cut", "mean"}
    np.testing.assert_array_equal(of.index, (np.arange(B) - 1) % B)
    np.testing.assert_array_equal(of.ids[0], np.roll(IDS[0], 1, axis=0))


def test_neither_an_invalid_row_nor_the_one_after_it_is_mixed():
    untouched = ~MIXED_ROWS | ~np.roll(MIXED_ROWS, 1)
    found, of = mixed(Mixing(fraction=1.0))
    np.testing.assert_array_equal(found[untouched], IMAGE[untouched])
    np.testing.assert_array_equal(of.share == 1, untouched)


@pytest.mark.parametrize("alpha", [0.5, 2.0])
def test_as_many_images_are_mixed_as_configured_each_with_a_share_of_its_own(alpha):
    mixing, rows = Mixing(fraction=0.3, alpha=alpha, cutmix=0.0), 4000
    image, valid = np.zeros((rows, 1, 1, 1), np.uint8), np.ones(rows, bool)
    share = np.asarray(jax.jit(lambda image, valid: mixing(image, valid, (), KEY)[1].share)(image, valid), np.float64)
    count = np.sum(share < 1)
    assert stats.binomtest(int(count), rows, 0.3).pvalue > 0.01
    folded = stats.kstest(share[share < 1], lambda x: 2 * stats.beta.cdf(x, alpha, alpha) - 1)
    assert folded.pvalue > 0.01


def test_boxes_have_the_form_of_the_image_and_every_pixel_may_be_their_centre():
    # The last five are of no size.
    area = np.where(np.arange(4005) < 4000, 0.25, 0.0).astype(np.float32)
    inside, nothing = np.split(np.asarray(jax.jit(lambda area: boxes(KEY, area, 8, 12))(area)), [4000])
    heights, widths = inside.any(axis=2).sum(axis=1), inside.any(axis=1).sum(axis=1)
    assert (heights.max(), widths.max()) == (4, 6)
    # 4 rows around each of 8: centres in rows 0, 1 and 7 lose 2, 1 and 1 rows.
    shares = {height: round(float(np.mean(heights == height)), 1) for height in (2, 3, 4)}
    assert shares == {2: 0.1, 3: 0.2, 4: 0.6}
    np.testing.assert_array_equal(inside.sum(axis=(1, 2)), heights * widths)
    assert not nothing.any()


@pytest.mark.slow
def test_the_task_takes_the_loss_of_mixed_images():
    """The plain task on the mixed images has the embeddings; its loss then has the labels."""
    given: list[Any] = []

    class Recorded(SigmoidLoss):
        def __call__(self, *arguments):
            given[:] = arguments
            return super().__call__(*arguments)

    task, params = dataclasses.replace(PLAIN, loss=Recorded()).build(), start(PLAIN)[1]

    @jax.jit
    def computed(params, batch):
        pixels, of = MIXING(batch.image, batch.valid, [batch.image_id, batch.text_id], KEYS("mixing"))
        _, metrics = task.loss(params, dataclasses.replace(batch, image=pixels), KEYS)
        others, loss = metrics["bottleneck_loss"] + metrics["inclusion_loss"], SigmoidLoss(pseudo_positives=0.1)
        return task_of(TASK).loss(params, batch, KEYS)[0] - others, loss(*given), loss(*[*given, of])

    found, plain, with_labels = computed(params, host_batch())
    np.testing.assert_allclose(found, with_labels, rtol=1e-4)
    assert abs(float(plain - with_labels)) > 1e-3


@pytest.mark.devices
@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "like", "ring"),
    [
        pytest.param(CONFIG, CONFIG, SoftmaxLoss("ring", 3), id="noise"),
        pytest.param(TASK, PLAIN, SigmoidLoss("ring", 3, pseudo_positives=0.1), id="mixed images"),
    ],
)
def test_eight_devices_have_the_loss_and_metrics_of_one(config, like, ring):
    """One device has all logits at once."""
    on_eight, on_one = (
        forward(task_of(dataclasses.replace(config, loss=loss)).loss)
        for loss in (ring, dataclasses.replace(ring, form="dense"))
    )
    params = start(like)[1]
    found = on_devices(on_eight, EIGHT_DEVICES, params, host_batch(), KEYS)
    assert_same_loss(found, on_one(params, host_batch(), KEYS))


@pytest.mark.slow
@pytest.mark.devices
def test_a_device_passes_on_one_image():
    mesh = EIGHT_DEVICES.build()
    with jax.set_mesh(mesh):
        rows = jax.device_put((jnp.asarray(IMAGE), jnp.asarray(MIXED_ROWS)), batch_sharding(mesh))
        program = jax.jit(lambda image, valid: MIXING(image, valid, (), KEY)[0])
        text = str(program.lower(*rows).compile().as_text())
    assert re.findall(r"= (u8\[[\d,]*\])\S* collective-permute\(", text) == [f"u8[1,{SIZE},{SIZE},3]"]
    assert not re.findall(r"u8\S* all-gather", text)


def test_mixing_that_makes_no_sense_is_refused():
    with pytest.raises(UserError, match=r"task.mixing gives an image a share of two texts, .*--task.loss sigmoid"):
        dataclasses.replace(TASK, loss=SoftmaxLoss())
    for field, value, limit in (("fraction", 1.5, "at most 1"), ("cutmix", -0.5, "at least 0"), ("alpha", 0.0, "pos")):
        with pytest.raises(UserError, match=f"Mixing: {field} = {value} must be {limit}"):
            Mixing(**{field: value})
