"""A run that learns from the stored embeddings of another model."""

import shutil

import numpy as np
import pytest

import lit_het
from lit_het import parameters
from lit_het.configs.experiment import PretrainedConfig
from lit_het.models.opening import open_run
from lit_het.objectives.teacher import TeacherConfig
from lit_het.training.cadence import Cadence
from lit_het.training.directory import checkpoint_dir
from lit_het.training.durations import Duration
from lit_het.training.log import read_metrics
from lit_het.training.train import train
from tests import tiny
from tests.cli.conftest import changed

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
    again = changed(student, run_dir=shutil.copytree(student.run_dir, tmp_path / "again"))
    shutil.rmtree(checkpoint_dir(again.run_dir) / str(STEPS))
    train(again, resume=True)
    expected, resumed = (parameters.flatten(open_run(c.run_dir).params) for c in (student, again))
    for path, x in expected.items():
        np.testing.assert_array_equal(resumed[path], x, err_msg=path)


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
            ({"task__teacher": None}, "is of a teacher, and no weight of task.teacher needs it; leave it out"),
            ({"data": changed(student.data, teacher_text_embeddings=None)}, "needs the text embeddings of a teacher"),
        ):
            with pytest.raises(lit_het.UserError, match=message):
                train(changed(student, **changes))
