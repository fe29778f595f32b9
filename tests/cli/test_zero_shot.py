"""`lit-het zero-shot` on a finished run."""

import dataclasses
import json
import shutil

import pytest

from lit_het.cli.main import main
from lit_het.configs import experiment
from lit_het.eval.evaluation import read_records
from tests import tiny
from tests.cli.test_train import refusal


def test_a_run_is_evaluated_on_a_folder_of_shards(trained_lit, data, tmp_path, capsys):
    output, run = tmp_path / "figures.json", tmp_path / "run"
    shutil.copytree(trained_lit.run_dir, run, ignore=shutil.ignore_patterns("evaluations"))
    arguments = ["--checkpoint", run, "--data", f"shapes={data / 'train'}", "--output", output]
    assert main(["zero-shot", *map(str, arguments)]) == 0
    figures = json.loads(output.read_text())
    assert 0 <= figures["zero_shot/shapes/top1"] <= figures["zero_shot/shapes/top5"] <= 1
    shown = capsys.readouterr().out
    for text in ("top1", "calibrated", "chance", "0.1250"):
        assert text in shown
    [record] = read_records(run)
    assert (record.kind, record.name, record.step) == ("zero_shot", "shapes", trained_lit.length.amount)
    assert record.figures["nll"] == figures["zero_shot/shapes/nll"]
    assert record.drawing.texts["class_names"] == (data / "train" / "classnames.txt").read_text().split("\n")[:-1]


def test_candidates_add_class_names(trained_lit, data, tmp_path, capsys):
    names = (data / "train" / "classnames.txt").read_text()
    (tmp_path / "names.txt").write_text(names + "yellow bar\nyellow square\n")
    output = tmp_path / "figures.json"
    arguments = ["--checkpoint", trained_lit.run_dir, "--data", data / "train", "--output", output]
    assert main(["zero-shot", *map(str, arguments), "--candidates", str(tmp_path / "names.txt")]) == 0
    assert "0.1000" in capsys.readouterr().out  # chance


def test_the_layout_of_clip_benchmark_is_read_as_it_is(trained_lit, data, tmp_path):
    folder = tmp_path / "shapes"
    shutil.copytree(data / "train", folder / "test")
    shutil.move(folder / "test" / "classnames.txt", folder / "classnames.txt")
    (folder / "zeroshot_classification_templates.txt").write_text("a {c}\nthe {c}\n")
    output = tmp_path / "figures.json"
    arguments = ["--checkpoint", trained_lit.run_dir, "--data", folder, "--output", output]
    assert main(["zero-shot", *map(str, arguments)]) == 0
    assert "zero_shot/shapes/top1" in json.loads(output.read_text())


def test_a_missing_folder_is_a_one_line_error(capsys, trained_lit):
    line = refusal(capsys, "zero-shot", "--checkpoint", trained_lit.run_dir, "--data", "/no/such/folder")
    assert "no folder /no/such/folder" in line


def test_a_folder_without_class_names_is_one_line(capsys, trained_lit, tmp_path):
    line = refusal(capsys, "zero-shot", "--checkpoint", trained_lit.run_dir, "--data", tmp_path)
    assert "classnames.txt" in line


def test_a_folder_that_holds_no_run_is_one_line(capsys, data, tmp_path):
    assert "config.json is missing" in refusal(capsys, "zero-shot", "--checkpoint", tmp_path, "--data", data / "train")


def test_a_classifier_is_scored_on_its_own_classes(capsys, upstream, data, tmp_path):
    line = refusal(capsys, "zero-shot", "--checkpoint", upstream, "--data", data / "train")
    assert "the classifier has 6 classes and there are 8 candidates" in line


def test_a_locked_tower_that_was_replaced_is_noticed(capsys, trained_lit, upstream, data, tmp_path):
    other = dataclasses.replace(experiment.load(upstream / "config.json"), run_dir=tmp_path / "other", seed=1)
    tiny.finish_untrained(other)
    line = refusal(
        capsys,
        "zero-shot",
        "--checkpoint",
        trained_lit.run_dir,
        "--data",
        data / "train",
        "--pretrained",
        other.run_dir,
    )
    assert "not those that" in line


def test_an_unknown_argument_is_refused_with_the_nearest(capsys, trained_lit, data):
    arguments = ("--checkpoint", trained_lit.run_dir, "--data", data / "train")
    assert "unknown flag --colour" in refusal(capsys, "zero-shot", *arguments, "--colour", "red")
    assert "leave out the slash" in refusal(
        capsys, "zero-shot", "--checkpoint", trained_lit.run_dir, "--data", f"a/b={data / 'train'}"
    )
    assert "did you mean --samples?" in refusal(capsys, "zero-shot", *arguments, "--sample", 3)
    assert "needs --checkpoint DIR and --data DIR" in refusal(capsys, "zero-shot", "--data", data / "train")


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [("--samples", -1, "at least 0"), ("--batch-size", 0, "at least 1"), ("--batch_size", 0, "at least 1")],
)
def test_an_invalid_value_is_reported_with_its_flag(capsys, trained_lit, data, flag, value, expected):
    line = refusal(capsys, "zero-shot", "--checkpoint", trained_lit.run_dir, "--data", data / "train", flag, value)
    assert f"lit-het: {flag} {value} must be {expected}" in line


def test_a_set_without_a_folder_is_reported_as_it_was_written(capsys, tmp_path):
    assert "'x=' names no folder" in refusal(capsys, "zero-shot", "--checkpoint", tmp_path, "--data", "x=")


def test_help_shows_every_field(capsys):
    with pytest.raises(SystemExit):
        main(["zero-shot", "--data", "anything", "--help"])
    shown = capsys.readouterr().out
    for flag in ("--checkpoint", "--data", "--prompts", "--candidates", "--samples", "--relabels", "--batch-size"):
        assert flag in shown


def test_two_sets_of_one_name_are_refused(capsys, trained_lit, data):
    line = refusal(
        capsys, "zero-shot", "--checkpoint", trained_lit.run_dir, "--data", data / "train", f"train={data / 'train'}"
    )
    assert "two data sets are called train" in line


def test_a_run_that_moved_together_with_its_tower_is_found_again(trained_lit, upstream, data, tmp_path):
    shutil.copytree(trained_lit.run_dir, tmp_path / "moved" / "lit")
    shutil.copytree(upstream, tmp_path / "moved" / upstream.name)
    config = tmp_path / "moved" / "lit" / "config.json"
    config.write_text(config.read_text().replace(str(upstream.parent), "/gone"))
    config.with_name("manifest.json").unlink()
    assert main(["zero-shot", "--checkpoint", str(config.parent), "--data", str(data / "train")]) == 0


def test_a_missing_tower_is_a_one_line_error_with_the_flag(capsys, trained_lit, upstream, data, tmp_path):
    shutil.copytree(trained_lit.run_dir, tmp_path / "lit")
    config = tmp_path / "lit" / "config.json"
    config.write_text(config.read_text().replace(str(upstream), "/gone/tower"))
    config.with_name("manifest.json").unlink()
    line = refusal(capsys, "zero-shot", "--checkpoint", config.parent, "--data", data / "train")
    assert "/gone/tower" in line
    assert "--pretrained" in line


def test_a_checkpoint_with_missing_files_is_one_line_with_its_folder(capsys, trained_lit, data, tmp_path):
    shutil.copytree(trained_lit.run_dir, tmp_path / "lit")
    step = tmp_path / "lit" / "checkpoints" / str(trained_lit.length.amount)
    shutil.rmtree(step / "params")
    line = refusal(capsys, "zero-shot", "--checkpoint", tmp_path / "lit", "--data", data / "train")
    assert str(step) in line


def test_evaluating_a_run_does_not_touch_a_save_in_progress(trained_lit, data, tmp_path):
    shutil.copytree(trained_lit.run_dir, tmp_path / "lit")
    pending = tmp_path / "lit" / "checkpoints" / "99.orbax-checkpoint-tmp"
    pending.mkdir()
    assert main(["zero-shot", "--checkpoint", str(tmp_path / "lit"), "--data", str(data / "train")]) == 0
    assert pending.exists()
