"""Self-distillation and masked prediction beside a contrastive loss (SigLIP 2, Sec. 2.3; SILC; DINO; iBOT)."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from lit_het.errors import FieldError, UserError, require_at_least
from lit_het.losses.base import weights
from lit_het.objectives.base import Context, Objective, Setup
from lit_het.objectives.masking import random_patches
from lit_het.random import Keys
from lit_het.training.durations import Duration
from lit_het.types import Batch, Metrics

if TYPE_CHECKING:
    from flax import nnx


@dataclasses.dataclass(frozen=True)
class DistillationConfig(Objective):
    """Two losses whose teacher is the moving average of the image tower (SigLIP 2, Sec. 2.3).

    The student's embedding of a part of the image predicts the teacher's embedding of the whole, and its tokens of
    masked patches predict the teacher's tokens of these patches. Both predictions are distributions over prototypes.

    Attributes:
        start: when the losses begin; until then the further parameters stay as they were initialized.
        weight: of the loss of embeddings; 0 leaves it out.
        masked_weight: of the loss of masked patches; 0 leaves it out.
        num_views: views of a part of each image.
        view_size: their height and width in pixels.
        view_areas: smallest and largest share of the image in such a view.
        global_areas: the same of the view that the teacher sees.
        masked: share of the patches that are masked.
        hidden: width of the hidden layers between tower and prototypes.
        bottleneck: size of the vectors that are compared with prototypes.
        num_prototypes: number of prototypes.
        student_temperature: divides the student's logits.
        teacher_temperature: divides the teacher's logits.
    """

    start: Duration = Duration(80, "percent")
    weight: float = 1.0
    masked_weight: float = 0.25
    num_views: int = 8
    view_size: int = 96
    view_areas: tuple[float, float] = (0.05, 0.4)
    global_areas: tuple[float, float] = (0.4, 1.0)
    masked: float = 0.5
    hidden: int = 2048
    bottleneck: int = 256
    num_prototypes: int = 65_536
    student_temperature: float = 0.1
    teacher_temperature: float = 0.04

    changes_squares = True

    def __post_init__(self) -> None:
        require_at_least(0, self, "weight", "masked_weight")
        require_at_least(1, self, "num_views", "view_size", "hidden", "bottleneck")
        require_at_least(2, self, "num_prototypes")
        if not self.weight and not self.masked_weight:
            raise UserError("task.distillation needs weight or masked_weight above 0; None leaves both losses out")
        if not 0 < self.masked < 1:
            raise FieldError(self, "masked", f"{self.masked} must be between 0 and 1")
        for field in ("student_temperature", "teacher_temperature"):
            if not getattr(self, field) > 0:
                raise FieldError(self, field, f"{getattr(self, field)} must be above 0")
        for field in ("view_areas", "global_areas"):
            least, most = getattr(self, field)
            if not 0 < least <= most <= 1:
                raise FieldError(self, field, f"({least}, {most}) must be two shares of an image, the smaller first")

    def modules(self, task: Any, rngs: "nnx.Rngs") -> "nnx.Module":
        """Returns the heads between the tower and the prototypes, and the token of masked patches."""
        from flax import nnx

        width, found = task.image_tower.encoder.width, nnx.Dict()
        if self.weight:
            found.image_head = self._prototype_head(task.image_tower.embedding_size, rngs)
        if self.masked_weight:
            found.patch_head = self._prototype_head(width, rngs)
            found.mask_token = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (width,), jnp.float32))
        return found

    def _prototype_head(self, width: int, rngs: "nnx.Rngs") -> "nnx.Module":
        """Returns the layers of `unit_vectors`, and the prototypes to compare them with (DINO, App. C)."""
        from flax import nnx

        from lit_het.towers.layers import linear

        first = linear(width, self.hidden, "float32", rngs)
        second = linear(self.hidden, self.hidden, "float32", rngs)
        bottleneck = linear(self.hidden, self.bottleneck, "float32", rngs)
        normal = nnx.initializers.normal(1.0)
        prototypes = nnx.Param(normal(rngs.params(), (self.bottleneck, self.num_prototypes), jnp.float32))
        return nnx.Dict(first=first, second=second, bottleneck=bottleneck, prototypes=prototypes)

    def check(self, setup: Setup) -> None:
        """Checks that the image tower has what the losses compare, is trained, and has an average."""
        self._check_tower(setup.task.require_image_tower())
        if setup.trained is not None and not {"image_tower", "distillation"} <= setup.trained:
            raise UserError("task.distillation trains the image tower and its own heads: leave both out of task.locked")
        if setup.run is not None and setup.run.average_decay is None:
            raise UserError("the teacher of task.distillation is the moving average: set average_decay, such as 0.996")

    def _check_tower(self, tower: Any) -> None:
        if not tower.pools_tokens or tower.appended or tower.num_inputs > 1 or tower.experts is not None:
            without = ", ".join(("experts", "num_inputs", *filter(None, [tower.appended])))
            raise UserError(f"task.distillation needs a ViT with pooling, without {without}")
        if tower.patch_sizes:
            raise UserError("task.distillation has views of its own: leave out task.image_tower.patch_sizes")
        if not tower.patch_size <= self.view_size <= tower.image_size:
            raise FieldError(
                self,
                "view_size",
                f"{self.view_size} must be from {tower.patch_size} (a patch) to {tower.image_size} (an image) pixels",
            )
        if rest := self.view_size % tower.patch_size:
            near = self.view_size - rest
            raise FieldError(
                self, "view_size", f"{self.view_size} is not a multiple of {tower.patch_size}: take {near}"
            )

    def term(self, context: Context) -> tuple[Float[Array, ""], Metrics]:
        """Returns the weighted sum of both losses, and metrics."""
        assert context.average is not None, "checked with the run"
        student, teacher = ((m.image_tower, m.distillation) for m in (context.model, context.average))
        return distillation_loss(self, student, teacher, context.batch, context.keys)

    def largest_array(self, task: Any, rows: int, batch_size: int) -> int:
        """Returns the numbers of a block of logits of prototypes."""
        from lit_het.losses.distillation import VECTORS_PER_BLOCK

        return VECTORS_PER_BLOCK * self.num_prototypes


def unit_vectors(head: Any, features: Float[Array, "n width"]) -> Float[Array, "n d"]:
    """Returns features as unit vectors, to compare with `unit_prototypes` of the same head."""
    hidden = jax.nn.gelu(head.first(features.astype(jnp.float32)), approximate=False)
    return _unit(head.bottleneck(jax.nn.gelu(head.second(hidden), approximate=False)), axis=1)


def unit_prototypes(head: Any) -> Float[Array, "d k"]:
    """Returns the directions of the prototypes: their lengths do not count (DINO's weight norm of length 1)."""
    return _unit(head.prototypes[...], axis=0)


def distillation_loss(
    config: DistillationConfig, student: tuple[Any, Any], teacher: tuple[Any, Any], batch: Batch, keys: Keys
) -> tuple[Float[Array, ""], Metrics]:
    """Returns the weighted sum of both losses, and metrics.

    Args:
        config: of the losses.
        student: image tower and heads to differentiate.
        teacher: the moving average of both.
        batch: with images.
        keys: random keys of views and masks.
    """
    from lit_het.objectives.views import random_views

    if batch.image is None:
        raise UserError("task.distillation needs images, not their stored embeddings; leave out data.embeddings")
    tower = student[0].config
    of_whole, of_parts, of_mask = jax.random.split(keys("distillation"), 3)
    whole = random_views(of_whole, batch.image, 1, tower.image_size, config.global_areas)
    target = teacher[0](whole)
    share = weights(batch.valid, batch.weight)
    loss, metrics = jnp.zeros(()), {}
    if config.weight:
        parts = random_views(of_parts, batch.image, config.num_views, config.view_size, config.view_areas)
        heads = student[1].image_head, teacher[1].image_head
        value, found = _compared(config, heads, (student[0](parts).embedding, target.embedding), share)
        metrics |= {"distillation_loss": value, **found}
        loss = loss + config.weight * value
    if config.masked_weight:
        masked = masked_patches(of_mask, config.masked, len(whole), tower.num_patches)
        is_masked = (masked[:, :, None] == jnp.arange(tower.num_patches)[None, None]).any(axis=1)
        tokens = student[0](whole, masked=is_masked, mask_token=student[1].mask_token[...]).tokens
        heads = student[1].patch_head, teacher[1].patch_head
        of_patches = (x[:, -tower.num_patches :] for x in (tokens, target.tokens))
        at_mask = tuple(jnp.take_along_axis(x, masked[:, :, None], axis=1) for x in of_patches)
        value, found = _compared(config, heads, at_mask, share)
        metrics |= {"masked_prediction_loss": value, **{f"patch_{name}": figure for name, figure in found.items()}}
        loss = loss + config.masked_weight * value
    return loss, metrics


def masked_patches(key: Key[Array, ""], share: float, num_images: int, num_patches: int) -> Int[Array, "b v"]:
    """Returns the numbers of the patches of each image that are masked, equally many of each."""
    return random_patches(key, num_images, num_patches, max(1, int(share * num_patches)))


def _compared(
    config: DistillationConfig,
    heads: tuple[Any, Any],
    features: tuple[Float[Array, "..."], ...],
    share: Float[Array, " b"],
) -> tuple[Float[Array, ""], Metrics]:
    """Returns the loss of the features of several views or patches of each image, of student and teacher."""
    from lit_het.losses.distillation import prototype_cross_entropy

    student, teacher = (
        unit_vectors(head, x.reshape(-1, x.shape[-1])).reshape(len(share), -1, config.bottleneck)
        for head, x in zip(heads, features, strict=True)
    )
    return prototype_cross_entropy(
        student,
        teacher,
        unit_prototypes(heads[0]),
        unit_prototypes(heads[1]),
        share,
        student_temperature=config.student_temperature,
        teacher_temperature=config.teacher_temperature,
    )


def _unit(x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    # The square root has no gradient at 0, where a row may be.
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=axis, keepdims=True), 1e-12))
