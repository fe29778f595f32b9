"""What the script of an ONNX folder does itself: its pixels and token ids are those of this package."""

import numpy as np
import pytest
import tokenizers
from PIL import Image, ImageFilter
from tokenizers import models, normalizers, pre_tokenizers, processors

from lit_het.data_pipelines.images.transforms import Preprocessing
from lit_het.data_pipelines.texts.familiarity import Familiarity
from lit_het.data_pipelines.texts.tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer, train_sentencepiece
from lit_het.weights.onnx import classify, folder

CAPTIONS = ["A photo, of the GREENISH cat!", "red_cat", "red bar", "", "a dog; " * 9]


def pixels_of(path, shape, preprocessing):
    """Writes a smooth image, and returns its pixels by the script and by this package."""
    noise = np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)
    Image.fromarray(noise).filter(ImageFilter.GaussianBlur(1.5)).save(path)
    found = classify.read(path, **folder.preprocessing_settings(preprocessing, 32))
    return found.astype(int), preprocessing.apply(path.read_bytes(), 32)


SHAPES = [(32, 32), (64, 64), (128, 128), (75, 100), (131, 90)]


@pytest.mark.parametrize("filter", ["area", "bilinear", "bicubic"])
@pytest.mark.parametrize("shape", SHAPES)
def test_pixels_of_whole_images_are_equal(shape, filter, tmp_path):
    np.testing.assert_array_equal(*pixels_of(tmp_path / "image.png", shape, Preprocessing(filter=filter)))


@pytest.mark.parametrize("filter", ["area", "bilinear", "bicubic"])
@pytest.mark.parametrize("fraction", [1.0, 0.875])
@pytest.mark.parametrize("shape", SHAPES)
def test_pixels_of_crops_are_equal_or_near_where_opencv_crops_whole_pixels(shape, fraction, filter, tmp_path):
    found, expected = pixels_of(tmp_path / "image.png", shape, Preprocessing("crop", fraction, filter))
    np.testing.assert_allclose(found, expected, rtol=0, atol=3 if filter == "area" else 0)
    assert np.ptp(expected) > 50


@pytest.mark.parametrize("transparency", ["white", "dropped"])
def test_transparent_pixels_are_equal(transparency, tmp_path):
    rgba = np.random.default_rng(0).integers(0, 256, (32, 32, 4), np.uint8)
    Image.fromarray(rgba).save(tmp_path / "image.png")
    preprocessing = Preprocessing(transparency=transparency)
    found = classify.read(tmp_path / "image.png", **folder.preprocessing_settings(preprocessing, 32))
    np.testing.assert_array_equal(found, preprocessing.apply((tmp_path / "image.png").read_bytes(), 32))


def test_pixels_of_16_bits_are_near(tmp_path):
    levels = np.linspace(0, 65535, 32 * 32).reshape(32, 32).astype(np.uint16)
    Image.fromarray(levels).save(tmp_path / "image.png")
    found = classify.read(tmp_path / "image.png", **folder.preprocessing_settings(Preprocessing(), 32))
    expected = Preprocessing().apply((tmp_path / "image.png").read_bytes(), 32)
    np.testing.assert_allclose(found.astype(int), expected, rtol=0, atol=1)


@pytest.mark.parametrize(
    ("lowercase", "remove_punctuation", "split_underscores"),
    [(True, False, False), (False, True, False), (True, True, False), (True, True, True)],
)
def test_ids_of_sentencepiece_are_equal(lowercase, remove_punctuation, split_underscores, tmp_path, monkeypatch):
    monkeypatch.setattr(classify, "FOLDER", tmp_path)
    model = train_sentencepiece([caption for caption in CAPTIONS if caption], vocabulary_size=40, lowercase=lowercase)
    (tmp_path / "tokenizer.model").write_bytes(model)
    ours = SentencePieceTokenizer(model, 8, lowercase, 1, remove_punctuation, split_underscores)
    assert_equal_ids(ours)


def test_ids_of_word_pieces_are_equal(tmp_path, monkeypatch):
    monkeypatch.setattr(classify, "FOLDER", tmp_path)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "red", "green", "##ish", "bar", "photo", "cat", "!"]
    tokenizer = tokenizers.Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    control = [("[CLS]", 2), ("[SEP]", 3)]
    tokenizer.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=control)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = HuggingFaceTokenizer((tmp_path / "tokenizer.json").read_bytes(), 8)
    assert_equal_ids(ours)


@pytest.mark.parametrize("rule", ["caption", "words"])
def test_names_of_training_captions_are_known(rule):
    captions = ["A dog on the beach", "a dog", "Golden Gate Bridge in San Francisco", "Straße"]
    found = Familiarity.of(captions, "digest")
    names = ["dog", "the dog", "golden gate bridge in san francisco", "beach", "on the", "gate in", "STRASSE", "?", "a"]
    known = [classify.knows(name, rule, found.keys) for name in names]
    assert known == found.knows(names, rule).tolist()
    assert 0 < sum(known) < len(names)


def assert_equal_ids(tokenizer):
    ids = classify.tokenize(CAPTIONS, **folder.tokenizer_settings(tokenizer))
    np.testing.assert_array_equal(ids, tokenizer(CAPTIONS))
    assert ids.dtype == np.int32
    assert len(np.unique(ids, axis=0)) == len(CAPTIONS)
