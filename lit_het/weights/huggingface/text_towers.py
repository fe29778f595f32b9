"""Reads the text tower of a Hugging Face model: SigLIP's, CLIP's, BERT, RoBERTa, XLM-R, T5, ModernBERT."""

import dataclasses

import numpy as np

from lit_het.errors import UserError
from lit_het.towers.encoder_config import ComputeType
from lit_het.towers.text_config import BertConfig, ModernBertConfig, T5Config, TextConfig, TextTowerConfig
from lit_het.weights.huggingface import names
from lit_het.weights.huggingface.processor import Json
from lit_het.weights.huggingface.sentence_models import Pooling
from lit_het.weights.huggingface.tower import Family, Tower, number, section, shape_of, without_bias
from lit_het.weights.rename import ParameterSource, Rule
from lit_het.weights.resample import length_of_texts, with_length
from lit_het.weights.sources import Arrays

# Where it is not part of the embedding, and the end of a language model.
_POOLER, _LANGUAGE_MODEL = Rule(r"(.*\.)?pooler\.dense\..*", None), Rule(r"lm_head\..*", None)
_ROBERTA = Family(names.BERT, "roberta.", ignored=(_POOLER, _LANGUAGE_MODEL))
_NO_BIASES = {"qkv_bias": False, "proj_bias": False, "mlp_bias": False}
_NOT_THE_ENCODER = Rule(r"decoder\..*|encoder\.embed_tokens\..*", None)
_T5 = Family(names.T5, "", "relu", 1e-6, ignored=(_NOT_THE_ENCODER, _LANGUAGE_MODEL), defaults=_NO_BIASES)
_NOT_THE_TOKENS = Rule(r"head\..*|decoder\..*", None)
_MODERN_BERT = Family(names.MODERN_BERT, "model.", epsilon=1e-5, ignored=(_NOT_THE_TOKENS,))
_SIGLIP = Family(names.SIGLIP_TEXT, "text_model.", "gelu_pytorch_tanh", 1e-6)
FAMILIES = {
    "siglip_text_model": _SIGLIP,
    "siglip2_text_model": _SIGLIP,
    "clip_text_model": Family(names.CLIP_TEXT, "text_model.", "quick_gelu", 1e-5, num_heads=8),
    "bert": Family(names.BERT, "bert.", ignored=(_POOLER,)),
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "t5": _T5,
    "mt5": _T5,
    "modernbert": _MODERN_BERT,
}
"""Families of text towers, by ``model_type``."""

ALONE = ("t5", "mt5", "modernbert")
"""Families that return tokens only, so that no dual encoder of `transformers` has them."""

POOLED_ANYHOW = ("bert", "roberta", "xlm-roberta", *ALONE)
"""Families that do not determine how tokens become an embedding."""

_PROJECTION = "text_projection.weight"
# Configurations of CLIP that were written before transformers 4.31 name this end token, which is not in the texts.
_OLD_END_TOKEN = 2
T5_KINDS: dict[str, Json] = {
    "t5": {"num_layers": 6, "num_heads": 8, "feed_forward_proj": "relu"},
    "mt5": {"num_layers": 8, "num_heads": 6, "feed_forward_proj": "gated-gelu"},
}
"""What a configuration of T5 may leave out."""

# Their names of what `Tower` reads.
_T5_FIELDS = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "layer_norm_epsilon": "layer_norm_eps",
}
_T5_ACTIVATIONS = {"relu": "relu", "gated-gelu": "geglu_tanh"}
# T5 has no learned positions; it was trained with texts of 512 tokens.
_T5_LENGTH = 512
MODERN_BERT_FIELDS = {
    "hidden_activation": ("hidden_act", "gelu"),
    "norm_eps": ("layer_norm_eps", 1e-5),
    "attention_bias": ("qkv_bias", False),
    "mlp_bias": ("mlp_bias", False),
    "norm_bias": ("norm_bias", False),
    "num_hidden_layers": ("num_hidden_layers", 22),
    "num_attention_heads": ("num_attention_heads", 12),
}
"""Fields of ModernBERT's configuration, their names in `Tower`, and their defaults."""


def read_text_tower(
    arrays: Arrays,
    kind: str,
    config: Json,
    outer: str,
    *,
    length: int | None,
    pooling: Pooling | None,
    compute_type: ComputeType,
) -> tuple[TextTowerConfig, list[ParameterSource]]:
    """Returns the configuration of a text tower and the sources of its parameters.

    Args:
        arrays: of the folder.
        kind: of the tower, in `FAMILIES`.
        config: of the tower.
        outer: prefix of the tower's names in a model that is made of other models, or "".
        length: number of positions; beyond those of the source they are interpolated. None for the source's.
        pooling: of a kind in `POOLED_ANYHOW`; None for the mean of a T5, and otherwise for the first token and the
            dense layer behind it, if there is one.
        compute_type: type of activations.
    """
    if kind in T5_KINDS:
        return _t5(arrays, T5_KINDS[kind] | config, outer, length, pooling, compute_type)
    if kind == "modernbert":
        return _modern_bert(arrays, config, outer, length, pooling, compute_type)
    tower = Tower(arrays, FAMILIES[kind], config, compute_type, "text_tower/", outer)
    if kind in POOLED_ANYHOW:
        return _bert(tower, length, pooling, is_roberta=kind != "bert")
    return (_clip if kind == "clip_text_model" else _siglip)(tower, length)


def _siglip(tower: Tower, length: int | None) -> tuple[TextConfig, list[ParameterSource]]:
    name = tower.require("embeddings.position_embedding.weight")
    length = length_of_texts(name, shape_of(tower.arrays, name, 2)[0], length, ", of which the last is pooled")
    positions, length = _positions(tower, "embeddings.position_embedding.weight", length)
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


def _bert(
    tower: Tower, length: int | None, pooling: Pooling | None, *, is_roberta: bool
) -> tuple[BertConfig, list[ParameterSource]]:
    config = tower.config
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise UserError(
            f"config.json: position_embedding_type = {config['position_embedding_type']!r:.100} is not 'absolute'"
        )
    default = int(is_roberta)
    padding = config.get("pad_token_id", default)
    padding_id = number({"pad_token_id": default if padding is None else padding}, "pad_token_id", 0)
    # RoBERTa numbers positions from here; the one before is that of padding, which is masked.
    first = padding_id + 1 if is_roberta else 0
    positions, length = _positions(tower, "embeddings.position_embeddings.weight", length, first)
    has_projection = _PROJECTION in tower.arrays
    has_pooler = pooling is None and "pre_logits/kernel" in tower.array_names
    bert = BertConfig(
        vocabulary_size=tower.shape("tokens/embedding", 2)[0],
        length=length,
        projection_size=shape_of(tower.arrays, _PROJECTION, 2)[0] if has_projection else None,
        encoder=tower.encoder("after"),
        num_segments=tower.shape("segments/embedding", 2)[0],
        padding_id=padding_id,
        pooler=has_pooler,
        mean_pooling=pooling == "mean",
    )
    projection = without_bias(_PROJECTION, "text_tower/projection") if has_projection else []
    sources = [one for one in tower.sources if has_pooler or not one.target.startswith("text_tower/pre_logits/")]
    return bert, [*sources, positions, *projection]


def _t5(
    arrays: Arrays, config: Json, outer: str, length: int | None, pooling: Pooling | None, compute_type: ComputeType
) -> tuple[T5Config, list[ParameterSource]]:
    kind = config["feed_forward_proj"]
    if kind not in _T5_ACTIVATIONS:
        known = ", ".join(_T5_ACTIVATIONS)
        raise UserError(f"config.json: feed_forward_proj = {kind!r:.100} is not supported; choose from {known}")
    fields = {ours: config[theirs] for theirs, ours in _T5_FIELDS.items() if theirs in config}
    tower = Tower(arrays, _T5, fields, compute_type, "text_tower/", outer)
    width, inner = tower.shape("encoder/blocks/0/attention/out/kernel", 2)
    head_size = inner // max(1, number(fields, "num_attention_heads", 0))
    t5 = T5Config(
        vocabulary_size=tower.shape("tokens/embedding", 2)[0],
        length=_T5_LENGTH if length is None else length,
        projection_size=None,
        encoder=tower.encoder(
            activation=_T5_ACTIVATIONS[kind], norm="rms", head_size=None if width == inner else head_size
        ),
        padding_id=number(config, "pad_token_id", 0),
        pooling=pooling or "mean",
        num_buckets=tower.shape("distances", 2)[0],
        max_distance=number(config, "relative_attention_max_distance", 128),
    )

    # Its logits are not divided by the root of a head's size.
    def scaled(kernel: np.ndarray) -> np.ndarray:
        return kernel.T * np.float32(head_size**0.5)

    is_query = "/attention/query/kernel"
    return t5, [
        dataclasses.replace(one, combine=scaled) if one.target.endswith(is_query) else one for one in tower.sources
    ]


def _modern_bert(
    arrays: Arrays, config: Json, outer: str, length: int | None, pooling: Pooling | None, compute_type: ComputeType
) -> tuple[ModernBertConfig, list[ParameterSource]]:
    fields: Json = {ours: config.get(theirs, default) for theirs, (ours, default) in MODERN_BERT_FIELDS.items()}
    fields["proj_bias"] = fields["qkv_bias"]
    if fields["hidden_act"] != "gelu":
        raise UserError(f"config.json: hidden_activation = {fields['hidden_act']!r:.100} is not 'gelu'")
    tower = Tower(arrays, _MODERN_BERT, fields, compute_type, "text_tower/", outer)
    encoder = tower.encoder(activation="geglu", first_norm=False)
    modern_bert = ModernBertConfig(
        vocabulary_size=tower.shape("tokens/embedding", 2)[0],
        length=number(config, "max_position_embeddings", 8192) if length is None else length,
        projection_size=None,
        encoder=encoder,
        padding_id=number(config, "pad_token_id", 50283),
        pooling=pooling or "first",
        global_every=_global_every(config, encoder.depth),
        window=number(config, "local_attention", 128),
        global_base=_rotary_base(config, "full_attention", "global_rope_theta", 160_000.0),
        local_base=_rotary_base(config, "sliding_attention", "local_rope_theta", 10_000.0),
    )
    # The first block, whose tokens are normalised, has no norm there.
    norm, like = "text_tower/encoder/blocks/0/attention_norm", (tower.array_names["input_norm/scale"],)
    unused = ParameterSource(f"{norm}/scale", like, np.ones_like), ParameterSource(f"{norm}/bias", like, np.zeros_like)
    return modern_bert, [*tower.sources, *unused]


def _global_every(config: Json, depth: int) -> int:
    """Returns which blocks attend to all tokens: the first of so many."""
    every = number(config, "global_attn_every_n_layers", 3)
    kinds = config.get("layer_types")
    if not kinds:
        return every
    every = next((block for block, kind in enumerate(kinds) if block and kind == "full_attention"), depth)
    if kinds != ["sliding_attention" if block % every else "full_attention" for block in range(depth)]:
        raise UserError(f"config.json: layer_types = {kinds!s:.100} are not regular, and cannot be imported")
    return every


def _rotary_base(config: Json, kind: str, old_field: str, default: float) -> float:
    found = section(section(config, "rope_parameters", {}), kind, {})
    if found.get("rope_type", "default") != "default" or config.get("rope_scaling"):
        raise UserError(f"config.json: rotary positions of {kind} other than rope_type = 'default' are not supported")
    return number({"rope_theta": config.get(old_field, default)} | found, "rope_theta", default)


def _positions(tower: Tower, name: str, length: int | None, first: int = 0) -> tuple[ParameterSource, int]:
    """Returns the source of ``length`` positions and their number; those before ``first`` are left out."""
    full_name = tower.require(name)
    stored = shape_of(tower.arrays, full_name, 2)[0] - first
    if stored < 1:
        raise UserError(f"{full_name} holds no positions behind padding, pad_token_id = {first - 1}")
    length = stored if length is None else length
    return ParameterSource(
        "text_tower/positions", (full_name,), lambda array: with_length(array[first:], length)
    ), length
