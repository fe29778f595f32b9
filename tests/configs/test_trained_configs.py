"""Every kind of configuration trains, in small, and resumes to the same bits."""

import dataclasses
import functools
import itertools
import shutil
from pathlib import Path

import numpy as np
import pytest

from lit_het.configs import experiment
from lit_het.configs.experiment import ExperimentConfig
from lit_het.training.directory import checkpoint_dir, config_path
from lit_het.training.log import read_metrics
from lit_het.training.train import train
from lit_het.types import TrainState
from lit_het.weights.native import checksums
from lit_het.weights.native.saving import save_imported
from tests import tiny
from tests.towers.models import like_initial

# One of a family: these differ in heads, experts, locked towers, shardings and optimizers; tests/frozen/test_runs.py
# resumes each kind of task. Two show that parameters and experts are split over devices.
pytestmark = pytest.mark.slow
TRAINED = [
    Path("configs/glyph_classifier.py"),
    pytest.param(Path("configs/lit_so400m_het_xl.py"), marks=pytest.mark.devices),
    pytest.param(Path("configs/fine_tune_experts.py:model=e3"), marks=pytest.mark.devices),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tiny.write_data(tmp_path_factory.mktemp("data"))


def shrunk(path: Path, data: Path, root: Path) -> ExperimentConfig:
    config = experiment.load_module_config(path)
    if not config.task.locked:
        return tiny.shrink(config, data, root / "run")
    upstream = tiny.classifier(config, data, root / "upstream")
    upstream.run_dir.mkdir()
    experiment.save(upstream, config_path(upstream.run_dir))
    save_imported(
        checkpoint_dir(upstream.run_dir),
        like_initial(upstream.task.build().shapes),
        {"locked_checksum": checksums.digest({})},
    )
    return tiny.shrink(config, data, root / "run", pretrained=upstream.run_dir)


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    """Trains a shrunk configuration once; returns it with its last state."""

    @functools.cache
    def train_once(path: Path) -> tuple[ExperimentConfig, TrainState]:
        config = shrunk(path, data, tmp_path_factory.mktemp("run"))
        return config, train(config)

    return train_once


@pytest.mark.parametrize("path", TRAINED, ids=lambda path: path.name)
def test_every_kind_of_config_shrunk_trains_saves_and_resumes_to_the_same_bits(path, trained, tmp_path):
    config, whole = trained(path)
    resumed = dataclasses.replace(config, run_dir=tmp_path / "resumed")
    shutil.copytree(config.run_dir, resumed.run_dir)
    shutil.rmtree(checkpoint_dir(resumed.run_dir) / str(config.length.amount))  # the one before is now the newest
    assert_same_run(resumed, train(resumed, resume=True), config, whole)


def test_a_run_that_ctrl_c_has_stopped_resumes_to_the_same_bits(trained, tmp_path):
    config, whole = trained(Path("configs/glyph_classifier.py"))
    interrupted = dataclasses.replace(config, run_dir=tmp_path / "interrupted")
    taken = itertools.count(1)

    def advance(self, count, note=""):
        if self.unit == "steps" and next(taken) == 2:  # not shards that are indexed
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lit_het.training.loop.Bar.advance", advance)
        with pytest.raises(KeyboardInterrupt):
            train(interrupted)
    assert_same_run(interrupted, train(interrupted, resume=True), config, whole)


def assert_same_run(config, state, other, other_state):
    """Compares the parameters and the losses of two runs bit by bit."""
    assert checksums.digest(state.params) == checksums.digest(other_state.params)
    found, expected = (
        [record["train/loss"] for record in read_metrics(run.run_dir / "metrics.jsonl")] for run in (config, other)
    )
    assert found == expected
    assert len(found) == config.length.amount
    assert np.isfinite(found).all()
