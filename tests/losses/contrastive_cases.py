"""Batches with every kind of queries and rows, a slow NumPy reference of the losses, and meshes."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lit_het import sharding
from lit_het.losses.contrastive import SigmoidLoss, SoftmaxLoss
from lit_het.mixtures import MixedImages
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


def words(numbers):
    """Hashes of 64 bits; those of the numbers 1 and 2 differ in their second words alone."""
    numbers = np.asarray(numbers)
    return jnp.asarray(np.stack([np.where(numbers == 2, 1, numbers), numbers], axis=1), jnp.uint32)


# Ten images and seven texts, on all of eight devices; some pairs share only one, and invalid rows share both.
IDS = (words(np.random.default_rng(0).integers(0, 10, B)), words(np.random.default_rng(1).integers(0, 7, B)))
WEIGHT = np.where(np.arange(B) % 3 == 1, 0.3, 1.0).astype(np.float32)
WEIGHT[[9, 13, 20]] = [0.0, 0.7, 0.0]
OTHER = (np.arange(B) - 1) % B
SHARE = np.where(VALID & VALID[OTHER] & (np.arange(B) % 4 != 1), np.linspace(0.5, 1, B), 1).astype(np.float32)
MIXED = MixedImages(jnp.asarray(SHARE), jnp.asarray(OTHER), (jnp.asarray(np.asarray(IDS[0])[OTHER]),))
PSEUDO: dict[str, Any] = {"pseudo_positives": 0.3}
SMOOTHED: dict[str, Any] = {"label_smoothing": 0.2}
# What is told of rows (ids, weights, mixed images), and fields of the loss.
ROWS: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "plain": ((), None, None, {}),
    "duplicates": (IDS, None, None, {}),
    "weights": (IDS[:1], WEIGHT, None, {}),
    "smoothed": (IDS[:1], WEIGHT, None, SMOOTHED),
    "pseudo-positives": (IDS[:1], WEIGHT, None, PSEUDO),
    "mixed images": (IDS[:1], WEIGHT, MIXED, {}),
    "both": (IDS[:1], WEIGHT, MIXED, PSEUDO),
    "both smoothed": (IDS[:1], WEIGHT, MIXED, {**PSEUDO, **SMOOTHED}),
}


every_loss = pytest.mark.parametrize("loss", LOSSES, ids=["softmax", "sigmoid"])
every_kind = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind == "one side noisy" else kind for kind in KINDS]
)
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
        # The gradient of a softmax's bias is 0 but for rounding.
        atol = max(rtol * np.abs(array).max(), 1e-7 if rtol else 0)
        np.testing.assert_allclose(gradient[name], array, rtol=0, atol=atol, err_msg=name)


def assert_zero(found):
    """Of a batch without rows that count, the loss and the gradient are 0."""
    value, gradient = found
    np.testing.assert_allclose(value, 0, atol=1e-12)
    for name, array in numpy_fields(gradient).items():
        np.testing.assert_allclose(array, 0, atol=1e-12, err_msg=name)


def make(kind, *, b, num_samples=S, seed=0, temperature=0.7) -> Any:
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


def arguments(kind, rows="plain") -> list[Any]:
    """Returns a batch of `B` rows and what a loss is told of them; one program serves the same arguments."""
    told = ROWS[rows][:3] if ROWS[rows][2] is not None else ROWS[rows][:2]
    return [make(kind, b=B), jnp.asarray(VALID), *told]


def take(samples, index):
    """Returns the batch of these rows."""
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x)[index]) if x.ndim else x, samples)


def mesh_of(num_devices):
    """Returns a mesh of the first devices."""
    return MESHES[num_devices].build(jax.devices()[:num_devices])


def split_rows(tree, mesh):
    """Splits rows over devices and replicates scalars."""
    split, whole = sharding.batch_sharding(mesh), NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda x: jax.device_put(x, split if x.ndim else whole), tree)


def on_devices(num_devices, function, arguments):
    """Runs a function with rows split over devices, without a mesh if there is but one."""
    if num_devices == 1:
        return function(*arguments)
    mesh = mesh_of(num_devices)
    with jax.set_mesh(mesh):
        return function(*split_rows(arguments, mesh))


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


def reference(loss, arrays, valid, ids=(), weight=None, mixed=None, pseudo_positives=0.0, label_smoothing=0.0):
    """Returns the loss, query by query (HET-XL Eq. 6 and 8; SigLIP Eq. 1; MIL-NCE Eq. 1; PCME++ Sec. 2.3 and 2.4).

    Args:
        loss: softmax or sigmoid.
        arrays: as `numpy_fields` returns them.
        valid: which rows take part.
        ids: of images and of texts; rows that are equal in one of them are positives of each other.
        weight: of each row's own losses in the mean; None for equal weights.
        mixed: an image has its share in its own positives, and the rest in those of another one.
        pseudo_positives: the weight of keys that fit a query better than its partner.
        label_smoothing: share of the uniform distribution in the targets.
    """
    rows, y = np.flatnonzero(valid), np.eye(len(valid))
    for one in map(np.asarray, ids):
        y = np.maximum(y, (one[:, None] == one[None]).all(axis=2))
    if mixed is not None:
        share = np.asarray(mixed.share, np.float64)[:, None]
        y = share * y + (1 - share) * y[np.asarray(mixed.index)]
    losses = np.zeros(len(rows))
    for side, keys, label in (("image", arrays["text"], y), ("text", arrays["image"], y.T)):
        queries = queries_one_by_one(arrays, side)
        for place, n in enumerate(rows):
            logits = np.array(queries[n]) @ keys[rows].T / arrays["temperature"] + arrays.get("bias", 0.0)
            quiet = arrays[side][n] @ keys[rows].T / arrays["temperature"]
            losses[place] += (
                _of_query(loss, logits, quiet, label[n, rows], place, pseudo_positives, label_smoothing) / 2
            )
    return np.average(losses, weights=None if weight is None else np.asarray(weight, np.float64)[rows])


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


def _of_query(loss, logits, quiet, y, place, pseudo_positives, smoothing):
    """Returns the loss of a query whose partner is at ``place``, from the logits of its samples ``[s m]``.

    Softmax: -log 1/S Σ_s Σ_m y_m exp(logit_sm) / Σ_i exp(logit_si). Sigmoid: Σ_m -y_m log p_m - (1 - y_m) log(1 - p_m)
    with p_m = 1/S Σ_s σ(logit_sm), and α times that of pseudo-positives. The uniform distribution is over keys, beside
    the prediction of the logits without noise, or over both labels of a pair.
    """
    if loss is SoftmaxLoss:
        p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        uniform = np.mean(quiet) - np.log(np.exp(quiet).sum())
        return -(1 - smoothing) * np.log(p.mean(axis=0) @ y) - smoothing * uniform
    log_p, log_not_p = (np.log(np.mean(1 / (1 + np.exp(-sign * logits)), axis=0)) for sign in (1, -1))
    raised = np.where(log_p >= log_p[place], np.maximum(y, y[place]), y)
    total = 0.0
    for share, label in ((1, y), (pseudo_positives, raised)):
        label = (1 - smoothing) * label + smoothing * 0.5
        total -= share * np.sum(label * log_p + (1 - label) * log_not_p)
    return total
