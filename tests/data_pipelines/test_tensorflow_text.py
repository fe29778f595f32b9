"""BERT's word pieces by TensorFlow Text against recorded ids; test_tensorflow_text_live.py calls it itself."""

import dataclasses
import functools
import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from tokenizers import normalizers

from lit_het.configs import experiment
from lit_het.configs.lit_e3_b32_het_xl import get_config
from lit_het.data_pipelines.texts.tensorflow_text import load_tensorflow
from lit_het.data_pipelines.texts.tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer
from lit_het.data_pipelines.texts.tokenizers_config import TensorFlowTextConfig
from lit_het.errors import UserError
from tests.data_pipelines.conftest import word_pieces
from tests.refusals import assert_refused

GOLDEN = Path(__file__).parents[1] / "golden" / "tensorflow_text"
VOCABULARY = (GOLDEN / "vocab.txt").read_bytes()
RECORDED = json.loads((GOLDEN / "ids.json").read_text())
CAPTIONS = RECORDED["captions"]
PLAIN = CAPTIONS[:11]  # what follows is normalised otherwise than by Hugging Face
LONG = 1000
PADDING, UNKNOWN, FIRST, END = range(4)


@functools.cache
def hugging_face(lowercase: bool, length: int = LONG) -> HuggingFaceTokenizer:
    """Returns a BERT of the same vocabulary."""
    tokenizer = word_pieces(VOCABULARY.decode().split("\n")[:-1], normalizers.BertNormalizer(lowercase=lowercase))
    return HuggingFaceTokenizer(tokenizer.to_str().encode(), length)


def without_control(rows, control=(FIRST, END, PADDING)):
    return [[number for number in row if number not in control] for row in rows.tolist()]


def folded(caption: str, lowercase: bool) -> str:
    """Applies the normalisation of TensorFlow Text; Hugging Face applies the remaining rules."""
    if lowercase:
        # Unicode compatibility case folding (NFKC_Casefold).
        caption = unicodedata.normalize("NFKC", unicodedata.normalize("NFD", caption).casefold())
        caption = unicodedata.normalize("NFKC", caption.casefold())
        ignorable = "\u00ad\u200b\u200d\ufe0f"
        return "".join(" " if unicodedata.category(c) == "Cc" else c for c in caption if c not in ignorable)
    return "".join(" " if unicodedata.category(c) in ("Cc", "Cf") else c for c in caption)


@pytest.mark.parametrize(("recorded", "lowercase"), [("bert", True), ("bert_cased", False)])
def test_hugging_face_gives_the_recorded_word_pieces_of_plain_captions(recorded, lowercase):
    assert without_control(hugging_face(lowercase)(PLAIN)) == RECORDED[recorded][: len(PLAIN)]


@pytest.mark.parametrize(("recorded", "lowercase"), [("bert", True), ("bert_cased", False)])
def test_other_captions_differ_by_case_folding_control_characters_and_the_length_of_words(recorded, lowercase):
    ids = without_control(hugging_face(lowercase)([folded(caption, lowercase) for caption in CAPTIONS]))
    differing = [c for c, ours, theirs in zip(CAPTIONS, ids, RECORDED[recorded], strict=True) if ours != theirs]
    # 60 letters of two bytes are longer than 100 bytes; Hugging Face drops U+FFFD and private-use code points;
    # without case folding a no-break space is not a space.
    expected = {"\ufffd bad \ue000 private"}
    expected |= set() if lowercase else {"é" * 60, "\u00a0no\u00a0break wide\u3000space"}
    assert set(differing) == expected


def test_sentence_piece_gives_the_recorded_pieces():
    tokenizer = SentencePieceTokenizer((GOLDEN / "pieces.model").read_bytes(), LONG, lowercase=False)
    ids = tokenizer(CAPTIONS)
    assert [row[: row.index(1)] for row in ids.tolist()] == RECORDED["sentencepiece"]


def test_without_tensorflow_text_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    load_tensorflow.cache_clear()
    with pytest.raises(UserError, match=r"vocab\.txt: needs TensorFlow Text .*pip install 'lit-het\[tf-text\]'"):
        TensorFlowTextConfig(GOLDEN / "vocab.txt").build()


def test_a_runs_json_holds_the_configuration(tmp_path):
    config = dataclasses.replace(get_config(), tokenizer=TensorFlowTextConfig(Path("vocab.txt"), 12, end_token=False))
    experiment.save(config, tmp_path / "config.json")
    assert experiment.load(tmp_path / "config.json") == config


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (b"\xff\xfe", {}, "is not a vocabulary"),
        (b"[UNK]\n[CLS]\n[SEP]\na\n", {}, r"has no \[PAD\]; use the vocab.txt"),
        (b"[UNK]\n[SEP]\n[PAD]\n", {}, r"has no \[CLS\]"),
        (VOCABULARY + b"the\n", {}, "holds a word piece twice"),
        (VOCABULARY, {"length": 2}, "2 tokens are too few for 2 control tokens and a caption"),
        (VOCABULARY, {"padding_id": 999}, "padding id 999 is not in the vocabulary"),
    ],
)
def test_invalid_files_and_lengths_are_refused(tmp_path, content, options, message):
    (tmp_path / "vocab.txt").write_bytes(content)
    assert_refused(rf"vocab\.txt: .*{message}", TensorFlowTextConfig(tmp_path / "vocab.txt", **options).build)


@pytest.mark.slow
def test_its_tests_pass_where_tensorflow_text_is_installed():
    folder = os.environ.get("LIT_HET_TF_TEXT_VENV")
    if not folder:
        pytest.skip("LIT_HET_TF_TEXT_VENV names no environment with TensorFlow Text; scripts/test.sh --all makes one")
    tests = "tests/data_pipelines/test_tensorflow_text_live.py"
    # Without -q: with that of pyproject.toml it would leave out the summary.
    command = [f"{folder}/bin/python", "-m", "pytest", "-p", "no:cacheprovider", tests]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = done.stdout.splitlines()[-1]
    assert "passed" in summary
    assert "skipped" not in summary
    assert "failed" not in summary
