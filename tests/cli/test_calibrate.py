"""`lit-het calibrate` on finished runs, and the commands that apply what it fitted."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file
from scipy import special

from lit_het.cli.main import main
from lit_het.configs import quickstart_lit_het_xl
from lit_het.data_pipelines.labels import ClassIndex
from lit_het.durations import Duration
from lit_het.eval.calibration import fit_temperature, scaled
from lit_het.eval.open_sets import Sets
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ZeroShotConfig
from lit_het.heads.contrastive import DeterministicContrastiveConfig, HetXLContrastiveConfig
from lit_het.heads.temperature import BoundedTemperature, FixedTemperature
from lit_het.losses.classification import SoftmaxCrossEntropy
from lit_het.runs.opening import open_run
from lit_het.runs.training import train
from lit_het.tasks.classification import ClassificationConfig
from lit_het.tasks.contrastive import ContrastiveTask
from lit_het.training.loop import Cadence
from lit_het.types import Calibration
from tests import tiny
from tests.cli.test_train import refusal

NAMES = [f"{colour} {shape}" for colour in tiny.COLOURS for shape in tiny.SHAPES]


@pytest.fixture
def image(tmp_path):
    Image.new("RGB", (40, 30), (255, 0, 0)).save(tmp_path / "red.png")
    return tmp_path / "red.png"


def classified(capsys, run_dir, image, *flags):
    command = ["classify", image, "--checkpoint", run_dir, "--labels", ",".join(NAMES), "--json", *flags]
    assert main(list(map(str, command))) == 0
    (found,) = json.loads(capsys.readouterr().out)
    return {label["label"]: label for label in found["labels"]}, found["calibrated"]


def predictions(run_dir, held_out, samples, *, is_calibrated):
    """Predictions for the held-out images by the path of evaluations, where labels are classes and not captions."""
    run = open_run(run_dir)
    sets = Sets(run.config.data.image_size, run.config.data.preprocessing, lambda: run.tower)
    evaluator = ZeroShotConfig(ImageSet("held out", str(held_out), ".")).build(sets)
    model = run.model(calibrated=is_calibrated)
    recognition = evaluator.recognition
    features = evaluator.opened.features(model.features)
    return recognition.predict(recognition.predictor(model, samples), features)


@pytest.mark.parametrize(("mode", "samples"), [("noiseless", 0), ("monte_carlo", 16)])
def test_temperatures_are_those_of_the_evaluations_predictions_and_evaluations_apply_them(
    once_calibrated, held_out, mode, samples
):
    # The captions of these images are their class names, so that both have the same candidates.
    saved = json.loads((once_calibrated / "calibration.json").read_text())
    raw = predictions(once_calibrated, held_out, samples, is_calibrated=False)
    temperature = fit_temperature(raw.log_probabilities, raw.labels)
    assert saved[mode]["temperature"] == pytest.approx(temperature, rel=1e-3)
    assert saved[mode]["nll_before"] == pytest.approx(-raw.label_log_p.mean(), rel=1e-4)
    assert saved[mode]["nll_after"] < saved[mode]["nll_before"]
    assert abs(np.log(temperature)) > 0.05  # a temperature of 1 would hide that it is not applied
    applied = predictions(once_calibrated, held_out, samples, is_calibrated=True)
    wanted = scaled(raw.log_probabilities, saved[mode]["temperature"])
    np.testing.assert_allclose(applied.log_probabilities, wanted, atol=1e-5)
    assert -applied.label_log_p.mean() == pytest.approx(saved[mode]["nll_after"], rel=1e-4)


def test_the_file_names_the_step_and_the_data(once_calibrated, held_out):
    saved = json.loads((once_calibrated / "calibration.json").read_text())
    counts = [saved[name] for name in ("step", "num_images", "num_candidates", "num_samples")]
    assert counts == [60, 160, len(NAMES), 16]
    assert saved["data"] == [str(held_out)]
    assert saved["noiseless"]["temperature"] != saved["monte_carlo"]["temperature"]
    assert 0 < saved["noiseless"]["standard_error"] < 2 * saved["noiseless"]["temperature"]


def test_classify_scales_by_default_and_shows_the_probabilities_as_trained_on_request(capsys, once_calibrated, image):
    raw, was_calibrated = classified(capsys, once_calibrated, image, "--uncalibrated", "--samples", 16)
    assert not was_calibrated
    found, is_calibrated = classified(capsys, once_calibrated, image)
    assert is_calibrated
    fits = json.loads((once_calibrated / "calibration.json").read_text())
    for mode, figure in (("noiseless", "probability"), ("monte_carlo", "noisy_mean")):
        log_p = np.log([raw[name][figure] for name in NAMES])
        wanted = special.softmax(log_p / fits[mode]["temperature"])
        np.testing.assert_allclose([found[name][figure] for name in NAMES], wanted, rtol=1e-3)
    for name in NAMES:
        assert found[name]["raw_probability"] == pytest.approx(raw[name]["probability"], rel=1e-5)
        assert raw[name]["raw_probability"] == raw[name]["probability"]


@pytest.mark.parametrize(
    ("flags", "samples", "warns"), [((), 16, False), (("--samples", 8), 8, True), (("--uncalibrated",), 32, False)]
)
def test_classify_draws_as_many_samples_as_the_temperature_was_fitted_for(
    capsys, once_calibrated, image, flags, samples, warns
):
    command = ["classify", image, "--checkpoint", once_calibrated, "--labels", ",".join(NAMES), "--json", *flags]
    assert main(list(map(str, command))) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)[0]["samples"] == samples
    assert ("fitted for 16 noise samples and is applied to 8: give --samples 16, or run" in captured.err) == warns


@pytest.mark.parametrize(("samples", "warns"), [(16, False), (8, True), (0, False)])
def test_an_evaluation_with_other_samples_than_the_temperature_says_so_once(
    capsys, calibrated, held_out, samples, warns
):
    command = ["zero-shot", "--checkpoint", calibrated, "--data", f"held={held_out}", "--samples", samples]
    assert main(list(map(str, command))) == 0
    assert capsys.readouterr().err.count("fitted for 16 noise samples and is applied to 8") == warns


@pytest.mark.parametrize(("flags", "caption"), [((), "calibrated on 160 images of"), (("--uncalibrated",), "not cal")])
def test_the_table_of_classify_says_whether_it_is_calibrated(capsys, once_calibrated, image, flags, caption):
    arguments = (image, "--checkpoint", once_calibrated, "--labels", ",".join(NAMES), *flags)
    assert main(["classify", *map(str, arguments)]) == 0
    assert caption in " ".join(capsys.readouterr().out.split())


def test_a_zero_shot_record_and_its_report_say_that_it_is_calibrated(capsys, calibrated, held_out):
    figures = {}
    for flags in (("--uncalibrated",), ()):
        command = ["zero-shot", "--checkpoint", calibrated, "--data", f"held={held_out}", "--samples", 16, *flags]
        assert main(list(map(str, command))) == 0
        shown = capsys.readouterr().out
        record = json.loads((calibrated / "evaluations" / "zero_shot_held.json").read_text())
        assert ("calibrated on 160 images" in shown) == (not flags)
        assert ("calibrated" in record["settings"]) == (not flags)
        figures[flags] = record["figures"]
    saved = json.loads((calibrated / "calibration.json").read_text())
    raw, applied = figures["--uncalibrated",], figures[()]
    assert applied["nll"] == pytest.approx(saved["noiseless"]["nll_after"], rel=1e-4)
    assert applied["noisy/nll"] == pytest.approx(saved["monte_carlo"]["nll_after"], rel=1e-4)
    assert applied["top1"] == raw["top1"]
    # What is fitted to other halves of the set is relative to what was applied, so that the product stays.
    factors = saved["noiseless"]["temperature"] * applied["calibrated/temperature_factor"]
    assert factors == pytest.approx(raw["calibrated/temperature_factor"], rel=1e-3)
    assert applied["calibrated/nll"] == pytest.approx(raw["calibrated/nll"], rel=1e-3)
    assert main(["report", str(calibrated)]) == 0
    page = (calibrated / "report.html").read_text()
    assert "calibrated beforehand" in page
    assert "calibrated on 160 images of" in page


def test_the_temperatures_of_another_step_are_ignored_with_a_message(capsys, calibrated, image):
    path = calibrated / "calibration.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "step": 59}))
    command = ["classify", image, "--checkpoint", calibrated, "--labels", ",".join(NAMES), "--json"]
    assert main(list(map(str, command))) == 0
    captured = capsys.readouterr()
    assert "fitted at step 59, the run is at 60: ignored" in captured.err
    assert not json.loads(captured.out)[0]["calibrated"]


@pytest.mark.parametrize("to", ["npz", "huggingface"])
def test_an_exported_temperature_is_multiplied_by_the_fitted_one(capsys, calibrated, tmp_path, to):
    def log_temperature(name, *flags):
        output = tmp_path / name
        assert main(["export", "--checkpoint", str(calibrated), "--to", to, "--output", str(output), *flags]) == 0
        if to == "npz":
            with np.load(output) as arrays:
                return -float(arrays["t"][0])
        return -float(load_file(output / "model.safetensors")["logit_scale"].item())

    fitted, trained = log_temperature("fitted"), log_temperature("trained", "--uncalibrated")
    saved = json.loads((calibrated / "calibration.json").read_text())
    assert fitted - trained == pytest.approx(np.log(saved["noiseless"]["temperature"]), abs=1e-5)
    assert "the temperature is multiplied by" in capsys.readouterr().err


@pytest.mark.parametrize(
    "head",
    [
        DeterministicContrastiveConfig(initial_bias=-10.0),
        DeterministicContrastiveConfig(temperature=FixedTemperature(0.2)),
        HetXLContrastiveConfig(temperature=BoundedTemperature(0.1, 0.3)),
    ],
)
def test_any_temperature_is_exported_and_scaled_unless_there_is_a_bias(
    capsys, lit_config, once_calibrated, tmp_path, head
):
    tiny.finish_untrained(dataclasses.replace(lit_config, task=dataclasses.replace(lit_config.task, head=head)))
    saved = json.loads((once_calibrated / "calibration.json").read_text())
    step = lit_config.length.amount
    (lit_config.run_dir / "calibration.json").write_text(json.dumps({**saved, "step": step}))
    output = tmp_path / "model.npz"
    capsys.readouterr()
    assert main(["export", "--checkpoint", str(lit_config.run_dir), "--to", "npz", "--output", str(output)]) == 0
    said = capsys.readouterr().err
    run = open_run(lit_config.run_dir)
    assert isinstance(run.task, ContrastiveTask)
    # Also without parameters, the head is a head.
    assert run.model().num_classes is None
    factor = 1.0 if head.initial_bias is not None else saved["noiseless"]["temperature"]
    assert ("not that of a sigmoid with a bias" in said) == (factor == 1)
    with np.load(output) as arrays:
        assert np.exp(-arrays["t"][0]) == pytest.approx(float(run.task.temperature(run.params)) * factor, rel=1e-5)
        if isinstance(head.temperature, FixedTemperature):
            assert np.exp(-arrays["t"][0]) == pytest.approx(0.2 * factor, rel=1e-5)


def test_a_head_without_parameters_is_evaluated(capsys, lit_config, data):
    head = DeterministicContrastiveConfig(temperature=FixedTemperature(0.2))
    tiny.finish_untrained(dataclasses.replace(lit_config, task=dataclasses.replace(lit_config.task, head=head)))
    command = ["zero-shot", "--checkpoint", lit_config.run_dir, "--data", f"seen={data / 'train'}"]
    assert main(list(map(str, command))) == 0
    assert "top1" in capsys.readouterr().out


def test_a_classifier_is_calibrated_on_its_labels(capsys, data, held_out, upstream, tmp_path, image):
    config = tiny.classifier(quickstart_lit_het_xl.get_config(), data, tmp_path / "classes")
    assert isinstance(config.task, ClassificationConfig)
    task = dataclasses.replace(config.task, num_classes=len(NAMES), loss=SoftmaxCrossEntropy())
    labelled = dataclasses.replace(config.data, labels=ClassIndex())
    cadence = Cadence(log_steps=20, save_steps=20)
    train(dataclasses.replace(config, task=task, data=labelled, length=Duration(20), cadence=cadence))
    assert main(["calibrate", str(config.run_dir), "--data", str(held_out)]) == 0
    calibration = open_run(config.run_dir).calibration
    assert isinstance(calibration, Calibration)
    assert calibration.num_candidates == len(NAMES)
    raw = predictions(config.run_dir, held_out, 0, is_calibrated=False)
    temperature = fit_temperature(raw.log_probabilities, raw.labels)
    assert calibration.noiseless.temperature == pytest.approx(temperature, rel=1e-3)
    command = ["classify", image, "--checkpoint", config.run_dir, "--labels", ",".join(NAMES), "--json"]
    capsys.readouterr()
    assert main([*map(str, command), "--coverage", "0.9"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["coverage"] == 0.9  # of its own classes
    assert "several labels an image" in refusal(capsys, "calibrate", upstream, "--data", held_out)


@pytest.fixture
def few(tmp_path):
    return tiny.write_data(tmp_path / "few", num_samples=98, seed=2) / "train"


def test_fewer_than_a_hundred_images_are_refused(capsys, trained, few, held_out):
    assert "has 98 images to calibrate on; take at least 100" in refusal(capsys, "calibrate", trained, "--data", few)
    line = refusal(capsys, "calibrate", trained, "--data", held_out, "--portion", "50%:")
    assert "has 80 images" in line


@pytest.fixture(scope="session")
def half_trained(upstream, tmp_path_factory):
    """A run on the first half of its shards, and the shards; what it has learned does not matter."""
    folder = tmp_path_factory.mktemp("halves")
    data = tiny.write_data(folder, num_samples=200, seed=3)
    config = tiny.shrink(quickstart_lit_het_xl.get_config(), data, folder / "run", pretrained=upstream)
    half = dataclasses.replace(config.data, portion=type(config.data.portion).parse(":50%"))
    tiny.finish_untrained(dataclasses.replace(config, data=half))
    return config.run_dir, data / "train"


@pytest.mark.parametrize("place", ["as trained", "copied", "one shard", "original gone"])
def test_images_of_the_training_are_refused_also_where_their_shards_were_copied(capsys, half_trained, tmp_path, place):
    run_dir, shards = half_trained
    given = {"one shard": shards / "shard-000000.tar", "as trained": shards}.get(place, tmp_path / "copy")
    if place in ("copied", "original gone"):
        shutil.copytree(shards, given)
    moved = shards.with_name("moved")
    if place == "original gone":
        shards.rename(moved)
    try:
        line = refusal(capsys, "calibrate", run_dir, "--data", given)
        assert f"{run_dir} was trained on images of" in line
        portion = "49.5%:" if place != "one shard" else "99%:"
        refused = refusal(capsys, "calibrate", run_dir, "--data", given, "--portion", portion)
        assert ("was trained on" in refused) == (place != "one shard")
    finally:
        if place == "original gone":
            moved.rename(shards)


def test_the_portion_that_was_held_out_of_the_training_is_accepted(capsys, half_trained):
    run_dir, shards = half_trained
    assert main(["calibrate", str(run_dir), "--data", str(shards), "--portion", "50%:"]) == 0
    assert "100 images" in capsys.readouterr().out


def test_training_shards_that_cannot_be_read_are_a_message(capsys, half_trained, held_out):
    run_dir, shards = half_trained
    moved = shards.rename(shards.with_name("moved"))
    try:
        assert main(["calibrate", str(run_dir), "--data", str(held_out)]) == 0
    finally:
        moved.rename(shards)
    assert f"not checked whether {run_dir} was trained on these images" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--samples", 0), "--samples 0 must be at least 1"),
        (("--portion", "half"), "--portion 'half' is not a portion"),
        (("--data", "nowhere"), "nowhere: no tar file matches"),
    ],
)
def test_a_wrong_flag_is_one_line(capsys, trained, held_out, flags, message):
    assert message in refusal(capsys, "calibrate", trained, "--data", held_out, *flags)


@pytest.mark.parametrize(
    "change",
    [
        lambda saved: [],
        lambda saved: {**saved, "noiseless": {**saved["noiseless"], "temperature": -1}},
        lambda saved: {**saved, "noiseless": {**saved["noiseless"], "temperature": "much"}},
        lambda saved: {**saved, "monte_carlo": 3},
        lambda saved: {**saved, "data": 1},
        lambda saved: {**saved, "num_images": None},
        lambda saved: {**saved, "other": 1},
    ],
)
def test_a_damaged_file_is_one_line_with_the_way_out(capsys, calibrated, image, change):
    path = calibrated / "calibration.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    line = refusal(capsys, "classify", image, "--checkpoint", calibrated, "--labels", "a,b")
    assert f"{path} is not a valid calibration" in line
    assert "delete it, and calibrate again" in line
