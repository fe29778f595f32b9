"""`lit-het merge`: means of weights of runs that started from the same ones, curves and soups."""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest

from lit_het import parameters
from lit_het.cli.main import main
from lit_het.configs.experiment import PretrainedConfig
from lit_het.models import origins
from lit_het.models.opening import open_run
from lit_het.objectives.teacher import TeacherConfig
from lit_het.sharding import MeshConfig
from lit_het.towers.tuning_config import LoRA, Tuning
from lit_het.training import directory
from lit_het.training.directory import checkpoint_dir, load_config
from lit_het.training.durations import Duration
from lit_het.training.initialization import initial_params
from lit_het.training.train import train
from lit_het.weights.native import checksums
from lit_het.weights.native.saving import save_imported
from tests import tiny
from tests.cli.conftest import last_line, refusal, run_command, write_splits
from tests.cli.test_tuning import config
from tests.cli.test_tuning import start as start


@pytest.fixture(scope="module")
def tuned(data, start, once):
    """Two runs that were trained from one start in different ways; tests only read them."""

    def write(folder):
        for name, tuning in {"low_rank": Tuning(lora=LoRA(rank=2)), "whole": Tuning()}.items():
            of_run = config(data, start, folder / name, tuning)
            train(dataclasses.replace(of_run, length=Duration(2)))

    folder = once("cli_merge_tuned", write)
    return folder / "low_rank", folder / "whole"


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory):
    """Images that neither of the runs was trained on."""
    return tiny.write_data(tmp_path_factory.mktemp("elsewhere"), seed=1, num_samples=100)


def params(run_dir):
    return {path: np.asarray(array) for path, array in parameters.flatten(open_run(run_dir).params).items()}


def test_a_mean_of_two_runs_is_a_run_of_its_own(start, tuned, tmp_path, capsys):
    output = tmp_path / "mean"
    run_command("merge", start, *tuned, "--weights", "0.5", "0.3", "0.2", "--output", output)
    first, second, third = (params(run_dir) for run_dir in (start, *tuned))
    for path, array in params(output).items():
        expected = 0.5 * first[path] + 0.3 * second[path] + 0.2 * third[path]
        np.testing.assert_allclose(array, expected, rtol=1e-5, atol=1e-6, err_msg=path)
    assert load_config(output).pretrained is None
    assert "0.5" in capsys.readouterr().err
    assert "already holds a run" in refusal(capsys, "merge", *tuned, "--output", output)


def test_means_and_copies_of_runs_are_known_by_their_start(data, start, tuned, tmp_path, capsys):
    mean, copies = tmp_path / "mean", [tmp_path / "copy", tmp_path / "tuned_copy"]
    run_command("merge", *tuned, "--output", mean)
    run_command("merge", start, mean, "--output", tmp_path / "mixed")
    run_command("merge", tmp_path / "mixed", tuned[0], "--output", tmp_path / "again")
    for run_dir, copy in zip((start, tuned[0]), copies, strict=True):
        run_command("export", "--checkpoint", run_dir, "--to", "lit-het", "--output", copy)
    run_command("import", "--from", copies[1], "--to", tmp_path / "imported")
    run_command("merge", copies[0], tmp_path / "imported", mean, "--output", tmp_path / "of_copies")
    assert len({origins.recorded(path) for path in (*tuned, mean, copies[1], tmp_path / "of_copies")}) == 1
    # Another model of that form.
    untrained = config(data, None, tmp_path / "other", Tuning())
    tiny.finish_untrained(dataclasses.replace(untrained, seed=5))
    refused = refusal(capsys, "merge", mean, tmp_path / "other", "--output", tmp_path / "none")
    assert f"{mean} and {tmp_path / 'other'} started from towers with other weights" in refused


def test_a_run_with_all_of_its_own_parameters_needs_its_start_no_more(start, tuned, tmp_path):
    run_dir = shutil.copytree(tuned[1], tmp_path / "whole")
    of_run = load_config(run_dir)
    tiny.edit_config(run_dir, dataclasses.replace(of_run, pretrained=PretrainedConfig(tmp_path / "gone", ".*")))
    run_command("merge", start, run_dir, "--output", tmp_path / "mean")


@pytest.mark.slow
def test_runs_of_earlier_versions_are_known_by_their_chain(start, tuned, tmp_path, monkeypatch):
    monkeypatch.setattr(origins, "recorded", lambda run_dir: None)
    assert origins.origin(tuned[0]) == start
    run_command("merge", *tuned, start, "--output", tmp_path / "mean")


@pytest.mark.slow
def test_a_curve_shows_the_figures_of_both_runs_at_its_ends(start, tuned, data, tmp_path, capsys):
    folder = write_splits(data, tmp_path / "shapes", "test")
    page = tmp_path / "curve.html"
    run_command("merge", start, tuned[1], "--curve", page, "--points", "3", "--data", f"old={folder}", f"new={folder}")
    found = json.loads(page.with_suffix(".json").read_text())
    assert [one["share"] for one in found] == [0.0, 0.5, 1.0]
    for run_dir, at_end in ((start, found[0]), (tuned[1], found[-1])):
        file = tmp_path / "figures.json"
        run_command("zero-shot", "--checkpoint", run_dir, "--data", f"old={folder}", "--output", file, "--uncalibrated")
        expected = json.loads(file.read_text())
        for name in ("zero_shot/old/top1", "zero_shot/old/nll"):
            assert at_end[name] == pytest.approx(expected[name], rel=1e-4)
        assert at_end["zero_shot/new/nll"] == at_end["zero_shot/old/nll"]
    assert "(mean over the sets)" in page.read_text()
    assert page.with_suffix(".md").is_file()


@pytest.mark.slow
def test_a_greedy_soup_is_no_worse_than_its_best_run(start, tuned, elsewhere, tmp_path, capsys):
    folder = write_splits(elsewhere, tmp_path / "shapes", "test")
    output = tmp_path / "soup"
    run_command("merge", start, *tuned, "--greedy", "--by", "nll", "--data", folder, "--output", output)
    shown = capsys.readouterr().out
    assert "kept" in shown
    found = {}
    for run_dir in (start, *tuned, output):
        file = tmp_path / "figures.json"
        run_command("zero-shot", "--checkpoint", run_dir, "--data", f"s={folder}", "--output", file, "--uncalibrated")
        found[run_dir] = json.loads(file.read_text())["zero_shot/s/nll"]
    assert found[output] <= min(found[run_dir] for run_dir in (start, *tuned)) + 1e-5


@pytest.mark.slow
def test_a_mean_is_calibrated_on_images_of_none_of_its_runs(start, tuned, elsewhere, tmp_path, capsys):
    other, mean, again = tmp_path / "other", tmp_path / "mean", tmp_path / "again"
    train(dataclasses.replace(config(elsewhere, start, other, Tuning()), length=Duration(2)))
    run_command("merge", tuned[1], other, "--output", mean)
    run_command("merge", start, mean, "--output", again)
    for merged in (mean, again):
        refused = last_line(capsys, "calibrate", merged, "--data", elsewhere / "train")
        assert f"{other}, from which {merged} has its towers, was trained on images of" in refused
    shutil.rmtree(other)
    assert main(["calibrate", str(mean), "--data", str(elsewhere / "train")]) == 0
    assert f"not checked whether {other}, of the mean {mean}, was trained" in capsys.readouterr().err


def test_a_soup_is_not_chosen_by_images_of_the_training(start, tuned, data, tmp_path, capsys):
    folder = write_splits(data, tmp_path / "seen", "test")
    flags = ("--greedy", "--by", "nll", "--data", folder, "--output", tmp_path / "soup")
    refused = refusal(capsys, "merge", *tuned, *flags)
    assert f"{tuned[0]} was trained on images of" in refused
    assert "which choose no soup of it; give --data with others" in refused
    assert not (tmp_path / "soup").exists()


@pytest.mark.slow
def test_a_soup_for_retrieval_is_by_its_own_figure(start, tuned, elsewhere, tmp_path, capsys):
    folder = write_splits(elsewhere, tmp_path / "shapes", "test")
    flags = ("--greedy", "--evaluation", "retrieval", "--data", folder, "--output", tmp_path / "soup")
    run_command("export", "--checkpoint", start, "--to", "lit-het", "--output", tmp_path / "exported")
    run_command("merge", tmp_path / "exported", *tuned, *flags)
    lines = capsys.readouterr().out.splitlines()
    assert any("image_to_text_recall1 of" in line for line in lines)
    recalls = [float(number) for line in lines for number in re.findall(r" (\d\.\d{4}) .*kept", line)]
    assert recalls[0] == max(recalls) > 0


@pytest.mark.slow
def test_runs_without_a_common_start_or_form_have_no_mean(start, tuned, data, trained_lit, tmp_path, capsys):
    other = config(data, None, tmp_path / "other", Tuning())
    train(
        dataclasses.replace(
            other, length=Duration(1), seed=5, schedule=dataclasses.replace(other.schedule, warmup=Duration(0))
        )
    )
    arguments = ("--output", tmp_path / "mean")
    problem = last_line(capsys, "merge", tuned[0], tmp_path / "other", *arguments)
    assert "started from towers with other weights" in problem
    assert str(tmp_path / "other") in problem
    problem = last_line(capsys, "merge", tuned[0], trained_lit.run_dir, *arguments)
    assert "has task.image_tower.encoder.depth = 2" in problem
    assert not (tmp_path / "mean").exists()


def test_what_is_trained_beside_a_model_is_no_part_of_its_start_and_its_mean(data, start, tmp_path):
    taught = config(data, start, tmp_path / "taught", Tuning())
    task = dataclasses.replace(taught.task, teacher=TeacherConfig(projection=8))
    embeddings = {"teacher_embeddings": "images", "teacher_text_embeddings": "texts"}
    taught = dataclasses.replace(taught, task=task, data=dataclasses.replace(taught.data, **embeddings))
    # Its towers and head are those of the start, which has no projection.
    locked, trainable = initial_params(taught, task.build(), MeshConfig().build())
    assert set(trainable) == {"image_tower", "text_tower", "head", "teacher"}
    taught.run_dir.mkdir()
    directory.write(taught.run_dir, taught, (start / "tokenizer.model").read_bytes())
    save_imported(checkpoint_dir(taught.run_dir), trainable, {"locked_checksum": checksums.digest(locked)})
    run_command("merge", taught.run_dir, start, "--output", tmp_path / "mean")
    for path, array in params(start).items():
        np.testing.assert_allclose(params(tmp_path / "mean")[path], array, rtol=1e-6, err_msg=path)
    merged = load_config(tmp_path / "mean")
    assert (merged.task.objectives, merged.data.teacher_embeddings) == ({}, None)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--weights", "0.5"), "must be one number for each of 2 runs, and sum to 1"),
        (("--weights", "0.5", "0.6"), "and sum to 1"),
        (("--greedy",), "--data DIR belongs to --curve"),
        (("--data", "{data}", "--greedy", "--weights", "1", "0"), "--greedy finds the weights"),
        pytest.param(
            ("--data", "{data}", "--greedy", "--by", "ausuc"), "--by ausuc is not one of", marks=pytest.mark.slow
        ),
        (("--data", "{data}", "--greedy", "--by", "nothing"), "--by nothing names no figure of which high or low"),
        (("--data", "{data}", "--greedy", "--evaluation", "few-shot"), "--by None names no figure"),
        (("--data", "{data}"), "belongs to --curve FILE.html and to --greedy"),
    ],
)
def test_flags_that_do_not_fit_are_refused_in_one_line(start, tuned, elsewhere, tmp_path, capsys, flags, problem):
    folder = write_splits(elsewhere, tmp_path / "shapes", "test")
    given = [flag.format(data=folder) for flag in flags]
    assert problem in last_line(capsys, "merge", start, tuned[0], "--output", tmp_path / "mean", *given)
