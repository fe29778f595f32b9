"""A disk that is really full: what failed saves leave behind, and what they say."""

import contextlib
import os
import subprocess
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest

from lit_het.types import TrainState
from lit_het.weights.native.saving import Checkpoints, SaveFailed

MEBIBYTE = 2**20


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 8 MiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(disk)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a file system")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def state(step, size):
    """A state of this many bytes, half of them of the optimizer, in arrays that are written by several threads."""
    values = np.random.default_rng(step).random((8, size // 64))
    arrays = {f"layer_{number}": jnp.asarray(row, jnp.float32) for number, row in enumerate(values)}
    return TrainState(jnp.int32(step), arrays, {"momentum": {name: 2 * row for name, row in arrays.items()}}, None)


def save(checkpoints, step, size):
    checkpoints.save(state(step, size * MEBIBYTE), {})
    checkpoints.wait()


def test_failed_saves_on_a_full_disk_leave_nothing_and_keep_what_was_saved(small_disk):
    folder, lines = small_disk / "checkpoints", []
    with Checkpoints(folder, warn=lines.append, max_failed_saves=9) as checkpoints:
        save(checkpoints, 1, 4)
        for step in (2, 3):
            save(checkpoints, step, 7)
            assert [path.name for path in folder.iterdir()] == ["1"]
        save(checkpoints, 4, 2)
        assert checkpoints.steps == [1, 4]
    assert len(lines) == 2
    assert all("No space left" in line and "earlier checkpoints are unchanged" in line for line in lines)


def test_a_run_without_checkpoints_does_not_claim_one(small_disk):
    folder, lines = small_disk / "checkpoints", []
    checkpoints = Checkpoints(folder, warn=lines.append, max_failed_saves=2)
    save(checkpoints, 1, 12)
    checkpoints.save(state(2, 12 * MEBIBYTE), {})
    with pytest.raises(SaveFailed, match=r"there is no earlier one; free disk space .* then begin again with --resume"):
        checkpoints.wait()
    assert lines[0].endswith("there is no earlier one; the next save tries again")
    assert not list(folder.iterdir())


def test_threads_that_still_write_after_a_failure_leave_nothing(tmp_path, monkeypatch):
    late, folder = [], tmp_path / "3.orbax-checkpoint-tmp" / "params"

    def write():
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "array").write_bytes(b"0" * 100)

    def fail(*_, **__):
        late.append(threading.Thread(target=write))
        late[0].start()
        raise OSError(28, "No space left on device")

    with contextlib.suppress(SaveFailed), Checkpoints(tmp_path) as checkpoints:
        monkeypatch.setattr(checkpoints, "_opened", fail)
        checkpoints.save(state(3, 1000), {})
    late[0].join()
    assert not list(tmp_path.iterdir())
