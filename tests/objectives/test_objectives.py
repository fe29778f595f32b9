"""Objectives of one's own: every task asks them for modules, checks, changes of a batch and terms."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.objectives.base import Objective, with_starts
from lit_het.objectives.captioner import CaptionerConfig
from lit_het.objectives.distillation import DistillationConfig
from lit_het.objectives.masking import MaskingConfig
from lit_het.objectives.mixing import Mixing
from lit_het.objectives.teacher import ImageTeacherConfig, TeacherConfig
from lit_het.training.durations import Duration, RunLength
from lit_het.training.optimizers import Optimizer
from lit_het.training.schedules import Schedule
from lit_het.training.step import initial_state, make_step, of_trainable
from lit_het.types import Batch
from tests.tasks import test_captioning, test_tasks, test_translation
from tests.tasks.meshes import KEYS

_PAIRS = Batch(test_tasks.VALID, test_tasks.IMAGE, text=test_tasks.WORDS)
_LABELLED = Batch(test_tasks.VALID, test_tasks.IMAGE, label=test_tasks.LABEL)
TASKS = {
    "contrastive": (test_tasks.CONTRASTIVE, _PAIRS, "image"),
    "classification": (test_tasks.CLASSIFIER, _LABELLED, "image"),
    "captioning": (test_captioning.CAPTIONING, test_captioning.BATCH, "image"),
    "translation": (test_translation.APART, test_translation.BATCH, "text"),
}


@dataclasses.dataclass(frozen=True)
class Own(Objective):
    """A parameter, whose multiple is its term, and weights of rows."""

    start: Duration = Duration(0)
    weights: float = 3.0
    has_parameter: bool = True
    mixes_images: bool = False

    def modules(self, task, rngs):
        return nnx.Dict(scale=nnx.Param(jnp.ones(()))) if self.has_parameter else None

    def prepare(self, batch, keys):
        return dataclasses.replace(batch, weight=jnp.ones(len(batch.valid)))

    def term(self, context):
        assert context.batch.weight is not None
        scale = context.model.own.scale[...] if self.has_parameter else jnp.ones(())
        tokens = {name: output.tokens for name, output in context.outputs.items()}
        return self.weights * scale, {"own": scale, **{f"{name}_tokens": jnp.sum(x) for name, x in tokens.items()}}

    def largest_array(self, task, rows, batch_size):
        return 10**9 + rows


def with_objective(config, objective, name="own"):
    """Returns a task with an objective in a field of its own."""
    kind = dataclasses.make_dataclass("WithOwn", [(name, Objective, objective)], bases=(type(config),), frozen=True)
    return kind(**vars(config))


@pytest.mark.parametrize("name", TASKS)
def test_every_task_asks_objectives_for_modules_changes_and_terms(name):
    plain, batch, reads = TASKS[name]
    config = with_objective(plain, Own())
    task = config.build()
    assert task.shapes["own"]["scale"].shape == ()
    assert float(task.layers_above(task.shapes)["own"]["scale"]) == 0
    loss, metrics = jax.eval_shape(task.loss, task.shapes, batch, KEYS)
    assert loss.shape == ()
    assert {"own", f"{reads}_tokens"} <= metrics.keys()
    assert config.largest_array(8, 8) == 10**9 + 8
    assert config.towers == plain.towers  # not the objective, which has a field `weights`


@pytest.mark.parametrize(
    ("fields", "locked", "late"),
    [({}, (), {"own": 2}), ({}, ("own/.*",), {}), ({"has_parameter": False}, (), {})],
    ids=["trained", "locked", "without parameters"],
)
def test_a_late_term_begins_at_its_step_with_or_without_trained_parameters(fields, locked, late):
    config = dataclasses.replace(test_tasks.CLASSIFIER, locked=("image_tower/.*", *locked))
    config = with_objective(config, Own(Duration(2, "steps"), **fields))
    length = RunLength(10, 4)
    task = with_starts(config, length).build()
    assert task.late_parts == late
    optimizer = Optimizer().build(Schedule(1e-2, Duration(1)), length, late=task.late_parts)
    rest, trainable = parameters.partition(task.shapes, task.locked)
    step = make_step(of_trainable(task.loss), optimizer, 0)
    state = jax.eval_shape(lambda params: initial_state(params, optimizer), trainable)
    assert "own" in jax.eval_shape(step, state, rest, _LABELLED)[1]


@pytest.mark.parametrize(
    ("task", "objective", "message"),
    [
        ("classification", CaptionerConfig(), r"task\.captioner needs images with captions"),
        ("captioning", MaskingConfig(), r"task\.masking needs images with captions"),
        ("translation", Mixing(), r"task\.mixing needs images with captions"),
        ("translation", DistillationConfig(), "has no image tower"),
        ("captioning", DistillationConfig(), "needs a ViT with pooling"),
        ("classification", TeacherConfig(), r"task\.teacher needs images with captions"),
        ("captioning", ImageTeacherConfig(), r"task\.teacher needs an image-text model or a classifier"),
    ],
)
def test_an_objective_refuses_a_task_without_what_it_needs(task, objective, message):
    with pytest.raises(UserError, match=message):
        with_objective(TASKS[task][0], objective)
