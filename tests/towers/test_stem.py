"""Hybrid ViTs: the ResNet below their patches equals a slow NumPy one and transformers', and the tower sees its map."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lit_het.errors import UserError
from lit_het.towers.encoder_config import EncoderConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.stem import Stem
from lit_het.towers.stem_config import StemConfig
from tests.towers.test_resnet import apply, drawn, shapes, slow_group_norm, slow_standardize

CONFIG = StemConfig((2, 1), 32)
build = functools.partial(Stem, CONFIG, 3, "float32")
# Odd sides: "SAME" puts fewer zeros in front than behind.
PIXELS = np.random.default_rng(0).uniform(-1, 1, (2, 22, 37, 3)).astype(np.float32)


@pytest.fixture(scope="module", name="params")
def _params():
    return drawn(build)


@pytest.fixture(scope="module", name="output")
def _output(params):
    return np.asarray(jax.jit(apply(build))(params, PIXELS))


def windows(x, size, stride, fill):
    """Returns ``[b rows columns size size c]``, padded as TensorFlow's "SAME"."""
    pads = []
    for length in x.shape[1:3]:
        total = max((-(-length // stride) - 1) * stride + size - length, 0)
        pads.append((total // 2, total - total // 2))
    x = np.pad(x, ((0, 0), *pads, (0, 0)), constant_values=fill)
    rows, columns = (range(0, length - size + 1, stride) for length in x.shape[1:3])
    return np.stack([np.stack([x[:, r : r + size, c : c + size] for c in columns], 1) for r in rows], 1)


def slow_conv(x, params, stride):
    kernel = slow_standardize(params["conv"]["kernel"])
    return slow_group_norm(np.tensordot(windows(x, len(kernel), stride, 0.0), kernel, 3), params["norm"])


def slow_block(x, params, stride):
    shortcut = slow_conv(x, params["shortcut"], stride) if "shortcut" in params else x
    x = np.maximum(slow_conv(x, params["reduce"], 1), 0)
    x = np.maximum(slow_conv(x, params["mix"], stride), 0)
    return np.maximum(shortcut + slow_conv(x, params["expand"], 1), 0)


def test_the_stem_equals_a_slow_numpy_one(params, output):
    x = np.maximum(slow_conv(PIXELS.astype(np.float64), params["root"], 2), 0)
    x = windows(x, 3, 2, -np.inf).max(axis=(3, 4))
    x = slow_block(x, params["first0"], 1)
    x = slow_block(x, jax.tree.map(lambda stacked: stacked[0], params["blocks0"]), 1)
    x = slow_block(x, params["first1"], 2)
    assert x.shape == (2, *map(CONFIG.length, PIXELS.shape[1:3]), CONFIG.num_channels) == (2, 3, 5, 256)
    np.testing.assert_allclose(output, x, rtol=1e-3, atol=3e-4)


@pytest.mark.slow
def test_the_stem_equals_that_of_transformers(params, output):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    sizes = {"depths": list(CONFIG.blocks), "hidden_sizes": [128, 256], "embedding_size": 32}
    same = {"global_padding": "same", "embedding_dynamic_padding": True}
    bit = transformers.BitModel(transformers.BitConfig(layer_type="bottleneck", **sizes, **same)).eval()
    for module in bit.modules():
        if type(module).__name__ == "WeightStandardizedConv2d":
            module.eps = 1e-10  # theirs is 1e-8
    named = {"embedder.convolution.weight": params["root"]["conv"]["kernel"]}
    named |= {f"embedder.norm.{theirs}": params["root"]["norm"][ours] for theirs, ours in NAMES.items()}
    for name, block in {"0.layers.0": "first0", "0.layers.1": "blocks0", "1.layers.0": "first1"}.items():
        of_block = jax.tree.map(lambda leaf, block=block: leaf[0] if block == "blocks0" else leaf, params[block])
        for layer, part in of_block.items():
            number = {"reduce": "1", "mix": "2", "expand": "3"}.get(layer)
            conv, norm = (
                ("downsample.conv", "downsample.norm") if number is None else (f"conv{number}", f"norm{number}")
            )
            named[f"encoder.stages.{name}.{conv}.weight"] = part["conv"]["kernel"]
            named |= {f"encoder.stages.{name}.{norm}.{theirs}": part["norm"][ours] for theirs, ours in NAMES.items()}
    tensors = {name: torch.tensor(x.transpose(3, 2, 0, 1) if x.ndim == 4 else x) for name, x in named.items()}
    bit.load_state_dict(tensors)  # a missing or an extra name is an error
    with torch.no_grad():
        expected = bit(torch.tensor(PIXELS.transpose(0, 3, 1, 2))).last_hidden_state.numpy()
    np.testing.assert_allclose(output, expected.transpose(0, 2, 3, 1), rtol=1e-3, atol=3e-4)


def test_a_block_begins_as_its_shortcut():
    stem: Any = build(nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(1, 4, 4, 128)), jnp.float32)
    np.testing.assert_allclose(stem.first1(x), np.maximum(stem.first1.shortcut(x), 0), atol=1e-6)
    assert not np.any(stem.blocks0.expand.norm.scale)
    assert np.all(stem.root.norm.scale[...] == 1)


NAMES = {"weight": "scale", "bias": "bias"}
HYBRID = ViTConfig(16, 8, EncoderConfig(width=8, depth=1, mlp_width=12, num_heads=2), pooling="mean", stem=CONFIG)


@pytest.mark.parametrize("num_inputs", [1, 2])
def test_patches_of_a_hybrid_are_cells_of_its_feature_map(num_inputs):
    config = dataclasses.replace(HYBRID, num_inputs=num_inputs)
    build = config.build
    params = drawn(build)
    image = np.random.default_rng(1).integers(0, 256, (2, 16, 16, 3 * num_inputs), np.uint8)
    assert params["positions"].shape == (4, 8)

    def expected(params, image):
        tower = nnx.merge(nnx.graphdef(nnx.eval_shape(lambda: build(nnx.Rngs(0)))), params)
        cells = tower.stem(image.astype(jnp.float32) / 127.5 - 1)
        tokens = tower.patches(cells.reshape(8, -1)).reshape(2, 4, 8) + tower.positions[...][None]
        return tower.encoder(tokens).tokens, tower(image).tokens, tower.num_patches(image)

    tokens, found, count = jax.jit(expected)(params, jnp.asarray(image))
    np.testing.assert_allclose(found, tokens, atol=1e-5)
    assert count == 4


def test_published_hybrids_have_their_strides_and_counts():
    # R50 + ViT-B/16 of Dosovitskiy et al. 2021 has the layers of a ResNet50, without its last stage.
    assert (StemConfig().stride, StemConfig().num_channels) == (16, 1024)
    assert StemConfig((3, 4, 6, 3)).stride == 32
    count = sum(
        x.size for x in jax.tree.leaves(shapes(functools.partial(Stem, StemConfig((3, 4, 6, 3)), 3, "float32")))
    )
    # A ResNet50 of He et al. has 25,557,032 parameters, of which 2,049,000 are of its classifier.
    assert count == 25_557_032 - 2_049_000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_size": 4}, "patch_size = 4 is no multiple of the stem's 8 pixels"),
        ({"patch_sizes": (8,)}, "stem = a ResNet does not go with patch_sizes"),
        ({"num_inputs": 2, "inputs_as": "patches"}, "stem = a ResNet does not go with inputs_as"),
    ],
)
def test_towers_that_no_stem_fits_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(HYBRID, **changes)


@pytest.mark.parametrize(
    ("blocks", "width", "message"), [((), 64, "blocks"), ((0,), 64, "blocks"), ((1,), 20, "width")]
)
def test_stems_without_stages_or_groups_are_refused(blocks, width, message):
    with pytest.raises(UserError, match=message):
        StemConfig(blocks, width)
