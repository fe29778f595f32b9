"""Temperatures of names that training captions had and of new ones, from training to every command."""

import dataclasses
import itertools
import json
import shutil
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lit_het import load
from lit_het.calibrations import FittedNames, FittedTemperature, NameCalibration
from lit_het.configs import quickstart_lit_deterministic, quickstart_lit_het_xl
from lit_het.data_pipelines.images.decoding import encode_jpeg
from lit_het.data_pipelines.shards.hashed import captions_of
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.portions import Portion
from lit_het.data_pipelines.shards.writing import write_shards
from lit_het.data_pipelines.texts.familiarity import Familiarity
from lit_het.data_pipelines.texts.tokenizers import train_sentencepiece
from lit_het.errors import UserError
from lit_het.eval.features import read_features
from lit_het.eval.metrics.calibration import fit_temperature
from lit_het.eval.metrics.names import fit_names, with_offset
from lit_het.eval.predictions import Predictor, predict
from lit_het.eval.sets.recognition import embed_texts
from lit_het.models.calibration.saved import read_calibration, write_calibration
from lit_het.models.calibration.seen_names import read_familiarity, require_familiarity, training_loader
from lit_het.models.opening import open_run
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.schedules import Schedule
from lit_het.training.train import train
from lit_het.weights.onnx import classify as script
from tests import tiny
from tests.cli.conftest import printed, refusal, run_command

VOWELS = "aeiouyw"
# The brightness of red, green and blue, a word for each.
NAMES = [f"r{red} g{green} b{blue}" for red, green, blue in itertools.product(VOWELS, repeat=3)]


def colour_of(name: str, random: np.random.Generator) -> np.ndarray:
    """An image of the colour that a name says, with some noise."""
    levels = np.array([VOWELS.index(word[1]) for word in name.split()]) * 255 / (len(VOWELS) - 1)
    return np.clip(levels + random.normal(0, 12, 3) + random.normal(0, 20, (32, 32, 3)), 0, 255).astype(np.uint8)


@pytest.fixture(scope="session")
def coloured(once):
    """Two images of each of 343 names, as shards, and a tokenizer."""

    def write(folder):
        random = np.random.default_rng(0)
        order = random.permutation(2 * len(NAMES))
        write_shards(
            folder / "train",
            (
                {"__key__": f"{key:04}", "jpg": encode_jpeg(colour_of(name, random)), "txt": name}
                for key, name in enumerate(NAMES[number // 2] for number in order)
            ),
        )
        (folder / "train" / "classnames.txt").write_text("".join(f"{name}\n" for name in NAMES))
        (folder / "tokenizer.model").write_bytes(train_sentencepiece(NAMES, vocabulary_size=48, model_type="bpe"))

    return once("coloured", write)


@pytest.fixture(scope="session")
def once_by_names(coloured, upstream, own_copy):
    """A finished run that was calibrated by names at its end."""

    def train_run(folder):
        train_by_names(quickstart_lit_het_xl.get_config(), coloured, folder / "run", upstream)

    return own_copy("cli_by_names", train_run) / "run"


def train_by_names(config, data, run_dir, upstream):
    """Trains a run and calibrates it by names."""
    config = tiny.shrink(config, data, run_dir, pretrained=upstream)
    cadence, schedule = Cadence(log_steps=50, save_steps=150), Schedule(1e-2, warmup=Duration(5))
    held_out = Portion(35, by="name")
    train(dataclasses.replace(config, length=Duration(150), schedule=schedule, cadence=cadence, calibration=held_out))


@pytest.fixture
def by_names(once_by_names, tmp_path):
    """Such a run that a test may change."""
    return shutil.copytree(once_by_names, tmp_path / "run")


@pytest.fixture(scope="module")
def model(once_by_names):
    return open_run(once_by_names)


@pytest.fixture(scope="module")
def in_training(model):
    """Which names training captions had, from the samples that were trained on."""
    loader = training_loader(model.config)
    trained_on = {caption for [caption] in captions_of(loader.index, [*loader.numbers], loader.config.texts[0])}
    return {name: name in trained_on for name in NAMES}


@pytest.fixture
def image(tmp_path):
    Image.fromarray(colour_of(NAMES[200], np.random.default_rng(1))).save(tmp_path / "image.png")
    return tmp_path / "image.png"


def classify(run_dir, image, labels, *flags):
    return ["classify", image, "--checkpoint", run_dir, "--labels", ",".join(labels), "--samples", 16, *flags]


def calibration_of(run_dir, step=150) -> Any:
    return read_calibration(run_dir, step)


def some(in_training, num_seen, num_new):
    """Names that training captions had, and others."""
    of_kind = ([name for name in NAMES if in_training[name] == kind] for kind in (True, False))
    return [*next(of_kind)[:num_seen], *next(of_kind)[:num_new]]


@pytest.mark.slow
def test_held_out_are_all_samples_of_some_names_and_the_run_knows_which(once_by_names, model, in_training):
    saved = json.loads((once_by_names / "calibration.json").read_text())
    assert (saved["portion"], saved["names"]["rule"]) == ("35%:100% by name", "caption")
    assert saved["names"]["num_new"] == len(NAMES) - sum(in_training.values()) >= 100
    found = read_familiarity(once_by_names, model.data_digest)
    assert found is not None
    assert dict(zip(NAMES, found.knows(NAMES, "caption").tolist(), strict=True)) == in_training
    assert (found.num_captions, found.is_sample) == (training_loader(model.config).num_samples, False)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "samples"), [("noiseless", 0), ("monte_carlo", 16)])
def test_the_numbers_are_those_of_the_predictions_of_held_out_images(once_by_names, model, in_training, mode, samples):
    saved = json.loads((once_by_names / "calibration.json").read_text())
    data = dataclasses.replace(model.config.data, portion=Portion(35, by="name"), embeddings=None)
    loader = Loader(data, model.tokenizer)
    captions = [caption for [caption] in captions_of(loader.index, [*loader.numbers], loader.config.texts[0])]
    names = sorted(set(captions))
    raw = model.model(calibrated=False)
    [features] = read_features([raw.features], loader.epoch(), lambda count: None, "held out")
    features = dataclasses.replace(features, labels=np.array([names.index(caption) for caption in captions]))
    predictor = Predictor(raw, len(names), embed_texts(raw, names), samples)
    found = predict(predictor, features)
    seen = np.array([in_training[name] for name in names])
    fitted, of_file = fit_names(found.log_probabilities, found.labels, seen), saved["names"][mode]
    for number in ("temperature", "offset"):
        assert of_file[number] == pytest.approx(getattr(fitted, number), rel=1e-3, abs=1e-3)
    assert of_file["errors"] == pytest.approx(fitted.errors, rel=1e-2)
    is_seen = seen[found.labels]
    for one, rows in ((saved[mode], is_seen), (of_file["alone"], ~is_seen)):
        expected = fit_temperature(found.log_probabilities[rows], found.labels[rows])
        assert one["temperature"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(("prior", "share"), [("balanced", 0.5), ("0.1", 0.1)])
def test_classify_moves_the_offset_between_names(capsys, once_by_names, in_training, image, prior, share):
    names = some(in_training, 4, 3)
    (found,) = printed(capsys, *classify(once_by_names, image, names, "--json", "--prior", prior))
    by_label = {one["label"]: one for one in found["labels"]}
    seen = np.array([in_training[name] for name in names])
    assert [by_label[name]["in_training"] for name in names] == seen.tolist()
    raw = np.log([[by_label[name]["raw_probability"] for name in names]])
    fitted = calibration_of(once_by_names).names.noiseless
    expected = np.exp(with_offset(raw, seen, fitted, share))[0]
    np.testing.assert_allclose([by_label[name]["probability"] for name in names], expected, rtol=1e-4)


@pytest.mark.slow
def test_seen_and_new_change_no_ranking_and_the_table_names_what_training_had_not(
    capsys, once_by_names, in_training, image
):
    names, orders = some(in_training, 4, 3), {}
    for prior in ("seen", "new"):
        (found,) = printed(capsys, *classify(once_by_names, image, names, "--json", "--prior", prior))
        orders[prior] = [one["label"] for one in found["labels"]]
    (raw,) = printed(capsys, *classify(once_by_names, image, names, "--json", "--uncalibrated"))
    assert orders["seen"] == orders["new"] == [one["label"] for one in raw["labels"]]
    run_command(*classify(once_by_names, image, names))
    shown = " ".join(capsys.readouterr().out.split())
    assert f"3 of 7 names were not in the training captions: {', '.join(names[4:])}" in shown
    assert "by names, seen names expected" in shown


@pytest.mark.slow
def test_the_model_in_python_takes_a_prior(once_by_names, in_training, image):
    names = some(in_training, 4, 3)
    balanced = load(once_by_names, prior="balanced")
    assert balanced.calibration.endswith("50 % new names expected)")
    by_share, by_word = (load(once_by_names, prior=prior).classify(image, names) for prior in (0.5, "balanced"))
    assert dict(by_share) == dict(by_word)
    assert by_word.new_labels == tuple(names[4:])


@pytest.mark.slow
def test_zero_shot_reports_both_kinds_and_the_top_1_as_trained(capsys, by_names, coloured, in_training):
    figures = {}
    for prior in ("seen", "balanced"):
        flags = ("--data", f"colours={coloured / 'train'}", "--captions", "txt", "--prior", prior)
        run_command("zero-shot", "--checkpoint", by_names, *flags)
        said = capsys.readouterr()
        num_new = len(NAMES) - sum(in_training.values())
        assert f"colours: {num_new} of 343 names were not in the training captions" in " ".join(said.err.split())
        record = json.loads((by_names / "evaluations" / "zero_shot_colours.json").read_text())
        figures[prior] = record["figures"]
    assert figures["seen"]["top1"] == figures["seen"]["raw_top1"] == figures["balanced"]["raw_top1"]
    # Whether the prior changes the best name of an image is up to the rounding of the training.
    assert figures["balanced"]["nll"] != figures["seen"]["nll"]
    for found in figures.values():
        both = found["seen_top1"], found["new_top1"]
        assert found["harmonic_top1"] == pytest.approx(2 * both[0] * both[1] / sum(both))
        assert 0 < found["ausuc"] < 1
    run_command("report", by_names)
    page = (by_names / "report.html").read_text()
    assert "Names that training had, and new ones" in page


@pytest.mark.slow
def test_a_folder_that_is_exported_and_imported_keeps_the_names(capsys, once_by_names, in_training, image, tmp_path):
    names = some(in_training, 4, 3)
    run_command("export", "--checkpoint", once_by_names, "--to", "lit-het", "--output", tmp_path / "folder")
    run_command("import", "--from", tmp_path / "folder", "--to", tmp_path / "imported")
    capsys.readouterr()
    first, *others = (
        printed(capsys, *classify(one, image, names, "--json", "--prior", "balanced"))
        for one in (once_by_names, tmp_path / "folder", tmp_path / "imported")
    )
    for found in others:
        assert [one["label"] for one in found[0]["labels"]] == [one["label"] for one in first[0]["labels"]]
        assert found[0]["labels"][0]["probability"] == pytest.approx(first[0]["labels"][0]["probability"], rel=1e-5)


@pytest.mark.slow
def test_formats_of_one_temperature_say_what_they_leave_out(capsys, once_by_names, tmp_path):
    temperatures = {}
    for prior in ("seen", "new"):
        folder = tmp_path / prior
        run_command(
            "export", "--checkpoint", once_by_names, "--to", "npz", "--output", f"{folder}.npz", "--prior", prior
        )
        said = " ".join(capsys.readouterr().err.split())
        assert f"one temperature, that of {prior} names: the other one and the offset between them are left out" in said
        temperatures[prior] = float(np.load(f"{folder}.npz")["t"].item())
    fitted = calibration_of(once_by_names)
    ratio = fitted.names.noiseless.alone.temperature / fitted.noiseless.temperature
    # The file holds the logarithm of 1 / τ.
    assert temperatures["seen"] - temperatures["new"] == pytest.approx(np.log(ratio), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("prior", ["seen", "new", "balanced", "0.2"])
def test_the_script_of_an_onnx_folder_has_equal_probabilities(
    capsys, once_by_names, in_training, image, prior, tmp_path, monkeypatch
):
    names, folder = some(in_training, 4, 3), tmp_path / "folder"
    run_command("export", "--checkpoint", once_by_names, "--to", "onnx", "--output", folder)
    capsys.readouterr()
    (found,) = printed(capsys, *classify(once_by_names, image, names, "--json", "--prior", prior))
    monkeypatch.setattr(script, "FOLDER", folder)
    monkeypatch.setattr("sys.argv", ["classify.py", str(image), "--labels", ",".join(names), "--prior", prior])
    script.main()
    new, _, *lines = capsys.readouterr().out.splitlines()
    assert new == "3 of 7 names were not in the training captions"
    by_script = {label: float(value) for _, value, label in (line.split(maxsplit=2) for line in lines)}
    assert by_script == pytest.approx({one["label"]: one["probability"] for one in found["labels"]}, abs=2e-5)
    assert list(by_script) == [one["label"] for one in found["labels"]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--prior", "1.5"), "prior 1.5: give seen, new, balanced, or the share of right answers that are new names"),
        (("--prior", "new", "--uncalibrated"), "a prior is part of the calibration, which --uncalibrated"),
        (("--prior", "new", "--coverage", "0.9"), "a coverage is fitted to images of names that training had"),
    ],
)
def test_a_prior_that_cannot_be_used_is_one_line(capsys, once_by_names, in_training, image, flags, line):
    assert line in refusal(capsys, *classify(once_by_names, image, some(in_training, 2, 2), *flags))


def test_a_prior_without_calibration_by_names_is_one_line(capsys, once_calibrated, image):
    said = refusal(capsys, *classify(once_calibrated, image, ["red bar", "blue bar"], "--prior", "balanced"))
    assert "is not calibrated by names; run lit-het calibrate" in said


@pytest.mark.slow
def test_a_table_of_another_run_is_ignored_and_a_broken_one_refused(capsys, by_names, in_training, image):
    names, path = some(in_training, 2, 2), by_names / "familiarity.npz"
    Familiarity.of(NAMES, "another").save(path)
    run_command(*classify(by_names, image, names))
    said = capsys.readouterr()
    assert "has the captions of another run: ignored" in " ".join(said.err.split())
    assert "which names were in the training captions is not known" in " ".join(said.out.split())
    path.unlink()
    said = refusal(capsys, *classify(by_names, image, names, "--prior", "new"))
    assert "which names training had is not known" in said
    path.write_bytes(b"PK broken")
    assert "is not a table of words" in refusal(capsys, *classify(by_names, image, names))


@pytest.mark.parametrize("change", [{"rule": "letters"}, {"num_new": 1.5}, {"noiseless": {"temperature": 0.0}}])
def test_a_broken_calibration_by_names_is_one_line(calibrated, change):
    fitted = FittedTemperature(1.0, 0.1, 1.0, 0.9)
    of_names = FittedNames(1.0, -1.0, 0.5, (0.1, 0.1), fitted)
    kept = calibration_of(calibrated, 60)
    found = NameCalibration("caption", 100, 100, of_names, None)
    write_calibration(calibrated, 60, dataclasses.replace(kept, names=found))
    assert calibration_of(calibrated, 60).names == found
    saved = json.loads((calibrated / "calibration.json").read_text())
    for name, value in change.items():
        saved["names"][name] = saved["names"][name] | value if isinstance(value, dict) else value
    (calibrated / "calibration.json").write_text(json.dumps(saved))
    with pytest.raises(UserError, match="is not a valid calibration"):
        read_calibration(calibrated, 60)


@pytest.mark.slow
def test_noise_that_is_added_to_a_model_is_calibrated_by_the_names_that_the_model_had(
    capsys, coloured, upstream, in_training, image, tmp_path, monkeypatch
):
    monkeypatch.setattr("lit_het.apps.add_noise.LEAST_PAIRS", 100)
    train_by_names(quickstart_lit_deterministic.get_config(), coloured, model := tmp_path / "model", upstream)
    # It may be calibrated with captions that are counted again, or with the table that the model has.
    (model / "familiarity.npz").unlink()
    run_dir = tmp_path / "added"
    flags = ("--task.head", "bayes_vlm", "--calibration", "35%: by name")
    run_command("add-noise", "--model", model, "--data", coloured / "train", "--output", run_dir, *flags)
    found = read_familiarity(run_dir, open_run(run_dir).data_digest)
    assert found is not None
    assert dict(zip(NAMES, found.knows(NAMES, "caption").tolist(), strict=True)) == in_training
    names = some(in_training, 4, 3)
    capsys.readouterr()
    (answer,) = printed(capsys, *classify(run_dir, image, names, "--json", "--prior", "balanced"))
    of_training = {one["label"]: one["in_training"] for one in answer["labels"]}
    assert of_training == {name: in_training[name] for name in names}

    added = open_run(run_dir)
    (run_dir / "familiarity.npz").unlink()
    assert not (model / "familiarity.npz").exists(), "the folder of the model is left as it is"
    found.save(model / "familiarity.npz")  # of another run: it is not taken
    kept = require_familiarity(run_dir, added.config, added.task, added.data_digest)
    assert (kept.num_captions, kept.digest) == (found.num_captions, added.data_digest)
    # The captions of a text tower from a file are not known, whatever run the image tower is of.
    (run_dir / "familiarity.npz").unlink()
    text_tower: Any = added.config.task.text_tower
    tower = dataclasses.replace(text_tower, weights=str(tmp_path / "tower.npz"))
    config = dataclasses.replace(added.config, task=dataclasses.replace(added.config.task, text_tower=tower))
    with pytest.raises(UserError, match="learned from other captions than those of its configuration"):
        require_familiarity(run_dir, config, added.task, added.data_digest)
