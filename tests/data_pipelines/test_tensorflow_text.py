"""BERT's word pieces by TensorFlow Text: against recorded ids, and live if it is installed."""

import dataclasses
import json
import subprocess
import sys
import unicodedata
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, processors

from lit_het.configs import experiment
from lit_het.configs.lit_e3_b32_het_xl import get_config
from lit_het.data_pipelines.tensorflow_text import TensorFlowTextConfig, TensorFlowTextTokenizer, load_tensorflow
from lit_het.data_pipelines.tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from lit_het.errors import UserError

GOLDEN = Path(__file__).parents[1] / "golden" / "tensorflow_text"
VOCABULARY = (GOLDEN / "vocab.txt").read_bytes()
RECORDED = json.loads((GOLDEN / "ids.json").read_text())
CAPTIONS = RECORDED["captions"]
PLAIN = CAPTIONS[:11]  # what follows is normalised otherwise than by Hugging Face
LONG = 1000
PADDING, UNKNOWN, FIRST, END = range(4)


def hugging_face(lowercase: bool, length: int = LONG) -> HuggingFaceTokenizer:
    """Returns a BERT of the same vocabulary."""
    words = VOCABULARY.decode().split("\n")[:-1]
    pieces = models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(pieces)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", FIRST), ("[SEP]", END)]
    )
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
    with pytest.raises(UserError, match=rf"vocab\.txt: .*{message}"):
        TensorFlowTextConfig(tmp_path / "vocab.txt", **options).build()


@pytest.fixture(scope="module")
def bert() -> TensorFlowTextTokenizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("tensorflow_text")
    return TensorFlowTextTokenizer(VOCABULARY, LONG)


def test_tensorflow_text_gives_the_recorded_ids(bert: TensorFlowTextTokenizer):
    assert bert.word_pieces(CAPTIONS) == RECORDED["bert"]
    assert TensorFlowTextTokenizer(VOCABULARY, LONG, lowercase=False).word_pieces(CAPTIONS) == RECORDED["bert_cased"]


def test_captions_are_truncated_and_padded_between_their_control_tokens(bert: TensorFlowTextTokenizer):
    tokenizer = TensorFlowTextConfig(GOLDEN / "vocab.txt", length=5).build()
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.model_bytes == VOCABULARY
    captions = ["the cat", "", "the photo of the cat", "a photo"]
    np.testing.assert_array_equal(tokenizer(captions), hugging_face(lowercase=True, length=5)(captions))
    the, photo, of, cat = (bert.word_pieces([word])[0][0] for word in ("the", "photo", "of", "cat"))
    assert tokenizer(captions)[2].tolist() == [FIRST, the, photo, of, END]
    lit = TensorFlowTextConfig(GOLDEN / "vocab.txt", length=4, end_token=False, padding_id=UNKNOWN).build()
    assert lit(["the photo of the cat", "cat"]).tolist() == [
        [FIRST, the, photo, of],
        [FIRST, cat, UNKNOWN, UNKNOWN],
    ]
    assert tokenizer([]).shape == (0, 5)


LETTERS = st.characters(max_codepoint=0x5FF, exclude_categories=("Cs", "Cn", "Cf"))
HARD = st.sampled_from("中文日本語アあ가한ไทย👍😀…™ﬁ½²’“”—€ſßς ")


@settings(max_examples=300, deadline=None)
@given(st.text(LETTERS | HARD, max_size=20))
def test_any_folded_caption_has_hugging_faces_ids(bert: TensorFlowTextTokenizer, caption: str):
    np.testing.assert_array_equal(bert([caption]), hugging_face(lowercase=True)([folded(caption, True)]))


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30))
def test_sentence_piece_of_tensorflow_text_gives_our_ids(bert: TensorFlowTextTokenizer, caption: str):
    import tensorflow_text  # pyright: ignore[reportMissingImports]

    model = (GOLDEN / "pieces.model").read_bytes()
    theirs = tensorflow_text.SentencepieceTokenizer(model, add_eos=True).tokenize([caption.lower()]).to_list()[0]
    ours = SentencePieceTokenizer(model, 400)([caption])[0].tolist()
    assert ours[: len(theirs)] == theirs


def test_threads_share_a_tokenizer(bert: TensorFlowTextTokenizer):
    expected = bert(CAPTIONS)
    with ThreadPoolExecutor(4) as pool:
        for ids in pool.map(bert, [CAPTIONS] * 40):
            np.testing.assert_array_equal(ids, expected)


def test_tensorflow_prints_nothing_and_uses_no_accelerator(bert: TensorFlowTextTokenizer):
    command = (
        "from pathlib import Path; from lit_het.data_pipelines.tokenizers import TensorFlowTextConfig;"
        f"TensorFlowTextConfig(Path({str(GOLDEN / 'vocab.txt')!r})).build()(['a']);"
        "import tensorflow; print(tensorflow.config.get_visible_devices('GPU'))"
    )
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
