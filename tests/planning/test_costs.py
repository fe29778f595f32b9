import jax
import jax.numpy as jnp
import pytest

from lit_het.planning import costs
from lit_het.towers.layers import GATES

WIDTH, DEPTH, ROWS = 32, 6, 64
KERNELS = jax.ShapeDtypeStruct((DEPTH, WIDTH, WIDTH), jnp.float32)


def batch(rows):
    return (jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32),)


def loss(kernels, x, policy=None):
    """Scans over layers ``sin(x W)``."""

    def layer(x, kernel):
        return jnp.sin(x @ kernel), None

    layer = layer if policy is None else jax.checkpoint(layer, policy=policy, prevent_cse=False)
    return jnp.sum(jax.lax.scan(layer, x, kernels)[0])


def test_products_in_a_loop_count_once_per_iteration():
    product = 2 * ROWS * WIDTH * WIDTH
    assert costs.product_flops(loss, KERNELS, *batch(ROWS)) == DEPTH * product
    # Backward, every layer has two: of what it saw and, but for the first, of its kernel; XLA drops none here.
    assert costs.product_flops(jax.grad(loss), KERNELS, *batch(ROWS)) == DEPTH * 3 * product


@pytest.mark.parametrize("inner", [None, jax.checkpoint_policies.nothing_saveable])
def test_what_is_computed_again_does_not_count(inner):
    def recomputed(kernels, x):
        return loss(kernels, x, jax.checkpoint_policies.nothing_saveable)

    outer = recomputed if inner is None else jax.checkpoint(recomputed, policy=inner)
    traced = str(jax.make_jaxpr(jax.grad(outer))(KERNELS, *batch(ROWS)))
    assert traced.count("dot_general[") > str(jax.make_jaxpr(jax.grad(loss))(KERNELS, *batch(ROWS))).count(
        "dot_general["
    )
    assert costs.product_flops(jax.grad(outer), KERNELS, *batch(ROWS)) == DEPTH * 3 * 2 * ROWS * WIDTH * WIDTH


def test_convolutions_grouped_products_and_branches_count():
    image, kernel = jnp.ones((2, 9, 9, 3)), jnp.ones((3, 3, 3, 5))
    dimensions = ("NHWC", "HWIO", "NHWC")

    def convolve(image, kernel):
        return jax.lax.conv_general_dilated(image, kernel, (1, 1), "VALID", dimension_numbers=dimensions)

    assert costs.product_flops(convolve, image, kernel) == 2 * (2 * 7 * 7 * 5) * (3 * 3 * 3)
    rows, experts, sizes = jnp.ones((12, 4)), jnp.ones((3, 4, 5)), jnp.asarray([6, 4, 2])
    assert costs.product_flops(jax.lax.ragged_dot, rows, experts, sizes) == 2 * 12 * 4 * 5

    def branch(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x, lambda x: x, x)

    assert costs.product_flops(branch, jnp.ones((4, 4))) == 2 * 4**3


def test_products_of_a_scope_count_with_their_gradients_in_loops_too():
    def layer(x, kernel):
        with jax.named_scope("first"):
            x = jnp.sin(jax.jit(jnp.matmul)(x, kernel))
        return x @ kernel, None

    def loss(kernels, x):
        return jnp.sum(jax.lax.scan(layer, x, kernels)[0])

    product = 2 * ROWS * WIDTH * WIDTH
    assert costs.product_flops(loss, KERNELS, *batch(ROWS), scope="first") == DEPTH * product
    assert costs.product_flops(jax.grad(loss), KERNELS, *batch(ROWS), scope="first") == DEPTH * 3 * product
    assert costs.product_flops(jax.grad(loss), KERNELS, *batch(ROWS)) == 2 * DEPTH * 3 * product
    assert costs.product_flops(jax.grad(loss), KERNELS, *batch(ROWS), scope="other") == 0


def test_the_forward_pass_saves_the_values_of_the_remat_policy():
    row = ROWS * WIDTH * 4

    def of(policy):
        return costs.intermediate_bytes(lambda k, x: loss(k, x, policy), KERNELS, batch, ROWS).saved

    # What each layer saw, and the slope of its sine; or its products.
    assert of(None) == 2 * DEPTH * row
    assert of(jax.checkpoint_policies.nothing_saveable) == DEPTH * row
    assert of(jax.checkpoint_policies.dots_with_no_batch_dims_saveable) == 2 * DEPTH * row


def test_kernels_in_another_type_are_saved_once_for_any_number_of_rows():
    def narrow(kernels, x):
        return loss(kernels.astype(jnp.bfloat16), x.astype(jnp.bfloat16)).astype(jnp.float32)

    values = costs.intermediate_bytes(narrow, KERNELS, batch, ROWS)
    assert values.kernels == DEPTH * WIDTH * WIDTH * 2
    assert values.saved == 2 * DEPTH * ROWS * WIDTH * 2


@pytest.mark.parametrize("depth", [1, 6])
def test_peak_memory_is_that_of_one_layer_for_any_number_of_layers(depth):
    def wide(kernel, x):
        return jnp.sum(jax.lax.scan(lambda x, _: (jnp.tanh(x @ kernel) @ kernel.T, None), x, length=depth)[0])

    row = ROWS * WIDTH * 4
    kernel = jax.ShapeDtypeStruct((WIDTH, 8 * WIDTH), jnp.float32)
    values = costs.intermediate_bytes(wide, kernel, batch, ROWS)
    # Hidden values, of which tanh is computed in their place, and the rows that a layer reads and writes.
    assert values.forward == (8 + 2) * row
    # Rows, tanh of hidden values and its slope are saved; their gradient is multiplied by the slope in its place.
    assert values.saved == depth * (1 + 2 * 8) * row
    assert values.backward == (8 + 2) * row


def test_gradients_of_large_kernels_do_not_hide_the_peak_of_few_rows():
    def loss(kernels, x):
        for kernel in kernels:
            x = jnp.sin(x @ kernel) @ kernel.T
        return jnp.sum(x)

    kernels = [jax.ShapeDtypeStruct((WIDTH, width * WIDTH), jnp.float32) for width in (2, 64)]
    for rows in (4, 64):
        values = costs.intermediate_bytes(loss, kernels, batch, rows)
        # Of the larger kernel: hidden values, and the rows before or after them.
        assert values.forward == (64 + 1) * rows * WIDTH * 4
        assert values.backward == (64 + 1) * rows * WIDTH * 4


@pytest.mark.parametrize(("reads", "rows"), [(1, 8 + 1), (2, 8 + 8 + 1)])
def test_a_result_takes_the_place_of_an_operand_that_nothing_reads_later(reads, rows):
    def loss(kernel, x):
        hidden = x @ kernel
        return sum(jnp.sum(value @ kernel.T) for value in (jnp.sin(hidden), hidden)[:reads])

    kernel = jax.ShapeDtypeStruct((WIDTH, 8 * WIDTH), jnp.float32)
    assert costs.intermediate_bytes(loss, kernel, batch, ROWS).forward == rows * ROWS * WIDTH * 4


def test_a_function_with_a_derivative_of_its_own_is_computed_in_its_operands_place():
    def loss(kernel, x):
        return jnp.sum(GATES["geglu"](x @ kernel) @ kernel.T)

    kernel = jax.ShapeDtypeStruct((WIDTH, 8 * WIDTH), jnp.float32)
    values = costs.intermediate_bytes(loss, kernel, batch, ROWS)
    # Hidden values and the rows after them; activations and their slopes are saved.
    assert values.forward == (8 + 1) * ROWS * WIDTH * 4
    assert values.saved == 2 * 8 * ROWS * WIDTH * 4
