"""Reads what sentence-transformers saves beside a text model: how its tokens become an embedding."""

from pathlib import Path
from typing import Literal, TypeAlias

from lit_het import untrusted
from lit_het.errors import UserError
from lit_het.untrusted import Malformed
from lit_het.weights.huggingface.processor import MAX_JSON_BYTES, read_json

FILES = ("modules.json", "1_Pooling/config.json")
"""Files of sentence-transformers in a folder of Hugging Face."""

Pooling: TypeAlias = Literal["first", "mean"]

_MODULES = ("Transformer", "Pooling", "Normalize")
_MODES: dict[str, Pooling] = {"pooling_mode_cls_token": "first", "pooling_mode_mean_tokens": "mean"}


def read_pooling(folder: Path) -> Pooling | None:
    """Returns the pooling of a sentence model; None of a folder that sentence-transformers did not write.

    Other poolings, and layers behind the pooling, are a `UserError`.
    """
    path, settings = (folder / name for name in FILES)
    if not path.is_file():
        return None
    kinds = _kinds(path)
    if unknown := [kind for kind in kinds if kind not in _MODULES]:
        raise UserError(f"{path}: a layer {unknown[0]!r:.100} cannot be imported; leave it out by --text-pooling mean")
    if "Pooling" not in kinds:
        return None
    found = [mode for mode, chosen in read_json(settings).items() if mode.startswith("pooling_mode_") and chosen]
    if len(found) != 1 or found[0] not in _MODES:
        raise UserError(f"{settings}: {', '.join(found) or 'no pooling'} cannot be imported; set --text-pooling mean")
    return _MODES[found[0]]


def _kinds(path: Path) -> list[str]:
    """Returns the names of the modules, without those of Python's modules."""
    try:
        found = untrusted.read_json(path, MAX_JSON_BYTES)
        return [str(module["type"]).rsplit(".", 1)[-1] for module in found]
    except (OSError, Malformed, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__}: {error}); copy the folder again") from error
