"""Sums over blocks of examples and means over blocks of samples equal plain ones, and so do their gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het.errors import UserError
from lit_het.losses import blocks
from lit_het.sharding import MeshConfig

B, D, S, K = 6, 3, 10, 4
RANDOM = np.random.default_rng(0)


def single(*shape):
    return jnp.asarray(RANDOM.normal(size=shape), jnp.float32)


X, Y, KERNEL, SCALE, OFFSETS, COTANGENT = single(B, D), single(B), single(D, K), single(), single(S, K), single(B, K)
LABEL = jnp.asarray(RANDOM.integers(0, K, B), jnp.int32)
WEIGHT = jnp.asarray([0.5, 0.25, 0.0, 1.0, 2.0, 0.0], jnp.float32)
KEYS = jax.random.split(jax.random.key(0), B)


def sum_of_losses(examples_per_block, kernel, scale, rows, constants):
    """A cross-entropy that closes over floats, keys, labels and weights; with its hits and its number of examples."""

    def function(rows, constants, factor):
        label, weight, keys = constants
        noise = jax.vmap(lambda key: jax.random.normal(key, (K,)))(keys)
        logits = (rows["x"] @ kernel) * scale * factor + noise + rows["y"][:, None]
        is_label = jnp.arange(K)[None] == label[:, None]
        losses = jax.nn.logsumexp(logits, axis=1) - jnp.sum(logits, axis=1, where=is_label)
        hits = jnp.sum(weight * (jnp.argmax(logits, axis=1) == label))
        return jnp.sum(weight * losses), {"hits": hits, "examples": jnp.float32(len(label))}

    return blocks.sum_over_examples(function, rows, constants, examples_per_block, jnp.float32(0.7))


# Of six: one, two and three divide them, five is cut to three, six and more are one block without a scan.
SIZES = [1, 2, 3, 5, 6, 100]
ROWS, CONSTANTS = {"x": X, "y": Y}, (LABEL, WEIGHT, KEYS)


@functools.cache
def plain_sum_and_gradient():
    def plain(kernel, scale, rows):
        total, sums = 0.0, {"hits": 0.0, "examples": 0.0}
        for n in range(B):
            example = jax.tree.map(lambda x: x[n : n + 1], (rows, CONSTANTS))  # noqa: B023
            value, figures = sum_of_losses(1, kernel, scale, *example)
            total, sums = total + value, jax.tree.map(jnp.add, sums, figures)
        return total, sums

    return jax.jit(jax.value_and_grad(plain, argnums=(0, 1, 2), has_aux=True))(KERNEL, SCALE, ROWS)


def assert_trees_close(actual, expected, **tolerance):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, **tolerance), actual, expected)


@pytest.mark.parametrize(("outermost", "examples_per_block"), [("jit", 1), ("jit", 5), ("grad", 2), ("grad", 100)])
def test_a_sum_over_blocks_has_the_value_and_gradient_of_a_plain_one(outermost, examples_per_block):
    """Also of what the function closes over, and with blocks of examples in any order of jit and grad."""
    function = functools.partial(sum_of_losses, examples_per_block)
    if outermost == "jit":
        function = jax.jit(jax.value_and_grad(function, argnums=(0, 1, 2), has_aux=True))
    else:
        function = jax.value_and_grad(jax.jit(function), argnums=(0, 1, 2), has_aux=True)
    (total, sums), gradient = function(KERNEL, SCALE, ROWS, CONSTANTS)
    (expected_total, expected_sums), expected_gradient = plain_sum_and_gradient()
    np.testing.assert_allclose(total, expected_total, rtol=1e-5)
    np.testing.assert_allclose(sums["hits"], expected_sums["hits"], rtol=1e-6)
    assert float(sums["examples"]) == B
    assert_trees_close(gradient, expected_gradient, rtol=1e-4, atol=1e-5)


def test_a_number_of_examples_that_only_tiny_blocks_divide_is_refused_with_a_better_one():
    with pytest.raises(UserError, match=r"13 examples per device .* blocks of 1, although 8 fit.* for example 16"):
        blocks.scan_examples(lambda carry, rows: (carry, rows), 0.0, jnp.zeros((13, D)), 8)


def test_the_value_without_a_gradient_is_the_same():
    total, sums = jax.jit(functools.partial(sum_of_losses, 2))(KERNEL, SCALE, ROWS, CONSTANTS)
    (expected_total, expected_sums), _ = plain_sum_and_gradient()
    np.testing.assert_allclose(total, expected_total, rtol=1e-5)
    np.testing.assert_allclose(sums["hits"], expected_sums["hits"], rtol=1e-6)


def test_the_gradient_of_a_function_of_the_sum_follows_the_chain_rule():
    """The backward pass receives the slope of what comes after, here 2 · sum."""
    gradient = jax.jit(jax.grad(lambda kernel: sum_of_losses(2, kernel, SCALE, ROWS, CONSTANTS)[0] ** 2))(KERNEL)
    (total, _), (of_kernel, _, _) = plain_sum_and_gradient()
    np.testing.assert_allclose(gradient, 2 * total * of_kernel, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("examples_per_block", [1, 3])
def test_rows_of_weight_zero_change_neither_the_sum_nor_a_gradient(examples_per_block):
    x, y, label = (np.array(array) for array in (X, Y, LABEL))
    x[[2, 5]], y[[2, 5]], label[2] = 1e4, -1e4, K - 1 - label[2]
    changed, constants = {"x": x, "y": y}, (label, WEIGHT, KEYS)
    function = functools.partial(sum_of_losses, examples_per_block)
    function = jax.jit(jax.value_and_grad(function, argnums=(0, 1, 2), has_aux=True))
    (total, sums), gradient = function(KERNEL, SCALE, changed, constants)
    (expected_total, expected_sums), expected = plain_sum_and_gradient()
    np.testing.assert_allclose(total, expected_total, rtol=1e-5)
    np.testing.assert_allclose(sums["hits"], expected_sums["hits"], rtol=1e-6)
    assert_trees_close(gradient, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(gradient[2]["y"])[[2, 5]], np.zeros(2))


bits = jax.jit(jax.vmap(jax.random.bits))


@pytest.mark.parametrize("examples_per_block", SIZES)
def test_a_scan_over_examples_returns_results_in_the_order_of_the_examples(examples_per_block):
    def function(carry, rows):
        x, key = rows
        return carry + jnp.sum(x), {"x": 2 * x, "bits": bits(key)}

    scan = jax.jit(functools.partial(blocks.scan_examples, function, examples_per_block=examples_per_block))
    carry, results = scan(jnp.float32(1), (X, KEYS))
    np.testing.assert_allclose(carry, 1 + np.sum(X), rtol=1e-5)
    np.testing.assert_array_equal(results["x"], 2 * np.asarray(X))
    np.testing.assert_array_equal(results["bits"], bits(KEYS))


def log_mean(samples_per_block, kernel, scale, x, label):
    """log (1/S Σ_s softmax(...)_k) with the share of samples whose largest logit is the label's."""

    def function(common, label, numbers):
        logits = common[:, None] * scale + OFFSETS[numbers][None] * kernel[0][None, None]
        right = jnp.argmax(logits, axis=-1) == label[:, None]
        return jax.nn.log_softmax(logits), right.astype(jnp.float32)

    return blocks.log_mean_over_samples(function, x @ kernel, label, S, samples_per_block)


@functools.cache
def plain_log_mean():
    def plain(kernel, scale, x):
        logits = jnp.stack([(x @ kernel) * scale + OFFSETS[s][None] * kernel[0][None] for s in range(S)], axis=1)
        right = jnp.mean(jnp.argmax(logits, axis=-1) == LABEL[:, None], axis=1)
        result = jnp.log(jnp.mean(jax.nn.softmax(logits), axis=1))
        return jnp.sum(COTANGENT * result), (result, right)

    return jax.jit(jax.value_and_grad(plain, argnums=(0, 1, 2), has_aux=True))(KERNEL, SCALE, X)


# Ten samples in blocks of one, of three and four, which do not divide ten, of six (then five), and in one.
@pytest.mark.parametrize(
    ("outermost", "samples_per_block"),
    [*(("jit", size) for size in (1, 4, 6)), ("grad", 3), ("grad", 64)],
)
def test_a_mean_over_blocks_of_samples_has_the_value_and_gradient_of_a_plain_one(outermost, samples_per_block):
    def weighted(kernel, scale, x):
        result = log_mean(samples_per_block, kernel, scale, x, LABEL)
        return jnp.sum(COTANGENT * result[0]), result

    if outermost == "jit":
        function = jax.jit(jax.value_and_grad(weighted, argnums=(0, 1, 2), has_aux=True))
    else:
        function = jax.value_and_grad(jax.jit(weighted), argnums=(0, 1, 2), has_aux=True)
    (value, (log_p, right)), gradient = function(KERNEL, SCALE, X)
    (expected_value, (expected_log_p, expected_right)), expected_gradient = plain_log_mean()
    np.testing.assert_allclose(log_p, expected_log_p, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(right, expected_right, rtol=1e-6)
    np.testing.assert_allclose(value, expected_value, rtol=1e-4, atol=1e-5)
    assert_trees_close(gradient, expected_gradient, rtol=1e-4, atol=1e-5)


def test_improbable_samples_do_not_change_the_sum_of_probable_ones():
    """log (1/4 (e^-1000 + e^-1000 + e^-1 + e^-3)): the running sum starts where exp underflows."""
    values = jnp.asarray([[-1000.0, -1000.0, -1.0, -3.0]])
    expected = np.log((np.exp(-1) + np.exp(-3)) / 4)
    shares = np.array([0, 0, np.exp(-1), np.exp(-3)]) / (np.exp(-1) + np.exp(-3))
    for samples_per_block in (1, 2, 3, 4):

        def function(values, samples_per_block=samples_per_block):
            figures = jnp.zeros((1, 1))
            return blocks.log_mean_over_samples(
                lambda common, _, numbers: (common[:, numbers], jnp.repeat(figures, len(numbers), axis=1)),
                values,
                None,
                4,
                samples_per_block,
            )[0][0]

        value, gradient = jax.jit(jax.value_and_grad(function))(values)
        np.testing.assert_allclose(value, expected, rtol=1e-6)
        np.testing.assert_allclose(gradient[0], shares, rtol=1e-5, atol=1e-7)


@pytest.mark.devices
def test_blocks_of_split_rows_give_what_one_device_gives():
    """Eight devices of two rows each; at most one row a device at a time makes two blocks of eight."""
    mesh = MeshConfig(fsdp=2).build()
    rows = {"x": jnp.tile(X, (3, 1))[:16], "y": jnp.tile(Y, 3)[:16]}
    constants = (jnp.tile(LABEL, 3)[:16], jnp.linspace(0, 1, 16), jax.random.split(jax.random.key(1), 16))

    def run(rows, constants):
        function = jax.value_and_grad(sum_of_losses, argnums=(1, 2, 3), has_aux=True)
        return function(1, KERNEL, SCALE, rows, constants)

    expected = jax.jit(run)(rows, constants)
    with jax.set_mesh(mesh):
        split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(("data", "fsdp")))
        lowered = jax.jit(run).lower(*jax.device_put((rows, constants), split))
        actual = lowered.compile()(*jax.device_put((rows, constants), split))
    (total, sums), gradient = actual
    np.testing.assert_allclose(total, expected[0][0], rtol=1e-5)
    # All examples, in two blocks; one device alone takes 16.
    assert float(sums["examples"]) == float(expected[0][1]["examples"]) == 16
    assert_trees_close(gradient, expected[1], rtol=1e-4, atol=1e-5)
    assert "tensor<2x8x3xf32>" in lowered.as_text()
