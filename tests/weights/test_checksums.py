"""Checksums of arrays do not depend on the sharding and change with every bit."""

import hashlib
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from lit_het.sharding import MeshConfig
from lit_het.weights.native import checksums

SPLITS = (
    PartitionSpec(),
    PartitionSpec(None, "fsdp"),
    PartitionSpec("data", None, "fsdp"),
    PartitionSpec(("data", "fsdp")),
)


def checksum(array):
    return checksums.fingerprints({"x": array})["x"].checksum


@pytest.mark.devices
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_the_checksum_does_not_depend_on_the_sharding(monkeypatch, dtype):
    mesh = MeshConfig(data=2, fsdp=4).build()
    whole = np.random.default_rng(0).normal(size=(8, 12, 16)).astype(dtype)
    in_numpy = checksum(whole)
    monkeypatch.setattr(checksums, "_MAX_NUMPY_ELEMENTS", 0)
    assert checksum(jnp.asarray(whole)) == in_numpy
    for split in SPLITS:
        assert checksum(jax.device_put(whole, NamedSharding(mesh, split))) == in_numpy, split


@pytest.mark.devices
def test_the_sums_of_shards_need_no_collectives():
    where = NamedSharding(MeshConfig(data=2, fsdp=4).build(), SPLITS[2])
    array = jax.device_put(np.zeros((8, 12, 16), np.float32), where)
    text = jax.jit(checksums._sums_per_shard(where)).lower(array).compile().as_text()
    assert text is not None
    assert not re.search("all-|permute|reduce-scatter", text)


@settings(max_examples=50)
@given(st.integers(0, 59), st.integers(1, 2**32 - 1))
def test_any_changed_bit_of_one_element_changes_both_sums(place, bits):
    before = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
    after = before.copy()
    after.reshape(-1).view(np.uint32)[place] ^= np.uint32(bits)
    one, other = checksum(before), checksum(after)
    assert one[:8] != other[:8]
    assert one[8:] != other[8:]


def test_permuted_elements_change_the_checksum():
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    others = [array[::-1], array.T.reshape(4, 6), np.roll(array, 1)]
    assert len({checksum(one) for one in (array, *others)}) == 4


@pytest.mark.parametrize("array", [np.zeros((0, 3), np.float32), np.float32(1.5), jnp.int32(7)], ids=str)
def test_empty_arrays_and_scalars_have_a_checksum_too(array):
    assert len(checksum(np.asarray(array))) == 16


def test_the_digest_of_a_tree_depends_on_every_bit_path_type_and_shape_but_not_on_order():
    tree = {"scale": jnp.float32(2.0), "kernel": jnp.ones((2, 3))}
    expected = checksums.digest(tree)
    assert checksums.digest({name: tree[name] for name in reversed(tree)}) == expected
    bits = np.ones((2, 3), np.float32)
    bits[1, 2] = np.nextafter(np.float32(1), np.float32(2))
    changes = [
        {"kernel": jnp.asarray(bits)},
        {"kernel": jnp.ones((3, 2))},
        {"kernel": jnp.ones((2, 3), jnp.bfloat16)},
        {"other": jnp.ones((2, 3))},
    ]
    assert len({checksums.digest({**tree, **change}) for change in changes} | {expected}) == 5
    assert checksums.digest({}) != expected


def test_encoded_info_is_decoded_and_one_changed_character_is_detected():
    arrays = checksums.fingerprints({"a": np.ones((2, 3), np.float32)})
    item = checksums.encode_info({"position": 48}, arrays)
    assert checksums.decode_info(item) == ({"position": 48}, arrays)
    assert checksums.decode_info({**item, "json": item["json"].replace("48", "49")}) is None


@pytest.mark.parametrize(
    "text",
    [
        *(
            json.dumps({"arrays": {"a": one}})
            for one in (1, ["f", 3, ""], [["f"], [3], ""], ["?!", [3], ""], ["float32", [-1], ""])
        ),
        "[]",
        "{}",
        "[" * 5000,
        "no JSON",
        '{"arrays": []}',
    ],
)
def test_info_of_another_format_with_a_valid_digest_is_rejected(text):
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert checksums.decode_info({checksums.DIGEST_KEY: digest, "json": text}) is None
