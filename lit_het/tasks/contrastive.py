"""The configuration of LiT (Zhai et al. 2022): towers, a contrastive head and loss, and what is trained beside it."""

import dataclasses
from typing import TYPE_CHECKING

from lit_het.errors import UserError, require_at_least
from lit_het.heads.contrastive_config import ContrastiveHeadConfig, DeterministicContrastiveConfig
from lit_het.losses.contrastive import ContrastiveLoss, SoftmaxLoss
from lit_het.objectives.base import Objective, Setup, objectives_of
from lit_het.objectives.captioner_config import CaptionerConfig
from lit_het.objectives.distillation_config import DistillationConfig
from lit_het.objectives.masking import MaskingConfig
from lit_het.objectives.mixing import Mixing
from lit_het.programs import shared
from lit_het.tasks.temperature_gradient_config import TemperatureGradient
from lit_het.towers.encoder_config import ComputeType
from lit_het.towers.image_config import ImageTowerConfig, ViTConfig
from lit_het.towers.text_config import TextConfig, TextTowerConfig

if TYPE_CHECKING:
    from flax import nnx

    from lit_het.heads.base import ContrastiveHead
    from lit_het.tasks.two_towers import ContrastiveTask


@dataclasses.dataclass(frozen=True)
class ContrastiveConfig:
    """An image-text model.

    Attributes:
        image_tower: the image tower.
        text_tower: the text tower; its ``embedding_size`` equals that of the image tower.
        head: maps pairs of embeddings to keys and queries.
        loss: the loss of keys and queries.
        locked: patterns of parameters to lock; LiT locks only the image tower.
        microbatches: number of parts in which the towers process a batch, to save memory; the loss sees all negatives.
        mixing: which images are mixed with others, for a sigmoid loss; None for none.
        masking: the inclusion of images and texts in masked ones, for the Gaussian head; None for none.
        captioner: a text decoder that learns to write the captions beside; None for none.
        distillation: self-distillation of the image tower and prediction of masked patches; None for none.
        temperature_gradient: how held-out rows train τ; None trains it like any parameter.

    Raises:
        UserError: the towers' embeddings differ in size, uncertainty tokens do not fit the head, members of an ensemble
            have separate embeddings for another loss than the softmax loss, the loss needs other samples than the head
            draws, images are mixed for a softmax loss, or masking, a captioner or distillation does not fit the head,
            the towers or other fields.
    """

    image_tower: ImageTowerConfig = ViTConfig()
    text_tower: TextTowerConfig = TextConfig()
    head: ContrastiveHeadConfig = DeterministicContrastiveConfig()
    loss: ContrastiveLoss = SoftmaxLoss()
    locked: tuple[str, ...] = ("image_tower/.*",)
    microbatches: int = 1
    mixing: Mixing | None = None
    masking: MaskingConfig | None = None
    captioner: CaptionerConfig | None = None
    distillation: DistillationConfig | None = None
    temperature_gradient: TemperatureGradient | None = None

    def __post_init__(self) -> None:
        require_at_least(1, self, "microbatches")
        image, text = self.image_tower.embedding_size, self.text_tower.embedding_size
        if image != text:
            raise UserError(f"text_tower.embedding_size = {text} must equal the image tower's embedding size {image}")
        for name, tower in (("image_tower", self.image_tower), ("text_tower", self.text_tower)):
            if tower.uncertainty_token != self.head.reads_variances:
                raise UserError(
                    f"task.{name}.uncertainty_token = {tower.uncertainty_token} does not fit task.head: uncertainty "
                    "tokens of both towers and the Gaussian head with variances = 'towers' need each other"
                )
            if tower.input_size and not self.head.reads_layer_inputs:
                raise UserError(f"task.{name}.layer_input is for the head bayes_vlm; set it to False")
        if (self.loss.likelihood != "samples") != (self.head.num_samples == 0):
            raise UserError(
                f"task.loss.likelihood = {self.loss.likelihood!r} does not fit task.head.num_samples = "
                f"{self.head.num_samples}: likelihoods without samples need a head with noise and num_samples = 0, and "
                "'samples' at least 1"
            )
        if self.num_keys > 1 and not self.takes_keys:
            raise UserError(
                "image_tower.members = 'apart' gives an image several keys, which need the head 'deterministic' or "
                "'het_xl' and the softmax loss with the likelihood 'samples'; take 'mean' or 'concatenated'"
            )
        if self.text_tower.pooling == "none":
            raise UserError("task.text_tower.pooling = 'none' is for decoders; choose how texts are pooled")
        for objective in self.objectives.values():
            objective.check(Setup(self))

    @property
    def objectives(self) -> dict[str, Objective]:
        """What is trained beside the contrastive loss, by the names of the fields."""
        return objectives_of(self)

    @property
    def num_keys(self) -> int:
        """M, the keys of an image: one of each member of an ensemble whose embeddings stay apart."""
        return self.image_tower.num_members if self.image_tower.members == "apart" else 1

    @property
    def takes_keys(self) -> bool:
        """Whether an image may have several keys."""
        return self.head.takes_members and self.loss.takes_members

    def build_head(self, rngs: "nnx.Rngs") -> "ContrastiveHead":
        """Returns the head with fresh parameters."""
        return self.head.build_on(self.image_tower, self.text_tower, rngs)

    @property
    def compute_type(self) -> ComputeType:
        """The type of activations, in which locked parameters are held."""
        return self.image_tower.compute_type

    @shared
    def build(self) -> "ContrastiveTask":
        """Returns the task."""
        from lit_het.tasks.two_towers import ContrastiveTask

        return ContrastiveTask(self)
