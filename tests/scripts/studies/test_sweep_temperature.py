"""The sweep over τ: what it trains, what it leaves, what it refuses."""

import dataclasses
import fcntl
import shutil
from pathlib import Path

import pytest

from lit_het.configs import experiment, glyph_classifier
from lit_het.errors import UserError
from lit_het.eval.suite import ZeroShotConfig
from lit_het.heads.classification_config import DeterministicConfig
from lit_het.heads.het_xl import HetXLConfig
from lit_het.heads.temperature import BoundedTemperature, FixedTemperature
from lit_het.search import grid, grid_runs, temperatures
from lit_het.search.temperatures import NLL, TOP1
from lit_het.training.durations import Duration
from lit_het.training.log import read_metrics
from scripts.studies.sweep_temperature import TAUS, check_taus, main, plot
from tests.scripts.conftest import classifier_options, refusal


@pytest.fixture(scope="module")
def arguments(config_file, data, tmp_path_factory):
    """A sweep of 2 steps over one fixed τ and the learned one, and one seed."""
    output = tmp_path_factory.mktemp("sweep")
    flags = ["--config", config_file, "--held-out", data / "train", "--output", output, "--length", 2]
    return [str(flag) for flag in [*flags, "--taus", 0.5, "--seeds", 1, "--batch-size", 16]]


@pytest.fixture(scope="module")
def finished(arguments):
    """The folder of the finished sweep."""
    assert main(arguments) == 0
    return Path(arguments[arguments.index("--output") + 1])


@pytest.mark.slow
def test_every_temperature_is_trained_and_evaluated(finished):
    results = {path.stem: grid_runs.read_result(path) for path in (finished / "results").iterdir()}
    assert set(results) == {"tau0.5_seed1", "learned_seed1"}
    fixed, learned = results["tau0.5_seed1"], results["learned_seed1"]
    assert fixed.figures["train/temperature"] == 0.5
    assert [fixed.setting["temperature"], learned.setting["temperature"]] == ["0.5", "learned"]
    assert 2.4 < learned.figures["train/temperature"] < 2.6, "it starts at the midpoint of 0.05 and 5"
    assert learned.num_parameters == fixed.num_parameters + 1
    for name, result in results.items():
        assert 0 < result.figures["supervised/held_out/noisy/nll"] < 20
        assert 0 <= result.figures["supervised/held_out/noisy/top1"] <= 1
        assert result.config["length"] == "2 steps"
        assert result.config["seed"] == result.config["data.seed"] == result.seed == 1
        config = experiment.load(finished / "runs" / name / "config.json")
        [evaluation], head = config.evaluations, config.task.head
        assert isinstance(evaluation, ZeroShotConfig)
        assert isinstance(head, HetXLConfig)
        assert evaluation.samples == head.sampling.num_eval_samples
        assert (
            experiment.fields(config.task.head.temperature).items()
            <= {field.removeprefix("task.head.temperature."): value for field, value in result.config.items()}.items()
        )


@pytest.mark.slow
def test_table_and_plot_are_written(finished):
    text = (finished / "table.md").read_text()
    assert text.index("| τ = 0.5 | 0.5 |") < text.index("| τ learned | 2.")
    assert (finished / "temperature.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def no_training(monkeypatch):
    monkeypatch.setattr("lit_het.search.grid_runs.train_unless_done", lambda *_, **__: pytest.fail("nothing is left"))


@pytest.mark.slow
def test_a_second_start_trains_nothing_and_prints_the_same_table(finished, arguments, capsys, no_training):
    before = {path: path.stat().st_mtime_ns for path in (finished / "results").iterdir()}
    table = (finished / "table.md").read_text()
    assert main(arguments) == 0
    assert {path: path.stat().st_mtime_ns for path in (finished / "results").iterdir()} == before
    assert (finished / "table.md").read_text() == table
    assert capsys.readouterr().err.count("already finished") == 2


@pytest.mark.slow
def test_a_run_that_was_trained_but_not_evaluated_is_not_trained_again(finished, arguments):
    path = finished / "results" / "tau0.5_seed1.json"
    before = grid_runs.read_result(path)
    assert len(path.read_text().splitlines()) == 1
    path.unlink()
    assert main(arguments) == 0
    records = read_metrics(finished / "runs" / "tau0.5_seed1" / "metrics.jsonl")
    assert sum("train/loss" in record for record in records) == 2
    after = grid_runs.read_result(path)
    assert after == dataclasses.replace(before, seconds=after.seconds), "the noise of evaluation has a seed"


@pytest.mark.slow
def test_a_run_that_another_process_has_begun_is_left_to_it(finished, arguments, tmp_path, capsys, no_training):
    for folder in ("locks", "results"):
        (tmp_path / folder).mkdir()
    shutil.copy(finished / "results" / "learned_seed1.json", tmp_path / "results")
    with (tmp_path / "locks" / "tau0.5_seed1").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert main([*arguments, "--output", str(tmp_path)]) == 0
    said = capsys.readouterr().err
    assert "tau0.5_seed1: in progress in another process" in said
    assert "1 run in progress in other processes" in said


def test_settings_are_the_grid_of_the_paper_and_the_learned_temperature(config_file, data, tmp_path):
    config = temperatures.load_classifier(classifier_options(config_file, data))
    head = DeterministicConfig(initial_bias=-3.0)
    planned = temperatures.plan(config, {"": head}, TAUS, (0.05, 5.0), [0], tmp_path)
    [evaluation] = planned[0].config.evaluations
    assert isinstance(evaluation, ZeroShotConfig)
    assert evaluation.samples == 0, "a deterministic head has no noise"
    heads = [one.config.task.head for one in planned]
    assert [head.temperature for head in heads[:-1]] == [FixedTemperature(tau) for tau in TAUS]
    assert heads[-1] == DeterministicConfig(temperature=BoundedTemperature(0.05, 5.0), initial_bias=-3.0)
    assert len({one.name for one in planned}) == len(planned)


@pytest.mark.parametrize("taus", [[0.04], [0.1, 5.5], [-1.0], [0.0]])
def test_a_temperature_that_cannot_be_learned_is_refused(taus):
    with pytest.raises(UserError, match=rf"--taus {taus[-1]:g} lies outside .* --learned 0.05 5"):
        check_taus(taus, (0.05, 5.0))


@pytest.mark.slow
def test_a_plot_without_a_fixed_temperature_can_be_drawn(finished, tmp_path):
    result = temperatures.with_noise(grid_runs.read_result(finished / "results" / "learned_seed1.json"))
    plot(grid.summarize([result], (temperatures.TEMPERATURE, NLL, TOP1)), tmp_path / "learned.png")
    assert (tmp_path / "learned.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--config", "nowhere.py"), "no configuration file nowhere.py"),
        (("--held-out", "nowhere"), "no folder nowhere; --held-out"),
        (("--taus", "9"), "--taus 9 lies outside"),
        (("--learned", "2", "1"), "0 < minimum < maximum"),
        (("--length", "1"), "schedule.warmup"),
        (("--output", __file__), "is a file; --output takes a folder"),
        (("--seeds", "-1"), "seed = -1 must be at least 0"),
    ],
)
def test_wrong_input_is_one_line(arguments, tmp_path, capsys, flags, expected):
    line = refusal(capsys, main, *arguments, "--output", tmp_path, *flags)
    assert line.startswith("sweep_temperature: ")
    assert expected in line


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("quickstart_lit_het_xl", "quickstart_lit_het_xl trains an image-text model"),
        ("quickstart_upstream", "quickstart_upstream trains with several labels per image"),
    ],
)
def test_other_tasks_than_classifiers_of_one_label_are_refused(data, name, expected):
    with pytest.raises(UserError, match=expected):
        temperatures.load_classifier(classifier_options(Path(name), data))


def test_held_out_images_of_other_classes_are_refused(config_file, tmp_path):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "classnames.txt").write_text("one\ntwo\n")
    with pytest.raises(UserError, match="has 2 classes, but the classifier has 8"):
        temperatures.load_classifier(classifier_options(config_file, tmp_path))


def test_glyphs_are_drawn_once_if_they_are_missing(data, tmp_path, monkeypatch):
    written = []

    def write(directory, glyphs):
        written.append(glyphs.seed)
        directory.mkdir()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(temperatures, "write_data", write)
    monkeypatch.setattr(temperatures, "read_classnames", lambda directory: ("name",) * glyph_classifier.NUM_NAMES)
    path = Path(experiment.__file__).with_name("glyph_classifier.py")
    for length in (None, Duration(7)):
        config = temperatures.load_classifier(classifier_options(path, data, length))
    assert written == [0]
    assert config.length == Duration(7)
