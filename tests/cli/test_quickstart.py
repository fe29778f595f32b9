"""`lit-het quickstart` with fewer characters and smaller towers in a few steps: the whole path, not its figures."""

import contextlib
import dataclasses
import json
import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from lit_het.apps.quickstart import running
from lit_het.apps.quickstart.clock import Clock
from lit_het.apps.quickstart.evaluation import Models
from lit_het.apps.quickstart.report import describe_condition, describe_new_images
from lit_het.apps.quickstart.running import write_data
from lit_het.apps.report import report
from lit_het.calibrations import Calibration, FittedTemperature
from lit_het.cli.main import main
from lit_het.configs import quickstart_lit_deterministic, quickstart_upstream
from lit_het.data_pipelines.glyphs import GlyphConfig
from lit_het.errors import UserError
from lit_het.eval.evaluation import Drawing, Record, read_records
from lit_het.eval.report.page import NOTHING
from lit_het.eval.saved_runs import SavedRun
from lit_het.models.calibration.images import calibrate
from lit_het.models.calibration.saved import write_calibration
from lit_het.towers.transformer import EncoderConfig
from lit_het.training.durations import Duration
from lit_het.training.schedules import Schedule
from lit_het.training.train import train_unless_done
from tests import tiny
from tests.cli.conftest import refusal

SETS = ("held_out_typeface", "held_out_characters", "held_out_characters_among_held_out")
TYPEFACES = ("DejaVuSans", "DejaVuSerif", "DejaVuSerif-Italic")  # the last one is held out
HEADINGS = (
    "Right answers, and sure ones",
    "What HET-XL with smoothed labels buys",
    "Homoglyphs",
    "Top class names",
    "Retrieval",
    "Calibration",
    "Training",
)
FITTED = "The fitted NLL of HET-XL with smoothed labels on new images is"
FIGURES = ("top1", "top5", "mean_reciprocal_rank", "nll", "ece")


@pytest.fixture
def small(monkeypatch):
    """Cuts the quickstart's configurations; the code that runs them stays."""
    # float32, as in tests/tiny.py.
    small_encoder = EncoderConfig(width=64, depth=1, mlp_width=64, num_heads=2, unrolled=True, compute_type="float32")

    def shrink(get_config):
        def get_small_config(*root):
            config = get_config(*root)
            task = config.task
            tower = dataclasses.replace(task.image_tower, encoder=small_encoder)
            towers = {"image_tower": tower}
            if task.text_tower is not None:
                towers["text_tower"] = dataclasses.replace(task.text_tower, encoder=small_encoder, embedding_size=64)
            schedule = Schedule(1e-3, Duration(1))
            return dataclasses.replace(
                config, task=dataclasses.replace(task, **towers), length=Duration(2), schedule=schedule
            )

        return get_small_config

    # The HET-XL configuration is made from the deterministic one.
    for module in (quickstart_upstream, quickstart_lit_deterministic):
        monkeypatch.setattr(module, "get_config", shrink(module.get_config))
    monkeypatch.setattr("lit_het.data_pipelines.glyphs.TYPEFACES", TYPEFACES)
    monkeypatch.setattr("lit_het.apps.quickstart.running.train_unless_done", train_one)
    monkeypatch.setattr("lit_het.apps.quickstart.running.report", report_without_drawings)
    monkeypatch.setattr("lit_het.apps.quickstart.running.calibrate", calibrate_some)
    monkeypatch.setattr(
        quickstart_upstream,
        "glyphs",
        lambda seed: GlyphConfig(
            scripts=("digit", "greek"), min_typefaces=len(TYPEFACES), noisy_script="greek", seed=seed
        ),
    )


def test_half_of_the_data_is_not_taken_for_all_of_it(small, tmp_path, monkeypatch):
    monkeypatch.setattr("lit_het.apps.quickstart.running.train_sentencepiece", _interrupt)
    assert main(["quickstart", "--run-dir", str(tmp_path)]) == 130
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_the_quickstart_writes_results_and_report_and_goes_on_where_it_stopped(small, tmp_path, capsys, monkeypatch):
    run_dir = tmp_path / "quickstart"
    with monkeypatch.context() as patch:

        def train_clean_runs(config):
            if config.run_dir.parent.name == "noisy":  # after the others were calibrated
                raise KeyboardInterrupt
            train_one(config)

        patch.setattr("lit_het.apps.quickstart.running.train_unless_done", train_clean_runs)
        assert main(["quickstart", "--run-dir", str(run_dir)]) == 130
    drawn = (run_dir / "data" / "glyphs.json").stat().st_mtime_ns

    assert main(["quickstart", "--run-dir", str(run_dir)]) == 0
    results = json.loads((run_dir / "results.json").read_text())
    for condition in ("clean", "noisy"):
        for model in ("deterministic", "het_xl"):
            of_model = results[condition][model]
            for name in SETS:
                for figure in FIGURES:
                    assert f"{name}/{figure}" in of_model
                assert 0 <= of_model[f"{name}/top1"] <= of_model[f"{name}/top5"] <= 1
            assert of_model["held_out_typeface/calibrated/nll"] > 0
            for names, same in (("known names", "held_out_typeface"), ("new names", "held_out_characters")):
                assert of_model[f"answers/as trained/{names}/right"] == pytest.approx(of_model[f"{same}/top1"])
                assert of_model[f"answers/as trained/{names}/nll"] == pytest.approx(of_model[f"{same}/nll"], rel=1e-5)
    assert 0 <= results["noisy"]["het_xl"]["noisy_caption_auroc"] <= 1
    assert results["num_names"] > 200
    assert results["seconds"] > results["compile_seconds"] > 0
    assert 1e8 < results["peak_memory_bytes"] < 1e11
    assert set(results["noise_of_homoglyphs"]) == {"all characters", "plain characters", "characters with marks"}
    assert (run_dir / "data" / "glyphs.json").stat().st_mtime_ns == drawn, "finished stages are not done again"

    for run in ("deterministic", "het_xl", "noisy/deterministic", "noisy/het_xl"):
        assert (run_dir / run / "calibration.json").is_file()
        assert not any("calibrated" in record.settings for record in read_records(run_dir / run)), "figures as trained"

    page = (run_dir / "report.html").read_text()
    assert all(f"<h2>{heading}</h2>" in page for heading in HEADINGS)
    assert "http://" not in page.replace("http://www.w3.org/", "")
    assert "https://" not in page

    capsys.readouterr()
    assert "finished quickstart" in refusal(capsys, "quickstart", "--run-dir", run_dir)


@pytest.mark.slow
def test_a_fast_quickstart_has_the_report_of_wrong_captions(small, tmp_path, capsys, monkeypatch):
    # With the characters of the others, so that the untrained tower is better than chance.
    monkeypatch.setattr(running, "FAST", dataclasses.replace(running.FAST, scripts=None, steps=None))
    assert main(["quickstart", "--fast", "--run-dir", str(tmp_path / "fast")]) == 0
    said = capsys.readouterr().err
    assert re.search(r"^lit-het: about \d+:\d\d on this machine$", said, re.MULTILINE)
    assert re.search(r"^lit-het: noisy het_xl \(5 of 8\), about \d+:\d\d left$", said, re.MULTILINE)
    results = json.loads((tmp_path / "fast/results.json").read_text())
    assert "clean" not in results
    assert 0 <= results["noisy"]["het_xl"]["noisy_caption_auroc"] <= 1
    page = (tmp_path / "fast/report.html").read_text()
    assert all(f"<h2>{heading}</h2>" in page for heading in HEADINGS[:-1])  # nothing was trained


def test_another_seed_or_size_in_the_same_directory_is_refused(small, tmp_path, capsys):
    (tmp_path / "stages.json").write_text('{"seed": 3, "stages": {}}')
    assert "started with seed 3" in refusal(capsys, "quickstart", "--run-dir", tmp_path, "--seed", 4)
    line = refusal(capsys, "quickstart", "--run-dir", tmp_path, "--seed", 3, "--fast")
    assert "was started without --fast; start it so again or give another --run-dir" in line


def test_data_of_another_configuration_are_refused(tmp_path):
    directory = tmp_path / "data"
    directory.mkdir()
    glyphs = GlyphConfig(noisy_script="greek")
    (directory / "glyphs.json").write_text(json.dumps({"config": dataclasses.asdict(glyphs)}))
    write_data(directory, glyphs)
    (directory / "glyphs.json").write_text('{"config": {"noisy_script": "greek"}}')
    write_data(directory, glyphs)  # as an earlier version drew it, without the other fields
    with pytest.raises(UserError, match="was drawn with noisy_script = greek, not cyrillic; give another --run-dir"):
        write_data(directory, GlyphConfig(noisy_script="cyrillic"))


def test_a_finding_says_better_only_beyond_two_standard_errors_and_of_each_figure_by_itself():
    def run(nll, ece):
        figures, errors = {"top1": 0.5, "ece": ece}, {"ece": 0.005}
        arrays = {"nll/calibrated": nll, "true_class": np.arange(len(nll))}
        records = {
            ("zero_shot", name): Record(
                "zero_shot",
                name,
                figures,
                errors,
                {},
                1,
                {},
                Drawing(arrays, {}),
            )
            for name in ("held_out_typeface", "held_out_characters")
        }
        return SavedRun("run", Path(), {}, [], records)

    # Images differ much, and the heads on one image little: only the paired error is small.
    nll, noise = np.random.default_rng(0).standard_normal((2, 400)).astype(np.float32)
    for difference, verdict in ((-0.02, "better"), (-0.005, "not significantly different"), (0.02, "worse")):
        ours = run(nll + difference + 0.1 * (noise - noise.mean()) / noise.std(), 0.103)
        models = Models(run(nll, 0.04), ours, {}, {})
        sentence = describe_condition(models, "clean captions")
        found = f"(with a temperature from the other half of them) is {verdict} ("
        assert f"trained with clean captions: on new images its fitted NLL {found}" in sentence
        assert f"on new characters the fitted NLL is {verdict} (" in sentence
        assert sentence.count(f": {difference:+.3f} ± 0.005)") == 2
        assert "its calibration error before fitting is worse (10.3% ± 0.5 against 4.0% ± 0.5)" in sentence
        both = describe_new_images({"clean": models, "noisy": models})
        assert both == f"{FITTED} {verdict} with wrong captions and with clean captions."
    other = Models(run(nll, 0.04), run(nll - 1, 0.103), {}, {})
    said = describe_new_images({"clean": models, "noisy": other})
    assert said == f"{FITTED} better with wrong captions, worse with clean captions."


def test_the_time_left_follows_the_machine_and_then_its_stages(tmp_path, monkeypatch, capsys):
    seconds = iter([1000.0, 1000.0, 1100.0, 1100.0, 1100.0])  # of the clock when it is read
    fake = mock.Mock(monotonic=lambda: next(seconds))
    monkeypatch.setattr("lit_het.apps.quickstart.clock.time", fake)
    monkeypatch.setattr("lit_het.apps.quickstart.clock._slowness", lambda: 2.0)
    monkeypatch.setattr("lit_het.apps.quickstart.clock._process_start", lambda: 990.0)
    clock = Clock(tmp_path, seed=0, fast=False, expected=[100.0, 100.0, 200.0])
    with clock.stage("data"):  # which takes as long as on the reference machine
        pass
    with clock.stage("upstream"):
        pass
    assert clock.stages == {"data": 110.0, "upstream": 0.0}
    printed = capsys.readouterr().err
    assert "about 13:20 on this machine" in printed
    # A quarter of all stages at twice the time, and one of them at its time: 300 s for 200.
    assert "upstream (2 of 3), about 7:30 left" in printed


def report_without_drawings(*arguments):
    """Leaves out the plots that every report has, and no plot of the quickstart itself: those are drawn before."""
    drawing = mock.MagicMock()
    canvases = {"canvas": lambda *_, **__: (drawing, drawing), "stacked_canvas": lambda *_: (drawing, drawing, drawing)}
    of_canvases = mock.patch.multiple("lit_het.eval.report.figures", **canvases)
    with of_canvases, mock.patch("lit_het.eval.report.canvas._svg", return_value=NOTHING):
        report(*arguments)


def train_one(config):
    """Trains the first run on clean captions; any other tower and head is as good in so few steps."""
    is_first = config.run_dir.parts[-2:] == ("quickstart", "deterministic")
    with contextlib.nullcontext() if is_first else tiny.untrained():
        train_unless_done(config)


def calibrate_some(run_dir, options):
    """Calibrates runs that are better than chance, which an untrained one need not be."""
    try:
        calibrate(run_dir, options)
    except UserError as error:
        if "predictions are no better than chance" not in str(error):
            raise
        write_calibration(run_dir, 2, Calibration(options.shards, "", "", 0, 0, 0, FittedTemperature(1, 0, 0, 0)))


def _interrupt(*_, **__):
    raise KeyboardInterrupt
