"""A run on several processes: killed at any step, it goes on with fewer of them as if nothing had happened."""

import dataclasses
import json
import random
import re
import shutil
import subprocess
import sys
import time

import pytest

from lit_het.configs import experiment
from lit_het.configs.experiment import PretrainedConfig
from lit_het.data_pipelines.transforms import InceptionCrop
from lit_het.durations import Duration
from lit_het.eval.fits import FewShotOptions
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import FewShotConfig
from lit_het.heads.deterministic import DeterministicConfig
from lit_het.runs.directory import config_path
from lit_het.runs.opening import open_run
from lit_het.sharding import MeshConfig
from lit_het.training.loop import Cadence
from lit_het.training.metric_log import read_metrics
from tests import tiny

NUM_STEPS, BATCH_SIZE = 12, 16


@pytest.fixture
def start():
    """Starts a process that trains a configuration on so many devices of its own; none outlives the test."""
    processes = []

    def of(config, record, *flags, devices=1):
        path = record.with_suffix(".json")
        experiment.save(config, path)
        command = [sys.executable, "-m", "tests.cli.elastic_run", "--record", record, "--config", path, *flags]
        process = subprocess.Popen(command, env=tiny.environment(devices), stderr=subprocess.PIPE)
        processes.append(process)
        return process

    yield of
    for process in processes:
        if process.poll() is None:
            process.kill()
            process.communicate()


def finish(process):
    messages = process.communicate()[1].decode()
    assert process.returncode == 0, messages


def kill_at(records, config, processes):
    """Kills all processes as soon as the run has logged so many steps; returns how many it has logged then."""
    deadline = time.monotonic() + 300
    while len(losses(config)) < records:
        assert time.monotonic() < deadline
        for process in processes:
            assert process.poll() is None, process.communicate()[1].decode()
        time.sleep(0.01)
    for process in processes:
        process.kill()
    for process in processes:
        process.communicate()
    last = len(losses(config))
    assert last < NUM_STEPS, "the kill came too late to show anything"
    return last


def keys_by_position(*records):
    """Returns the sample that was read at each position of the stream; processes must not contradict one another."""
    found = {}
    for line in (line for record in records for line in record.read_text().splitlines()):
        batch = json.loads(line)
        for position, key in zip(batch["positions"], batch["keys"], strict=True):
            assert found.setdefault(position, key) == key
    return found


def logged(config, name):
    records = read_metrics(config.run_dir / "metrics.jsonl")
    return {record["step"]: record[name] for record in records if name in record}


def losses(config):
    return logged(config, "train/loss")


def accuracies(config):
    return logged(config, "few_shot/shapes/2_shot")


@pytest.fixture
def whole(data, upstream, tmp_path):
    """A classifier with noise in its head, augmentation and mixup: all that is random depends on position or step.

    Two devices hold half of the parameters each, of the locked ones too.
    """
    config = experiment.load(config_path(upstream))
    shutil.copytree(data / "train", tmp_path / "shapes" / "test")
    shutil.copytree(data / "train", tmp_path / "shapes" / "train")
    shutil.copy(data / "train" / "classnames.txt", tmp_path / "shapes")
    shapes = ImageSet("shapes", str(tmp_path / "shapes"), batch_size=7)
    return dataclasses.replace(
        config,
        run_dir=tmp_path / "whole",
        length=Duration(NUM_STEPS),
        task=dataclasses.replace(config.task, mixup=0.2, locked=("image_tower/patches/.*",)),
        data=dataclasses.replace(config.data, crop=InceptionCrop(0.5)),
        pretrained=PretrainedConfig(upstream),
        mesh=MeshConfig(fsdp=2),
        cadence=Cadence(log_steps=1, save_steps=3, evaluate_steps=1),
        evaluations=(FewShotConfig(shapes, fit=FewShotOptions(shots=(2,), seeds=(0,), l2=(1.0,))),),
    )


def test_a_run_killed_on_two_processes_and_resumed_on_one_has_the_samples_and_losses_of_an_undisturbed_one(
    whole, start, tmp_path
):
    undisturbed = start(whole, tmp_path / "whole.txt", devices=4)
    killed = dataclasses.replace(whole, run_dir=tmp_path / "killed")
    records = [tmp_path / f"killed-{process}.txt" for process in (0, 1)]
    address = f"localhost:{tiny.free_port()}"
    pair = [start(killed, record, "--distributed", f"{address},{i}/2", devices=2) for i, record in enumerate(records)]
    last = kill_at(random.randrange(2, NUM_STEPS - 4), killed, pair)  # after the first evaluation
    before, accurate_before = losses(killed), accuracies(killed)
    # On how many devices else a checkpoint can be restored, tests/scripts/test_train_lit.py tells.
    resumed = start(killed, tmp_path / "resumed.txt", "--resume", devices=4)
    for process in (undisturbed, resumed):
        finish(process)

    expected = losses(whole)
    assert list(expected) == list(range(1, NUM_STEPS + 1))
    # Two processes add up four devices' gradients in another order than one.
    assert before == pytest.approx({step: loss for step, loss in expected.items() if step <= last}, rel=1e-5)
    assert losses(killed) == pytest.approx(expected, rel=1e-5)
    tiny.assert_same_training(*(open_run(config.run_dir).params for config in (killed, whole)))
    # Two processes read half of the evaluation's images each, and both see all features.
    assert accurate_before
    assert accurate_before == {step: value for step, value in accuracies(whole).items() if step in accurate_before}
    assert accuracies(killed) == accuracies(whole)

    samples = keys_by_position(tmp_path / "whole.txt")
    consumed = set(range(NUM_STEPS * BATCH_SIZE))
    resumed_from = min(keys_by_position(tmp_path / "resumed.txt")) // BATCH_SIZE
    assert resumed_from in {step for step in (0, *range(3, NUM_STEPS, 3)) if step <= last}, last
    both = keys_by_position(*records, tmp_path / "resumed.txt")
    assert consumed <= both.keys()
    assert {p: both[p] for p in consumed} == {p: samples[p] for p in consumed}


@pytest.fixture
def endless(whole):
    """A long run that draws no noise, whose step is compiled sooner and once for the tests below."""
    task = dataclasses.replace(whole.task, head=DeterministicConfig())
    return dataclasses.replace(whole, length=Duration(2000), cadence=Cadence(log_steps=1), evaluations=(), task=task)


def test_a_broken_image_that_one_process_reads_ends_all_of_them(endless, data, start, tmp_path):
    broken = tmp_path / "d"
    shutil.copytree(data / "train", broken)
    shard = broken / "shard-000001.tar"
    content = bytearray(shard.read_bytes())
    place = content.index(b"\xff\xd8\xff")
    content[place : place + 4] = b"oops"
    shard.write_bytes(content)
    config = dataclasses.replace(endless, data=dataclasses.replace(endless.data, shards=(str(broken),)))
    address = f"localhost:{tiny.free_port()}"
    pair = [start(config, tmp_path / f"{i}.txt", "--distributed", f"{address},{i}/2") for i in (0, 1)]
    messages = "".join(process.communicate(timeout=240)[1].decode() for process in pair)
    # Who misses the other may be started again; who has found the image would find it again.
    assert sorted(process.returncode for process in pair) == [1, 75]
    assert "1 bad of 40 samples" in messages


@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_lost_another_exits_with_the_code_to_restart(endless, start, tmp_path, victim):
    address = f"localhost:{tiny.free_port()}"
    pair = [start(endless, tmp_path / f"{i}.txt", "--distributed", f"{address},{i}/2") for i in (0, 1)]
    deadline = time.monotonic() + 240
    while len(losses(endless)) < 2:
        assert time.monotonic() < deadline
        assert [process.poll() for process in pair] == [None, None], pair[0].communicate()[1].decode()
        time.sleep(0.02)
    pair[victim].kill()
    pair[victim].communicate()
    messages = pair[1 - victim].communicate(timeout=60)[1].decode()
    assert pair[1 - victim].returncode == 75, messages
    assert re.search(r"lit-het: lost another process or a device .*; restart all processes", messages)
