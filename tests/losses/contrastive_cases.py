"""Batches with every kind of queries, slow NumPy references of the losses, and meshes."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lit_het import sharding
from lit_het.losses.contrastive import SigmoidLoss, SoftmaxLoss
from lit_het.sharding import MeshConfig
from lit_het.types import EmbeddingSamples, Queries

D, S, R = 4, 3, 2
LOSSES = (SoftmaxLoss, SigmoidLoss)
# The form of the queries of both sides; None for deterministic embeddings, used as queries and as keys.
KINDS = {
    "deterministic": (None, None),
    "both sides noisy": ("factored", "singly"),
    "one side noisy": ("scaled", None),
}
B = 32
# Device 1 of 8 has no valid row, and the first of 2 has fewer than the second.
VALID = np.ones(B, bool)
VALID[[0, 4, 5, 6, 7, 13, 30]] = False
# With eight devices both axes that share a batch are longer than one.
MESHES = {1: MeshConfig(), 2: MeshConfig(fsdp=2), 8: MeshConfig(data=2, fsdp=4)}


every_loss = pytest.mark.parametrize("loss", LOSSES, ids=["softmax", "sigmoid"])
every_kind = pytest.mark.parametrize("kind", KINDS)
every_form = pytest.mark.parametrize("form", ["dense", "gather", "ring"])


@functools.cache
def compiled(loss):
    """One program serves every test with the same devices and kind of queries."""
    return jax.jit(jax.value_and_grad(loss))


def assert_equal(found, expected, rtol):
    """Compares losses with their gradients."""
    np.testing.assert_allclose(found[0], expected[0], rtol=rtol)
    gradient, expected = numpy_fields(found[1]), numpy_fields(expected[1])
    assert gradient.keys() == expected.keys()
    for name, array in expected.items():
        atol = max(rtol * np.abs(array).max(), 1e-7 if rtol else 0)
        np.testing.assert_allclose(gradient[name], array, rtol=0, atol=atol, err_msg=name)


def make(kind, *, b, num_samples=S, seed=0, temperature=0.7):
    """Returns a batch with queries that are independent of its keys, so that a mix-up of both changes the loss."""
    random = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(random.normal(size=shape), jnp.float32)

    def queries(form):
        if form is None:
            return None
        if form == "singly":
            return Queries(draw(b, num_samples, D))
        scale = 0.5 + draw(b, num_samples) ** 2 if form == "scaled" else None
        return Queries(draw(b, 1, D), draw(b, R, D), draw(b, num_samples, R), scale)

    image, text = KINDS[kind]
    return EmbeddingSamples(
        image=draw(b, D),
        text=draw(b, D),
        image_queries=queries(image),
        text_queries=queries(text),
        temperature=jnp.float32(temperature),
        bias=jnp.float32(-1.5),
    )


def take(samples, index):
    """Returns the batch of these rows."""
    return jax.tree.map(lambda x: x[index] if x.ndim else x, samples)


def mesh_of(num_devices):
    """Returns a mesh of the first devices."""
    return MESHES[num_devices].build(jax.devices()[:num_devices])


def split_rows(tree, mesh):
    """Splits rows over devices and replicates scalars."""
    split, whole = sharding.batch_sharding(mesh), NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.device_put(x, split if x.ndim else whole), tree)


def numpy_fields(samples) -> dict[str, Any]:
    """Returns the arrays of a batch in float64 by their dotted names, without those that are None."""
    arrays = {}
    for field in dataclasses.fields(samples):
        value = getattr(samples, field.name)
        if isinstance(value, Queries):
            arrays |= {f"{field.name}.{name}": array for name, array in numpy_fields(value).items()}
        elif value is not None:
            arrays[field.name] = np.asarray(value, np.float64)
    return arrays


def reference(loss, arrays, valid, ids=(), weight=None):
    """Returns the loss from loops over queries, keys and samples (HET-XL Eq. 6 and 8; SigLIP Eq. 1; MIL-NCE Eq. 1).

    Args:
        loss: softmax or sigmoid.
        arrays: as `numpy_fields` returns them.
        valid: which rows take part.
        ids: of images and of texts; rows that are equal in one of them are positives of each other.
        weight: of each row's own losses in the mean; None for equal weights.
    """
    valid_rows = np.flatnonzero(valid)
    direction = _softmax_direction if loss is SoftmaxLoss else _sigmoid_direction
    positives = {
        n: [m for m in valid_rows if m == n or any((one[m] == one[n]).all() for one in ids)] for n in valid_rows
    }
    logit = SimpleNamespace(temperature=arrays["temperature"], bias=arrays.get("bias", 0.0), positives=positives)
    image, text = arrays["image"], arrays["text"]
    image_to_text = direction(queries_one_by_one(arrays, "image"), text, valid_rows, logit)
    text_to_image = direction(queries_one_by_one(arrays, "text"), image, valid_rows, logit)
    of_rows = np.array([image_to_text, text_to_image]).mean(axis=0)
    return np.average(of_rows, weights=None if weight is None else np.asarray(weight, np.float64)[valid_rows])


def queries_one_by_one(arrays, side):
    """Returns a list of samples for every row: (sample or mean + Σ_r normal_r factor_r) * scale."""
    held = arrays.get(f"{side}_queries.samples", arrays[side][:, None])
    factors, normals, scale = (arrays.get(f"{side}_queries.{name}") for name in ("factors", "normals", "scale"))
    if normals is None:
        return [list(samples) for samples in held]
    queries = []
    for n in range(len(held)):
        of_row = []
        for s in range(normals.shape[1]):
            query = held[n, 0].copy()
            for r in range(normals.shape[2]):
                query += normals[n, s, r] * factors[n, r]
            of_row.append(query if scale is None else query * scale[n, s])
        queries.append(of_row)
    return queries


def _softmax_direction(queries, keys, valid_rows, logit):
    """Returns -log 1/S Σ_s Σ_{m ∈ P(n)} exp(q_ns·k_m/τ) / Σ_i exp(q_ns·k_i/τ) of every valid row n."""
    losses = []
    for n in valid_rows:
        probability = 0.0
        for query in queries[n]:
            scores = {i: np.exp(query @ keys[i] / logit.temperature + logit.bias) for i in valid_rows}
            right = sum(scores[m] for m in logit.positives[n])
            probability += right / sum(scores.values()) / len(queries[n])
        losses.append(-np.log(probability))
    return losses


def _sigmoid_direction(queries, keys, valid_rows, logit):
    """Returns Σ_i -log 1/S Σ_s σ(z_ni (q_ns·k_i/τ + bias)) of every valid row n, z = 1 for positives and else -1."""
    losses = []
    for n in valid_rows:
        total = 0.0
        for i in valid_rows:
            z = 1.0 if i in logit.positives[n] else -1.0
            logits = [query @ keys[i] / logit.temperature + logit.bias for query in queries[n]]
            total -= np.log(np.mean([1 / (1 + np.exp(-z * score)) for score in logits]))
        losses.append(total)
    return losses
