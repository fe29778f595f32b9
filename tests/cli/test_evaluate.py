"""`lit-het evaluate` and the siblings of `lit-het zero-shot`, on trained runs."""

import contextlib
import dataclasses
import io
import json
import re
import shutil
from collections.abc import Mapping

import jax
import numpy as np
import pytest

from lit_het import distributed
from lit_het.cli.main import main
from lit_het.configs import experiment, lit_e3_b32_het_xl, quickstart_lit_het_xl
from lit_het.errors import UserError
from lit_het.eval.evaluation import Evaluation, cell, read_records
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ClassNamesConfig, EnsembleConfig, RetrievalConfig, ZeroShotConfig
from lit_het.models.evaluation import evaluate, table
from lit_het.models.predictor import Programs
from lit_het.sharding import MeshConfig
from lit_het.tasks import quantities
from lit_het.tasks.classifier import ClassificationTask
from lit_het.training.log import read_metrics
from lit_het.training.train import train
from tests import tiny
from tests.cli.conftest import changed, refusal, run_command, write_splits


@pytest.fixture
def run(trained_lit, tmp_path):
    return shutil.copytree(trained_lit.run_dir, tmp_path / "run", ignore=shutil.ignore_patterns("evaluations"))


def test_no_figure_is_minus_zero():
    evaluation = Evaluation("zero_shot", "pets", {"nll": -0.0, "excess_aurc": -1e-9})
    assert str(evaluation.figures["nll"]) == "0.0"
    assert (cell(evaluation, "nll"), cell(evaluation, "excess_aurc")) == ("0.0000", "0.0000")


def test_every_evaluation_of_a_file_is_printed_and_saved(run, shapes, tmp_path, capsys):
    suite = tmp_path / "suite.py"
    suite.write_text(
        "import dataclasses\n"
        "from lit_het.eval.fits import FewShotOptions\n"
        "from lit_het.eval.suite import EnsembleConfig, FewShotConfig, OutOfDistributionConfig\n"
        "from lit_het.eval.suite import RetrievalConfig, ZeroShotConfig\n"
        "from lit_het.eval.sets import ImageSet\n\n\n"
        "def get_evaluations():\n"
        f"    shapes = ImageSet('shapes', {str(shapes)!r}, batch_size=5)\n"
        "    return [\n"
        "        ZeroShotConfig(shapes, samples=2),\n"
        "        EnsembleConfig(shapes, samples=2),\n"
        "        FewShotConfig(shapes, fit=FewShotOptions(shots=(1,), seeds=(0,), l2=(1.0,))),\n"
        f"        OutOfDistributionConfig(shapes, near=({str(shapes / 'train')!r},)),\n"
        "        RetrievalConfig(dataclasses.replace(shapes, labelled=False)),\n"
        "    ]\n"
    )
    output = tmp_path / "figures.json"
    run_command("evaluate", "--checkpoint", run, "--config", suite, "--output", output)
    recorded = {record.kind: record for record in read_records(run)}
    assert set(recorded) == {"zero_shot", "ensemble", "few_shot", "out_of_distribution", "retrieval"}
    figures = json.loads(output.read_text())
    for kind, record in recorded.items():
        assert {f"{kind}/shapes/{name}": value for name, value in record.figures.items()}.items() <= figures.items()
    # The same images inside and outside: nothing can tell them apart.
    assert recorded["out_of_distribution"].figures["near/train/entropy/auroc"] == 0.5
    assert recorded["zero_shot"].settings["samples"] == 2
    said = capsys.readouterr()
    for kind in ("zero-shot", "ensemble", "few-shot", "out-of-distribution", "retrieval"):
        assert f"{kind} shapes" in said.out
    # Images of one set are read once, whatever is measured on them.
    assert said.err.count("reading shapes: 40/40") == 1  # also for captions, without labels


def test_a_classifier_of_words_is_measured_on_the_words_of_captions_alone_and_as_an_ensemble(
    upstream, data, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("lit_het.models.evaluation._check_no_copies", lambda runs: None)
    one, other = (shutil.copytree(upstream, tmp_path / name) for name in ("one", "other"))
    words = ["--data", f"shapes={data / 'train'}", "--caption-words"]
    said = refusal(capsys, "zero-shot", "--checkpoint", one, *words[:2])
    assert "the classifier has 6 classes and there are 8 candidates" in said
    assert "take the words of captions as labels with --caption-words" in said
    run_command("zero-shot", "--checkpoint", one, *words)
    run_command("ensemble", "--checkpoint", one, other, *words)
    alone, ensemble = sorted(read_records(one), key=lambda record: record.kind, reverse=True)
    assert (alone.kind, ensemble.kind) == ("supervised", "deep_ensemble")
    # Two equal models are worth one; every image has a colour and a shape of six words.
    for name, value in alone.figures.items():
        assert ensemble.figures[f"joint_{name}"] == pytest.approx(value, rel=1e-5)
    assert ensemble.figures["kl"] == pytest.approx(0, abs=1e-6)
    assert alone.figures["binary_nll"] < np.log(2) * 2
    said = refusal(capsys, "shift", "--checkpoint", one, *words)
    assert "shapes: only zero-shot and ensemble support several labels per image; leave out --caption-words" in said


def printed(errors: Mapping[str, float], *parts: str) -> str:
    figures = {f"{part}/top1".removeprefix("/"): 0.5 for part in parts}
    return " ".join(table(Evaluation("shift", "shapes", figures, errors))[1])


def test_a_table_without_space_for_errors_says_where_they_are():
    assert "standard errors: see the run's folder or lit-het report" in printed({"clean/top1": 0.1}, "clean", "fog/1")
    assert "standard errors" not in printed({}, "clean", "fog/1")


def test_a_table_of_sets_with_other_numbers_of_classes_says_whose_chance_it_has():
    figures = {f"{part}{name}": 0.5 for part in ("", "few/") for name in ("top1", "nll", "ece")}
    found = Evaluation("linear_probe", "many", figures, {}, {"top1": 0.1, "few/top1": 0.5})
    assert table(found)[1] == ["chance is that of many: other sets have other numbers of classes, see lit-het report"]
    assert table(dataclasses.replace(found, chance={"top1": 0.1, "few/top1": 0.1}))[1] == []


def test_the_evaluations_of_a_run_are_those_of_its_configuration(run, shapes, capsys):
    assert "lists no evaluations" in refusal(capsys, "evaluate", "--checkpoint", run)
    config = experiment.load(run / "config.json")
    zero_shot = ZeroShotConfig(ImageSet("shapes", str(shapes)))
    tiny.edit_config(run, changed(config, evaluations=(zero_shot,)))
    run_command("evaluate", "--checkpoint", run)
    assert [record.name for record in read_records(run)] == ["shapes"]


@pytest.fixture(scope="module")
def evaluated_training(data, upstream, tmp_path_factory):
    """The configuration of a run with a locked tower that was evaluated after each step, and what its training said."""
    folder, said = tmp_path_factory.mktemp("evaluated"), io.StringIO()
    config = tiny.shrink(quickstart_lit_het_xl.get_config(), data, folder / "run", pretrained=upstream)
    shapes = ImageSet("shapes", str(write_splits(data, folder / "shapes", "train", "test")))
    evaluations = (ZeroShotConfig(shapes), RetrievalConfig(shapes))
    config = changed(config, evaluations=evaluations, cadence__evaluate_steps=1)
    with contextlib.redirect_stderr(said):
        train(config)
    return config, said.getvalue()


@pytest.mark.slow
def test_evaluations_of_a_training_are_printed_as_they_come_and_read_images_once(evaluated_training):
    config, said = evaluated_training
    assert re.findall(r"lit-het: (step \d): ([\w-]+) shapes: \w+ [\d.]+ ± [\d.]+, ", said) == [
        (f"step {step}", kind) for step in (1, 2, 3, 4) for kind in ("zero-shot", "retrieval")
    ]
    records = read_metrics(config.run_dir / "metrics.jsonl")
    losses = [record["zero_shot/shapes/nll"] for record in records if "zero_shot/shapes/nll" in record]
    assert len(losses) == len(set(losses)) == 4, "the text tower changes, and with it the figures"
    assert said.count("reading shapes: 40/40") == 1


def test_evaluations_of_a_training_are_those_of_the_command_and_found_by_report_and_compare(
    evaluated_training, tmp_path, capsys
):
    run_dir, output = shutil.copytree(evaluated_training[0].run_dir, tmp_path / "run"), tmp_path / "figures.json"
    records = {record.kind: record for record in read_records(run_dir)}
    logged = read_metrics(run_dir / "metrics.jsonl")[-1]
    for kind in ("zero_shot", "retrieval"):
        assert records[kind].step == 4
        figures = records[kind].figures.items()
        assert {f"{kind}/shapes/{name}": value for name, value in figures}.items() <= logged.items()
    assert len(records["zero_shot"].drawing.arrays["confidence"]) == 40
    run_command("report", run_dir)
    assert "Zero-shot on shapes, top-1 accuracy" in (run_dir / "report.html").read_text()
    fewer = shutil.copytree(run_dir, tmp_path / "fewer")
    (fewer / "evaluations" / "retrieval_shapes.json").unlink()
    capsys.readouterr()
    run_command("compare", run_dir, "--against", fewer)
    assert "retrieval shapes" in (said := capsys.readouterr().out)
    assert "top-1 accuracy" in said
    run_command("evaluate", "--checkpoint", run_dir, "--output", output)
    for name, value in json.loads(output.read_text()).items():
        assert logged[name] == pytest.approx(value, rel=1e-5), name


def test_an_evaluation_that_cannot_be_saved_does_not_end_a_training(lit_config, shapes, capsys):
    lit_config.run_dir.mkdir()
    (lit_config.run_dir / "evaluations").write_text("not a folder")
    config = changed(lit_config, evaluations=(ZeroShotConfig(ImageSet("x", str(shapes))),))
    assert int(train(config).step) == 4
    assert "evaluations: cannot be written" in capsys.readouterr().err
    assert "zero_shot/x/top1" in read_metrics(lit_config.run_dir / "metrics.jsonl")[-1]


def test_an_evaluation_that_cannot_work_ends_a_list_before_the_first_image(upstream, shapes, tmp_path, capsys):
    suite = tmp_path / "suite.py"
    suite.write_text(
        "from lit_het.eval.suite import FewShotConfig, RetrievalConfig\n"
        "from lit_het.eval.sets import ImageSet\n\n\n"
        "def get_evaluations():\n"
        f"    shapes = ImageSet('shapes', {str(shapes)!r})\n"
        "    return [FewShotConfig(shapes), RetrievalConfig(shapes)]\n"
    )
    assert main(["evaluate", "--checkpoint", str(upstream), "--config", str(suite)]) == 1
    said = capsys.readouterr().err
    assert "retrieval needs an image-text model" in said
    assert "reading shapes:" not in said


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(EnsembleConfig, "there is only one member"), (ZeroShotConfig, "'red square' has images but is not among")],
)
def test_an_evaluation_that_cannot_work_ends_a_training_before_its_first_step(lit_config, shapes, wrong, message):
    (shapes / "names.txt").write_text("grey bar\n")
    names = ClassNamesConfig(candidates=shapes / "names.txt" if wrong is ZeroShotConfig else None)
    config = changed(lit_config, evaluations=(wrong(ImageSet("shapes", str(shapes)), names),))
    with pytest.raises(UserError, match=message):
        train(config)
    assert not read_metrics(config.run_dir / "metrics.jsonl")
    assert not (config.run_dir / "config.json").exists(), "the same command starts anew"


def test_only_the_main_process_prints_results(run, shapes, tmp_path, monkeypatch, capsys):
    output = tmp_path / "figures.json"
    monkeypatch.setattr(RetrievalConfig, "build", lambda config, sets: Told())
    monkeypatch.setattr(distributed, "is_main_process", lambda: False)
    config = RetrievalConfig(ImageSet("shapes", str(shapes), labelled=False))
    assert [one.kind for one in evaluate([run], [config], output=output)] == ["retrieval"]
    assert not output.exists()
    assert not read_records(run)
    assert capsys.readouterr().out == ""


class Told:
    """An evaluator that reads no image."""

    def check(self, model):
        """Refuses none."""

    def __call__(self, model):
        return Evaluation("retrieval", "shapes", {"recall": 1.0})


def test_two_checkpoints_are_an_ensemble_only(run, trained_lit, shapes, capsys, monkeypatch):
    both = ("--checkpoint", run, trained_lit.run_dir, "--data", shapes)
    assert f"{trained_lit.run_dir} is a copy of {run}: its parameters are the same" in refusal(
        capsys, "ensemble", *both
    )
    monkeypatch.setattr("lit_het.models.evaluation._check_no_copies", lambda runs: None)
    run_command("ensemble", *both)
    [record] = read_records(run)
    # A model and its copy agree in everything.
    assert record.figures["kl"] == pytest.approx(0, abs=1e-9)
    assert record.figures["joint_nll"] == pytest.approx(record.figures["individual_nll"])
    assert "several checkpoints are members of an ensemble" in refusal(capsys, "zero-shot", *both)
    for same in (run, f"{run}/."):
        line = refusal(capsys, "ensemble", "--checkpoint", run, same, "--data", shapes)
        assert line.endswith("run is listed twice; list each run once")


@pytest.mark.slow
def test_members_of_an_efficient_ensemble_have_predictions_of_their_own(data, tmp_path):
    lit = tiny.shrink(lit_e3_b32_het_xl.get_config(), data, tmp_path / "lit")
    config = changed(tiny.classifier(lit, data, tmp_path / "upstream").task, image_tower__members="apart")
    tower = config.image_tower
    task, mesh = config.build(), MeshConfig().build(jax.devices()[:1])
    assert isinstance(task, ClassificationTask)
    params = jax.device_put(jax.jit(task.initialize)(jax.random.key(0)), jax.devices()[0])
    model = Programs(task, mesh, None).model(params, "a tower")
    size = tower.image_size
    images = np.random.default_rng(0).integers(0, 256, (4, size, size, 3), dtype=np.uint8)
    features = np.asarray(model.features.extract(images))
    members = model.features.num_members
    assert members == tower.encoder.num_members > 1
    assert features.shape == (4, task.features.size)
    log_p = model(quantities.member_log_probabilities, features[None], seeds=np.array([0]))
    assert log_p.shape == (4, members, config.num_classes)
    assert not np.allclose(log_p[:, 0], log_p[:, 1], atol=1e-4)
    joint = model(quantities.log_probabilities, features[None], seeds=np.array([0]))
    np.testing.assert_allclose(np.exp(joint), np.exp(log_p).mean(axis=1), rtol=1e-4)


def test_an_invalid_list_of_evaluations_is_refused(run, capsys, tmp_path):
    suite = tmp_path / "suite.py"
    for text, message in {
        "x = 1": "has no get_evaluations()",
        "def get_evaluations():\n    return []": "must return a list of configurations",
        "def get_evaluations():\n    return ['pets']": "must return a list of configurations",
        "import nothing_of_this_name": "suite.py, line 1: ModuleNotFoundError: No module named 'nothing_of_this_name'",
        "def get_evaluations():\n    return [ZeroShot()]": "suite.py, line 2: NameError: name 'ZeroShot'",
    }.items():
        suite.write_text(text)
        assert message in refusal(capsys, "evaluate", "--checkpoint", run, "--config", suite)
    assert "no configuration file" in refusal(capsys, "evaluate", "--checkpoint", run, "--config", tmp_path / "none.py")
    assert "needs --checkpoint DIR" in refusal(capsys, "evaluate")
