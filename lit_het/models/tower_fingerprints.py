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
from lit_het.towers.base import EXECUTION_FIELDS, LATER_FIELDS
from lit_het.types import Params
from lit_het.weights.native import checksums

if TYPE_CHECKING:
    from lit_het.data_pipelines.texts.tokenizers import Tokenizer

# Of towers and of tokenizers: embeddings of an earlier version stay valid.
_LATER_FIELDS = {**LATER_FIELDS, "split_underscores": False, "fold_case": False}


def tower_fingerprint(config: ExperimentConfig, params: Params, tokenizer: "Tokenizer | None" = None) -> str:
    """Returns a fingerprint of a tower: a hash of its fields, its parameters in the compute type and its tokenizer.

    Args:
        config: of a run.
        params: its parameters, at least those of the tower.
        tokenizer: of the text tower; None for the image tower, or the encoder of texts to translate.
    """
    part = f"{config.task.reads}_tower" if tokenizer is None else "text_tower"
    if part == "image_tower":
        config.task.require_image_tower()
    fields = experiment.fields(config.task.towers[part])
    fields = _earlier({k: v for k, v in fields.items() if not k.startswith(EXECUTION_FIELDS)})
    compute_type = config.task.compute_type
    used = parameters.cast({part: params.get(part, {})}, compute_type)
    text = f"{json.dumps(fields, sort_keys=True)} {compute_type} {checksums.digest(used)}"
    if tokenizer is not None:
        settings = dataclasses.asdict(dataclasses.replace(config.tokenizer, model=Path())) if config.tokenizer else {}
        vocabulary = hashlib.sha256(tokenizer.model_bytes).hexdigest()
        text += f" {json.dumps(_earlier(settings), sort_keys=True, default=str)} {vocabulary}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def classifier_fingerprint(config: ExperimentConfig, params: Params) -> str:
    """Returns a fingerprint of a classifier: of its tower and its head; arguments as those of `tower_fingerprint`."""
    fields = json.dumps(experiment.fields(config.task.head), sort_keys=True)
    text = f"{tower_fingerprint(config, params)} {fields} {checksums.digest({'head': params['head']})}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _earlier(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields without later ones that change nothing."""
    return {name: value for name, value in fields.items() if name not in _LATER_FIELDS or value != _LATER_FIELDS[name]}
