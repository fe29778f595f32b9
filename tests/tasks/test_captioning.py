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
from lit_het.heads.classification_config import DeterministicConfig
from lit_het.heads.contrastive import DeterministicContrastiveConfig, HetXLContrastiveConfig
from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.het_xl import HetXLConfig
from lit_het.heads.sampling import SamplingConfig
from lit_het.losses.classification import SoftmaxCrossEntropy
from lit_het.losses.contrastive import SigmoidLoss
from lit_het.objectives import tokens
from lit_het.objectives.captioner import CaptionerConfig
from lit_het.objectives.mixing import Mixing
from lit_het.objectives.tokens import shifted
from lit_het.random import keys_at
from lit_het.sharding import MeshConfig
from lit_het.tasks.base import Task
from lit_het.tasks.captioning import CaptioningConfig
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.tasks.generation import Prompt, generate
from lit_het.tasks.given_texts import text_log_probabilities
from lit_het.texts import GenerationConfig
from lit_het.towers.decoder import DecoderConfig
from lit_het.towers.resnet import ResNetConfig
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from lit_het.training.step import initial_state, make_step, of_trainable
from lit_het.types import Batch
from tests.heads.references import all_at_once
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
COUNTED = TARGET & VALID[:, None]
BATCH = Batch(jnp.asarray(VALID), image=IMAGE, text=jnp.asarray(TEXT), text_target=jnp.asarray(TARGET))


def evaluated(config=CAPTIONING, batch=BATCH, params=None, keys=KEYS):
    """Returns the loss and the metrics."""
    return forward(task_of(config).loss)(start(config)[1] if params is None else params, batch, keys)


def loss_of(config=CAPTIONING, batch=BATCH, **options):
    return float(evaluated(config, batch, **options)[0])


@functools.cache
def token_samples(config, *, is_noisy=False):
    """Returns the log-probabilities of every token in noise samples ``[b l s k]``, and the noise norms ``[b l]``."""
    task, params = start(config)

    @jax.jit
    def run(params):
        model = task.model(params)
        source = task.source(params, task.features(params, IMAGE))
        features, _ = model.decoder(shifted(jnp.asarray(TEXT)), model.decoder.start(*source))
        samples = model.head(features.reshape(40, -1), KEYS("noise") if is_noisy else None)
        return jax.nn.log_softmax(all_at_once(samples)), model.head.noise_norm(samples.features)

    log_p, norms = run(params)
    return np.asarray(log_p, np.float64).reshape(8, 5, -1, 9), np.asarray(norms).reshape(8, 5)


def log_p():
    return token_samples(CAPTIONING)[0][:, :, 0]


def of_text(log_p):
    return np.take_along_axis(log_p, TEXT[..., None], axis=2)[..., 0]


def test_the_task_keeps_the_protocol_and_locks_the_image_tower():
    task, params = start(CAPTIONING)
    assert isinstance(task, Task)
    locked, trainable = parameters.partition(params, task.locked)
    assert (set(locked), set(trainable)) == ({"image_tower"}, {"decoder", "head"})
    above = parameters.flatten(task.layers_above(params))
    assert above["decoder/tokens/embedding"] == 2
    assert above["head/logits/kernel"] == 0


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_mean_over_target_tokens_of_valid_rows(smoothing):
    config = dataclasses.replace(CAPTIONING, loss=SoftmaxCrossEntropy(label_smoothing=smoothing))
    p = log_p()
    expected = -(1 - smoothing) * of_text(p) - smoothing * p.mean(axis=2)
    loss, metrics = evaluated(config, params=start(CAPTIONING)[1])
    assert float(loss) == pytest.approx(expected[COUNTED].mean(), rel=1e-5)
    assert float(metrics["top1"]) == pytest.approx((p.argmax(axis=2) == TEXT)[COUNTED].mean())
    assert float(metrics["tokens"]) == COUNTED.sum()


def test_given_texts_have_the_log_probabilities_of_their_tokens():
    task, params = start(CAPTIONING)

    @jax.jit
    def found(params):
        source = task.source(params, task.features(params, IMAGE))
        return text_log_probabilities(task, params, source, jnp.asarray(TEXT), jnp.asarray(TARGET))

    np.testing.assert_allclose(found(params), np.where(TARGET, of_text(log_p()), 0), atol=1e-5)


def test_stored_tokens_have_the_loss_of_pixels_and_neither_padding_nor_rows_that_cannot_be_read_count():
    task, params = start(CAPTIONING)
    stored = np.array(jax.jit(task.features)(params, IMAGE))
    padding = np.where((np.cumsum(TEXT == 1, axis=1) - (TEXT == 1)) > 0, 7, TEXT)
    broken = np.asarray(padding)
    broken[7] = 6
    assert stored.shape == (8, 4 * 8)
    for text, last in ((TEXT, stored[7]), (broken, np.nan)):
        stored[7] = last
        batch = dataclasses.replace(BATCH, image=None, image_embedding=jnp.asarray(stored), text=jnp.asarray(text))
        (value, _), gradient = loss_and_gradient(task.loss, params, batch)
        assert float(value) == pytest.approx(loss_of(), rel=1e-6)
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_weights_of_samples_are_those_of_their_tokens():
    weight = np.linspace(0.2, 1.6, 8).astype(np.float32)
    expected = np.average(-of_text(log_p())[COUNTED], weights=np.broadcast_to(weight[:, None], (8, 5))[COUNTED])
    assert loss_of(batch=dataclasses.replace(BATCH, weight=jnp.asarray(weight))) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_tied_logits_share_the_embedding_of_tokens():
    tied = dataclasses.replace(CAPTIONING, decoder=dataclasses.replace(DECODER, tied_output=True))
    _, params = start(tied)
    assert set(params["head"]["logits"]) == {"bias"}
    kernel = jnp.asarray(np.asarray(params["decoder"]["tokens"]["embedding"]).T)
    untied = {**params, "head": {"logits": {**params["head"]["logits"], "kernel": kernel}}}
    ((loss, _), gradient), ((loss_apart, _), apart) = (
        loss_and_gradient(task_of(config).loss, some, BATCH) for config, some in ((tied, params), (CAPTIONING, untied))
    )
    assert float(loss) == pytest.approx(float(loss_apart), rel=1e-6)
    total = np.asarray(apart["decoder"]["tokens"]["embedding"]) + np.asarray(apart["head"]["logits"]["kernel"]).T
    np.testing.assert_allclose(gradient["decoder"]["tokens"]["embedding"], total, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [False, True])
def test_het_xl_averages_probabilities_of_tokens_over_noise(is_tied):
    config = dataclasses.replace(NOISY, decoder=dataclasses.replace(DECODER, tied_output=is_tied))
    log_p, norms = token_samples(config, is_noisy=True)
    assert log_p.shape == (8, 5, 4, 9)
    loss, metrics = evaluated(config)
    assert float(loss) == pytest.approx(-np.log(of_text(np.exp(log_p).mean(axis=2)))[COUNTED].mean(), rel=1e-5)
    assert float(metrics["token_noise_norm"]) == pytest.approx(norms[COUNTED].mean(), rel=1e-5)


def test_microbatches_leave_the_loss_and_dropout_changes_it_from_step_to_step():
    params = start(CAPTIONING)[1]
    in_parts = dataclasses.replace(CAPTIONING, microbatches=4)
    assert loss_of(in_parts, params=params) == pytest.approx(loss_of(), rel=1e-6)
    config = dataclasses.replace(CAPTIONING, decoder=dataclasses.replace(DECODER, dropout=0.3))
    one, other = (loss_of(config, params=params, keys=keys_at(0, step)) for step in (0, 1))
    assert one != other
    assert abs(one - loss_of()) > 1e-3


@pytest.mark.devices
@pytest.mark.slow
def test_eight_devices_give_the_loss_of_one():
    """With noise; the captioner below has none."""
    task, params = start(NOISY)
    assert_eight_devices_have_the_loss_of_one(task.loss, params, BATCH, MeshConfig())


@pytest.mark.slow
def test_a_decoder_learns_to_write_the_captions_of_its_images():
    task, params = start(CAPTIONING)
    locked, trainable = parameters.partition(params, task.locked)
    optimizer = optax.adam(1e-2)
    step, state = jax.jit(make_step(of_trainable(task.loss), optimizer, seed=0)), initial_state(trainable, optimizer)
    batch = dataclasses.replace(BATCH, valid=jnp.ones(8, bool))
    losses = []
    for _ in range(150):
        state, metrics = step(state, locked, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.1 < losses[0]
    prompt = Prompt(jnp.asarray(TEXT[:, :2]), jnp.asarray(PROMPT_LENGTH, jnp.int32))

    @jax.jit
    def write(params):
        source = task.source(params, task.features(params, IMAGE))
        return generate(task, params, source, prompt, GenerationConfig(num_tokens=3), end_token=1)

    texts = jax.device_get(write(parameters.merge(locked, state.params)))
    for row, (text, begin) in enumerate(zip(TEXT, PROMPT_LENGTH, strict=True)):
        expected = text[begin : begin + 3] * TARGET[row, begin : begin + 3]
        written = texts.tokens[row, 0, : len(expected)]
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


# A decoder that learns to write captions beside a contrastive loss (CoCa; SigLIP 2).

TEXT_TOWER = TextConfig(vocabulary_size=9, length=5, embedding_size=8, encoder=ENCODER, pooling="mean")
COCA = ContrastiveConfig(
    dataclasses.replace(TOWER, pooling="attention"),
    TEXT_TOWER,
    captioner=CaptionerConfig(DECODER, weight=2.0),
    locked=(),
)
SIGLIP2 = dataclasses.replace(
    COCA,
    head=DeterministicContrastiveConfig(initial_bias=-10.0),
    loss=SigmoidLoss(),
    captioner=CaptionerConfig(DECODER),
)
NOISY_SIGLIP2 = dataclasses.replace(
    SIGLIP2,
    image_tower=dataclasses.replace(TOWER, pooling="class_token"),
    head=HetXLContrastiveConfig(CovarianceConfig(3), num_samples=4, initial_bias=-10.0),
    captioner=CaptionerConfig(DECODER, HetXLConfig(CovarianceConfig(3), sampling=SamplingConfig(num_samples=4))),
)


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(COCA, id="coca", marks=pytest.mark.slow),
        pytest.param(NOISY_SIGLIP2, id="siglip2, het_xl and a class token"),
    ],
)
def test_the_loss_and_its_gradient_are_the_sum_of_both_parts(config):
    _, params = start(config)
    captioning = config.decoder_beside()
    assert captioning is not None
    alone, captioning = task_of(dataclasses.replace(config, captioner=None)), task_of(captioning)

    def by_parts(params, batch, keys):
        contrastive, _ = alone.loss({name: params[name] for name in alone.shapes}, batch, keys)
        caption, metrics = captioning.loss(config.decoder_params(params, captioning.shapes), batch, keys)
        return contrastive + config.captioner.weight * caption, (caption, metrics["top1"])

    # One program for both, whose equal parts are compiled once. The gradient of one of them.
    losses = task_of(config).loss, by_parts
    if config is COCA:
        gradients = [jax.value_and_grad(loss, has_aux=True) for loss in losses]
        found, expected = jax.jit(lambda params: [gradient(params, BATCH, KEYS) for gradient in gradients])(params)
        assert_same(found, expected, atol=2e-5)
        found, expected = found[0], expected[0]
    else:
        found, expected = jax.jit(lambda params: [loss(params, BATCH, KEYS) for loss in losses])(params)
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-5)
    caption, top1 = expected[1]
    assert float(found[1]["caption_loss"]) == pytest.approx(float(caption), rel=1e-5)
    assert float(found[1]["caption_top1"]) == pytest.approx(float(top1))


def test_a_locked_image_tower_learns_from_neither_part():
    task, (_, params) = dataclasses.replace(COCA, locked=("image_tower/.*",)).build(), start(COCA)
    locked, trainable = parameters.partition(params, task.locked)
    assert set(locked) == {"image_tower"}
    assert set(trainable) == {"text_tower", "captioner", *({"head"} & set(params))}
    above = parameters.flatten(task.layers_above(params))
    assert above["captioner/decoder/tokens/embedding"] == 2
    assert above["captioner/head/logits/kernel"] == 0


def test_a_locked_text_tower_leaves_the_decoder_as_it_is():
    config = dataclasses.replace(COCA, locked=("image_tower/.*", "text_tower/tokens/.*", "captioner/head/.*"))
    captioning = config.decoder_beside()
    assert captioning is not None
    written = captioning.build()
    assert config.decoder_params(start(COCA)[1], written.shapes).keys() == written.shapes.keys()
    assert config.build().trained


@pytest.mark.devices
@pytest.mark.slow
def test_eight_devices_give_a_captioner_the_loss_of_one():
    task, params = start(SIGLIP2)
    assert_eight_devices_have_the_loss_of_one(task.loss, params, BATCH, MeshConfig(data=4, fsdp=2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_tower": TOWER}, "it needs a ViT with a pooling"),
        ({"image_tower": ResNetConfig()}, "it needs a ViT"),
        ({"microbatches": 2}, "set task.microbatches to 1"),
        ({"mixing": Mixing(), "loss": SigmoidLoss()}, "leave out task.mixing"),
    ],
)
def test_what_does_not_fit_a_captioner_is_refused(changes, message):
    size = changes.get("image_tower", COCA.image_tower).embedding_size
    with pytest.raises(UserError, match=message):
        dataclasses.replace(COCA, text_tower=dataclasses.replace(TEXT_TOWER, embedding_size=size), **changes)


def test_weights_are_positive_and_tied_logits_have_a_kernel():
    with pytest.raises(UserError, match="must be above 0"):
        CaptionerConfig(weight=0.0)
    tied = dataclasses.replace(DECODER, tied_output=True)
    with pytest.raises(UserError, match=r"set task\.captioner\.head\.zero_kernel to False"):
        CaptionerConfig(tied, DeterministicConfig(zero_kernel=True))


@pytest.mark.parametrize(
    "batch",
    [
        dataclasses.replace(BATCH, text_target=None),
        dataclasses.replace(BATCH, image=None, image_embedding=jnp.zeros((8, 8))),
    ],
)
def test_stored_embeddings_and_texts_without_targets_are_refused(batch):
    task, params = start(COCA)
    with pytest.raises(UserError, match="needs images, not their stored embeddings"):
        jax.eval_shape(task.loss, params, batch, KEYS)


@pytest.mark.slow
def test_blocks_of_tokens_leave_loss_and_gradient_as_they_are(monkeypatch):
    task, params = start(CAPTIONING)
    (whole, _), of_whole = loss_and_gradient(task.loss, params, BATCH)
    monkeypatch.setattr(tokens, "_LOGITS_PER_BLOCK", 9 * 10)
    monkeypatch.setattr(tokens, "_LEAST_TOKENS_PER_BLOCK", 4)
    assert tokens.tokens_per_block(8 * 5, 9) == 10
    (in_blocks, _), of_blocks = loss_and_gradient(CAPTIONING.build().loss, params, BATCH)
    assert float(in_blocks) == pytest.approx(float(whole), rel=1e-6)
    assert_same(((in_blocks, {}), of_blocks), ((whole, {}), of_whole), atol=2e-6)


def test_a_batch_without_divisors_is_one_block():
    assert tokens.tokens_per_block(13, 256_000) == 13
    assert tokens.tokens_per_block(1009, 256_000) == 1009
    assert tokens.tokens_per_block(64 * 64, 256_000) == 256
    assert tokens.tokens_per_block(512, 32_000) == 512
