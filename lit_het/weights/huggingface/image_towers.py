"""Reads the image tower of a Hugging Face model: SigLIP's, CLIP's, ViT, DINOv2 or DINOv3."""

import dataclasses
import functools

import numpy as np
from jaxtyping import Float

from lit_het.errors import UserError
from lit_het.towers.encoder_config import ComputeType
from lit_het.towers.image_config import RotaryConfig, ViTConfig
from lit_het.weights.huggingface import names
from lit_het.weights.huggingface.processor import (
    CLIP_PROCESSOR,
    DINO_PROCESSOR,
    DINO_V3_PROCESSOR,
    SIGLIP_PROCESSOR,
    Json,
)
from lit_het.weights.huggingface.tower import Family, Tower, number, shape_of, without_bias
from lit_het.weights.rename import ParameterSource, Rule
from lit_het.weights.resample import resample_patches, resample_positions
from lit_het.weights.sources import Arrays

# The classifier reads the class token and the mean of the patches, which our heads do not support.
_IGNORED_OF_DINO = (Rule(r"classifier\..*", None),)
_MOST_PATCHES = 2**14
FAMILIES = {
    "siglip_vision_model": Family(
        names.SIGLIP_IMAGE, "vision_model.", "gelu_pytorch_tanh", 1e-6, processor=SIGLIP_PROCESSOR
    ),
    # For images of any shape (NaFlex), with its positions resampled at half-pixel centres for each.
    "siglip2_vision_model": Family(
        names.SIGLIP_IMAGE, "vision_model.", "gelu_pytorch_tanh", 1e-6, keeps_corners=False, takes_any_shape=True
    ),
    "vit": Family(names.VIT, "vit."),
    "dinov2": Family(names.DINO, "dinov2.", "gelu", 1e-6, processor=DINO_PROCESSOR, ignored=_IGNORED_OF_DINO),
    "dinov2_with_registers": Family(
        names.DINO, "dinov2_with_registers.", "gelu", 1e-6, processor=DINO_PROCESSOR, ignored=_IGNORED_OF_DINO
    ),
    "dinov3_vit": Family(
        names.DINO_V3,
        "",
        "gelu",
        1e-5,
        num_heads=6,
        processor=DINO_V3_PROCESSOR,
        defaults={"key_bias": False, "rope_theta": 100.0},
    ),
    "clip_vision_model": Family(names.CLIP_IMAGE, "vision_model.", "quick_gelu", 1e-5, processor=CLIP_PROCESSOR),
}
"""Families of image towers, by ``model_type``."""


def read_image_tower(
    arrays: Arrays,
    kind: str,
    config: Json,
    outer: str,
    processor: Json,
    normalization: Float[np.ndarray, "2 c"],
    *,
    image_size: int | None,
    patch_size: int | None,
    compute_type: ComputeType,
) -> tuple[ViTConfig, list[ParameterSource]]:
    """Returns the configuration of an image tower and the sources of its parameters.

    Args:
        arrays: of the folder.
        kind: of the tower, in `FAMILIES`.
        config: of the tower.
        outer: prefix of the tower's names in a model that is made of other models, or "".
        processor: of images.
        normalization: from `read_normalization`.
        image_size: as for `read_huggingface`.
        patch_size: as for `read_huggingface`.
        compute_type: as for `read_huggingface`.
    """
    family = FAMILIES[kind]
    tower, sources = _ImageTower(arrays, family, config, compute_type, outer).read(
        normalization, image_size, patch_size
    )
    if family.takes_any_shape:
        most = processor.get("max_num_patches", tower.num_patches)
        if type(most) is not int or not 0 < most <= _MOST_PATCHES:
            raise UserError(
                f"preprocessor_config.json: max_num_patches = {most!r:.100} is not from 1 to {_MOST_PATCHES}"
            )
        tower = dataclasses.replace(tower, max_patches=most)
    return tower, sources


class _ImageTower(Tower):
    """Reads an image tower of any family."""

    def __init__(self, arrays: Arrays, family: Family, config: Json, compute_type: ComputeType, outer: str):
        super().__init__(arrays, family, config, compute_type, "image_tower/", outer)
        layers = ("patch_embedding", "patch_embeddings.projection", "patch_embeddings")
        self.first = self.require(*(f"embeddings.{layer}.weight" for layer in layers))
        self.first_bias = self.find(*(f"embeddings.{layer}.bias" for layer in layers))
        positions = ("embeddings.position_embedding.weight", "embeddings.position_embeddings")
        self.positions = None if "rope_theta" in self.config else self.require(*positions)
        self.class_token = self.find("embeddings.class_embedding", "embeddings.cls_token")
        self.has_head = bool(config.get("vision_use_head", True))
        if not self.has_head:
            self.sources = [one for one in self.sources if not one.target.startswith("image_tower/pooling/")]

    def read(
        self, normalization: Float[np.ndarray, "2 c"], image_size: int | None, patch_size: int | None
    ) -> tuple[ViTConfig, list[ParameterSource]]:
        """Returns the configuration of the tower and the sources of its parameters."""
        if "pre_logits/kernel" in self.array_names and self.config.get("pooler_act", "tanh") != "tanh":
            raise UserError(f"config.json: pooler_act = {self.config['pooler_act']!r:.100} is not 'tanh'")
        shape = shape_of(self.arrays, self.first, 2, 4)
        # Either a convolution [d, c, p, p] or a dense layer over flattened patches [d, p·p·c].
        old_size = shape[-1] if len(shape) == 4 else round((shape[1] / 3) ** 0.5)
        side = self._side(old_size)
        has_pre_logits = "pre_logits/kernel" in self.array_names
        config = ViTConfig(
            side * old_size if image_size is None else image_size,
            old_size if patch_size is None else patch_size,
            self.encoder(),
            pooling="class_token" if self.class_token else "attention" if self.has_head else "mean",
            num_registers=self.shape("registers", 2, 3)[-2] if "registers" in self.array_names else 0,
            input_norm="input_norm/scale" in self.array_names,
            representation_size=self.shape("pre_logits/kernel", 2)[0] if has_pre_logits else None,
            positions="learned" if self.positions else "none",
            rotary=None if self.positions else RotaryConfig(base=number(self.config, "rope_theta", 100.0)),
        )
        tokens = self._token_sources(
            config.side, keeps_corners=self.family.keeps_corners and config.patch_size == old_size
        )
        array_names = (self.first,) if self.first_bias is None else (self.first, self.first_bias)
        first = first_layer_sources(array_names, normalization, old_size, config.patch_size)
        sources = self.sources + tokens + first
        if "visual_projection.weight" in self.arrays:
            config = dataclasses.replace(
                config, projection_size=shape_of(self.arrays, "visual_projection.weight", 2)[0]
            )
            sources += without_bias("visual_projection.weight", "image_tower/projection")
        return config, sources

    def _side(self, patch_size: int) -> int:
        """Returns the number of patches along each side."""
        if self.positions is None:
            return number(self.config, "image_size", 224) // patch_size
        num_patches = shape_of(self.arrays, self.positions, 2, 3)[-2] - bool(self.class_token)
        side = round(max(0, num_patches) ** 0.5)
        if side * side != num_patches or not side:
            raise UserError(
                f"{self.positions} holds {num_patches} patches, which form no square; only square images are supported"
            )
        return side

    def _token_sources(self, side: int, keeps_corners: bool) -> list[ParameterSource]:
        """Returns the sources of the positions and of the class token, to which its own position is added."""
        if self.positions is None:
            return [ParameterSource("image_tower/class_token", (self.require("embeddings.cls_token"),), np.ravel)]
        num_class_tokens = int(self.class_token is not None)

        def patches(positions: np.ndarray) -> np.ndarray:
            rows = positions.reshape(-1, positions.shape[-1]).astype(np.float32)
            return resample_positions(rows[num_class_tokens:], side, keeps_corners=keeps_corners)

        sources = [ParameterSource("image_tower/positions", (self.positions,), patches)]
        if self.class_token is not None:
            sources.append(ParameterSource("image_tower/class_token", (self.class_token, self.positions), _class_token))
        return sources


def _class_token(token: np.ndarray, positions: np.ndarray) -> Float[np.ndarray, " d"]:
    return token.ravel().astype(np.float32) + positions.reshape(-1, token.size)[0].astype(np.float32)


def first_layer_sources(
    array_names: tuple[str, ...], normalization: Float[np.ndarray, "2 c"], old_size: int, size: int
) -> list[ParameterSource]:
    """Returns the sources of the first layer, with the normalisation of pixels folded into it.

    Args:
        array_names: of its kernel and, if it has one, its bias.
        normalization: from `read_normalization`.
        old_size: of the patches in the source.
        size: of our patches, in pixels.
    """
    # Normalisation and patch size change the same layer, so both are applied in one step.
    first = functools.partial(_first_layer, normalization=normalization, old_size=old_size, size=size)
    return [
        ParameterSource("image_tower/patches/kernel", array_names, lambda *layer: first(*layer)[0]),
        ParameterSource("image_tower/patches/bias", array_names, lambda *layer: first(*layer)[1]),
    ]


def _first_layer(
    kernel: np.ndarray,
    bias: np.ndarray | None = None,
    *,
    normalization: Float[np.ndarray, "2 c"],
    old_size: int,
    size: int,
) -> tuple[Float[np.ndarray, "_ d"], Float[np.ndarray, " d"]]:
    """Returns the kernel ``[(p q c) d]`` and the bias for patches of ``size`` pixels in [-1, 1].

    For pixels v in [0, 1] the original layer reads ``(v - mean) / std``. In terms of our input y = 2 v - 1 this is
    ``0.5 y / std + (0.5 - mean) / std``: the factor goes into the kernel, the offset into the bias.
    """
    convolution = kernel.ndim == 4
    square = kernel.transpose(2, 3, 1, 0) if convolution else kernel.T.reshape(old_size, old_size, -1, len(kernel))
    kernel = resample_patches(square.astype(np.float32), size)
    mean, deviation = normalization
    offset = np.einsum("pqcd,c->d", kernel, (0.5 - mean) / deviation)
    scaled = kernel * (0.5 / deviation)[:, None]
    return scaled.reshape(-1, scaled.shape[-1]), offset if bias is None else bias.astype(np.float32) + offset
