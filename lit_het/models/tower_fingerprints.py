"""Fingerprints of towers: stored embeddings and cached features belong to the tower with the same one."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_het import parameters
from lit_het.configs import experiment
from lit_het.configs.experiment import ExperimentConfig
from lit_het.tasks.translation import TranslationConfig
from lit_het.types import Params
from lit_het.weights.native import checksums

if TYPE_CHECKING:
    from lit_het.data_pipelines.texts.tokenizers import Tokenizer

# Fields that change how a model is computed or where it comes from, but not the model.
EXECUTION_FIELDS = (
    "encoder.unrolled",
    "encoder.remat",
    "encoder.compute_type",
    "encoder.experts.initial_noise",
    "encoder.experts.permutation",
    "compute_type",
    "weights",
    "members",
    "patch_sizes",
)
# Fields that towers and tokenizers gained after embeddings had been stored, with the value that changes nothing:
# embeddings of an earlier version stay valid.
_LATER_FIELDS: Mapping[str, Any] = {
    "uncertainty_token": False,
    "uncertainty_from": "token",
    "norm_twice": False,
    "layer_input": False,
    "padding_token": None,
    "scaled_embedding": False,
    "dropout": 0.0,
    "num_inputs": 1,
    "class_token": False,
    "encoder.experts.tiled": True,
    "encoder.experts.overlap": 0,
    "encoder.experts.multi_pred": False,
    "encoder.experts.dropout_samples": 1,
    "encoder.experts.rank_one": None,
    "split_underscores": False,
}


def tower_fingerprint(config: ExperimentConfig, params: Params, tokenizer: "Tokenizer | None" = None) -> str:
    """Returns a fingerprint of a tower: a hash of its fields, its parameters in the compute type and its tokenizer.

    Args:
        config: of a run.
        params: its parameters, at least those of the tower.
        tokenizer: of the text tower; None for the image tower, or the encoder of texts to translate.
    """
    is_image = tokenizer is None and not isinstance(config.task, TranslationConfig)
    part = "image_tower" if is_image else "text_tower"
    tower = getattr(config.task, part)
    fields = _earlier({k: v for k, v in experiment.fields(tower).items() if k not in EXECUTION_FIELDS})
    compute_type = config.task.compute_type
    used = parameters.cast({part: params[part]}, compute_type)
    text = f"{json.dumps(fields, sort_keys=True)} {compute_type} {checksums.digest(used)}"
    if tokenizer is not None:
        settings = dataclasses.asdict(dataclasses.replace(config.tokenizer, model=Path())) if config.tokenizer else {}
        vocabulary = hashlib.sha256(tokenizer.model_bytes).hexdigest()
        text += f" {json.dumps(_earlier(settings), sort_keys=True, default=str)} {vocabulary}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _earlier(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields without later ones that change nothing."""
    return {name: value for name, value in fields.items() if name not in _LATER_FIELDS or value != _LATER_FIELDS[name]}
