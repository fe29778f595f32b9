"""Tokenizers of transformers that no faster reader knows: equal ids, kept whole in a run, refused in one line."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, ByT5Tokenizer

from lit_het.data_pipelines.texts import auto_tokenizer
from lit_het.data_pipelines.texts.tokenizers import Tokenizer
from lit_het.data_pipelines.texts.tokenizers_config import HuggingFaceTokenizerConfig, TransformersTokenizerConfig
from lit_het.errors import UserError
from lit_het.weights.importing import _tokenizer_path, tokenizer_config

CAPTIONS = ["a photo of a cat.", "", "Ein Hündchen, 2 Kätzchen – 猫", "long " * 50]
CHARACTERS = [*"abcdefghijklmnopqrstuvwxyz", "Ġ", ".", ",", "th", "the", "Ġthe"]


def saved_byt5(folder):
    ByT5Tokenizer().save_pretrained(folder)
    return folder


def saved_roberta(folder):
    """Byte pairs in two files, which our reader takes for CLIP's."""
    tokens = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *CHARACTERS]
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\nt h\nth e\nĠ the\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "RobertaTokenizer"}')
    return folder


def saved_bert(folder):
    """Word pieces without a tokenizer.json."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "photo", "of", "cat", "##s", ".", "the"]
    (folder / "vocab.txt").write_text("\n".join(words))
    (folder / "config.json").write_text('{"model_type": "bert"}')
    return folder


@pytest.mark.parametrize("save", [saved_byt5, saved_roberta, saved_bert])
def test_ids_are_those_of_transformers_also_from_the_file_that_a_run_keeps(tmp_path, save):
    folder = save(tmp_path)
    config = tokenizer_config(_tokenizer_path(str(folder)), 24)
    assert config == TransformersTokenizerConfig(folder, 24)
    tokenizer = config.build()
    assert isinstance(tokenizer, Tokenizer)
    theirs = AutoTokenizer.from_pretrained(folder)
    expected = theirs(CAPTIONS, padding="max_length", truncation=True, max_length=24, padding_side="right")["input_ids"]
    found = tokenizer(CAPTIONS)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, expected)
    assert found.max() < tokenizer.vocabulary_size
    kept = tmp_path / "tokenizer.model"
    kept.write_bytes(tokenizer.model_bytes)
    again = TransformersTokenizerConfig(kept, 24).build()
    np.testing.assert_array_equal(again(CAPTIONS), expected)
    assert again.model_bytes == tokenizer.model_bytes


def test_a_folder_with_a_file_that_is_read_faster_is_read_so(tmp_path):
    saved_bert(tmp_path)
    AutoTokenizer.from_pretrained(tmp_path).save_pretrained(tmp_path / "fast")
    config = tokenizer_config(_tokenizer_path(str(tmp_path / "fast")), 8)
    assert isinstance(config, HuggingFaceTokenizerConfig)
    assert config.model.name == "tokenizer.json"


def test_threads_share_a_tokenizer(tmp_path):
    tokenizer = TransformersTokenizerConfig(saved_bert(tmp_path), 8).build()
    expected, found = tokenizer(CAPTIONS), []
    threads = [threading.Thread(target=lambda: found.extend(tokenizer(CAPTIONS) for _ in range(20))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 80
    assert all(np.array_equal(ids, expected) for ids in found)


def test_it_is_said_once_that_it_is_slower(tmp_path, capsys):
    auto_tokenizer._say_once.cache_clear()
    config = TransformersTokenizerConfig(saved_bert(tmp_path), 8)
    config.build()
    config.build()
    assert capsys.readouterr().err.count("slower than tokenizer.json") == 1


def of_repository_code(folder):
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", null]}}'
    )
    (folder / "mine.py").write_text("raise SystemExit('the code of a repository ran')")


def of_no_kind(folder):
    (folder / "tokenizer_config.json").write_text("{}")


@pytest.mark.parametrize("write", [of_repository_code, of_no_kind])
def test_code_of_a_repository_is_not_run_and_unknown_kinds_are_one_line(tmp_path, write):
    write(tmp_path)
    with pytest.raises(UserError, match="transformers cannot read this tokenizer") as error:
        TransformersTokenizerConfig(tmp_path, 8).build()
    assert str(error.value).startswith(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"not json", "is no tokenizer that lit-het stored"),
        (b'{"../../evil.txt": ""}', "is no tokenizer that lit-het stored"),
        (b'{"vocab.txt": "?"}', "is no tokenizer that lit-het stored"),
        (b"[]", "is no tokenizer that lit-het stored"),
    ],
)
def test_a_kept_file_that_is_none_is_one_line(tmp_path, content, line):
    (path := tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(UserError, match=line):
        TransformersTokenizerConfig(path, 8).build()


def test_wrong_paths_lengths_and_paddings_are_one_line(tmp_path):
    with pytest.raises(UserError, match="holds no tokenizer of transformers"):
        TransformersTokenizerConfig(tmp_path, 8).build()
    with pytest.raises(UserError, match="cannot be read"):
        TransformersTokenizerConfig(Path("nowhere"), 8).build()
    saved_bert(tmp_path)
    with pytest.raises(UserError, match="2 tokens are too few for 2 control tokens"):
        TransformersTokenizerConfig(tmp_path, 2).build()
    with pytest.raises(UserError, match="padding id 99 is not in the vocabulary"):
        TransformersTokenizerConfig(tmp_path, 8, padding_id=99).build()
