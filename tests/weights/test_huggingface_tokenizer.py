"""SigLIP's tokenizer removes punctuation: imports follow `transformers`, and exports record the setting."""

import io
import json
import shutil
import sys

import numpy as np
import pytest
import sentencepiece
import transformers
from tokenizers import Tokenizer

from lit_het import untrusted
from lit_het.data_pipelines.texts.tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer, train_sentencepiece
from lit_het.errors import UserError
from lit_het.weights.huggingface.tokenizer import read_settings, tokenizer_files
from lit_het.weights.importing import tokenizer_config
from tests.golden.record_siglip_tokenizer import FOLDER, LENGTH, TEXTS, TRAINING

WHITE_SPACE = [chr(code) for code in range(sys.maxunicode) if chr(code).isspace()]
HARD = [*TEXTS, *(f"a{blank}{blank}cat,{blank}.{blank}owl{blank}" for blank in WHITE_SPACE)]


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(FOLDER, tmp_path / "folder")


def imported(folder):
    tokenizer = tokenizer_config(folder / "spiece.model", LENGTH).build()
    assert isinstance(tokenizer, SentencePieceTokenizer)
    return tokenizer


def test_texts_have_the_ids_that_transformers_recorded():
    texts, ids = zip(*json.loads((FOLDER / "ids.json").read_text("utf-8")), strict=True)
    np.testing.assert_array_equal(imported(FOLDER)(list(texts)), ids)


def test_texts_have_the_ids_of_transformers_with_another_vocabulary_and_case(folder):
    for lower in (True, False):
        (folder / "spiece.model").write_bytes(train_sentencepiece([*TRAINING, *TEXTS], vocabulary_size=110))
        theirs = transformers.SiglipTokenizer(
            str(folder / "spiece.model"), model_max_length=LENGTH, do_lower_case=lower, pad_token="<pad>"
        )
        theirs.save_pretrained(folder)
        ours = imported(folder)
        assert (ours.lowercase, ours.padding_id) == (lower, 0)
        np.testing.assert_array_equal(ours(HARD), theirs(HARD, padding="max_length", truncation=True)["input_ids"])


@pytest.mark.parametrize("split_underscores", [False, True])
def test_an_exported_folder_has_the_same_settings_and_ids(folder, tmp_path, split_underscores):
    edited = json.loads((folder / "tokenizer_config.json").read_text()) | {"split_underscores": split_underscores}
    (folder / "tokenizer_config.json").write_text(json.dumps(edited))
    ours = imported(folder)
    assert ours.split_underscores == split_underscores
    files = tokenizer_files(ours)
    exported = HuggingFaceTokenizer(json.dumps(files["tokenizer.json"]).encode(), LENGTH)
    np.testing.assert_array_equal(exported(HARD), ours(HARD))
    (tmp_path / "spiece.model").write_bytes(ours.model_bytes)
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    # The exported setting takes precedence over the default of a SigLIP model.
    (tmp_path / "config.json").write_text('{"model_type": "siglip"}')
    assert read_settings(tmp_path / "spiece.model") == read_settings(folder / "spiece.model")


def test_bytes_of_characters_outside_the_vocabulary_become_text_again():
    model = io.BytesIO()
    spec = {"byte_fallback": True, "vocab_size": 400, "hard_vocab_limit": False, "minloglevel": 2}
    texts = iter([*TRAINING, *TEXTS] * 2)
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=texts, model_writer=model, pad_id=0, unk_id=3, **spec)
    ours = SentencePieceTokenizer(model.getvalue(), 32)
    made = Tokenizer.from_str(json.dumps(tokenizer_files(ours)["tokenizer.json"]))
    for text in ("a cät", "日本 and a cat"):
        ids = ours.pieces(text)
        assert made.decode(ids) == ours.decode(np.asarray([ids], np.int32))[0] == text


SPEC = {"vocab_size": 150, "hard_vocab_limit": False, "minloglevel": 2, "pad_id": 0, "eos_id": 1, "unk_id": 2}


def trained(**changes):
    model = io.BytesIO()
    texts = iter([*TRAINING, *TEXTS] * 4)
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=texts, model_writer=model, bos_id=-1, **(SPEC | changes))
    return SentencePieceTokenizer(model.getvalue(), 32, padding_id=0)


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"add_dummy_prefix": False},
        {"remove_extra_whitespaces": False},
        {"split_by_whitespace": False, "vocab_size": 300},
        {"normalization_rule_name": "identity", "byte_fallback": True, "vocab_size": 450},
    ],
    ids=str,
)
def test_settings_of_spaces_keep_their_ids_in_an_export(kind, changes):
    ours = trained(model_type=kind, **changes)
    made = Tokenizer.from_str(json.dumps(tokenizer_files(ours)["tokenizer.json"]))
    for text in [*TEXTS, " a  cat ", "a\xa0cat\xa0", "", "ΓΑΤΑΣ, ΣΑΣ Σ"]:  # with the two small forms of sigma
        ids = ours([text])[0]
        assert made.encode(text).ids == ids.tolist(), text


def test_words_that_end_with_their_space_are_refused_in_an_export():
    with pytest.raises(UserError, match="treat_whitespace_as_suffix, give transformers the same ids; export with --to"):
        tokenizer_files(trained(treat_whitespace_as_suffix=True))


def test_a_model_that_transformers_would_read_with_other_ids_is_refused(monkeypatch):
    monkeypatch.setattr("lit_het.weights.huggingface.tokenizer._WORD_BOUNDARY", "_")
    with pytest.raises(UserError, match="would give other ids than the SentencePiece model, of '"):
        tokenizer_files(trained())


def test_a_table_of_characters_that_transformers_cannot_read_is_refused():
    model = untrusted.parse_sentencepiece((FOLDER / "spiece.model").read_bytes())
    table = model.normalizer_spec.precompiled_charsmap
    # SentencePiece reads the bytes of its replacements only where they are used.
    model.normalizer_spec.precompiled_charsmap = table[:-2] + b"\xff\0"
    tokenizer = SentencePieceTokenizer(model.SerializeToString(), LENGTH)
    assert tokenizer(["a photo"]).size == LENGTH
    with pytest.raises(UserError, match="precompiled_charsmap: transformers could not read it; export with --to lit-h"):
        tokenizer_files(tokenizer)


@pytest.mark.parametrize(
    ("tokenizer", "model", "drops"),
    [
        ({"tokenizer_class": "SiglipTokenizer"}, {"model_type": "siglip2"}, True),
        ({"tokenizer_class": "GemmaTokenizerFast"}, {"model_type": "siglip2"}, False),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, {"model_type": "siglip"}, False),
        ({}, {"model_type": "siglip"}, True),
        ({}, {"model_type": "siglip", "tokenizer_class": "T5Tokenizer"}, False),
        (None, {"model_type": "siglip"}, True),
        (None, {"model_type": "siglip2"}, False),
        (None, None, False),
    ],
)
def test_punctuation_is_dropped_where_transformers_would_take_its_siglip_tokenizer(folder, tokenizer, model, drops):
    for name, content in (("tokenizer_config.json", tokenizer), ("config.json", model)):
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    assert read_settings(folder / "spiece.model").remove_punctuation is drops


def test_settings_that_are_not_json_give_a_one_line_error(folder):
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"tokenizer_config\.json cannot be read"):
        imported(folder)


def test_only_ascii_punctuation_is_dropped_and_only_when_asked_for():
    model = (FOLDER / "spiece.model").read_bytes()
    plain, bare = SentencePieceTokenizer(model, LENGTH), SentencePieceTokenizer(model, LENGTH, remove_punctuation=True)
    np.testing.assert_array_equal(bare(["a photo, of the cat!"]), plain(["a photo of the cat"]))
    assert (plain(["a photo, of the cat!"]) != plain(["a photo of the cat"])).any()
    np.testing.assert_array_equal(bare(["the cat — a … photo"]), plain(["the cat — a … photo"]))
