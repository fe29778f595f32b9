"""A run on several processes: killed at any step, it goes on with fewer of them as if nothing had happened."""

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from lit_het.configs import experiment
from lit_het.configs.experiment import PretrainedConfig
from lit_het.data_pipelines.images.transforms import InceptionCrop
from lit_het.eval.fits import FewShotOptions
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import FewShotConfig, ZeroShotConfig
from lit_het.heads.classification_config import DeterministicConfig
from lit_het.models.opening import open_run
from lit_het.sharding import MeshConfig
from lit_het.training.cadence import Cadence
from lit_het.training.directory import config_path
from lit_het.training.durations import Duration
from lit_het.training.log import read_metrics
from tests import tiny
from tests.cli.conftest import break_first_image, changed, write_splits

pytestmark = pytest.mark.slow
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
    kill(*(process for process in processes if process.poll() is None))


@pytest.fixture
def start_pair(start):
    """Starts two processes that train a configuration together; each has a record."""

    def of(config, records, devices=1):
        address = f"localhost:{tiny.free_port()}"
        processes = [("--distributed", f"{address},{number}/2") for number in (0, 1)]
        return [
            start(config, record, *flags, devices=devices) for record, flags in zip(records, processes, strict=True)
        ]

    return of


def finish(process):
    messages = process.communicate()[1].decode()
    assert process.returncode == 0, messages


def kill(*processes):
    for process in processes:
        process.kill()
    for process in processes:
        process.communicate()


def wait_for_steps(count, config, processes):
    """Waits until the run has logged so many steps, and its processes go on."""
    deadline = time.monotonic() + 300
    while len(losses(config)) < count:
        assert time.monotonic() < deadline
        for process in processes:
            assert process.poll() is None, process.communicate()[1].decode()
        time.sleep(0.01)


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


def likelihoods(config):
    return logged(config, "supervised/words/binary_nll")


@pytest.fixture
def whole(data, upstream, tmp_path):
    """A classifier with noise in its head, augmentation and mixup: all that is random depends on position or step.

    Two devices hold half of the parameters each, of the locked ones too.
    """
    config = experiment.load(config_path(upstream))
    shapes = ImageSet("shapes", str(write_splits(data, tmp_path / "shapes", "train", "test")), batch_size=7)
    return changed(
        config,
        run_dir=tmp_path / "whole",
        length=Duration(NUM_STEPS),
        task__mixup=0.2,
        task__locked=("image_tower/patches/.*",),
        data__crop=InceptionCrop(0.5),
        pretrained=PretrainedConfig(upstream),
        mesh=MeshConfig(fsdp=2),
        cadence=Cadence(log_steps=1, save_steps=3, evaluate_steps=2),
        evaluations=(
            ZeroShotConfig(ImageSet("words", str(data / "train"), split="", batch_size=7, caption_words=True)),
            FewShotConfig(shapes, fit=FewShotOptions(shots=(2,), seeds=(0,), l2=(1.0,))),
        ),
    )


def test_a_run_killed_on_two_processes_and_resumed_on_one_has_the_samples_and_losses_of_an_undisturbed_one(
    whole, start, start_pair, tmp_path
):
    undisturbed = start(whole, tmp_path / "whole.txt", devices=4)
    killed = changed(whole, run_dir=tmp_path / "killed")
    records = [tmp_path / f"killed-{process}.txt" for process in (0, 1)]
    pair = start_pair(killed, records, devices=2)
    wait_for_steps(random.randrange(3, NUM_STEPS - 4), killed, pair)  # after the first evaluation
    kill(*pair)
    last = len(losses(killed))
    assert last < NUM_STEPS, "the kill came too late to show anything"
    before, accurate_before, likely_before = losses(killed), accuracies(killed), likelihoods(killed)
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
    assert likely_before == pytest.approx({step: likelihoods(whole)[step] for step in likely_before}, rel=1e-5)
    assert likelihoods(killed) == pytest.approx(likelihoods(whole), rel=1e-5)
    assert likely_before

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
    short = changed(whole, cadence=Cadence(log_steps=1), evaluations=(), task__head=DeterministicConfig())
    return changed(short, length=Duration(2000))


def test_a_broken_image_that_one_process_reads_ends_all_of_them(endless, data, start_pair, tmp_path):
    broken = shutil.copytree(data / "train", tmp_path / "d")
    break_first_image(broken / "shard-000001.tar")
    pair = start_pair(changed(endless, data__shards=(str(broken),)), [tmp_path / "0.txt", tmp_path / "1.txt"])
    messages = "".join(process.communicate(timeout=240)[1].decode() for process in pair)
    # Who misses the other may be started again; who has found the image would find it again.
    assert sorted(process.returncode for process in pair) == [1, 75]
    assert "1 bad of 40 samples" in messages


def test_a_process_that_lost_the_main_process_exits_with_the_code_to_restart(endless, start_pair, tmp_path):
    main, other = start_pair(endless, [tmp_path / "0.txt", tmp_path / "1.txt"])
    wait_for_steps(2, endless, [main, other])
    kill(main)
    messages = other.communicate(timeout=60)[1].decode()
    assert other.returncode == 75, messages
    assert re.search(r"lit-het: lost another process or a device .*; restart all processes", messages)


def test_an_evaluation_that_lost_a_process_exits_with_the_code_to_restart(data, upstream, tmp_path):
    shapes = write_splits(data, tmp_path / "shapes", "train", "test")
    command = [sys.executable, "-m", "tests.cli.slow_evaluation", "few-shot", "--checkpoint", upstream]
    command += ["--data", shapes, "--batch-size", "2", "--distributed"]
    address = f"localhost:{tiny.free_port()}"
    pair = [
        subprocess.Popen(
            [*map(str, command), f"{address},{process}/2"],
            env=tiny.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for process in (0, 1)
    ]
    try:
        for process in pair:
            assert process.stdout is not None
            assert b"reading\n" in process.stdout, process.communicate()[1].decode()  # as soon as there is this line
        pair[1].send_signal(signal.SIGTERM)
        messages = pair[0].communicate(timeout=60)[1].decode()
        assert pair[0].returncode == 75, messages
        assert "lit-het: lost another process or a device" in messages
        pair[1].communicate(timeout=60)
        assert pair[1].returncode == 128 + signal.SIGTERM
    finally:
        kill(*(process for process in pair if process.poll() is None))
