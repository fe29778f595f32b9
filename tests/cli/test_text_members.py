"""Commands on a run whose text tower has several members: trained, resumed, asked, exported."""

import dataclasses
import json
import shutil
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open

import lit_het
from lit_het import parameters
from lit_het.configs import quickstart_lit_het_xl
from lit_het.configs.experiment import PretrainedConfig
from lit_het.models.model import load
from lit_het.models.opening import open_run
from lit_het.training.directory import tokenizer_path
from lit_het.training.train import train
from tests import tiny
from tests.cli.conftest import last_line, printed, run_command, stop_and_resume
from tests.cli.test_export_onnx import by_script, export
from tests.cli.test_export_onnx import images as images
from tests.cli.tiny_decoder import NAMES
from tests.refusals import assert_refused

M = 2
LABELS = ("--labels", ",".join(NAMES))


@pytest.fixture(scope="module")
def run_dir(data, upstream, own_copy):
    """A finished run with members; tests only read it."""
    config = tiny.shrink(quickstart_lit_het_xl.get_config(), data, upstream.parent, pretrained=upstream)
    task = dataclasses.replace(config.task, text_members=M)
    return (
        own_copy("cli_members", lambda folder: train(dataclasses.replace(config, task=task, run_dir=folder / "run")))
        / "run"
    )


def test_a_run_resumed_from_its_checkpoint_ends_with_the_members_of_an_undisturbed_one(run_dir, tmp_path, monkeypatch):
    config = dataclasses.replace(open_run(run_dir).config, run_dir=tmp_path / "resumed")
    whole = tmp_path / "whole"
    train(dataclasses.replace(config, run_dir=whole))  # here: see `stop_and_resume`
    stop_and_resume(config, monkeypatch)
    found, expected = (parameters.flatten(open_run(path).params) for path in (config.run_dir, whole))
    for path, array in expected.items():
        np.testing.assert_array_equal(found[path], array, err_msg=path)
    assert expected["text_tower/tokens/embedding"].shape[0] == M


def test_an_image_has_the_mean_probability_of_the_members_and_their_mutual_information(capsys, run_dir, images):
    found = printed(capsys, "classify", images[0], "--checkpoint", run_dir, *LABELS, "--samples", "8", "--json")[0]
    quiet = printed(capsys, "classify", images[0], "--checkpoint", run_dir, *LABELS, "--samples", "0", "--json")[0]
    assert (found["samples"], quiet["samples"]) == (8 * M, 0)
    assert min(found["mutual_information"], quiet["mutual_information"]) > 1e-6
    run_command("classify", images[0], "--checkpoint", run_dir, *LABELS)
    assert "nats: the mutual information of label and member" in capsys.readouterr().out
    model = load(run_dir)
    cosines = model.encode_images(images[0]) @ model.encode_texts(NAMES).T
    assert np.abs(cosines).max() < 1


@pytest.mark.slow
def test_evaluations_and_an_exported_folder_hold_all_members(capsys, run_dir, images, data, tmp_path):
    run_command("export", "--checkpoint", run_dir, "--to", "lit-het", "--output", tmp_path / "folder")
    ask = "classify", *images, *LABELS, "--samples", "4", "--json", "--checkpoint"
    assert printed(capsys, *ask, tmp_path / "folder") == printed(capsys, *ask, run_dir)


@pytest.mark.slow
def test_an_onnx_folder_answers_as_the_run_with_all_members(capsys, run_dir, images, tmp_path):
    folder = export(run_dir, tmp_path / "folder")
    assert len(json.loads((folder / "model.json").read_text())["temperature"]) == M
    ask = "classify", *images, *LABELS, "--json", "--checkpoint", run_dir
    for samples, figure, column, atol in (
        ("0", "probability", "probability", 1e-5),
        ("2000", "noisy_mean", "with noise", 0.02),
    ):
        ours = printed(capsys, *ask, "--samples", samples)
        theirs: Any = by_script(folder, images, NAMES, "--samples", samples)
        for one, other in zip(ours, theirs, strict=True):
            values = {row["label"]: row[figure] for row in one["labels"]}
            assert {row["label"]: row[column] for row in other["labels"]} == pytest.approx(values, abs=atol)
            assert other["mutual_information"] == pytest.approx(one["mutual_information"], abs=max(atol / 4, 1e-5))


def test_a_text_tower_is_not_taken_from_members_nor_its_captions_embedded(run_dir, lit_config, tmp_path):
    source = PretrainedConfig(run_dir, pattern="text_tower/.*|image_tower/.*")
    assert_refused("set --task.text-members 2", train, dataclasses.replace(lit_config, pretrained=source))
    assert_refused("task.text_members = 2", lit_het.embed, run_dir, tmp_path / "texts", texts=True)


def test_a_format_of_one_text_tower_holds_the_first_member_or_the_one_that_is_named(capsys, run_dir, images, tmp_path):
    run = open_run(run_dir)
    size = run.config.data.image_size
    for number, chosen in ((0, ()), (1, ("--member", "1"))):
        file = tmp_path / f"{number}.npz"
        run_command("export", "--checkpoint", run_dir, "--to", "npz", "--output", file, *chosen)
        assert f"holds one text tower: member {number} of {M} (--member)" in capsys.readouterr().err
        folder, tokenizer = tmp_path / f"run{number}", tokenizer_path(run_dir)
        run_command("import", "--from", file, "--to", folder, "--tokenizer", tokenizer, "--image-size", size)
        found, expected = open_run(folder), run.alone(number)
        arrays = (parameters.flatten(one.params["text_tower"]) for one in (found, expected))
        for (path, array), (_, of_member) in zip(*(sorted(one.items()) for one in arrays), strict=True):
            np.testing.assert_array_equal(array, of_member, err_msg=path)
        assert found.task.temperature(found.params) == pytest.approx(expected.task.temperature(expected.params))


def test_what_was_fitted_to_all_members_is_left_out_of_one(capsys, run_dir, tmp_path):
    run = shutil.copytree(run_dir, tmp_path / "run")
    run_command("calibrate", run, "--data", tiny.write_data(tmp_path / "pairs", num_samples=120) / "train")
    assert open_run(run).calibration is not None
    run_command("export", "--checkpoint", run, "--to", "huggingface", "--output", tmp_path / "one", "--member", "1")
    said, alone = capsys.readouterr().err, open_run(run).alone(1)
    assert "the others and what was fitted to all together are left out" in said
    assert "the temperature is multiplied" not in said
    with safe_open(tmp_path / "one" / "model.safetensors", "np") as file:
        log_scale = float(file.get_tensor("logit_scale"))
    assert log_scale == pytest.approx(-np.log(float(alone.task.temperature(alone.params))), abs=1e-6)
    card = (tmp_path / "one" / "README.md").read_text()
    assert "member 1 of several text towers of one run" in card
    assert "Not calibrated." in card


def test_noise_is_not_added_to_several_text_towers(capsys, run_dir, tmp_path):
    pairs = tiny.write_data(tmp_path / "pairs", num_samples=1000) / "train"
    command = "add-noise", "--model", run_dir, "--data", pairs, "--output", tmp_path / "noisy"
    assert "has 2 text towers; noise is added to models with one" in last_line(capsys, *command)


def test_a_member_that_does_not_exist_or_is_not_asked_for_is_refused(capsys, run_dir, tmp_path):
    export_to = "export", "--checkpoint", run_dir, "--output", tmp_path / "out", "--to"
    for number in ("2", "-1"):
        assert f"member {number} is not one of the 2" in last_line(capsys, *export_to, "npz", "--member", number)
    assert "--to onnx holds all members; leave it out" in last_line(capsys, *export_to, "onnx", "--member", "1")
