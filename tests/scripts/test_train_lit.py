"""``scripts/train_lit.sh`` against a cloud whose workers are local processes, which train for real."""

import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from lit_het import sharding
from lit_het.configs import quickstart_lit_deterministic
from lit_het.sharding import MeshConfig
from lit_het.training.cadence import Cadence
from lit_het.training.directory import checkpoint_dir
from lit_het.training.durations import Duration
from lit_het.training.log import read_metrics
from lit_het.training.train import train
from lit_het.weights.native.saving import Checkpoints
from tests import tiny
from tests.scripts.conftest import write_config_file

FAKE = Path(__file__).with_name("fake_gcloud.py")
SCRIPT = Path("scripts/train_lit.sh").resolve()
WHERE = ("--name", "lit", "--zone", "us-west4-a", "--type", "v5litepod-8")
NUM_STEPS = 10


@pytest.fixture
def cloud(tmp_path, monkeypatch):
    """A folder in which ``gcloud`` keeps its slices."""
    folder, programs = tmp_path / "cloud", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    gcloud = programs / "gcloud"
    gcloud.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    gcloud.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_CLOUD", str(folder))
    monkeypatch.setenv("FAKE_JOB", str(random.randrange(4096)))
    monkeypatch.setenv("TRAIN_LIT_POLL_SECONDS", "0.1")
    yield folder
    take_away(folder)


def take_away(cloud):
    """Ends all that runs on the slice."""
    for file in cloud.glob("worker-*/lit-het/train.pid"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(int(file.read_text()), signal.SIGKILL)


def command(*options, config="configs/quickstart_lit_deterministic.py"):
    return [str(SCRIPT), *WHERE, *options, "--", "--config", str(config)]


def installing(program):
    """Options that make a shell's program ``lit-het``."""
    return "--install", f"mkdir -p .venv/bin && echo '{program}' > .venv/bin/lit-het && chmod +x .venv/bin/lit-het"


def ended(arguments):
    return subprocess.run(arguments, capture_output=True, text=True, check=False)


def commands_of(cloud):
    lines = (cloud / "commands.txt").read_text().splitlines()
    return [" ".join(line.split()[2:4]) for line in lines if "describe" not in line]


def started(arguments):
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def config(data, tmp_path):
    """LiT with nothing locked; four of eight devices hold the same half of the parameters."""
    lit = quickstart_lit_deterministic.get_config()
    lit = dataclasses.replace(lit, task=dataclasses.replace(lit.task, locked=()))
    return dataclasses.replace(
        tiny.shrink(lit, data, tmp_path / "run"),
        length=Duration(NUM_STEPS),
        mesh=MeshConfig(fsdp=2),
        cadence=Cadence(log_steps=1, save_steps=2),
    )


def steps(config):
    return [record["step"] for record in read_metrics(config.run_dir / "metrics.jsonl") if "train/loss" in record]


@pytest.mark.devices
@pytest.mark.slow
def test_two_workers_on_a_preempted_slice_train_what_one_process_trains(config, cloud, tmp_path, monkeypatch):
    path = write_config_file(config, tmp_path / "lit.py")
    # The checkout that is sent is HEAD's, as a user's would be.
    install = installing(f'exec {sys.executable} -m lit_het.cli.main "$@"')
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "compiled"))
    script = started(command("--spot", "--delete", *install, config=path))
    deadline = time.monotonic() + 300
    while not len(steps(config)) >= 3:
        assert time.monotonic() < deadline
        assert script.poll() is None, script.communicate()
        time.sleep(0.01)
    (cloud / "state").write_text("SUSPENDED")
    take_away(cloud)
    assert len(steps(config)) < NUM_STEPS, "the slice was preempted too late for the test"
    try:
        output, remarks = script.communicate(timeout=300)
    finally:
        script.kill()
    assert script.returncode == 0, output + remarks
    assert "resuming training" in remarks
    done = commands_of(cloud)
    assert done[0] == "queued-resources create"
    assert done.count("queued-resources create") == 2
    assert done[-1] == "queued-resources delete"
    assert f"{NUM_STEPS}/{NUM_STEPS} steps" in output, "the log of worker 0 comes through"

    alone = dataclasses.replace(config, run_dir=tmp_path / "alone")
    state = train(alone)
    expected, found = (read_metrics(one.run_dir / "metrics.jsonl") for one in (alone, config))
    assert steps(config) == list(range(1, NUM_STEPS + 1))
    np.testing.assert_allclose(
        [record["train/loss"] for record in found], [record["train/loss"] for record in expected], rtol=1e-5
    )
    for devices in (jax.devices()[:1], jax.devices()[:4]):
        mesh = MeshConfig(fsdp=len(devices)).build(devices)
        assert_restored(config, state, mesh)


def assert_restored(config, expected, mesh):
    """The checkpoint of two processes, on another number of devices, holds what one process has trained."""
    places = sharding.tree_shardings(expected, mesh)
    like = jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), expected, places)
    with Checkpoints(checkpoint_dir(config.run_dir), read_only=True) as checkpoints:
        restored, _ = checkpoints.restore(like)
    assert int(restored.step) == NUM_STEPS
    tiny.assert_same_training(restored.params, expected.params)


def test_a_dry_run_only_prints_every_command(cloud):
    found = ended(command("--dry-run", "--spot", "--delete"))
    assert found.returncode == 0
    assert not (cloud / "commands.txt").exists()
    lines = found.stdout.splitlines()
    assert [" ".join(line.removeprefix("gcloud compute tpus ").split()[:2]) for line in lines] == [
        "queued-resources describe",
        "queued-resources create",
        "git archive",
        "tpu-vm scp",
        *["tpu-vm ssh"] * 4,
        "queued-resources delete",
    ]
    assert "--accelerator-type v5litepod-8 --runtime-version tpu-ubuntu2204-base --spot" in lines[1]
    assert "lit-het train --distributed --start-or-resume --config configs/quickstart_lit_deterministic.py" in lines[5]


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (["--nme", "lit"], "unknown option --nme; see scripts/train_lit.sh --help"),
        (["--zone", "us-west4-a"], "--name is missing; see scripts/train_lit.sh --help"),
        (["--env", "LIBTPU"], "--env takes NAME=VALUE"),
        (["--name", "a", "--zone", "b", "--type", "c", "--"], "no --config FILE after --; see scripts/"),
        ([*WHERE, "--", "--config", "mine.py"], "--config mine.py is not in HEAD, which workers get: commit it, or"),
        ([*WHERE, "--", "--config=configs/quickstart_upstream.py", "--resume"], "--resume is added by this script"),
    ],
)
def test_a_wrong_option_ends_in_one_line(wrong, line):
    found = ended([str(SCRIPT), *wrong])
    assert found.returncode == 1
    assert found.stderr.startswith(f"train_lit.sh: {line}")
    assert len(found.stderr.splitlines()) == 1


@pytest.mark.slow
def test_broken_connections_neither_stop_nor_restart_training(cloud):
    (cloud / "broken").write_text("2")  # before it is installed
    script = started(command(*installing("echo trains; sleep 2; touch ended; exit 0")))
    deadline = time.monotonic() + 60
    while not (cloud / "worker-0" / "lit-het" / "train.pid").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (cloud / "broken").write_text("2")  # while it trains
    output, remarks = script.communicate(timeout=60)
    assert script.returncode == 0, output + remarks
    assert remarks.count("workers do not answer; next check in 0.1 s") >= 3
    assert "resuming training" not in remarks
    assert (cloud / "worker-1" / "lit-het" / "ended").exists()
    assert sum("train.pid; }" in line for line in (cloud / "commands.txt").read_text().splitlines()) == 1


@pytest.mark.slow
def test_an_error_on_all_workers_is_not_retried(cloud):
    found = ended(command(*installing("echo wrong; exit 1")))
    assert found.returncode == 1
    assert found.stdout == "wrong\n"
    assert found.stderr.splitlines()[-1].startswith("train_lit.sh: training has ended with an error")


@pytest.mark.parametrize("code", [0, 1])
def test_a_step_that_does_not_fit_requests_no_slice(cloud, tmp_path, code):
    planner = tmp_path / "bin" / "lit-het"
    planner.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/planned.txt\nexit {code}\n')
    planner.chmod(0o755)
    of_training = ("--members", "3", "--allow-commands", "--length", "5 steps")
    run = ended([*command("--plan", "--dry-run"), *of_training])
    planned = "plan --topology v5litepod-8 --config configs/quickstart_lit_deterministic.py --length 5 steps\n"
    assert (tmp_path / "planned.txt").read_text() == planned
    assert (run.returncode, "gcloud" in run.stdout) == ((0, True) if code == 0 else (1, False))
    assert ("does not fit (--plan)" in run.stderr) == bool(code)
