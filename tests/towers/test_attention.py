"""Attention a few examples at a time computes what attention of all does, on one device and on eight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het import sharding
from lit_het.towers import attention
from lit_het.towers.attention import KeysAndValues

EXAMPLES, QUERIES, KEYS, HEADS, WIDTH = 16, 5, 130, 2, 4
OF_TWO_EXAMPLES = 2 * HEADS * QUERIES * KEYS * 4
LIMITS = {
    "two at a time": OF_TWO_EXAMPLES,
    "one at a time": OF_TWO_EXAMPLES // 2,
    "one head at a time": 1,
    "all at once": 2**40,
}


@pytest.fixture(params=LIMITS, name="groups")
def _groups(request, monkeypatch):
    monkeypatch.setattr(attention, "_LOGITS_AT_ONCE", LIMITS[request.param])


@pytest.fixture(scope="module", name="inputs")
def _inputs():
    random = np.random.default_rng(0)
    rows = [random.normal(size=(EXAMPLES, n, HEADS, WIDTH)).astype(np.float32) for n in (QUERIES, KEYS, KEYS)]
    mask = random.random((EXAMPLES, QUERIES, KEYS)) < 0.5
    mask[..., 0] = True
    return rows, {"none": None, "of each query": mask, "of each example": mask[:, :1]}


def reference(query, keys, values, mask=None, causal=False, bias=None):
    """Vaswani et al. 2017, Eq. 1, one head after the other."""
    out = np.zeros(query.shape)
    for b, h in np.ndindex(EXAMPLES, HEADS):
        logits = query[b, :, h].astype(np.float64) @ keys[b, :, h].T / np.sqrt(WIDTH)
        logits += 0 if bias is None else bias[h % len(bias)]
        seen = np.ones(logits.shape, bool) if mask is None else np.broadcast_to(mask[b], logits.shape)
        if causal:
            seen = seen & (np.arange(KEYS)[None] <= np.arange(QUERIES)[:, None])
        weights = np.where(seen, np.exp(logits), 0)
        out[b, :, h] = weights / weights.sum(axis=1, keepdims=True) @ values[b, :, h]
    return out


def attended(query, keys, values, mask=None, causal=False, bias=None):
    query, keys, values = map(jnp.asarray, (query, keys, values))
    mask = None if mask is None else jnp.asarray(mask)
    bias = None if bias is None else jnp.asarray(bias)
    return attention._attended(query, KeysAndValues(keys, values), mask, causal, bias)


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize(
    ("mask", "causal"), [("none", False), ("none", True), ("of each query", False), ("of each example", False)]
)
def test_groups_attend_as_by_the_equation(mask, causal, inputs):
    rows, masks = inputs
    # A function of its own: JAX would return the program of another limit for the same one.
    found = jax.jit(lambda *rows: attended(*rows, mask=masks[mask], causal=causal))(*rows)
    np.testing.assert_allclose(found, reference(*rows, mask=masks[mask], causal=causal), atol=2e-6)


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("heads", [1, HEADS])
def test_groups_add_a_bias_of_each_head_or_of_all(heads, inputs):
    rows, masks = inputs
    bias = np.random.default_rng(1).normal(size=(heads, QUERIES, KEYS)).astype(np.float32)
    mask = masks["of each example"]
    found = jax.jit(lambda *rows: attended(*rows, mask=mask, bias=bias))(*rows)
    np.testing.assert_allclose(found, reference(*rows, mask=mask, bias=bias), atol=2e-6)


@pytest.mark.usefixtures("groups")
def test_gradients_of_groups_are_those_of_all(inputs, monkeypatch):
    rows, masks = inputs

    bias = jnp.ones((HEADS, QUERIES, KEYS))

    def gradients():
        def total(bias, *rows):
            return jnp.sum(attended(*rows, mask=masks["of each query"], bias=bias) ** 2)

        return jax.grad(total, (0, 1, 2, 3))(bias, *rows)

    found = gradients()
    monkeypatch.setattr(attention, "_LOGITS_AT_ONCE", LIMITS["all at once"])
    for one, of_all in zip(found, gradients(), strict=True):
        np.testing.assert_allclose(one, of_all, atol=1e-5)


in_groups = pytest.mark.skipif(jax.default_backend() == "gpu", reason="GPUs attend to all examples at once")


@in_groups
def test_no_logits_are_saved_for_the_gradient(inputs, monkeypatch):
    rows, _ = inputs

    def largest_saved():
        _, backward = jax.vjp(attended, *rows)
        return max(x.size for x in jax.tree.leaves(backward))

    monkeypatch.setattr(attention, "_LOGITS_AT_ONCE", LIMITS["all at once"])
    assert largest_saved() == EXAMPLES * HEADS * QUERIES * KEYS
    monkeypatch.setattr(attention, "_LOGITS_AT_ONCE", OF_TWO_EXAMPLES)
    assert largest_saved() == EXAMPLES * KEYS * HEADS * WIDTH


@in_groups
@pytest.mark.parametrize(
    ("rows", "num_keys", "groups"),
    [
        (128, 256, 32),  # SoViT-400m/14 at 224: 4 MiB an image
        (127, 256, 127),  # a prime number of examples
        (3, 256, 1),
        (8, 2**10, 8),  # 16 MiB an image
        (8, 2**11, 16),  # and half of the heads of an image
        (8, 3 * 2**10, 32),  # 5 heads would fit, but 16 are not groups of them
        (8, 2**16, 128),  # one head exceeds the limit
        (4096, 127, 1),  # short texts
    ],
)
def test_groups_are_as_large_as_the_limit_allows(rows, num_keys, groups):
    query = jnp.zeros((rows, 256, 16, 0))
    assert attention._num_groups(query, num_keys) == groups


@pytest.mark.devices
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("limit", "groups"), [("one at a time", 2), ("one head at a time", 4)])
def test_groups_on_eight_devices_move_no_rows(limit, groups, has_bias, inputs, monkeypatch):
    rows, masks = inputs
    bias = np.random.default_rng(1).normal(size=(HEADS, QUERIES, KEYS)).astype(np.float32) if has_bias else None
    monkeypatch.setattr(attention, "_LOGITS_AT_ONCE", LIMITS[limit])
    mesh = sharding.MeshConfig(fsdp=2).build()
    place = sharding.batch_sharding(mesh)

    loss = jax.value_and_grad(lambda *rows: jnp.sum(attended(*rows, bias=bias) ** 2))
    expected = loss(*rows, masks["of each query"])
    with jax.set_mesh(mesh):
        assert attention._num_groups(jnp.asarray(rows[0]), KEYS) == groups
        placed = [jax.device_put(x, place) for x in (*rows, masks["of each query"])]
        program = jax.jit(loss).lower(*placed).compile()
        found = program(*placed)
    text = program.as_text() or ""
    assert "while" in text
    assert not any(kind in text for kind in ("all-gather", "all-to-all", "collective-permute"))
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-5)
    np.testing.assert_allclose(found[1], expected[1], atol=1e-5)


@pytest.mark.devices
def test_rows_of_groups_are_saved_once(inputs, monkeypatch):
    rows, _ = inputs
    monkeypatch.setattr(attention, "_LOGITS_AT_ONCE", 1)
    with jax.set_mesh(sharding.MeshConfig(fsdp=2).build()):
        program = jax.make_jaxpr(lambda *rows: jax.tree.leaves(jax.vjp(attended, *rows)[1]))(*rows)
    (loop,) = (operation for operation in program.eqns if operation.primitive.name == "scan")
    # What attention found: rows with a constraint would be three more.
    assert len(loop.outvars) == 1
