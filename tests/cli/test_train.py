"""Training from the command line: kills, resumption, flags, and what is refused."""

import dataclasses
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time

import jax
import pytest

from lit_het import parameters
from lit_het.cli.main import main
from lit_het.configs import experiment, quickstart_lit_het_xl
from lit_het.data_pipelines.data_config import Streaming
from lit_het.heads.contrastive import DeterministicContrastiveConfig
from lit_het.models.opening import open_run
from lit_het.models.pretrained import abstract_params
from lit_het.training.cadence import Cadence
from lit_het.training.directory import checkpoint_dir
from lit_het.training.durations import Duration
from lit_het.training.lock import locked
from lit_het.training.log import MetricLog, read_metrics
from lit_het.training.train import train, train_unless_done
from lit_het.weights.native.saving import Checkpoints, checksums
from tests import tiny
from tests.cli.conftest import changed, refusal, write_config_file
from tests.training.test_tracking import Service

# A training whose steps take so long, once there is a save, that a signal comes before its end.
SLOW = """
import sys, time
from lit_het.cli.main import main
from lit_het.training.metric_log import MetricLog

write = MetricLog.write
MetricLog.write = lambda log, step, values: (write(log, step, values), time.sleep(step > 6 and 0.3))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_a_run_killed_twice_and_resumed_equals_an_uninterrupted_one_bit_by_bit(
    capsys, lit_config, tmp_path, monkeypatch
):
    environment = tiny.environment()
    config = dataclasses.replace(lit_config, length=Duration(24), cadence=Cadence(log_steps=1, save_steps=6))
    train(config)
    killed = dataclasses.replace(config, run_dir=tmp_path / "killed")
    command = ["train", "--config", str(write_config_file(killed, tmp_path / "killed.py"))]
    metrics = killed.run_dir / "metrics.jsonl"
    process = subprocess.Popen([sys.executable, "-c", SLOW, *command], env=environment, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 300
    while len(read_metrics(metrics)) < 8:
        assert process.poll() is None, process.communicate()[1].decode()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    messages = process.communicate()[1].decode()
    assert process.returncode == -signal.SIGKILL, messages
    assert len(read_metrics(metrics)) < config.length.amount - 10, "the kill came too late to show anything"

    monkeypatch.setattr(sys, "argv", ["lit-het", *command, "--resume"])
    last, write = config.length.amount - 8, MetricLog.write

    def write_and_signal(log, step, values):
        write(log, step, values)
        if step == last:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(MetricLog, "write", write_and_signal)
        assert main([*command, "--resume"]) == 75
    assert f"lit-het: ended by SIGTERM after step {last + 1}, which is saved; --resume" in capsys.readouterr().err
    assert main([*command, "--resume"]) == 0
    starts = [json.loads(line) for line in (killed.run_dir / "starts.jsonl").read_text().splitlines()]
    assert ["--resume" in start["command"] for start in starts] == [False, True, True]
    assert set(starts[0]["environment"]) <= {name for name in environment if name.startswith(("XLA", "JAX", "LIBTPU"))}
    assert starts[0]["versions"]["jax"] == jax.__version__

    losses = [
        [(record["step"], record["train/loss"]) for record in read_metrics(run / "metrics.jsonl")]
        for run in (config.run_dir, killed.run_dir)
    ]
    assert [step for step, _ in losses[0]] == list(range(1, config.length.amount + 1))
    assert losses[0] == losses[1]
    assert _final_checksum(config.run_dir, config) == _final_checksum(killed.run_dir, config)


def _final_checksum(run_dir, config):
    like = abstract_params(config.task.build())
    _, trainable = parameters.partition(like, config.task.locked)
    with Checkpoints(checkpoint_dir(run_dir)) as checkpoints:
        assert checkpoints.latest_step == config.length.amount
        return checksums.digest(checkpoints.restore_params(trainable)[0])


def test_the_checkpoint_holds_no_locked_parameter_and_the_run_has_those_of_upstream_bit_by_bit(trained_lit, upstream):
    with Checkpoints(checkpoint_dir(trained_lit.run_dir)) as checkpoints:
        _, fingerprints = checkpoints.at(checkpoints.newest_step()).read_info()
    assert {path.split("/")[1] for path in fingerprints if path.startswith("params/")} == {"text_tower", "head"}
    run = open_run(trained_lit.run_dir)
    locked, _ = parameters.partition(run.params, ("image_tower/.*",))
    with Checkpoints(checkpoint_dir(upstream)) as checkpoints:
        source, _ = checkpoints.restore_params(locked)
    assert checksums.digest(locked) == checksums.digest(source)


def test_a_flag_changes_the_field_with_its_dotted_path(config_file, tmp_path):
    flags = ["--length", "2", "--task.head.covariance.num-factors", "3", "--run-dir", str(tmp_path / "flagged")]
    with tiny.untrained():
        assert main(["train", "--config", str(config_file), *flags]) == 0
    config = experiment.load(tmp_path / "flagged" / "config.json")
    assert config.length.amount == 2
    assert experiment.fields(config)["task.head.covariance.num_factors"] == 3


@pytest.mark.slow
def test_a_run_of_an_epoch_is_opened_with_its_average_and_left_alone_once_done(lit_config, monkeypatch):
    head = DeterministicContrastiveConfig()  # whose step is traced sooner
    config = changed(lit_config, length=Duration(1, "epochs"), average_decay=0.75, task__head=head)
    state = train(config)
    assert int(state.step) == tiny.NUM_SAMPLES // config.data.batch_size == 2
    opened = checksums.digest({part: open_run(config.run_dir).params[part] for part in state.params})
    assert opened == checksums.digest(state.evaluated) != checksums.digest(state.params)
    with monkeypatch.context() as patch:
        patch.setattr("lit_het.training.train.train", lambda *_, **__: pytest.fail("trained once more"))
        train_unless_done(config)
    arrays = max((config.run_dir / "checkpoints" / "2").rglob("d/*"), key=lambda path: path.stat().st_size)
    arrays.write_bytes(arrays.read_bytes()[:1000])
    again = []
    monkeypatch.setattr("lit_het.training.train.train", lambda config, resume, **_: again.append(resume))
    train_unless_done(config)
    assert again == [True], "what is done, and damaged, is not done"


def test_a_second_run_in_the_same_directory_is_refused_and_nothing_is_lost(capsys, trained_lit, tmp_path):
    before = sorted(path.name for path in trained_lit.run_dir.rglob("*"))
    line = refusal(capsys, "train", "--config", write_config_file(trained_lit, tmp_path / "again.py"))
    assert "already holds a run" in line
    assert "--resume" in line
    assert sorted(path.name for path in trained_lit.run_dir.rglob("*")) == before


@pytest.mark.parametrize("flag", ["--resume", "--start-or-resume"])
def test_a_start_beside_one_that_trains_is_refused_and_leaves_its_half_written_save_alone(
    capsys, trained_lit, tmp_path, flag
):
    run = shutil.copytree(trained_lit.run_dir, tmp_path / "run")
    file = write_config_file(dataclasses.replace(trained_lit, run_dir=run), tmp_path / "again.py")
    folder = checkpoint_dir(run)
    half_written = (folder / str(trained_lit.length.amount)).rename(folder / "4.orbax-checkpoint-tmp")
    with locked(run, pytest.fail):
        line = refusal(capsys, "train", "--config", file, flag)
    assert f"{run} is in use: process {os.getpid()} on " in line
    assert half_written.is_dir()


def test_resuming_with_another_model_names_the_field_and_both_values(capsys, trained_lit, tmp_path):
    path = write_config_file(trained_lit, tmp_path / "other.py")
    line = refusal(capsys, "train", "--config", path, "--resume", "--task.head.num-samples", 4)
    assert "task.head.num_samples was 16 and is now 4" in line


def test_locked_parameters_without_a_source_are_refused(capsys, lit_config, tmp_path):
    path = write_config_file(dataclasses.replace(lit_config, pretrained=None), tmp_path / "nothing.py")
    assert "--pretrained.run" in refusal(capsys, "train", "--config", path)


@pytest.mark.parametrize(("damage", "expected"), [("missing caption", "0003"), ("truncated tar", "truncated")])
def test_a_damaged_shard_is_one_line_that_says_where(capsys, lit_config, tmp_path, damage, expected):
    shards = tiny.write_data(tmp_path / "damaged") / "train"
    shard = sorted(shards.glob("*.tar"))[0]
    if damage == "truncated tar":
        shard.write_bytes(shard.read_bytes()[:5000])
    else:
        _rewrite(shard, damage)
    config = dataclasses.replace(lit_config, data=dataclasses.replace(lit_config.data, shards=(str(shards),)))
    line = refusal(capsys, "train", "--config", write_config_file(config, tmp_path / "damaged.py"))
    assert shard.name in line
    assert expected in line


def _rewrite(shard, damage):
    with tarfile.open(shard) as tar:
        members = [(member, shard.read_bytes()[member.offset_data :][: member.size]) for member in tar.getmembers()]
    with tarfile.open(shard, "w") as tar:
        for member, content in members:
            if member.name == "0003.txt" and damage == "missing caption":
                continue
            if member.name == "0003.jpg" and damage == "broken image":
                content = content[:40]
                member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize("duplicates", ["positives", "negatives"])
def test_a_batch_larger_than_the_data_says_what_copies_count_as(capsys, lit_config, tmp_path, duplicates):
    file = write_config_file(dataclasses.replace(lit_config, length=Duration(2)), tmp_path / "wide.py")
    flags = ("--data.batch-size", "64", "--task.loss.duplicates", duplicates)
    with tiny.untrained():
        assert main(["train", "--config", str(file), *flags]) == 0
    line = f"a batch of 64 holds copies of the {tiny.NUM_SAMPLES} samples: they count as {duplicates}"
    assert line in capsys.readouterr().err


def test_a_batch_of_one_pair_is_refused(capsys, lit_config, tmp_path):
    file = write_config_file(lit_config, tmp_path / "one.py")
    line = refusal(capsys, "train", "--config", file, "--data.batch-size", "1", "--mesh.data", "1")
    assert "a batch of 1 image-text pair has no negatives, and its contrastive loss teaches nothing; raise" in line
    assert not lit_config.run_dir.exists() or not (lit_config.run_dir / "config.json").exists()


def test_a_batch_that_does_not_fit_into_memory_is_one_line(capsys, config_file, monkeypatch):
    def exhausted(*_, **__):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 30397065280 bytes.\nmore")

    monkeypatch.setattr("lit_het.training.train.loop.train", exhausted)
    line = refusal(capsys, "train", "--config", config_file)
    assert "Out of memory allocating 30397065280 bytes.); lower --data.batch-size or raise --task.microbatches" in line


@pytest.mark.slow
def test_a_run_that_failed_on_a_broken_image_can_be_restarted_without_it_as_the_message_says(
    capsys, lit_config, tmp_path
):
    shards = tiny.write_data(tmp_path / "damaged") / "train"
    shard = sorted(shards.glob("*.tar"))[0]
    _rewrite(shard, "broken image")
    data = dataclasses.replace(lit_config.data, shards=(str(shards),))
    path = write_config_file(dataclasses.replace(lit_config, data=data), tmp_path / "damaged.py")
    line = refusal(capsys, "train", "--config", path)
    for text in (shard.name, "0003", "--data.max-bad-fraction"):
        assert text in line
    assert main(["train", "--config", str(path), "--data.max-bad-fraction", "0.1"]) == 0
    records = read_metrics(lit_config.run_dir / "metrics.jsonl")
    steps = [record["step"] for record in records]
    assert steps == sorted(set(steps))
    assert min(record["train/valid"] for record in records) == data.batch_size - 1
    assert "already holds a run" in refusal(capsys, "train", "--config", path)


@pytest.mark.slow
def test_a_stream_of_a_command_is_trained_on_and_resumed_with_other_draws(capsys, lit_config, tmp_path):
    address = f"pipe:cat {lit_config.data.shards[0]}/shard-00000{{0..1}}.tar"
    data = dataclasses.replace(lit_config.data, shards=(address,), stream=Streaming(100))
    config = dataclasses.replace(lit_config, data=data)
    path = write_config_file(config, tmp_path / "stream.py")
    command = ["train", "--config", str(path), "--data.stream.shuffle-buffer", "30"]
    assert main(command) == 0
    assert experiment.load(config.run_dir / "config.json").data.stream == Streaming(30)
    capsys.readouterr()
    shutil.rmtree(checkpoint_dir(config.run_dir) / "4")  # as if the run had been killed after step 2
    assert main([*command, "--resume"]) == 0
    assert "a stream cannot seek; it continues with new samples" in capsys.readouterr().err
    assert [record["step"] for record in read_metrics(config.run_dir / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_service_gets_the_metrics_of_a_training_and_a_missing_one_ends_it_before_it_reads_data(
    capsys, config_file, lit_config, monkeypatch
):
    monkeypatch.setitem(sys.modules, "trackio", None)
    flags = ("--log", "trackio", "--data.shards", "/no/such/shards")
    assert "--log trackio needs the package trackio" in refusal(capsys, "train", "--config", config_file, *flags)
    assert not lit_config.run_dir.exists()
    service = Service()
    monkeypatch.setitem(sys.modules, "trackio", service)
    assert main(["train", "--config", str(config_file), "--log", "trackio"]) == 0
    assert service.records == read_metrics(lit_config.run_dir / "metrics.jsonl")
    assert service.runs[0]["config"]["task.head.num_samples"] == 16


def test_a_classifier_with_the_wrong_number_of_classes_is_refused(capsys, data, tmp_path):
    config = tiny.classifier(quickstart_lit_het_xl.get_config(), data, tmp_path / "run")
    config = dataclasses.replace(config, task=dataclasses.replace(config.task, num_classes=9))
    line = refusal(capsys, "train", "--config", write_config_file(config, tmp_path / "wrong.py"))
    assert "the data has 6 classes, the task has 9" in line


def test_metrics_of_a_run_are_json_lines_with_the_documented_names(trained_lit, upstream):
    lines = (trained_lit.run_dir / "metrics.jsonl").read_text().splitlines()
    names = {"step", "train/loss", "train/temperature", "train/image_noise_norm", "train/text_noise_norm"}
    assert all(names <= json.loads(line).keys() for line in lines)
    # Counting right partners would take all logits of a batch.
    assert not any("train/top1" in json.loads(line) for line in lines)
    assert all(0 <= record["train/top1"] <= 1 for record in read_metrics(upstream / "metrics.jsonl"))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--lenght", "3"), "unknown flag --lenght; did you mean --length?"),
        (("--data.shards", "/no/such/shards"), "/no/such/shards"),
        pytest.param(
            ("--data.batch-size", "12"),
            "batch size 12 is not divisible by the 8 devices ... --data.batch-size 8 or 16",
            marks=pytest.mark.devices,
        ),
        (
            ("--task.image-tower.encoder.num-heads", "4"),
            "encoder.num_heads = 2 ... --task.image-tower.encoder.num-heads 2",
        ),
        (("--tokenizer.length", "9"), "--tokenizer.length"),
        (("--length", "many"), "--length"),
        (("--length", "20 percent"), "--length 20 percent must be a positive number of steps, examples or epochs"),
        (("--schedule.warmup", "3 weeks"), "--schedule.warmup: '3 weeks' is not a duration"),
        (("--average-decay", "1"), "--average-decay 1.0 must be at least 0 and below 1"),
        (("--schedule.learning-rate", "0"), "--schedule.learning-rate 0.0 must be positive"),
        (("--schedule.learning-rate", "nan"), "--schedule.learning-rate nan must be positive and finite"),
        (("--optimizer.weight-decay", "nan"), "--optimizer.weight-decay nan must be at least 0"),
        (("--distributed", "localhost:70000,0/2"), "--distributed localhost:70000,0/2 is malformed"),
        (("--cadence.log-steps", "0"), "lit-het: --cadence.log-steps 0 must be at least 1"),
        (("--mesh.fsdp", "0"), "lit-het: --mesh.fsdp 0 must be at least 1"),
        (("--task.head.num-samples", "-1"), "lit-het: --task.head.num-samples -1 must be at least 0"),
        (("--task.head.num-samples", "0"), "task.loss.likelihood = 'samples' does not fit task.head.num_samples = 0"),
        (("--data.threads", "-1"), "lit-het: --data.threads -1 must be at least 0"),
    ],
)
def test_a_value_that_cannot_work_is_one_line_with_the_field(capsys, config_file, flags, expected):
    line = refusal(capsys, "train", "--config", config_file, *flags)
    for part in expected.split(" ... "):
        assert part in line


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("def get_config(:\n", "(broken.py, line 1); fix the file"),
        ("import no_such_module\n", "line 1: ModuleNotFoundError"),
        ("def get_config():\n    return 3\n", "returns int, not ExperimentConfig"),
    ],
)
def test_a_configuration_file_that_is_broken_is_one_line(capsys, tmp_path, content, expected):
    (tmp_path / "broken.py").write_text(content)
    assert expected in refusal(capsys, "train", "--config", tmp_path / "broken.py")
