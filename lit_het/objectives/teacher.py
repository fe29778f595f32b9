"""Distillation: the embeddings of another model, stored once, teach the towers (CLIP-KD, Yang et al. 2024).

So do the logits of another classifier (Hinton et al. 2015).

Self-distillation, whose teacher is the average of the model itself, is `lit_het.objectives.distillation`.
"""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from lit_het.errors import FieldError, UserError, require_at_least
from lit_het.losses.base import finite, weights
from lit_het.objectives.base import Context, Objective, Setup
from lit_het.training.durations import Duration
from lit_het.types import Metrics

if TYPE_CHECKING:
    from flax import nnx

_SIDES = ("image", "text")
# What is read of a teacher: what a folder then holds, the flag of `lit-het embed` that writes it, and that of the data.
_READ = {
    "image": ("embeddings of images", "", "teacher-embeddings"),
    "text": ("embeddings of captions", "--texts ", "teacher-text-embeddings"),
    "logits": ("logits", "--logits ", "teacher-logits"),
}


@dataclasses.dataclass(frozen=True)
class _StoredTeacher(Objective):
    """The embeddings of a teacher, which ``lit-het embed`` has stored; of both sides, of which it teaches some.

    With unit vectors s of the student and t of the teacher the term is ``weight · mean |s - t|²``, and ``|s - t|²`` is
    ``2 - 2 cos(s, t)`` (feature distillation of CLIP-KD). With a projection W the unit vector of ``W s`` is compared.

    Attributes:
        start: when the term begins; until then the projection stays as it was initialized.
        image_weight: of the distance of image embeddings (``data.teacher_embeddings``); 0 leaves it out.
        projection: size of the teacher's embeddings, to which a trained linear layer maps the student's; None compares
            embeddings of the same size as they are.
    """

    start: Duration = Duration(0)
    image_weight: float = 1.0
    projection: int | None = None

    def __post_init__(self) -> None:
        require_at_least(0, self, *(f"{side}_weight" for side in self._weights))
        if self.projection is not None:
            require_at_least(1, self, "projection")
        if not any(self._weights.values()):
            raise UserError("task.teacher has no weight above 0; None leaves it out")

    @property
    def _weights(self) -> Mapping[str, float]:
        return {"image": self.image_weight}

    @property
    def _features(self) -> dict[str, float]:
        """The weights above 0 of the distances of embeddings, by side."""
        return {side: weight for side, weight in self._weights.items() if side in _SIDES and weight}

    @property
    def _sides(self) -> list[str]:
        """What is read, of `_READ`."""
        return list(self._features)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The stored embeddings, see `Objective`."""
        return tuple(f"teacher_{side}" for side in self._sides)

    def modules(self, task: Any, rngs: "nnx.Rngs") -> "nnx.Module | None":
        """Returns the projections."""
        if self.projection is None or not self._features:
            return None
        from flax import nnx

        from lit_het.towers.layers import linear

        size = task.image_tower.embedding_size
        return nnx.Dict({side: linear(size, self.projection, "float32", rngs) for side in self._features})

    def check(self, setup: Setup) -> None:
        """Checks that each image has one embedding and is not mixed, and what is stored."""
        tower = setup.task.require_image_tower()
        if tower.num_inputs > 1 or (tower.num_members > 1 and tower.members == "apart"):
            raise UserError("task.teacher needs one embedding of each image; leave out members that are apart and mimo")
        if setup.task.writes_text:
            raise UserError("task.teacher needs an image-text model or a classifier; leave it out")
        for name, other in setup.task.objectives.items():
            if other.mixes_images:
                raise UserError(f"the teacher of task.teacher saw no mixed images; leave out task.{name}")
        for side in self._features:
            if setup.trained is not None and f"{side}_tower" not in setup.trained:
                raise UserError(f"task.teacher.{side}_weight teaches the {side} tower, which is locked; set it to 0")
        if setup.loader is not None:
            self._check_stored(setup)

    def _check_stored(self, setup: Setup) -> None:
        sizes = dict[str, int]()
        for side in self._sides:
            held, flag, field = _READ[side]
            stored = setup.loader.beside.get(f"teacher_{side}")
            if stored is None:
                what = "logits" if side == "logits" else f"{side} embeddings"
                raise UserError(
                    f"task.teacher needs the {what} of a teacher: write them with lit-het embed {flag}of another "
                    f"model, and set --data.{field}, or set its weights to 0"
                )
            if (found := _held(stored.recipe)) != held:
                raise UserError(f"{stored.address} holds {found}; --data.{field} needs {held}")
            self._check_size(setup.task, side, stored)
            if side in _SIDES:
                sizes[side] = stored.recipe.size
        if len(set(sizes.values())) > 1:
            raise UserError(
                f"the teacher's images have size {sizes['image']} and its texts {sizes['text']}: embed both with one "
                "model"
            )

    def _check_size(self, task: Any, side: str, stored: Any) -> None:
        """Checks that what is stored has the size of what it is compared with."""
        own = self.projection or task.image_tower.embedding_size
        if side in self._features and stored.recipe.size != own:
            what = "the projection" if self.projection else "this model's"
            raise UserError(
                f"the teacher's embeddings in {stored.address} have size {stored.recipe.size}, {what} {own}: set "
                f"--task.teacher.projection {stored.recipe.size}"
            )

    def term(self, context: Context) -> tuple[Float[Array, ""], Metrics]:
        """Returns the weighted distances, and each of them as a metric."""
        share = weights(context.batch.valid, context.batch.weight)
        student, teacher = self._student(context), self._teacher(context)
        loss, metrics = jnp.zeros(()), {}
        for side, weight in self._features.items():
            found = student[side]
            if self.projection is not None:
                found = getattr(context.model.teacher, side)(found)
            distance = jnp.sum(share * jnp.sum((_unit(found) - teacher[side]) ** 2, axis=1))
            loss, metrics = loss + weight * distance, metrics | {f"teacher_{side}_distance": distance}
        return loss, metrics

    def _student(self, context: Context) -> dict[str, Any]:
        return {"image": _unit(context.image)}

    def _teacher(self, context: Context) -> dict[str, Float[Array, "b t"]]:
        """Returns the teacher's unit embeddings."""
        return {side: _unit(_read(context, side)) for side in self._sides if side in _SIDES}

    def columns(self, task: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the columns of the teacher, see `Objective`."""
        size = self.projection or task.image_tower.embedding_size
        return {f"teacher_{side}": jax.ShapeDtypeStruct((size,), jnp.float32) for side in self._sides}


@dataclasses.dataclass(frozen=True)
class ImageTeacherConfig(_StoredTeacher):
    """The image embeddings of a teacher of a classifier, and the logits of another classifier of the same classes.

    The term of logits is ``logits_weight · T² KL(p || q)`` of softened probabilities, see `softened_divergence`.

    Attributes:
        logits_weight: of the divergence from the teacher's probabilities (``data.teacher_logits``); 0 leaves it out.
        temperature: T, which divides the logits of both.
    """

    logits_weight: float = 0.0
    temperature: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_temperature(self)

    @property
    def _weights(self) -> Mapping[str, float]:
        return {"image": self.image_weight, "logits": self.logits_weight}

    @property
    def _sides(self) -> list[str]:
        return [*super()._sides, *(["logits"] if self.logits_weight else [])]

    def check(self, setup: Setup) -> None:
        """Checks embeddings, and that there is one prediction of each image."""
        if self.logits_weight and getattr(setup.task, "num_heads", None) != 1:
            raise UserError("task.teacher.logits_weight needs a classifier with num_heads = 1; set it to 0")
        if self.logits_weight and setup.task.loss.likelihood != "samples":
            raise UserError("task.teacher.logits_weight needs task.loss.likelihood = 'samples'; set it to 0")
        super().check(setup)

    def _check_size(self, task: Any, side: str, stored: Any) -> None:
        if side == "logits" and stored.recipe.size != task.num_classes:
            raise UserError(
                f"{stored.address} holds the logits of {stored.recipe.size} classes, the task has {task.num_classes}; "
                "the teacher needs the same classes in the same order"
            )
        super()._check_size(task, side, stored)

    def term(self, context: Context) -> tuple[Float[Array, ""], Metrics]:
        """Returns the weighted distance and the weighted divergence, and metrics."""
        from lit_het.losses.classification import softened_divergence

        loss, metrics = super().term(context)
        if not self.logits_weight:
            return loss, metrics
        samples = context.model.head(context.image, context.keys("noise"))
        counted = context.batch.valid, context.batch.weight
        found = softened_divergence(context.task.loss, samples, _read(context, "logits"), counted, self.temperature)
        metrics = metrics | {"teacher_divergence": found.loss, "teacher_agreement": found.top1}
        return loss + self.logits_weight * found.loss, metrics

    def columns(self, task: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the columns of the teacher, see `Objective`."""
        columns = super().columns(task)
        if self.logits_weight:
            columns["teacher_logits"] = jax.ShapeDtypeStruct((task.num_classes,), jnp.float32)
        return columns


@dataclasses.dataclass(frozen=True)
class TeacherConfig(_StoredTeacher):
    """The embeddings of images and captions by a teacher, and its similarities of both.

    The divergence of similarities (`relation_divergence`) trains both towers and the temperature of the head.

    Attributes:
        text_weight: of the distance of text embeddings (``data.teacher_text_embeddings``); 0 leaves it out.
        relation_weight: of the divergence from the teacher's similarities; 0 leaves it out.
        temperature: τ that divides the teacher's similarities: its own, such as 0.01 of CLIP.
    """

    text_weight: float = 1.0
    relation_weight: float = 1.0
    temperature: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_temperature(self)

    @property
    def _weights(self) -> Mapping[str, float]:
        return {"image": self.image_weight, "text": self.text_weight, "relation": self.relation_weight}

    @property
    def _sides(self) -> list[str]:
        return list(_SIDES) if self.relation_weight else super()._sides

    def check(self, setup: Setup) -> None:
        """Checks embeddings, and that there are captions."""
        setup.require_captions("teacher")
        if setup.task.head.text_variances is not None:
            raise UserError("task.teacher compares unit vectors, and the head 'gaussian' has none; leave it out")
        super().check(setup)

    def term(self, context: Context) -> tuple[Float[Array, ""], Metrics]:
        """Returns the weighted distances and the weighted divergence, and metrics."""
        from lit_het.losses.relations import relation_divergence

        loss, metrics = super().term(context)
        if not self.relation_weight:
            return loss, metrics
        head, teacher = context.model.head, self._teacher(context)
        divergence = relation_divergence(
            (head.image_key(context.image), head.text_key(context.text)),
            (teacher["image"], teacher["text"]),
            (head.temperature(), self.temperature),
            weights(context.batch.valid, context.batch.weight),
        )
        return loss + self.relation_weight * divergence, metrics | {"teacher_divergence": divergence}

    def _student(self, context: Context) -> dict[str, Any]:
        head = context.model.head
        keys = {"image": head.image_key(context.image), "text": head.text_key(context.text)}
        return {side: _unit(key) for side, key in keys.items()}

    def largest_array(self, task: Any, rows: int, batch_size: int) -> int:
        """Returns the numbers of a block of similarities."""
        from lit_het.losses.relations import VECTORS_PER_BLOCK

        return min(rows, VECTORS_PER_BLOCK) * batch_size if self.relation_weight else 0


def _require_temperature(config: ImageTeacherConfig | TeacherConfig) -> None:
    if not config.temperature > 0:
        raise FieldError(config, "temperature", f"{config.temperature} must be above 0")


def _held(recipe: Any) -> str:
    """Returns what a folder holds, as the words of `_READ`, or tokens."""
    if recipe.kind != "pooled embeddings":
        return recipe.kind
    return f"embeddings of {'captions' if recipe.is_of_texts else 'images'}"


def _read(context: Context, side: str) -> Float[Array, "b t"]:
    """Returns what is stored of a teacher in float32, with ones in invalid rows."""
    return finite(getattr(context.batch, f"teacher_{side}").astype(jnp.float32), context.batch.valid)


def _unit(x: Float[Array, "b d"] | None) -> Float[Array, "b d"]:
    assert x is not None, "checked"
    # The square root has no gradient at 0, where a row may be.
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=1, keepdims=True), 1e-12))
