"""Every form of block, position and pooling equals a NumPy tower written from the papers."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from lit_het.errors import UserError
from lit_het.towers.bert import BertConfig
from lit_het.towers.experts import ExpertKeys
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.positions import sinusoidal_positions
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import Encoder, EncoderConfig
from lit_het.towers.vit import ViTConfig
from tests.towers.models import drawn, run, shapes

RANDOM = np.random.default_rng(0)
ENCODER = EncoderConfig(width=8, depth=2, mlp_width=12, num_heads=2)
ERF = np.vectorize(math.erf)
ACTIVATIONS = {
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "gelu": lambda x: 0.5 * x * (1 + ERF(x / math.sqrt(2))),
    "quick_gelu": lambda x: x / (1 + np.exp(-1.702 * x)),
    "relu": lambda x: np.maximum(x, 0),
}


def dense(params, x):
    return x @ params["kernel"] + params["bias"]


def norm(params, x, epsilon):
    centred = x - x.mean(axis=-1, keepdims=True)
    deviation = np.sqrt((centred**2).mean(axis=-1, keepdims=True) + epsilon)
    return centred / deviation * params["scale"] + params["bias"]


def attention(params, queries, tokens, present, heads=2):
    query, key, value = dense(params["query"], queries), dense(params["key"], tokens), dense(params["value"], tokens)
    size, outputs = query.shape[1] // heads, []
    for head in range(heads):
        part = slice(head * size, (head + 1) * size)
        scores = query[:, part] @ key[:, part].T / math.sqrt(size)
        shares = np.exp(scores) * present  # [n], or [n n] with a row for each query
        outputs.append(shares / shares.sum(axis=1, keepdims=True) @ value[:, part])
    return dense(params["out"], np.concatenate(outputs, axis=1))


def mlp(params, x, activation):
    up = dense(params["up"], x)
    if activation == "swiglu":
        gate = dense(params["gate"], x)
        return dense(params["down"], gate / (1 + np.exp(-gate)) * up)
    return dense(params["down"], ACTIVATIONS[activation](up))


def encode(params, config, x, present=None, source: Any = None):
    """The encoder of one example, token by row; with a source, its tokens and which are present, the decoder."""
    present = np.ones(len(x)) if present is None else present

    def layer(block, name, seen):
        if name == "mlp":
            return mlp(block[name], seen, config.activation)
        tokens, allowed = source if name == "source_attention" else (seen, present)
        return attention(block[name], seen, tokens, allowed)

    for number in range(config.depth):
        block = jax.tree.map(lambda leaf: leaf[number], params["blocks"])  # noqa: B023
        for name in ("attention", "source_attention", "mlp") if source else ("attention", "mlp"):
            scale = block.get(f"{name}_scale", 1.0) if config.layer_scale else 1.0
            of_norm = block["source_norm" if name == "source_attention" else f"{name}_norm"]
            if config.norm_placement == "before":
                x = x + scale * layer(block, name, norm(of_norm, x, config.norm_epsilon))
            else:
                x = norm(of_norm, x + scale * layer(block, name, x), config.norm_epsilon)
    return norm(params["norm"], x, config.norm_epsilon) if config.norm_placement == "before" else x


# The form of the encoder, and what is special of the tower.
FORMS = [
    ({"activation": "gelu"}, {"pooling": "mean", "representation_size": 6}),
    (
        {"activation": "quick_gelu", "norm_epsilon": 1e-5},
        {"pooling": "class_token", "input_norm": True, "projection_size": 5},
    ),
    ({"activation": "relu", "norm_placement": "after"}, {"pooling": "none"}),
    ({"activation": "swiglu", "layer_scale": True}, {"pooling": "class_token", "num_registers": 3}),
    ({"activation": "gelu_tanh"}, {"pooling": "first", "num_registers": 2}),
    (
        {"activation": "gelu", "layer_scale": True},
        {"pooling": "class_and_mean", "num_registers": 2, "top": dataclasses.replace(ENCODER, activation="swiglu")},
    ),
]


@pytest.mark.parametrize(("form", "extras"), FORMS, ids=lambda form: "-".join(form))
def test_an_image_tower_equals_its_reference(form, extras):
    encoder = dataclasses.replace(ENCODER, **form)
    config = ViTConfig(image_size=8, patch_size=4, encoder=encoder, **extras)
    params = drawn(shapes(config), 0.4)
    image = RANDOM.integers(0, 256, (1, 8, 8, 3)).astype(np.uint8)
    patches = [image[0, y : y + 4, x : x + 4].ravel() / 127.5 - 1 for y in (0, 4) for x in (0, 4)]
    x = dense(params["patches"], np.stack(patches)) + params["positions"]
    if config.num_registers:
        x = np.concatenate([params["registers"], x])
    if config.pooling in ("class_token", "class_and_mean"):
        x = np.concatenate([params["class_token"][None], x])
    if config.input_norm:
        x = norm(params["input_norm"], x, encoder.norm_epsilon)
    tokens = encode(params["encoder"], encoder, x)
    if config.top:
        tokens = encode(params["top"], config.top, tokens)
    pooled = {"mean": tokens.mean(axis=0), "class_token": tokens[0], "none": tokens.ravel(), "first": tokens[2]}
    # Behind the class token and the registers.
    pooled["class_and_mean"] = np.concatenate([tokens[0], tokens[3:].mean(axis=0)])
    pooled = pooled[config.pooling]
    if config.representation_size:
        pooled = np.tanh(dense(params["pre_logits"], pooled))
    if config.projection_size:
        pooled = dense(params["projection"], pooled)
    output = run(config, params, image)
    np.testing.assert_allclose(output.tokens[0], tokens, atol=2e-5)
    np.testing.assert_allclose(output.embedding[0], pooled, atol=2e-5)
    assert output.embedding.shape == (1, config.embedding_size)


@pytest.mark.parametrize("pooling", ["last", "first", "mean", "max"])
def test_the_original_transformers_encoder_is_a_form_of_text_tower(pooling):
    encoder = dataclasses.replace(ENCODER, activation="relu", norm_placement="after")
    config = TextConfig(
        vocabulary_size=9, length=5, embedding_size=4, encoder=encoder, pooling=pooling, positions="sinusoidal"
    )
    params = drawn(shapes(config), 0.4)
    assert "positions" not in params
    text = np.array([[1, 4, 8, 2, 0]], np.int32)
    tokens = encode(params["encoder"], encoder, params["tokens"]["embedding"][text[0]] + sinusoidal_positions(5, 8))
    pooled = {"last": tokens[-1], "first": tokens[0], "mean": tokens.mean(axis=0), "max": tokens.max(axis=0)}[pooling]
    output = run(config, params, text)
    np.testing.assert_allclose(output.embedding[0], dense(params["projection"], pooled), atol=2e-5)


@pytest.mark.parametrize(("end_token", "position"), [(8, 2), (None, 3)])
def test_clips_texts_see_earlier_tokens_only_and_are_pooled_at_their_end(end_token, position):
    encoder = dataclasses.replace(ENCODER, activation="quick_gelu", causal=True)
    config = TextConfig(
        vocabulary_size=12, length=6, embedding_size=4, encoder=encoder, pooling="end_token", end_token=end_token
    )
    params = drawn(shapes(config), 0.4)
    text = np.array([[1, 4, 8, 11, 8, 11]], np.int32)
    embedded = params["tokens"]["embedding"][text[0]] + params["positions"]
    tokens = encode(params["encoder"], encoder, embedded, np.tril(np.ones((6, 6))))
    output = run(config, params, text)
    np.testing.assert_allclose(output.tokens[0], tokens, atol=2e-5)
    np.testing.assert_allclose(output.embedding[0], dense(params["projection"], tokens[position]), atol=2e-5)


def test_an_end_token_that_is_not_pooled_is_refused():
    with pytest.raises(UserError, match="end_token = 1 needs pooling = 'end_token', not 'last'"):
        TextConfig(end_token=1)


def test_bert_attends_to_no_padding_and_adds_segments():
    config = BertConfig(
        vocabulary_size=9,
        length=5,
        projection_size=None,
        encoder=dataclasses.replace(ENCODER, activation="gelu", norm_placement="after", norm_epsilon=1e-12),
        pooler=True,
    )
    params = drawn(shapes(config), 0.4)
    text, segment = np.array([[3, 4, 8, 0, 0]], np.int32), np.array([[0, 0, 1, 1, 1]], np.int32)
    embedded = (
        params["tokens"]["embedding"][text[0]] + params["positions"] + params["segments"]["embedding"][segment[0]]
    )
    tokens = encode(params["encoder"], config.encoder, norm(params["input_norm"], embedded, 1e-12), text[0] != 0)
    output = run(config, params, text, None, segment)
    np.testing.assert_allclose(output.tokens[0, :3], tokens[:3], atol=2e-5)
    np.testing.assert_allclose(output.embedding[0], np.tanh(dense(params["pre_logits"], tokens[0])), atol=2e-5)
    assert config.embedding_size == 8


@pytest.mark.parametrize(
    "blocks",
    [(0, 1, 3), *(pytest.param(blocks, marks=pytest.mark.slow) for blocks in ((2, 4), (0, 1, 2, 3, 4)))],
)
def test_blocks_run_in_their_order_wherever_experts_are(blocks):
    experts = ExpertsConfig(num_experts=2, num_selected=1, blocks=blocks, eval_capacity_factor=2.0)
    config = dataclasses.replace(ENCODER, depth=5, experts=experts)
    graph, state = nnx.split(nnx.eval_shape(lambda: Encoder(config, nnx.Rngs(0))))

    @jax.jit
    def at_once_and_in_turn(state, tokens):
        encoder = nnx.merge(graph, state)
        x, ranks = tokens.reshape(6, 8), {True: 0, False: 0}
        for number in range(5):
            has_experts = number in blocks
            of_block, stacked = nnx.split(encoder.expert_blocks if has_experts else encoder.blocks)
            block = nnx.merge(of_block, jax.tree.map(lambda leaf: leaf[ranks[has_experts]], stacked))  # noqa: B023
            x, _ = block(x, 2, None, ExpertKeys())
            ranks[has_experts] += 1
        return encoder(tokens).tokens, encoder.norm(x).reshape(2, 3, 8)

    found, expected = at_once_and_in_turn(drawn(state), RANDOM.normal(size=(2, 3, 8)).astype(np.float32))
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("blocks", [(), (2, 1), (1, 1), (5,), (-1,)])
def test_numbers_of_blocks_that_the_encoder_does_not_have_are_refused(blocks):
    with pytest.raises(UserError, match="must be ascending numbers from 0 to 4"):
        dataclasses.replace(ENCODER, depth=5, experts=ExpertsConfig(blocks=blocks))


def test_sinusoidal_positions_by_hand():
    positions = sinusoidal_positions(2, 4)
    np.testing.assert_allclose(positions[0], [0, 1, 0, 1])
    np.testing.assert_allclose(positions[1], [np.sin(1), np.cos(1), np.sin(0.01), np.cos(0.01)], atol=1e-7)
    with pytest.raises(UserError, match="an even width, not 3"):
        sinusoidal_positions(2, 3)


def test_a_bert_with_norms_before_its_layers_is_refused():
    with pytest.raises(UserError, match=r"encoder.norm_placement = 'after'"):
        BertConfig(encoder=EncoderConfig())
