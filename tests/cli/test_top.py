"""A DINOv3 of a file with new blocks, trained on names of classes: stopped, resumed, opened, exported, continued."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from lit_het import parameters
from lit_het.configs import quickstart_lit_deterministic
from lit_het.configs.experiment import PretrainedConfig
from lit_het.models.opening import open_run
from lit_het.training.directory import checkpoint_dir
from lit_het.training.train import train
from lit_het.weights import formats
from lit_het.weights.native.saving import Checkpoints
from tests import tiny
from tests.cli.conftest import changed, last_line, run_command, stop_and_resume
from tests.weights.importing import GOLDEN

FILE = str(GOLDEN / "hf_dinov3")


def config(data, run_dir):
    found: Any = tiny.shrink(quickstart_lit_deterministic.get_config(), data, run_dir)
    theirs = formats.open_weights(FILE).image_tower
    assert theirs is not None
    top = dataclasses.replace(theirs.encoder, depth=2, activation="swiglu", initial_layer_scale=1e-5)
    image = dataclasses.replace(theirs, pooling="class_and_mean", top=top, weights=FILE)
    text = dataclasses.replace(found.task.text_tower, embedding_size=image.embedding_size)
    task = dataclasses.replace(found.task, image_tower=image, text_tower=text, locked=("image_tower/(?!top/).*",))
    captions = f"cls/{data / 'train'}:photos"
    return dataclasses.replace(
        found, task=task, data=changed(found.data, image_size=image.image_size, captions=captions)
    )


@pytest.fixture(scope="module")
def run_dir(data, own_copy):
    return own_copy("cli_top", lambda folder: train(config(data, folder / "run"))) / "run"


def params(run_dir):
    return parameters.flatten(open_run(run_dir).params)


def test_a_resumed_run_ends_bit_by_bit_as_an_undisturbed_one(data, tmp_path, monkeypatch):
    """Templates are drawn by position, and only new blocks and the text tower are in its checkpoint."""
    run_dir, stopped = tmp_path / "whole", config(data, tmp_path / "run")
    train(config(data, run_dir))  # here: see `stop_and_resume`
    stop_and_resume(stopped, monkeypatch)
    found = params(stopped.run_dir)
    for path, array in params(run_dir).items():
        np.testing.assert_array_equal(found[path], array, err_msg=path)
    with Checkpoints(checkpoint_dir(run_dir), read_only=True) as checkpoints:
        saved = checkpoints.at(checkpoints.newest_step()).read_info()[1]
    of_images = {path.split("image_tower/")[1].split("/")[0] for path in saved if "image_tower/" in path}
    assert of_images == {"top"}


@pytest.mark.slow
def test_a_run_is_exported_for_lit_het_alone(run_dir, tmp_path, capsys):
    run_command("export", "--checkpoint", run_dir, "--to", "lit-het", "--output", tmp_path / "folder")
    found = params(tmp_path / "folder")
    for path, array in params(run_dir).items():
        np.testing.assert_array_equal(found[path], array, err_msg=path)
    for form in ("huggingface", "npz"):
        said = last_line(capsys, "export", "--checkpoint", run_dir, "--to", form, "--output", tmp_path / form)
        assert "pooling = 'class_and_mean'" in said


@pytest.mark.slow
def test_another_run_locks_the_tower_with_its_blocks_or_takes_it_without(data, run_dir, tmp_path):
    following = changed(config(data, tmp_path / "whole"), pretrained=PretrainedConfig(run_dir))
    whole = changed(following, task__image_tower__weights=None, task__locked=("image_tower/.*",))
    plain = changed(whole, run_dir=tmp_path / "plain", task__image_tower__top=None)
    before = params(run_dir)
    for one in (whole, plain):
        tiny.finish_untrained(one)
        after = {path: array for path, array in params(one.run_dir).items() if path.startswith("image_tower/")}
        assert any("/top/" in path for path in after) == (one is whole)
        for path, array in after.items():
            np.testing.assert_array_equal(array, before[path], err_msg=path)


def test_data_check_reads_names_of_classes(data, capsys):
    flags = ("data", "check", data / "train", "--captions")
    run_command(*flags, f"cls/{data / 'train'}:clip80")
    assert "nowhere/classnames.txt: cannot be read" in last_line(capsys, *flags, "cls/nowhere")
