"""Exports tokenizers to `transformers` with the same ids, and reads the settings of SentencePiece's from a folder.

`SiglipTokenizer` could load the SentencePiece model itself, but it always removes punctuation. The exported files
therefore describe each step for the `tokenizers` library.
"""

import base64
import json
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


@runtime_checkable
class TokenizerJson(Protocol):
    """The attributes of a tokenizer of the `tokenizers` library.

    Attributes:
        model_bytes: a ``tokenizer.json``.
        length: tokens per caption, control tokens included.
        padding_id: id of the padding token.
    """

    model_bytes: bytes
    length: int
    padding_id: int


class Settings(NamedTuple):
    """The settings of a folder's SentencePiece tokenizer; fields as in `SentencePiece`."""

    lowercase: bool
    padding_id: int
    remove_punctuation: bool


def tokenizer_files(
    tokenizer: SentencePiece | TokenizerJson, padding: int = 0, *, is_masked: bool = False
) -> dict[str, dict[str, Any]]:
    """Returns the contents of ``tokenizer.json`` and ``tokenizer_config.json``.

    The ids are the same, except for captions that contain the text of a control token such as ``</s>``.

    Args:
        tokenizer: the tokenizer.
        padding: padding tokens that follow every caption, whether it is padded further or not.
        is_masked: whether the text tower gets a mask of the padding; otherwise it attends to it as to any other token.

    Raises:
        UserError: a SentencePiece model is not a unigram model, or has user-defined pieces.
    """
    content = _of_sentencepiece(tokenizer) if isinstance(tokenizer, SentencePiece) else _of_json(tokenizer)
    pad = content["tokenizer_config.json"]["pad_token"]
    length = tokenizer.length + padding
    content["tokenizer.json"] |= {"truncation": _truncation(length), "padding": _padding(length, tokenizer, pad)}
    if padding:
        processors = [content["tokenizer.json"].get("post_processor"), _template(tokenizer.padding_id, pad, padding)]
        steps = [step for step in processors if step is not None]
        content["tokenizer.json"]["post_processor"] = {"type": "Sequence", "processors": steps}
    content["tokenizer_config.json"] |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "padding_side": "right",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"] if is_masked else ["input_ids"],
    }
    return content


def _of_json(tokenizer: TokenizerJson) -> dict[str, dict[str, Any]]:
    content = json.loads(tokenizer.model_bytes)
    added = {token["id"]: token["content"] for token in content.get("added_tokens", ())}
    vocabulary = content["model"]["vocab"]
    pieces = (
        vocabulary if isinstance(vocabulary, dict) else {piece: number for number, (piece, _) in enumerate(vocabulary)}
    )
    pad = added.get(tokenizer.padding_id) or next(
        name for name, number in pieces.items() if number == tokenizer.padding_id
    )
    return {"tokenizer.json": content, "tokenizer_config.json": {"pad_token": pad}}


def _of_sentencepiece(tokenizer: SentencePiece) -> dict[str, dict[str, Any]]:
    model = untrusted.parse_sentencepiece(tokenizer.model_bytes)
    trainer, piece_types = model.trainer_spec, model.SentencePiece
    is_supported = trainer.model_type in (trainer.UNIGRAM, trainer.BPE)
    if not is_supported or any(piece.type == piece_types.USER_DEFINED for piece in model.pieces):
        raise UserError(
            "only SentencePiece models of the types unigram and bpe, without user-defined pieces, give transformers "
            "the same ids; export with --to lit-het"
        )
    pieces = [piece.piece for piece in model.pieces]
    if not 0 <= trainer.eos_id < len(pieces):
        raise UserError(
            f"the SentencePiece model has no end token (its eos_id is {trainer.eos_id}); export with --to lit-het"
        )
    unknown = next(i for i, piece in enumerate(model.pieces) if piece.type == piece_types.UNKNOWN)
    # Control tokens must be declared, or transformers would split their text.
    special = sorted({trainer.eos_id, unknown, tokenizer.padding_id})
    return {
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": [_special_token(i, pieces[i]) for i in special],
            "normalizer": {"type": "Sequence", "normalizers": _normalizers(model, tokenizer)},
            "pre_tokenizer": _words(model),
            "post_processor": _end_token(trainer.eos_id, pieces[trainer.eos_id]),
            "decoder": _words(model),
            "model": _bpe(model, pieces[unknown]) if trainer.model_type == trainer.BPE else _unigram(model, unknown),
        },
        "tokenizer_config.json": {
            # `transformers` takes these two settings from tokenizer.json; `read_settings` takes them from here.
            "do_lower_case": tokenizer.lowercase,
            "remove_punctuation": tokenizer.remove_punctuation,
            "pad_token": pieces[tokenizer.padding_id],
            "eos_token": pieces[trainer.eos_id],
            "unk_token": pieces[unknown],
        },
    }


def _unigram(model: Any, unknown: int) -> dict[str, Any]:
    return {
        "type": "Unigram",
        "unk_id": unknown,
        "vocab": [[piece.piece, piece.score] for piece in model.pieces],
        "byte_fallback": model.trainer_spec.byte_fallback,
    }


def _bpe(model: Any, unknown: str) -> dict[str, Any]:
    """Returns byte-pair encoding; SentencePiece stores no merges, but merges first what makes the best piece."""
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == piece.NORMAL}
    merges = [
        [piece[:cut], piece[cut:]]
        for piece in sorted(scores, key=scores.__getitem__, reverse=True)
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    return {
        "type": "BPE",
        "vocab": {piece.piece: number for number, piece in enumerate(model.pieces)},
        "merges": merges,
        "unk_token": unknown,
        "fuse_unk": True,
        "byte_fallback": model.trainer_spec.byte_fallback,
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


def _padding(length: int, tokenizer: SentencePiece | TokenizerJson, piece: str) -> dict[str, Any]:
    return {
        "strategy": {"Fixed": length},
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


def _template(number: int, piece: str, times: int) -> dict[str, Any]:
    """Returns a step that appends a token several times."""
    behind = [{"SpecialToken": {"id": piece, "type_id": 0}}] * times
    return {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, *behind],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}, *behind],
        "special_tokens": {piece: {"id": piece, "ids": [number], "tokens": [piece]}},
    }


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
