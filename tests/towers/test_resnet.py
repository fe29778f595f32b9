"""The ResNet equals a slow NumPy one and transformers' BiT, and published sizes have their published counts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.towers import resnet
from lit_het.towers.resnet import ResNetConfig, StandardizedConv, group_norm

# Not square; the feature maps are 12 x 20, 6 x 10 twice, 3 x 5, 2 x 3 and 1 x 2: even and odd ones.
IMAGES = np.random.default_rng(0).integers(0, 256, (2, 24, 40, 3), np.uint8)
DEPTHS = (2, 3, 2, 2)


def shapes(build):
    return nnx.eval_shape(lambda: nnx.to_pure_dict(nnx.state(build(nnx.Rngs(0)))))


def drawn(build):
    """Returns parameters of every kind away from their initial values."""
    random = np.random.default_rng(1)

    def draw(path, leaf):
        noise = random.standard_normal(leaf.shape, np.float32)
        name = path[-1].key
        return 0.1 + 0.05 * noise if name == "kernel" else 0.2 * noise + (name == "scale")

    return jax.tree_util.tree_map_with_path(draw, shapes(build))


def apply(build):
    """Returns (parameters, inputs) → outputs of what ``build`` builds."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: build(nnx.Rngs(0))))
    return lambda params, inputs: nnx.merge(graph, params)(inputs)


@pytest.fixture(scope="module")
def shallow():
    """Returns parameters of a tower of nine blocks, and the compiled tower that holds them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(resnet._BLOCKS, 50, DEPTHS)
        build = ResNetConfig(50).build
        params = drawn(build)
        return params, functools.partial(jax.jit(apply(build)), params)


@pytest.fixture(scope="module")
def output(shallow):
    return shallow[1](IMAGES)


# The slow reference: loops over outputs and groups in float64, from the papers' equations.


def slow_standardize(kernel):
    result = np.empty(kernel.shape)
    for o in range(kernel.shape[-1]):
        weights = kernel[..., o].astype(np.float64)
        result[..., o] = (weights - weights.mean()) / np.sqrt(weights.var() + 1e-10)
    return result


def slow_conv(x, kernel, stride):
    size, kernel = kernel.shape[0], slow_standardize(kernel)
    x = np.pad(x, ((0, 0), (size // 2,) * 2, (size // 2,) * 2, (0, 0)))
    rows = range(0, x.shape[1] - size + 1, stride)
    columns = range(0, x.shape[2] - size + 1, stride)
    return np.stack(
        [np.stack([np.tensordot(x[:, r : r + size, c : c + size], kernel, 3) for c in columns], 1) for r in rows], 1
    )


def slow_group_norm(x, params):
    result, size = np.empty(x.shape), x.shape[-1] // 32
    for image in range(len(x)):
        for first in range(0, x.shape[-1], size):
            values = x[image, :, :, first : first + size]
            result[image, :, :, first : first + size] = (values - values.mean()) / np.sqrt(values.var() + 1e-5)
    return result * params["scale"] + params["bias"]


def slow_block(x, params, stride):
    def active(x, name):
        return np.maximum(slow_group_norm(x, params[name]), 0)

    first = active(x, "reduce_norm")
    shortcut = slow_conv(first, params["shortcut"]["kernel"], stride) if "shortcut" in params else x
    x = slow_conv(first, params["reduce"]["kernel"], 1)
    x = slow_conv(active(x, "mix_norm"), params["mix"]["kernel"], stride)
    return shortcut + slow_conv(active(x, "expand_norm"), params["expand"]["kernel"], 1)


def slow_stage(x, params, stride):
    x = slow_block(x, params["first"], stride)
    for i in range(params["blocks"]["mix"]["kernel"].shape[0]):
        x = slow_block(x, jax.tree.map(lambda stacked: stacked[i], params["blocks"]), 1)  # noqa: B023
    return x


def slow_tower(params, image):
    x = slow_conv(image / 127.5 - 1.0, params["root"]["kernel"], 2)
    x = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    rows, columns = range(0, x.shape[1] - 2, 2), range(0, x.shape[2] - 2, 2)
    x = np.stack([np.stack([x[:, r : r + 3, c : c + 3].max(axis=(1, 2)) for c in columns], 1) for r in rows], 1)
    for i, stride in ((1, 1), (2, 2), (3, 2), (4, 2)):
        x = slow_stage(x, params[f"stage{i}"], stride)
    return np.maximum(slow_group_norm(x, params["norm"]), 0)


def test_the_tower_equals_a_slow_numpy_one(shallow, output):
    expected = slow_tower(shallow[0], IMAGES)
    assert expected.shape == (2, 1, 2, 2048)
    np.testing.assert_allclose(output.tokens, expected.reshape(2, 2, 2048), rtol=1e-3, atol=3e-4)
    np.testing.assert_allclose(output.embedding, expected.mean(axis=(1, 2)), rtol=1e-3, atol=3e-4)
    assert output.auxiliary_losses == {}


def test_weights_of_an_output_channel_get_mean_zero_and_variance_one():
    standardize = jax.jit(resnet.standardize)
    # (1, 3): mean 2, variance 1. (5, 9): mean 7, variance 4. (c, c): 0, never 0 / 0. ±1e-5 has variance 1e-10, as large
    # as what is added to it: ±1 / sqrt(2).
    kernel = np.array([[1.0, 5.0, 7.0, 1e-5], [3.0, 9.0, 7.0, -1e-5]], np.float32)[None, None]
    expected = [[-1, -1, 0, 0.5**0.5], [1, 1, 0, -(0.5**0.5)]]
    np.testing.assert_allclose(standardize(kernel)[0, 0], expected, rtol=1e-6)
    kernel = np.random.default_rng(0).standard_normal((3, 3, 2, 4), np.float32)
    np.testing.assert_allclose(standardize(kernel), slow_standardize(kernel), rtol=1e-4, atol=1e-5)


def test_a_convolution_sees_neither_scale_nor_shift_of_its_kernel():
    build = functools.partial(StandardizedConv, 2, 4, 3, 2, "float32")
    conv, kernel = jax.jit(apply(build)), drawn(build)["kernel"]
    x = np.random.default_rng(0).standard_normal((1, 5, 6, 2), np.float32)
    expected = slow_conv(x, kernel, 2)
    assert expected.shape == (1, 3, 3, 4)
    for changed in (kernel, 3 * kernel + 0.5):
        np.testing.assert_allclose(conv({"kernel": changed}, x), expected, rtol=1e-4, atol=1e-5)


def test_group_norm_scales_each_image_and_group_by_itself():
    norm, random = jax.jit(apply(functools.partial(group_norm, 64))), np.random.default_rng(0)
    x = 1000 + random.standard_normal((2, 3, 2, 64), np.float32)  # a mean that E[x²] - E[x]² would not survive
    params = {name: random.standard_normal(64, np.float32) for name in ("scale", "bias")}
    expected = slow_group_norm(x.astype(np.float64), params)
    np.testing.assert_allclose(norm(params, x), expected, rtol=1e-3, atol=1e-3)
    # One image of one pixel: groups of two channels, ±sqrt(1e-5), whose variance equals what is added to it.
    params = {"scale": np.ones(64, np.float32), "bias": np.zeros(64, np.float32)}
    pair = np.tile([1e-5**0.5, -(1e-5**0.5)], 32).astype(np.float32)
    np.testing.assert_allclose(norm(params, pair[None, None, None])[0, 0, 0], np.sign(pair) * 0.5**0.5, rtol=1e-4)


def test_an_image_does_not_influence_the_others(shallow, output):
    inverted = IMAGES.copy()
    inverted[1] = 255 - inverted[1]
    changed = shallow[1](inverted)
    for name in ("embedding", "tokens"):
        before, after = np.asarray(getattr(output, name)), np.asarray(getattr(changed, name))
        np.testing.assert_array_equal(before[0], after[0])
        assert not np.allclose(before[1], after[1])


small_stage = functools.partial(resnet.Stage, 32, 32, 3, 2, "float32")


@pytest.mark.slow
def test_gradients_of_a_stage_are_the_slopes_of_the_slow_one():
    params, random = drawn(small_stage), np.random.default_rng(2)
    x, weights = (random.standard_normal(shape, np.float32) for shape in ((1, 3, 4, 32), (1, 2, 2, 128)))
    call = apply(small_stage)
    gradient = jax.jit(jax.grad(lambda params: jnp.sum(call(params, jnp.asarray(x)) * weights)))(params)
    flat = {path: leaf.astype(np.float64) for path, leaf in parameters.flatten(params).items()}
    for path, leaf in parameters.flatten(jax.tree.map(np.asarray, gradient)).items():
        direction, values = 1e-6 * random.standard_normal(leaf.shape), []
        for sign in (1, -1):
            moved = parameters.unflatten({**flat, path: flat[path] + sign * direction})
            values.append(np.sum(slow_stage(x.astype(np.float64), moved, 2) * weights))
        slope = (values[0] - values[1]) / 2
        scale = np.linalg.norm(leaf) * np.linalg.norm(direction)
        np.testing.assert_allclose(np.sum(leaf * direction) / scale, slope / scale, atol=1e-5, err_msg=path)


@pytest.mark.slow
def test_bfloat16_stays_close_to_float32_and_towers_return_float32():
    params = drawn(small_stage)
    x = np.random.default_rng(2).standard_normal((2, 3, 4, 32), np.float32)
    exact = np.asarray(jax.jit(apply(small_stage))(params, x))
    rounded = functools.partial(resnet.Stage, 32, 32, 3, 2, "bfloat16")
    rounded = np.asarray(jax.jit(apply(rounded))(params, x.astype(jnp.bfloat16)))
    assert rounded.dtype == jnp.bfloat16
    assert 0 < np.linalg.norm(rounded.astype(np.float32) - exact) < 0.03 * np.linalg.norm(exact)
    embedding, tokens = output_shapes(ResNetConfig(50, compute_type="bfloat16"))
    assert embedding.dtype == tokens.dtype == jnp.float32


def output_shapes(config):
    """Returns shapes and types of the embedding and the tokens of two images, computing neither."""
    call = apply(config.build)
    image = jax.ShapeDtypeStruct((2, config.image_size, config.image_size, 3), jnp.uint8)

    def arrays(params, image):  # jaxtyping wants arrays where `eval_shape` would put shapes into a `TowerOutput`
        output = call(params, image)
        return output.embedding, output.tokens

    return jax.eval_shape(arrays, shapes(config.build), image)


@pytest.mark.slow
def test_deeper_towers_are_not_larger_programs():
    def lowered(depth):
        build = ResNetConfig(depth).build
        text = jax.jit(apply(build)).lower(shapes(build), IMAGES).as_text()
        return text.count("stablehlo.while"), text.count("stablehlo.convolution")

    # The root, and in each of four stages four convolutions of the first block and three of the others.
    assert lowered(50) == lowered(152) == (4, 1 + 4 * (4 + 3))


def test_equal_blocks_start_from_different_kernels():
    params = jax.jit(lambda: nnx.to_pure_dict(nnx.state(small_stage(nnx.Rngs(0)))))()
    kernel = np.asarray(params["blocks"]["mix"]["kernel"])
    assert kernel.shape == (2, 3, 3, 32, 32)
    assert not np.any(np.isclose(kernel[0], kernel[1]).all(axis=(0, 1, 2)))


@pytest.mark.parametrize("sizes", [{"width_multiplier": 0}, {"image_size": 0}])
def test_impossible_sizes_are_refused_by_name(sizes):
    with pytest.raises(UserError, match=f"{next(iter(sizes))} = 0 must be at least 1"):
        ResNetConfig(**sizes)


def theirs(params, block, prefix, downsample):
    """Returns a block's parameters under transformers' names, kernels as [out, in, h, w]."""
    take = (lambda leaf: leaf) if block is None else (lambda leaf: leaf[block])
    named = {}
    for i, name in enumerate(("reduce", "mix", "expand"), 1):
        named[f"{prefix}.conv{i}.weight"] = take(params[name]["kernel"])
        named[f"{prefix}.norm{i}.weight"] = take(params[f"{name}_norm"]["scale"])
        named[f"{prefix}.norm{i}.bias"] = take(params[f"{name}_norm"]["bias"])
    if downsample:
        named[f"{prefix}.downsample.conv.weight"] = take(params["shortcut"]["kernel"])
    return named


@pytest.mark.slow
def test_the_tower_equals_transformers_bit(shallow, output):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    params = shallow[0]
    # Without `global_padding` each convolution is padded by half of its kernel, and the pool sees zeros: BiT's padding.
    bit = transformers.BitModel(transformers.BitConfig(depths=DEPTHS, global_padding=None)).eval()
    for module in bit.modules():
        if type(module).__name__ == "WeightStandardizedConv2d":
            module.eps = 1e-10  # theirs is 1e-8
    named = {"embedder.convolution.weight": params["root"]["kernel"]}
    named |= {"norm.weight": params["norm"]["scale"], "norm.bias": params["norm"]["bias"]}
    for i, depth in enumerate(DEPTHS):
        stage, prefix = params[f"stage{i + 1}"], f"encoder.stages.{i}.layers"
        named |= theirs(stage["first"], None, f"{prefix}.0", downsample=True)
        for block in range(depth - 1):
            named |= theirs(stage["blocks"], block, f"{prefix}.{block + 1}", downsample=False)
    tensors = {
        name: torch.tensor(leaf.transpose(3, 2, 0, 1) if leaf.ndim == 4 else leaf) for name, leaf in named.items()
    }
    bit.load_state_dict(tensors)  # a missing or an extra name is an error
    with torch.no_grad():
        expected = bit(torch.tensor(IMAGES.transpose(0, 3, 1, 2) / np.float32(127.5) - 1))
    tokens = expected.last_hidden_state.numpy().transpose(0, 2, 3, 1).reshape(2, -1, 2048)
    np.testing.assert_allclose(output.tokens, tokens, rtol=1e-3, atol=3e-4)
    np.testing.assert_allclose(output.embedding, expected.pooler_output.numpy()[:, :, 0, 0], rtol=1e-3, atol=3e-4)


@functools.cache
def count(depth, width_multiplier):
    return parameters.count(shapes(ResNetConfig(depth, width_multiplier).build))


def count_of_the_formula(depth, width):
    """The root, then of each block three kernels, its norms, and in the first of a stage the projection."""
    total, size_in = 7 * 7 * 3 * 64 * width, 64 * width
    for i, blocks in enumerate({50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}[depth]):
        size = 64 * width * 2**i
        total += size_in * 4 * size
        for _ in range(blocks):
            total += size_in * size + 9 * size * size + size * 4 * size + 2 * (size_in + size + size)
            size_in = 4 * size
    return total + 2 * size_in


# With a classifier of 1,000 classes, in millions: timm's model cards of the released BiT-M models.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("depth", "width", "published"),
    [(50, 3, 217.32), (101, 1, 44.54), (152, 2, 236.34)],
)
def test_published_models_have_the_shapes_and_counts_of_the_formula(depth, width, published):
    config = ResNetConfig(depth, width)
    assert count(depth, width) == count_of_the_formula(depth, width)
    assert round((count(depth, width) + config.embedding_size * 1000 + 1000) / 1e6, 2) == published
    embedding, tokens = output_shapes(config)
    assert embedding.shape == (2, config.embedding_size) == (2, 2048 * width)
    assert tokens.shape == (2, 7 * 7, 2048 * width)


@pytest.mark.parametrize(("classes", "millions"), [(18_291, "95.6"), (21_843, "102.9"), (29_593, "118.8")])
def test_resnet152x1_with_a_linear_classifier_has_the_count_of_het_xls_table_3(classes, millions):
    assert f"{(count(152, 1) + 2048 * classes + classes) / 1e6:.1f}" == millions
