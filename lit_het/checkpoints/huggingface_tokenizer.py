"""A SentencePiece tokenizer as the files that `transformers` reads, giving the ids that training saw.

`SiglipTokenizer` would load the model itself, but it drops punctuation; so the files describe each step in the form of
the `tokenizers` library instead, which has unigram models alone.
"""

import base64
import json
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from sentencepiece import sentencepiece_model_pb2

from lit_het.errors import UserError

_MARK = "▁"  # SentencePiece's word boundary


@runtime_checkable
class SentencePiece(Protocol):
    """What a tokenizer tells of itself.

    Attributes:
        model_bytes: the serialised model.
        length: tokens per caption, the end token included.
        lowercase: whether captions are lowered first.
        padding_id: fills the rest of a row.
    """

    model_bytes: bytes
    length: int
    lowercase: bool
    padding_id: int


def tokenizer_files(tokenizer: SentencePiece) -> dict[str, dict[str, Any]]:
    """Returns the contents of ``tokenizer.json`` and ``tokenizer_config.json``.

    Ids are the same but for captions that spell out a control token such as ``</s>``.

    Raises:
        UserError: the model is no unigram model, or has pieces of the user's own.
    """
    model: Any = sentencepiece_model_pb2.ModelProto.FromString(  # pyright: ignore[reportAttributeAccessIssue]
        tokenizer.model_bytes
    )
    trainer, piece_types = model.trainer_spec, model.SentencePiece
    if trainer.model_type != trainer.UNIGRAM or any(piece.type == piece_types.USER_DEFINED for piece in model.pieces):
        raise UserError(
            "only SentencePiece models of the type unigram, without user-defined pieces, give transformers the same "
            "ids; export without the tokenizer"
        )
    pieces = [piece.piece for piece in model.pieces]
    unknown = next(i for i, piece in enumerate(model.pieces) if piece.type == piece_types.UNKNOWN)
    special = sorted({trainer.eos_id, unknown, tokenizer.padding_id})
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": _truncation(tokenizer.length),
            "padding": _padding(tokenizer, pieces[tokenizer.padding_id]),
            "added_tokens": [_special_token(i, pieces[i]) for i in special],
            "normalizer": {"type": "Sequence", "normalizers": _normalizers(model, tokenizer.lowercase)},
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
            "do_lower_case": tokenizer.lowercase,  # they read it in tokenizer.json, we here
            "model_max_length": tokenizer.length,
            "pad_token": pieces[tokenizer.padding_id],
            "eos_token": pieces[trainer.eos_id],
            "unk_token": pieces[unknown],
            "padding_side": "right",
            "clean_up_tokenization_spaces": False,
            # No mask: the text tower reads padding like any other token.
            "model_input_names": ["input_ids"],
        },
    }


def _normalizers(model: Any, lowercase: bool) -> list[dict[str, Any]]:
    """Returns lowering, the model's own table of characters, and one space for many."""
    spec, steps = model.normalizer_spec, []
    if lowercase:
        steps.append({"type": "Lowercase"})
    if spec.precompiled_charsmap:
        table = base64.b64encode(spec.precompiled_charsmap).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": table})
    if spec.remove_extra_whitespaces:
        steps.append({"type": "Strip", "strip_left": True, "strip_right": True})
        steps.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    return steps


def _words(model: Any) -> dict[str, Any]:
    scheme = "always" if model.normalizer_spec.add_dummy_prefix else "never"
    return {"type": "Metaspace", "replacement": _MARK, "prepend_scheme": scheme, "split": True}


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


def read_settings(model: Path) -> tuple[bool, int]:
    """Returns whether captions are lowered, and the id that fills a row, for a SentencePiece model in a folder.

    Where the folder does not tell, captions are lowered, and rows are filled with the end token ``</s>`` as in SigLIP,
    or in vocabularies without it, as SigLIP 2's, with the padding token.

    Raises:
        UserError: the token that fills rows is not in the model.
    """
    path = model.with_name("tokenizer_config.json")
    settings = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    proto: Any = sentencepiece_model_pb2.ModelProto.FromString(  # pyright: ignore[reportAttributeAccessIssue]
        model.read_bytes()
    )
    names = proto.trainer_spec
    padding = settings.get("pad_token") or (names.eos_piece if names.eos_piece == "</s>" else names.pad_piece)
    padding = padding["content"] if isinstance(padding, dict) else padding
    pieces = [piece.piece for piece in proto.pieces]
    if padding not in pieces:
        raise UserError(f"{path}: pad_token = {padding!r} is not in {model.name}")
    return bool(settings.get("do_lower_case", True)), pieces.index(padding)
