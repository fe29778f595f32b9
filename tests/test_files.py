"""Files are whole or not there."""

import os
import re
import stat

import pytest

from lit_het.errors import UserError
from lit_het.files import cache_folder, completed, write_atomically


def write_half(path):
    with completed(path) as temporary:
        temporary.write_text("half")
        raise InterruptedError


def test_a_file_that_is_not_finished_leaves_the_old_one_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    write_atomically(path, "old")
    with pytest.raises(InterruptedError):
        write_half(path)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_written_file_has_the_permissions_of_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_a_link_under_the_temporary_name_is_not_followed(tmp_path, monkeypatch):
    precious = tmp_path / "precious"
    precious.write_text("before")
    monkeypatch.setattr("secrets.token_hex", lambda size: "guessed")
    (tmp_path / "file.partial-guessed").symlink_to(precious)
    with pytest.raises(FileExistsError):
        write_atomically(tmp_path / "file", "text")
    assert precious.read_text() == "before"


def test_the_cache_is_private_for_every_umask(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new" / "cache"))
    before = os.umask(0)
    try:
        folder = cache_folder("compiled")
    finally:
        os.umask(before)
    assert folder == tmp_path / "new" / "cache" / "lit-het" / "compiled"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder.parent, folder)] == [0o700, 0o700]


def test_a_cache_that_the_group_can_write_to_is_made_private(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "lit-het").mkdir()
    (tmp_path / "lit-het").chmod(0o775)
    cache_folder("indexes")
    assert stat.S_IMODE((tmp_path / "lit-het").stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o707, 0o1777])
@pytest.mark.parametrize("place", ["lit-het", "lit-het/compiled"])
def test_a_cache_that_others_can_write_to_is_refused(tmp_path, monkeypatch, place, mode):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache_folder("compiled")
    (tmp_path / place).chmod(mode)
    with pytest.raises(UserError, match=rf"{re.escape(place)} can be written to by all users.*XDG_CACHE_HOME"):
        cache_folder("compiled")


def test_a_cache_of_another_user_is_refused_and_one_of_root_is_accepted(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    owner = cache_folder("compiled").stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    if owner:
        with pytest.raises(UserError, match=r"belongs to another user.*XDG_CACHE_HOME"):
            cache_folder("compiled")
        return
    cache_folder("compiled")  # root can do it anyway
    os.chown(tmp_path / "lit-het", owner + 2, -1)
    with pytest.raises(UserError, match=r"belongs to another user.*XDG_CACHE_HOME"):
        cache_folder("compiled")


def test_a_link_of_another_user_to_an_own_directory_is_refused(tmp_path, monkeypatch):
    if os.geteuid():
        pytest.skip("only root can give a link away")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "ours").mkdir()
    (tmp_path / "lit-het").symlink_to(tmp_path / "ours")
    cache_folder("compiled")
    os.chown(tmp_path / "lit-het", 12345, -1, follow_symlinks=False)
    with pytest.raises(UserError, match="belongs to another user"):
        cache_folder("compiled")


def test_a_cache_that_cannot_be_created_is_no_error_until_it_is_used(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert not cache_folder("indexes").exists()
