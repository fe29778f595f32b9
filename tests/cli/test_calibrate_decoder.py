"""`lit-het calibrate` of a decoder, and the commands that apply the temperature of tokens."""

import contextlib
import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

import lit_het
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.portions import Portion
from lit_het.eval.answers import features_of
from lit_het.eval.metrics.calibration import scaled
from lit_het.models.calibration import tokens as token_calibration
from lit_het.models.calibration.images import CalibrateOptions, calibrate
from lit_het.models.calibration.tokens import read_tokens
from lit_het.models.opening import open_run
from lit_het.models.writer import Writer
from tests import tiny
from tests.cli.conftest import printed, refusal, run_command
from tests.cli.test_evaluate_decoder import evaluated
from tests.cli.tiny_decoder import NAMES, STEPS, pixels


@pytest.fixture(scope="module")
def held_out(tmp_path_factory):
    """Images that were not trained on; every fifth has the name of another shape, so that no temperature is 0."""
    return tiny.write_data(tmp_path_factory.mktemp("held_out"), num_samples=120, seed=1, every_wrong=5) / "train"


@pytest.fixture(scope="module")
def calibrated(decoder, held_out, tmp_path_factory):
    """A calibrated copy of the run; tests only read it."""
    run_dir = shutil.copytree(decoder.run_dir, tmp_path_factory.mktemp("calibrated") / "run")
    with (run_dir / "printed.txt").open("w") as file, contextlib.redirect_stdout(file):
        run_command("calibrate", run_dir, "--data", held_out, "--samples", "4")
    return run_dir


@pytest.fixture(scope="module")
def saved(calibrated):
    return json.loads((calibrated / "calibration.json").read_text())


def tokens_of(run, decoder, held_out, samples=(0,)):
    data = dataclasses.replace(decoder.data, shards=(str(held_out),), mixture=(), batch_size=8)
    writer = run.model(calibrated=False).writer
    assert isinstance(writer, Writer)
    return read_tokens(writer, Loader(data, run.tokenizer), samples, "held out")


def twice(params):
    return jax.tree.map(lambda x: 2 * x, params)


def test_twice_the_logits_have_twice_the_temperature(decoder, held_out):
    run = open_run(decoder.run_dir)
    # Logits are products with the embedding of tokens, and a bias.
    doubled = {
        "decoder": {**run.params["decoder"], "norm": twice(run.params["decoder"]["norm"])},
        "head": {**run.params["head"], "logits": twice(run.params["head"]["logits"])},
    }
    other = dataclasses.replace(run, params={**run.params, **doubled})
    of_run, of_other = (tokens_of(one, decoder, held_out) for one in (run, other))
    one, two = (tokens.fit(0) for tokens in (of_run, of_other))
    assert two.temperature == pytest.approx(2 * one.temperature, rel=1e-3)
    assert two.nll_after == pytest.approx(one.nll_after, rel=1e-4)
    # Scaled by its own temperature first, the fit finds the 2 itself.
    calibrated = dataclasses.replace(of_other, log_p={0: scaled(of_other.log_p[0], one.temperature)})
    assert calibrated.fit(0).temperature == pytest.approx(2, rel=1e-3)


def test_the_file_is_that_of_other_models_and_the_fit_is_better(saved, decoder, held_out, capsys):
    assert [saved[name] for name in ("step", "num_images", "num_samples")] == [STEPS, 120, 4]
    assert saved["num_candidates"] == decoder.task.decoder.vocabulary_size
    assert "conformal" not in saved
    for mode in ("noiseless", "monte_carlo"):
        assert saved[mode]["temperature"] > 1.05, "a fifth of the names are wrong"
        assert saved[mode]["nll_after"] < saved[mode]["nll_before"]
        assert 0 < saved[mode]["standard_error"] < saved[mode]["temperature"]


def test_calibrating_prints_what_it_changes_per_token(calibrated):
    shown = " ".join((calibrated / "printed.txt").read_text().split())
    assert "120 texts, means over " in shown
    for column in ("NLL before", "NLL after", "ECE before", "ECE after"):
        assert column in shown


@pytest.mark.slow
def test_evaluations_have_the_likelihood_of_the_fit(calibrated, saved, held_out, tmp_path):
    flags = ("--samples", 4, "--num-tokens", 1)  # of what is written; the captions are predicted whole
    found = evaluated(tmp_path, "captioning", calibrated, held_out, *flags)
    raw = evaluated(tmp_path, "captioning", calibrated, held_out, *flags, "--uncalibrated")
    for mode, part in (("noiseless", ""), ("monte_carlo", "noisy/")):
        for figures, when in ((found, "after"), (raw, "before")):
            nll = figures[f"captioning/shapes/{part}log_perplexity"]
            assert nll == pytest.approx(saved[mode][f"nll_{when}"], rel=1e-3)
        assert found[f"captioning/shapes/{part}token_ece"] < raw[f"captioning/shapes/{part}token_ece"]
        assert found[f"captioning/shapes/{part}token_top1"] == raw[f"captioning/shapes/{part}token_top1"]


@pytest.mark.slow
def test_captions_keep_their_text_and_change_their_probability(calibrated, saved, decoder, tmp_path, capsys):
    image = pixels(decoder, 2)[1]
    (tmp_path / "bar.jpg").write_bytes(tiny.encode_jpeg(image))
    line = ["caption", tmp_path / "bar.jpg", "--checkpoint", calibrated, "--json"]
    [found] = printed(capsys, *line, "--samples", 4)
    [raw] = printed(capsys, *line, "--samples", 4, "--uncalibrated")
    [one], [other] = found["texts"], raw["texts"]
    assert one["text"] == other["text"] == NAMES[1]
    assert one["log_p"] < other["log_p"] - 0.01, "T is above 1"
    assert found["calibration"].startswith("calibrated on 120 images")
    assert raw["calibration"] == "not calibrated"
    # As many samples as the temperature was fitted for.
    [found] = printed(capsys, *line)
    assert found["texts"][0]["log_p"] == pytest.approx(one["log_p"], abs=1e-5)


@pytest.fixture(scope="module")
def model(calibrated):
    return lit_het.load(calibrated)


@pytest.mark.slow
def test_writing_ranking_and_python_have_the_same_probabilities(calibrated, model, decoder):
    image = pixels(decoder, 2)[1]
    raw, writer = lit_het.load(calibrated, calibrated=False), model.run.model().writer
    assert writer is not None
    for samples in (0, 4):
        [written], [as_trained] = model.caption(image, samples=samples), raw.caption(image, samples=samples)
        assert written.text == as_trained.text
        ranked = writer.rank(next(features_of(writer.features, [image], 1)), "a shape:", NAMES, samples=samples)
        assert ranked[0].text == written.text
        assert ranked[0].log_p == pytest.approx(written.log_p, abs=1e-4)
        assert ranked[0].log_p < as_trained.log_p - 0.01
        for (low, high), p in zip(ranked[0].bands or [], ranked[0].probabilities, strict=False):
            assert low - 0.05 <= p <= high + 0.05


@pytest.mark.slow
def test_a_folder_of_weights_keeps_the_temperature(model, decoder, tmp_path):
    image = pixels(decoder, 2)[1]
    model.save_pretrained(tmp_path / "folder")
    again = lit_het.load(tmp_path / "folder")
    assert again.caption(image) == model.caption(image)
    assert again.calibration.startswith("calibrated on 120 images")


def test_of_many_tokens_some_are_taken(decoder, held_out, monkeypatch):
    run = open_run(decoder.run_dir)
    every = tokens_of(run, decoder, held_out)
    monkeypatch.setattr(token_calibration, "_MOST_ENTRIES", len(every.label) * every.log_p[0].shape[1] // 3)
    some = tokens_of(run, decoder, held_out)
    np.testing.assert_array_equal(some.number, every.number[::4])
    np.testing.assert_array_equal(some.log_p[0], every.log_p[0][::4])


def test_images_of_training_and_too_few_images_are_refused(decoder, held_out, capsys):
    [shards], run_dir = decoder.data.shards, decoder.run_dir
    assert "40 images to calibrate on; take at least 100" in refusal(capsys, "calibrate", run_dir, "--data", shards)
    assert "was trained on images of" in refusal(capsys, "calibrate", run_dir, "--data", shards, held_out)
    with pytest.raises(lit_het.UserError, match="take at least 100"):
        calibrate(run_dir, CalibrateOptions((str(held_out),), Portion(50)))
