"""Both stages of UViM: the loss of masks and their code, words that follow, and codes that become masks."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het import parameters
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.losses.masks import merged, pixel_loss
from lit_het.random import keys_at
from lit_het.tasks import quantities
from lit_het.tasks.base import Task
from lit_het.tasks.mask_oracle import MaskOracleConfig
from lit_het.tasks.segmentation import SegmentationConfig
from lit_het.towers.codebook import Counted, followed
from lit_het.towers.decoder import DecoderConfig
from lit_het.towers.oracle_config import CodebookConfig, OracleConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from lit_het.training.durations import Duration, RunLength
from lit_het.training.optimizers_config import AdamW, Optimizer
from lit_het.training.schedules import Schedule
from lit_het.training.step import advanced, averaged, initial_state, make_step, of_trainable, skipping_nonfinite
from lit_het.types import Batch
from tests.refusals import assert_refused
from tests.tasks.meshes import (
    KEYS,
    assert_eight_devices_have_the_loss_of_one,
    assert_same,
    forward,
    loss_and_gradient,
    start,
    task_of,
)

ENCODER = EncoderConfig(width=8, depth=1, mlp_width=12, num_heads=2)
ORACLE = OracleConfig(8, 2, 3, 2, 4, CodebookConfig(6, 5, momentum=0.9), ENCODER, ENCODER)
STAGE_1 = MaskOracleConfig(ORACLE, code_dropout="none", commitment=0.5)
STAGE_2 = SegmentationConfig(
    image_tower=ViTConfig(8, 4, ENCODER, pooling="none"),
    decoder=DecoderConfig(7, 4, dataclasses.replace(ENCODER, width=16, causal=True), dropout=0.0),
    oracle=ORACLE,
)
RANDOM = np.random.default_rng(0)
IMAGE = RANDOM.integers(0, 256, (8, 8, 8, 3), dtype=np.uint8)
# Instances from 1 to 3, one more than are learned, of the classes 1 and 2; class 3 is stuff.
CLASSES = RANDOM.integers(0, 4, (8, 8, 8)).astype(np.int32)
MASKS = np.stack([CLASSES, np.where(CLASSES % 3 > 0, RANDOM.integers(1, 4, CLASSES.shape), 0)], -1).astype(np.int32)
VALID = np.array([True] * 7 + [False])
BATCH = Batch(jnp.asarray(VALID), image=jnp.asarray(IMAGE), masks=jnp.asarray(MASKS))


@functools.cache
def of_oracle():
    """The code of the images, and the logits of each pixel, in the order of patches."""
    task, params = start(STAGE_1)

    @jax.jit
    def run(params):
        oracle = task.model(params).oracle
        code = oracle.encode(BATCH.masks, BATCH.image)
        return code, oracle.decode(code.words, BATCH.image), oracle.in_patches(BATCH.masks)

    return jax.device_get(run(params))


def minus_log_p(logits, labels):
    """Of each pixel with a known label, slowly; 0 of others."""
    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True)).astype(float)
    p = shifted / shifted.sum(axis=-1, keepdims=True)
    found = np.zeros(labels.shape)
    for place in np.ndindex(labels.shape):
        if labels[place] < p.shape[-1]:
            found[place] = -np.log(p[*place, labels[place]])
    return found


def test_the_task_keeps_the_protocol():
    task, params = start(STAGE_1)
    assert isinstance(task, Task)
    assert set(params) == {"oracle"}
    locked, trainable = parameters.partition(start(STAGE_2)[1], task_of(STAGE_2).locked)
    assert (set(locked), set(trainable)) == ({"image_tower", "oracle"}, {"decoder", "head"})


def test_the_loss_is_the_mean_over_pixels_of_valid_images_with_the_distance_of_words():
    code, logits, labels = of_oracle()
    of_classes = minus_log_p(logits.classes, labels[..., 0])[VALID].mean()
    of_instances = minus_log_p(logits.instances, labels[..., 1])[VALID].mean()
    assert (labels[..., 1] == 3).any()  # adds nothing
    commitment = ((code.vectors - code.words) ** 2)[VALID].mean()
    loss, metrics = forward(task_of(STAGE_1).loss)(start(STAGE_1)[1], BATCH, KEYS)
    assert float(loss) == pytest.approx(of_classes + of_instances + 0.5 * commitment, rel=1e-5)
    right = (logits.classes.argmax(axis=-1) == labels[..., 0])[VALID].mean()
    assert float(metrics["class_accuracy"]) == pytest.approx(right)
    np.testing.assert_array_equal(metrics["codebook"].counts, np.bincount(code.numbers[VALID].ravel(), minlength=6))


def test_the_code_standardises_vectors_and_takes_their_nearest_words():
    code, *_ = of_oracle()
    np.testing.assert_allclose(code.vectors.mean(axis=2), 0, atol=1e-5)
    np.testing.assert_allclose(code.vectors.var(axis=2), 1, rtol=1e-3)
    book = start(STAGE_1)[1]["oracle"]["codebook"]
    means = np.asarray(book["sums"]) / np.asarray(book["counts"])[:, None]
    words = means / np.linalg.norm(means, axis=1, keepdims=True)
    distances = ((code.vectors[:, :, None] - words) ** 2).sum(axis=3)
    np.testing.assert_array_equal(code.numbers, distances.argmin(axis=2))


def test_the_encoder_learns_through_the_code_and_the_codebook_has_no_gradient():
    (_, gradient) = loss_and_gradient(task_of(STAGE_1).loss, start(STAGE_1)[1], BATCH)
    flat = parameters.flatten(gradient["oracle"])
    for path, array in flat.items():
        is_of_words = path.startswith("codebook/")
        assert np.any(array) != is_of_words or path.endswith("key/bias"), path


def test_the_gradient_is_that_of_vectors_which_are_moved_to_their_words():
    """As if the quantization added a constant to each vector, and the words of the commitment were constants."""
    task, params = start(STAGE_1)
    code, _, labels = of_oracle()
    share = jnp.asarray(VALID / VALID.sum(), jnp.float32)

    def surrogate(params, batch, _):
        oracle = task.model(params).oracle
        vectors = oracle.encode(batch.masks, batch.image).vectors
        logits = oracle.decode(vectors + (code.words - code.vectors), batch.image)
        losses = [pixel_loss(x, jnp.asarray(labels[..., one]), share).loss for one, x in enumerate(logits)]
        distances = jnp.mean((vectors - code.words) ** 2, axis=(1, 2))
        return losses[0] + losses[1] + 0.5 * jnp.sum(distances * share), {}

    assert_same(loss_and_gradient(task.loss, params, BATCH), loss_and_gradient(surrogate, params, BATCH))


@functools.cache
def compiled_step():
    task, optimizer = (
        task_of(STAGE_1),
        Optimizer(AdamW(), weight_decay=0.1).build(Schedule(1e-2, Duration(1)), RunLength(9, 8)),
    )
    step = advanced(make_step(of_trainable(task.loss), optimizer, 0), task.advanced, 0)
    return optimizer, jax.jit(skipping_nonfinite(averaged(step, 0.5)))


def stepped(batch=BATCH):
    """Returns the state before and after a step, and its metrics."""
    optimizer, step = compiled_step()
    before = initial_state(start(STAGE_1)[1], optimizer, averages=True)
    return before, *step(before, {}, batch)


def test_a_step_moves_the_words_by_their_vectors_and_nothing_else_does():
    before, after, metrics = stepped()
    code, *_ = of_oracle()
    counts, sums = np.zeros(6), np.zeros((6, 5))
    for number, vector in zip(code.numbers[VALID].ravel(), code.vectors[VALID].reshape(-1, 5), strict=True):
        counts[number] += 1
        sums[number] += vector
    book = Counted(**before.params["oracle"]["codebook"])
    expected = followed(
        book,
        Counted(*(jnp.asarray(x, jnp.float32) for x in (counts, sums))),
        ORACLE.codebook,
        keys_at(0, 0)("codebook"),
    )
    found = after.params["oracle"]["codebook"]
    np.testing.assert_allclose(found["counts"], expected.counts, rtol=1e-6)
    np.testing.assert_allclose(found["sums"], expected.sums, atol=1e-5)
    average = after.average["oracle"]["codebook"]["counts"]
    np.testing.assert_allclose(average, (book.counts + expected.counts) / 2, rtol=1e-6)
    assert "codebook" not in metrics
    assert all(np.ndim(value) == 0 for value in metrics.values())


def test_a_skipped_step_leaves_the_words_alone():
    broken = jax.tree.map(lambda x: x, start(STAGE_1)[1])
    broken["oracle"]["to_words"]["bias"] = jnp.full(5, jnp.nan)
    optimizer, step = compiled_step()
    before = initial_state(broken, optimizer, averages=True)
    after, metrics = step(before, {}, BATCH)
    assert metrics["skipped"]
    np.testing.assert_array_equal(
        after.params["oracle"]["codebook"]["sums"], before.params["oracle"]["codebook"]["sums"]
    )


def test_dropped_words_change_the_loss_of_training_by_chance():
    config = dataclasses.replace(STAGE_1, code_dropout="random")
    losses = [float(forward(task_of(config).loss)(start(config)[1], BATCH, keys_at(0, n))[0]) for n in range(2)]
    assert losses[0] != losses[1]


@pytest.mark.devices
@pytest.mark.parametrize("config", [STAGE_1, STAGE_2], ids=["oracle", "segmentation"])
def test_eight_devices_have_the_loss_of_one(config):
    def loss(params, batch, keys):
        value, metrics = task_of(config).loss(params, batch, keys)
        # Of the codebook, whose counts and sums are those of all devices.
        found = metrics.pop("codebook", None)
        return value, metrics if found is None else metrics | {"sums": jnp.sum(jnp.abs(found.sums))}

    assert_eight_devices_have_the_loss_of_one(loss, start(config)[1], BATCH)


def log_p_of_codes(params, inputs):
    """The log-probabilities of the word after each of some tokens ``[b n k]``, all computed at once."""
    task = task_of(STAGE_2)
    model = task.model(params)
    features = task.features(params, BATCH.image)
    source = features[:, : task.features.num_values].reshape(8, -1, ENCODER.width)
    found, _ = model.decoder(inputs, model.decoder.start(source))
    kernel, bias = (np.asarray(x[...]) for x in (model.head.logits.kernel, model.head.logits.bias))
    return np.asarray(jax.nn.log_softmax(jnp.asarray(np.asarray(found) @ kernel + bias)), np.float64)


def test_stage_2_learns_the_words_of_the_locked_oracle():
    _, params = start(STAGE_2)
    numbers = np.asarray(task_of(STAGE_2).model(params).oracle.encode(BATCH.masks, BATCH.image).numbers)
    inputs = np.pad(numbers[:, :-1] + 1, ((0, 0), (1, 0))).astype(np.int32)
    log_p = log_p_of_codes(params, jnp.asarray(inputs))
    of_words = np.take_along_axis(log_p, numbers[..., None] + 1, axis=2)[..., 0]
    loss, metrics = forward(task_of(STAGE_2).loss)(params, BATCH, KEYS)
    assert float(loss) == pytest.approx(-of_words[VALID].mean(), rel=1e-5)
    assert float(metrics["tokens"]) == 7 * 4


def test_masks_are_those_of_the_most_probable_word_after_each_other():
    task, params = start(STAGE_2)
    features = task.features(params, BATCH.image)
    assert features.shape == (8, task.features.size) == (8, 4 * 8 + 8 * 8 * 3)
    codes = np.zeros((8, 4), np.int32)
    for place in range(4):
        inputs = np.pad(codes[:, :-1] + 1, ((0, 0), (1, 0))) * (np.arange(4) <= place)
        # The start is no word.
        codes[:, place] = log_p_of_codes(params, jnp.asarray(inputs, jnp.int32))[:, place, 1:].argmax(axis=1)
    oracle = task.model(params).oracle
    logits = oracle.decode(oracle.codebook.words()[codes], BATCH.image)
    flat = [x.reshape(8, 64, -1) for x in logits]
    expected = merged(*flat).reshape(8, 16, 4, 2)
    expected = np.stack([oracle.as_image(expected[..., one]) for one in range(2)], axis=-1)
    found = quantities.masks(task.image_classifier(params), features)
    np.testing.assert_array_equal(found, expected)
    assert found.shape == (8, 8, 8, 2)
    assert len(np.unique(codes)) > 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"decoder": dataclasses.replace(STAGE_2.decoder, vocabulary_size=9)},
            "codebook of 6 words.*vocabulary-size 7",
        ),
        ({"decoder": dataclasses.replace(STAGE_2.decoder, length=9)}, "codes have 4 words.*decoder.length 4"),
        ({"image_tower": ViTConfig(8, 4, ENCODER, pooling="mean")}, "pooling to 'none'"),
    ],
)
def test_parts_that_do_not_fit_are_refused(fields, message):
    assert_refused(message, dataclasses.replace, STAGE_2, **fields)


def test_an_oracle_that_would_be_trained_is_refused():
    config = dataclasses.replace(STAGE_2, locked=("image_tower/.*",))
    run = SimpleNamespace(data=LoaderConfig((), image_size=8, masks=True))
    assert_refused("add 'oracle/", config.check_data, run, None, None)


def test_an_oracle_predicts_nothing_of_an_image_alone():
    assert_refused("predicts nothing of an image alone", STAGE_1.require_image_tower)
