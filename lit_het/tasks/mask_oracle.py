"""The configuration of stage I of UViM (Kolesnikov et al. 2022): an oracle makes codes of masks and masks of codes."""

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from lit_het.errors import UserError, require_at_least, require_choice
from lit_het.programs import shared
from lit_het.tasks.options import TaskOptions
from lit_het.towers.encoder_config import ComputeType
from lit_het.towers.image_config import ImageTowerConfig
from lit_het.towers.oracle_config import OracleConfig

if TYPE_CHECKING:
    from lit_het.tasks.mask_coding import MaskOracleTask


@dataclasses.dataclass(frozen=True)
class MaskOracleConfig(TaskOptions):
    """A model that compresses the masks of panoptic segmentation to codes.

    Attributes:
        oracle: its shape.
        code_dropout: which words of a code training leaves out: a random number of any of them, or of the last ones.
        commitment: weight of the mean ``(x - e)²`` of vectors and their words, which moves the vectors alone.
        locked: patterns of parameters to lock.
    """

    oracle: OracleConfig = OracleConfig()
    code_dropout: Literal["random", "ordered", "none"] = "random"
    commitment: float = 0.0
    locked: tuple[str, ...] = ()

    head = loss = None
    pipeline_tag = "mask-generation"
    summary = "A code of the masks of panoptic segmentation"
    exports = ("lit-het",)

    def __post_init__(self) -> None:
        require_choice(self, "code_dropout")
        require_at_least(0, self, "commitment")
        super().__post_init__()

    @property
    def reads(self) -> Literal["image"]:
        """What is given beside masks."""
        return "image"

    @property
    def compute_type(self) -> ComputeType:
        """The type of activations."""
        return self.oracle.encoder.compute_type

    def require_image_tower(self) -> ImageTowerConfig:
        """Raises a `UserError`: masks are read, and images beside them."""
        raise UserError(
            "an oracle of masks has no image tower, and predicts nothing of an image alone; give the model that "
            "predicts its codes (SegmentationConfig)"
        )

    def check_data(self, run: Any, loader: Any, tokenizer: Any) -> None:
        """Checks the size of images and the number of classes, see `TaskOptions`."""
        super().check_data(run, loader, tokenizer)
        check_masks(self.oracle, run, loader)

    def columns(self, data: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the columns of images and masks, see `TaskOptions`."""
        return super().columns(data) | mask_columns(self.oracle)

    def logits_at_once(self, rows: int, batch_size: int) -> int:
        """Returns the size of the logits of all pixels, see `TaskOptions`."""
        oracle = self.oracle
        return rows * oracle.image_size**2 * max(oracle.num_classes + 1, oracle.num_instances + 1)

    @shared
    def build(self) -> "MaskOracleTask":
        """Returns the task."""
        from lit_het.tasks.mask_coding import MaskOracleTask

        return MaskOracleTask(self)


def check_masks(oracle: OracleConfig, run: Any, loader: Any) -> None:
    """Raises a `UserError` if data have no masks that an oracle reads."""
    if not run.data.masks:
        raise UserError("the model learns from masks: set --data.masks, and name shards that have them")
    if run.data.image_size != oracle.image_size:
        raise UserError(
            f"--data.image-size {run.data.image_size} differs from --task.oracle.image-size {oracle.image_size}; make "
            "them equal"
        )
    if loader.num_classes != oracle.num_classes:
        raise UserError(
            f"the masks have {loader.num_classes} classes, the oracle has {oracle.num_classes}; set "
            "--task.oracle.num-classes"
        )


def mask_columns(oracle: OracleConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the columns of images and their masks."""
    sides = (oracle.image_size, oracle.image_size)
    image, masks = jax.ShapeDtypeStruct((*sides, 3), jnp.uint8), jax.ShapeDtypeStruct((*sides, 2), jnp.int32)
    return {"image": image, "masks": masks}
