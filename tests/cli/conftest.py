"""Runs that many files of commands share: each is trained once for all workers, and each worker has a copy of it.

Commands write into runs (evaluations, calibrations), so that a run which workers shared would change under their hands.
"""

import dataclasses
import json
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest

from lit_het import parameters
from lit_het.apps import add_noise
from lit_het.apps.data import index
from lit_het.cli.main import main
from lit_het.configs import experiment, quickstart_lit_het_xl
from lit_het.heads.contrastive import DeterministicContrastiveConfig
from lit_het.losses.contrastive import SigmoidLoss
from lit_het.models.opening import open_run
from lit_het.training.cadence import Cadence
from lit_het.training.directory import checkpoint_dir
from lit_het.training.durations import Duration
from lit_het.training.log import MetricLog
from lit_het.training.preemption import Preempted
from lit_het.training.schedules import Schedule
from lit_het.training.train import train
from lit_het.weights.native.folders import complete_steps
from lit_het.weights.native.saved_step import SavedStep
from tests import tiny
from tests.cli.shape_sweeps import (  # noqa: F401  # pyright: ignore[reportUnusedImport]
    classifier,
    fitted,
    small,
    star,
)
from tests.cli.tiny_decoder import train_decoder
from tests.scripts.conftest import write_config_file
from tests.weights.conftest import transformers  # noqa: F401  # pyright: ignore[reportUnusedImport]


@pytest.fixture(scope="package", autouse=True)
def read_once() -> Iterator[None]:
    """Orbax reads the same files once: commands open the same few runs, which would take an eighth of their time."""
    read, found = SavedStep._items, {}

    def items(step: SavedStep, wanted: dict[str, Any]) -> dict[str, Any]:
        leaves, tree = jax.tree.flatten(wanted)
        if "optimizer" in wanted or any(isinstance(leaf, jax.Array) for leaf in leaves):  # of a run that goes on
            return read(step, wanted)
        files = [(str(path.relative_to(step.folder)), path.stat()) for path in sorted(step.folder.rglob("*"))]
        key = (tree, *leaves, *((name, stat.st_mtime_ns, stat.st_size) for name, stat in files))
        if key not in found:
            found[key] = read(step, wanted)
        return jax.tree.map(copy, found[key])

    def copy(leaf: Any) -> Any:  # training overwrites its arrays
        return jax.device_put(np.array(leaf), leaf.sharding) if isinstance(leaf, jax.Array) else leaf

    with mock.patch.object(SavedStep, "_items", items):
        yield


@pytest.fixture(scope="session")
def data(once):
    return once("cli_data", lambda folder: index([str(tiny.write_data(folder) / "train")], workers=1))


@pytest.fixture(scope="session")
def upstream(data, once):
    """A trained classifier whose image tower LiT locks; tests only read it."""
    config = quickstart_lit_het_xl.get_config()
    return once("cli_upstream", lambda folder: train(tiny.classifier(config, data, folder / "upstream"))) / "upstream"


@pytest.fixture
def lit_config(data, upstream, tmp_path):
    """A small LiT experiment with a HET-XL head that writes to a fresh directory."""
    return tiny.shrink(quickstart_lit_het_xl.get_config(), data, tmp_path / "lit", pretrained=upstream)


@pytest.fixture
def config_file(lit_config, tmp_path):
    """The same experiment as a configuration file, for the command line."""
    return write_config_file(lit_config, tmp_path / "lit_config.py")


@pytest.fixture(scope="session")
def own_copy(once, tmp_path_factory):
    """Returns a folder that is made once, as a copy that this worker may write to."""

    def copy(name, make):
        return shutil.copytree(once(name, make), tmp_path_factory.mktemp(name) / "copy")

    return copy


@pytest.fixture(scope="session")
def trained_lit(data, upstream, own_copy):
    """The configuration of a finished LiT run; tests only read it."""
    config = tiny.shrink(quickstart_lit_het_xl.get_config(), data, Path(), pretrained=upstream)
    folder = own_copy("cli_lit", lambda folder: train(dataclasses.replace(config, run_dir=folder / "lit")))
    return dataclasses.replace(config, run_dir=folder / "lit")


@pytest.fixture(scope="session")
def held_out(once):
    """Shards of 160 images that no run was trained on; some captions are wrong, so that a temperature fits."""

    def write(folder):
        index([str(tiny.write_data(folder, num_samples=160, seed=1, every_wrong=7) / "train")], workers=1)

    return once("cli_held_out", write) / "train"


@pytest.fixture(scope="session")
def trained(data, upstream, own_copy):
    """A run with noise that was trained long enough to be better than chance; tests only read it."""

    def train_long(folder):
        config = tiny.shrink(quickstart_lit_het_xl.get_config(), data, folder / "long", pretrained=upstream)
        cadence, schedule = Cadence(log_steps=20, save_steps=60), Schedule(3e-3, warmup=Duration(5))
        train(dataclasses.replace(config, length=Duration(60), schedule=schedule, cadence=cadence))

    return own_copy("cli_long", train_long) / "long"


@pytest.fixture(scope="session")
def once_calibrated(trained, held_out, own_copy):
    def calibrate(folder):
        run_dir = shutil.copytree(trained, folder / "run")
        assert main(["calibrate", str(run_dir), "--data", str(held_out)]) == 0

    return own_copy("cli_calibrated", calibrate) / "run"


@pytest.fixture
def calibrated(once_calibrated, tmp_path):
    """A calibrated run that a test may change."""
    return shutil.copytree(once_calibrated, tmp_path / "run")


@pytest.fixture(scope="session")
def decoder(once, tmp_path_factory):
    """The configuration of a trained decoder of captions and answers; tests only read its run."""
    run_dir = once("cli_decoder", train_decoder) / "run"
    own = shutil.copytree(run_dir, tmp_path_factory.mktemp("decoder") / "run")
    return dataclasses.replace(experiment.load(run_dir / "config.json"), run_dir=own)


def refusal(capsys, *arguments) -> str:
    """Runs a command that must fail with one line, beside progress; returns the line."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) != 0
    lines = capsys.readouterr().err.strip().splitlines()
    lines = [line for line in lines if not line.startswith("indexing: ") and " as suspects of " not in line]
    assert len(lines) == 1, lines
    assert lines[0].startswith("lit-het: ")
    return lines[0]


@pytest.fixture(scope="session")
def pairs(once):
    """Shards of as many pairs as noise is learned from; those that no run was trained on."""

    def write(folder):
        index([str(tiny.write_data(folder, num_samples=add_noise.LEAST_PAIRS, seed=3) / "train")], workers=1)

    return once("cli_pairs", write) / "train"


@pytest.fixture(scope="session")
def sigmoid_lit(data, upstream, once):
    """The folder of a LiT run of pairs, without noise, that has its initial parameters; tests only read it."""

    def write(folder):
        config = tiny.shrink(quickstart_lit_het_xl.get_config(), data, folder / "run", pretrained=upstream)
        head = DeterministicContrastiveConfig(initial_bias=-1.0)
        task = dataclasses.replace(config.task, head=head, loss=SigmoidLoss())
        tiny.finish_untrained(dataclasses.replace(config, task=task))

    return once("cli_sigmoid", write) / "run"


@pytest.fixture
def shapes(data, tmp_path):
    """The shapes as a set with two splits, and captions."""
    return write_splits(data, tmp_path / "shapes", "train", "test")


def write_splits(data: Path, folder: Path, *splits: str) -> Path:
    """Writes the shapes as a set with splits, all of the same images."""
    for split in splits:
        shutil.copytree(data / "train", folder / split)
    shutil.copy(data / "train" / "classnames.txt", folder)
    return folder


def run_command(*arguments: object) -> None:
    """Runs a command that must succeed."""
    assert main([str(argument) for argument in arguments]) == 0


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    """Returns what a command prints as JSON."""
    capsys.readouterr()
    run_command(*arguments)
    return json.loads(capsys.readouterr().out)


def last_line(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Runs a command that must fail, and returns its last line; others are progress and warnings."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said
    line = said.strip().splitlines()[-1]
    assert line.startswith("lit-het: ")
    return line


@pytest.fixture
def siglip(tmp_path: Path) -> Path:
    """The recorded two towers as the file that big_vision would have written."""
    with np.load(Path(__file__).parents[1] / "golden" / "two_towers_siglip.npz") as golden:
        arrays = {name: array for name, array in golden.items() if name.startswith("params/")}
    np.savez(tmp_path / "siglip.npz", **arrays)
    return tmp_path / "siglip.npz"


def break_first_image(shard: Path) -> None:
    """Makes the first image of a shard one that cannot be decoded."""
    content = bytearray(shard.read_bytes())
    start = content.index(b"\xff\xd8\xff")
    content[start : start + 4] = b"oops"
    shard.write_bytes(content)


def changed(config: Any, **fields: Any) -> Any:
    """Returns a configuration with other fields; two underscores lead into a field: ``task__head=head``."""
    inner = {name.partition("__")[0]: {} for name in fields if "__" in name}
    for name, value in fields.items():
        outer, _, rest = name.partition("__")
        if rest:
            inner[outer][rest] = value
    given = {name: value for name, value in fields.items() if "__" not in name}
    return dataclasses.replace(
        config, **given, **{outer: changed(getattr(config, outer), **values) for outer, values in inner.items()}
    )


def assert_resumes_to_the_same_parameters(config: Any, folder: Path) -> None:
    """Continues a copy of a finished run from the step that was saved before its last one."""
    again = changed(config, run_dir=shutil.copytree(config.run_dir, folder / "again"))
    shutil.rmtree(checkpoint_dir(again.run_dir) / str(config.length.amount))
    assert int(train(again, resume=True).step) == config.length.amount
    expected, found = (parameters.flatten(open_run(one.run_dir).params) for one in (config, again))
    for path, x in expected.items():
        np.testing.assert_array_equal(found[path], x, err_msg=path)


def stop_and_resume(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trains a run that is stopped after its first step, and then from its checkpoint to its end.

    What it is compared with is trained by the same worker: on a CPU with AMX another one, which compiled other programs
    before, was seen to round the same step differently.
    """
    write = MetricLog.write

    def write_and_stop(log, step, values):
        write(log, step, values)
        if step == 1:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(MetricLog, "write", write_and_stop)
        with pytest.raises(Preempted):
            train(config)
    assert 0 < max(complete_steps(checkpoint_dir(config.run_dir))) < config.length.amount
    train(config, resume=True)
