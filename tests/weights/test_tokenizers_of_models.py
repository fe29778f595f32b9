"""Tokenizers of multilingual and other text models give the ids of the classes of transformers."""

import io
import json

import numpy as np
import pytest
import sentencepiece
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from lit_het import untrusted
from lit_het.errors import UserError
from lit_het.weights.importing import tokenizer_config

TRAINING = [
    "a photo of the cat",
    "ein Foto der Katze",
    "une photo du chat",
    "фото кота",
    "貓的照片",
    "it's 2 cats_",
] * 4
TEXTS = [
    "a photo of the cat",
    "A  Photo, of THE cat's 12 photos!",
    " ein Foto  der Katze ",
    "une photo\tdu chât\nİ",
    "фото кота и 貓的照片 ﷺ ﬁ",
    "🐈 zz",
    "",
    "the cat the cat the cat the cat the cat the cat the cat the cat",
]
LENGTH = 16

pytestmark = pytest.mark.filterwarnings("ignore")


def trained(**options):
    """Returns a SentencePiece model."""
    model = io.BytesIO()
    options = {"vocab_size": 120, "hard_vocab_limit": False, "minloglevel": 2} | options
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TRAINING), model_writer=model, **options)
    return model.getvalue()


def xlm_r():
    """Returns XLM-R's tokenizer, with the ids of fairseq: four control tokens, then pieces from the third."""
    model = untrusted.parse_sentencepiece(trained())
    control = [(token, 0.0) for token in ("<s>", "<pad>", "</s>", "<unk>")]
    pieces = [*control, *((piece.piece, piece.score) for piece in model.pieces[3:]), ("<mask>", 0.0)]
    table = model.normalizer_spec.precompiled_charsmap
    return transformers.XLMRobertaTokenizer(pieces, _spm_precompiled_charsmap=table)


def byte_pairs(normalizer, splits, tokens, alphabet, **options):
    """Returns vocabulary and merges of byte-pair encoding."""
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splits
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=tokens, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TRAINING, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


def roberta():
    tokens, splits = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"], pre_tokenizers.ByteLevel(add_prefix_space=False)
    vocabulary, merges = byte_pairs(None, splits, tokens, pre_tokenizers.ByteLevel.alphabet())
    return transformers.RobertaTokenizer(vocabulary, merges)


def of_gemma(kind, **options):
    """Returns a tokenizer with the structure of Gemma's: spaces are letters, and unknown letters bytes."""
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", *(f"<0x{byte:02X}>" for byte in range(256))]
    splits = pre_tokenizers.Split(" ", "merged_with_previous")
    fallback = {"byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    vocabulary, merges = byte_pairs(normalizers.Replace(" ", "▁"), splits, tokens, [], **fallback)
    return getattr(transformers, kind)(vocabulary, merges, padding_side="right", **options)


def gemma():
    return of_gemma("GemmaTokenizer")


def siglip2():
    return of_gemma("Siglip2Tokenizer", add_bos_token=False, add_eos_token=True)


@pytest.mark.parametrize("make", [roberta, xlm_r, gemma, siglip2])
def test_a_tokenizer_json_gives_the_ids_of_transformers(tmp_path, make):
    make().save_pretrained(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ours = tokenizer_config(tmp_path / "tokenizer.json", LENGTH).build()
    assert ours.padding_id == theirs.pad_token_id
    expected = theirs(TEXTS, padding="max_length", truncation=True, max_length=LENGTH)["input_ids"]
    np.testing.assert_array_equal(ours(TEXTS), expected)


@pytest.mark.parametrize("model_type", ["siglip", "siglip2"])
def test_gemmas_tokenizer_beside_a_siglip_2_of_transformers_4_lowercases_and_ends_texts(tmp_path, model_type):
    """The class of transformers 5 lowercases; the file of version 4 does not say so."""
    theirs = siglip2()
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "tokenizer.json"
    fields = json.loads(path.read_text()) | {"normalizer": json.loads(gemma().backend_tokenizer.to_str())["normalizer"]}
    path.write_text(json.dumps(fields))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    config = tokenizer_config(path, LENGTH)
    ours = config.build()
    assert ours.padding_id == 0
    expected = theirs(TEXTS, padding="max_length", truncation=True, max_length=LENGTH)["input_ids"]
    np.testing.assert_array_equal(ours(TEXTS), expected)
    path.write_bytes(ours.model_bytes)
    assert config.build().model_bytes == ours.model_bytes


def test_the_sentencepiece_model_of_xlm_r_is_refused_in_favour_of_its_tokenizer_json(tmp_path):
    (tmp_path / "sentencepiece.bpe.model").write_bytes(trained())
    with pytest.raises(UserError, match="XLM-R numbers pieces otherwise than this file; give its tokenizer"):
        tokenizer_config(tmp_path / "sentencepiece.bpe.model", LENGTH)


@pytest.mark.parametrize("settings", [None, {"tokenizer_class": "T5Tokenizer", "pad_token": "<pad>"}])
def test_the_sentencepiece_model_of_a_t5_keeps_case_and_pads_with_its_own_token(tmp_path, settings):
    path = tmp_path / "spiece.model"
    path.write_bytes(trained(pad_id=0, eos_id=1, unk_id=2, bos_id=-1))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mt5"}))
    theirs = transformers.T5Tokenizer.from_pretrained(tmp_path)
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    expected = theirs(TEXTS, padding="max_length", truncation=True, max_length=LENGTH)["input_ids"]
    ours = tokenizer_config(path, LENGTH).build()
    assert ours.padding_id == 0
    np.testing.assert_array_equal(ours(TEXTS), expected)
