"""Tokenizer files that would hang, exhaust the memory or stop a run are one-line errors when they are read."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import sentencepiece_model_pb2

from lit_het.data_pipelines.texts import tokenizer_files
from lit_het.data_pipelines.texts.tensorflow_text import TensorFlowTextTokenizer
from lit_het.data_pipelines.texts.tokenizers import (
    HuggingFaceTokenizer,
    SentencePieceConfig,
    SentencePieceTokenizer,
    train_sentencepiece,
)
from lit_het.errors import UserError
from tests.data_pipelines.conftest import word_pieces
from tests.refusals import assert_refused

CAPTIONS = ["a red bar", "two green squares"]
A_CAPTION = {"Sequence": {"id": "A", "type_id": 0}}


@pytest.fixture(scope="module")
def model() -> bytes:
    return train_sentencepiece(CAPTIONS, vocabulary_size=40)


@pytest.fixture
def fields() -> dict[str, Any]:
    """The content of a tokenizer.json like BERT's."""
    return json.loads(word_pieces(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "red"]).to_str())


def replacing(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(steps: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": steps}


def nested(depth: int) -> dict[str, Any]:
    return sequence([nested(depth - 1)]) if depth else {"type": "Lowercase"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"normalizer": sequence([replacing({"String": "a"}, "a" * 100)] * 6)},
            "1,000,000,000,000 characters from one",
        ),
        ({"normalizer": replacing({"String": ""}, "x" * 1024)}, "1,025 characters from one"),
        # Retries grow so fast with the length that their limit is met before that on seconds on any processor.
        ({"normalizer": replacing({"Regex": "(a|a|a|a)+$c"}, "")}, "retry-limit-in-match over"),
        ({"normalizer": replacing({"Regex": r"(.|..){0,20}\b\B"}, "")}, r"takes .* s for .* characters"),
        ({"normalizer": nested(9)}, "nested more than 8 deep"),
        ({"normalizer": sequence([{"type": "Lowercase"}] * 65)}, "at most 64 are allowed"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAQAAA=="}}, "characters is cut short"),
        ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "chunk size must be non-zero"),
        ({"post_processor": {"type": "TemplateProcessing", "single": [A_CAPTION] * 2, "pair": []}}, "once"),
        ({"post_processor": {"type": "BertProcessing", "sep": ["x", 2**32 - 1], "cls": ["y", 2]}}, "ids of its vocab"),
        ({"model": {"type": "WordLevel", "vocab": {"a": 2**32 - 1}, "unk_token": "a"}}, "the id 4294967295 of 'a'"),
        ({"model": None}, "its model is not an object"),
        ({"added_tokens": {}}, "is not a tokenizer.json"),
        ({"added_tokens": [3]}, "3 is not an object"),
    ],
)
def test_a_tokenizer_json_that_would_stop_a_run_is_a_one_line_error(fields, changes, message, capfd):
    assert_refused(message, HuggingFaceTokenizer, json.dumps(fields | changes).encode(), 8, padding_id=0)
    assert capfd.readouterr().err == ""


def test_deeply_nested_json_and_a_word_limit_that_would_take_too_long_are_refused(fields):
    assert_refused("nested too deeply", HuggingFaceTokenizer, b"[" * 100_000, 8)
    fields["model"]["max_input_chars_per_word"] = 10**9
    assert_refused("at most 1000 are allowed", HuggingFaceTokenizer, json.dumps(fields).encode(), 8)


def test_a_panic_over_a_caption_is_a_one_line_error(fields):
    # Found in captions only that hold this letter.
    fields["normalizer"] = replacing({"Regex": r"(?<=ß)(a|aa)+$c"}, "")
    tokenizer = HuggingFaceTokenizer(json.dumps(fields).encode(), 8)
    assert tokenizer(["a red"]).tolist() == [[2, 4, 5, 3, 0, 0, 0, 0]]
    assert_refused(r"^the tokenizer.json fails \(Onig", tokenizer, ["ß" + "a" * 100])


def test_long_captions_are_truncated_and_lone_surrogates_are_tokenised(fields, model):
    for tokenizer in (HuggingFaceTokenizer(json.dumps(fields).encode(), 8), SentencePieceTokenizer(model, 8)):
        assert tokenizer(["a red \ud800"]).shape == (1, 8)
    assert tokenizer_files.truncate("a" * 10_000) == "a" * tokenizer_files.MAX_CAPTION_CHARACTERS


def changed(model: bytes, change: Any) -> bytes:
    proto: Any = sentencepiece_model_pb2.ModelProto.FromString(model)  # pyright: ignore[reportAttributeAccessIssue]
    change(proto)
    return proto.SerializeToString()


def with_table(table: bytes) -> Any:
    return lambda proto: setattr(proto.normalizer_spec, "precompiled_charsmap", table)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda proto: setattr(proto.pieces[5], "score", float("nan")), "a score that is not finite"),
        (lambda proto: setattr(proto.pieces[5], "piece", "x" * 2000), "at most 1,024 characters"),
        (with_table((1024).to_bytes(4, "little") + bytes(512)), "characters is cut short"),
        (with_table((1024).to_bytes(4, "little") + b"\xff\xff\xff\x7f" * 256 + b"a\0"), "points outside of itself"),
        (with_table((1024).to_bytes(4, "little") + bytes(1024) + b"x" * 2000 + b"\0"), "2,000 characters from one"),
    ],
)
def test_a_sentencepiece_model_that_would_stop_a_run_is_a_one_line_error(model, change, message):
    assert_refused(message, SentencePieceTokenizer, changed(model, change), 8)


def test_word_pieces_beyond_the_limits_are_refused():
    with pytest.raises(UserError, match="not a text of at most 1,024 characters"):
        TensorFlowTextTokenizer(b"[PAD]\n[UNK]\n[CLS]\n[SEP]\n" + b"x" * 2000, 8)


def test_devices_and_files_above_the_limit_are_refused(tmp_path):
    assert_refused("/dev/zero: cannot be read", SentencePieceConfig(Path("/dev/zero")).build)
    (tmp_path / "large.model").touch()
    os.truncate(tmp_path / "large.model", 40_000_001)
    assert_refused(r"large\.model: has more than 40,000,000 bytes", SentencePieceConfig(tmp_path / "large.model").build)
