"""The tests of test_tensorflow_text.py that need TensorFlow Text itself."""

import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_het.data_pipelines.texts.tensorflow_text import TensorFlowTextTokenizer, load_tensorflow
from lit_het.data_pipelines.texts.tokenizers import SentencePieceTokenizer, Tokenizer
from lit_het.data_pipelines.texts.tokenizers_config import TensorFlowTextConfig
from tests.data_pipelines.test_tensorflow_text import (
    CAPTIONS,
    END,
    FIRST,
    GOLDEN,
    LONG,
    RECORDED,
    UNKNOWN,
    VOCABULARY,
    folded,
    hugging_face,
)

if importlib.util.find_spec("tensorflow_text") is None:
    pytest.skip("without TensorFlow Text", allow_module_level=True)

pytestmark = pytest.mark.slow


# Before all others, which find it imported. Python shows no more kinds of warnings than these.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
@pytest.mark.filterwarnings("ignore::ImportWarning", "ignore::ResourceWarning")
def test_tensorflow_prints_nothing_and_uses_no_accelerator(capfd: pytest.CaptureFixture[str]):
    assert "tensorflow" not in sys.modules
    TensorFlowTextConfig(GOLDEN / "vocab.txt").build()(["a"])
    tensorflow, _ = load_tensorflow()
    assert tensorflow.config.get_visible_devices("GPU") == []
    assert capfd.readouterr() == ("", "")


@pytest.fixture(scope="module")
def bert() -> TensorFlowTextTokenizer:
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
    model = (GOLDEN / "pieces.model").read_bytes()
    _, tensorflow_text = load_tensorflow()
    theirs = tensorflow_text.SentencepieceTokenizer(model, add_eos=True).tokenize([caption.lower()]).to_list()[0]
    ours = SentencePieceTokenizer(model, 400)([caption])[0].tolist()
    assert ours[: len(theirs)] == theirs


def test_threads_share_a_tokenizer(bert: TensorFlowTextTokenizer):
    expected = bert(CAPTIONS)
    with ThreadPoolExecutor(4) as pool:
        for ids in pool.map(bert, [CAPTIONS] * 40):
            np.testing.assert_array_equal(ids, expected)
