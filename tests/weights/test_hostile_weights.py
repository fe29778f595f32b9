"""Malformed weights that would crash a run or exhaust the memory give a one-line error that names the file."""

import contextlib
import io
import json
import shutil
import zipfile
from pathlib import Path

import msgpack
import numpy as np
import pytest

from lit_het.errors import UserError
from lit_het.weights import formats, sources
from lit_het.weights.rename import load
from lit_het.weights.vmoe.files import open_vmoe
from tests.weights.importing import GOLDEN, golden, save, shapes
from tests.weights.test_vmoe import packed, slices, write_checkpoint


def read(address):
    found = formats.open_weights(str(address))
    return load(found.arrays, found.parameter_sources, shapes(found))


def npy(shape, content=b"", dtype="<f4"):
    file = io.BytesIO()
    np.lib.format.write_array_header_2_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue() + content


def npz(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"cls.npy": npy((2**40, 2**20))}, "not as many bytes as it declares"),
        ({"cls.npy": npy((-1, 4))}, r"shape \(-1, 4\)"),
        ({"cls.npy": b"\x93NUMPY\x02\x00" + b"\xff" * 4}, "header of the array"),
        ({"cls.npy": npy((2**19,), bytes(2**21))}, "more than 32 times as many bytes as the file"),
        ({"cls.npy": npy((0, 2**60))}, r"is empty; is the file complete"),
        ({"a\nb.npy": npy((1,), bytes(4))}, r"named 'a\\nb'"),
        ({"x" * 600 + ".npy": npy((1,), bytes(4))}, "which cannot be the name of a parameter"),
        ({"cls": b"text"}, "not a NumPy array"),
        ({"Transformer/encoderblock_" + "9" * 30 + "/LayerNorm_0/bias.npy": npy((4,), bytes(16))}, "no array|of block"),
    ],
)
def test_an_npz_that_would_exhaust_the_memory_is_refused(members, message, tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "FREE_BYTES", 2**20)
    with pytest.raises(UserError, match=message) as error:
        read(npz(tmp_path / "x.npz", members))
    assert "\n" not in str(error.value)


def test_a_block_number_far_above_the_others_is_refused(tmp_path):
    arrays = golden("ckpt_vit_old_names")
    moved = {name.replace("encoderblock_1/", "encoderblock_900000000/"): array for name, array in arrays.items()}
    assert moved.keys() != arrays.keys()
    with pytest.raises(UserError, match="arrays of block 900000000, but of 2 blocks in all"):
        read(save(tmp_path / "x.npz", moved))


@pytest.fixture
def folder(tmp_path):
    return Path(shutil.copytree(GOLDEN / "hf_siglip", tmp_path / "siglip"))


VALUES = (None, True, -1, 0, 10**30, 1.5, float("inf"), "x", [], {}, [[3]])


@pytest.mark.slow
@pytest.mark.parametrize("section", ["vision_config", "text_config", None])
def test_no_value_in_a_config_json_ends_in_a_traceback(folder, section):
    config = json.loads((folder / "config.json").read_text())
    fields = config if section is None else config[section]
    for field in ("model_type", "num_hidden_layers", "num_attention_heads", "hidden_act", "layer_norm_eps", section):
        for value in VALUES:
            changed = fields | {field: value} if field is not None else value
            (folder / "config.json").write_text(json.dumps(changed if section is None else config | {section: changed}))
            with contextlib.suppress(UserError):
                formats.open_weights(str(folder))


@pytest.mark.parametrize("name", ["config.json", "preprocessor_config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", ["[" * 100_000, "null", "[]", "{", '{"weight_map": {"a": [1]}}'])
def test_json_that_is_not_an_object_gives_a_one_line_error_with_the_file_name(folder, name, content):
    (folder / name).write_text(content)
    if (name, content) == ("preprocessor_config.json", '{"weight_map": {"a": [1]}}'):
        return
    with pytest.raises(UserError, match=r"config\.json|\.index\.json"):
        read(folder)


@pytest.mark.parametrize("name", ["", "..", "/etc/passwd", "a\0b.safetensors", "a/b.safetensors", "x.bin"])
def test_an_index_that_lists_files_outside_its_folder_is_refused(folder, name):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(UserError, match=r"which is not a \.safetensors file in its folder"):
        read(folder)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 4]}}, "does not match"),
        ({"a": {"dtype": "F32", "shape": [0, 2**60], "data_offsets": [0, 0]}}, "is empty"),
        ({"a": {"dtype": "X", "shape": [1], "data_offsets": [0, 4]}}, "unknown type"),
        ({"a": None}, "not safetensors"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, "a field is missing or has another type"),
        ([], "not a JSON object"),
    ],
)
def test_headers_of_safetensors_are_compared_with_the_file(folder, header, message):
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(4))
    with pytest.raises(UserError, match=message) as error:
        read(folder)
    assert "model.safetensors" in str(error.value)


@pytest.fixture
def checkpoint(tmp_path):
    write_checkpoint(tmp_path / "vmoe", {"params/cls": np.ones((2, 3), np.float32)})
    return tmp_path / "vmoe"


def index_of(checkpoint, info, shard_count=2):
    Path(f"{checkpoint}.index").write_bytes(packed({"shard_count": shard_count, "index": {"a": info}}))


def info(shape=(2, 3), places=(((0, 2), (0, 3)),), shards=(0,)):
    array = packed((shape, "float32", False, {}))
    return msgpack.ExtType(8, packed((array, tuple(slices(place) for place in places), shards)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ((info(), 2**40), "shard_count = 1099511627776 is not 1 to 10,000"),
        ((info(), -1), "shard_count = -1"),
        ((info(), "2"), "shard_count = '2'"),
        ((info(shards=(2,)),), r"refers to the shards \(2,\), but there are 2"),
        ((info(shape=(-2, 3)),), r"has the shape \(-2, 3\)"),
        ((info(shape=(2**40, 3)),), "does not fit into the files"),
        ((5,), "is not an array"),
        (({"b": [1]},), "is not an array"),
    ],
)
def test_an_index_of_v_moe_with_impossible_files_or_shapes_is_refused(checkpoint, content, message):
    index_of(checkpoint, *content)
    with pytest.raises(UserError, match=message):
        read(checkpoint)


def test_deep_and_empty_messagepack_is_refused_as_an_index(checkpoint):
    for content in (b"\x91" * 10_000, b"", b"\xc1", b"\x81\xa1a" * 400 + b"\x01", b"\xdd\xff\xff\xff\xff" * 1000):
        Path(f"{checkpoint}.index").write_bytes(content)
        with pytest.raises(UserError, match=r"vmoe\.index is not the index of a V-MoE checkpoint"):
            read(checkpoint)


ONES = np.ones(6, np.float32)


@pytest.mark.parametrize(
    ("place", "run", "message"),
    [
        *(
            (place, (ONES.shape, ONES.dtype.name, ONES.tobytes()), r"array 0 of shape \(2, 3\) is damaged")
            for place in (((0, 2**30), (0, 3)), ((-2, 2), (0, 3)), ((0, 2),))
        ),
        (((0, 2), (0, 3)), ((6,), "O", bytes(48)), r"array 0 of shape \(2, 3\) is damaged .*numbers of the type"),
    ],
)
def test_chunks_outside_their_array_and_unsupported_types_are_reported_as_damage(checkpoint, place, run, message):
    entry = [[msgpack.ExtType(1, packed(run))], msgpack.ExtType(6, slices(place))]
    index_of(checkpoint, info())
    Path(f"{checkpoint}.data-00000-of-00002").write_bytes(packed({"0": [entry]}))
    found = open_vmoe(checkpoint)
    with pytest.raises(UserError, match=f"data-00000-of-00002: {message}"):
        found["a"].read()
