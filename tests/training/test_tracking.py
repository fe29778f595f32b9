"""Metrics at Weights & Biases and Trackio: those of metrics.jsonl, one run over resumes, and no failure matters."""

import dataclasses
import struct
import subprocess
import sys
import time
import types

import pytest

from lit_het import distributed
from lit_het.errors import UserError
from lit_het.training.log import MetricLog, read_metrics
from lit_het.training.tracking import Tracker, require
from tests import tiny

RECORDS = [(1, {"train/loss": 2.0}), (2, {"train/loss": 1.5, "train/top1": 0.25}), (2, {"zero_shot/x/top1": 0.5})]


@dataclasses.dataclass
class Service:
    """A module with the functions of wandb and trackio that fails at a call if told to."""

    fails_at: str = ""
    runs: list = dataclasses.field(default_factory=list)
    records: list = dataclasses.field(default_factory=list)
    finished: int = 0
    Settings: type = dict

    def _fail(self, call):
        if call == self.fails_at:
            raise ConnectionError("no\nnetwork")

    def init(self, **options):
        self._fail("init")
        self.runs.append(options)

    def log(self, metrics, step):
        self._fail("log")
        self.records.append({"step": step, **metrics})

    def finish(self):
        self._fail("finish")
        self.finished += 1


@pytest.fixture
def service(monkeypatch):
    service = Service()
    for package in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, package, service)
    return service


def write(directory, package, *, first_step=0, records=RECORDS):
    log = MetricLog(directory, first_step=first_step, tracker=Tracker(package, directory, {"seed": 3}))
    for step, metrics in records:
        log.write(step, metrics)
    log.close()


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_service_gets_the_records_of_the_file_and_a_resume_continues_its_run(tmp_path, service, package):
    write(tmp_path, package)
    write(tmp_path, package, first_step=2, records=[(3, {"train/loss": 1.0})])
    assert service.records == read_metrics(tmp_path / "metrics.jsonl")
    assert service.finished == 2
    first, second = service.runs
    assert first == second
    assert first["resume"] == "allow"
    assert (first["project"], first["config"]) == ("lit-het", {"seed": 3})
    identity = (tmp_path / "tracking_id").read_text()
    assert identity == first["id"] if package == "wandb" else first["name"] == f"{tmp_path.name}-{identity}"


def test_another_run_has_another_name(tmp_path, service):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, "wandb")
    assert service.runs[0]["id"] != service.runs[1]["id"]


@pytest.mark.parametrize("call", ["init", "log", "finish"])
def test_a_failure_of_a_service_is_one_line_and_the_file_is_complete(tmp_path, service, call, capsys):
    service.fails_at = call
    write(tmp_path, "wandb")
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == len(RECORDS)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lit-het: wandb gets no more metrics (no network); the training continues")


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_missing_package_is_one_line_that_names_it(package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UserError, match=f"--log {package} needs the package {package} .*; pip install {package}"):
        require(package)
    monkeypatch.setitem(sys.modules, package, types.ModuleType(package))  # a folder of this name
    with pytest.raises(UserError, match=f"--log {package} needs the package {package}; pip install {package}"):
        require(package)


def test_only_the_main_process_writes(tmp_path, service, monkeypatch):
    tracker = Tracker("wandb", tmp_path, {})
    monkeypatch.setattr(distributed, "is_main_process", lambda: False)
    log = MetricLog(tmp_path, tracker=tracker)
    log.write(1, {"train/loss": 1.0})
    log.close()
    assert (service.records, service.finished) == ([], 0)


@pytest.mark.slow
def test_services_are_imported_only_when_asked_for():
    program = "import sys, lit_het.training.train, lit_het.cli.main\nassert not {'wandb', 'trackio'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], env=tiny.environment(), check=True)


@pytest.mark.slow
def test_wandb_itself_has_every_record_offline(tmp_path, monkeypatch, capfd):
    wandb = pytest.importorskip("wandb")
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    monkeypatch.setenv("WANDB_MODE", "offline")
    write(tmp_path, "wandb")
    assert wandb.run is None
    (path,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    found: dict[str, list[float]] = {}
    deadline = time.monotonic() + 60
    while path.stat().st_size < 1000 and time.monotonic() < deadline:
        time.sleep(0.1)  # its other process writes the file at once, but after `finish` has returned
    for content in records_of(path.read_bytes()):
        record = messages.Record()
        record.ParseFromString(content)
        for item in record.history.item:
            found.setdefault(item.key or "/".join(item.nested_key), []).append(float(item.value_json))
    expected = {"train/loss": [2.0, 1.5], "train/top1": [0.25], "zero_shot/x/top1": [0.5], "_step": [1.0, 2.0]}
    assert {name: values for name, values in found.items() if name in expected} == expected
    assert capfd.readouterr().err == ""


def records_of(content):
    """Yields the records of a file in LevelDB's log format that is smaller than a block (32 KiB)."""
    place = 7
    while place + 7 <= len(content):
        length, kind = struct.unpack_from("<HB", content, place + 4)
        assert kind == 1, "whole"
        yield content[place + 7 : place + 7 + length]
        place += 7 + length
