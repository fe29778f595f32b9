"""A run's configuration and tokenizer are verified; a one-line error names a changed file."""

import hashlib
import json
import os

import pytest

from lit_het.errors import UserError
from lit_het.weights import manifest
from tests.weights.test_damage import flip

FILES = {"config.json": b'{"seed": 0}\n', "tokenizer.model": bytes(range(100))}


@pytest.fixture
def run(tmp_path):
    manifest.write(tmp_path, FILES)
    return tmp_path


def test_written_files_are_verified_also_after_moving_the_run(run, tmp_path_factory):
    moved = run.rename(tmp_path_factory.mktemp("moved") / "run")
    assert {name: (moved / name).read_bytes() for name in FILES} == FILES
    assert manifest.check(moved) == ("config.json", "tokenizer.model")


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_bit_is_found_and_the_file_is_named(run, name):
    for place in range(len(FILES[name])):
        flip(run / name, place)
        with pytest.raises(UserError, match=rf"{name} is not what the run wrote: .* delete .*manifest\.json"):
            manifest.check(run)
        flip(run / name, place)
    assert manifest.check(run)
    (run / name).unlink()
    with pytest.raises(UserError, match=name):
        manifest.check(run)


def test_a_damaged_manifest_raises_an_error_and_a_missing_one_accepts_any_files(run):
    (run / "config.json").write_text("edited")
    path = run / manifest.NAME
    content = path.read_bytes()
    for damaged in (content[:-9], b"", b"[]", b"null", b"[" * 60_000, content.replace(b'"tok', b'"Tok')):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"manifest\.json is damaged"):
            manifest.check(run)
    path.unlink()
    assert manifest.check(run) == ()


@pytest.mark.parametrize("name", ["/dev/zero", "../other", "metrics.jsonl", "config.json\0", ""])
def test_a_forged_manifest_cannot_cause_other_files_to_be_read(run, name):
    files = {name: hashlib.sha256(b"").hexdigest()}
    digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()
    (run / manifest.NAME).write_text(json.dumps({"sha256": digest, "files": files}, indent=1) + "\n")
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        manifest.check(run)


def test_a_pipe_a_device_or_a_huge_file_gives_a_one_line_error(run):
    path = run / "tokenizer.model"
    for make, message in (
        (os.mkfifo, r"tokenizer\.model cannot be read \(not a regular file\)"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
        (lambda path: path.write_bytes(bytes(2**26 + 1)), r"tokenizer\.model has more than 67,108,864 bytes"),
    ):
        path.unlink()
        make(path)
        with pytest.raises(UserError, match=message):
            manifest.check(run)


def test_a_kill_between_any_two_writes_leaves_a_run_that_opens(run, monkeypatch):
    class Killed(BaseException):
        pass

    changed = {"config.json": b'{"seed": 1}\n', "tokenizer.model": b"other"}
    replace, unlink, left = os.replace, os.unlink, 0

    def step(call, *arguments, **named):
        nonlocal left
        if left == 0:
            raise Killed
        left -= 1
        return call(*arguments, **named)

    kills = 0
    for count in range(10):
        monkeypatch.undo()
        manifest.write(run, FILES)
        left = count
        monkeypatch.setattr(os, "replace", lambda *arguments: step(replace, *arguments))
        monkeypatch.setattr(os, "unlink", lambda *arguments, **named: step(unlink, *arguments, **named))
        try:
            manifest.write(run, changed)
        except Killed:
            monkeypatch.undo()
            manifest.check(run)
            kills += 1
    assert 3 < kills < 10
    assert manifest.check(run) == tuple(changed)


def test_unchanged_files_are_not_written_again(run):
    before = {path: path.stat().st_mtime_ns for path in run.iterdir()}
    manifest.write(run, FILES)
    assert {path: path.stat().st_mtime_ns for path in run.iterdir()} == before
