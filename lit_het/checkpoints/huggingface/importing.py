"""Imports folders of Hugging Face models: SigLIP, SigLIP 2, ViT, DINOv2, CLIP's image tower and BERT.

Sizes are inferred from the arrays, and from the configuration where the arrays do not determine them. Our towers have
one fixed normalisation of pixels and no position for the class token. Another normalisation is therefore folded into
the first layer, and the position of a class token is added to that token; both changes are exact.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from lit_het.checkpoints.huggingface import names
from lit_het.checkpoints.huggingface.processor import (
    CLIP_PROCESSOR,
    DINO_PROCESSOR,
    SIGLIP_PROCESSOR,
    VIT_PROCESSOR,
    Json,
    read_json,
    read_normalization,
    read_processor,
)
from lit_het.checkpoints.imported import Imported
from lit_het.checkpoints.rename import ParameterSource, Rule, translate
from lit_het.checkpoints.resample import resample_patches, resample_positions
from lit_het.checkpoints.sources import Arrays, open_safetensors
from lit_het.errors import UserError
from lit_het.towers.bert import BertConfig
from lit_het.towers.layers import Activation, ComputeType
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig

# Names of our nonlinearities in `transformers`.
ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}
# A larger number in a configuration is refused.
_LARGEST = 2**31 - 1
_IGNORED = (
    # The constant 0, 1, 2, ..., which old versions stored.
    Rule(r".*embeddings\.position_ids", None),
    # Only used in pretraining with masked patches or words.
    Rule(r".*embeddings\.mask_token", None),
    Rule(r"cls\..*", None),
)
# CLIP's text tower is causal, which our towers do not support. Its temperature is of no use with one tower.
_IGNORED_OF_CLIP = (Rule(r"text_model\..*|text_projection\.weight|logit_scale", None),)
# The classifier reads the class token and the mean of the patches, which our heads do not support.
_IGNORED_OF_DINO = (Rule(r"classifier\..*", None),)


@dataclasses.dataclass(frozen=True)
class _Family:
    """A family of towers with the same names and defaults.

    Attributes:
        table: names of the parameters.
        prefix: of the names inside a larger model.
        activation, epsilon: defaults for a configuration without them.
        processor: default image processor for a folder without one.
        ignored: rules for arrays that are deliberately not imported.
    """

    table: names.Table
    prefix: str
    activation: str = "gelu"
    epsilon: float = 1e-12
    processor: Json = dataclasses.field(default_factory=lambda: VIT_PROCESSOR)
    ignored: tuple[Rule, ...] = ()


_SIGLIP_IMAGE = _Family(names.SIGLIP_IMAGE, "vision_model.", "gelu_pytorch_tanh", 1e-6, SIGLIP_PROCESSOR)
_SIGLIP_TEXT = _Family(names.SIGLIP_TEXT, "text_model.", "gelu_pytorch_tanh", 1e-6)
_CLIP_IMAGE = _Family(names.CLIP_IMAGE, "vision_model.", "quick_gelu", 1e-5, CLIP_PROCESSOR, _IGNORED_OF_CLIP)
_IMAGE_FAMILIES = {
    "siglip": _SIGLIP_IMAGE,
    "siglip_vision_model": _SIGLIP_IMAGE,
    "siglip2": _SIGLIP_IMAGE,
    "siglip2_vision_model": _SIGLIP_IMAGE,
    "vit": _Family(names.VIT, "vit."),
    "dinov2": _Family(names.DINO, "dinov2.", "gelu", 1e-6, DINO_PROCESSOR, _IGNORED_OF_DINO),
    "dinov2_with_registers": _Family(
        names.DINO, "dinov2_with_registers.", "gelu", 1e-6, DINO_PROCESSOR, _IGNORED_OF_DINO
    ),
    "clip": _CLIP_IMAGE,
    "clip_vision_model": _CLIP_IMAGE,
}
_BERT = _Family(names.BERT, "bert.")


def read_huggingface(
    folder: Path,
    *,
    image_size: int | None = None,
    patch_size: int | None = None,
    text_length: int | None = None,
    compute_type: ComputeType = "float32",
) -> Imported:
    """Imports a folder that `transformers` wrote.

    Args:
        folder: with ``config.json``, safetensors files and optionally ``preprocessor_config.json``.
        image_size: in pixels; positions are resampled for it. None for the model's size, rounded down to whole patches:
            the original model ignores the remaining pixels.
        patch_size: in pixels; the first layer is resampled for it. None for the model's size.
        text_length: number of positions of the text tower to retain; None for all.
        compute_type: type of activations.

    Raises:
        UserError: files are missing, or our towers do not support the model.
    """
    config = read_json(folder / "config.json")
    kind = str(config.get("model_type"))
    if kind not in (*_IMAGE_FAMILIES, "bert"):
        known = ", ".join(sorted([*_IMAGE_FAMILIES, "bert"]))
        raise UserError(f"{folder}/config.json: model_type = {kind!r:.100} cannot be imported; supported are {known}")
    arrays = open_safetensors(folder)
    if kind == "bert":
        bert, sources = _read_bert(arrays, config, text_length, compute_type)
        return Imported(arrays, translate(arrays, _IGNORED, sources), text_tower=bert)
    family = _IMAGE_FAMILIES[kind]
    image = _ImageReader(arrays, family, _section(config, "vision_config", config), compute_type)
    processor = read_processor(folder, family.processor)
    normalization = read_normalization(processor, folder)
    image_tower, sources = image.read(normalization, image_size, patch_size)
    imported = Imported(arrays, [], image_tower, image_processor=processor)
    if kind in ("siglip", "siglip2"):
        text_tower, text_sources = _read_siglip_text(
            arrays, _section(config, "text_config", {}), text_length, compute_type
        )
        sources += text_sources + names.parameter_sources(arrays, names.SIGLIP_HEAD, "", "head/")
        imported = dataclasses.replace(imported, text_tower=text_tower, has_bias=True)
    elif kind == "vit" and "classifier.weight" in arrays:
        sources += names.parameter_sources(arrays, names.dense("classifier", "logits"), "", "head/")
        imported = dataclasses.replace(imported, num_classes=_shape(arrays, "classifier.weight", 2)[0])
    translated = translate(arrays, (*family.ignored, *_IGNORED), sources)
    return dataclasses.replace(imported, parameter_sources=translated)


class _Tower:
    """The arrays of one tower, by names without the prefix of the tower, which a file may or may not have."""

    def __init__(self, arrays: Arrays, family: _Family, config: Json, compute_type: ComputeType, path: str):
        # A tower that was saved alone has names without the prefix of the whole model.
        self.prefix = family.prefix if any(name.startswith(family.prefix) for name in arrays) else ""
        self.arrays, self.family, self.config, self.path = arrays, family, config, path
        self.compute_type: ComputeType = compute_type
        self.sources = names.parameter_sources(arrays, family.table, self.prefix, path)
        self.array_names = {one.target.removeprefix(path): one.array_names[0] for one in self.sources}

    def find(self, *candidates: str) -> str | None:
        """Returns the full name of the first candidate in the file, or None."""
        return next((self.prefix + name for name in candidates if self.prefix + name in self.arrays), None)

    def require(self, *candidates: str) -> str:
        """Returns the full name of the first candidate in the file, or raises a `UserError`."""
        found = self.find(*candidates)
        if found is None:
            raise UserError(f"the source has no array {self.prefix}{candidates[0]}; is the file complete?")
        return found

    def shape(self, target: str, *ranks: int) -> tuple[int, ...]:
        """Returns the shape of a parameter's array; another number of axes than ``ranks`` is a `UserError`."""
        if target not in self.array_names:
            raise UserError(f"the source has no array for {self.path}{target}; is the file complete?")
        return _shape(self.arrays, self.array_names[target], *ranks)

    def encoder(self, norm_placement: Literal["before", "after"] = "before") -> EncoderConfig:
        """Returns the configuration of the blocks."""
        width, mlp_width = self.shape("encoder/blocks/0/mlp/down/kernel", 2)
        activation = str(self.config.get("hidden_act", self.family.activation))
        if activation not in ACTIVATIONS:
            raise UserError(
                f"config.json: hidden_act = {activation!r:.100} is not supported; choose from {', '.join(ACTIVATIONS)}"
            )
        gated = "encoder/blocks/0/mlp/gate/kernel" in self.array_names
        depth = _number(self.config, "num_hidden_layers", 12)
        # A number in a damaged configuration must not decide how much memory a model takes.
        if depth > len(self.arrays):
            raise UserError(f"config.json: num_hidden_layers = {depth}, but the source has {len(self.arrays)} arrays")
        return EncoderConfig(
            width,
            depth,
            mlp_width,
            _number(self.config, "num_attention_heads", 12),
            activation="swiglu" if gated else ACTIVATIONS[activation],
            norm_placement=norm_placement,
            norm_epsilon=_number(self.config, "layer_norm_eps", self.family.epsilon),
            layer_scale="encoder/blocks/0/mlp_scale" in self.array_names,
            compute_type=self.compute_type,
        )


class _ImageReader(_Tower):
    """Reads an image tower of any family."""

    def __init__(self, arrays: Arrays, family: _Family, config: Json, compute_type: ComputeType):
        super().__init__(arrays, family, config, compute_type, "image_tower/")
        self.first = self.require("embeddings.patch_embedding.weight", "embeddings.patch_embeddings.projection.weight")
        self.first_bias = self.find("embeddings.patch_embedding.bias", "embeddings.patch_embeddings.projection.bias")
        self.positions = self.require("embeddings.position_embedding.weight", "embeddings.position_embeddings")
        self.class_token = self.find("embeddings.class_embedding", "embeddings.cls_token")

    def read(
        self, normalization: Float[np.ndarray, "2 c"], image_size: int | None, patch_size: int | None
    ) -> tuple[ViTConfig, list[ParameterSource]]:
        """Returns the configuration of the tower and the sources of its parameters."""
        num_patches = _shape(self.arrays, self.positions, 2, 3)[-2] - bool(self.class_token)
        side = round(max(0, num_patches) ** 0.5)
        if side * side != num_patches or not side:
            raise UserError(
                f"{self.positions} holds {num_patches} patches, which form no square; only square images are supported"
            )
        if self.config.get("pooler_act", "tanh") != "tanh":
            raise UserError(f"config.json: pooler_act = {self.config['pooler_act']!r:.100} is not 'tanh'")
        shape = _shape(self.arrays, self.first, 2, 4)
        # Either a convolution [d, c, p, p] or a dense layer over flattened patches [d, p·p·c].
        old_size = shape[-1] if len(shape) == 4 else round((shape[1] / 3) ** 0.5)
        has_pre_logits = "pre_logits/kernel" in self.array_names
        config = ViTConfig(
            side * old_size if image_size is None else image_size,
            old_size if patch_size is None else patch_size,
            self.encoder(),
            pooling="class_token" if self.class_token else "attention",
            num_registers=self.shape("registers", 2, 3)[-2] if "registers" in self.array_names else 0,
            input_norm="input_norm/scale" in self.array_names,
            representation_size=self.shape("pre_logits/kernel", 2)[0] if has_pre_logits else None,
        )
        # Normalisation and patch size change the same layer, so both are applied in one step.
        first = functools.partial(_first_layer, normalization=normalization, old_size=old_size, size=config.patch_size)
        tokens = self._token_sources(config.side, keeps_corners=config.patch_size == old_size)
        sources = self.sources + tokens + self._first_layer_sources(first)
        if "visual_projection.weight" in self.arrays:
            config = dataclasses.replace(config, projection_size=_shape(self.arrays, "visual_projection.weight", 2)[0])
            sources += _projection_sources()
        return config, sources

    def _first_layer_sources(self, first: Any) -> list[ParameterSource]:
        array_names = (self.first,) if self.first_bias is None else (self.first, self.first_bias)
        return [
            ParameterSource("image_tower/patches/kernel", array_names, lambda *layer: first(*layer)[0]),
            ParameterSource("image_tower/patches/bias", array_names, lambda *layer: first(*layer)[1]),
        ]

    def _token_sources(self, side: int, keeps_corners: bool) -> list[ParameterSource]:
        """Returns the sources of the positions and of the class token, to which its own position is added."""
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


def _projection_sources() -> list[ParameterSource]:
    """Returns the sources of CLIP's projection. It has no bias, so ours is zero."""
    array_names = ("visual_projection.weight",)
    return [
        ParameterSource("image_tower/projection/kernel", array_names, np.transpose),
        ParameterSource("image_tower/projection/bias", array_names, lambda weight: np.zeros(len(weight), np.float32)),
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


def _read_siglip_text(
    arrays: Arrays, config: Json, length: int | None, compute_type: ComputeType
) -> tuple[TextConfig, list[ParameterSource]]:
    tower = _Tower(arrays, _SIGLIP_TEXT, config, compute_type, "text_tower/")
    name = tower.require("embeddings.position_embedding.weight")
    if length not in (None, stored := _shape(arrays, name, 2)[0]):
        raise UserError(
            f"{name} holds {stored} positions, of which the last is pooled; only a BERT can be read with another "
            f"text_length, such as {length}"
        )
    positions, length = _text_positions(tower, name.removeprefix(tower.prefix), stored)
    vocabulary_size, size = tower.shape("tokens/embedding", 2)[0], tower.shape("projection/kernel", 2)[0]
    return TextConfig(vocabulary_size, length, size, tower.encoder()), [*tower.sources, positions]


def _read_bert(
    arrays: Arrays, config: Json, length: int | None, compute_type: ComputeType
) -> tuple[BertConfig, list[ParameterSource]]:
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise UserError(
            f"config.json: position_embedding_type = {config['position_embedding_type']!r:.100} is not 'absolute'"
        )
    tower = _Tower(arrays, _BERT, config, compute_type, "text_tower/")
    positions, length = _text_positions(tower, "embeddings.position_embeddings.weight", length)
    bert = BertConfig(
        vocabulary_size=tower.shape("tokens/embedding", 2)[0],
        length=length,
        projection_size=None,
        encoder=tower.encoder("after"),
        num_segments=tower.shape("segments/embedding", 2)[0],
        padding_id=_number({"pad_token_id": config.get("pad_token_id") or 0}, "pad_token_id", 0),
        pooler="pre_logits/kernel" in tower.array_names,
    )
    return bert, [*tower.sources, positions]


def _text_positions(tower: _Tower, name: str, length: int | None) -> tuple[ParameterSource, int]:
    """Returns the source of the first ``length`` positions and their number."""
    full_name = tower.require(name)
    stored = _shape(tower.arrays, full_name, 2)[0]
    if length is not None and length > stored:
        raise UserError(f"{full_name} holds {stored} positions, too few for texts of {length} tokens")
    length = stored if length is None else length
    return ParameterSource("text_tower/positions", (full_name,), lambda array: array[:length]), length


def _shape(arrays: Arrays, name: str, *ranks: int) -> tuple[int, ...]:
    """Returns the shape of an array; another number of axes than ``ranks`` is a `UserError`."""
    shape = arrays[name].shape
    if len(shape) not in ranks:
        raise UserError(f"{name} has shape {shape}, where {' or '.join(map(str, ranks))} axes are expected")
    return shape


def _number(config: Json, field: str, default: int | float) -> Any:
    """Returns a number of config.json, which must be an integer if the default is one."""
    value = config.get(field, default)
    if isinstance(value, bool) or not isinstance(value, (int, type(default))) or not 0 <= value <= _LARGEST:
        what = f"{'an integer' if isinstance(default, int) else 'a number'} from 0 to {_LARGEST:,}"
        raise UserError(f"config.json: {field} = {value!r:.100} is not {what}")
    return type(default)(value)


def _section(config: Json, field: str, default: Json) -> Json:
    value = config.get(field, default)
    if not isinstance(value, dict):
        raise UserError(f"config.json: {field} = {value!r:.100} is not an object")
    return value
