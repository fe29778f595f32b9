"""The log: records of a run and of a resumed one, on a full disk, and what it imports."""

import functools
import importlib.abc
import json
import resource
import sys

import pytest

from lit_het.training import log as log_module
from lit_het.training.log import MetricLog, read_metrics


def test_the_log_of_a_resumed_run_drops_records_after_its_checkpoint(tmp_path):
    log = MetricLog(tmp_path)
    for step in range(1, 6):
        log.write(step, {"train/loss": float(step)})
    log.write(3, {"zero_shot/x/top1": 0.5})
    log.close()
    log = MetricLog(tmp_path, first_step=3)
    log.write(4, {"train/loss": 40.0})
    log.close()
    records = read_metrics(tmp_path / "metrics.jsonl")
    losses = [(r["step"], r["train/loss"]) for r in records if "train/loss" in r]
    assert losses == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 40.0)]
    assert {"step": 3, "zero_shot/x/top1": 0.5} in records


@pytest.mark.parametrize("cut", ['{"step": 3, "train/lo', '{"step": 3}', "{"])
def test_a_last_line_cut_short_is_dropped(tmp_path, cut):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1, "train/loss": 1.0}) + "\n" + cut)
    assert read_metrics(path) == [{"step": 1, "train/loss": 1.0}]
    log = MetricLog(tmp_path, first_step=10)
    log.write(11, {"train/loss": 2.0})
    log.close()
    assert [r["step"] for r in read_metrics(path)] == [1, 11]


def test_scalars_reach_tensorboard_and_a_log_that_does_not_exist_is_empty(tmp_path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []
    log = MetricLog(tmp_path)
    log.write(1, {"train/loss": 1.0})
    log.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"train/loss" in events.read_bytes()


def test_a_log_leaves_pytorch_alone_where_it_is_installed(tmp_path, monkeypatch):
    asked = []

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, *_):
            asked.append(name)

    for name in [name for name in sys.modules if name.partition(".")[0] in ("tensorboardX", "torch")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    monkeypatch.setattr(log_module, "_tensorboard", functools.cache(log_module._tensorboard.__wrapped__))
    MetricLog(tmp_path).close()
    assert "tensorboardX" in asked
    assert "torch" not in asked
    assert "torch" not in sys.modules


def test_records_wait_while_the_disk_is_full_and_none_is_lost(tmp_path, capsys):
    path, limit = tmp_path / "metrics.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
    log = MetricLog(tmp_path)
    log.write(1, {"train/loss": 1.0})
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, limit[1]))  # half a line fits
        for step in range(2, 40):  # more than fit into any queue
            log.write(step, {"train/loss": float(step)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert [record["step"] for record in read_metrics(path)] == [1]
    log.write(40, {"train/loss": 40.0})
    log.close()
    assert [record["step"] for record in read_metrics(path)] == list(range(1, 41))
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert events.read_bytes().count(b"train/loss") == 40
    lines = capsys.readouterr().err.splitlines()
    assert len([line for line in lines if "metrics.jsonl cannot be written (File too large)" in line]) == 1


def test_a_log_that_can_never_be_written_reports_lost_records(tmp_path, capsys):
    log, limit = MetricLog(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
        log.write(1, {"train/loss": 1.0})
        log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "metrics.jsonl cannot be written (File too large); its last records are lost" in capsys.readouterr().err
