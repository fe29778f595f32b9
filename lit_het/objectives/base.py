"""Objectives: what a task trains beside its own loss.

An objective is a configuration in a field of a task's. Its name is that of the field: there its parameters lie, and
flags and messages call it so.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from lit_het.errors import UserError
from lit_het.random import Keys
from lit_het.training.durations import Duration, RunLength
from lit_het.types import Batch, Metrics, Params, TowerOutput

if TYPE_CHECKING:
    from flax import nnx

_Task = TypeVar("_Task", bound=Any)


@dataclasses.dataclass(frozen=True)
class Setup:
    """What surrounds an objective, as far as it is known: it is checked whenever more of it is.

    Attributes:
        task: configuration of the task.
        trained: parts of the model that are not locked, such as "image_tower".
        run: configuration of the run.
        tokenizer: of the captions.
        loader: of the data.
    """

    task: Any
    trained: frozenset[str] | None = None
    run: Any = None
    tokenizer: Any = None
    loader: Any = None

    def require_captions(self, name: str) -> None:
        """Raises a `UserError` if the task with an objective of this name does not embed images and their captions."""
        if not self.task.embeds_texts:
            raise UserError(f"task.{name} needs images with captions, as an image-text model has; leave it out")


@dataclasses.dataclass(frozen=True)
class Context:
    """What the term of an objective is computed from.

    Attributes:
        task: configuration of the task.
        model: towers, head and the modules of objectives, with the parameters that are differentiated.
        average: the same with the moving average of the parameters; None without one.
        batch: as `Objective.prepare` left it.
        image, text: embeddings, the inputs of the head, ones in invalid rows; None where the head has no such input.
        outputs: of the towers that have run, by "image" and "text".
        keys: random keys of the step.
        step: number of the step; None where nothing is trained, and no objective begins later.
    """

    task: Any
    model: Any
    average: Any
    batch: Batch
    image: Float[Array, "n d"] | None
    text: Float[Array, "n d"] | None
    outputs: Mapping[str, TowerOutput]
    keys: Keys
    step: Int[Array, ""] | None = None


class Objective:
    """An objective that adds nothing; others are frozen dataclasses that replace what they need.

    Attributes:
        start: when its term begins; until then its parameters stay as they were initialized. It prepares batches from
            the first step on, whose form cannot change.
        reads_targets: whether it needs to know which tokens of captions are to be predicted, `Batch.text_target`.
        mixes_images: whether images of a batch are mixed with others.
        inputs: fields of `Batch` that are read for it alone.
        changes_squares: whether it mixes or crops images, which must be squares.
    """

    start: Duration = Duration(0)
    reads_targets = mixes_images = changes_squares = False

    @property
    def inputs(self) -> tuple[str, ...]:
        """See above."""
        return ()

    def modules(self, task: Any, rngs: "nnx.Rngs") -> "nnx.Module | None":
        """Returns the module with its parameters, for the towers of a task's configuration."""

    def layers_above(self, params: Params) -> Params:
        """Returns the number of layers above each of its parameters, see `encoder_config.layers_above`."""
        return jax.tree.map(lambda _: 0, params)

    def check(self, setup: Setup) -> None:
        """Checks that it fits what surrounds it."""

    def prepare(self, batch: Batch, keys: Keys) -> Batch:
        """Returns the batch that the towers see."""
        return batch

    def term(self, context: Context) -> tuple[Float[Array, ""], Metrics] | None:
        """Returns its weighted term of the loss, and metrics."""

    def columns(self, task: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the arrays of one example that are read for it alone, by the fields of `Batch`, for plans."""
        return {}

    def largest_array(self, task: Any, rows: int, batch_size: int) -> int:
        """Returns the numbers of the largest array of its term, for plans; arguments as of `TaskOptions`."""
        return 0


def among_fields(task: Any) -> dict[str, Objective]:
    """Returns the objectives among the fields of a task's configuration; all of a task are `TaskOptions.objectives`."""
    values = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
    return {name: value for name, value in values.items() if isinstance(value, Objective)}


def check_objectives(setup: Setup) -> None:
    """Raises a `UserError` if an objective does not fit what surrounds it."""
    tower = setup.task.image_tower
    for name, objective in setup.task.objectives.items():
        if objective.changes_squares and tower is not None and tower.patches is not None:
            raise UserError(
                f"task.{name} changes square images, and task.image_tower takes {tower.patches}; leave out one of them"
            )
        objective.check(setup)


def prepared(objectives: Mapping[str, Objective], batch: Batch, keys: Keys) -> Batch:
    """Returns the batch that the towers see, after all objectives."""
    for objective in objectives.values():
        batch = objective.prepare(batch, keys)
    return batch


def added(
    loss: Float[Array, ""], metrics: Metrics, objectives: Mapping[str, Objective], context: Context
) -> tuple[Float[Array, ""], Metrics]:
    """Returns a loss with the terms of objectives, and all metrics.

    The number of the step where an objective starts is known, see `with_starts`.
    """
    for objective in objectives.values():
        if not objective.start.amount:
            found = objective.term(context)
        elif context.step is None:
            found = None
        else:
            assert objective.start.unit == "steps", "see with_starts"
            begins = context.step >= int(objective.start.amount)
            found = _computed_if(begins, functools.partial(objective.term, context))
        if found is not None:
            loss, metrics = loss + found[0], metrics | found[1]
    return loss, metrics


def _computed_if(is_true: Bool[Array, ""], function: Callable[[], Any]) -> Any:
    """Returns what a function returns, or zeros without computing it."""
    shapes = jax.eval_shape(function)
    return jax.lax.cond(is_true, function, lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))


def started(task: Any) -> dict[str, Any]:
    """Returns what of a task may begin at a later step, by its field: objectives, and the tuning of towers."""
    return {**task.tunings, **task.objectives}


def with_starts(task: _Task, run: RunLength | None) -> _Task:
    """Returns a task's configuration whose parts start at the number of a step; without a run at the first."""
    found: dict[str, Any] = {}
    for name, one in started(task).items():
        if not one.start.amount:
            continue
        tower = task.towers.get(name)
        flag = f"task.{name}.start" if tower is None else f"task.{name}.tuning.start"
        step = run.steps(one.start, flag) if run else 0
        if run and step >= run.num_steps:
            raise UserError(
                f"--{flag.replace('_', '-')} {one.start} is step {step:,} of a run of {run.num_steps:,}, which would "
                f"never see it; begin earlier, or leave {flag.removesuffix('.start')} out"
            )
        one = dataclasses.replace(one, start=Duration(step))
        found[name] = one if tower is None else dataclasses.replace(tower, tuning=one)
    return dataclasses.replace(task, **found) if found else task
