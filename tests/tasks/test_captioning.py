"""The captioning task: its loss is that of the target tokens, given the image and the tokens before."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.deterministic import DeterministicConfig
from lit_het.heads.het_xl import HetXLConfig
from lit_het.heads.sampling import SamplingConfig
from lit_het.losses.classification import SoftmaxCrossEntropy
from lit_het.random import keys_at
from lit_het.sharding import MeshConfig, batch_sharding, tree_shardings
from lit_het.tasks.base import Task
from lit_het.tasks.captioner import shifted
from lit_het.tasks.captioning import CaptioningConfig
from lit_het.tasks.generation import Prompt, generate
from lit_het.tasks.given_texts import text_log_probabilities
from lit_het.texts import GenerationConfig
from lit_het.towers.decoder import DecoderConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from lit_het.training.step import initial_state, make_train_step
from lit_het.types import Batch

ENCODER = EncoderConfig(width=8, depth=1, mlp_width=12, num_heads=2)
DECODER = DecoderConfig(
    vocabulary_size=9, length=5, encoder=dataclasses.replace(ENCODER, width=16, causal=True), dropout=0.0
)
TOWER = ViTConfig(8, 4, ENCODER, pooling="none")
CAPTIONING = CaptioningConfig(TOWER, DECODER)
NOISY = dataclasses.replace(
    CAPTIONING, head=HetXLConfig(CovarianceConfig(3), sampling=SamplingConfig(num_samples=4, num_eval_samples=4))
)
RANDOM = np.random.default_rng(0)
IMAGE = jnp.asarray(RANDOM.integers(0, 256, (8, 8, 8, 3)), jnp.uint8)
# A prompt of 0 to 2 tokens, a target that ends with the token 1, and padding.
TEXT = np.asarray([[3, 4, 1, 0, 0], [5, 6, 7, 1, 0], [8, 2, 3, 4, 1], [2, 1, 0, 0, 0]] * 2, np.int32)
PROMPT_LENGTH = np.asarray([0, 1, 2, 0, 1, 2, 0, 1])
TARGET = (np.arange(5) >= PROMPT_LENGTH[:, None]) & (np.cumsum(TEXT == 1, axis=1) - (TEXT == 1) == 0)
VALID = np.asarray([True] * 7 + [False])
BATCH = Batch(jnp.asarray(VALID), image=IMAGE, text=jnp.asarray(TEXT), text_target=jnp.asarray(TARGET))
KEYS = keys_at(0, 0)


@functools.cache
def start(config=CAPTIONING):
    task = config.build()
    return task, jax.jit(task.initialize)(jax.random.key(0))


@functools.cache
def compiled(config):
    return jax.jit(start(config)[0].loss)


def loss_of(config=CAPTIONING, batch=BATCH, params=None):
    loss, metrics = compiled(config)(start(config)[1] if params is None else params, batch, KEYS)
    return float(loss), {name: float(value) for name, value in metrics.items()}


def log_p(config=CAPTIONING):
    """Returns the log-probability of every token ``[b l k]``, from the logits of the model."""
    task, params = start(config)
    model = task.model(params)
    source = task.source(params, task.features(params, IMAGE))
    features, _ = model.decoder(shifted(jnp.asarray(TEXT)), model.decoder.start(*source))
    samples = model.head(features.reshape(40, -1), None)
    logits = samples.logits(samples.prepare(samples.features), None, jnp.arange(1))
    return np.asarray(jax.nn.log_softmax(logits), np.float64).reshape(8, 5, -1)


def test_the_task_keeps_the_protocol_and_locks_the_image_tower():
    task, params = start()
    assert isinstance(task, Task)
    locked, trainable = parameters.partition(params, task.locked)
    assert (set(locked), set(trainable)) == ({"image_tower"}, {"decoder", "head"})
    above = parameters.flatten(task.layers_above(params))
    assert above["decoder/tokens/embedding"] == 2
    assert above["head/logits/kernel"] == 0


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_mean_over_target_tokens_of_valid_rows(smoothing):
    config = dataclasses.replace(CAPTIONING, loss=SoftmaxCrossEntropy(label_smoothing=smoothing))
    counted, p = TARGET & VALID[:, None], log_p()
    right = -np.take_along_axis(p, TEXT[..., None], axis=2)[..., 0]
    expected = (1 - smoothing) * right - smoothing * p.mean(axis=2)
    loss, metrics = loss_of(config)
    assert loss == pytest.approx(expected[counted].mean(), rel=1e-5)
    assert metrics["top1"] == pytest.approx((p.argmax(axis=2) == TEXT)[counted].mean())
    assert metrics["tokens"] == counted.sum()


def test_given_texts_have_the_log_probabilities_of_their_tokens():
    task, params = start()
    source = task.source(params, task.features(params, IMAGE))
    found = text_log_probabilities(task, params, source, jnp.asarray(TEXT), jnp.asarray(TARGET))
    expected = np.take_along_axis(log_p(), TEXT[..., None], axis=2)[..., 0]
    np.testing.assert_allclose(found, np.where(TARGET, expected, 0), atol=1e-5)


def test_neither_padding_nor_rows_that_cannot_be_read_count():
    loss, _ = loss_of()
    padding = np.where((np.cumsum(TEXT == 1, axis=1) - (TEXT == 1)) > 0, 7, TEXT)
    broken = np.asarray(padding)
    broken[7] = 6
    embedding = np.array(start()[0].features(start()[1], IMAGE))
    embedding[7] = np.nan
    batch = dataclasses.replace(BATCH, image=None, image_embedding=jnp.asarray(embedding), text=jnp.asarray(broken))
    params = start()[1]
    value, gradient = jax.jit(jax.value_and_grad(lambda p: start()[0].loss(p, batch, KEYS)[0]))(params)
    assert float(value) == pytest.approx(loss, rel=1e-6)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_weights_of_samples_are_those_of_their_tokens():
    weight = np.linspace(0.2, 1.6, 8).astype(np.float32)
    right = -np.take_along_axis(log_p(), TEXT[..., None], axis=2)[..., 0]
    counted = TARGET & VALID[:, None]
    expected = np.average(right[counted], weights=np.broadcast_to(weight[:, None], counted.shape)[counted])
    assert loss_of(batch=dataclasses.replace(BATCH, weight=jnp.asarray(weight)))[0] == pytest.approx(expected, rel=1e-5)


def test_tied_logits_share_the_embedding_of_tokens():
    tied = dataclasses.replace(CAPTIONING, decoder=dataclasses.replace(DECODER, tied_output=True))
    _, params = start(tied)
    assert set(params["head"]["logits"]) == {"bias"}
    untied = jax.tree.map(jnp.copy, params)
    untied["head"]["logits"]["kernel"] = params["decoder"]["tokens"]["embedding"].T
    assert loss_of(tied)[0] == pytest.approx(loss_of(params=untied)[0], rel=1e-6)

    def gradient(config, params):
        return jax.jit(jax.grad(lambda params: start(config)[0].loss(params, BATCH, KEYS)[0]))(params)

    apart = gradient(CAPTIONING, untied)
    total = apart["decoder"]["tokens"]["embedding"] + apart["head"]["logits"]["kernel"].T
    np.testing.assert_allclose(gradient(tied, params)["decoder"]["tokens"]["embedding"], total, atol=1e-5)


@pytest.mark.parametrize("is_tied", [False, True])
def test_het_xl_averages_probabilities_of_tokens_over_noise(is_tied):
    config = dataclasses.replace(NOISY, decoder=dataclasses.replace(DECODER, tied_output=is_tied))
    task, params = start(config)
    model, counted = task.model(params), TARGET & VALID[:, None]
    source = task.source(params, task.features(params, IMAGE))
    features, _ = model.decoder(shifted(jnp.asarray(TEXT)), model.decoder.start(*source))
    samples = model.head(features.reshape(40, -1), KEYS("noise"))
    logits = samples.logits(samples.prepare(samples.features), samples.keys, jnp.arange(4))
    p = np.asarray(jax.nn.softmax(logits), np.float64).mean(axis=1).reshape(8, 5, -1)
    expected = -np.log(np.take_along_axis(p, TEXT[..., None], axis=2)[..., 0])
    loss, metrics = loss_of(config)
    assert loss == pytest.approx(expected[counted].mean(), rel=1e-5)
    norms = np.asarray(model.head.noise_norm(samples.features)).reshape(8, 5)
    assert metrics["token_noise_norm"] == pytest.approx(norms[counted].mean(), rel=1e-5)


def test_stored_tokens_and_microbatches_give_the_loss_of_pixels():
    task, params = start()
    features = task.features(params, IMAGE)
    assert features.shape == (8, 4 * 8)
    stored = dataclasses.replace(BATCH, image=None, image_embedding=features)
    assert loss_of(batch=stored)[0] == pytest.approx(loss_of()[0], rel=1e-6)
    assert loss_of(dataclasses.replace(CAPTIONING, microbatches=4))[0] == pytest.approx(loss_of()[0], rel=1e-6)


def test_dropout_changes_the_loss_from_step_to_step():
    config = dataclasses.replace(CAPTIONING, decoder=dataclasses.replace(DECODER, dropout=0.3))
    _, params = start(config)
    one, other = (float(compiled(config)(params, BATCH, keys_at(0, step))[0]) for step in (0, 1))
    assert one != other
    assert abs(one - loss_of(params=params)[0]) > 1e-3


@pytest.mark.parametrize("config", [CAPTIONING, NOISY], ids=["deterministic", "HET-XL"])
def test_eight_devices_give_the_loss_and_the_gradient_of_one(config):
    task, params = start(config)

    def loss(params, batch):
        return task.loss(params, batch, KEYS)[0]

    expected = jax.jit(jax.value_and_grad(loss))(params, BATCH)
    mesh = MeshConfig().build()
    with jax.set_mesh(mesh):
        placed = jax.device_put(params, tree_shardings(params, mesh))
        found = jax.jit(jax.value_and_grad(loss))(placed, jax.device_put(BATCH, batch_sharding(mesh)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), found, expected)


def test_a_decoder_learns_to_write_the_captions_of_its_images():
    task, params = start()
    locked, trainable = parameters.partition(params, task.locked)
    optimizer = optax.adam(1e-2)
    step, state = jax.jit(make_train_step(task, optimizer, seed=0)), initial_state(trainable, optimizer)
    batch = dataclasses.replace(BATCH, valid=jnp.ones(8, bool))
    losses = []
    for _ in range(150):
        state, metrics = step(state, locked, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.1 < losses[0]
    merged = parameters.merge(locked, state.params)
    source, longest = task.source(merged, task.features(merged, IMAGE)), 2
    prompt = Prompt(jnp.asarray(TEXT[:, :longest]), jnp.asarray(PROMPT_LENGTH, jnp.int32))
    texts = generate(task, merged, source, prompt, GenerationConfig(num_tokens=3), end_token=1)
    for row, (text, begin) in enumerate(zip(TEXT, PROMPT_LENGTH, strict=True)):
        expected = text[begin : begin + 3] * TARGET[row, begin : begin + 3]
        written = np.asarray(texts.tokens[row, 0])[: len(expected)]
        np.testing.assert_array_equal(written, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_tower": ViTConfig(8, 4, ENCODER, pooling="mean")}, "set task.image_tower.pooling to 'none'"),
        ({"image_tower": dataclasses.replace(TOWER, projection_size=8)}, "leave out its further layers"),
        ({"microbatches": 0}, "microbatches = 0 must be at least 1"),
        (
            {"decoder": dataclasses.replace(DECODER, tied_output=True), "head": DeterministicConfig(zero_kernel=True)},
            "set task.head.zero_kernel to False",
        ),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(CAPTIONING, **changes)
