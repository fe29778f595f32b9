"""Exports SentencePiece tokenizers to `transformers` with the same ids, and reads their settings from a folder.

`SiglipTokenizer` could load the SentencePiece model itself, but it always removes punctuation. The exported files
therefore describe each step for the `tokenizers` library, which supports only unigram models.
"""

import base64
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from lit_het import untrusted
from lit_het.checkpoints.huggingface.processor import Json, read_json
from lit_het.errors import UserError
from lit_het.untrusted import Malformed

SENTENCEPIECE_FILES = ("spiece.model", "tokenizer.model")
"""SentencePiece models, by the names that transformers and sentencepiece give them."""

TOKENIZER_JSON = "tokenizer.json"

_WORD_BOUNDARY = "▁"  # as SentencePiece writes it
_PUNCTUATION = r"[!-/:-@\[-`{-~]"  # ASCII only
_BLANKS = r"[\s\x1c-\x1f]+"  # the same characters as str.isspace
_STRIP = {"type": "Strip", "strip_left": True, "strip_right": True}


@runtime_checkable
class SentencePiece(Protocol):
    """The attributes of a SentencePiece tokenizer.

    Attributes:
        model_bytes: the serialised model.
        length: tokens per caption, including the end token.
        lowercase: whether captions are converted to lower case first.
        padding_id: id of the padding token.
        remove_punctuation: whether ASCII punctuation and repeated white space are removed first.
    """

    model_bytes: bytes
    length: int
    lowercase: bool
    padding_id: int
    remove_punctuation: bool


class Settings(NamedTuple):
    """The settings of a folder's SentencePiece tokenizer; fields as in `SentencePiece`."""

    lowercase: bool
    padding_id: int
    remove_punctuation: bool


def tokenizer_files(tokenizer: SentencePiece) -> dict[str, dict[str, Any]]:
    """Returns the contents of ``tokenizer.json`` and ``tokenizer_config.json``.

    The ids are the same, except for captions that contain the text of a control token such as ``</s>``.

    Raises:
        UserError: the model is not a unigram model, or has user-defined pieces.
    """
    model = untrusted.parse_sentencepiece(tokenizer.model_bytes)
    trainer, piece_types = model.trainer_spec, model.SentencePiece
    if trainer.model_type != trainer.UNIGRAM or any(piece.type == piece_types.USER_DEFINED for piece in model.pieces):
        raise UserError(
            "only SentencePiece models of the type unigram, without user-defined pieces, give transformers the same "
            "ids; export without the tokenizer"
        )
    pieces = [piece.piece for piece in model.pieces]
    if not 0 <= trainer.eos_id < len(pieces):
        raise UserError(
            f"the SentencePiece model has no end token (its eos_id is {trainer.eos_id}); export without the tokenizer"
        )
    unknown = next(i for i, piece in enumerate(model.pieces) if piece.type == piece_types.UNKNOWN)
    # Control tokens must be declared, or transformers would split their text.
    special = sorted({trainer.eos_id, unknown, tokenizer.padding_id})
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": _truncation(tokenizer.length),
            "padding": _padding(tokenizer, pieces[tokenizer.padding_id]),
            "added_tokens": [_special_token(i, pieces[i]) for i in special],
            "normalizer": {"type": "Sequence", "normalizers": _normalizers(model, tokenizer)},
            "pre_tokenizer": _words(model),
            "post_processor": _end_token(trainer.eos_id, pieces[trainer.eos_id]),
            "decoder": _words(model),
            "model": {
                "type": "Unigram",
                "unk_id": unknown,
                "vocab": [[piece.piece, piece.score] for piece in model.pieces],
                "byte_fallback": trainer.byte_fallback,
            },
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            # `transformers` takes these two settings from tokenizer.json; `read_settings` takes them from here.
            "do_lower_case": tokenizer.lowercase,
            "remove_punctuation": tokenizer.remove_punctuation,
            "model_max_length": tokenizer.length,
            "pad_token": pieces[tokenizer.padding_id],
            "eos_token": pieces[trainer.eos_id],
            "unk_token": pieces[unknown],
            "padding_side": "right",
            "clean_up_tokenization_spaces": False,
            # Without an attention mask: the text tower attends to padding as to any other token.
            "model_input_names": ["input_ids"],
        },
    }


def _normalizers(model: Any, tokenizer: SentencePiece) -> list[dict[str, Any]]:
    """Returns the steps: lower case, no punctuation, the model's character table, and single spaces."""
    spec, steps = model.normalizer_spec, []
    if tokenizer.lowercase:
        steps.append({"type": "Lowercase"})
    if tokenizer.remove_punctuation:
        # Before the model's own table, as `SentencePieceTokenizer` does: the table may change punctuation.
        steps += [_replacement(_PUNCTUATION, ""), _replacement(_BLANKS, " "), _STRIP]
    if spec.precompiled_charsmap:
        table = base64.b64encode(spec.precompiled_charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": table})
    if spec.remove_extra_whitespaces:
        steps += [_STRIP, _replacement(" {2,}", " ")]
    return steps


def _replacement(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def _words(model: Any) -> dict[str, Any]:
    # A word at the start of a caption has the same token as elsewhere only if a boundary is put before it.
    scheme = "always" if model.normalizer_spec.add_dummy_prefix else "never"
    return {"type": "Metaspace", "replacement": _WORD_BOUNDARY, "prepend_scheme": scheme, "split": True}


def _truncation(length: int) -> dict[str, Any]:
    return {"direction": "Right", "max_length": length, "strategy": "LongestFirst", "stride": 0}


def _padding(tokenizer: SentencePiece, piece: str) -> dict[str, Any]:
    return {
        "strategy": {"Fixed": tokenizer.length},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": tokenizer.padding_id,
        "pad_type_id": 0,
        "pad_token": piece,
    }


def _special_token(number: int, piece: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": number, "content": piece, **flags}


def _end_token(number: int, piece: str) -> dict[str, Any]:
    caption, end = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": piece, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [caption, end],
        "pair": [caption, {"Sequence": {"id": "B", "type_id": 0}}, end],
        "special_tokens": {piece: {"id": piece, "ids": [number], "tokens": [piece]}},
    }


def find_tokenizer(folder: Path, *, reads_json: bool) -> Path | None:
    """Returns the tokenizer beside a model's weights, or None: a SentencePiece model, or else ``tokenizer.json``.

    Args:
        folder: of the model.
        reads_json: False ignores ``tokenizer.json``: `transformers` lowercases in code what it tokenises for SigLIP.
    """
    names = SENTENCEPIECE_FILES + (TOKENIZER_JSON,) * reads_json
    return next((folder / name for name in names if (folder / name).is_file()), None)


def read_settings(model: Path) -> Settings:
    """Returns the settings of a SentencePiece model from the other files of its folder.

    Defaults for missing settings are those of SigLIP: lower case, and padding with the end token ``</s>``. Vocabularies
    without ``</s>``, such as SigLIP 2's, are padded with their padding token. Punctuation is removed if `transformers`
    would use its `SiglipTokenizer`.

    Raises:
        UserError: a file is not a JSON object, or the padding token is not in the model.
    """
    path = model.with_name("tokenizer_config.json")
    settings = _read_if_present(path)
    try:
        proto = untrusted.parse_sentencepiece(model.read_bytes())
    except (OSError, Malformed) as error:
        raise UserError(f"{model} cannot be read ({error}); give a SentencePiece model") from error
    names = proto.trainer_spec
    padding = settings.get("pad_token") or (names.eos_piece if names.eos_piece == "</s>" else names.pad_piece)
    padding = padding.get("content") if isinstance(padding, dict) else padding
    pieces = [piece.piece for piece in proto.pieces]
    if padding not in pieces:
        raise UserError(f"{path}: pad_token = {padding!r:.100} is not in {model.name}")
    return Settings(
        lowercase=bool(settings.get("do_lower_case", True)),
        padding_id=pieces.index(padding),
        remove_punctuation=bool(settings.get("remove_punctuation", _is_siglip(settings, model))),
    )


def _is_siglip(settings: Json, model: Path) -> bool:
    """Returns whether `transformers` would use `SiglipTokenizer`, by the configured class or else by the model type."""
    config = _read_if_present(model.with_name("config.json"))
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    return named == "SiglipTokenizer" if named else config.get("model_type") == "siglip"


def _read_if_present(path: Path) -> Json:
    return read_json(path) if path.is_file() else {}
