"""Runs whose towers are trained in part: trained, stopped, resumed, opened, exported, and taken as a start."""

import dataclasses

import jax
import numpy as np
import pytest
from PIL import Image

from lit_het import parameters
from lit_het.configs import quickstart_lit_het_xl
from lit_het.configs.experiment import PretrainedConfig
from lit_het.eval.evaluation import opened_evaluations
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ZeroShotConfig
from lit_het.models.opening import open_run
from lit_het.sharding import MeshConfig
from lit_het.towers.tuning_config import LoRA, Tuning
from lit_het.training.directory import checkpoint_dir
from lit_het.training.durations import Duration
from lit_het.training.initialization import initial_params
from lit_het.training.log import read_metrics
from lit_het.training.train import train
from lit_het.weights.native.saving import Checkpoints
from tests import tiny
from tests.cli.conftest import last_line, printed, run_command, stop_and_resume
from tests.scripts.conftest import write_config_file

TUNINGS = {
    "lora": Tuning(lora=LoRA(rank=2, pattern="encoder/.*")),
    "dora": Tuning(lora=LoRA(rank=2, dora=True), norms=True),
    "last": Tuning(last_blocks=1),
    "late": Tuning(start=Duration(2)),
}


def config(data, start, run_dir, tuning):
    """Returns a run of both towers from a trained model; the image tower has two blocks."""
    found = tiny.shrink(quickstart_lit_het_xl.get_config(), data, run_dir)
    towers = {
        name: dataclasses.replace(tower.with_encoder(depth=2), tuning=tuning)
        for name, tower in found.task.towers.items()
    }
    task = dataclasses.replace(found.task, **towers, locked=() if tuning else ("image_tower/.*",))
    return dataclasses.replace(found, task=task, pretrained=start and PretrainedConfig(start, ".*"))


@pytest.fixture(scope="module")
def start(data, once):
    """A trained image-text model; tests only read it."""

    def write(folder):
        of_both = config(data, None, folder / "run", Tuning())
        train(dataclasses.replace(of_both, length=Duration(4)))

    return once("cli_tuning_start", write) / "run"


def tuned_run(data, start, once, name):
    return once(f"cli_tuned_{name}", lambda folder: train(config(data, start, folder / "run", TUNINGS[name]))) / "run"


def params(run_dir):
    return {path: np.asarray(array) for path, array in parameters.flatten(open_run(run_dir).params).items()}


def saved_paths(run_dir):
    with Checkpoints(checkpoint_dir(run_dir), read_only=True) as checkpoints:
        return set(checkpoints.at(checkpoints.newest_step()).read_info()[1])


slow = pytest.mark.slow


@pytest.mark.parametrize("name", ["lora", "last", *(pytest.param(name, marks=slow) for name in ("dora", "late"))])
def test_a_run_opens_as_a_plain_model_that_differs_from_its_start_in_what_was_trained(data, start, once, name):
    run_dir = tuned_run(data, start, once, name)
    before, after = params(start), params(run_dir)
    assert {path: array.shape for path, array in after.items()} == {p: array.shape for p, array in before.items()}
    same = {path for path in before if np.array_equal(before[path], after[path])}
    for path in before:
        if name == "last" and "/encoder/blocks/" in path:
            assert np.array_equal(before[path][0], after[path][0]), path
        if name in ("lora", "dora") and path.endswith("positions"):
            assert path in same
    assert open_run(run_dir).config.task.require_image_tower().tuning is None
    assert any("image_tower/encoder" in path for path in before.keys() - same)


@pytest.mark.parametrize("name", ["lora", pytest.param("last", marks=slow), pytest.param("late", marks=slow)])
def test_an_evaluation_in_training_is_that_of_the_opened_run(data, shapes, start, name, tmp_path):
    tuned = config(data, start, tmp_path / "run", TUNINGS[name])
    evaluation = ZeroShotConfig(ImageSet("shapes", str(shapes)))
    train(dataclasses.replace(tuned, evaluations=(evaluation,)))
    run = open_run(tuned.run_dir)
    ((_, found),) = opened_evaluations([evaluation], run.sets(), run.model(calibrated=False))(
        run.model(calibrated=False)
    )
    recorded = read_metrics(tuned.run_dir / "metrics.jsonl")[-1]
    assert recorded["zero_shot/shapes/nll"] == pytest.approx(found.figures["nll"], rel=1e-4)


def test_a_checkpoint_holds_only_what_is_trained(data, start, once):
    lora, last = (saved_paths(tuned_run(data, start, once, name)) for name in ("lora", "last"))
    trained = {path for path in lora if path.startswith("params/image_tower/")}
    assert trained
    assert all("/lora/" in path for path in trained)
    assert not any("lower_blocks" in path or "patches" in path for path in last)
    assert any(path.startswith("optimizer/") and "image_tower" in path for path in last)


@pytest.mark.parametrize("name", ["last", *(pytest.param(name, marks=slow) for name in ("dora", "late"))])
def test_a_run_resumed_from_its_checkpoint_ends_bit_by_bit_as_an_undisturbed_one(
    data, start, name, tmp_path, monkeypatch
):
    expected = tmp_path / "whole"
    train(config(data, start, expected, TUNINGS[name]))  # here: see `stop_and_resume`
    stopped = config(data, start, tmp_path / "run", TUNINGS[name])
    stop_and_resume(stopped, monkeypatch)
    found = params(stopped.run_dir)
    for path, array in params(expected).items():
        np.testing.assert_array_equal(found[path], array, err_msg=path)


@slow
def test_a_run_starts_from_one_with_low_rank_changes_as_from_its_plain_model(data, start, once, tmp_path):
    source = tuned_run(data, start, once, "dora")
    following = config(data, source, tmp_path / "following", Tuning(last_blocks=0))
    train(
        dataclasses.replace(
            following, length=Duration(1), schedule=dataclasses.replace(following.schedule, warmup=Duration(0))
        )
    )
    before, after = params(source), params(following.run_dir)
    for path in before:
        if "/blocks/" in path:
            np.testing.assert_allclose(after[path], before[path], rtol=1e-6, err_msg=path)


@slow
def test_a_run_is_exported_and_classifies_as_its_plain_model(capsys, data, start, once, tmp_path):
    source, exported, image = tuned_run(data, start, once, "lora"), tmp_path / "exported", tmp_path / "image.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)).save(image)
    run_command("export", "--checkpoint", source, "--to", "lit-het", "--output", exported)
    assert params(exported).keys() == params(start).keys()
    ours, theirs, first = (
        printed(capsys, "classify", image, "--checkpoint", path, "--labels", "red bar,blue bar", "--json")[0]
        for path in (source, exported, start)
    )
    assert ours == theirs
    assert ours != first


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--task.image-tower.tuning.last-blocks", "3"), "tuning.last_blocks = 3 is more than the 2 blocks"),
        (("--task.image-tower.tuning.lora.pattern", "nothing"), "matches no dense layer of the tower: it has encoder"),
        (
            ("--task.image-tower.tuning.start", "400 steps"),
            "--task.image-tower.tuning.start 400 steps is step 400 of a run of 4",
        ),
        (
            ("--task.image-tower.tuning.norms", "--task.locked", "image_tower/.*"),
            "task.image_tower.tuning trains it: leave the pattern out",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(capsys, data, start, tmp_path, flags, problem):
    file = write_config_file(config(data, start, tmp_path / "run", Tuning()), tmp_path / "config.py")
    assert problem in last_line(capsys, "train", "--config", file, *flags)
    assert not (tmp_path / "run/config.json").exists()


@slow
@pytest.mark.devices
@pytest.mark.parametrize("name", ["dora", "last"])
def test_a_run_on_eight_devices_starts_from_a_tuned_one(data, start, once, name):
    source = tuned_run(data, start, once, name)
    following = config(data, source, source.with_name("following"), Tuning(last_blocks=0))
    following = dataclasses.replace(following, mesh=MeshConfig(fsdp=2))
    mesh = following.mesh.build()
    with jax.set_mesh(mesh):  # as a training does
        found = parameters.merge(*initial_params(following, following.task.build(), mesh))
    expected, found = params(source), parameters.flatten(following.task.untuned_params(jax.device_get(found)))
    assert found.keys() == expected.keys()
    for path, array in expected.items():
        np.testing.assert_allclose(found[path], array, rtol=1e-6, atol=1e-7, err_msg=path)
