import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from lit_het.cli.main import main
from lit_het.configs import experiment, quickstart_lit_het_xl
from lit_het.durations import Duration
from lit_het.runs.training import train
from lit_het.schedules import Schedule
from lit_het.training.loop import Cadence
from tests import tiny
from tests.cli.tiny_decoder import train_decoder


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return tiny.write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def upstream(data, tmp_path_factory):
    """A trained classifier whose image tower LiT locks."""
    config = tiny.classifier(quickstart_lit_het_xl.get_config(), data, tmp_path_factory.mktemp("runs") / "upstream")
    train(config)
    return config.run_dir


@pytest.fixture
def lit_config(data, upstream, tmp_path):
    """A small LiT experiment with a HET-XL head that writes to a fresh directory."""
    return tiny.shrink(quickstart_lit_het_xl.get_config(), data, tmp_path / "lit", pretrained=upstream)


@pytest.fixture
def config_file(lit_config, tmp_path):
    """The same experiment as a configuration file, for the command line."""
    return write_config_file(lit_config, tmp_path / "lit_config.py")


@pytest.fixture(scope="session")
def trained_lit(data, upstream, tmp_path_factory):
    """A finished LiT run; tests only read it."""
    run_dir = tmp_path_factory.mktemp("runs") / "lit"
    config = tiny.shrink(quickstart_lit_het_xl.get_config(), data, run_dir, pretrained=upstream)
    train(config)
    return config


@pytest.fixture(scope="session")
def held_out(tmp_path_factory):
    """Shards of 160 images that no run was trained on; some captions are wrong, so that a temperature fits."""
    return tiny.write_data(tmp_path_factory.mktemp("held_out"), num_samples=160, seed=1, every_wrong=7) / "train"


@pytest.fixture(scope="session")
def trained(data, upstream, tmp_path_factory):
    """A run with noise that was trained long enough to be better than chance; tests only read it."""
    run_dir = tmp_path_factory.mktemp("runs") / "long"
    config = tiny.shrink(quickstart_lit_het_xl.get_config(), data, run_dir, pretrained=upstream)
    cadence, schedule = Cadence(log_steps=20, save_steps=60), Schedule(3e-3, warmup=Duration(5))
    train(dataclasses.replace(config, length=Duration(60), schedule=schedule, cadence=cadence))
    return run_dir


@pytest.fixture(scope="session")
def once_calibrated(trained, held_out, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("calibrated") / "run"
    shutil.copytree(trained, run_dir)
    assert main(["calibrate", str(run_dir), "--data", str(held_out)]) == 0
    return run_dir


@pytest.fixture
def calibrated(once_calibrated, tmp_path):
    """A calibrated run that a test may change."""
    return shutil.copytree(once_calibrated, tmp_path / "run")


@pytest.fixture(scope="session")
def decoder(tmp_path_factory):
    """The configuration of a trained decoder of captions and answers; tests only read its run."""
    return train_decoder(tmp_path_factory.mktemp("decoder"))


def write_config_file(config, path):
    saved = path.with_suffix(".json")
    saved.write_text(json.dumps(experiment.to_dict(dataclasses.replace(config))))
    path.write_text(
        "from pathlib import Path\n"
        "from lit_het.configs import experiment\n\n\n"
        f"def get_config():\n    return experiment.load(Path({str(saved)!r}))\n"
    )
    return path


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
