"""What all tasks are."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.heads.learning_rates import learning_rate_factors
from lit_het.objectives.base import Context, Setup, added, check_objectives, prepared, started
from lit_het.random import Keys
from lit_het.tasks import microbatches
from lit_het.tasks.temperature_gradient_config import check_temperature
from lit_het.towers.tuning_config import check_not_locked
from lit_het.training.optimizers_config import ParameterGroup
from lit_het.types import Batch, Metrics, Params, TowerOutput

if TYPE_CHECKING:
    from lit_het.tasks.quantities import ImageClassifier

Config = TypeVar("Config", bound=Any)
Model = TypeVar("Model", bound=nnx.Module)


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a training is, for objectives that begin later or learn from an average.

    Attributes:
        step: number of updates so far.
        average: the moving average of all parameters; None without one.
    """

    step: Int[Array, ""]
    average: Params | None


class Forward(NamedTuple):
    """What a task computes of a batch.

    Attributes:
        loss: its own, without the terms of objectives and the auxiliary losses of towers.
        metrics: to log, without those of towers.
        outputs: of the towers that have run, by "image" and "text".
        image, text: see `Context`.
        auxiliary_losses: of the head.
    """

    loss: Float[Array, ""]
    metrics: Metrics
    outputs: Mapping[str, TowerOutput]
    image: Float[Array, "n d"] | None = None
    text: Float[Array, "n d"] | None = None
    auxiliary_losses: Sequence[Float[Array, ""]] = ()


Loss: TypeAlias = Callable[[Params, Batch, Keys], tuple[Float[Array, ""], Metrics]]
"""`Task.loss` at a step of a training, of all parameters or of the trainable ones."""

LossAndGradient: TypeAlias = tuple[tuple[Float[Array, ""], Metrics], Params]

Gradient: TypeAlias = Callable[[Loss, Params, Batch, Keys, Int[Array, ""]], LossAndGradient]
"""Arguments are a loss, its arguments, and the number of the step."""


class Task(Generic[Config, Model]):
    """A learning problem: a model, built once, and a loss of its parameters.

    Attributes:
        config: its configuration.
        locked: patterns of parameters that training does not differentiate, optimize, donate or save.
        graph: the model without its parameters.
        shapes: of all parameters.
        trained: parts of the model, such as "image_tower", with at least one parameter that is not locked.
        learning_rates: groups of parameters whose modules have a learning-rate factor of their own.
        features: the image tower as a `lit_het.tasks.features.FeatureExtractor`; None without one.
        num_classes: of a classifier; 0 of a decoder, None of an image-text model.
        num_members: that are trained beside one another; what is trained has a leading axis of more than one.
        num_predictions: of an image without noise, by members of the towers and by heads.
        has_image_noise: whether the head has noise for images.
        antithetic: whether noise samples come in pairs.
        may_lack_head: whether saved parameters may be those of the image tower alone, as imported.
    """

    features: Any = None
    num_classes: int | None = None
    num_members = num_predictions = 1
    has_image_noise = may_lack_head = False
    antithetic: Any = None

    def __init__(self, config: Config, module: Callable[[Config, nnx.Rngs], Model]):
        """Builds a task.

        Args:
            config: `TaskOptions` with ``locked``.
            module: makes the model without objectives; the names of its attributes begin parameter paths.
        """
        self.config, self.locked, self._module = config, config.locked_patterns, module
        # What knows how its layers count.
        self._layered: dict[str, Any] = {**config.towers, **config.objectives}
        abstract = nnx.eval_shape(lambda: self._fresh_model(nnx.Rngs(0)))
        self.learning_rates = learning_rate_groups(abstract)
        self.graph, state = nnx.split(abstract)
        self.shapes = nnx.to_pure_dict(state)
        # A tower that is not here has no parameters, and may be locked like any other.
        parameters.check_patterns({part: {"": None} for part in config.towers} | self.shapes, config.locked)
        self._check_tuned()
        trainable = parameters.partition(self.shapes, self.locked)[1]
        self.trained = frozenset(trainable)
        check_objectives(Setup(config, self.trained))
        check_temperature(config.temperature_gradient, trainable)

    def _fresh_model(self, rngs: nnx.Rngs) -> Model:
        model = self._module(self.config, rngs)
        for part, tuning in self.config.tunings.items():
            tuning.apply(getattr(model, part), rngs)
        for name, objective in self.config.objectives.items():
            if (module := objective.modules(self.config, rngs)) is not None:
                setattr(model, name, module)
        return model

    def _check_tuned(self) -> None:
        """Raises a `UserError` if ``locked`` locks what the tuning of a tower trains."""
        tuned = {part: self.shapes[part] for part in self.config.tunings}
        for part, tree in parameters.partition(tuned, self.config.tuning_locks)[1].items():
            check_not_locked(part, parameters.flatten({part: tree}), self.config.locked)

    @property
    def late_parts(self) -> dict[str, int]:
        """Trained parts that begin at a later step: of objectives and towers, see `with_starts`."""
        starts = {name: one.start.amount for name, one in started(self.config).items() if name in self.trained}
        return {name: int(start) for name, start in starts.items() if start}

    def initialize(self, key: Key[Array, ""]) -> Params:
        """Returns fresh parameters."""
        return nnx.to_pure_dict(nnx.state(self._fresh_model(nnx.Rngs(params=key))))

    def model(self, params: Params) -> Model:
        """Returns the model with these parameters."""
        return nnx.merge(self.graph, params)

    @property
    def one(self) -> "AnyTask":
        """The task of each member alone."""
        return self

    def members(self, params: Params) -> list[Params]:
        """Returns the parameters of each member, as those of `one`."""
        return [params]

    def layers_above(self, params: Params) -> Params:
        """Returns the number of layers between each parameter and the output; 0 outside towers."""
        return {
            part: self._layered[part].layers_above(tree) if part in self._layered else jax.tree.map(lambda _: 0, tree)
            for part, tree in params.items()
        }

    def loss(
        self, params: Params, batch: Batch, keys: Keys, progress: Progress | None = None
    ) -> tuple[Float[Array, ""], Metrics]:
        """Returns the loss to minimise and metrics to log, all scalars; without ``progress`` that of the first step."""
        model, objectives = self.model(self._begun(params, progress)), self.config.objectives
        batch = prepared(objectives, self.with_targets(batch), keys)
        found = self.forward(model, batch, keys)
        average, step = (None, None) if progress is None else (progress.average, progress.step)
        average = None if average is None else self.model(average)
        context = Context(self.config, model, average, batch, found.image, found.text, found.outputs, keys, step)
        loss, metrics = added(found.loss, found.metrics, objectives, context)
        for value in found.auxiliary_losses:
            loss = loss + value
        for name, output in found.outputs.items():
            metrics |= {f"{name}_{key}": value for key, value in output.metrics.items()}
            loss = loss + sum(output.auxiliary_losses.values())
        return loss, metrics

    def _begun(self, params: Params, progress: Progress | None) -> Params:
        """Returns the parameters, with no gradient by those of towers whose training has not begun."""
        if progress is None:
            return params
        held = {}
        # In the order of a dictionary, not of a set: all processes, and a run that resumes, need the same program.
        for part, start in self.late_parts.items():
            if part not in self.config.tunings:
                continue
            has_begun = progress.step >= start
            held[part] = jax.tree.map(
                lambda x, has_begun=has_begun: jnp.where(has_begun, x, jax.lax.stop_gradient(x)), params[part]
            )
        return params | held

    def advanced(self, params: Params, metrics: Any, keys: Keys) -> tuple[Params, Metrics]:
        """Returns trainable parameters after an update, and metrics; some may follow statistics and not a gradient.

        Args:
            params: of which those have a gradient of zero.
            metrics: of the loss, with the statistics, which are no metrics of the result.
            keys: of the step.
        """
        return params, metrics

    def tower_output(self, model: Model, part: str, rows: Any, key: Key[Array, ""]) -> TowerOutput:
        """Returns the output of a tower, in microbatches; a locked one neither drops nor routes by chance."""
        used = key if part in self.trained else None
        return microbatches.apply(getattr(model, part), rows, used, self.config.microbatches)

    def with_targets(self, batch: Batch) -> Batch:
        """Returns the batch with labels in the form of the loss, as objectives see it."""
        return batch

    def forward(self, model: Model, batch: Batch, keys: Keys) -> Forward:
        """Returns the task's own loss, and what objectives need to know of it."""
        raise NotImplementedError

    def image_classifier(self, params: Params, classes: Float[Array, "k d"] | None = None) -> "ImageClassifier":
        """Returns the model as a classifier of images.

        Args:
            params: parameters of the model.
            classes: unit embeddings of the texts of an image-text model; None for quantities of the image alone.
        """
        raise UserError("the model writes text, and has no classes")

    def temperature(self, params: Params) -> Float[Array, ""]:
        """Returns τ."""
        model: Any = self.model(params)
        return model.head.temperature()

    def check_trained(self) -> None:
        """Checks that the parameters that are locked, and those that are not, can be trained so."""

    def check_batch(self, batch: Batch) -> None:
        """Checks the values of a batch on the host."""


AnyTask: TypeAlias = Task[Any, Any]


def learning_rate_groups(model: nnx.Module) -> tuple[ParameterGroup, ...]:
    """Returns a group for every parameter whose module has a ``learning_rate_factor`` other than 1."""
    factors = parameters.flatten(learning_rate_factors(model))
    return tuple(ParameterGroup(re.escape(path), factor) for path, factor in factors.items() if factor != 1.0)
