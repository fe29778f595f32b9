"""The decoder equals a NumPy decoder and PyTorch's; computed token by token it equals itself computed at once."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lit_het.errors import UserError
from lit_het.towers.decoder import DecoderConfig
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.transformer import Encoder, EncoderConfig
from tests.towers.models import drawn
from tests.towers.test_forms import encode

RANDOM = np.random.default_rng(0)
ENCODER = EncoderConfig(width=8, depth=2, mlp_width=12, num_heads=2, causal=True)
DECODER = DecoderConfig(vocabulary_size=11, length=6, encoder=ENCODER, dropout=0.0)
ORIGINAL = dataclasses.replace(
    DECODER,
    encoder=dataclasses.replace(ENCODER, norm_placement="after", activation="relu"),
    positions="sinusoidal",
    scaled_embedding=True,
)
SOURCE = RANDOM.normal(size=(3, 5, 4)).astype(np.float32)
INPUTS = RANDOM.integers(0, 11, (3, 6))
PRESENT = np.arange(5)[None] < np.asarray([5, 2, 4])[:, None]


def graph_and_params(config=DECODER, source_width=4):
    graph, state = nnx.split(nnx.eval_shape(lambda: config.build(source_width, nnx.Rngs(0))))
    return graph, drawn(nnx.to_pure_dict(state), 0.5)


@functools.partial(jax.jit, static_argnums=0)
def at_once(config, params, inputs, source, present=None, key=None):
    model = nnx.merge(graph_and_params(config)[0], params)
    num_texts = len(inputs) // len(source)
    return model(inputs, model.start(source, present, num_texts=num_texts), key=key)[0]


def features(config=DECODER, inputs=INPUTS, source=SOURCE, present=None, key=None):
    return np.asarray(at_once(config, graph_and_params(config)[1], inputs, source, present, key))


def decode(params, config, inputs, source, present):
    """The decoder of one text (Vaswani et al. 2017, Sec. 3), token by row, in float64."""
    encoder, n = config.encoder, len(inputs)
    if config.positions == "learned":
        positions = params["positions"]
    else:
        angles = np.arange(n)[:, None] / 10_000 ** (np.arange(0, encoder.width, 2) / encoder.width)
        positions = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(n, -1)
    x = params["tokens"]["embedding"][inputs] * (encoder.width**0.5 if config.scaled_embedding else 1) + positions[:n]
    return encode(params, encoder, x, np.tri(n), (source, present))


@pytest.mark.parametrize("config", [DECODER, ORIGINAL], ids=["norms before", "as in 2017"])
def test_features_are_those_of_the_equations(config):
    params = jax.tree.map(lambda x: x.astype(np.float64), graph_and_params(config)[1])
    expected = [decode(params, config, *rows) for rows in zip(INPUTS, SOURCE, PRESENT, strict=True)]
    np.testing.assert_allclose(features(config, present=PRESENT), expected, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["before", "after"])
def test_an_encoder_and_a_decoder_are_the_transformer_of_pytorch(placement):
    torch = pytest.importorskip("torch")
    encoder = dataclasses.replace(ENCODER, norm_placement=placement, activation="relu", norm_epsilon=1e-5, causal=False)
    config = dataclasses.replace(DECODER, encoder=dataclasses.replace(encoder, causal=True))
    theirs = pytorch_transformer(placement)
    state = {name: np.asarray(value) for name, value in theirs.state_dict().items()}
    of_encoder = from_torch(state, "encoder", {"self_attn": "attention"}, ["attention", "mlp"])
    layers = {"self_attn": "attention", "multihead_attn": "source_attention"}
    graph, params = graph_and_params(config, source_width=8)
    params = params | from_torch(state, "decoder", layers, ["attention", "source", "mlp"])
    source = RANDOM.normal(size=(3, 5, 8)).astype(np.float32)
    embedded = params["tokens"]["embedding"][INPUTS] + params["positions"]
    masks = {"src_key_padding_mask": ~PRESENT, "memory_key_padding_mask": ~PRESENT, "tgt_mask": ~np.tri(6, dtype=bool)}
    with torch.no_grad():
        inputs = torch.as_tensor(source), torch.as_tensor(embedded)
        expected = theirs(*inputs, **{name: torch.as_tensor(mask) for name, mask in masks.items()}).numpy()

    encoder_graph = nnx.graphdef(nnx.eval_shape(lambda: Encoder(encoder, nnx.Rngs(0))))

    @jax.jit
    def both(of_encoder, params, source, inputs, present):
        memory = nnx.merge(encoder_graph, of_encoder)(source, present=present).tokens
        decoder = nnx.merge(graph, params)
        return decoder(inputs, decoder.start(memory, present))[0]

    np.testing.assert_allclose(both(of_encoder, params, source, INPUTS, PRESENT), expected, atol=2e-5)


def pytorch_transformer(placement):
    """Returns PyTorch's encoder and decoder of 2 blocks of width 8, with random parameters."""
    torch = pytest.importorskip("torch")
    layer = {"batch_first": True, "norm_first": placement == "before", "dropout": 0.0, "layer_norm_eps": 1e-5}
    layers = [kind(8, 2, 12, **layer) for kind in (torch.nn.TransformerEncoderLayer, torch.nn.TransformerDecoderLayer)]
    # A norm after the last block only where norms come before layers.
    norms = [torch.nn.LayerNorm(8) if placement == "before" else None for _ in range(2)]
    theirs = torch.nn.Transformer(
        8,
        2,
        custom_encoder=torch.nn.TransformerEncoder(layers[0], 2, norms[0], enable_nested_tensor=False),
        custom_decoder=torch.nn.TransformerDecoder(layers[1], 2, norms[1]),
        batch_first=True,
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.as_tensor(RANDOM.normal(size=parameter.shape) / 2))
    return theirs


def from_torch(state, part, attentions, norms):
    """Returns the blocks and the last norm of PyTorch's encoder or decoder as ours."""

    def layer(name):
        return {"kernel": state[f"{name}.weight"].T, "bias": state[f"{name}.bias"]}

    def of_norm(name):
        return {"scale": state[f"{name}.weight"], "bias": state[f"{name}.bias"]}

    blocks = []
    for number in range(2):
        path = f"{part}.layers.{number}"
        block = {"mlp": {"up": layer(f"{path}.linear1"), "down": layer(f"{path}.linear2")}}
        for theirs, ours in attentions.items():
            kernels = np.split(state[f"{path}.{theirs}.in_proj_weight"], 3)
            biases = np.split(state[f"{path}.{theirs}.in_proj_bias"], 3)
            names = ("query", "key", "value")
            rows = zip(names, kernels, biases, strict=True)
            block[ours] = {name: {"kernel": kernel.T, "bias": bias} for name, kernel, bias in rows}
            block[ours]["out"] = layer(f"{path}.{theirs}.out_proj")
        for index, name in enumerate(norms, start=1):
            block[f"{name}_norm"] = of_norm(f"{path}.norm{index}")
        blocks.append(block)
    found = {"blocks": jax.tree.map(lambda *rows: np.stack(rows), *blocks)}
    if f"{part}.norm.weight" in state:
        found["norm"] = of_norm(f"{part}.norm")
    return found


@pytest.mark.parametrize("config", [DECODER, ORIGINAL], ids=["norms before", "as in 2017"])
def test_tokens_computed_in_turn_have_the_features_of_all_at_once(config):
    graph, params = graph_and_params(config)
    # Two texts of each source; prompts of 1 to 4 tokens, padded, are computed together, further tokens one by one.
    inputs, lengths = np.concatenate([INPUTS, INPUTS[:, ::-1]], axis=1).reshape(6, 6), np.asarray([1, 4, 2, 3, 4, 1])
    expected = features(config, inputs, present=PRESENT)

    @jax.jit
    def first(params, inputs, source, present):
        model = nnx.merge(graph, params)
        return model(inputs, model.start(source, present, num_texts=2, length=6))

    @jax.jit
    def following(params, inputs, state, positions):
        return nnx.merge(graph, params)(inputs, state, positions)

    prompt = np.where(np.arange(4) < lengths[:, None], inputs[:, :4], 7)
    found, state = first(params, prompt, SOURCE, PRESENT)
    for text, length in enumerate(lengths):
        np.testing.assert_allclose(np.asarray(found)[text, :length], expected[text, :length], atol=1e-5)
    for step in range(2):
        positions = (lengths + step)[:, None]
        found, state = following(params, np.take_along_axis(inputs, positions, axis=1), state, positions)
        np.testing.assert_allclose(found[:, 0], expected[np.arange(6), lengths + step], atol=1e-5)


def test_a_token_depends_on_no_later_token():
    later = INPUTS.copy()
    later[:, 4:] = (later[:, 4:] + 1) % 11
    np.testing.assert_array_equal(features(inputs=later)[:, :4], features()[:, :4])
    assert np.abs(features(inputs=later)[:, 4:] - features()[:, 4:]).max() > 1e-3


def test_padding_of_the_source_is_not_seen():
    other = np.where(PRESENT[:, :, None], SOURCE, 100).astype(np.float32)
    np.testing.assert_array_equal(features(source=other, present=PRESENT), features(present=PRESENT))


@functools.cache
def gradient(**changes):
    config = dataclasses.replace(DECODER, dropout=0.3, encoder=dataclasses.replace(ENCODER, **changes))
    key = jax.random.key(3)
    total = jax.grad(lambda params: jnp.sum(at_once(config, params, INPUTS, SOURCE, None, key)))
    return jax.jit(total)(graph_and_params()[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{"remat": "full"}, {"remat": "dots", "unrolled": True}],
)
def test_blocks_that_are_unrolled_or_recomputed_have_the_same_gradients(changes):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), gradient(**changes), gradient())


@pytest.mark.slow
@pytest.mark.parametrize("field", ["dropout", "attention_dropout"])
def test_dropout_is_the_same_for_a_key_and_none_without_one(field):
    dropped = functools.partial(features, dataclasses.replace(DECODER, **{field: 0.5}))
    one, other = (dropped(key=jax.random.key(seed)) for seed in (1, 2))
    np.testing.assert_array_equal(dropped(), features())
    np.testing.assert_array_equal(dropped(key=jax.random.key(1)), one)
    assert np.abs(one - other).max() > 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dropout": 1.0}, r"DecoderConfig: dropout = 1.0 is not in \[0, 1\)"),
        ({"attention_dropout": -0.1}, r"DecoderConfig: attention_dropout = -0.1 is not in \[0, 1\)"),
        ({"length": 0}, "DecoderConfig: length = 0 must be at least 1"),
        ({"encoder": EncoderConfig(depth=2)}, "a decoder needs encoder.causal = True"),
        ({"encoder": EncoderConfig(causal=True, experts=ExpertsConfig())}, "has no experts"),
    ],
)
def test_what_is_no_decoder_is_refused(changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(DECODER, **changes)
