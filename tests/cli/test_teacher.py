"""A run that learns from the stored embeddings of another model."""

import numpy as np
import pytest

import lit_het
from lit_het.configs.experiment import PretrainedConfig
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.models.opening import open_run
from lit_het.objectives.teacher import ImageTeacherConfig, TeacherConfig
from lit_het.training.cadence import Cadence
from lit_het.training.directory import load_config
from lit_het.training.durations import Duration
from lit_het.training.log import read_metrics
from lit_het.training.train import train
from tests import tiny
from tests.cli.conftest import assert_resumes_to_the_same_parameters, changed, refusal

pytestmark = pytest.mark.slow  # the losses and the loader have tests of their own
STEPS = 6


@pytest.fixture(scope="module")
def stored(trained_lit, tmp_path_factory):
    """The embeddings of images and captions by a trained model."""
    folder = tmp_path_factory.mktemp("teacher")
    lit_het.embed(trained_lit.run_dir, folder / "images")
    lit_het.embed(trained_lit.run_dir, folder / "texts", texts=True)
    return {"teacher_embeddings": str(folder / "images"), "teacher_text_embeddings": str(folder / "texts")}


@pytest.fixture
def student(trained_lit, stored, tmp_path):
    """A run that trains both towers."""
    return changed(
        trained_lit,
        run_dir=tmp_path / "student",
        task__locked=(),
        task__teacher=TeacherConfig(Duration(2), temperature=0.1),
        pretrained=None,
        data=changed(trained_lit.data, **stored),
        length=Duration(STEPS),
        cadence=Cadence(log_steps=1, save_steps=2, evaluate_steps=STEPS),
        evaluations=(),
        calibration=None,
        seed=7,
    )


def test_a_student_comes_closer_to_its_teacher_and_goes_on_after_a_stop(student, tmp_path):
    train(student)
    records = [record for record in read_metrics(student.run_dir / "metrics.jsonl") if "train/loss" in record]
    found = [[record[f"train/teacher_{name}"] for record in records] for name in ("image_distance", "divergence")]
    for values in found:
        assert values[:2] == [0, 0]
        assert values[-1] < values[2]
    assert_resumes_to_the_same_parameters(student, tmp_path)


def test_the_teacher_itself_has_no_distance_from_its_embeddings(student, trained_lit):
    pretrained = PretrainedConfig(run=trained_lit.run_dir, pattern=".*")
    config = changed(student, pretrained=pretrained, task__teacher__start=Duration(0), length=Duration(2))
    train(config)
    record, _ = [r for r in read_metrics(config.run_dir / "metrics.jsonl") if "train/loss" in r]
    assert record["train/teacher_image_distance"] < 1e-5
    assert record["train/teacher_text_distance"] < 1e-5


def test_a_teacher_of_another_size_and_one_that_nothing_needs_are_refused(student):
    with tiny.untrained():
        for changes, message in (
            ({"task__teacher__projection": 5}, "have size .*, the projection 5: set --task.teacher.projection"),
            ({"task__teacher": None}, "no objective of the task reads"),
            ({"data": changed(student.data, teacher_text_embeddings=None)}, "needs the text embeddings of a teacher"),
        ):
            with pytest.raises(lit_het.UserError, match=message):
                train(changed(student, **changes))


@pytest.fixture(scope="module")
def stored_logits(upstream, tmp_path_factory):
    """The logits of a trained classifier, of training images."""
    folder = tmp_path_factory.mktemp("logits") / "float32"
    lit_het.embed(upstream, folder, dtype="float32", logits=True)
    return str(folder)


@pytest.fixture
def student_of_classes(upstream, stored_logits, tmp_path):
    """A classifier that learns from logits alone after its second step."""
    config = load_config(upstream)
    return changed(
        config,
        run_dir=tmp_path / "student",
        task__teacher=ImageTeacherConfig(Duration(2), image_weight=0.0, logits_weight=1.0, temperature=2.0),
        data__teacher_logits=stored_logits,
        length=Duration(STEPS),
        cadence=Cadence(log_steps=1, save_steps=2),
        seed=7,
    )


def test_stored_logits_are_those_of_the_head_without_noise(upstream, stored_logits, student_of_classes):
    loader, run = Loader(changed(student_of_classes.data, shuffle=False)), open_run(upstream)
    batch = next(iter(loader.epoch()))
    samples = run.task.model(run.params).head(run.task.features(run.params, batch.image), None)
    expected = samples.logits(samples.prepare(samples.features), None, np.zeros(1, np.int32))[:, 0]
    np.testing.assert_allclose(np.asarray(batch.teacher_logits), expected, atol=1e-4)
    recipe = loader.beside["teacher_logits"].recipe
    assert (recipe.kind, recipe.size) == ("logits", run.config.task.num_classes)


def test_a_classifier_comes_closer_to_its_teacher_and_goes_on_after_a_stop(student_of_classes, tmp_path):
    train(student_of_classes)
    records = read_metrics(student_of_classes.run_dir / "metrics.jsonl")
    found = [record["train/teacher_divergence"] for record in records if "train/loss" in record]
    assert found[:2] == [0, 0]
    assert 0 < found[-1] < found[2]
    assert_resumes_to_the_same_parameters(student_of_classes, tmp_path)


def test_logits_that_a_student_cannot_use_are_refused(
    student_of_classes, student, stored, stored_logits, trained_lit, upstream, held_out, tmp_path, capsys
):
    of_classes = student_of_classes.data
    with tiny.untrained():
        for config, message in (
            (changed(student_of_classes, data__teacher_logits=stored["teacher_embeddings"]), "holds embeddings of im"),
            (changed(student_of_classes, data__teacher_embeddings=stored_logits), "no objective of the task reads"),
            (changed(student, data__teacher_embeddings=stored_logits), "holds logits; --data.teacher-embeddings needs"),
            (changed(student, data__teacher_logits=stored_logits), "give it a weight, or leave the folder out"),
            (changed(student_of_classes, data=changed(of_classes, shards=(str(held_out),))), "has no embeddings in"),
            (
                changed(trained_lit, run_dir=tmp_path / "l", data__embeddings=stored_logits),
                r"image tower .* \(logits\)",
            ),
        ):
            with pytest.raises(lit_het.UserError, match=message):
                train(config)
    line = refusal(capsys, "embed", "--tower", trained_lit.run_dir, "--output", tmp_path / "o", "--logits")
    assert "--logits needs a trained classifier: name its run with --tower" in line
    line = refusal(capsys, "embed", "--tower", upstream, "--output", tmp_path / "o", "--logits", "--tokens")
    assert "leave out one of them" in line
    line = refusal(capsys, "embed", "--tower", upstream, "--output", stored["teacher_embeddings"], "--logits")
    assert "holds pooled embeddings, not logits; choose another --output" in line
