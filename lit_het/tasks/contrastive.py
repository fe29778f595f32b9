"""The configuration of LiT (Zhai et al. 2022): towers, a contrastive head and loss, and what is trained beside it."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from lit_het.errors import UserError, require_at_least
from lit_het.heads.contrastive_config import ContrastiveHeadConfig, DeterministicContrastiveConfig
from lit_het.losses.contrastive import ContrastiveLoss, SoftmaxLoss
from lit_het.objectives.captioner import CaptionerConfig
from lit_het.objectives.distillation import DistillationConfig
from lit_het.objectives.masking import MaskingConfig
from lit_het.objectives.mixing import Mixing
from lit_het.objectives.teacher import TeacherConfig
from lit_het.programs import shared
from lit_het.tasks.captioning import CaptioningConfig
from lit_het.tasks.options import TaskOptions, check_padding, check_text_tower, text_columns
from lit_het.tasks.temperature_gradient_config import TemperatureGradient
from lit_het.towers.image_config import ImageTowerConfig, ViTConfig
from lit_het.towers.text_config import TextConfig, TextTowerConfig
from lit_het.types import Params

if TYPE_CHECKING:
    from flax import nnx

    from lit_het.heads.base import ContrastiveHead
    from lit_het.tasks.two_towers import ContrastiveTask


@dataclasses.dataclass(frozen=True)
class ContrastiveConfig(TaskOptions):
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
        captioner: a text decoder, trained jointly on the captions; None disables it.
        distillation: self-distillation of the image tower and prediction of masked patches; None for none.
        teacher: distillation from another model's stored embeddings; None for none.
        temperature_gradient: how held-out rows train τ; None trains it like any parameter.
        text_members: M, text towers and heads of different seeds that are trained in one run, a deep ensemble on the
            embeddings of one locked image tower.
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
    teacher: TeacherConfig | None = None
    temperature_gradient: TemperatureGradient | None = None
    text_members: int = 1

    embeds_texts = True
    calibrated_on = "captions"
    pipeline_tag = "zero-shot-image-classification"

    def __post_init__(self) -> None:
        require_at_least(1, self, "microbatches", "text_members")
        image, text = self.image_tower.embedding_size, self.text_tower.embedding_size
        if image != text:
            raise UserError(f"text_tower.embedding_size = {text} must equal the image tower's embedding size {image}")
        for name, tower in self.towers.items():
            self.head.check_tower(tower, f"task.{name}")
        if (self.loss.likelihood != "samples") != (self.head.num_samples == 0):
            raise UserError(
                f"task.loss.likelihood = {self.loss.likelihood!r} does not fit task.head.num_samples = "
                f"{self.head.num_samples}: likelihoods without samples need a head with noise and num_samples = 0, and "
                "'samples' at least 1"
            )
        if self.num_keys > 1 and not self.takes_members:
            raise UserError(
                "image_tower.members = 'apart' gives an image several keys, which need the head 'deterministic' or "
                "'het_xl' and the softmax loss with the likelihood 'samples'; take 'mean' or 'concatenated'"
            )
        if not self.text_tower.pools_tokens:
            raise UserError("task.text_tower.pooling = 'none' is for decoders; choose how texts are pooled")
        self._check_text_members()
        super().__post_init__()

    def _check_text_members(self) -> None:
        """Refuses what members of the text tower cannot share, or would make them equal."""
        refused = {
            "task.head": not self.head.takes_members,
            "task.image_tower.members": self.num_keys > 1,
            "task.text_tower.weights": self.text_tower.weights is not None,
            "task.text_tower.tuning": self.text_tower.tuning is not None,
            "task.temperature_gradient": self.temperature_gradient is not None,
            **{f"task.{name}": True for name in self.objectives},
        }
        if self.text_members > 1 and (fields := [field for field, is_refused in refused.items() if is_refused]):
            raise UserError(
                f"task.text_members = {self.text_members} trains text towers of different seeds, with the head "
                f"'deterministic' or 'het_xl', on one embedding of an image: change {fields[0]}, or train members one "
                "after another, with lit-het train --members"
            )

    @property
    def num_keys(self) -> int:
        """M, the keys of an image: one of each member of an ensemble whose embeddings stay apart."""
        return self.image_tower.num_members if self.image_tower.members == "apart" else 1

    @property
    def summary(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        """What the model is, as a model card begins."""
        return "An image-text model" + (f" with {self.text_members} text towers" if self.text_members > 1 else "")

    @property
    def takes_members(self) -> bool:
        """Whether an image may have several keys."""
        return self.head.takes_members and self.loss.takes_members

    def build_head(self, rngs: "nnx.Rngs") -> "ContrastiveHead":
        """Returns the head with fresh parameters."""
        return self.head.build_on(self.image_tower, self.text_tower, rngs)

    def check_data(self, run: Any, loader: Any, tokenizer: Any) -> None:
        """Checks the size of images, the objectives and the tokenizer, see `TaskOptions`."""
        super().check_data(run, loader, tokenizer)
        if tokenizer is None:
            raise UserError("a contrastive task needs captions; name a `tokenizer` in the configuration file")
        check_text_tower(self.text_tower, tokenizer)
        check_padding(self.text_tower, tokenizer)
        if run.data.prompt is not None and not self._reads_targets:
            raise UserError("data.prompt is for decoders; leave it out for an image-text model without captioner")

    @property
    def _reads_targets(self) -> bool:
        return any(objective.reads_targets for objective in self.objectives.values())

    def check_copies(self, batch_size: int, num_samples: int) -> str | None:
        """Returns what copies of a pair in a batch count as, see `TaskOptions`."""
        if 1 < batch_size <= num_samples:
            return None
        if min(batch_size, num_samples) == 1:
            raise UserError(
                "a batch of 1 image-text pair has no negatives, and its contrastive loss teaches nothing; raise "
                "--data.batch-size, and train on more than one sample"
            )
        if self.loss.duplicates == "positives":
            return "they count as positives, and only other samples as negatives"
        return "they count as negatives of each other, see --task.loss.duplicates"

    def columns(self, data: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the columns of images and captions, see `TaskOptions`."""
        text = self.text_tower
        found = super().columns(data) | text_columns(text.length, with_targets=self._reads_targets)
        if data.text_embeddings is not None:
            found["text_embedding"] = jax.ShapeDtypeStruct((text.output_size,), jnp.float32)
        return found

    def logits_at_once(self, rows: int, batch_size: int) -> int:
        """Returns the size of a block of logits with the keys, see `TaskOptions`."""
        num_keys = rows if self.loss.form == "ring" else batch_size
        queries = rows if self.loss.form == "dense" else min(rows, self.loss.block_size)
        # Three times, too: keys of images and of texts, and the gradient of those of the block.
        return (queries + self.image_tower.embedding_size) * num_keys

    def decoder_beside(self) -> CaptioningConfig | None:
        """Returns the image tower and the captioner, see `TaskOptions`."""
        if (captioner := self.captioner) is None:
            return None
        tower = self.image_tower.without_pooling()
        assert tower is not None, "checked by the captioner"
        # Nothing is locked: patterns of the text tower would match nothing.
        return CaptioningConfig(tower, captioner.decoder, captioner.head, captioner.loss, locked=())

    def decoder_params(self, params: Params, like: Params) -> Params:
        """Returns the parameters of `decoder_beside`, in its shapes, from those of this model."""
        tower = {name: params["image_tower"][name] for name in like["image_tower"]}
        return {"image_tower": tower, **params["captioner"]}

    @shared
    def build(self) -> "ContrastiveTask":
        """Returns the task."""
        if self.text_members > 1:
            from lit_het.tasks.text_members import TextMembersTask

            return TextMembersTask(self)
        from lit_het.tasks.two_towers import ContrastiveTask

        return ContrastiveTask(self)
