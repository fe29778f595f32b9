"""The configurations of image towers."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from lit_het.errors import FieldError, UserError, require_at_least, require_choice
from lit_het.patches_config import Patches
from lit_het.towers.base import ImageTowerOptions
from lit_het.towers.encoder_config import ComputeType, EncoderConfig
from lit_het.towers.stem_config import StemConfig
from lit_het.towers.stored_config import StoredConfig
from lit_het.towers.tuning_config import Tuning
from lit_het.types import Params

if TYPE_CHECKING:
    from flax import nnx

    from lit_het.towers.resnet import ResNet
    from lit_het.towers.vit import ViT


@dataclasses.dataclass(frozen=True)
class RotaryConfig:
    """Rotary positions of patches in two axes, by default those of DINOv3 (Siméoni et al. 2025).

    Half of each head is turned by the row, the other half by the column, each at frequencies ``base^(-i/f)``.

    Attributes:
        base: ratio of frequencies.
        start, stop: angles of the edges of an image of any size, at the highest frequency.
        place: of a patch within itself: 0 for its first edge, 0.5 for its centre, 1 for its last edge.
    """

    base: float = 100.0
    start: float = -2 * math.pi
    stop: float = 2 * math.pi
    place: float = 0.5

    def __post_init__(self) -> None:
        require_at_least(1, self, "base")


@dataclasses.dataclass(frozen=True)
class ViTConfig(ImageTowerOptions):
    """A Vision Transformer on square images, or on any shapes; with experts a V-MoE or an efficient ensemble (e3).

    Attributes:
        image_size: height and width in pixels; pixels beyond the last whole patch are ignored (384 is 27 x 14 + 6).
            Of a tower for images of any shape, those of the square that positions are learned for.
        patch_size: height and width of a patch in pixels.
        encoder: the stack of blocks.
        pooling: the class token, the mean of the patches, both one after the other (dino.txt), the first patch,
            attention pooling, or none: all tokens concatenated.
        positions: added to the patches: learned, fixed 2-D sine-cosine, or none.
        num_registers: number of learned tokens after the class token, without positions (DINOv2).
        input_norm: whether there is a LayerNorm before the first block (CLIP).
        representation_size: size of a dense layer with tanh after pooling, as in the original ViT; None for none.
        projection_size: size of a dense layer without tanh at the very end (CLIP); None for none.
        weights: pretrained weights, a path or address, see `lit_het.weights.formats`; None for random weights.
        members: how embeddings of an ensemble's members are combined: by their mean, concatenated, or "apart": each is
            an example of a classifier, and a key of its image in an image-text model.
        uncertainty_token: whether one more learned token is encoded, whose output gives log σ² of the embedding
            (ProLIP's [UNC]); the embedding is then ``[mean, log σ²]``, of twice the size.
        norm_twice: whether the encoder's last norm is applied to the class token once more (ProLIP's published code).
        num_inputs: M images that the tower sees at once, along the axis of channels (MIMO, e3 App. B.3); a single image
            is repeated.
        inputs_as: whether these are "channels" of common patches, or each has "patches" and positions of its own, as
            images side by side have (e3 App. G.3).
        stem: a ResNet whose feature map is seen in the place of pixels (hybrid); ``patch_size`` is a multiple of its
            stride, in pixels. None for none.
        num_class_tokens: class tokens, whose outputs are pooled one after the other (e3 App. G.3).
        layer_input: whether the embedding is followed by the input of the last linear layer, for its posterior.
        class_token: whether there is a class token also with the pooling "none", for a tower that was trained with one,
            or "attention", which attends to it too (Perception Encoder).
        patch_sizes: sizes of patches, one of which each training step draws and resizes the first layer and the
            positions for (FlexiViT, Beyer et al. 2023); empty for ``patch_size`` alone.
        tuning: which parameters of a pretrained tower are trained; None for all that the task does not lock.
        rotary: positions that turn queries and keys of patches in every block; None for none.
        pooling_heads: heads of attention pooling; None for those of the encoder.
        max_patches: the most patches of an image that keeps its aspect ratio, with positions resized to its shape
            (NaFlex, SigLIP 2); None for squares of ``image_size``.
        top: blocks above the last norm of ``encoder``, with a norm of their own, to train on a locked tower (dino.txt,
            Jose et al. 2024); None for none.
    """

    image_size: int = 224
    patch_size: int = 16
    encoder: EncoderConfig = EncoderConfig()
    pooling: Literal["class_token", "mean", "class_and_mean", "first", "attention", "none"] = "attention"
    positions: Literal["learned", "sine_cosine", "none"] = "learned"
    num_registers: int = 0
    input_norm: bool = False
    representation_size: int | None = None
    projection_size: int | None = None
    weights: str | None = None
    members: Literal["mean", "concatenated", "apart"] = "mean"
    uncertainty_token: bool = False
    norm_twice: bool = False
    layer_input: bool = False
    num_inputs: int = 1
    inputs_as: Literal["channels", "patches"] = "channels"
    num_class_tokens: int = 1
    class_token: bool = False
    patch_sizes: tuple[int, ...] = ()
    tuning: Tuning | None = None
    rotary: RotaryConfig | None = None
    pooling_heads: int | None = None
    max_patches: int | None = None
    top: EncoderConfig | None = None
    stem: StemConfig | None = None

    first_parameters = ("stem", "patches", "positions", "class_token", "registers", "uncertainty_token", "input_norm")

    def __post_init__(self) -> None:
        require_at_least(1, self, "image_size", "patch_size", "num_inputs", "num_class_tokens")
        require_at_least(0, self, "num_registers")
        require_choice(self, "pooling", "positions", "members", "inputs_as")
        if self.image_size < self.patch_size:
            raise UserError(f"image_size = {self.image_size} is less than patch_size = {self.patch_size}")
        for field in ("representation_size", "projection_size", "max_patches"):
            if getattr(self, field) is not None:
                require_at_least(1, self, field)
        if self.class_token and self.pooling not in ("none", "attention"):
            raise FieldError(
                self, "class_token", "True needs pooling 'none' or 'attention'; 'class_token' has one without it"
            )
        if self.pooling_heads is not None:
            self._check_pooling_heads(self.pooling_heads)
        if self.num_class_tokens > 1 and (self.pooling != "class_token" or self.norm_twice):
            raise FieldError(
                self, "num_class_tokens", f"{self.num_class_tokens} needs pooling 'class_token', and no norm_twice"
            )
        if self.inputs_as == "patches" and (self.num_inputs == 1 or self.positions != "learned"):
            raise FieldError(
                self, "inputs_as", "'patches' needs num_inputs of at least 2, and positions = 'learned' to differ in"
            )
        if self.uncertainty_token and self.encoder.num_members > 1:
            raise UserError("image_tower.uncertainty_token = True needs encoder.experts.num_members = 1")
        if self.norm_twice and (self.pooling != "class_token" or self.encoder.norm_placement != "before"):
            raise UserError("image_tower.norm_twice = True needs pooling = 'class_token' and norm_placement = 'before'")
        if self.layer_input and self.last_layer is None:
            raise FieldError(
                self,
                "layer_input",
                "True needs projection_size or attention pooling, without members and uncertainty_token",
            )
        if self.patch_sizes:
            self._check_patch_sizes()
        if self.rotary is not None:
            self._check_rotary()
        if self.patches is not None:
            self._check_max_patches()
        if self.top is not None:
            self._check_top(self.top)
        if self.stem is not None:
            self._check_stem(self.stem)

    def _check_patch_sizes(self) -> None:
        undivided = [size for size in self.patch_sizes if size < 1 or self.image_size % size]
        if undivided:
            raise FieldError(
                self, "patch_sizes", f"{undivided[0]} does not divide image_size = {self.image_size}; leave it out"
            )
        if self.positions != "learned":
            raise FieldError(self, "patch_sizes", "several sizes need positions = 'learned', which can be resized")
        if self.pooling == "none":
            raise FieldError(
                self, "patch_sizes", "several sizes need a pooling other than 'none', of any number of tokens"
            )

    def _check_pooling_heads(self, number: int) -> None:
        require_at_least(1, self, "pooling_heads")
        if self.pooling != "attention" or self.encoder.width % number:
            raise FieldError(
                self, "pooling_heads", f"{number} needs pooling 'attention' and a width that is a multiple of it"
            )

    def _check_rotary(self) -> None:
        if self.encoder.experts is not None:
            raise UserError("image_tower.rotary needs image_tower.encoder.experts = None")
        if (size := self.encoder.size_of_head) % 4:
            raise UserError(f"image_tower.rotary needs heads whose size is a multiple of 4, not {size}")

    def _check_max_patches(self) -> None:
        experts = self.encoder.experts
        others = {
            "pooling = 'none'": self.pooling == "none",
            "num_inputs": self.num_inputs > 1,
            "patch_sizes": bool(self.patch_sizes),
            "rotary": self.rotary is not None,
            "positions = 'none'": self.positions == "none",
            "an ensemble of experts": experts is not None and max(experts.num_predictions, experts.num_members) > 1,
        }
        if unfit := [name for name, given in others.items() if given]:
            raise FieldError(self, "max_patches", f"{self.max_patches} does not go with {unfit[0]}; leave out one")

    def _check_top(self, top: EncoderConfig) -> None:
        if top.width != self.encoder.width or top.experts is not None or self.encoder.experts is not None:
            raise FieldError(self, "top", "blocks need the width of encoder, and have no experts below or in them")
        if self.norm_twice:
            raise FieldError(self, "top", "blocks have a norm of their own; leave out norm_twice")

    def _check_stem(self, stem: StemConfig) -> None:
        if self.patch_size % stem.stride:
            raise FieldError(self, "patch_size", f"{self.patch_size} is no multiple of the stem's {stem.stride} pixels")
        others = {"patch_sizes": self.patch_sizes, "max_patches": self.max_patches, "inputs_as": self.num_grids > 1}
        if unfit := [name for name, given in others.items() if given]:
            raise FieldError(self, "stem", f"a ResNet does not go with {unfit[0]}; leave out one")

    @property
    def patches(self) -> Patches | None:
        """How images become patches that keep their aspect ratio; None for squares."""
        return None if self.max_patches is None else Patches(self.patch_size, self.max_patches)

    @property
    def pools_tokens(self) -> bool:
        """Whether its tokens can be read beside an embedding."""
        return self.pooling != "none"

    @property
    def num_patches(self) -> int:
        """Patches of an image; of several images at once, of all that have patches of their own."""
        return self.side**2 * self.num_grids

    @property
    def num_grids(self) -> int:
        """Grids of patches, each with positions of its own."""
        return self.num_inputs if self.inputs_as == "patches" else 1

    @property
    def num_channels(self) -> int:
        """Channels of what patches are cut from."""
        return 3 * self.num_inputs // self.num_grids if self.stem is None else self.stem.num_channels

    @property
    def cells(self) -> int:
        """Height and width of a patch: in pixels, or in cells of the stem's feature map."""
        return self.patch_size if self.stem is None else self.patch_size // self.stem.stride

    @property
    def has_class_token(self) -> bool:
        """Whether a class token is encoded before the patches."""
        return self.class_token or self.pooling in ("class_token", "class_and_mean")

    @property
    def num_first(self) -> int:
        """Class tokens and registers."""
        return self.num_class_tokens * self.has_class_token + self.num_registers

    @property
    def num_tokens(self) -> int:
        """Tokens of an image: class token, registers and patches."""
        return self.num_first + self.num_patches

    @property
    def side(self) -> int:
        """Patches along each side."""
        if self.stem is not None:
            return self.stem.length(self.image_size) // (self.patch_size // self.stem.stride)
        return self.image_size // self.patch_size

    @property
    def embedding_size(self) -> int:
        """Size of the embedding."""
        size = self.mean_size * (2 if self.uncertainty_token else 1)
        return size * (self.num_members if self.members == "concatenated" else 1)

    @property
    def last_layer(self) -> str | None:
        """Path of the parameters of the linear layer at the very end; None where the tower ends otherwise."""
        if self.encoder.num_members > 1 or self.uncertainty_token:
            return None
        if self.projection_size is not None:
            return "projection"
        return "pooling/mlp/down" if self.pooling == "attention" and self.representation_size is None else None

    @property
    def input_size(self) -> int:
        """Size of the input of the last layer, where it follows the embedding; 0 otherwise."""
        if not self.layer_input:
            return 0
        if self.projection_size is None:
            return self.encoder.mlp_width
        return self.representation_size or self._pooled_size

    @property
    def mean_size(self) -> int:
        """Size of a member's embedding, without log σ²."""
        return self.projection_size or self.representation_size or self._pooled_size

    @property
    def _pooled_size(self) -> int:
        counts = {"none": self.num_tokens, "class_and_mean": 2, "class_token": self.num_class_tokens}
        count = counts.get(self.pooling, 1)
        return count * self.encoder.width

    @property
    def free_fields(self) -> tuple[str, ...]:
        """Those of all towers; and positions of a square can be resized to any shape, but not by accident back."""
        return super().free_fields if self.max_patches is None else (*super().free_fields, "max_patches")

    def all_members(self) -> "ViTConfig":
        """Returns the tower whose output has the embeddings of all members, side by side."""
        return dataclasses.replace(self, members="concatenated")

    def without_pooling(self) -> "ViTConfig | None":
        """Returns the tower whose output is all tokens, one after the other; None of an ensemble or with log σ²."""
        if self.num_members > 1 or self.uncertainty_token or self.max_patches is not None:
            return None
        return dataclasses.replace(
            self,
            pooling="none",
            class_token=self.has_class_token,
            representation_size=None,
            projection_size=None,
            norm_twice=False,
            layer_input=False,
            patch_sizes=(),
            pooling_heads=None,
        )

    def unseen_pixels(self) -> str | None:
        """Returns what is beyond the last whole patch."""
        rest = self.image_size % self.patch_size
        if not rest:
            return None
        below = self.image_size - rest
        return (
            f"patches of {self.patch_size} pixels do not divide images of {self.image_size}: the last {rest} rows and "
            f"columns are not seen; choose an image size of {below} or {below + self.patch_size} to use all pixels"
        )

    def file_options(self) -> dict[str, Any]:
        """Returns its sizes too, and a pooling that a file may not record."""
        pooling = {"image_pooling": self.pooling} if self.pooling in ("mean", "first") else {}
        return {**super().file_options(), "image_size": self.image_size, "patch_size": self.patch_size, **pooling}

    def build(self, rngs: "nnx.Rngs") -> "ViT":
        """Returns the tower with fresh parameters."""
        from lit_het.towers.vit import ViT

        return ViT(self, rngs)


@dataclasses.dataclass(frozen=True)
class ResNetConfig(ImageTowerOptions):
    """A BiT ResNet; ResNet152x2 is ``depth = 152`` with ``width_multiplier = 2``.

    Attributes:
        depth: number of layers.
        width_multiplier: factor of every width.
        image_size: height and width in pixels; parameters do not depend on it.
        compute_type: type of activations; parameters are float32.
    """

    depth: Literal[50, 101, 152] = 50
    width_multiplier: int = 1
    image_size: int = 224
    compute_type: ComputeType = "float32"  # pyright: ignore[reportIncompatibleMethodOverride]

    pools_tokens = False

    def __post_init__(self) -> None:
        require_at_least(1, self, "width_multiplier", "image_size")

    @property
    def embedding_size(self) -> int:
        """Size of the embedding."""
        return 2048 * self.width_multiplier

    def in_float32(self) -> "ResNetConfig":
        """Returns the tower that computes in float32."""
        return dataclasses.replace(self, compute_type="float32")

    def build(self, rngs: "nnx.Rngs") -> "ResNet":
        """Returns the tower with fresh parameters."""
        from lit_het.towers.resnet import ResNet

        return ResNet(self, rngs)

    def layers_above(self, params: Params) -> Params:
        """Raises an error, as the papers define no layer decay for a ResNet."""
        raise UserError("--optimizer.layer-decay needs a Transformer, but the tower is a ResNet; set it to 1")


ImageTowerConfig: TypeAlias = ViTConfig | ResNetConfig | StoredConfig
