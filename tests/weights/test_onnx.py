"""Towers and heads in onnxruntime give the outputs of JAX, for any number of examples."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import pytest
from flax import nnx

from lit_het.errors import UserError
from lit_het.heads import DeterministicConfig, HierarchicalSoftmax
from lit_het.towers.bert import BertConfig
from lit_het.towers.image_config import RotaryConfig
from lit_het.towers.text_config import ModernBertConfig, T5Config, TextConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from lit_het.weights.onnx import graph
from lit_het.weights.onnx.graph import save
from lit_het.weights.onnx.tracing import convert
from tests.towers import models
from tests.towers.models import apply, drawn, shapes

ENCODER = EncoderConfig(width=16, depth=2, mlp_width=24, num_heads=2)
IMAGE = ViTConfig(image_size=17, patch_size=8, encoder=ENCODER)  # a pixel beyond the last whole patch
TEXT = TextConfig(vocabulary_size=40, length=6, embedding_size=12, encoder=ENCODER)
BERT = EncoderConfig(16, 2, 24, 2, activation="gelu", norm_placement="after", norm_epsilon=1e-12)
CLIP = dataclasses.replace(ENCODER, activation="quick_gelu", causal=True)
DINO = dataclasses.replace(ENCODER, layer_scale=True, activation="swiglu")

TOWERS = {
    "mean": dataclasses.replace(IMAGE, pooling="mean"),
    "class token": dataclasses.replace(IMAGE, pooling="class_token", representation_size=8),
    "first patch": dataclasses.replace(IMAGE, pooling="first", positions="sine_cosine"),
    "all patches": dataclasses.replace(IMAGE, pooling="none"),
    "attention": dataclasses.replace(IMAGE, encoder=dataclasses.replace(ENCODER, unrolled=True)),
    "DINOv2": dataclasses.replace(IMAGE, pooling="class_token", num_registers=3, encoder=DINO),
    "DINOv3": dataclasses.replace(
        IMAGE, pooling="class_token", positions="none", num_registers=3, encoder=DINO, rotary=RotaryConfig()
    ),
    "CLIP's images": dataclasses.replace(
        IMAGE,
        pooling="class_token",
        input_norm=True,
        projection_size=10,
        encoder=dataclasses.replace(CLIP, causal=False),
    ),
    "SigLIP's texts": TEXT,
    "mean of texts": dataclasses.replace(TEXT, pooling="mean", positions="sinusoidal"),
    "maximum of texts": dataclasses.replace(TEXT, pooling="max"),
    "attention to texts": dataclasses.replace(TEXT, pooling="attention"),
    "CLIP's texts": dataclasses.replace(TEXT, pooling="end_token", end_token=3, encoder=CLIP),
    "CLIP's texts by the largest id": dataclasses.replace(TEXT, pooling="end_token", encoder=CLIP),
    "the original Transformer": dataclasses.replace(
        TEXT, encoder=dataclasses.replace(ENCODER, norm_placement="after", activation="relu")
    ),
    "BERT": BertConfig(vocabulary_size=40, length=6, projection_size=12, encoder=BERT, pooler=True),
    "XLM-R": BertConfig(vocabulary_size=40, length=6, projection_size=None, encoder=BERT, mean_pooling=True),
    "mT5": T5Config(40, 6, 12, dataclasses.replace(ENCODER, activation="geglu_tanh", norm="rms", head_size=5)),
    "ModernBERT": ModernBertConfig(
        40, 6, 12, dataclasses.replace(ENCODER, activation="geglu", first_norm=False), padding_id=0, window=2
    ),
}


def inputs(tower, count):
    random = np.random.default_rng(count)
    if isinstance(tower, ViTConfig):
        return "image", random.integers(0, 256, (count, tower.image_size, tower.image_size, 3), np.uint8)
    # Padding (0) in the first text, several end tokens (3) in the last one.
    ids = random.integers(1, 40, (count, tower.length), np.int32)
    ids[0, 3:], ids[-1, [2, 4]] = 0, 3
    return "text", ids


def run(path, **arrays) -> dict[str, Any]:
    session = onnxruntime.InferenceSession(path)
    return dict(zip([output.name for output in session.get_outputs()], session.run(None, arrays), strict=True))


@pytest.mark.parametrize("name", TOWERS)
def test_a_tower_has_equal_embeddings_for_any_batch(name, tmp_path):
    config = TOWERS[name]
    params = jax.tree.map(jnp.asarray, drawn(shapes(config)))
    kind, batch = inputs(config, 3)
    ours = np.asarray(models.run(config, params, batch).embedding)
    inputs_of = {kind: (batch.shape[1:], batch.dtype)}
    save(
        convert(lambda batch: {"embedding": apply(config, params, batch).embedding}, inputs_of), tmp_path / "tower.onnx"
    )
    for count in (1, 3):
        theirs = run(tmp_path / "tower.onnx", **{kind: batch[:count]})["embedding"]
        np.testing.assert_allclose(theirs, ours[:count], rtol=0, atol=1e-5)
    assert np.ptp(ours, axis=0).max() > 0.01  # examples differ


ROW = {"x": ((3,), np.float32)}


def test_small_numbers_keep_their_digits(tmp_path):
    """softplus(-30) = log1p(exp(-30)): 1 + x rounds to 1."""
    save(convert(lambda x: {"y": jax.nn.softplus(x)}, ROW), tmp_path / "f.onnx")
    x = np.array([[-30.0, -5.0, 4.0]], np.float32)
    np.testing.assert_allclose(run(tmp_path / "f.onnx", x=x)["y"], np.logaddexp(0, x.astype(np.float64)), rtol=1e-6)


def test_a_softmax_of_two_levels_has_equal_probabilities(tmp_path):
    """Eleven classes in clusters of four: the last has three."""
    head = DeterministicConfig(get_logits=HierarchicalSoftmax()).build(6, 11, nnx.Rngs(0))
    save(convert(lambda x: {"y": head.over_temperature(x)}, {"x": ((6,), np.float32)}), tmp_path / "f.onnx")
    x = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32)
    expected = head.over_temperature(jnp.asarray(x))
    np.testing.assert_allclose(run(tmp_path / "f.onnx", x=x)["y"], expected, rtol=1e-5, atol=1e-6)


def test_outputs_keep_their_names_in_any_order(tmp_path):
    save(convert(lambda x: {"twice": 2 * x, "itself": x, "one": jnp.ones_like(x[:, 0])}, ROW), tmp_path / "f.onnx")
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    found = run(tmp_path / "f.onnx", x=x)
    np.testing.assert_array_equal(found["twice"], 2 * x)
    np.testing.assert_array_equal(found["itself"], x)
    np.testing.assert_array_equal(found["one"], np.ones(2))


def test_large_parameters_are_stored_once_and_beside_the_graph(tmp_path, monkeypatch):
    monkeypatch.setattr(graph, "MAX_BYTES", 1000)
    kernel = jnp.asarray(np.random.default_rng(0).normal(size=(50, 50)), jnp.float32)
    save(convert(lambda x: {"y": jnp.tanh(x @ kernel) @ kernel}, {"x": ((50,), np.float32)}), tmp_path / "f.onnx")
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert sizes == {"f.onnx": sizes["f.onnx"], "f.onnx.data": kernel.nbytes}
    assert sizes["f.onnx"] < 1000
    x = np.random.default_rng(1).normal(size=(2, 50)).astype(np.float32)
    expected = np.tanh(x @ np.asarray(kernel)) @ np.asarray(kernel)
    np.testing.assert_allclose(run(tmp_path / "f.onnx", x=x)["y"], expected, atol=1e-4)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: jnp.sort(x), "sort"),
        (lambda x: jnp.cumsum(x, axis=1), "cumsum"),
        (lambda x: jax.lax.scan(lambda carry, row: (carry, row + x), 0.0, jnp.arange(2.0))[1].sum(0), "scan"),
        (lambda x: x.at[:, 0].set(0.0), "scatter"),
    ],
)
def test_what_onnx_cannot_express_is_refused_by_the_name_of_the_primitive(function, name):
    with pytest.raises(UserError, match=rf"no counterpart of JAX's {name}.*--to lit-het"):
        convert(lambda x: {"y": function(x)}, ROW)
