"""T5, ModernBERT and the mean of a BERT equal NumPy towers, written from the papers, of texts without padding."""

import dataclasses

import jax
import numpy as np
import pytest

from lit_het.errors import UserError
from lit_het.towers.encoder_config import EncoderConfig
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.modern_bert import windows
from lit_het.towers.t5 import distance_buckets
from lit_het.towers.text_config import BertConfig, ModernBertConfig, T5Config
from tests.towers.models import drawn, run, shapes
from tests.towers.test_forms import ACTIVATIONS, dense, norm

WIDTH, HEADS, LENGTH = 8, 2, 9
ENCODER = EncoderConfig(WIDTH, 4, 12, HEADS, norm_epsilon=1e-5)
T5 = T5Config(20, LENGTH, 5, dataclasses.replace(ENCODER, activation="geglu_tanh", norm="rms", head_size=3))
T5_1_0 = dataclasses.replace(T5, pooling="first", encoder=dataclasses.replace(T5.encoder, activation="relu"))
OF_MODERN = dataclasses.replace(ENCODER, activation="geglu", first_norm=False)
MODERN = ModernBertConfig(20, LENGTH, 5, OF_MODERN, padding_id=0, window=4)
BERT = BertConfig(20, LENGTH, 5, dataclasses.replace(ENCODER, norm_placement="after", activation="gelu"))
TEXTS = np.array([[3, 7, 19, 2, 5, 4, 1, 0, 0], [8, 4, 0, 0, 0, 0, 0, 0, 0]], np.int32)


def rms_norm(params, x):
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * params["scale"]


def layer_norm(params, x):
    return norm(params, x, 1e-5)


def mlp(params, x, activation):
    gate = {"geglu": "gelu", "geglu_tanh": "gelu_tanh"}.get(activation)
    if gate is None:
        return dense(params["down"], ACTIVATIONS[activation](dense(params["up"], x)))
    return dense(params["down"], ACTIVATIONS[gate](dense(params["gate"], x)) * dense(params["up"], x))


def attention(params, x, bias, turn):
    """One head after the other."""
    rows = [np.split(dense(params[name], x), HEADS, axis=1) for name in ("query", "key", "value")]
    outputs = []
    for head, (query, key, value) in enumerate(zip(*rows, strict=True)):
        logits = turn(query) @ turn(key).T / np.sqrt(query.shape[1]) + bias[head % len(bias)]
        weights = np.exp(logits)
        outputs.append(weights / weights.sum(axis=1, keepdims=True) @ value)
    return dense(params["out"], np.concatenate(outputs, axis=1))


def encode(params, encoder, x, of_norm, of_block):
    for number in range(encoder.depth):
        block = jax.tree.map(lambda leaf: leaf[number], params["blocks"])  # noqa: B023
        seen = x if number == 0 and not encoder.first_norm else of_norm(block["attention_norm"], x)
        x = x + attention(block["attention"], seen, *of_block(number))
        x = x + mlp(block["mlp"], of_norm(block["mlp_norm"], x), encoder.activation)
    return of_norm(params["norm"], x)


def turned(base):
    """Returns the function of rotary positions (RoFormer, Eq. 15), one plane after the other."""

    def turn(x):
        found, planes = np.zeros(x.shape), x.shape[1] // 2
        for position, plane in np.ndindex(len(x), planes):
            angle = position * base ** (-plane / planes)
            turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
            found[position, plane::planes] = turn @ x[position, plane::planes]
        return found

    return turn


def distances(words):
    return np.arange(len(words))[None] - np.arange(len(words))[:, None]


def t5(config, params, words):
    def of_block(_):
        distance = distances(words)
        # All are below 8, so that each has a bucket of its own, in either direction.
        bias = params["distances"][np.abs(distance) + 16 * (distance > 0)].transpose(2, 0, 1)
        return bias, lambda x: x

    return encode(params["encoder"], config.encoder, params["tokens"]["embedding"][words], rms_norm, of_block)


def modern_bert(config, params, words):
    def of_block(number):
        if number in (0, 3):
            return [0], turned(160_000.0)
        return [np.where(np.abs(distances(words)) <= 2, 0, -np.inf)], turned(10_000.0)

    embedded = layer_norm(params["input_norm"], params["tokens"]["embedding"][words])
    return encode(params["encoder"], config.encoder, embedded, layer_norm, of_block)


@pytest.mark.parametrize(
    ("config", "reference"),
    [
        (T5, t5),
        (T5_1_0, t5),
        (MODERN, modern_bert),
        (dataclasses.replace(MODERN, pooling="mean"), modern_bert),
    ],
    ids=["T5 v1.1", "T5", "ModernBERT", "mean"],
)
def test_a_tower_equals_its_reference(config, reference):
    params = drawn(shapes(config), 0.4)
    output = run(config, params, TEXTS)
    tokens = [reference(config, params, text[text != 0]) for text in TEXTS]
    pooled = [rows[0] if config.pooling == "first" else rows.mean(axis=0) for rows in tokens]
    for row, expected in enumerate(tokens):
        np.testing.assert_allclose(output.tokens[row, : len(expected)], expected, atol=2e-5)
    np.testing.assert_allclose(output.embedding, dense(params["projection"], np.stack(pooled)), atol=2e-5)


@pytest.mark.parametrize("config", [T5, MODERN, dataclasses.replace(BERT, mean_pooling=True)], ids=lambda c: type(c))
def test_padding_changes_no_embedding_and_a_text_without_a_word_has_a_finite_one(config):
    params = drawn(shapes(config), 0.4)
    short = dataclasses.replace(config, length=7)
    of_short = params | {name: params[name][:7] for name in ("positions",) if name in params}
    long = run(config, params, TEXTS).embedding
    np.testing.assert_allclose(run(short, of_short, TEXTS[:, :7]).embedding, long, atol=2e-6)
    assert np.isfinite(run(config, params, np.zeros_like(TEXTS)).embedding).all()


def test_the_mean_of_a_bert_is_that_of_its_tokens_but_padding():
    config = dataclasses.replace(BERT, mean_pooling=True, projection_size=None)
    params = drawn(shapes(config), 0.4)
    output = run(config, params, TEXTS)
    for row, count in enumerate((7, 2)):
        np.testing.assert_allclose(output.embedding[row], output.tokens[row, :count].mean(axis=0), atol=1e-6)


def test_buckets_of_distances_grow_by_logarithms():
    """T5's: 16 in each direction, of which 8 have one distance, and the others are 16 (d / 8)^(1/8) apart."""
    row = distance_buckets(200, 32, 128)[0]
    np.testing.assert_array_equal(row[:9], [0, 17, 18, 19, 20, 21, 22, 23, 24])
    edges = [int(np.ceil(8 * 16 ** (step / 8))) for step in range(1, 8)]
    np.testing.assert_array_equal(np.flatnonzero(np.diff(row[8:])) + 9, edges)
    np.testing.assert_array_equal(distance_buckets(200, 32, 128)[:, 0][1:], row[1:] - 16)
    assert row.max() == 31


def test_a_window_of_all_tokens_hides_none():
    assert not windows(LENGTH, 2 * LENGTH).any()
    assert (windows(LENGTH, 4)[1, 0, 0] < 0).tolist() == [False] * 3 + [True] * 6


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: T5Config(num_buckets=6), "num_buckets = 6 must be a multiple of 4"),
        (lambda: T5Config(max_distance=8), "max_distance = 8 must be at least 9"),
        (lambda: T5Config(encoder=EncoderConfig(experts=ExpertsConfig())), "T5 tower has no experts"),
        (lambda: dataclasses.replace(MODERN, encoder=EncoderConfig(24, 2, 8, 8)), "heads of an even size, not 3"),
        (lambda: T5Config(projection_size=None, layer_input=True), "layer_input = True needs a projection_size"),
        (lambda: dataclasses.replace(BERT, pooler=True, mean_pooling=True), "True needs mean_pooling = False"),
    ],
)
def test_forms_that_a_tower_does_not_have_are_refused(build, message):
    with pytest.raises(UserError, match=message):
        build()
