"""Indexes of shards: contents, faults, and when a shard is scanned again."""

import io
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_het.data_pipelines.shards import index, scan, seals, storage
from lit_het.data_pipelines.shards.index import ShardIndex, index_path, index_shard
from lit_het.data_pipelines.shards.tables import Fault, ShardTable, from_bytes, to_bytes
from lit_het.data_pipelines.shards.writing import IMAGE, write_shards, write_tar
from lit_het.untrusted import Malformed
from tests.data_pipelines.conftest import cause_of, sample
from tests.data_pipelines.prepare.conftest import make_tar
from tests.refusals import assert_refused


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "data", [sample("a"), sample("b"), sample("c")])[0]


def keys(table: ShardTable) -> list[str]:
    return [key.decode() for key in table.keys]


def only_fault(path: Path) -> Fault:
    (fault,) = index_shard(path).faults
    return fault


@pytest.fixture
def forbid_scans(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """After it is called, no shard may be scanned again."""
    return lambda: monkeypatch.setattr(index, "scan", lambda address: pytest.fail("scanned again"))


def test_samples_are_read_back_in_any_order(tmp_path: Path):
    written = write_shards(tmp_path, [sample(f"k{i}") for i in range(7)], samples_per_shard=3)
    assert [path.name for path in written] == [f"shard-00000{i}.tar" for i in range(3)]
    found = ShardIndex(written, [IMAGE, "txt", "cls"])
    assert len(found) == 7
    order = (6, 0, 3, 2)
    read = found.read(order, ["cls", "txt", IMAGE])
    assert read == [[b"7", f"text of k{i}".encode(), f"pixels of k{i}".encode()] for i in order]
    assert [found.key(i) for i in order] == [f"k{i}" for i in order]
    assert [found.shard(i) for i in order] == [str(written[i // 3]) for i in order]


def test_samples_group_by_the_path_up_to_the_first_dot_of_the_base_name(tmp_path: Path):
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as tar:
        for name in ("v1.0/a.JPG", "v1.0/a.seg.png", "v1.0/a.txt", "v1.0/.hidden", "README", "v2/a.webp"):
            tar.addfile(tarfile.TarInfo(name))
    table = index_shard(path)
    assert keys(table) == ["v1.0/a", "v2/a"]
    assert {kind for kind, offsets in table.offsets.items() if offsets[0] >= 0} == {"jpg", "seg.png", "txt", IMAGE}
    assert table.offsets[IMAGE].tolist() == [table.offsets["jpg"][0], table.offsets["webp"][1]]


def test_samples_without_a_member_are_left_out_and_counted(tmp_path: Path):
    path = write_shards(tmp_path, [sample("a"), sample("b", jpg=b"x"), sample("c"), sample("d", txt="x", gif=b"")])[0]
    (of_shard,) = ShardIndex([path], [IMAGE, "txt"]).summaries
    assert of_shard.count == 2
    no_image, no_text = of_shard.faults
    assert (no_text.cause, no_text.count) == ("no .txt", 1)
    assert no_text.example.endswith("shard-000000.tar: key b has no .txt; add the member or remove the sample")
    assert "key d has no .jpg/jpeg/png/webp; rename d.gif to d.jpg" in no_image.example
    found = ShardIndex([path], [IMAGE, "txt"])
    assert [found.key(i) for i in range(2)] == ["a", "c"]
    assert found.read([1], ["txt"]) == [[b"text of c"]]
    assert len(ShardIndex([path], ["txt"])) == 3


@pytest.mark.parametrize(("num_bytes", "whole"), [(1100, 0), (2048, 0), (2600, 1), (3 * 1024 + 700, 1)])
def test_a_truncated_tar_keeps_its_whole_samples(shard: Path, num_bytes: int, whole: int):
    os.truncate(shard, num_bytes)
    fault = only_fault(shard)
    assert (fault.cause, fault.count) == ("truncated or damaged shard", 1)
    assert f"{shard}: is truncated or damaged at byte" in fault.example
    assert f"of {num_bytes}; fetch or write the shard again" in fault.example
    assert len(ShardIndex([shard], [IMAGE, "txt", "cls"])) == whole


def test_a_cut_between_members_and_a_damaged_header_are_not_mistaken_for_the_end(shard: Path):
    data = shard.read_bytes()
    os.truncate(shard, 3 * 1024)
    assert "is truncated or damaged at byte 3072 of 3072" in only_fault(shard).example
    shard.write_bytes(data[:1024] + b"\xff" * 6 + data[1030:])
    assert "is truncated or damaged at byte 1024" in only_fault(shard).example


def test_a_header_that_points_backwards_does_not_hang_the_scan(shard: Path):
    data = bytearray(shard.read_bytes())
    data[124:136] = b"\xff" * 8 + (-1024 & 0xFFFFFFFF).to_bytes(4, "big")  # base 256, minus 1024 bytes
    data[148:156] = b" " * 8
    data[148:155] = f"{sum(data[:512]):06o}\0".encode()
    shard.write_bytes(data)
    assert only_fault(shard).cause in ("truncated or damaged shard", "not an uncompressed tar")


def test_a_compressed_shard_and_a_text_file_are_not_tars(tmp_path: Path):
    with tarfile.open(tmp_path / "zip.tar", "w:gz") as tar:
        tar.addfile(tarfile.TarInfo("a.txt"))
    (tmp_path / "text.tar").write_text("hello " * 1000)
    (tmp_path / "nothing.tar").write_bytes(b"")
    for name in ("zip.tar", "text.tar", "nothing.tar"):
        assert f"{name}: is not an uncompressed tar" in only_fault(tmp_path / name).example
        assert len(ShardIndex([tmp_path / name], [IMAGE])) == 0


def test_an_empty_shard_is_counted_and_a_missing_shard_an_error(tmp_path: Path):
    tarfile.open(tmp_path / "empty.tar", "w").close()
    assert "empty.tar: holds no samples" in only_fault(tmp_path / "empty.tar").example
    assert_refused(r"gone\.tar: cannot be read", index_shard, tmp_path / "gone.tar")


@pytest.mark.parametrize("again", [["a", "b", "a"], ["a", "a", "b"]])
def test_a_key_that_occurs_twice_is_taken_once(tmp_path: Path, again: list[str]):
    path = write_shards(tmp_path, [sample(key) for key in again])[0]
    assert only_fault(path).cause == "repeated key"
    assert f"{path}: key a" in only_fault(path).example
    assert keys(index_shard(path)) == ["a", "b"]


def test_members_apart_and_names_with_dots_are_told_from_other_defects(tmp_path: Path):
    members = [(f"{key}.{kind}", b"x") for kind in ("jpg", "txt") for key in "ab"]
    (tmp_path / "apart.tar").write_bytes(make_tar(dict(members)))
    fault = only_fault(tmp_path / "apart.tar")
    assert (fault.cause, fault.count) == (scan.APART, 2)
    assert (
        "key a: its .txt does not follow its other members; write the shard again with tar --sort=name" in fault.example
    )
    (tmp_path / "dots.tar").write_bytes(make_tar({f"IMG.{number:03}.jpg": b"x" for number in range(80)}))
    too_many, no_image = ShardIndex([tmp_path / "dots.tar"], [IMAGE]).summaries[0].faults
    assert "rename the files without further dots" in too_many.example
    assert "first dot of a name, so IMG.000.jpg is another kind of member; rename it" in no_image.example


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE])
def test_links_and_special_files_among_members_are_named(tmp_path: Path, kind: bytes):
    link = tarfile.TarInfo("b.jpg")
    link.type, link.linkname = kind, "a.jpg"
    files = make_tar({"b.txt": b"x", "a.jpg": b"x", "a.txt": b"x"})
    (tmp_path / "x.tar").write_bytes(link.tobuf() + files)
    found = ShardIndex([tmp_path / "x.tar"], [IMAGE, "txt"])
    (fault,) = found.summaries[0].faults
    assert (len(found), fault.count) == (1, 1)
    assert "key b has no .jpg/jpeg/png/webp; it is a link or no plain file; write the shard again with tar --deref" in (
        fault.example
    )
    (tmp_path / "only.tar").write_bytes(link.tobuf() + bytes(1024))
    assert ShardIndex([tmp_path / "only.tar"], [IMAGE]).summaries[0].faults[0].count == 1


def test_members_of_hidden_folders_are_no_samples(tmp_path: Path):
    names = ["./a.jpg", "b/c.jpg", ".ipynb_checkpoints/a-checkpoint.jpg", "__MACOSX/b/._c.jpg", "./@eaDir/a.jpg"]
    (tmp_path / "x.tar").write_bytes(make_tar(dict.fromkeys(names, b"x")))
    assert keys(index_shard(tmp_path / "x.tar")) == ["./a", "b/c"]


@pytest.mark.slow
@settings(max_examples=150, deadline=1000)
@given(start=st.integers(0, 3000), junk=st.binary(min_size=1, max_size=600), size=st.integers(0, 12_000))
def test_no_damage_makes_the_scan_fail_or_hang(
    tmp_path_factory: pytest.TempPathFactory, start: int, junk: bytes, size: int
):
    folder = tmp_path_factory.mktemp("fuzz")
    path = write_shards(folder, [sample(f"k{i}") for i in range(3)])[0]
    data = bytearray(path.read_bytes())
    data[start : start + len(junk)] = junk
    path.write_bytes(data[:size])
    table = index_shard(path)
    assert len(table.keys) <= 3 or table.faults
    found = ShardIndex([path], optional=list(table.offsets))
    for row in range(len(found)):
        kinds = [kind for kind in table.offsets if found.span(row, kind)]
        assert all(isinstance(content, bytes) for content in found.read([row], kinds)[0])


def test_the_index_is_reused_and_equals_the_scan(shard: Path, forbid_scans: Callable[[], None]):
    scanned = index_shard(shard)
    assert Path(index_path(shard)).exists()
    forbid_scans()
    loaded = index_shard(shard)
    assert (loaded.keys.tolist(), loaded.faults) == (scanned.keys.tolist(), scanned.faults)
    for kind in scanned.offsets:
        np.testing.assert_array_equal(loaded.offsets[kind], scanned.offsets[kind])
        np.testing.assert_array_equal(loaded.sizes[kind], scanned.sizes[kind])


def test_a_changed_shard_is_scanned_again_and_has_another_digest(shard: Path):
    before, digest = shard.stat(), ShardIndex([shard]).digest
    shard.unlink()
    write_shards(shard.parent, [sample("xx"), sample("y"), sample("z")])  # of the same size
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert shard.stat().st_size == before.st_size
    assert keys(index_shard(shard))[0] == "xx"
    assert ShardIndex([shard]).digest != digest


@pytest.mark.parametrize("damage", [b"", b"PK\x03\x04 not a zip", b"\x93NUMPY"])
def test_a_damaged_index_is_rewritten(shard: Path, damage: bytes):
    Path(index_path(shard)).write_bytes(damage)
    assert keys(index_shard(shard))[1] == "b"
    assert Path(index_path(shard)).read_bytes() != damage


def test_the_index_goes_into_the_cache_if_the_folder_is_not_writable_and_else_is_reported(
    shard: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, forbid_scans
):
    write, read_only = storage.write, [index_path(shard), cache]

    def refuse(address: str, content: bytes) -> None:
        if any(address.startswith(str(place)) for place in read_only):
            raise OSError(30, "Read-only file system")
        write(address, content)

    monkeypatch.setattr(storage, "write", refuse)
    assert keys(index_shard(shard))[2] == "c"
    assert "its index cannot be saved (Read-only file system); the next run scans again" in caplog.text
    assert not list(cache.rglob("*.npz"))
    read_only.pop()
    assert keys(index_shard(shard))[2] == "c"
    assert len(list(cache.rglob("*.npz"))) == 1
    forbid_scans()
    assert keys(index_shard(shard))[2] == "c"


def test_a_shard_that_shrinks_after_indexing_cannot_be_read(shard: Path):
    found = ShardIndex([shard], ["txt"])
    assert found.read([2], ["txt"]) == [[b"text of c"]]
    os.truncate(shard, 2048)
    assert cause_of(*found.read([2], ["txt"])[0]) == "shard is shorter than its index says"


def test_a_shard_that_is_replaced_during_a_run_stops_it(shard: Path):
    found = ShardIndex([shard])
    os.truncate(shard, 4 * 1024)
    assert_refused(r"shard-000000.tar: changed while it was in use; start again", found.read, [0], ["txt"])


@pytest.mark.parametrize("max_open_files", [0, 2])
def test_more_shards_than_open_files_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_open_files: int):
    monkeypatch.setattr(storage, "_MAX_OPEN_FILES", max_open_files)
    found = ShardIndex(write_shards(tmp_path, [sample(f"k{i}") for i in range(9)], samples_per_shard=1), ["txt"])
    before = len(os.listdir("/proc/self/fd"))
    assert [found.read([i % 9], ["txt"])[0] for i in range(18)] == [[f"text of k{i % 9}".encode()] for i in range(18)]
    assert len(os.listdir("/proc/self/fd")) <= before + max_open_files


def test_tables_that_do_not_fit_into_memory_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    written = write_shards(tmp_path, [sample(f"k{i}") for i in range(9)], samples_per_shard=2)
    for max_tables in (1, 16):
        monkeypatch.setattr(index, "_MAX_TABLES", max_tables)
        found = ShardIndex(written)
        assert [found.key(i % 9) for i in range(18)] == [f"k{i % 9}" for i in range(18)]


def test_a_key_that_is_too_long_is_left_out_and_counted(tmp_path: Path):
    write_tar(tmp_path / "s.tar", [sample("short"), sample("k" * 5000), sample("other")])
    table = index_shard(tmp_path / "s.tar")
    assert keys(table) == ["short", "other"]
    assert [(fault.cause, fault.count) for fault in table.faults] == [("key too long", 3)]  # members


def test_samples_and_kinds_of_members_beyond_limits_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(scan, "MAX_SAMPLES", 2)
    monkeypatch.setattr(scan, "MAX_KINDS", 3)
    samples = [sample("a"), sample("b", txt="b", json="{}", jpg=b""), sample("c", txt="c"), sample("d", txt="d")]
    path = write_shards(tmp_path, samples)[0]
    table, fault = index_shard(path), only_fault(path)
    assert keys(table) == ["a", "b"]
    assert sorted(table.offsets) == ["cls", IMAGE, "jpg", "txt"]
    assert (fault.cause, fault.count) == ("too many samples or kinds of members", 3)
    assert "key b: at most 2 samples with 3 kinds of members are read; split the shard" in fault.example


def test_a_member_that_is_too_large_is_not_requested(shard: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(index, "MAX_MEMBER_BYTES", len("text of a"))
    ((text, pixels),) = ShardIndex([shard], ["txt", IMAGE]).read([1], ["txt", IMAGE])
    assert (text, cause_of(pixels)) == (b"text of b", "member too large")


def seal_by_another(shard: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, table: ShardTable) -> Path:
    """Writes an index beside a shard with another user's key."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache / "of another"))
    place = Path(index_path(shard))
    place.write_bytes(seals.sealed(to_bytes(table, storage.stamp(str(shard)))))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return place


def test_a_well_formed_forgery_that_came_with_the_shards_is_not_trusted(
    shard: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, forbid_scans
):
    table = scan.scan(str(shard))
    table.offsets["txt"][:] = table.offsets["txt"][::-1].copy()  # captions are those of other samples
    place = seal_by_another(shard, cache, monkeypatch, table)
    theirs = place.read_bytes()
    assert ShardIndex([shard], ["txt"]).read([0], ["txt"]) == [[b"text of a"]]
    assert "has indexes of other users, which are not trusted" in caplog.text
    assert place.read_bytes() == theirs  # which others may use
    forbid_scans()
    assert ShardIndex([shard], ["txt"]).read([0], ["txt"]) == [[b"text of a"]]


@pytest.mark.parametrize("place", [0, 100, -1, -33, -41])
def test_an_index_with_one_changed_byte_is_rebuilt(shard: Path, place: int):
    index_shard(shard)
    content = Path(index_path(shard)).read_bytes()
    Path(index_path(shard)).write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place:][1:])
    assert ShardIndex([shard], ["txt"]).read([0], ["txt"]) == [[b"text of a"]]


def test_hosts_with_the_same_secret_trust_each_others_indexes(
    shard: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, forbid_scans: Callable[[], None]
):
    monkeypatch.setenv(seals.KEY_VARIABLE, "a secret of the whole team")
    seal_by_another(shard, cache, monkeypatch, scan.scan(str(shard)))
    forbid_scans()
    assert keys(index_shard(shard)) == ["a", "b", "c"]


def test_without_a_valid_secret_or_key_no_index_is_saved(
    shard: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    (cache / "lit-het" / "keys").mkdir(parents=True)
    (cache / "lit-het" / "keys" / "index").write_text("short")
    assert keys(index_shard(shard))[0] == "a"
    assert "index is not a key of this user; remove it" in caplog.text
    monkeypatch.setenv(seals.KEY_VARIABLE, "short")
    assert keys(index_shard(shard))[0] == "a"
    assert "LIT_HET_INDEX_KEY has fewer than 16 characters" in caplog.text
    assert not Path(index_path(shard)).exists()


def test_only_its_owner_may_read_the_key(shard: Path, cache: Path):
    index_shard(shard)
    assert (cache / "lit-het" / "keys" / "index").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("keys", np.array(["a", "b", "c"])),
        ("keys", np.array([b"a", b"b"])),
        ("offsets", np.array([[-3, 0, 0]])),
        ("offsets", np.array([[10**6, 0, 0]])),
        ("offsets", np.array([[0.0, 1.0, 2.0]])),
        ("sizes", np.array([[-1, 0, 0]])),
        ("sizes", np.array([[2**62, 0, 0]])),
        ("kinds", np.array(["txt", "jpg"])),
        ("faults", np.array("[" * 10_000)),
        ("faults", np.array('[["cause", "1", "example"]]')),
        ("faults", np.array("[1]")),
        ("faults", np.array("1")),
    ],
)
def test_a_sealed_table_that_does_not_match_its_shard_is_malformed(name: str, value: np.ndarray):
    offsets, sizes = {"txt": np.array([-1, 0, 3])}, {"txt": np.array([0, 1, 2])}
    table = ShardTable("a.tar", np.array([b"a", b"b", b"c"]), offsets, sizes, "1d9e")
    content = to_bytes(table, "10240 1")
    assert from_bytes(content, "a.tar", "10240 1") is not None
    assert from_bytes(content, "a.tar", "10240 2") is None
    changed = io.BytesIO()
    np.savez(changed, **{**np.load(io.BytesIO(content)), name: value})
    with pytest.raises(Malformed):
        from_bytes(changed.getvalue(), "a.tar", "10240 1")
