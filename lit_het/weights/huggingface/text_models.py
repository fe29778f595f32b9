"""Writes text towers as the text models of `transformers` that compute the same: SigLIP's, BERT, Megatron's BERT."""

from typing import Any

import numpy as np
import transformers

from lit_het.errors import UserError
from lit_het.towers.positions import sinusoidal_positions
from lit_het.towers.text_config import BertConfig, TextConfig
from lit_het.weights.huggingface import names
from lit_het.weights.huggingface.image_models import Flat, WrittenTower, encoder_config, encoder_fields, require
from lit_het.weights.huggingface.lengthening import POOLINGS, lengthened

SIGLIP_LENGTH = 64
"""Tokens of every text that `transformers` prepares for a SigLIP model."""

# Positions of a text model whose texts `transformers` pads to the longest one at hand.
_MOST_TOKENS = 512

# BERT's pooler ends with tanh, which is the identity of numbers as small as those times this factor; unit embeddings
# do not depend on it.
_SMALL = 2.0**-20


def write_siglip_text(tower: TextConfig, params: Flat) -> WrittenTower:
    """Returns a text Transformer as SigLIP's text model, with the same unit embeddings."""
    require("SiglipTextModel", _pre_norm_fields(tower, "SiglipTextModel"))
    is_plain = tower.length == SIGLIP_LENGTH and tower.pooling == "last"
    if tower.length >= SIGLIP_LENGTH and not is_plain:
        raise UserError(
            f"text_tower.length = {tower.length} is too much for a SiglipModel, whose texts have {SIGLIP_LENGTH} "
            "tokens in transformers; export with --to lit-het"
        )
    if not is_plain:
        tower, params = lengthened(tower, params, SIGLIP_LENGTH)
    positions = params.get("positions")
    arrays = names.named_arrays(names.SIGLIP_TEXT, "text_model.", "", params)
    arrays["text_model.embeddings.position_embedding.weight"] = (
        sinusoidal_positions(tower.length, tower.encoder.width) if positions is None else positions
    )
    config = transformers.SiglipTextConfig(
        vocab_size=tower.vocabulary_size,
        max_position_embeddings=tower.length,
        projection_size=tower.embedding_size,
        # The defaults of `transformers` are CLIP's tokens. The files of the tokenizer contain its own.
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id")),
        **encoder_config(tower.encoder),
    )
    return WrittenTower(config, arrays, np.eye(tower.embedding_size, dtype=np.float32))


def write_megatron_bert(tower: TextConfig, params: Flat) -> WrittenTower:
    """Returns a text Transformer as Megatron's BERT, which has norms before layers, with the same unit embeddings."""
    require("MegatronBertModel", _pre_norm_fields(tower, "MegatronBertModel"))
    longer, params = lengthened(tower, params, max(_MOST_TOKENS, 2 * tower.length))
    width = longer.encoder.width
    arrays = names.named_arrays(names.MEGATRON_BERT, "text_model.", "", params) | {
        "text_model.embeddings.position_embeddings.weight": params["positions"],
        "text_model.embeddings.token_type_embeddings.weight": np.zeros((1, width), np.float32),
        # It pools the first token; after the last block of a lengthened tower all tokens are equal.
        "text_model.pooler.dense.weight": _SMALL * np.eye(width, dtype=np.float32),
        "text_model.pooler.dense.bias": np.zeros(width, np.float32),
    }
    config = transformers.MegatronBertConfig(type_vocab_size=1, pad_token_id=None, **_bert_config(longer))
    return WrittenTower(config, arrays, params["projection/kernel"].T)


def _pre_norm_fields(tower: TextConfig, model: str) -> list[tuple[str, Any, Any]]:
    wanted = encoder_fields("text_tower", model, tower.encoder)
    wanted += [
        ("text_tower.padding_token", tower.padding_token, None),
        ("text_tower.scaled_embedding", tower.scaled_embedding, False),
    ]
    return wanted if tower.pooling in POOLINGS else [*wanted, ("text_tower.pooling", tower.pooling, "last")]


def _bert_config(tower: TextConfig | BertConfig) -> dict[str, Any]:
    return {
        "vocab_size": tower.vocabulary_size,
        "max_position_embeddings": tower.length,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        **encoder_config(tower.encoder),
    }


def write_bert(tower: BertConfig, params: Flat) -> WrittenTower:
    """Returns a BERT as `BertModel`, with the same unit embeddings up to rounding."""
    pooling = ("text_tower.mean_pooling", tower.mean_pooling, False)
    require("BertModel", [*encoder_fields("text_tower", "BertModel", tower.encoder, norms="after"), pooling])
    weight, bias, projection = _bert_end(tower, params)
    arrays = names.named_arrays(names.BERT, "text_model.", "", params) | {
        "text_model.embeddings.position_embeddings.weight": params["positions"],
        "text_model.pooler.dense.weight": weight,
        "text_model.pooler.dense.bias": bias,
    }
    segments = {"type_vocab_size": tower.num_segments, "pad_token_id": tower.padding_id}
    return WrittenTower(transformers.BertConfig(**segments, **_bert_config(tower)), arrays, projection)


def _bert_end(tower: BertConfig, params: Flat) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns weight and bias of BERT's pooler, and the dense layer behind it, which has no bias."""
    width, size = tower.encoder.width, tower.embedding_size
    identity, zero = np.eye(width, dtype=np.float32), np.zeros(width, np.float32)
    kernel = params.get("projection/kernel", identity)
    bias = params.get("projection/bias", np.zeros(size, np.float32))
    if tower.pooler or size > width:
        if bias.any():
            what = "BERT's pooler" if tower.pooler else f"more than {width} numbers"
            raise UserError(f"text_tower.projection with a bias behind {what} has no BertModel; use --to lit-het")
        if tower.pooler:
            return params["pre_logits/kernel"].T, params["pre_logits/bias"], kernel.T
        return _SMALL * identity, zero, kernel.T
    weight = np.zeros((width, width), np.float32)
    weight[:size], zero[:size] = _SMALL * kernel.T, _SMALL * bias
    return weight, zero, np.eye(size, width, dtype=np.float32)
