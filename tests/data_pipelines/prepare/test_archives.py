import gzip
import io
import os
import stat
import tarfile
import zipfile
from concurrent.futures import ThreadPoolExecutor

import pytest

from lit_het.data_pipelines.prepare import archives
from lit_het.errors import UserError
from tests.data_pipelines.prepare.conftest import make_tar, make_zip, unpack
from tests.refusals import assert_refused

CONTENTS = {"a/1.txt": b"one", "a/2.txt": b"two" * 1000, "b.txt": b""}


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_a_tar_equals_the_folder_it_was_packed_from(tmp_path, mode):
    unpack(CONTENTS, tmp_path)
    (tmp_path / "x.tar").write_bytes(make_tar({f"./{name}": content for name, content in CONTENTS.items()}, mode))
    tar = archives.open_files(tmp_path / "x.tar", tmp_path)
    (tmp_path / "x.tar").rename(tmp_path / ".hidden")  # neither a hidden file nor where it lies matters
    folder = archives.open_files(tmp_path, tmp_path)
    assert list(tar.sizes.items()) == list(folder.sizes.items())
    assert {name: tar.read(name) for name in tar.sizes} == {name: folder.read(name) for name in CONTENTS} == CONTENTS
    for files in (tar, folder):
        assert {name: bytes(files.map(name)) for name in files.sizes} == CONTENTS
    assert folder.folders == {"a"}
    assert folder.where("b.txt") == f"{tmp_path}/b.txt"
    assert tar.where("b.txt") == f"{tmp_path}/x.tar: b.txt"


def test_tars_in_a_tar_stand_for_folders(tmp_path):
    inner = {name: make_tar({"1.txt": name.encode(), "._1.txt": b"left by a Mac"}) for name in ("a.tar", "b.tar")}
    (tmp_path / "x.tar").write_bytes(make_tar(inner))
    files = archives.TarFiles(tmp_path / "x.tar", tmp_path, nested=True)
    assert {name: files.read(name) for name in files.sizes} == {"a/1.txt": b"a.tar", "b/1.txt": b"b.tar"}
    assert list(archives.TarFiles(tmp_path / "x.tar", tmp_path).sizes) == ["a.tar", "b.tar"]


@pytest.mark.parametrize("cut", [100, 600, 1500, 5000, 9800])
def test_a_truncated_archive_is_named_wherever_it_ends(tmp_path, cut):
    path = tmp_path / "x.tar"
    inner = make_tar({"1.bin": os.urandom(3000), "2.bin": os.urandom(2000)})
    whole = make_tar({"a.tar": inner})[: 512 + len(inner) + 512]
    assert len(inner) > 9800
    path.write_bytes(whole[:cut])
    message = r"x\.tar: is (truncated or damaged at byte \d+|not a tar archive).*download it"
    assert_refused(message, archives.TarFiles, path, tmp_path, nested=True)
    path.write_bytes(gzip.compress(whole)[: min(cut, 5000)])
    assert_refused(
        r"x\.tar: is truncated or damaged.*download it again", archives.TarFiles, path, tmp_path, nested=True
    )
    assert list(tmp_path.iterdir()) == [path]


def test_a_truncated_inner_tar_is_found_in_a_complete_outer_tar(tmp_path):
    inner = make_tar({"1.bin": bytes(3000), "2.bin": bytes(3000)})
    for cut in (2048, 512 + 3072, 512 + 3072 + 512 + 1024):
        (tmp_path / "x.tar").write_bytes(make_tar({"a.tar": inner[:cut], "b.tar": inner}))
        assert_refused(r"x\.tar: is truncated or damaged", archives.TarFiles, tmp_path / "x.tar", tmp_path, nested=True)


def test_a_name_that_an_archive_holds_twice_is_refused(tmp_path):
    twice = make_tar({"a": b"1"})[:1024] + make_tar({"a": b"2"})
    (tmp_path / "x.tar").write_bytes(twice)
    assert_refused("holds a twice", archives.TarFiles, tmp_path / "x.tar", tmp_path)
    long = make_tar({"a/" * 15_000 + "b": b"1"})
    (tmp_path / "x.tar").write_bytes(long[: -(-len(long.rstrip(b"\0")) // 512) * 512] + long)
    with pytest.raises(UserError, match="twice") as error:
        archives.TarFiles(tmp_path / "x.tar", tmp_path)
    assert len(str(error.value)) < 1000


def test_a_missing_or_invalid_archive_is_a_one_line_error(tmp_path):
    message = r"none\.tar: cannot be read \(No such file or directory\)"
    assert_refused(message, archives.open_files, tmp_path / "none.tar", tmp_path)
    (tmp_path / "x.tar").write_bytes(b"<html>not found</html>" * 100)
    assert_refused("is not a tar archive", archives.open_files, tmp_path / "x.tar", tmp_path)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    assert_refused("dangling: cannot be read", archives.FolderFiles, tmp_path)


def test_links_to_folders_are_followed(tmp_path):
    unpack({"classes/cat/1.jpg": b"x"}, tmp_path)
    (tmp_path / "subset").mkdir()
    (tmp_path / "subset" / "cat").symlink_to(tmp_path / "classes" / "cat")
    assert list(archives.FolderFiles(tmp_path / "subset").sizes) == ["cat/1.jpg"]


def test_an_unpublished_archive_is_warned_about(tmp_path, caplog):
    (tmp_path / "x").write_bytes(b"x")
    archives.warn_unless_published(tmp_path / "x", "9dd4e461268c8034f5c8564e155c67a6")
    assert not caplog.records
    archives.warn_unless_published(tmp_path / "x", "0" * 32)
    assert "x: is not the published archive (MD5 9dd4e461" in caplog.messages[0]


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_zip_equals_the_folder_it_was_packed_from(tmp_path, compression):
    members = {"a/": b"", **CONTENTS, "__MACOSX/._b.txt": b"left by a Mac"}
    (tmp_path / "x.zip").write_bytes(make_zip(members, compression))
    files = archives.open_files(tmp_path / "x.zip", tmp_path)
    assert files.sizes == {name: len(content) for name, content in CONTENTS.items()}
    assert files.folders == {"a"}
    assert files.where("b.txt") == f"{tmp_path}/x.zip: b.txt"
    with ThreadPoolExecutor(8) as pool:
        read = pool.map(files.read, [*CONTENTS] * 200)
        assert [*read] == [*CONTENTS.values()] * 200


def test_a_damaged_zip_is_named_when_it_is_opened_or_read(tmp_path, monkeypatch):
    path, content = tmp_path / "x.zip", os.urandom(5000)
    whole = make_zip({"a.bin": content})
    path.write_bytes(whole[:3000])
    assert_refused(r"x\.zip: is truncated or damaged .*download it again", archives.open_files, path, tmp_path)
    place = whole.index(content[:100])
    path.write_bytes(whole[:place] + b"\0" * 100 + whole[place + 100 :])
    assert_refused(
        r"x\.zip: is truncated or damaged \(Bad CRC-32.*download it again", archives.ZipFiles(path).read, "a.bin"
    )
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", b"1")
        archive.writestr("./a", b"2")
    assert_refused("holds a twice", archives.ZipFiles, path)
    monkeypatch.setattr(archives, "MAX_MEMBER_BYTES", 4999)
    path.write_bytes(whole)
    assert_refused(r"a\.bin unpacks to 5,000 bytes", archives.ZipFiles, path)


def test_a_file_without_a_name_in_a_zip_is_no_error(tmp_path):
    (tmp_path / "x.zip").write_bytes(make_zip({"a": b"1"}).replace(b"a", b"\0"))  # names end at a zero
    assert archives.ZipFiles(tmp_path / "x.zip").sizes == {"": 1}


def test_a_file_that_unpacks_to_more_than_its_zip_declares_is_refused(tmp_path):
    declared, zeros = 1000, 2**22
    whole = make_zip({"a.bin": bytes(zeros)})
    forged = whole.replace(zeros.to_bytes(4, "little"), declared.to_bytes(4, "little"))
    assert forged != whole
    (tmp_path / "x.zip").write_bytes(forged)
    assert_refused(r"x\.zip: is truncated or damaged", archives.ZipFiles(tmp_path / "x.zip").read, "a.bin")


def test_a_published_archive_is_found_packed_unpacked_or_in_its_folder(tmp_path, caplog):
    members = {"dtd/labels/a.txt": b"1", "dtd/b.txt": b"2"}
    packed = unpack({"dtd.tar": make_tar(members)}, tmp_path / "packed")
    unpacked = unpack(members, tmp_path / "unpacked")
    for source in (packed, packed / "dtd.tar", unpacked, unpacked / "dtd"):
        files = archives.open_published(source, tmp_path, "dtd.tar", "0" * 32, "dtd")
        assert files.read(archives.root_of(files, "labels/a.txt", "dtd.tar") + "b.txt") == b"2"
    assert len([message for message in caplog.messages if "is not the published archive" in message]) == 2
    files = archives.open_published(packed, tmp_path, "other.tar", "", "other")
    message = r"packed: holds no c\.txt; give other\.tar, or the folder unpacked from it"
    assert_refused(message, archives.root_of, files, "c.txt", "other.tar")


@pytest.mark.parametrize("kind", ["folder", "tar", "zip"])
def test_what_desktops_leave_is_ignored_in_folders_and_archives(tmp_path, kind):
    left = [".DS_Store", "cat/.a.jpg", ".ipynb_checkpoints/1.jpg", "__MACOSX/cat/._1.jpg", "@eaDir/cat/1.jpg"]
    contents = {"cat/1.jpg": b"cat", **dict.fromkeys(left, b"x")}
    source = tmp_path / "source"
    if kind == "folder":
        unpack(contents, source)
    else:
        source.write_bytes(make_tar(contents) if kind == "tar" else make_zip({"__MACOSX/": b"", **contents}))
    files = archives.open_files(source, tmp_path)
    assert list(files.sizes) == ["cat/1.jpg"]
    assert not files.folders - {"cat"}


@pytest.mark.parametrize("kind", ["hard", "symbolic", "zip"])
def test_links_stand_for_the_files_that_they_point_to(tmp_path, caplog, kind):
    up, a, b = ("a/", "a/", "b/") if kind == "hard" else ("../a/", "", "")
    links = {
        "a/2.jpg": f"{a}1.jpg",
        "b/3.jpg": f"{up}2.jpg",
        "b/4.jpg": f"{b}5.jpg",
        "b/5.jpg": f"{b}4.jpg",
        "c.jpg": "d",
    }
    path = tmp_path / "x"
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("a/1.jpg", b"one")
            for name, target in links.items():
                info = zipfile.ZipInfo(name)
                info.external_attr = (stat.S_IFLNK | 0o777) << 16
                archive.writestr(info, target)
    else:
        with tarfile.open(path, "w") as tar:
            for name, target in {"a/1.jpg": "", **links}.items():
                info = tarfile.TarInfo(name)
                info.type = tarfile.LNKTYPE if kind == "hard" else tarfile.SYMTYPE
                info.type, info.linkname, info.size = (info.type, target, 0) if target else (tarfile.REGTYPE, "", 3)
                tar.addfile(info, io.BytesIO(b"one"))
    files = archives.open_files(path, tmp_path)
    assert {name: files.read(name) for name in files.sizes} == dict.fromkeys(("a/1.jpg", "a/2.jpg", "b/3.jpg"), b"one")
    assert "left out 3 links that point to no file in it, or special files, such as b/4.jpg" in caplog.messages[0]
