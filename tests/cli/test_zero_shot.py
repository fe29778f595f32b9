"""`lit-het zero-shot` on a finished run."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from lit_het.cli.main import main
from lit_het.configs import experiment
from lit_het.data_pipelines.images.decoding import encode_jpeg
from lit_het.data_pipelines.shards.writing import write_shards
from lit_het.eval.evaluation import read_records
from tests import tiny
from tests.cli.conftest import last_line, refusal, run_command


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


def test_the_layout_of_clip_benchmark_is_read_and_candidates_add_class_names(trained_lit, data, tmp_path, capsys):
    folder = tmp_path / "shapes"
    shutil.copytree(data / "train", folder / "test")
    names = (folder / "test" / "classnames.txt").rename(folder / "classnames.txt").read_text()
    (folder / "zeroshot_classification_templates.txt").write_text("a {c}\nthe {c}\n")
    (tmp_path / "names.txt").write_text(names + "yellow bar\nyellow square\n")
    output = tmp_path / "figures.json"
    arguments = ["--checkpoint", trained_lit.run_dir, "--data", folder, "--output", output]
    assert main(["zero-shot", *map(str, arguments), "--candidates", str(tmp_path / "names.txt")]) == 0
    assert "0.1000" in capsys.readouterr().out  # chance
    assert "zero_shot/shapes/top1" in json.loads(output.read_text())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--checkpoint RUN --data /no/such/folder", "no folder /no/such/folder"),
        ("--checkpoint RUN --data EMPTY", "classnames.txt"),
        ("--checkpoint EMPTY --data DATA", "config.json is missing"),
        ("--checkpoint EMPTY --data x=", "'x=' names no folder"),
        # A classifier is scored on its own classes.
        ("--checkpoint UPSTREAM --data DATA", "the classifier has 6 classes and there are 8 candidates"),
        ("--checkpoint RUN --data a/b=DATA", "leave out the slash"),
        ("--checkpoint RUN --data DATA train=DATA", "two data sets are called train"),
        ("--data DATA", "needs --checkpoint DIR and --data DIR"),
        ("--checkpoint RUN --data DATA --colour red", "unknown flag --colour"),
        ("--checkpoint RUN --data DATA --sample 3", "did you mean --samples?"),
        ("--checkpoint RUN --data DATA --samples -1", "lit-het: --samples -1 must be at least 0"),
        ("--checkpoint RUN --data DATA --batch-size 0", "lit-het: --batch-size 0 must be at least 1"),
        ("--checkpoint RUN --data DATA --batch_size 0", "lit-het: --batch_size 0 must be at least 1"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line(capsys, trained_lit, upstream, data, tmp_path, arguments, expected):
    places = {"RUN": trained_lit.run_dir, "UPSTREAM": upstream, "DATA": data / "train", "EMPTY": tmp_path}
    for name, place in places.items():
        arguments = arguments.replace(name, str(place))
    assert expected in refusal(capsys, "zero-shot", *arguments.split())


@pytest.mark.slow
def test_a_locked_tower_that_was_replaced_is_noticed(capsys, trained_lit, upstream, data, tmp_path):
    other = dataclasses.replace(experiment.load(upstream / "config.json"), run_dir=tmp_path / "other", seed=1)
    tiny.finish_untrained(other)
    arguments = ("--checkpoint", trained_lit.run_dir, "--data", data / "train", "--pretrained", other.run_dir)
    assert "not those that" in refusal(capsys, "zero-shot", *arguments)


def test_help_shows_every_field(capsys):
    with pytest.raises(SystemExit):
        main(["zero-shot", "--data", "anything", "--help"])
    shown = capsys.readouterr().out
    for flag in ("--checkpoint", "--data", "--prompts", "--candidates", "--samples", "--relabels", "--batch-size"):
        assert flag in shown


def test_a_run_that_moved_with_its_tower_is_found_and_a_save_in_progress_is_left_alone(
    trained_lit, upstream, data, tmp_path
):
    shutil.copytree(trained_lit.run_dir, tmp_path / "moved" / "lit")
    shutil.copytree(upstream, tmp_path / "moved" / upstream.name)
    config = tmp_path / "moved" / "lit" / "config.json"
    config.write_text(config.read_text().replace(str(upstream.parent), "/gone"))
    config.with_name("manifest.json").unlink()
    pending = tmp_path / "moved" / "lit" / "checkpoints" / "99.orbax-checkpoint-tmp"
    pending.mkdir()
    assert main(["zero-shot", "--checkpoint", str(config.parent), "--data", str(data / "train")]) == 0
    assert pending.exists()


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


def captioned(folder, captions, seed=1):
    """Writes shards of so many shapes with captions, and no class names."""

    def samples():
        for number, caption in enumerate(captions):
            image = np.random.default_rng([seed, number]).integers(0, 255, (32, 32, 3), np.uint8)
            yield {"__key__": f"{number:04d}", "jpg": encode_jpeg(image), "txt": caption}

    write_shards(folder, samples(), samples_per_shard=64)
    return folder


def test_distinct_captions_are_the_classes_as_for_calibrate(capsys, trained, held_out, tmp_path):
    run, output = shutil.copytree(trained, tmp_path / "run"), tmp_path / "figures.json"
    pairs, equal = tmp_path / "pairs", "1 caption cannot be told from others, such as red bar from RED BAR"
    shutil.copytree(held_out, pairs, ignore=shutil.ignore_patterns("*.json", "*.txt"))
    first = pairs / "shard-000000.tar"
    first.write_bytes(first.read_bytes().replace(b"red bar", b"RED BAR"))
    run_command("calibrate", run, "--data", pairs)
    assert equal in capsys.readouterr().err
    command = ("zero-shot", "--checkpoint", run, "--data", pairs, "--captions", "txt", "--output", output)
    run_command(*command, "--uncalibrated")
    captured = capsys.readouterr()
    assert equal in captured.err
    assert "0.1250" in captured.out, "chance among the 8 captions that the model distinguishes"
    figures, fits = json.loads(output.read_text()), json.loads((run / "calibration.json").read_text())
    assert figures["zero_shot/pairs/nll"] == pytest.approx(fits["noiseless"]["nll_before"], rel=1e-4)
    assert {"zero_shot/pairs/top1", "zero_shot/pairs/ece"} <= figures.keys()
    run_command(*command, "--portion", "50%: by key")
    assert "calibrated" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--checkpoint RUN --data PAIRS", "or take the captions of images as classes"),
        ("--checkpoint RUN --data PAIRS --captions txt", "all captions of pairs are equal; take images with others"),
        ("--checkpoint RUN --data DATA --captions json/caption", "0000.json: missing member"),
        ("--checkpoint RUN --data DATA --captions txt --candidates x", "--captions are the classes and the labels"),
        ("--checkpoint UPSTREAM --data DATA --captions txt", "--captions needs an image-text model"),
    ],
)
def test_captions_that_are_no_classes_are_one_line(capsys, trained_lit, upstream, data, tmp_path, arguments, expected):
    captioned(tmp_path / "pairs", ["red bar", "Red bar"])
    places = {"RUN": trained_lit.run_dir, "UPSTREAM": upstream, "DATA": data / "train", "PAIRS": tmp_path / "pairs"}
    for name, place in places.items():
        arguments = arguments.replace(name, str(place))
    assert expected in last_line(capsys, "zero-shot", *arguments.split())
