"""Exports tokenizers to `transformers` with the same ids, and reads the settings of SentencePiece's from a folder.

`SiglipTokenizer` could load the SentencePiece model itself, but it always removes punctuation. The exported files
therefore describe each step for the `tokenizers` library.
"""

import json
import random
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors

from lit_het import untrusted
from lit_het.console import message
from lit_het.errors import UserError
from lit_het.untrusted import Malformed
from lit_het.weights.huggingface.processor import Json, read_json

SENTENCEPIECE_FILES = ("spiece.model", "tokenizer.model")
"""SentencePiece models, by the names that transformers and sentencepiece give them."""

TOKENIZER_JSON = "tokenizer.json"

JSON_FILES = ((TOKENIZER_JSON,), ("vocab.json", "merges.txt"))
"""Files of the `tokenizers` library, and of CLIP's tokenizer before it; the first one is the tokenizer's path."""

MAX_TOKENIZER_BYTES = 40_000_000
"""The largest ``tokenizer.json`` that is read."""

# Values of ``model_type``; SigLIP 2 with fixed patches has the first one.
_SIGLIP = ("siglip", "siglip2")
# Classes of transformers that pad on the left if nothing else is configured.
_PADDED_LEFT = ("Siglip2Tokenizer", "GemmaTokenizer", "GemmaTokenizerFast")

_WORD_BOUNDARY = "▁"  # as SentencePiece writes it
_PUNCTUATION = Regex(r"[!-/:-@\[-`{-~]")  # ASCII only
_LAST_SIGMA = Regex(r"(?<=\p{L})Σ(?!\p{L})")
_TRIED_TEXTS = 300
_BLANKS = Regex(r"[\s\x1c-\x1f]+")  # the same characters as str.isspace


@runtime_checkable
class SentencePiece(Protocol):
    """The attributes of a SentencePiece tokenizer.

    Attributes:
        model_bytes: the serialised model.
        length: tokens per caption, including the end token.
        lowercase: whether captions are converted to lower case first.
        padding_id: id of the padding token.
        remove_punctuation: whether ASCII punctuation and repeated white space are removed first.
        split_underscores: whether underscores become spaces before that.
    """

    model_bytes: bytes
    length: int
    lowercase: bool
    padding_id: int
    remove_punctuation: bool
    split_underscores: bool

    def pieces(self, text: str) -> list[int]:
        """Returns the ids of a text without control tokens."""
        ...


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
    split_underscores: bool


def tokenizer_files(
    tokenizer: SentencePiece | TokenizerJson, padding: int = 0, *, is_masked: bool = False
) -> dict[str, dict[str, Any]]:
    """Returns the contents of ``tokenizer.json`` and ``tokenizer_config.json``.

    The ids are the same, except for captions that contain the text of a control token such as ``</s>``.

    Args:
        tokenizer: the tokenizer.
        padding: padding tokens that follow every caption, whether it is padded further or not.
        is_masked: whether the text tower gets a mask of the padding; otherwise it attends to it as to any other token.
    """
    if isinstance(tokenizer, SentencePiece):
        made, settings = _of_sentencepiece(tokenizer)
        _require_equal_ids(tokenizer, made)
    else:
        made, settings = Tokenizer.from_buffer(tokenizer.model_bytes), {}
    pad, length = made.id_to_token(tokenizer.padding_id), tokenizer.length + padding
    assert pad is not None  # a tokenizer refuses a padding_id that is not in its vocabulary
    made.enable_truncation(length)
    made.enable_padding(length=length, pad_id=tokenizer.padding_id, pad_token=pad)
    if padding:
        behind = _followed_by(tokenizer.padding_id, pad, padding)
        steps = [step for step in (made.post_processor, behind) if step is not None]
        made.post_processor = processors.Sequence(steps)
    settings |= {
        "pad_token": pad,
        # The name in transformers 4 and 5.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": length,
        "padding_side": "right",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"] if is_masked else ["input_ids"],
    }
    return {"tokenizer.json": json.loads(made.to_str()), "tokenizer_config.json": settings}


def _of_sentencepiece(tokenizer: SentencePiece) -> tuple[Tokenizer, dict[str, Any]]:
    """Returns the tokenizer, and its part of ``tokenizer_config.json``."""
    model = untrusted.parse_sentencepiece(tokenizer.model_bytes)
    trainer, piece_types = model.trainer_spec, model.SentencePiece
    is_supported = trainer.model_type in (trainer.UNIGRAM, trainer.BPE) and not trainer.treat_whitespace_as_suffix
    if not is_supported or any(piece.type == piece_types.USER_DEFINED for piece in model.pieces):
        raise UserError(
            "only SentencePiece models of the types unigram and bpe, without user-defined pieces and "
            "treat_whitespace_as_suffix, give transformers the same ids; export with --to lit-het"
        )
    pieces = [piece.piece for piece in model.pieces]
    if not 0 <= trainer.eos_id < len(pieces):
        raise UserError(
            f"the SentencePiece model has no end token (its eos_id is {trainer.eos_id}); export with --to lit-het"
        )
    unknown = next(i for i, piece in enumerate(model.pieces) if piece.type == piece_types.UNKNOWN)
    made = Tokenizer(
        _bpe(model, pieces[unknown])
        if trainer.model_type == trainer.BPE
        else models.Unigram([(piece.piece, piece.score) for piece in model.pieces], unknown, trainer.byte_fallback)
    )
    # Control tokens must be declared, or transformers would split their text.
    special = sorted({trainer.eos_id, unknown, tokenizer.padding_id})
    made.add_special_tokens([AddedToken(pieces[i], normalized=False, special=True) for i in special])
    made.normalizer = normalizers.Sequence(_normalizers(model, tokenizer))
    scheme = "always" if model.normalizer_spec.add_dummy_prefix else "never"
    made.decoder = decoders.Metaspace(_WORD_BOUNDARY, scheme)
    if trainer.byte_fallback:
        made.decoder = decoders.Sequence([decoders.ByteFallback(), made.decoder])
    made.post_processor = _followed_by(trainer.eos_id, pieces[trainer.eos_id])
    return made, {
        # `transformers` takes these settings from tokenizer.json; `read_settings` takes them from here.
        "do_lower_case": tokenizer.lowercase,
        "remove_punctuation": tokenizer.remove_punctuation,
        "split_underscores": tokenizer.split_underscores,
        "eos_token": pieces[trainer.eos_id],
        "unk_token": pieces[unknown],
    }


def _require_equal_ids(tokenizer: SentencePiece, made: Tokenizer) -> None:
    """Raises a `UserError` unless both give the same ids for texts of the model's own pieces."""
    model = untrusted.parse_sentencepiece(tokenizer.model_bytes)
    pieces = [piece.piece.replace(_WORD_BOUNDARY, " ") for piece in model.pieces if piece.type == piece.NORMAL]
    choose = random.Random(0)
    for count in range(_TRIED_TEXTS):
        text = (" " * (count % 2)).join(choose.choices(pieces, k=choose.randint(1, 8)))
        if tokenizer.pieces(text) != made.encode(text, add_special_tokens=False).ids:
            raise UserError(
                f"transformers would give other ids than the SentencePiece model, of {text!r:.100}; export with "
                "--to lit-het"
            )


def _bpe(model: Any, unknown: str) -> models.BPE:
    """Returns byte-pair encoding; SentencePiece stores no merges, but merges first what makes the best piece."""
    scores = {piece.piece: piece.score for piece in model.pieces if piece.type == piece.NORMAL}
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(scores, key=scores.__getitem__, reverse=True)
        for cut in range(1, len(piece))
        if piece[:cut] in scores and piece[cut:] in scores
    ]
    vocabulary = {piece.piece: number for number, piece in enumerate(model.pieces)}
    fallback = model.trainer_spec.byte_fallback
    return models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=fallback)


def _normalizers(model: Any, tokenizer: SentencePiece) -> list[normalizers.Normalizer]:
    """Returns the steps: lower case, no underscores, no punctuation, the model's character table, and single spaces."""
    spec, steps = model.normalizer_spec, []
    if tokenizer.lowercase:
        # `Lowercase` takes letter by letter, and Python a Greek sigma at the end of a word for another one.
        steps += [normalizers.Replace(_LAST_SIGMA, "ς"), normalizers.Lowercase()]
    if tokenizer.split_underscores:
        steps.append(normalizers.Replace("_", " "))
    if tokenizer.remove_punctuation:
        # Before the model's own table, as `SentencePieceTokenizer` does: the table may change punctuation.
        without, joined = normalizers.Replace(_PUNCTUATION, ""), normalizers.Replace(_BLANKS, " ")
        steps += [without, joined, normalizers.Strip()]
    if spec.precompiled_charsmap:
        try:
            steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
        except Exception as error:  # the library has no class of its own for this
            raise UserError(f"{error}: transformers could not read it; export with --to lit-het") from error
    if spec.remove_extra_whitespaces:
        # Only spaces: other blanks are characters to SentencePiece.
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        # A word at the start of a caption has the same token as elsewhere.
        steps.append(normalizers.Prepend(" "))
    return [*steps, normalizers.Replace(" ", _WORD_BOUNDARY)]


def _followed_by(number: int, piece: str, times: int = 1) -> processors.TemplateProcessing:
    """Returns a step that appends a token several times."""
    # By a name of our own: pieces with a colon or a dollar sign mean something else in a template.
    behind, token = ["last"] * times, {"id": "last", "ids": [number], "tokens": [piece]}
    return processors.TemplateProcessing(["$A", *behind], ["$A", "$B", *behind], special_tokens=[token])


def find_tokenizer(folder: Path, *, reads_json: bool) -> Path | None:
    """Returns the tokenizer beside a model's weights, or None.

    It is a SentencePiece model, or else ``tokenizer.json``, or else CLIP's ``vocab.json`` with its ``merges.txt``.

    Args:
        folder: of the model.
        reads_json: False takes only a SentencePiece model.
    """
    found = next((folder / name for name in SENTENCEPIECE_FILES if (folder / name).is_file()), None)
    if found is not None or not reads_json:
        return found
    names = next((names for names in JSON_FILES if all((folder / name).is_file() for name in names)), None)
    if names is None:
        return None
    settings = _read_if_present(folder / "tokenizer_config.json")
    default = "left" if settings.get("tokenizer_class") in _PADDED_LEFT else "right"
    if settings.get("padding_side", default) != "right":
        message(f"{folder / names[0]} is not read: texts are padded on the right, and its padding_side is not")
        return None
    return folder / names[0]


def lowercases(folder: Path) -> bool:
    """Returns whether lower case is a step of the ``tokenizer.json`` of a folder.

    For SigLIP, `transformers` 5 writes it there, where earlier versions did it in code.
    """
    path = folder / TOKENIZER_JSON
    return path.is_file() and '"Lowercase"' in json.dumps(read_json(path, MAX_TOKENIZER_BYTES).get("normalizer"))


def folds_case(model: Path) -> bool:
    """Returns whether texts are lowercased before a ``tokenizer.json`` without such a step.

    So it is for SigLIP 2, whose tokenizer is Gemma's: byte pairs that fall back to bytes.
    """
    model_type = _read_if_present(model.with_name("config.json")).get("model_type")
    if model.name != TOKENIZER_JSON or not model.is_file() or model_type not in _SIGLIP:
        return False
    fields = read_json(model, MAX_TOKENIZER_BYTES).get("model")
    is_gemma = isinstance(fields, dict) and fields.get("type") == "BPE" and bool(fields.get("byte_fallback"))
    return is_gemma and not lowercases(model.parent)


def padding_token(model: Path) -> str | None:
    """Returns the padding token that the folder of a ``tokenizer.json`` or ``vocab.json`` names, or None."""
    return _text_of(_read_if_present(model.with_name("tokenizer_config.json")).get("pad_token"))


def _text_of(token: Any) -> Any:
    """Returns the text of a token, which may be stored with its properties."""
    return token.get("content") if isinstance(token, dict) else token


def read_settings(model: Path) -> Settings:
    """Returns the settings of a SentencePiece model from the other files of its folder.

    Defaults for missing settings are those of SigLIP: lower case, and padding with the end token ``</s>``. Vocabularies
    without ``</s>``, such as SigLIP 2's, are padded with their padding token, and so are T5's, whose case is kept.
    Punctuation is removed if `transformers` would use its `SiglipTokenizer`.
    """
    path = model.with_name("tokenizer_config.json")
    settings = _read_if_present(path)
    try:
        proto = untrusted.parse_sentencepiece(model.read_bytes())
    except (OSError, Malformed) as error:
        raise UserError(f"{model} cannot be read ({error}); give a SentencePiece model") from error
    names = proto.trainer_spec
    is_t5 = _read_if_present(model.with_name("config.json")).get("model_type") in ("t5", "mt5")
    ends = names.eos_piece == "</s>" and not is_t5
    padding = settings.get("pad_token") or (names.eos_piece if ends else names.pad_piece)
    padding = _text_of(padding)
    pieces = [piece.piece for piece in proto.pieces]
    if padding not in pieces:
        raise UserError(f"{path}: pad_token = {padding!r:.100} is not in {model.name}")
    return Settings(
        lowercase=bool(settings.get("do_lower_case", not is_t5)),
        padding_id=pieces.index(padding),
        remove_punctuation=bool(settings.get("remove_punctuation", _is_siglip(settings, model))),
        split_underscores=bool(settings.get("split_underscores", False)),
    )


def _is_siglip(settings: Json, model: Path) -> bool:
    """Returns whether `transformers` would use `SiglipTokenizer`, by the configured class or else by the model type."""
    config = _read_if_present(model.with_name("config.json"))
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    return named == "SiglipTokenizer" if named else config.get("model_type") == "siglip"


def _read_if_present(path: Path) -> Json:
    return read_json(path) if path.is_file() else {}
