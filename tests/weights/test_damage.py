"""Damaged checkpoints are detected and named, and the newest undamaged one is restored."""

import contextlib
import gc
import json
import os
import random
import resource
import shutil
import subprocess
import sys
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from lit_het.errors import UserError
from lit_het.weights.native import checksums
from lit_het.weights.native.folders import entries
from lit_het.weights.native.saved_step import Damaged, SavedStep
from lit_het.weights.native.saving import Checkpoints, SaveFailed, save_imported
from tests import tiny
from tests.weights.test_native import INFO, assert_equal, make_params, make_state

# Reads that fail leave coroutines of Orbax behind, whose loop is closed when TensorStore answers.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_to_other_tests():
    yield
    gc.collect()


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A folder with the undamaged steps 1 and 2."""
    directory = tmp_path_factory.mktemp("good")
    with Checkpoints(directory) as checkpoints:
        for step in (1, 2):
            checkpoints.save(make_state(step, make_params(step)), {**INFO, "position": 16 * step})
    return directory


@pytest.fixture
def copied(good, tmp_path):
    return shutil.copytree(good, tmp_path / "checkpoints")


def data_file(step, item):
    """Returns the largest file of an item, which holds its arrays."""
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


# What the message says of the files, without internals of Orbax.
REASONS = {
    "a truncated file of parameters": "Requested byte range",
    "a truncated file of metadata": "Expecting ':' delimiter",
    "a missing manifest": "does not exist",
    "missing metadata": "_METADATA",
    "a missing info": "it holds only the items 'params', 'optimizer'",
    "an empty folder": "it is empty",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_after_a_fault_of_the_newest_step_the_previous_one_is_restored_and_one_line_names_the_fault(
    copied, fault, capfd
):
    FAULTS[fault](copied / "2")
    lines = []
    with Checkpoints(copied, warn=lines.append) as checkpoints:
        state, info = checkpoints.restore(make_state(0))
        assert_equal(state, make_state(1, make_params(1)))
        assert info == {**INFO, "position": 16}
    assert len(lines) == 2
    assert str(copied / "2") in lines[0]
    assert REASONS.get(fault, "") in lines[0]
    assert "handler" not in lines[0]
    assert "tensorstore_spec" not in lines[0]
    assert lines[1].startswith("the run continues from step 1;")
    assert all("\n" not in line for line in lines)
    assert [entry.state for entry in entries(copied)] == ["complete", "set aside: damaged"]
    assert capfd.readouterr().err == ""


def test_after_falling_back_the_run_saves_the_damaged_step_again(copied):
    for again in (5, 7):
        cut(data_file(copied / "2", "params"))
        with Checkpoints(copied) as checkpoints:
            state, _ = checkpoints.restore(make_state(0))
            assert int(state.step) == 1
            checkpoints.save(make_state(2, make_params(again)), INFO)
    with Checkpoints(copied) as checkpoints:
        assert_equal(checkpoints.restore(make_state(0))[0], make_state(2, make_params(7)))
    assert [entry.state for entry in entries(copied)] == ["complete", "complete", "set aside: damaged"]


@pytest.mark.slow
def test_any_flipped_byte_in_any_file_is_harmless_or_detected(good, tmp_path):
    """The restored state is exactly that of step 2, or step 2 is refused."""
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


def test_info_of_another_format_counts_as_damaged(good, monkeypatch):
    other = checksums.encode_info({}, {}) | {"json": "{}"}
    with Checkpoints(good, read_only=True) as checkpoints:
        step = checkpoints.at(2)
        for info in (3, [], {checksums.DIGEST_KEY: 3}, {checksums.DIGEST_KEY: "", "json": 3}, other):
            monkeypatch.setattr(step, "_items", lambda *_, info=info: {"info": info})
            with pytest.raises(Damaged, match=r"/2 is damaged \(info is not what was saved\)"):
                step.read_info()


def test_a_changed_array_is_named(good, monkeypatch):
    with Checkpoints(good, read_only=True) as checkpoints:
        step = checkpoints.at(2)
        _, saved = step.read_info()
        # Simulates a fault that Orbax does not notice: the array is changed after reading.
        params = make_params(2)
        params["head"]["temperature"]["log_temperature"] += np.float32(1e-3)
        monkeypatch.setattr(step, "_items", lambda *_: {"params": params})
        with pytest.raises(Damaged, match=r"/2 is damaged \(params/head/temperature/log_temperature is not what"):
            step.load({}, saved)


def wrapped_as(kind, cause):
    try:
        raise kind("Failed") from cause
    except kind as error:
        return error


@pytest.mark.parametrize(
    "cause", [PermissionError(13, "Permission denied"), ValueError("UNAVAILABLE: bucket")], ids=str
)
def test_a_step_that_is_unavailable_for_now_does_not_count_as_damaged(copied, monkeypatch, cause):
    with Checkpoints(copied) as checkpoints:
        fail = mock.Mock(side_effect=wrapped_as(RuntimeError, cause))
        monkeypatch.setattr(SavedStep, "_items", fail)
        with pytest.raises(UserError, match=r"2 cannot be read \(.*\); it may be complete: nothing was changed"):
            checkpoints.restore(make_state(0))
    assert {entry.state for entry in entries(copied)} == {"complete"}


@pytest.mark.slow
def test_a_step_that_one_of_two_processes_cannot_read_is_used_by_neither(copied):
    port = tiny.free_port()
    command = [sys.executable, "-m", "tests.weights.restore_with_faults", str(copied)]
    piped: Any = {"env": tiny.environment(), "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, f"localhost:{port},{number}/2"], **piped) for number in (0, 1)]
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
    assert "(by another process); it may be complete" in found[0]["message"]
    assert "(no answer); it may be complete" in found[1]["message"]
    assert [entry.state for entry in entries(copied)] == ["complete", "set aside: damaged"]


def test_if_all_steps_are_damaged_the_run_stops_and_nothing_is_renamed(copied):
    for step in ("1", "2"):
        data_file(copied / step, "params").unlink()
    with Checkpoints(copied) as checkpoints, pytest.raises(UserError) as error:
        checkpoints.restore(make_state(0))
    assert "all other steps are damaged too" in str(error.value)
    assert "\n" not in str(error.value)
    assert [entry.state for entry in entries(copied)] == ["complete", "complete"]


def test_reading_a_damaged_step_raises_an_error_and_renames_nothing(copied):
    cut(data_file(copied / "2", "params"))
    with Checkpoints(copied, read_only=True) as checkpoints, pytest.raises(UserError, match="move this folder away"):
        checkpoints.restore_params(make_params())
    assert (copied / "2").is_dir()


def test_imported_parameters_are_verified_too(tmp_path):
    save_imported(tmp_path, make_params(1), {"locked_checksum": ""})
    with Checkpoints(tmp_path, read_only=True) as checkpoints:
        assert_equal(checkpoints.restore_params(make_params())[0], make_params(1))
    flip(data_file(tmp_path / "0", "params"), 3000)  # uncompressed: only the checksum detects it
    with (
        Checkpoints(tmp_path, read_only=True) as checkpoints,
        pytest.raises(UserError, match=r"/0 is damaged \(params/"),
    ):
        checkpoints.restore_params(make_params())


@contextlib.contextmanager
def full_disk(_, max_bytes=2000):
    """Simulates a full disk by limiting the size of files; only the errno differs."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def read_only(directory):
    """Removes write permission from a folder; as root, also switches to the user nobody."""
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


def save(checkpoints, *steps, state=make_state):
    """Saves and waits for what is written in the background."""
    for step in steps:
        checkpoints.save(state(step), INFO)
        checkpoints.wait()


@pytest.mark.parametrize("fault", [full_disk, read_only])
def test_a_failed_save_gives_a_one_line_warning_and_the_next_save_succeeds(copied, fault, capfd):
    lines = []
    with Checkpoints(copied, warn=lines.append) as checkpoints:
        with fault(copied):
            save(checkpoints, 3)
        assert checkpoints.latest_step == 2
        checkpoints.save(make_state(4, make_params(4)), INFO)
    (line,) = lines
    assert f"the checkpoint {copied / '3'} could not be saved (" in line
    assert line.endswith("earlier checkpoints are unchanged; the next save tries again")
    assert "\n" not in line
    with Checkpoints(copied) as checkpoints:
        assert_equal(checkpoints.restore(make_state(0))[0], make_state(4, make_params(4)))
    assert {entry.state for entry in entries(copied)} == {"complete"}
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("fault", [full_disk, read_only])
def test_a_failed_last_save_raises_an_error(copied, fault):
    def last_save():
        with Checkpoints(copied) as checkpoints, fault(copied):
            save(checkpoints, 3)

    with pytest.raises(UserError, match=r"/3 could not be saved"):
        last_save()


@pytest.mark.parametrize("kind", [jax.errors.JaxRuntimeError, ValueError])
def test_a_save_that_loses_another_process_raises_the_error_of_jax(copied, monkeypatch, kind):
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


def test_a_save_that_fails_in_the_background_leaves_nothing_and_the_next_save_succeeds(tmp_path):
    lines = []
    with Checkpoints(tmp_path, warn=lines.append) as checkpoints:
        save(checkpoints, 1, state=large_state)
        with full_disk(tmp_path, 20_000):  # so large that the background write fails, not the call
            save(checkpoints, 2, state=large_state)
        assert [path.name for path in tmp_path.iterdir()] == ["1"]
        save(checkpoints, 3, state=large_state)
        assert checkpoints.steps == [1, 3]
    assert len(lines) == 1


@pytest.mark.slow
def test_consecutive_failed_saves_end_the_run_with_the_exit_code_for_retrying(copied):
    lines = []
    with Checkpoints(copied, max_failed_saves=3, warn=lines.append) as checkpoints:
        with full_disk(copied):
            save(checkpoints, 3, 4)
        save(checkpoints, 5)  # succeeds, which resets the count of failures
        with full_disk(copied):
            save(checkpoints, 6, 7)
            with pytest.raises(SaveFailed, match="3 saves in a row have failed") as error:
                save(checkpoints, 8)
        assert error.value.code == 75
        save(checkpoints, 9)
    assert len(lines) == 4
    assert {entry.state for entry in entries(copied)} == {"complete"}


def test_arrays_are_read_one_by_one_and_damage_of_one_item_does_not_affect_the_other(copied):
    flip(copied / "2" / "params" / "_METADATA", 30)
    with Checkpoints(copied, read_only=True) as checkpoints:
        _, fingerprints = checkpoints.at(2).read_info()
        found = dict(checkpoints.at(2).arrays(fingerprints))
    assert found.keys() == fingerprints.keys()
    assert all(isinstance(content, np.ndarray) for path, content in found.items() if path.startswith("optimizer/"))
    assert jax.tree.leaves(found)


@pytest.mark.parametrize("content", ["[" * 5000, "[]", "3", '{"commit_timestamp_nsecs": 1e300, "metrics": 3}'])
def test_damaged_metadata_of_one_step_does_not_affect_the_others(copied, content):
    (copied / "2" / "_CHECKPOINT_METADATA").write_text(content)
    lines = []
    with Checkpoints(copied, warn=lines.append) as checkpoints:
        step = int(checkpoints.restore(make_state(0))[0].step)
    assert (step == 1) == bool(lines)
    assert step in (1, 2)
