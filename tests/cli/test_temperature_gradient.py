"""Runs whose τ learns from held-out rows: of every batch, or of a data set of their own."""

import dataclasses
import re
import shutil

import numpy as np
import pytest

from lit_het import parameters
from lit_het.cli.main import main
from lit_het.configs import experiment, quickstart_lit_het_xl
from lit_het.configs.experiment import PretrainedConfig
from lit_het.data_pipelines.data_config import WeightedShards
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ZeroShotConfig
from lit_het.models.opening import open_run
from lit_het.planning.plan import Step
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.tasks.temperature_gradient_config import Method, TemperatureGradient
from lit_het.training.cadence import Cadence
from lit_het.training.checks import report_reused
from lit_het.training.directory import checkpoint_dir
from lit_het.training.durations import Duration
from lit_het.training.log import read_metrics
from lit_het.training.train import train
from lit_het.weights.native.folders import complete_steps
from tests import tiny
from tests.cli.conftest import refusal

STEPS = 6
FLAGS = ("--task.temperature-gradient.method", "luketina", "--task.temperature-gradient.held-out", "0.5")


def with_gradient(config, held_out: float | None = 0.5, method: Method = "luketina", **data):
    return dataclasses.replace(
        config,
        task=dataclasses.replace(config.task, temperature_gradient=TemperatureGradient(method, held_out)),
        data=dataclasses.replace(config.data, **data),
        length=Duration(STEPS),
        cadence=Cadence(log_steps=1, save_steps=2),
        evaluations=(),
        calibration=None,
    )


def params_of(config):
    return parameters.flatten(open_run(config.run_dir).params)


def records(config):
    return [record for record in read_metrics(config.run_dir / "metrics.jsonl") if "train/loss" in record]


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_to_the_same_parameters(data, upstream, held_out, tmp_path):
    base = tiny.classifier(quickstart_lit_het_xl.get_config(), data, tmp_path / "whole")
    task = dataclasses.replace(base.task, locked=("image_tower/.*",))
    base = dataclasses.replace(base, task=task, pretrained=PretrainedConfig(upstream))
    more = (WeightedShards((str(held_out),), 1.0, held_out=True),)
    whole = with_gradient(base, held_out=None, mixture=more)
    train(whole)
    assert all(np.isfinite(record["train/held_out_loss"]) for record in records(whole))
    stopped = dataclasses.replace(whole, run_dir=shutil.copytree(whole.run_dir, tmp_path / "stopped"))
    for step in complete_steps(checkpoint_dir(stopped.run_dir)):
        if step > STEPS // 2:
            shutil.rmtree(checkpoint_dir(stopped.run_dir) / str(step))
    assert int(train(stopped, resume=True).step) == STEPS
    expected, found = params_of(whole), params_of(stopped)
    for path, x in expected.items():
        np.testing.assert_array_equal(found[path], x, err_msg=path)
    assert experiment.load(whole.run_dir / "config.json") == whole


def test_figures_of_images_that_train_the_temperature_are_no_test(lit_config, data, held_out, capsys):
    more = (WeightedShards((str(held_out),), 1.0, held_out=True),)
    config = with_gradient(lit_config, held_out=None, mixture=more)
    same, other = (ZeroShotConfig(ImageSet(path.name, f"{path}/", split=".")) for path in (held_out, data / "train"))
    report_reused(dataclasses.replace(config, evaluations=(other,)))
    assert not capsys.readouterr().err
    report_reused(dataclasses.replace(config, evaluations=(same, other)))
    [line] = capsys.readouterr().err.splitlines()
    assert f"{held_out.name} has images that are held out to train τ ({held_out}): its figures are not held out" in line


def test_flags_set_it(config_file, capsys, tmp_path):
    command = ("--config", str(config_file), *FLAGS, "--run-dir", str(tmp_path / "run"), "--length", "2")
    with tiny.untrained():
        assert main(["train", *command]) == 0
    found = experiment.load(tmp_path / "run" / "config.json").task
    assert isinstance(found, ContrastiveConfig)
    assert found.temperature_gradient == TemperatureGradient("luketina", 0.5)


@pytest.mark.slow
def test_the_plan_counts_its_gradients(lit_config):
    plain = dataclasses.replace(with_gradient(lit_config), task=lit_config.task)
    simple = dataclasses.replace(
        plain, task=dataclasses.replace(plain.task, temperature_gradient=TemperatureGradient(held_out=0.5))
    )
    counts = [Step(config, config.mesh.build()).flops()[0] for config in (plain, simple, with_gradient(lit_config))]
    # Of half of the rows one gradient, and of the others one by τ; by Luketina et al. three, and one of all.
    assert 0.5 < counts[1] / counts[0] < 1.0
    assert 1.5 < counts[2] / counts[0] < 2.1


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ((*FLAGS, "--task.head.temperature", "fixed"), "trains τ, which is fixed or locked; take another"),
        ((*FLAGS[:3], "1.5"), "held-out 1.5 must be more than 0 and less than 1, such as 0.125"),
        ((*FLAGS[:3], "0.001"), "some must be held out and some trained on; change task.temperature_gradient"),
        ((*FLAGS[:3], "None"), "either a fraction of every batch, .* and has neither"),
    ],
    ids=["fixed", "fraction", "no rows", "neither"],
)
def test_what_does_not_fit_is_one_line(config_file, capsys, flags, problem):
    line = refusal(capsys, "train", "--config", config_file, *flags)
    assert re.search(problem, line), line
