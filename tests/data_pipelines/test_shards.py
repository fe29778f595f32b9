"""Shards are written atomically, and found by every kind of pattern."""

import tarfile
from pathlib import Path
from typing import Any

import fsspec
import pytest

from lit_het.data_pipelines.shards import urls
from lit_het.data_pipelines.shards.writing import MAX_DEPTH_OF_LISTS, expand, write_shards
from lit_het.errors import UserError
from tests.data_pipelines.conftest import sample
from tests.refusals import assert_refused


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    return write_shards(tmp_path, [sample("a"), sample("b"), sample("c")])[0]


@pytest.fixture
def written(tmp_path: Path) -> list[str]:
    """Three shards."""
    return [str(path) for path in write_shards(tmp_path, [sample(f"k{i}") for i in range(3)], samples_per_shard=1)]


def test_equal_samples_give_equal_bytes(tmp_path: Path):
    one, other = (write_shards(tmp_path / name, [sample("a"), sample("b")])[0] for name in ("one", "other"))
    assert one.read_bytes() == other.read_bytes()


def test_bytes_are_written_as_they_are(tmp_path: Path):
    members = {"jpg": b"pixels", "txt.gz": b"compressed already", "txt": b"\xff"}
    (shard,) = write_shards(tmp_path, [sample("a", **members)])
    with tarfile.open(shard) as tar:
        found: Any = {name.partition(".")[2]: tar.extractfile(name) for name in tar.getnames()}
        assert {kind: content.read() for kind, content in found.items()} == members


def test_an_interrupted_writer_leaves_no_shard(tmp_path: Path):
    def samples():
        yield from (sample(f"k{i}") for i in range(5))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shards(tmp_path, samples(), samples_per_shard=2)
    assert list(tmp_path.iterdir()) == []


def test_a_second_writer_does_not_mix_its_shards_with_the_first_ones(tmp_path: Path, shard: Path):
    assert_refused(r"holds shard-.*remove them or choose another folder", write_shards, tmp_path, [sample("a")])
    write_shards(tmp_path, [sample("a")], name="other")


@pytest.mark.parametrize("key", ["a.b", "", "folder/x.y"])
def test_a_key_that_would_be_read_back_differently_is_refused(tmp_path: Path, key: str):
    assert_refused("must not be empty or contain a dot", write_shards, tmp_path, [sample(key)])
    assert list(tmp_path.iterdir()) == []


def test_patterns_expand_to_sorted_unique_addresses(tmp_path: Path, written: list[str]):
    assert expand(tmp_path) == written
    assert expand(f"{tmp_path}/shard-{{000000..000002}}.tar") == written
    assert expand([f"{tmp_path}/*1.tar", f"{tmp_path}/shard-00000[01].tar"]) == written[:2]
    assert expand(written[2]) == written[2:]
    listed = tmp_path / "shards.txt"
    listed.write_text(f"{written[2]}\n{tmp_path}/shard-00000{{0,2}}.tar\n")
    assert expand(listed) == [written[0], written[2]]


def test_addresses_of_a_store_expand_too(tmp_path: Path):
    store = fsspec.filesystem("memory")
    for number in range(3):
        store.pipe_file(f"/expand/{number}.tar", b"")
    addresses = [f"memory:///expand/{number}.tar" for number in range(3)]
    assert expand("memory:///expand/{0..1}.tar") == addresses[:2]
    assert expand(["memory:///expand/*.tar"]) == addresses
    assert expand("memory:///expand") == addresses
    assert_refused("memory:///nothing: no tar file matches", expand, "memory:///nothing")
    assert_refused(r"nostore://x/\*.tar: Protocol not known", expand, "nostore://x/*.tar")


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_hidden_files_are_no_shards_and_other_archives_are_named_once(
    tmp_path: Path, written: list[str], scheme: str, caplog: pytest.LogCaptureFixture
):
    for name in ("._0.tar", ".x/0.tar", "__MACOSX/0.tar", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    expected = [f"{scheme}{address}" for address in written]
    assert expand(f"{scheme}{tmp_path}") == expand(f"{scheme}{tmp_path}/*.tar") == expected
    assert not caplog.records
    for name in ("1.tar.gz", "2.TAR", "3.tgz", *([] if scheme else ["sub/4.tar"])):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    assert expand(f"{scheme}{tmp_path}") == expand(f"{scheme}{tmp_path}/") == expected
    (message,) = caplog.messages
    assert f"{tmp_path}: only its files *.tar are read, not {3 if scheme else 4} other archives, such as" in message
    assert "/1.tar.gz; unpack, rename or list them" in message


@pytest.mark.parametrize("pattern", ["no-such-*.tar", "shard-{000000..000009}.tar", "missing.tar"])
def test_a_pattern_that_matches_nothing_is_named(tmp_path: Path, shard: Path, pattern: str):
    assert_refused(r"(no-such-\*|shard-000001|missing)\.tar: no tar file matches", expand, f"{tmp_path}/{pattern}")


@pytest.mark.parametrize("remote", [False, True])
def test_lists_may_lie_anywhere_and_have_blank_lines_and_comments(tmp_path: Path, written: list[str], remote: bool):
    (tmp_path / "more.txt").write_text(f"{written[2]}\n")
    listed = tmp_path / "list.txt"
    listed.write_text(f"# the first two\n\n{tmp_path}/shard-00000{{0,1}}.tar\n  # more\n{tmp_path}/more.txt\n\n")
    assert expand(f"file://{listed}" if remote else listed) == written
    assert expand(f"{'file://' * remote}{tmp_path}/{{list,more}}.txt") == written


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_list_that_is_missing_and_an_entry_that_matches_nothing_are_named(tmp_path: Path, scheme: str):
    for content, message in (
        ("# first\n\nmissing-*.tar\n", r"list\.txt:3: missing-\*\.tar: no tar file matches"),
        ("\n# none\n", r"list\.txt: the list names no shards; write"),
        ("x{1.tar\n", r"list\.txt:1: x\{1\.tar: "),
    ):
        (tmp_path / "list.txt").write_text(content)
        assert_refused(message, expand, f"{scheme}{tmp_path}/list.txt")
    assert_refused(r"none\.txt: cannot be read \(.*\); check the path", expand, f"{scheme}{tmp_path}/none.txt")


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_list_may_contain_commands_only_if_they_are_allowed(tmp_path: Path, scheme: str):
    (tmp_path / "inner.txt").write_text("pipe:touch mark\n")
    (tmp_path / "outer.txt").write_text(f"# more\n{tmp_path}/inner.txt\n")
    for name, line in (("inner", 1), ("outer", 2)):
        message = rf"{name}\.txt:{line}: .*'pipe:touch mark' is a shell command.*--allow-commands"
        assert_refused(message, expand, f"{scheme}{tmp_path}/{name}.txt")
        assert expand(f"{scheme}{tmp_path}/{name}.txt", allow_commands=True) == ["pipe:touch mark"]


@pytest.mark.parametrize("pattern", [".", "*.tar", "{pipe:a,pipe:b}.tar", "./pipe:{a,b}.tar"])
def test_files_whose_names_look_like_commands_are_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        Path(f"pipe:{name}.tar").write_bytes(b"")
    found = expand(pattern)
    assert [Path(address).name for address in found] == ["pipe:a.tar", "pipe:b.tar"]
    assert not any(map(urls.is_pipe, found))


def test_a_list_that_contains_itself_is_refused(tmp_path: Path):
    (tmp_path / "list.txt").write_text(f"{tmp_path}/list.txt\n")
    assert_refused(rf"lists are nested more than {MAX_DEPTH_OF_LISTS} deep", expand, tmp_path / "list.txt")


@pytest.mark.parametrize("pattern", ["x-{1..99999999999}.tar", "x-{-5..2000000}.tar", "{a,b}" * 40, "{1..999}" * 9])
def test_braces_with_too_many_alternatives_are_refused_before_they_exhaust_the_memory(pattern: str):
    assert_refused("has more than 8 braces, or they expand to more than 262,144 addresses", expand, pattern)


@pytest.mark.parametrize("pattern", ["x" * 5000, "x\0y", "{" * 5000 + "a,b" + "}" * 5000])
def test_patterns_that_are_not_file_names_are_one_line_errors(pattern: str):
    with pytest.raises(UserError):
        expand(pattern)
