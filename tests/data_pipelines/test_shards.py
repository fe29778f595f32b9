import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from data_pipelines import shards
from data_pipelines.shards import IMAGE, ShardIndex, expand, index_path, index_shard, write_shards
from lit_het.errors import UserError


def sample(key: str, **members: object) -> dict:
    return {"__key__": key, **(members or {"jpg": b"pixels of " + key.encode(), "txt": f"text of {key}", "cls": 7})}


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return write_shards(tmp_path, [sample("a"), sample("b"), sample("c")])[0]


def test_what_was_written_is_read_back_in_any_order(tmp_path: Path):
    written = write_shards(tmp_path, [sample(f"k{i}") for i in range(7)], samples_per_shard=3)
    assert [path.name for path in written] == [f"shard-00000{i}.tar" for i in range(3)]
    index = ShardIndex(written, [IMAGE, "txt", "cls"])
    assert len(index) == 7
    for i in (6, 0, 3, 2):
        assert index.key(i) == f"k{i}"
        assert index.read(i, IMAGE) == f"pixels of k{i}".encode()
        assert index.read(i, "txt") == f"text of k{i}".encode()
        assert index.read(i, "cls") == b"7"
        assert index.shard(i) == written[i // 3]


def test_equal_samples_give_equal_bytes(tmp_path: Path):
    one, other = (write_shards(tmp_path / name, [sample("a"), sample("b")])[0] for name in ("one", "other"))
    assert one.read_bytes() == other.read_bytes()


def test_a_writer_that_dies_leaves_no_shard(tmp_path: Path):
    def samples():
        yield from (sample(f"k{i}") for i in range(5))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shards(tmp_path, samples(), samples_per_shard=2)
    assert list(tmp_path.iterdir()) == []


def test_a_second_writer_does_not_mix_its_shards_with_the_first_ones(tmp_path: Path, shard: Path):
    with pytest.raises(UserError, match=r"holds shard-.*remove them or choose another folder"):
        write_shards(tmp_path, [sample("a")])
    write_shards(tmp_path, [sample("a")], name="other")


@pytest.mark.parametrize("key", ["a.b", "", "folder/x.y"])
def test_a_key_that_would_be_read_back_otherwise_is_refused(tmp_path: Path, key: str):
    with pytest.raises(UserError, match="must not be empty nor hold a dot"):
        write_shards(tmp_path, [sample(key)])
    assert list(tmp_path.iterdir()) == []


def test_patterns_expand_to_sorted_paths_each_one_once(tmp_path: Path):
    written = write_shards(tmp_path, [sample(f"k{i}") for i in range(3)], samples_per_shard=1)
    assert expand(tmp_path) == written
    assert expand(f"{tmp_path}/shard-{{000000..000002}}.tar") == written
    assert expand([f"{tmp_path}/*1.tar", f"{tmp_path}/shard-00000[01].tar"]) == written[:2]
    assert expand(written[2]) == written[2:]


@pytest.mark.parametrize("pattern", ["no-such-*.tar", "shard-{000000..000009}.tar", "missing.tar"])
def test_a_pattern_that_matches_nothing_is_named(tmp_path: Path, shard: Path, pattern: str):
    with pytest.raises(UserError, match=r"(no-such-\*|shard-000001|missing)\.tar: no tar file matches"):
        expand(f"{tmp_path}/{pattern}")


def test_samples_group_by_the_path_up_to_the_first_dot_of_the_base_name(tmp_path: Path):
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as tar:
        for name in ("v1.0/a.JPG", "v1.0/a.seg.png", "v1.0/a.txt", "v1.0/.hidden", "README", "v2/a.webp"):
            tar.addfile(tarfile.TarInfo(name))
    table = index_shard(path)
    assert [table.key(row) for row in range(len(table.keys))] == ["v1.0/a", "v2/a"]
    assert {kind for kind, offsets in table.offsets.items() if offsets[0] >= 0} == {"jpg", "seg.png", "txt", IMAGE}
    assert table.offsets[IMAGE].tolist() == [table.offsets["jpg"][0], table.offsets["webp"][1]]


def test_a_missing_caption_names_shard_key_and_what_is_missing(tmp_path: Path):
    path = write_shards(tmp_path, [sample("a"), sample("b", jpg=b"x")])[0]
    ShardIndex([path], [IMAGE])
    with pytest.raises(UserError, match=r"shard-000000.tar: key b has no \.txt"):
        ShardIndex([path], [IMAGE, "txt"])


def test_a_missing_picture_names_the_extensions_that_count(tmp_path: Path):
    path = write_shards(tmp_path, [sample("a", txt="x", gif=b"")])[0]
    with pytest.raises(UserError, match=r"key a has no \.jpg/jpeg/png/webp"):
        ShardIndex([path], [IMAGE])


@pytest.mark.parametrize("kept", [1100, 2048, 2600])
def test_a_truncated_tar_names_the_shard_and_the_way_out(shard: Path, kept: int):
    os.truncate(shard, kept)
    with pytest.raises(UserError, match=rf"{shard}: is truncated or damaged at byte \d+ of {kept}; fetch or write"):
        index_shard(shard)
    assert not index_path(shard).exists()


def test_a_tar_cut_at_the_border_of_a_member_is_truncated_all_the_same(shard: Path):
    os.truncate(shard, 3 * 1024)
    with pytest.raises(UserError, match="is truncated or damaged at byte 3072 of 3072"):
        index_shard(shard)


def test_a_damaged_header_is_not_taken_for_the_end(shard: Path):
    data = bytearray(shard.read_bytes())
    data[1024:1030] = b"\xff" * 6
    shard.write_bytes(data)
    with pytest.raises(UserError, match="is truncated or damaged at byte 1024"):
        index_shard(shard)


def test_a_compressed_shard_and_a_text_file_are_no_tars(tmp_path: Path):
    with tarfile.open(tmp_path / "zip.tar", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("a.txt"))
    (tmp_path / "text.tar").write_text("hello " * 1000)
    (tmp_path / "nothing.tar").write_bytes(b"")
    for name in ("zip.tar", "text.tar", "nothing.tar"):
        with pytest.raises(UserError, match=f"{name}: is no uncompressed tar"):
            index_shard(tmp_path / name)


def test_an_empty_shard_and_a_missing_shard_are_errors(tmp_path: Path):
    tarfile.open(tmp_path / "empty.tar", "w").close()
    with pytest.raises(UserError, match=r"empty\.tar: holds no samples"):
        index_shard(tmp_path / "empty.tar")
    with pytest.raises(UserError, match=r"gone\.tar: cannot be read"):
        index_shard(tmp_path / "gone.tar")


@pytest.mark.parametrize("keys", [["a", "b", "a"], ["a", "a"]])
def test_a_key_that_occurs_twice_is_named(tmp_path: Path, keys: list[str]):
    path = write_shards(tmp_path, [sample(key) for key in keys])[0]
    with pytest.raises(UserError, match="key a occurs twice"):
        index_shard(path)


def test_the_index_is_used_again_and_equals_the_scan(shard: Path, monkeypatch: pytest.MonkeyPatch):
    scanned = index_shard(shard)
    assert index_path(shard).exists()
    monkeypatch.setattr(shards, "_scan", lambda path: pytest.fail("scanned again"))
    loaded = index_shard(shard)
    assert loaded.keys.tolist() == scanned.keys.tolist()
    for kind in scanned.offsets:
        np.testing.assert_array_equal(loaded.offsets[kind], scanned.offsets[kind])
        np.testing.assert_array_equal(loaded.sizes[kind], scanned.sizes[kind])


def test_a_changed_shard_is_scanned_again(tmp_path: Path, shard: Path):
    index_shard(shard)
    before = shard.stat()
    shard.unlink()
    write_shards(tmp_path, [sample("x"), sample("y"), sample("z")])  # of the same size
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert shard.stat().st_size == before.st_size
    assert index_shard(shard).key(0) == "x"


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 not a zip", b"\x93NUMPY"])
def test_a_damaged_index_is_written_anew(shard: Path, damage: bytes):
    index_path(shard).write_bytes(damage)
    assert index_shard(shard).key(1) == "b"
    assert index_path(shard).read_bytes() != damage


def test_without_a_place_for_the_index_it_stays_in_memory(
    shard: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(shards, "_save_table", refuse)
    assert index_shard(shard).key(2) == "c"
    assert "Read-only file system" in caplog.text


def test_a_shard_that_shrinks_after_indexing_is_an_error(shard: Path):
    index = ShardIndex([shard])
    os.truncate(shard, 2048)
    with pytest.raises(UserError, match="ends inside key c"):
        index.read(2, "txt")


@pytest.mark.parametrize("max_open_files", [0, 2])
def test_more_shards_than_open_files_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_open_files: int):
    monkeypatch.setattr(shards, "_MAX_OPEN_FILES", max_open_files)
    index = ShardIndex(write_shards(tmp_path, [sample(f"k{i}") for i in range(9)], samples_per_shard=1))
    before = len(os.listdir("/proc/self/fd"))
    assert [index.read(i % 9, "txt") for i in range(18)] == [f"text of k{i % 9}".encode() for i in range(18)]
    assert len(os.listdir("/proc/self/fd")) <= before + max_open_files
