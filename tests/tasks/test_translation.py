"""The translation task: an encoder and a decoder of the equations of Vaswani et al. 2017, in NumPy.

`tests/towers/test_decoder.py` compares both with PyTorch.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.het_xl import HetXLConfig
from lit_het.losses.classification import SoftmaxCrossEntropy
from lit_het.random import keys_at
from lit_het.sharding import MeshConfig
from lit_het.tasks.base import Task
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.tasks.generation import Prompt, generate
from lit_het.tasks.given_texts import text_log_probabilities
from lit_het.tasks.translation import TranslationConfig
from lit_het.texts import GenerationConfig
from lit_het.towers.decoder import DecoderConfig
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.positions import sinusoidal_positions
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.types import Batch
from tests.tasks.meshes import KEYS, assert_eight_devices_have_the_loss_of_one, forward
from tests.towers.test_decoder import decode
from tests.towers.test_forms import dense, encode

BLOCKS = EncoderConfig(
    width=8, depth=2, mlp_width=12, num_heads=2, activation="gelu", norm_placement="after", norm_epsilon=1e-5
)
EXPERTS = dataclasses.replace(BLOCKS, experts=ExpertsConfig(num_blocks=1))
ENCODER = TextConfig(
    11, 5, encoder=BLOCKS, pooling="none", positions="sinusoidal", padding_token=0, scaled_embedding=True
)
DECODER = DecoderConfig(
    11, 6, dataclasses.replace(BLOCKS, causal=True), "sinusoidal", scaled_embedding=True, tied_output=True, dropout=0.0
)
APART = TranslationConfig(ENCODER, DECODER, loss=SoftmaxCrossEntropy(label_smoothing=0.1))
SHARED = dataclasses.replace(APART, shared_embedding=True)
RANDOM = np.random.default_rng(1)
PRESENT = np.arange(5) < np.asarray([5, 2, 4, 1, 3, 5, 2, 0])[:, None]
SOURCE = np.where(PRESENT, RANDOM.integers(2, 11, (8, 5)), 0).astype(np.int32)
TARGET = np.arange(6) < np.asarray([6, 3, 4, 2, 5, 1, 6, 6])[:, None]
TEXT = np.where(TARGET, RANDOM.integers(1, 11, (8, 6)), 0).astype(np.int32)
VALID = np.asarray([True] * 7 + [False])
BATCH = Batch(jnp.asarray(VALID), source=jnp.asarray(SOURCE), text=jnp.asarray(TEXT), text_target=jnp.asarray(TARGET))


@functools.cache
def start(config=SHARED):
    task = config.build()
    random = np.random.default_rng(2)
    flat = parameters.flatten(task.shapes)
    drawn = {path: (random.normal(size=x.shape) / 2).astype(np.float32) for path, x in flat.items()}
    return task, jax.device_put(parameters.unflatten(drawn))


@functools.cache
def compiled(config):
    return jax.jit(jax.value_and_grad(lambda params, batch, keys: start(config)[0].loss(params, batch, keys)[0]))


def value_and_gradient(config=SHARED, batch=BATCH, params=None):
    return compiled(config)(start(config)[1] if params is None else params, batch, KEYS)


def loss_of(config=SHARED, batch=BATCH, params=None, keys=KEYS):
    return float(forward(start(config)[0].loss)(start(config)[1] if params is None else params, batch, keys)[0])


def log_p_by_the_equations(config):
    """Returns the log-probability of every token ``[b l k]`` of valid rows, in float64."""
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), start(config)[1])
    table = params["decoder" if config.shared_embedding else "text_tower"]["tokens"]["embedding"]
    found = []
    for source, present, text in zip(SOURCE[VALID], PRESENT[VALID], TEXT[VALID], strict=True):
        embedded = table[source] * np.sqrt(8) + sinusoidal_positions(5, 8)
        memory = encode(params["text_tower"]["encoder"], BLOCKS, embedded, present)
        features = decode(params["decoder"], DECODER, np.asarray([0, *text[:-1]]), memory, present)
        logits = dense({"kernel": params["decoder"]["tokens"]["embedding"].T, **params["head"]["logits"]}, features)
        found.append(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))
    return np.asarray(found)


@pytest.mark.parametrize("config", [SHARED, APART], ids=["shared", "apart"])
def test_the_loss_is_that_of_the_equations_with_label_smoothing(config):
    log_p, counted = log_p_by_the_equations(config), TARGET[VALID]
    right = np.take_along_axis(log_p, TEXT[VALID][..., None], axis=2)[..., 0]
    expected = -(0.9 * right + 0.1 * log_p.mean(axis=2))
    assert float(value_and_gradient(config)[0]) == pytest.approx(expected[counted].mean(), rel=1e-5)


def test_given_translations_have_the_log_probabilities_of_the_equations():
    task, params = start()

    @jax.jit
    def found(params):
        source = task.source(params, jnp.asarray(SOURCE[VALID]))
        return text_log_probabilities(task, params, source, jnp.asarray(TEXT[VALID]), jnp.asarray(TARGET[VALID]))

    expected = np.take_along_axis(log_p_by_the_equations(SHARED), TEXT[VALID][..., None], axis=2)[..., 0]
    np.testing.assert_allclose(found(params), np.where(TARGET[VALID], expected, 0), atol=1e-4)


def test_the_gradient_is_the_slope_of_the_loss():
    """GELU, as the slope of ReLU jumps."""
    params, gradient = jax.device_get((start()[1], value_and_gradient()[1]))
    random = np.random.default_rng(4)
    direction = jax.tree.map(lambda x: random.normal(size=x.shape).astype(np.float32), params)

    def moved(part, step):
        return {**params, part: jax.tree.map(lambda x, d: x + np.float32(step) * d, params[part], direction[part])}

    for part in ("text_tower", "decoder", "head"):
        products = jax.tree.map(lambda g, d: np.vdot(g, d), gradient[part], direction[part])
        ends = [float(value_and_gradient(params=moved(part, step))[0]) for step in (1e-2, -1e-2)]
        slope = (ends[0] - ends[1]) / 2e-2
        assert sum(jax.tree.leaves(products)) == pytest.approx(slope, rel=2e-2, abs=2e-3)


def test_the_shared_embedding_has_the_gradients_of_source_and_target():
    task, params = start()
    assert isinstance(task, Task)
    assert "tokens" not in params["text_tower"]
    assert set(params["head"]["logits"]) == {"bias"}
    tokens = params["decoder"]["tokens"]
    apart = {**params, "text_tower": {**params["text_tower"], "tokens": tokens}}
    (loss, of_shared), (other, of_apart) = value_and_gradient(), value_and_gradient(APART, params=apart)
    assert float(other) == pytest.approx(float(loss), rel=1e-6)
    total = sum(np.asarray(of_apart[part]["tokens"]["embedding"]) for part in ("text_tower", "decoder"))
    np.testing.assert_allclose(of_shared["decoder"]["tokens"]["embedding"], total, atol=1e-5)


def test_neither_padding_of_the_source_nor_a_row_that_cannot_be_read_changes_the_loss():
    longer = dataclasses.replace(SHARED, text_tower=dataclasses.replace(ENCODER, length=9))
    batch = dataclasses.replace(BATCH, source=jnp.asarray(np.pad(SOURCE, ((0, 0), (0, 4)))))
    expected = float(value_and_gradient()[0])
    assert loss_of(longer, batch, start()[1]) == pytest.approx(expected, rel=1e-6)
    source = SOURCE.copy()
    source[7] = 3
    other = dataclasses.replace(BATCH, source=jnp.asarray(source), text=jnp.asarray(np.where(VALID[:, None], TEXT, 5)))
    loss, gradient = value_and_gradient(batch=other)
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.slow
def test_the_encoder_drops_in_training_unless_it_is_locked():
    config = dataclasses.replace(APART, text_tower=dataclasses.replace(ENCODER, dropout=0.3))
    _, params = start(APART)
    one, other = (loss_of(config, params=params, keys=keys_at(0, step)) for step in (0, 1))
    without = float(value_and_gradient(APART)[0])
    assert len({one, other, without}) == 3
    assert abs(one - without) > 1e-3
    assert loss_of(config, params=params) == one
    locked = dataclasses.replace(config, locked=("text_tower/.*",))
    assert loss_of(locked, params=params) == pytest.approx(without, rel=1e-6)
    unrolled = dataclasses.replace(config.text_tower, encoder=dataclasses.replace(BLOCKS, unrolled=True, remat="full"))
    assert loss_of(dataclasses.replace(config, text_tower=unrolled), params=params) == pytest.approx(one, rel=1e-5)


@pytest.mark.devices
@pytest.mark.slow
def test_eight_devices_give_the_loss_of_one():
    config = dataclasses.replace(
        SHARED, text_tower=dataclasses.replace(ENCODER, dropout=0.2), head=HetXLConfig(CovarianceConfig(3))
    )
    task, params = start(config)
    assert_eight_devices_have_the_loss_of_one(task.loss, params, BATCH, MeshConfig())


@pytest.mark.slow
def test_beams_do_not_depend_on_other_sources():
    task, params = start()
    prompt = Prompt(jnp.asarray(np.zeros((7, 0), np.int32)), jnp.asarray(np.zeros(7, np.int32)))
    ids = SOURCE[VALID]
    among_others = np.where(np.arange(7)[:, None] == 2, ids, ids[::-1])
    how = GenerationConfig(num_tokens=5, num_texts=3)
    write = jax.jit(lambda ids, prompt: generate(task, params, task.source(params, ids), prompt, how, end_token=1))
    one, other = (jax.device_get(write(sources, prompt)) for sources in (ids, among_others))
    assert (one.score != other.score).any()
    np.testing.assert_array_equal(one.tokens[2], other.tokens[2])
    np.testing.assert_allclose(one.score[2], other.score[2], atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"text_tower": {"pooling": "mean"}}, "set task.text_tower.pooling to 'none', not 'mean'"),
        ({"text_tower": {"padding_token": None}}, "set task.text_tower.padding_token to that of the tokenizer"),
        (
            {"text_tower": {"vocabulary_size": 12}, "shared_embedding": True},
            "TranslationConfig: shared_embedding = True needs equal",
        ),
        ({"text_tower": {"dropout": 1.0}}, r"TextConfig: dropout = 1.0 is not in \[0, 1\)"),
        ({"text_tower": {"layer_input": True}}, "pooling = 'none' has no embedding"),
        ({"text_tower": {"dropout": 0.1, "encoder": EXPERTS}}, "must be 0 beside experts"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(APART, **{**changes, "text_tower": dataclasses.replace(ENCODER, **changes["text_tower"])})


def test_an_encoder_without_pooling_is_no_tower_of_an_image_text_model():
    with pytest.raises(UserError, match=r"text_tower\.pooling = 'none' is for decoders"):
        ContrastiveConfig(text_tower=TextConfig(pooling="none"))
    with pytest.raises(UserError, match="no image tower: it translates texts"):
        SHARED.require_image_tower()
