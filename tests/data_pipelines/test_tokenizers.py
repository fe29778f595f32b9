import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tokenizers import normalizers

from lit_het.data_pipelines.texts.tokenizers import (
    HuggingFaceTokenizer,
    HuggingFaceTokenizerConfig,
    SentencePieceConfig,
    SentencePieceTokenizer,
    Tokenizer,
    train_sentencepiece,
)
from lit_het.weights.huggingface.tokenizer import tokenizer_files
from tests.data_pipelines.conftest import word_pieces
from tests.refusals import assert_refused

CAPTIONS = [f"latin {size} letter {letter}" for size in ("small", "capital") for letter in "abcdefghij"]
END = 1


@pytest.fixture(scope="module")
def model() -> bytes:
    return train_sentencepiece(CAPTIONS, vocabulary_size=40)


def test_captions_survive_the_round_trip(model: bytes):
    tokenizer = SentencePieceTokenizer(model, 40)
    ids = tokenizer(CAPTIONS)
    assert ids.dtype == np.int32
    assert ids.shape == (len(CAPTIONS), 40)
    assert ids.max() < tokenizer.vocabulary_size <= 40
    assert tokenizer.decode(ids) == CAPTIONS


def test_the_end_token_precedes_the_padding_and_survives_truncation(model: bytes):
    full = SentencePieceTokenizer(model, 40)(CAPTIONS[:1])[0]
    end = full.tolist().index(END)
    assert (full[end + 1 :] == 0).all()
    cut = SentencePieceTokenizer(model, 3)(CAPTIONS[:1])[0]
    assert cut.tolist() == [*full[:2], END]
    assert end > 3
    assert SentencePieceTokenizer(model, 1)(["anything"]).tolist() == [[END]]


def test_an_empty_caption_is_an_end_token_and_padding(model: bytes):
    assert SentencePieceTokenizer(model, 4)([""]).tolist() == [[END, 0, 0, 0]]
    assert SentencePieceTokenizer(model, 4, padding_id=END)([""]).tolist() == [[END] * 4]


def test_captions_are_lowercased_on_request(model: bytes):
    shout, tokenizer = [CAPTIONS[0].upper()], SentencePieceTokenizer(model, 40)
    np.testing.assert_array_equal(tokenizer(shout), tokenizer(CAPTIONS[:1]))
    assert 2 in SentencePieceTokenizer(model, 40, lowercase=False)(shout)


def test_underscores_become_spaces_on_request_and_are_dropped_with_other_punctuation_otherwise(model: bytes):
    plain = SentencePieceTokenizer(model, 40)
    siglip = SentencePieceTokenizer(model, 40, remove_punctuation=True)
    open_clip = SentencePieceTokenizer(model, 40, remove_punctuation=True, split_underscores=True)
    # open_clip's `canonicalize_text` and transformers' `SiglipTokenizer` of these texts.
    for text, canonical, joined in (
        ("Latin_Small letter_a", "latin small letter a", "latinsmall lettera"),
        ("letter, a_-_b", "letter a b", "letter ab"),
    ):
        np.testing.assert_array_equal(open_clip([text]), plain([canonical]))
        np.testing.assert_array_equal(siglip([text]), plain([joined]))


@pytest.mark.parametrize("model_type", ["unigram", "bpe", "word"])
def test_training_twice_gives_the_same_bytes_and_no_output(model_type, capfd: pytest.CaptureFixture[str]):
    one, other = (train_sentencepiece(CAPTIONS, vocabulary_size=40, model_type=model_type) for _ in range(2))
    assert one == other
    assert capfd.readouterr() == ("", "")


def test_a_vocabulary_of_words_keeps_words_whole():
    tokenizer = SentencePieceTokenizer(train_sentencepiece(CAPTIONS, vocabulary_size=40, model_type="word"), 8)
    assert (tokenizer(["latin small letter a"])[0] == END).argmax() == 4


def test_a_config_builds_from_a_file_and_the_bytes_rebuild_it(tmp_path: Path, model: bytes):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(model)
    tokenizer = SentencePieceConfig(path, length=6).build()
    assert tokenizer.model_bytes == model
    np.testing.assert_array_equal(SentencePieceTokenizer(tokenizer.model_bytes, 6)(CAPTIONS), tokenizer(CAPTIONS))


def test_a_missing_or_invalid_model_names_the_file(tmp_path: Path):
    path = tmp_path / "tokenizer.model"
    assert_refused(r"tokenizer\.model: cannot be read", SentencePieceConfig(path).build)
    for content in (b"", b"not a model"):
        path.write_bytes(content)
        assert_refused(r"tokenizer\.model: is not a SentencePiece model", SentencePieceConfig(path).build)


def test_invalid_lengths_padding_and_sizes_of_vocabularies_are_refused(model: bytes):
    message = r"a vocabulary of 5 pieces cannot be trained .*change its size"
    assert_refused(message, train_sentencepiece, CAPTIONS, vocabulary_size=5)
    assert_refused("too short for the end token", SentencePieceTokenizer, model, 0)
    assert_refused("padding id 999 is not in the vocabulary", SentencePieceTokenizer, model, 4, padding_id=999)


def test_threads_share_a_tokenizer(model: bytes):
    tokenizer = SentencePieceTokenizer(model, 40)
    expected = tokenizer(CAPTIONS)
    with ThreadPoolExecutor(4) as pool:
        for ids in pool.map(tokenizer, [CAPTIONS] * 40):
            np.testing.assert_array_equal(ids, expected)


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "red", "green", "##ish", "bar", "square"]
OF_WORDS = ["A GREENISH bar", "red", "a blue square a a a a a", ""]


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A tokenizer.json like BERT's."""
    word_pieces(WORDS, normalizers.BertNormalizer(lowercase=True)).save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_word_pieces_are_truncated_and_padded_between_their_control_tokens(bert: Path):
    tokenizer = HuggingFaceTokenizerConfig(bert, length=6).build()
    assert isinstance(tokenizer, Tokenizer)
    assert tokenizer.vocabulary_size == 10
    ids = tokenizer(OF_WORDS)
    assert ids.dtype == np.int32
    assert ids.tolist() == [[2, 4, 6, 7, 8, 3], [2, 5, 3, 0, 0, 0], [2, 4, 1, 9, 4, 3], [2, 3, 0, 0, 0, 0]]
    short = HuggingFaceTokenizer(tokenizer.model_bytes, 3, padding_id=1)
    assert short(["red bar", ""]).tolist() == [[2, 5, 3], [2, 3, 1]]
    assert tokenizer([]).shape == (0, 6)


@pytest.mark.slow
def test_transformers_gives_the_same_ids(bert: Path):
    import transformers

    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(bert), pad_token="[PAD]")
    expected = theirs(OF_WORDS, padding="max_length", truncation=True, max_length=6)["input_ids"]
    assert HuggingFaceTokenizerConfig(bert, length=6).build()(OF_WORDS).tolist() == expected


def test_sentence_piece_and_the_tokenizer_json_made_of_it_give_the_same_ids():
    captions = ["a red bar", "two green squares, side by side", "A Grey bar!", "", "  spaces   between  "]
    ours = SentencePieceTokenizer(train_sentencepiece(captions, vocabulary_size=60), 12)
    content = json.dumps(tokenizer_files(ours)["tokenizer.json"]).encode()
    theirs = HuggingFaceTokenizer(content, 12)
    assert theirs.padding_id == ours.padding_id
    np.testing.assert_array_equal(theirs(captions), ours(captions))


def test_invalid_files_and_lengths_and_a_tokenizer_without_padding_are_refused(bert: Path):
    message = "2 tokens are too few for 2 control tokens and a caption"
    assert_refused(message, HuggingFaceTokenizerConfig(bert, 2).build)
    assert_refused("padding id 77 is not in the vocabulary", HuggingFaceTokenizerConfig(bert, 6, padding_id=77).build)
    bert.write_text(bert.read_text().replace("[PAD]", "[FILL]"))
    assert_refused("has no padding token; set padding_id", HuggingFaceTokenizerConfig(bert, 6).build)
    bert.write_bytes(b"hello")
    assert_refused(r"tokenizer\.json: is not a tokenizer.json", HuggingFaceTokenizerConfig(bert, 6).build)
