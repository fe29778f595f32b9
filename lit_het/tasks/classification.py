"""The configuration of supervised classification, for pre-training and fine-tuning."""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from lit_het.errors import UserError, pluralize, require_at_least, require_choice
from lit_het.heads.classification_config import ClassificationHeadConfig, HetXLConfig
from lit_het.heads.noise_config import logits_at_once
from lit_het.losses.classification_config import ClassificationLoss, SoftmaxCrossEntropy
from lit_het.objectives.base import Objective
from lit_het.objectives.mixup import Mixup
from lit_het.objectives.teacher import ImageTeacherConfig
from lit_het.programs import shared
from lit_het.tasks.mimo import MimoConfig
from lit_het.tasks.options import TaskOptions
from lit_het.tasks.temperature_gradient_config import TemperatureGradient
from lit_het.towers.image_config import ImageTowerConfig, ViTConfig

if TYPE_CHECKING:
    from lit_het.tasks.classifier import ClassificationTask


@dataclasses.dataclass(frozen=True)
class ClassificationConfig(TaskOptions):
    """A classifier.

    Attributes:
        image_tower: the tower.
        head: maps features to a distribution of logits.
        num_classes: number of classes.
        loss: `SoftmaxCrossEntropy` takes class indices; `SigmoidCrossEntropy` takes targets of every class, or class
            indices.
        locked: patterns of parameters to lock; empty trains everything.
        mixup: α of the Beta(α, α) distribution of mixup weights; 0 does not mix examples.
        num_heads: predictions from the same features, each by logits of its own; the head's parameters are those of
            ``num_heads * num_classes`` classes.
        member_loss: of an example with several predictions, by heads or by members of the tower: their mean loss, or
            the loss of their mean prediction (e3 App. C.1).
        mimo: how the inputs of a tower with several are drawn; each has a head.
        teacher: distillation from another model's stored embeddings of the images; None for none.
        microbatches: number of parts of a batch that are processed by the tower in turn, to save memory.
        temperature_gradient: how held-out rows train τ; None trains it like any parameter.
    """

    image_tower: ImageTowerConfig = ViTConfig()
    head: ClassificationHeadConfig = HetXLConfig()
    num_classes: int = 1000
    loss: ClassificationLoss = SoftmaxCrossEntropy()
    locked: tuple[str, ...] = ()
    mixup: float = 0.0
    num_heads: int = 1
    member_loss: Literal["mean", "joint"] = "mean"
    mimo: MimoConfig | None = None
    teacher: ImageTeacherConfig | None = None
    microbatches: int = 1
    temperature_gradient: TemperatureGradient | None = None

    takes_members = True
    calibrated_on = "labels"
    pipeline_tag = "image-classification"

    def __post_init__(self) -> None:
        require_at_least(1, self, "num_classes", "num_heads", "microbatches")
        require_choice(self, "member_loss")
        require_at_least(0, self, "mixup")
        self.head.check_loss(self.loss, "task")
        if self.head.get_logits.needs_labels and (self.mixup or self.num_heads > 1 or self.member_loss == "joint"):
            raise UserError(
                f"task.head.get_logits = {type(self.head.get_logits).__name__} trains one prediction of one label; set "
                "mixup to 0, num_heads to 1 and member_loss to 'mean'"
            )
        tower = self.image_tower
        if tower.num_members > 1 and tower.members == "mean":
            raise UserError(
                "a classifier on the mean of an ensemble's embeddings has one prediction: set image_tower.members to "
                "'apart' for one of each member (e3), or to 'concatenated'"
            )
        num_inputs = tower.num_inputs
        if (num_inputs > 1) != (self.mimo is not None) or num_inputs not in (1, self.num_heads):
            raise UserError(
                f"a tower with image_tower.num_inputs = {num_inputs} needs "
                + (f"as many heads and task.mimo; num_heads = {self.num_heads}" if num_inputs > 1 else "no task.mimo")
            )
        if self.mimo is not None and self.member_loss == "joint":
            raise UserError("member_loss = 'joint' has no meaning where members see different images (task.mimo)")
        if self.num_heads > 1 and self.mimo is None and self.head.zero_kernel:
            raise UserError(
                f"num_heads = {self.num_heads} heads that see the same images and start from zero_kernel = True stay "
                "equal; set task.head.zero_kernel to False"
            )
        experts = tower.experts
        if experts is not None and experts.dropout_samples > 1 and tower.members == "concatenated":
            raise UserError(
                "image_tower.members = 'concatenated' does not go with experts.dropout_samples above 1, of which "
                "training has none; set members to 'apart'"
            )
        if tower.input_size:
            raise UserError(f"task.image_tower.{tower.appended} is for heads of image-text models; set it to False")
        super().__post_init__()

    @property
    def objectives(self) -> dict[str, Objective]:
        """What is trained beside the loss of classes, by the names of the fields."""
        return super().objectives | ({"mixup": Mixup(self.mixup)} if self.mixup else {})

    @property
    def summary(self) -> str:
        """What the model is, as a model card begins."""
        return f"A classifier of {pluralize(self.num_classes, 'class')}"

    def check_data(self, run: Any, loader: Any, tokenizer: Any) -> None:
        """Checks the size of images and the number of classes, see `TaskOptions`."""
        super().check_data(run, loader, tokenizer)
        if loader.num_classes != self.num_classes:
            raise UserError(
                f"the data has {loader.num_classes or 'no'} classes, the task has {self.num_classes}; "
                "set --task.num-classes, or `data.labels` in the configuration file"
            )

    def check_stored(self, stored: Any) -> None:
        """Checks that no pixels are mixed, see `TaskOptions`."""
        if self.mixup or self.mimo:
            raise UserError(
                "--task.mixup and --task.mimo put the pixels of images together; leave them out, or --data.embeddings"
            )

    def columns(self, data: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the columns of images and labels, see `TaskOptions`."""
        shape = self.loss.label_shapes(self.num_classes)[0]
        label = jax.ShapeDtypeStruct(shape, jnp.float32 if shape else jnp.int32)
        return super().columns(data) | {"label": label}

    def logits_at_once(self, rows: int, batch_size: int) -> int:
        """Returns the size of a block of logits, see `TaskOptions`."""
        return logits_at_once(self.head.sampling, rows, self.head.get_logits.num_outcomes(self.num_classes))

    @shared
    def build(self) -> "ClassificationTask":
        """Returns the task."""
        from lit_het.tasks.classifier import ClassificationTask

        return ClassificationTask(self)
