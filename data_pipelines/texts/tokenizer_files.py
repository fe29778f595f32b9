"""Checks of tokenizer files before a library parses them.

Without each of these limits some file made a library hang, exhaust the memory, or panic. Published tokenizers are far
below all of them.
"""

import base64
import contextlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lit_het import untrusted
from lit_het.errors import UserError
from lit_het.untrusted import Malformed

MAX_FILE_BYTES = 40_000_000
"""The largest accepted file; Gemma's ``tokenizer.json`` has 33 MB."""

MAX_TOKENS = 2**21
"""The largest accepted vocabulary; ids must be below it too."""

MAX_TOKEN_CHARACTERS = 1024
"""The longest accepted token, and the longest text that a step may insert."""

MAX_STEPS = 64
"""How many normalisers, pre-tokenizers, post-processors, or pieces of a template a tokenizer may have, each."""

MAX_NESTING = 8
"""How deep sequences of steps may be nested."""

MAX_GROWTH = 1024
"""How many characters the steps before tokenisation may make from one character."""

MAX_WORD_CHARACTERS = 1000
"""The largest accepted ``max_input_chars_per_word``, whose cube bounds the time of WordPiece; BERT has 100."""

MAX_CAPTION_CHARACTERS = 4096
"""Captions are truncated to this length before they are tokenised."""

_CLIP_START, _CLIP_END = "<|startoftext|>", "<|endoftext|>"
_CLIP_WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"

# The most characters that a step makes from one; NFKD makes 18 from the Arabic letter U+FDFA.
_GROWTH = {"NFC": 3, "NFD": 3, "NFKC": 18, "NFKD": 18, "BertNormalizer": 9, "ByteLevel": 4}


def read(model: Path) -> bytes:
    """Returns the content of a tokenizer's file."""
    try:
        content = untrusted.read_bytes(model, MAX_FILE_BYTES + 1)
    except OSError as error:
        raise UserError(f"{model}: cannot be read ({error.strerror}); check the tokenizer's path") from error
    if len(content) > MAX_FILE_BYTES:
        raise UserError(f"{model}: has more than {MAX_FILE_BYTES:,} bytes; check the tokenizer's path")
    return content


def read_hugging_face(model: Path, *, fold_case: bool = False) -> bytes:
    """Returns a ``tokenizer.json``; of CLIP's ``vocab.json`` and ``merges.txt`` one with the same ids.

    Args:
        model: the file.
        fold_case: whether it begins with lower case.
    """
    content = read(model)
    if model.name != "vocab.json":
        return _with_lower_case(content, model) if fold_case else content
    lines = read(model.with_name("merges.txt")).decode("utf-8", "replace").splitlines()
    try:
        vocabulary = untrusted.parse_json(content, MAX_FILE_BYTES)
        ids = [_as_object(vocabulary).get(token) for token in (_CLIP_START, _CLIP_END)]
    except Malformed as error:
        raise UserError(f"{model}: is not a vocabulary ({error}); give the tokenizer.json of the model") from error
    if None in ids:
        raise UserError(
            f"{model}: has no {_CLIP_START} and {_CLIP_END}, as CLIP's; give the tokenizer.json of the model"
        )
    merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    return json.dumps(_clip(vocabulary, merges, ids)).encode()


def _with_lower_case(content: bytes, model: Path) -> bytes:
    """Returns a ``tokenizer.json`` whose first step is lower case; itself if it has that step."""
    try:
        fields = _as_object(untrusted.parse_json(content, MAX_FILE_BYTES))
        steps = _steps(fields.get("normalizer"), "normalizers")
    except Malformed as error:
        raise UserError(f"{model}: is not a tokenizer.json ({error}); give that of the model") from error
    if any(step.get("type") == "Lowercase" for step in steps):
        return content
    fields["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "Lowercase"}, *steps]}
    # Without spaces, as the size of a file is limited.
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()


def _clip(vocabulary: dict[str, Any], merges: list[list[str]], ids: list[Any]) -> dict[str, Any]:
    """Returns the fields of a ``tokenizer.json`` of CLIP, as `transformers` writes them."""
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    start, end = zip((_CLIP_START, _CLIP_END), ids, strict=True)
    normalizers = [
        {"type": "NFC"},
        {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
        {"type": "Lowercase"},
    ]
    pre_tokenizers = [
        {"type": "Split", "pattern": {"Regex": _CLIP_WORDS}, "behavior": "Removed", "invert": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ]
    return {
        "version": "1.0",
        "added_tokens": [{"id": number, "content": token, **special} for token, number in (start, end)],
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre_tokenizers},
        "post_processor": {
            "type": "RobertaProcessing",
            "sep": end,
            "cls": start,
            "trim_offsets": False,
            "add_prefix_space": False,
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "unk_token": _CLIP_END,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "</w>",
            "vocab": vocabulary,
            "merges": merges,
        },
    }


def truncate(caption: str) -> str:
    """Returns the first `MAX_CAPTION_CHARACTERS` of a caption, lone surrogates replaced by question marks."""
    # Tokenizers keep a few dozen tokens; the time of some of them grows faster than the length of the text.
    return caption[:MAX_CAPTION_CHARACTERS].encode("utf-8", "replace").decode()


def check_hugging_face(content: bytes) -> None:
    """Checks a ``tokenizer.json`` against the limits above.

    Raises:
        Malformed: it exceeds one of them, or is not a tokenizer.
    """
    fields = untrusted.parse_json(content, MAX_FILE_BYTES)
    if not isinstance(fields, dict):
        raise Malformed("not a JSON object")
    before = _steps(fields.get("normalizer"), "normalizers") + _steps(fields.get("pre_tokenizer"), "pretokenizers")
    # Steps follow one another, so their factors multiply.
    if (growth := math.prod(_growth(step) for step in before)) > MAX_GROWTH:
        raise Malformed(f"its steps may make {growth:,} characters from one, at most {MAX_GROWTH:,} are allowed")
    _steps(fields.get("decoder"), "decoders")
    for step in _steps(fields.get("post_processor"), "processors"):
        if step.get("type") == "TemplateProcessing":
            _check_template(step)
    _check_model(_object(fields, "model"))
    added = _list(fields.get("added_tokens") or [], "added_tokens", MAX_TOKENS)
    _check_tokens((token.get("content"), token.get("id")) for token in map(_as_object, added))


def check_sentencepiece(content: bytes) -> None:
    """Checks a SentencePiece model against the limits above.

    Raises:
        Malformed: it exceeds one of them, or is not a model.
    """
    model = untrusted.parse_sentencepiece(content)
    _list(model.pieces, "pieces", MAX_TOKENS)
    _check_tokens((piece.piece, number) for number, piece in enumerate(model.pieces))
    # SentencePiece compares sums of scores, which NaN and infinity would make meaningless.
    if not all(math.isfinite(piece.score) for piece in model.pieces):
        raise Malformed("a piece has a score that is not finite")
    for spec in (model.normalizer_spec, model.denormalizer_spec):
        if (growth := _longest_replacement(spec.precompiled_charsmap)) > MAX_GROWTH:
            raise Malformed(f"its table makes {growth:,} characters from one, at most {MAX_GROWTH:,} are allowed")


def check_vocabulary(words: list[str]) -> None:
    """Checks a ``vocab.txt`` against the limits above.

    Raises:
        Malformed: it exceeds one of them.
    """
    _list(words, "word pieces", MAX_TOKENS)
    _check_tokens((word, number) for number, word in enumerate(words))


def _steps(section: Any, children: str, depth: int = 0) -> list[dict[str, Any]]:
    """Returns the steps of a section of ``tokenizer.json`` as a flat list, nested sequences expanded."""
    if section is None:
        return []
    section = _as_object(section)
    if section.get("type") != "Sequence":
        return [section]
    if depth == MAX_NESTING:
        raise Malformed(f"its {children} are nested more than {MAX_NESTING} deep")
    found = []
    for child in _list(section.get(children), children, MAX_STEPS):
        found += _steps(child, children, depth + 1)
        # Again after each child: nested sequences could multiply.
        _list(found, children, MAX_STEPS)
    return found


def _growth(step: dict[str, Any]) -> int:
    """Returns how many characters a step may make from one."""
    kind = step.get("type")
    if kind == "Replace":
        pattern, content = _object(step, "pattern"), _text(step.get("content"))
        literal = _text(pattern.get("String", ""))
        # A regular expression may match nothing, before every character.
        return max(1, math.ceil(len(content) / len(literal))) if literal else 1 + len(content)
    if kind == "Prepend":
        _text(step.get("prepend"))
    if kind == "Precompiled":
        return _longest_replacement(step.get("precompiled_charsmap"))
    return _GROWTH.get(str(kind), 1)


def _longest_replacement(table: Any) -> int:
    """Returns how many characters SentencePiece's normalisation table makes from one.

    The table is the trie's size in 4 bytes, the trie, and the replacement texts.

    Raises:
        Malformed: it is not such a table, or the trie points outside of itself or of the texts.
    """
    # In a tokenizer.json the table is base 64 or a list of numbers.
    if isinstance(table, str | list):
        table = _bytes(table)
    if not isinstance(table, bytes):
        raise Malformed("its table of characters is not bytes")
    if not table:
        return 1
    size = int.from_bytes(table[:4], "little")
    if not size or size % 1024 or not table[4 + size :].endswith(b"\0"):
        raise Malformed("its table of characters is cut short")
    units, texts = np.frombuffer(table[4 : 4 + size], "<u4"), table[4 + size :]
    is_leaf = units >> 31 == 1
    # A darts-clone trie: the largest index that a unit may lead to, over all next bytes. The library does not check it.
    offset = (units >> 10) << ((units & (1 << 9)) >> 6)
    reached = (np.arange(len(units), dtype=np.uint32) ^ offset) | 255
    if (reached[~is_leaf] >= len(units)).any() or (units[is_leaf] & 0x7FFFFFFF >= len(texts)).any():
        raise Malformed("its table of characters points outside of itself")
    return max(len(text.decode("utf-8", "replace")) for text in texts.split(b"\0")) or 1


def _bytes(table: str | list[Any]) -> bytes:
    try:
        return base64.b64decode(table, validate=True) if isinstance(table, str) else bytes(table)
    except (ValueError, TypeError) as error:
        raise Malformed("its table of characters is damaged") from error


def _check_template(step: dict[str, Any]) -> None:
    """Checks that a template holds the caption once, and no more control tokens than `MAX_STEPS`."""
    single = _list(step.get("single"), "pieces of a template", MAX_STEPS)
    _list(step.get("pair"), "pieces of a template", MAX_STEPS)
    if sum("Sequence" in _as_object(piece) for piece in single) != 1:
        raise Malformed("its template for a caption does not hold that caption once")
    tokens = _object(step, "special_tokens")
    for token in _list(list(tokens.values()), "special_tokens of its template", MAX_STEPS):
        _list(_as_object(token).get("ids"), "ids of a token of its template", MAX_STEPS)


def _check_model(model: dict[str, Any]) -> None:
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        _list(list(vocabulary), "tokens", MAX_TOKENS)
        _check_tokens(vocabulary.items())
    else:
        pairs = _list(vocabulary, "tokens", MAX_TOKENS)
        _check_tokens((pair[0] if isinstance(pair, list) and pair else None, n) for n, pair in enumerate(pairs))
    _list(model.get("merges") or [], "merges", MAX_TOKENS)
    for name in ("continuing_subword_prefix", "end_of_word_suffix", "unk_token"):
        _text(model.get(name) or "")
    characters = model.get("max_input_chars_per_word", 0)
    if type(characters) is not int or not 0 <= characters <= MAX_WORD_CHARACTERS:
        raise Malformed(f"max_input_chars_per_word is {characters!r:.100}, at most {MAX_WORD_CHARACTERS} are allowed")


def _check_tokens(tokens: Iterable[tuple[Any, Any]]) -> None:
    for text, number in tokens:
        _text(text)
        if type(number) is not int or not 0 <= number < MAX_TOKENS:
            raise Malformed(f"the id {number!r:.100} of {text!r:.50} is not in 0 ... {MAX_TOKENS - 1:,}")


def _list(value: Any, name: str, most: int) -> Any:
    """Returns a list, or a repeated field of a protobuf, of at most ``most`` items."""
    if isinstance(value, dict | str) or not hasattr(value, "__len__"):
        raise Malformed(f"its {name} are not a list")
    if len(value) > most:
        raise Malformed(f"it has {len(value):,} {name}, at most {most:,} are allowed")
    return value


def _object(fields: dict[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(fields.get(name), dict):
        raise Malformed(f"its {name} is not an object")
    return fields[name]


def _as_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Malformed(f"{value!r:.50} is not an object")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > MAX_TOKEN_CHARACTERS:
        raise Malformed(f"{value!r:.50} is not a text of at most {MAX_TOKEN_CHARACTERS:,} characters")
    return value


@contextlib.contextmanager
def silenced_stderr() -> Iterator[None]:
    """Silences libraries that print before their log level can be set, or that have no log level."""
    saved = os.dup(2)
    try:
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
