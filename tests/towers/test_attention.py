"""Attention a few examples at a time computes what attention of all does, on one device and on eight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from lit_het import sharding
from lit_het.towers import attention
from lit_het.towers.attention import KeysAndValues
from lit_het.towers.layers import WeightDropout

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


RATE, SIZE = 0.3, 8


def dropped_weights(*, masked, causal, seed=0):
    """Weights as they are used, and those before: outputs, where values are the rows of the identity."""
    random = np.random.default_rng(2)
    query, keys = (random.normal(size=(EXAMPLES, n, HEADS, SIZE)).astype(np.float32) for n in (QUERIES, SIZE))
    bias = random.normal(size=(HEADS, QUERIES, SIZE)).astype(np.float32)
    seen = np.broadcast_to(np.tri(QUERIES, SIZE, dtype=bool) | (not causal), (EXAMPLES, QUERIES, SIZE)).copy()
    mask = random.random((EXAMPLES, 1, SIZE)) < 0.7
    mask[..., 0] = True
    seen &= mask | (not masked)
    logits = np.einsum("bqhe,bnhe->bqhn", query.astype(np.float64), keys) / np.sqrt(SIZE) + bias.swapaxes(0, 1)
    weights = np.where(seen[:, :, None], np.exp(logits), 0)
    values = jnp.broadcast_to(jnp.eye(SIZE)[None, :, None], keys.shape)
    found = attention._attended_with_dropout(
        jnp.asarray(query),
        KeysAndValues(jnp.asarray(keys), values),
        jnp.asarray(mask) if masked else None,
        causal,
        jnp.asarray(bias),
        WeightDropout(RATE, jax.random.key(seed)),
    )
    return np.asarray(found), weights / weights.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize(("masked", "causal"), [(False, False), (False, True), (True, False), (True, True)])
def test_weights_are_dropped_or_scaled_each_by_itself(masked, causal):
    found, expected = dropped_weights(masked=masked, causal=causal)
    kept, seen = found != 0, expected > 0
    np.testing.assert_allclose(found, np.where(kept, expected / (1 - RATE), 0), rtol=1e-5, atol=1e-7)
    assert abs(1 - kept[seen].mean() - RATE) < 5 * np.sqrt(RATE * (1 - RATE) / seen.sum())
    assert (kept[:, :, 0] != kept[:, :, 1])[seen[:, :, 0]].any()  # heads drop others
    assert (kept[0] != kept[1])[seen[0] & seen[1]].any()  # as do examples
    np.testing.assert_array_equal(dropped_weights(masked=masked, causal=causal)[0], found)
    assert (dropped_weights(masked=masked, causal=causal, seed=1)[0] != found).any()


def test_gradients_pass_through_the_weights_that_are_kept(inputs):
    (query, keys, values), _ = inputs
    dropout = WeightDropout(RATE, jax.random.key(0))

    def total(*arrays):
        query, keys, values = map(jnp.asarray, arrays)
        found = attention._attended_with_dropout(query, KeysAndValues(keys, values), None, True, None, dropout)
        return (found**2).sum()

    check_grads(total, [jnp.asarray(x[:2, :5]) for x in (query, keys, values)], order=1, modes=["rev"], rtol=2e-2)
