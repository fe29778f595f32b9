"""`lit-het calibrate` on finished runs, and the commands that apply what it fitted."""

import json
import shutil

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file
from scipy import special

from lit_het.calibrations import Calibration
from lit_het.configs import quickstart_lit_het_xl
from lit_het.data_pipelines.labels import ClassIndex
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.portions import Portion
from lit_het.errors import UserError
from lit_het.eval.evaluators.zero_shot import ZeroShot
from lit_het.eval.metrics.calibration import fit_temperature, scaled
from lit_het.eval.sets import ImageSet
from lit_het.eval.sets.open_sets import Sets
from lit_het.eval.suite import ZeroShotConfig
from lit_het.heads.contrastive import DeterministicContrastiveConfig, HetXLContrastiveConfig
from lit_het.heads.temperature import BoundedTemperature, FixedTemperature
from lit_het.losses.classification import SoftmaxCrossEntropy
from lit_het.models.calibration.saved import read_calibration
from lit_het.models.calibration.seen_images import seen
from lit_het.models.opening import open_run
from lit_het.tasks.two_towers import ContrastiveTask
from lit_het.training.cadence import Cadence
from lit_het.training.directory import load_config
from lit_het.training.durations import Duration
from lit_het.training.train import train
from tests import tiny
from tests.cli.conftest import changed, printed, refusal, run_command
from tests.cli.tiny_decoder import NAMES


@pytest.fixture
def image(tmp_path):
    Image.new("RGB", (40, 30), (255, 0, 0)).save(tmp_path / "red.png")
    return tmp_path / "red.png"


def classified(run_dir, image, *flags):
    """Returns a command that classifies."""
    return ["classify", image, "--checkpoint", run_dir, "--labels", ",".join(NAMES), *flags]


def fits_of(run_dir):
    return json.loads((run_dir / "calibration.json").read_text())


def predictions(run_dir, held_out, samples, *, is_calibrated):
    """Predictions for the held-out images by the path of evaluations, where labels are classes and not captions."""
    run = open_run(run_dir)
    sets = Sets(run.config.data.image_size, run.config.data.preprocessing, lambda: run.tower)
    evaluator = ZeroShotConfig(ImageSet("held out", str(held_out), ".")).build(sets)
    model = run.model(calibrated=is_calibrated)
    assert isinstance(evaluator, ZeroShot)
    recognition = evaluator.recognition
    features = evaluator.opened.features(model.features)
    return recognition.predict(recognition.predictor(model, samples), features)


@pytest.mark.parametrize(("mode", "samples"), [("noiseless", 0), ("monte_carlo", 16)])
def test_temperatures_are_those_of_the_evaluations_predictions_and_evaluations_apply_them(
    once_calibrated, held_out, mode, samples
):
    # The captions of these images are their class names, so that both have the same candidates.
    saved = fits_of(once_calibrated)
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
    saved = fits_of(once_calibrated)
    counts = [saved[name] for name in ("step", "num_images", "num_candidates", "num_samples")]
    assert counts == [60, 160, len(NAMES), 16]
    assert saved["data"] == [str(held_out)]
    assert saved["noiseless"]["temperature"] != saved["monte_carlo"]["temperature"]
    assert 0 < saved["noiseless"]["standard_error"] < 2 * saved["noiseless"]["temperature"]


def test_classify_scales_by_default_and_shows_the_probabilities_as_trained_on_request(capsys, once_calibrated, image):
    (as_trained,) = printed(capsys, *classified(once_calibrated, image, "--json", "--uncalibrated", "--samples", 16))
    (scaled_by_default,) = printed(capsys, *classified(once_calibrated, image, "--json"))
    assert (as_trained["calibrated"], scaled_by_default["calibrated"]) == (False, True)
    raw, found = ({one["label"]: one for one in answer["labels"]} for answer in (as_trained, scaled_by_default))
    fits = fits_of(once_calibrated)
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
    run_command(*classified(once_calibrated, image, "--json", *flags))
    captured = capsys.readouterr()
    assert json.loads(captured.out)[0]["samples"] == samples
    assert ("fitted for 16 noise samples and is applied to 8: give --samples 16, or run" in captured.err) == warns


@pytest.mark.slow
@pytest.mark.parametrize(("samples", "warns"), [(16, False), (8, True), (0, False)])
def test_an_evaluation_with_other_samples_than_the_temperature_says_so_once(
    capsys, calibrated, held_out, samples, warns
):
    run_command("zero-shot", "--checkpoint", calibrated, "--data", f"held={held_out}", "--samples", samples)
    assert capsys.readouterr().err.count("fitted for 16 noise samples and is applied to 8") == warns


@pytest.mark.parametrize(("flags", "caption"), [((), "calibrated on 160 images of"), (("--uncalibrated",), "not cal")])
def test_the_table_of_classify_says_whether_it_is_calibrated(capsys, once_calibrated, image, flags, caption):
    run_command(*classified(once_calibrated, image, *flags))
    assert caption in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_a_zero_shot_record_and_its_report_say_that_it_is_calibrated(capsys, calibrated, held_out):
    figures = {}
    for flags in (("--uncalibrated",), ()):
        run_command("zero-shot", "--checkpoint", calibrated, "--data", f"held={held_out}", "--samples", 16, *flags)
        shown = capsys.readouterr().out
        record = json.loads((calibrated / "evaluations" / "zero_shot_held.json").read_text())
        assert ("calibrated on 160 images" in shown) == (not flags)
        assert ("calibrated" in record["settings"]) == (not flags)
        figures[flags] = record["figures"]
    saved = fits_of(calibrated)
    raw, applied = figures["--uncalibrated",], figures[()]
    assert applied["nll"] == pytest.approx(saved["noiseless"]["nll_after"], rel=1e-4)
    assert applied["noisy/nll"] == pytest.approx(saved["monte_carlo"]["nll_after"], rel=1e-4)
    assert applied["top1"] == raw["top1"]
    # What is fitted to other halves of the set is relative to what was applied, so that the product stays.
    factors = saved["noiseless"]["temperature"] * applied["calibrated/temperature_factor"]
    assert factors == pytest.approx(raw["calibrated/temperature_factor"], rel=1e-3)
    assert applied["calibrated/nll"] == pytest.approx(raw["calibrated/nll"], rel=1e-3)
    run_command("report", calibrated)
    page = (calibrated / "report.html").read_text()
    assert "calibrated beforehand" in page
    assert "calibrated on 160 images of" in page


def test_the_temperatures_of_another_step_are_ignored_with_a_message(capsys, calibrated, image):
    path = calibrated / "calibration.json"
    path.write_text(json.dumps({**fits_of(calibrated), "step": 59}))
    run_command(*classified(calibrated, image, "--json"))
    captured = capsys.readouterr()
    assert "fitted at step 59, the run is at 60: ignored" in captured.err
    assert not json.loads(captured.out)[0]["calibrated"]


@pytest.mark.parametrize("to", ["npz", "huggingface"])
def test_an_exported_temperature_is_multiplied_by_the_fitted_one(capsys, calibrated, tmp_path, to):
    def log_temperature(name, *flags):
        output = tmp_path / name
        run_command("export", "--checkpoint", calibrated, "--to", to, "--output", output, *flags)
        if to == "npz":
            with np.load(output) as arrays:
                return -float(arrays["t"][0])
        return -float(load_file(output / "model.safetensors")["logit_scale"].item())

    fitted, trained = log_temperature("fitted"), log_temperature("trained", "--uncalibrated")
    temperature = fits_of(calibrated)["noiseless"]["temperature"]
    assert fitted - trained == pytest.approx(np.log(temperature), abs=1e-5)
    assert "the temperature is multiplied by" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "head",
    [
        DeterministicContrastiveConfig(initial_bias=-10.0),
        DeterministicContrastiveConfig(temperature=FixedTemperature(0.2)),
        HetXLContrastiveConfig(temperature=BoundedTemperature(0.1, 0.3)),
    ],
)
def test_any_temperature_is_exported_and_scaled_unless_there_is_a_bias(
    capsys, lit_config, once_calibrated, data, tmp_path, head
):
    tiny.finish_untrained(changed(lit_config, task__head=head))
    saved, output = fits_of(once_calibrated), tmp_path / "model.npz"
    step = lit_config.length.amount
    (lit_config.run_dir / "calibration.json").write_text(json.dumps({**saved, "step": step}))
    capsys.readouterr()
    run_command("export", "--checkpoint", lit_config.run_dir, "--to", "npz", "--output", output)
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
            # A head without parameters is evaluated too.
            run_command("zero-shot", "--checkpoint", lit_config.run_dir, "--data", f"seen={data / 'train'}")
            assert "top1" in capsys.readouterr().out


@pytest.mark.slow
def test_a_classifier_is_calibrated_on_its_labels(capsys, data, held_out, upstream, tmp_path, image):
    config = tiny.classifier(quickstart_lit_het_xl.get_config(), data, tmp_path / "classes")
    task = changed(config.task, num_classes=len(NAMES), loss=SoftmaxCrossEntropy())
    cadence = Cadence(log_steps=20, save_steps=20)
    train(changed(config, task=task, data__labels=ClassIndex(), length=Duration(20), cadence=cadence))
    run_command("calibrate", config.run_dir, "--data", held_out)
    calibration = open_run(config.run_dir).calibration
    assert isinstance(calibration, Calibration)
    assert calibration.num_candidates == len(NAMES)
    raw = predictions(config.run_dir, held_out, 0, is_calibrated=False)
    temperature = fit_temperature(raw.log_probabilities, raw.labels)
    assert calibration.noiseless.temperature == pytest.approx(temperature, rel=1e-3)
    (found,) = printed(capsys, *classified(config.run_dir, image, "--json", "--coverage", "0.9"))
    assert found["coverage"] == 0.9  # of its own classes
    assert "several labels an image" in refusal(capsys, "calibrate", upstream, "--data", held_out)


@pytest.fixture(scope="module")
def half_trained(upstream, tmp_path_factory):
    """A run on the first half of its shards, and the shards; what it has learned does not matter."""
    folder = tmp_path_factory.mktemp("halves")
    data = tiny.write_data(folder, num_samples=200, seed=3)
    config = tiny.shrink(quickstart_lit_het_xl.get_config(), data, folder / "run", pretrained=upstream)
    tiny.finish_untrained(changed(config, data__portion=Portion(0, 50)))
    return config.run_dir, data / "train"


@pytest.mark.parametrize("place", ["as trained", "copied", "one shard", "original gone"])
def test_images_of_the_training_are_known_also_where_their_shards_were_copied(half_trained, tmp_path, place):
    run_dir, shards = half_trained
    given = {"one shard": shards / "shard-000000.tar", "as trained": shards}.get(place, tmp_path / "copy")
    if place in ("copied", "original gone"):
        shutil.copytree(shards, given)
    moved = shards.with_name("moved")

    def found(portion):
        read = changed(load_config(run_dir).data, shards=(str(given),), portion=portion)
        return seen(run_dir, Loader(read))

    if place == "original gone":
        shards.rename(moved)
    try:
        by = [found(Portion(first)) for first in (0, 99 if place == "one shard" else 49.5)]
        assert [one and one.model for one in by] == [run_dir] * 2
        assert place == "one shard" or found(Portion(50)) is None
    finally:
        if place == "original gone":
            moved.rename(shards)


def test_images_of_the_training_are_refused(capsys, half_trained):
    run_dir, shards = half_trained
    line = refusal(capsys, "calibrate", run_dir, "--data", shards, "--portion", "49.5%:")
    assert f"{run_dir} was trained on images of" in line


def test_the_portion_that_was_held_out_of_the_training_is_accepted(capsys, half_trained):
    run_dir, shards = half_trained
    run_command("calibrate", run_dir, "--data", shards, "--portion", "50%:")
    assert "100 images" in capsys.readouterr().out


def test_training_shards_that_cannot_be_read_are_a_message(capsys, half_trained, held_out):
    run_dir, shards = half_trained
    moved = shards.rename(shards.with_name("moved"))
    try:
        run_command("calibrate", run_dir, "--data", held_out)
    finally:
        moved.rename(shards)
    assert f"not checked whether {run_dir} was trained on these images" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--samples", 0), "--samples 0 must be at least 1"),
        (("--portion", "half"), "--portion 'half' is not a portion"),
        (("--data", "nowhere"), "nowhere: no tar file matches"),
        (("--data", "few/train"), "has 98 images to calibrate on; take at least 100"),
        (("--portion", "50%:"), "has 80 images"),
    ],
)
def test_wrong_flags_and_fewer_than_a_hundred_images_are_one_line(
    capsys, trained, held_out, tmp_path, monkeypatch, flags, message
):
    monkeypatch.chdir(tmp_path)
    tiny.write_data(tmp_path / "few", num_samples=98, seed=2)
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
def test_a_damaged_file_is_one_line_with_the_way_out(once_calibrated, tmp_path, change):
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(change(fits_of(once_calibrated))))
    with pytest.raises(UserError, match=rf"^{path} is not a valid calibration.*delete it, and calibrate again$"):
        read_calibration(tmp_path, 60)
