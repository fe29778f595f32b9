"""Reads the text tower of a Hugging Face model: SigLIP's, CLIP's or BERT."""

from lit_het.errors import UserError
from lit_het.towers.encoder_config import ComputeType
from lit_het.towers.text_config import BertConfig, TextConfig
from lit_het.weights.huggingface import names
from lit_het.weights.huggingface.processor import Json
from lit_het.weights.huggingface.tower import Family, Tower, number, shape_of, without_bias
from lit_het.weights.rename import ParameterSource
from lit_het.weights.sources import Arrays

_SIGLIP = Family(names.SIGLIP_TEXT, "text_model.", "gelu_pytorch_tanh", 1e-6)
FAMILIES = {
    "siglip_text_model": _SIGLIP,
    "siglip2_text_model": _SIGLIP,
    "clip_text_model": Family(names.CLIP_TEXT, "text_model.", "quick_gelu", 1e-5, num_heads=8),
    "bert": Family(names.BERT, "bert."),
}
"""Families of text towers, by ``model_type``."""

_PROJECTION = "text_projection.weight"
# Configurations of CLIP that were written before transformers 4.31 name this end token, which is not in the texts.
_OLD_END_TOKEN = 2


def read_text_tower(
    arrays: Arrays, kind: str, config: Json, outer: str, *, length: int | None, compute_type: ComputeType
) -> tuple[TextConfig | BertConfig, list[ParameterSource]]:
    """Returns the configuration of a text tower and the sources of its parameters.

    Args:
        arrays: of the folder.
        kind: of the tower, in `FAMILIES`.
        config: of the tower.
        outer: prefix of the tower's names in a model that is made of other models, or "".
        length: number of positions to retain; None for all.
        compute_type: type of activations.
    """
    tower = Tower(arrays, FAMILIES[kind], config, compute_type, "text_tower/", outer)
    if kind == "bert":
        return _bert(tower, length)
    return (_clip if kind == "clip_text_model" else _siglip)(tower, length)


def _siglip(tower: Tower, length: int | None) -> tuple[TextConfig, list[ParameterSource]]:
    name = tower.require("embeddings.position_embedding.weight")
    if length not in (None, stored := shape_of(tower.arrays, name, 2)[0]):
        raise UserError(
            f"{name} holds {stored} positions, of which the last is pooled; only a BERT or CLIP can be read with "
            f"another text_length, such as {length}"
        )
    positions, length = _positions(tower, "embeddings.position_embedding.weight", stored)
    vocabulary_size, size = tower.shape("tokens/embedding", 2)[0], tower.shape("projection/kernel", 2)[0]
    return TextConfig(vocabulary_size, length, size, tower.encoder()), [*tower.sources, positions]


def _clip(tower: Tower, length: int | None) -> tuple[TextConfig, list[ParameterSource]]:
    if _PROJECTION not in tower.arrays:
        raise UserError(f"the source has no array {_PROJECTION}; give a CLIPModel or a CLIPTextModelWithProjection")
    positions, length = _positions(tower, "embeddings.position_embedding.weight", length)
    end = number(tower.config, "eos_token_id", 49407)
    text = TextConfig(
        vocabulary_size=tower.shape("tokens/embedding", 2)[0],
        length=length,
        embedding_size=shape_of(tower.arrays, _PROJECTION, 2)[0],
        encoder=tower.encoder(causal=True),
        pooling="end_token",
        end_token=None if end == _OLD_END_TOKEN else end,
    )
    return text, [*tower.sources, positions, *without_bias(_PROJECTION, "text_tower/projection")]


def _bert(tower: Tower, length: int | None) -> tuple[BertConfig, list[ParameterSource]]:
    config = tower.config
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise UserError(
            f"config.json: position_embedding_type = {config['position_embedding_type']!r:.100} is not 'absolute'"
        )
    positions, length = _positions(tower, "embeddings.position_embeddings.weight", length)
    has_projection = _PROJECTION in tower.arrays
    bert = BertConfig(
        vocabulary_size=tower.shape("tokens/embedding", 2)[0],
        length=length,
        projection_size=shape_of(tower.arrays, _PROJECTION, 2)[0] if has_projection else None,
        encoder=tower.encoder("after"),
        num_segments=tower.shape("segments/embedding", 2)[0],
        padding_id=number({"pad_token_id": config.get("pad_token_id") or 0}, "pad_token_id", 0),
        pooler="pre_logits/kernel" in tower.array_names,
    )
    projection = without_bias(_PROJECTION, "text_tower/projection") if has_projection else []
    return bert, [*tower.sources, positions, *projection]


def _positions(tower: Tower, name: str, length: int | None) -> tuple[ParameterSource, int]:
    """Returns the source of the first ``length`` positions and their number."""
    full_name = tower.require(name)
    stored = shape_of(tower.arrays, full_name, 2)[0]
    if length is not None and length > stored:
        raise UserError(f"{full_name} holds {stored} positions, too few for texts of {length} tokens")
    length = stored if length is None else length
    return ParameterSource("text_tower/positions", (full_name,), lambda array: array[:length]), length
