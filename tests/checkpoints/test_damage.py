"""Damaged checkpoints: each is found and named, the last good one is used, and nothing is ever silently wrong."""

import contextlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
from unittest import mock

import jax
import numpy as np
import pytest

from lit_het.checkpoints.native.folders import entries
from lit_het.checkpoints.native.saved_step import Damaged, SavedStep
from lit_het.checkpoints.native.saving import Checkpoints, Kept, SaveFailed, checksums, save_imported
from lit_het.errors import UserError
from tests import tiny
from tests.checkpoints.test_native import INFO, assert_equal, make_params, make_state


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """Steps 1 and 2, whole."""
    directory = tmp_path_factory.mktemp("good")
    with Checkpoints(directory) as checkpoints:
        for step in (1, 2):
            checkpoints.save(make_state(step, make_params(step)), {**INFO, "position": 16 * step})
    return directory


@pytest.fixture
def copied(good, tmp_path):
    return shutil.copytree(good, tmp_path / "checkpoints")


def data_file(step, item):
    """Returns the file with the arrays of an item, the largest."""
    return max((step / item).rglob("d/*"), key=lambda path: path.stat().st_size)


def flip(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 0x10
    path.write_bytes(content)


def flip_all_in_the_middle(path):
    for place in range(path.stat().st_size // 3, 2 * path.stat().st_size // 3):
        flip(path, place)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


FAULTS = {
    "a flipped byte of a parameter": lambda step: flip(data_file(step, "params"), 2000),
    "a flipped byte of the optimizer": lambda step: flip(data_file(step, "optimizer"), 700),
    "flipped bytes all over the parameters": lambda step: flip_all_in_the_middle(data_file(step, "params")),
    "a flipped byte of the info": lambda step: flip(step / "info" / "_strings.json", 100),
    "a truncated file of parameters": lambda step: cut(data_file(step, "params")),
    "a truncated file of metadata": lambda step: cut(step / "params" / "_METADATA"),
    "a truncated info": lambda step: cut(step / "info" / "_strings.json"),
    "a missing file of parameters": lambda step: data_file(step, "params").unlink(),
    "a missing manifest": lambda step: (step / "optimizer" / "manifest.ocdbt").unlink(),
    "missing metadata": lambda step: (step / "optimizer" / "_METADATA").unlink(),
    "a missing info": lambda step: shutil.rmtree(step / "info"),
    "missing parameters": lambda step: shutil.rmtree(step / "params"),
    "an empty folder": lambda step: [shutil.rmtree(path) for path in step.iterdir() if path.is_dir()],
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_after_a_fault_of_the_newest_step_the_one_before_is_restored_and_one_line_names_the_fault(copied, fault, capfd):
    fault(copied / "2")
    lines = []
    with Checkpoints(copied, tell=lines.append) as checkpoints:
        state, info = checkpoints.restore(make_state(0))
        assert_equal(state, make_state(1, make_params(1)))
        assert info == {**INFO, "position": 16}
    assert len(lines) == 2
    assert str(copied / "2") in lines[0]
    assert lines[1].startswith("the run goes on from step 1;")
    assert all("\n" not in line for line in lines)
    assert [entry.state for entry in entries(copied)] == ["complete", "set aside: damaged"]
    assert capfd.readouterr().err == ""


def test_a_run_that_fell_back_saves_the_step_again_as_if_nothing_had_been(copied):
    for again in (5, 7):
        cut(data_file(copied / "2", "params"))
        with Checkpoints(copied) as checkpoints:
            state, _ = checkpoints.restore(make_state(0))
            assert int(state.step) == 1
            checkpoints.save(make_state(2, make_params(again)), INFO)
    with Checkpoints(copied) as checkpoints:
        assert_equal(checkpoints.restore(make_state(0))[0], make_state(2, make_params(7)))
    assert [entry.state for entry in entries(copied)] == ["complete", "complete", "set aside: damaged"]


def test_a_flipped_byte_is_never_restored_wherever_it_is(good, tmp_path):
    """Any byte of any file: the state is that of step 2, or step 2 is refused."""
    files = sorted(path.relative_to(good) for path in (good / "2").rglob("*") if path.is_file())
    generator = random.Random(0)
    for number in range(10):
        copied = shutil.copytree(good, tmp_path / str(number))
        path = copied / generator.choice([f for f in files if (good / f).stat().st_size])
        flip(path, generator.randrange(path.stat().st_size))
        with Checkpoints(copied) as checkpoints:
            state, info = checkpoints.restore(make_state(0))
        step = int(state.step)
        assert_equal(state, make_state(step, make_params(step)))
        assert info["position"] == 16 * step


INFOS = [3, [], {checksums.SEAL: 3}, {checksums.SEAL: "", "json": 3}, checksums.sealed({}, {}) | {"json": "{}"}]


@pytest.mark.parametrize("info", INFOS, ids=str)
def test_an_info_of_another_form_is_damaged(copied, monkeypatch, info):
    with Checkpoints(copied) as checkpoints:
        step = checkpoints.at(2)
        monkeypatch.setattr(step, "_items", lambda *_: {"info": info})
        with pytest.raises(Damaged, match=r"/2 is damaged \(info is not what was saved\)"):
            step.about()


def test_the_array_that_was_changed_is_named(copied, monkeypatch):
    with Checkpoints(copied) as checkpoints:
        step = checkpoints.at(2)
        _, saved = step.about()
        # As a fault between the disk and us would: Orbax reads what it is given.
        state = make_state(2, make_params(2))
        wrong = state.params["head"]["temperature"]["log_temperature"].at[()].add(1e-3)
        state.params["head"]["temperature"]["log_temperature"] = wrong
        read = {"params": state.params}
        monkeypatch.setattr(step, "_items", lambda *_: read)
        with pytest.raises(Damaged, match=r"/2 is damaged \(params/head/temperature/log_temperature is not what"):
            step.load({}, saved)


REASONS = {
    "a truncated file of parameters": "Requested byte range",
    "a truncated file of metadata": "Expecting ':' delimiter",
    "a missing manifest": "does not exist",
    "missing metadata": "_METADATA",
    "a missing info": "only these are there: 'params', 'optimizer'",
    "an empty folder": "it is empty",
}


@pytest.mark.parametrize(("fault", "reason"), REASONS.items(), ids=REASONS)
def test_the_line_tells_what_the_files_lack_and_nothing_of_who_reads_them(copied, fault, reason):
    FAULTS[fault](copied / "2")
    lines = []
    with Checkpoints(copied, tell=lines.append) as checkpoints:
        checkpoints.restore(make_state(0))
    assert reason in lines[0]
    assert "handler" not in lines[0]
    assert "tensorstore_spec" not in lines[0]


def wrapped_as(kind, cause):
    try:
        raise kind("Failed") from cause
    except kind as error:
        return error


@pytest.mark.parametrize(
    "cause", [PermissionError(13, "Permission denied"), ValueError("UNAVAILABLE: bucket")], ids=str
)
def test_a_step_that_cannot_be_reached_now_is_no_damaged_one(copied, monkeypatch, cause):
    with Checkpoints(copied) as checkpoints:
        fail = mock.Mock(side_effect=wrapped_as(RuntimeError, cause))
        monkeypatch.setattr(SavedStep, "_items", fail)
        with pytest.raises(UserError, match=r"2 cannot be read \(.*\); it may be whole: nothing was changed"):
            checkpoints.restore(make_state(0))
    assert {entry.state for entry in entries(copied)} == {"complete"}


def test_what_one_of_two_processes_cannot_read_neither_uses(copied):
    port = tiny.free_port()
    xla = "--xla_force_host_platform_device_count=1 --xla_backend_optimization_level=0"
    command = [sys.executable, "-m", "tests.checkpoints.restore_with_faults", str(copied)]
    processes = [
        subprocess.Popen(
            [*command, f"localhost:{port},{number}/2"],
            env={**os.environ, "XLA_FLAGS": xla},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in (0, 1)
    ]
    found = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors
            found.append(json.loads(output.splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [one["step"] for one in found] == [1, 1]
    assert "(by another process); it may be whole" in found[0]["told"]
    assert "(no answer); it may be whole" in found[1]["told"]
    assert [entry.state for entry in entries(copied)] == ["complete", "set aside: damaged"]


def test_if_no_step_is_whole_the_run_stops_and_everything_stays(copied):
    for step in ("1", "2"):
        data_file(copied / step, "params").unlink()
    with Checkpoints(copied) as checkpoints, pytest.raises(UserError) as error:
        checkpoints.restore(make_state(0))
    assert "no other step is whole" in str(error.value)
    assert "\n" not in str(error.value)
    assert [entry.state for entry in entries(copied)] == ["complete", "complete"]


def test_who_only_reads_a_damaged_step_is_told_and_nothing_moves(copied):
    cut(data_file(copied / "2", "params"))
    with Checkpoints(copied, read_only=True) as checkpoints, pytest.raises(UserError, match="move this folder away"):
        checkpoints.restore_params(make_params())
    assert (copied / "2").is_dir()


def test_imported_parameters_are_checked_as_well(tmp_path):
    save_imported(tmp_path, make_params(1), {"locked_checksum": ""})
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert_equal(checkpoints.restore_params(make_params())[0], make_params(1))
    flip(data_file(tmp_path / "0", "params"), 3000)  # uncompressed: nothing but the checksum sees it
    with (
        Checkpoints(tmp_path, read_only=True) as checkpoints,
        pytest.raises(UserError, match=r"/0 is damaged \(params/"),
    ):
        checkpoints.restore_params(make_params())


@contextlib.contextmanager
def full_disk(_, room=2000):
    """No file may grow beyond some bytes, which the kernel refuses with another number than on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def read_only(directory):
    """A folder without the right to write, and, where the tests have all rights, the rights of nobody."""
    mode, is_root = directory.stat().st_mode, os.geteuid() == 0
    for folder in (directory, *directory.parents[:4]):
        folder.chmod(folder.stat().st_mode | 0o055)
    directory.chmod(0o555)
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        directory.chmod(mode)


@pytest.mark.parametrize("fault", [full_disk, read_only])
def test_a_save_that_fails_is_told_in_a_line_and_the_next_one_is_whole(copied, fault, capfd):
    lines = []
    with Checkpoints(copied, tell=lines.append) as checkpoints:
        with fault(copied):
            checkpoints.save(make_state(3), INFO)
            checkpoints.wait()
        assert checkpoints.latest_step == 2
        checkpoints.save(make_state(4, make_params(4)), INFO)
    (line,) = lines
    assert f"the checkpoint {copied / '3'} could not be saved (" in line
    assert line.endswith("the last one that was stays; the next save tries again")
    assert "\n" not in line
    with Checkpoints(copied) as checkpoints:
        assert_equal(checkpoints.restore(make_state(0))[0], make_state(4, make_params(4)))
    assert {entry.state for entry in entries(copied)} == {"complete"}
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("fault", [full_disk, read_only])
def test_if_the_last_save_fails_it_is_an_error(copied, fault):
    def save():
        with Checkpoints(copied) as checkpoints, fault(copied):
            checkpoints.save(make_state(3), INFO)
            checkpoints.wait()

    with pytest.raises(UserError, match=r"/3 could not be saved"):
        save()


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
def test_a_save_that_misses_another_process_is_no_fault_of_the_disk(copied, monkeypatch, kind):
    gone = kind("UNKNOWN: Gloo AllGather failed: Connection reset by peer")
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    with Checkpoints(copied) as checkpoints:
        checkpoints.save(make_state(3), INFO)
        assert checkpoints._saving is not None
        step, response = checkpoints._saving
        response.result()
        checkpoints._saving = step, mock.Mock(result=mock.Mock(side_effect=wrapped_as(ValueError, gone)))
        with pytest.raises(kind, match="Connection reset"):
            checkpoints.wait()


def large_state(step):
    values = np.random.default_rng(step).normal(size=(20, 100, 100)).astype(np.float32)
    return make_state(step, {f"layer_{number}": {"kernel": value} for number, value in enumerate(values)})


def test_after_a_save_that_fails_in_the_background_nothing_is_left_and_the_next_one_is_whole(tmp_path):
    lines = []
    with Checkpoints(tmp_path, tell=lines.append) as checkpoints:
        checkpoints.save(large_state(1), INFO)
        checkpoints.wait()
        with full_disk(tmp_path, 20_000):  # what is written in the background fails then, and not the call
            checkpoints.save(large_state(2), INFO)
            checkpoints.wait()
        assert [path.name for path in tmp_path.iterdir()] == ["1"]
        checkpoints.save(large_state(3), INFO)
        checkpoints.wait()
        assert checkpoints.steps == [1, 3]
    assert len(lines) == 1


def test_saves_that_fail_one_after_the_other_end_the_run_with_the_code_to_start_again(copied):
    lines = []
    with Checkpoints(copied, max_failed_saves=3, tell=lines.append) as checkpoints:

        def save(step):
            checkpoints.save(make_state(step), INFO)
            checkpoints.wait()

        with full_disk(copied):
            save(3)
            save(4)
        save(5)  # which succeeds: from here on they are counted anew
        with full_disk(copied):
            save(6)
            save(7)
            with pytest.raises(SaveFailed, match="3 saves in a row have failed") as error:
                save(8)
        assert error.value.code == 75
        save(9)
    assert len(lines) == 4
    assert {entry.state for entry in entries(copied)} == {"complete"}


def test_arrays_are_read_one_by_one_and_damage_stays_with_its_own(copied):
    flip(copied / "2" / "params" / "_METADATA", 30)
    with Checkpoints(copied, read_only=True) as checkpoints:
        _, marks = checkpoints.at(2).about()
        found = dict(checkpoints.at(2).arrays(marks))
    assert found.keys() == marks.keys()
    assert all(isinstance(content, np.ndarray) for path, content in found.items() if path.startswith("optimizer/"))
    assert jax.tree.leaves(found)


@pytest.mark.parametrize("content", ["[" * 5000, "[]", "3", '{"commit_timestamp_nsecs": 1e300, "metrics": 3}'])
def test_damaged_metadata_of_a_step_do_not_hide_the_others(copied, content):
    (copied / "2" / "_CHECKPOINT_METADATA").write_text(content)
    lines = []
    with Checkpoints(copied, tell=lines.append) as checkpoints:
        step = int(checkpoints.restore(make_state(0))[0].step)
    assert (step == 1) == bool(lines)
    assert step in (1, 2)
