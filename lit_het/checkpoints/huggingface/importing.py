"""Hugging Face models: SigLIP and SigLIP 2, ViT, DINOv2, CLIP's image tower and BERT, from a folder.

Sizes are read off the arrays; the configuration adds what arrays do not show. A model trained on pixels of another
normalisation than ours gets it folded into its first layer, and the position of a class token into that token: both
are exact.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from lit_het.checkpoints.huggingface import names
from lit_het.checkpoints.huggingface import processor as huggingface_processor
from lit_het.checkpoints.huggingface.processor import Json, read_json
from lit_het.checkpoints.imported import Imported
from lit_het.checkpoints.rename import Piece, Rule, translate
from lit_het.checkpoints.resample import resample_patches, resample_positions
from lit_het.checkpoints.sources import Arrays, open_safetensors
from lit_het.errors import UserError
from lit_het.towers.bert import BertConfig
from lit_het.towers.layers import Activation, ComputeType
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig

# What `transformers` calls the nonlinearities that there are here.
ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}
# No number of a configuration is larger.
_LARGEST = 2**31 - 1
_LEFT_OUT = (
    # Numbers 0, 1, 2, ... that old versions stored.
    Rule(r".*embeddings\.position_ids", None),
    # For training by masking patches or words.
    Rule(r".*embeddings\.mask_token", None),
    Rule(r"cls\..*", None),
)
# CLIP's text tower is causal, which none here is, and its temperature belongs to both towers.
_LEFT_OUT_OF_CLIP = (Rule(r"text_model\..*|text_projection\.weight|logit_scale", None),)
# Reads the class token beside the mean of the patches, which no head here does.
_LEFT_OUT_OF_DINO = (Rule(r"classifier\..*", None),)


@dataclasses.dataclass(frozen=True)
class _Family:
    """A kind of tower.

    Attributes:
        table: its names.
        prefix: what its names begin with inside a larger model.
        activation, epsilon: where the configuration is silent.
        processor: how images are prepared, where no file says it.
        left_out: arrays that no model here has a place for.
    """

    table: names.Table
    prefix: str
    activation: str = "gelu"
    epsilon: float = 1e-12
    processor: Json = dataclasses.field(default_factory=lambda: huggingface_processor.VIT)
    left_out: tuple[Rule, ...] = ()


_SIGLIP_IMAGE = _Family(names.SIGLIP_IMAGE, "vision_model.", "gelu_pytorch_tanh", 1e-6, huggingface_processor.SIGLIP)
_SIGLIP_TEXT = _Family(names.SIGLIP_TEXT, "text_model.", "gelu_pytorch_tanh", 1e-6)
_CLIP_IMAGE = _Family(
    names.CLIP_IMAGE, "vision_model.", "quick_gelu", 1e-5, huggingface_processor.CLIP, _LEFT_OUT_OF_CLIP
)
_IMAGE_FAMILIES = {
    "siglip": _SIGLIP_IMAGE,
    "siglip_vision_model": _SIGLIP_IMAGE,
    "siglip2": _SIGLIP_IMAGE,
    "siglip2_vision_model": _SIGLIP_IMAGE,
    "vit": _Family(names.VIT, "vit."),
    "dinov2": _Family(names.DINO, "dinov2.", "gelu", 1e-6, huggingface_processor.DINO, _LEFT_OUT_OF_DINO),
    "dinov2_with_registers": _Family(
        names.DINO, "dinov2_with_registers.", "gelu", 1e-6, huggingface_processor.DINO, _LEFT_OUT_OF_DINO
    ),
    "clip": _CLIP_IMAGE,
    "clip_vision_model": _CLIP_IMAGE,
}
_BERT = _Family(names.BERT, "bert.")


def read(
    folder: Path,
    *,
    image_size: int | None = None,
    patch_size: int | None = None,
    text_length: int | None = None,
    compute_type: ComputeType = "float32",
) -> Imported:
    """Opens a folder as `transformers` writes it.

    Args:
        folder: with ``config.json`` and safetensors, and ``preprocessor_config.json`` if there is one.
        image_size: in pixels, for which positions are resampled; None keeps the model's, less pixels that make no
            whole patch and that the original ignores.
        patch_size: in pixels, for which the first layer is resampled; None keeps the model's.
        text_length: how many positions of the text tower to keep; None keeps all.
        compute_type: type of activations.

    Raises:
        UserError: files are missing, or the model is of another kind or uses what towers here do not have.
    """
    config = read_json(folder / "config.json")
    kind = str(config.get("model_type"))
    if kind not in (*_IMAGE_FAMILIES, "bert"):
        known = ", ".join(sorted([*_IMAGE_FAMILIES, "bert"]))
        raise UserError(
            f"{folder}/config.json: model_type = {kind!r:.100} is none of those that can be imported: {known}"
        )
    arrays = open_safetensors(folder)
    if kind == "bert":
        bert, pieces = _read_bert(arrays, config, text_length, compute_type)
        return Imported(arrays, translate(arrays, _LEFT_OUT, pieces), text_tower=bert)
    family = _IMAGE_FAMILIES[kind]
    image = _ImageReader(arrays, family, _section(config, "vision_config", config), compute_type)
    processor = huggingface_processor.read(folder, family.processor)
    normalization = huggingface_processor.normalization(processor, folder)
    image_tower, pieces = image.read(normalization, image_size, patch_size)
    imported = Imported(arrays, [], image_tower, image_processor=processor)
    if kind in ("siglip", "siglip2"):
        text_tower, of_text = _read_siglip_text(arrays, _section(config, "text_config", {}), text_length, compute_type)
        pieces += of_text + names.pieces(arrays, names.SIGLIP_HEAD, "", "head/")
        imported = dataclasses.replace(imported, text_tower=text_tower, has_bias=True)
    elif kind == "vit" and "classifier.weight" in arrays:
        pieces += names.pieces(arrays, names.dense("classifier", "logits"), "", "head/")
        imported = dataclasses.replace(imported, num_classes=_shape(arrays, "classifier.weight", 2)[0])
    return dataclasses.replace(imported, pieces=translate(arrays, (*family.left_out, *_LEFT_OUT), pieces))


class _Tower:
    """The arrays of one tower, by their names without the prefix that files have or have not."""

    def __init__(self, arrays: Arrays, family: _Family, config: Json, compute_type: ComputeType, path: str):
        self.prefix = family.prefix if any(name.startswith(family.prefix) for name in arrays) else ""
        self.arrays, self.family, self.config, self.path = arrays, family, config, path
        self.compute_type: ComputeType = compute_type
        self.pieces = names.pieces(arrays, family.table, self.prefix, path)
        self.sources = {piece.target.removeprefix(path): piece.sources[0] for piece in self.pieces}

    def has(self, *candidates: str) -> str | None:
        """Returns the first of some names that there is."""
        return next((self.prefix + name for name in candidates if self.prefix + name in self.arrays), None)

    def name(self, *candidates: str) -> str:
        """Returns the first of some names that there is, one of which there must be."""
        found = self.has(*candidates)
        if found is None:
            raise UserError(f"the source has no array {self.prefix}{candidates[0]}; is the file complete?")
        return found

    def shape(self, target: str, *ranks: int) -> tuple[int, ...]:
        """Returns the shape, in the file, of what becomes a parameter, which must have one of so many axes."""
        if target not in self.sources:
            raise UserError(f"the source has nothing for {self.path}{target}; is the file complete?")
        return _shape(self.arrays, self.sources[target], *ranks)

    def encoder(self, norm_placement: Literal["before", "after"] = "before") -> EncoderConfig:
        """Returns the configuration of the blocks."""
        width, mlp_width = self.shape("encoder/blocks/0/mlp/down/kernel", 2)
        activation = str(self.config.get("hidden_act", self.family.activation))
        if activation not in ACTIVATIONS:
            raise UserError(f"config.json: hidden_act = {activation!r:.100} is none of {', '.join(ACTIVATIONS)}")
        gated = "encoder/blocks/0/mlp/gate/kernel" in self.sources
        depth = _number(self.config, "num_hidden_layers", 12)
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
            layer_scale="encoder/blocks/0/mlp_scale" in self.sources,
            compute_type=self.compute_type,
        )


class _ImageReader(_Tower):
    """Any image tower: they differ in their names, in what follows the pooled token, and in the first layer."""

    def __init__(self, arrays: Arrays, family: _Family, config: Json, compute_type: ComputeType):
        super().__init__(arrays, family, config, compute_type, "image_tower/")
        self.first = self.name("embeddings.patch_embedding.weight", "embeddings.patch_embeddings.projection.weight")
        self.first_bias = self.has("embeddings.patch_embedding.bias", "embeddings.patch_embeddings.projection.bias")
        self.positions = self.name("embeddings.position_embedding.weight", "embeddings.position_embeddings")
        self.class_token = self.has("embeddings.class_embedding", "embeddings.cls_token")

    def read(
        self, normalization: Float[np.ndarray, "2 c"], image_size: int | None, patch_size: int | None
    ) -> tuple[ViTConfig, list[Piece]]:
        """Returns the tower and its pieces."""
        num_patches = _shape(self.arrays, self.positions, 2, 3)[-2] - bool(self.class_token)
        side = round(max(0, num_patches) ** 0.5)
        if side * side != num_patches or not side:
            raise UserError(
                f"{self.positions} holds {num_patches} patches, which form no square; images here are square"
            )
        if self.config.get("pooler_act", "tanh") != "tanh":
            raise UserError(f"config.json: pooler_act = {self.config['pooler_act']!r:.100} is not 'tanh'")
        shape = _shape(self.arrays, self.first, 2, 4)
        # A convolution [d, c, p, p], or a dense layer over patches in rows [d, p·p·c].
        old_size = shape[-1] if len(shape) == 4 else round((shape[1] / 3) ** 0.5)
        config = ViTConfig(
            side * old_size if image_size is None else image_size,
            old_size if patch_size is None else patch_size,
            self.encoder(),
            pooling="class_token" if self.class_token else "attention",
            num_registers=self.shape("registers", 2, 3)[-2] if "registers" in self.sources else 0,
            input_norm="input_norm/scale" in self.sources,
            representation_size=self.shape("pre_logits/kernel", 2)[0] if "pre_logits/kernel" in self.sources else None,
        )
        first = functools.partial(_first_layer, normalization=normalization, old_size=old_size, size=config.patch_size)
        tokens = self._token_pieces(config.side, keeps_corners=config.patch_size == old_size)
        pieces = self.pieces + tokens + self._first_pieces(first)
        if "visual_projection.weight" in self.arrays:
            config = dataclasses.replace(config, projection_size=_shape(self.arrays, "visual_projection.weight", 2)[0])
            pieces += _projection_pieces()
        return config, pieces

    def _first_pieces(self, first: Any) -> list[Piece]:
        sources = (self.first,) if self.first_bias is None else (self.first, self.first_bias)
        return [
            Piece("image_tower/patches/kernel", sources, lambda *layer: first(*layer)[0]),
            Piece("image_tower/patches/bias", sources, lambda *layer: first(*layer)[1]),
        ]

    def _token_pieces(self, side: int, keeps_corners: bool) -> list[Piece]:
        """Positions go to patches; the class token's own becomes a part of it."""
        count = bool(self.class_token)

        def patches(positions: np.ndarray) -> np.ndarray:
            rows = positions.reshape(-1, positions.shape[-1]).astype(np.float32)
            return resample_positions(rows[count:], side, keeps_corners=keeps_corners)

        pieces = [Piece("image_tower/positions", (self.positions,), patches)]
        if self.class_token is not None:
            pieces.append(Piece("image_tower/class_token", (self.class_token, self.positions), _class_token))
        return pieces


def _class_token(token: np.ndarray, positions: np.ndarray) -> Float[np.ndarray, " d"]:
    return token.ravel().astype(np.float32) + positions.reshape(-1, token.size)[0].astype(np.float32)


def _projection_pieces() -> list[Piece]:
    """CLIP's last layer has no bias: ours is zero."""
    source = ("visual_projection.weight",)
    return [
        Piece("image_tower/projection/kernel", source, np.transpose),
        Piece("image_tower/projection/bias", source, lambda weight: np.zeros(len(weight), np.float32)),
    ]


def _first_layer(
    kernel: np.ndarray,
    bias: np.ndarray | None = None,
    *,
    normalization: Float[np.ndarray, "2 c"],
    old_size: int,
    size: int,
) -> tuple[Float[np.ndarray, "_ d"], Float[np.ndarray, " d"]]:
    """Returns the kernel ``[(p q c) d]`` and the bias of patches of ``size`` pixels in [-1, 1].

    Of v in [0, 1] theirs sees ``(v - mean) / std``, which is ``y 0.5 / std + (0.5 - mean) / std`` of our y = 2 v - 1.
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
) -> tuple[TextConfig, list[Piece]]:
    tower = _Tower(arrays, _SIGLIP_TEXT, config, compute_type, "text_tower/")
    source = tower.name("embeddings.position_embedding.weight")
    if length not in (None, stored := _shape(arrays, source, 2)[0]):
        raise UserError(f"{source} holds {stored} positions, the last of which pools; only a BERT's can have {length}")
    positions, length = _text_positions(tower, source.removeprefix(tower.prefix), stored)
    vocabulary_size, size = tower.shape("tokens/embedding", 2)[0], tower.shape("projection/kernel", 2)[0]
    return TextConfig(vocabulary_size, length, size, tower.encoder()), [*tower.pieces, positions]


def _read_bert(
    arrays: Arrays, config: Json, length: int | None, compute_type: ComputeType
) -> tuple[BertConfig, list[Piece]]:
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
        pooler="pre_logits/kernel" in tower.sources,
    )
    return bert, [*tower.pieces, positions]


def _text_positions(tower: _Tower, name: str, length: int | None) -> tuple[Piece, int]:
    """Returns the piece of the first ``length`` positions, and how many they are."""
    source = tower.name(name)
    stored = _shape(tower.arrays, source, 2)[0]
    if length is not None and length > stored:
        raise UserError(f"{source} holds {stored} positions, too few for texts of {length} tokens")
    length = stored if length is None else length
    return Piece("text_tower/positions", (source,), lambda array: array[:length]), length


def _shape(arrays: Arrays, name: str, *ranks: int) -> tuple[int, ...]:
    """Returns the shape of an array, which must have one of so many axes."""
    shape = arrays[name].shape
    if len(shape) not in ranks:
        raise UserError(f"{name} has shape {shape}, where {' or '.join(map(str, ranks))} axes are expected")
    return shape


def _number(config: Json, field: str, default: int | float) -> Any:
    """Returns a number of config.json: a whole one if its default is."""
    value = config.get(field, default)
    if isinstance(value, bool) or not isinstance(value, (int, type(default))) or not 0 <= value <= _LARGEST:
        what = f"{'whole' if isinstance(default, int) else 'a number'} from 0 to {_LARGEST:,}"
        raise UserError(f"config.json: {field} = {value!r:.100} is not {what}")
    return type(default)(value)


def _section(config: Json, field: str, default: Json) -> Json:
    value = config.get(field, default)
    if not isinstance(value, dict):
        raise UserError(f"config.json: {field} = {value!r:.100} is no object")
    return value
