"""The configuration of self-distillation and masked prediction beside a contrastive loss."""

import dataclasses
from typing import TYPE_CHECKING, Any

from jaxtyping import Array, Float

from lit_het.errors import FieldError, UserError, require_at_least
from lit_het.objectives.base import Context, Objective, Setup
from lit_het.training.durations import Duration
from lit_het.types import Metrics

if TYPE_CHECKING:
    from flax import nnx

    from lit_het.objectives.distillation import Distillation


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

    Raises:
        UserError: no loss has a weight, or a number is out of range.
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

    def modules(self, task: Any, rngs: "nnx.Rngs") -> "Distillation":
        """Returns the heads between the tower and the prototypes, and the token of masked patches."""
        from lit_het.objectives.distillation import Distillation

        return Distillation(self, task.image_tower, rngs)

    def check(self, setup: Setup) -> None:
        """Checks that the image tower has what the losses compare, is trained, and has an average.

        Raises:
            UserError: it has not, or a view is smaller than a patch or larger than an image.
        """
        self._check_tower(setup.task.image_tower)
        if setup.trained is not None and not {"image_tower", "distillation"} <= setup.trained:
            raise UserError("task.distillation trains the image tower and its own heads: leave both out of task.locked")
        if setup.run is not None and setup.run.average_decay is None:
            raise UserError("the teacher of task.distillation is the moving average: set average_decay, such as 0.996")

    def _check_tower(self, tower: Any) -> None:
        has_more = not tower.pools_tokens or tower.uncertainty_token or tower.input_size
        if has_more or tower.num_inputs > 1 or tower.experts is not None:
            raise UserError(
                "task.distillation needs a ViT with pooling, without experts, uncertainty_token, layer_input and "
                "num_inputs"
            )
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
            raise FieldError(self, "view_size", f"{self.view_size} is no multiple of {tower.patch_size}: take {near}")

    def term(self, context: Context) -> tuple[Float[Array, ""], Metrics]:
        """Returns the weighted sum of both losses, and metrics."""
        assert context.teacher is not None, "checked with the run"
        student, teacher = ((m.image_tower, m.distillation) for m in (context.model, context.teacher))
        from lit_het.objectives.distillation import distillation_loss

        return distillation_loss(student, teacher, context.batch, context.keys)

    def largest_array(self, task: Any, rows: int) -> int:
        """Returns the numbers of a block of logits of prototypes."""
        from lit_het.losses.distillation import VECTORS_PER_BLOCK

        return VECTORS_PER_BLOCK * self.num_prototypes
