"""A read that does not return is reported at growing intervals and finally ends the run."""

import os
import threading
import time

import pytest

from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.shards import watchdog
from lit_het.data_pipelines.shards.storage import SequentialFile
from lit_het.errors import UserError


@pytest.fixture
def ended(monkeypatch):
    """The exit codes with which the process would have ended."""
    codes = []
    monkeypatch.setattr(watchdog.os, "_exit", codes.append)
    monkeypatch.setattr(watchdog, "_INTERVAL", 0.02)
    return codes


def test_a_stuck_read_is_reported_at_growing_intervals_and_ends_the_run(tmp_path, ended, capfd):
    shard = tmp_path / "a.tar"
    os.mkfifo(shard)
    reader = threading.Thread(target=lambda: SequentialFile(str(shard)).close())  # waits for a writer
    with watchdog.watched(slow=0.1, stuck=1.0):
        reader.start()
        deadline = time.monotonic() + 20
        while not ended and time.monotonic() < deadline:
            time.sleep(0.01)
    with shard.open("wb"):
        reader.join()
    lines = capfd.readouterr().err.splitlines()
    assert 2 <= sum(line.startswith(f"lit-het: still waiting for {shard} after ") for line in lines) <= 5
    assert f"lit-het: no data from {shard} in 1 s: the run ends; continue with --resume" in "\n".join(lines)
    assert ended[0] == 75


def test_reads_that_return_are_not_reported(tmp_path, ended, capfd):
    shard = tmp_path / "a.tar"
    shard.write_bytes(b"abc")
    with watchdog.watched(slow=0.3, stuck=0.5):
        for _ in range(12):
            SequentialFile(str(shard)).close()
            time.sleep(0.05)
    assert (ended, capfd.readouterr().err) == ([], "")


def test_a_stuck_limit_below_the_slow_limit_is_refused():
    with pytest.raises(UserError, match=r"slow_read_seconds = 60\.0 must be more than 0 and at most stuck"):
        LoaderConfig(("a.tar",), stuck_read_seconds=5.0)
