"""Exported models give the same logits in transformers; models that it does not support are refused."""

import dataclasses
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het.checkpoints.huggingface.exporting import write_siglip
from lit_het.checkpoints.native import checksums
from lit_het.data_pipelines.tokenizers import SentencePieceTokenizer, train_sentencepiece
from lit_het.errors import UserError
from lit_het.towers.experts import ExpertsConfig
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from tests.checkpoints.huggingface_models import load, logits, shapes

CAPTIONS = [f"A photo, of the {animal}!" for animal in ("cat", "dog", "owl", "newt", "heron", "mule")]
ENCODER = EncoderConfig(width=16, depth=2, mlp_width=24, num_heads=2)
IMAGE = ViTConfig(image_size=16, patch_size=8, encoder=ENCODER)
LENGTH = 8
TEXT = TextConfig(
    vocabulary_size=40, length=LENGTH, embedding_size=16, encoder=dataclasses.replace(ENCODER, depth=1, num_heads=4)
)
UINT8 = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), np.uint8)


@dataclasses.dataclass(frozen=True)
class Towers:
    """Stands in for an imported model in `logits`."""

    image_tower: ViTConfig
    text_tower: TextConfig


def fresh(image=IMAGE, text=TEXT, bias=-3.0):
    """Returns random parameters, including those that are initialised to zero or one."""
    random = np.random.default_rng(0)
    tree = {"image_tower": shapes(image), "text_tower": shapes(text)}
    drawn = jax.tree.map(lambda leaf: jnp.asarray(0.3 * random.normal(size=leaf.shape), jnp.float32), tree)
    head = {"temperature": {"log_temperature": jnp.float32(-2.3)}}
    return drawn | {"head": head | ({} if bias is None else {"bias": jnp.float32(bias)})}


@pytest.fixture(scope="module")
def tokenizer():
    return SentencePieceTokenizer(train_sentencepiece(CAPTIONS, vocabulary_size=40), LENGTH)


@pytest.fixture(scope="module")
def transformers():
    """Returns the library, imported without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torch")
        return pytest.importorskip("transformers")


def scores(transformers, folder, ids):
    """Returns the logits that transformers gives for the images and token ids."""
    torch = pytest.importorskip("torch")
    model, loading_info = transformers.AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not any(loading_info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    values = torch.tensor(np.moveaxis(UINT8 / 127.5 - 1, -1, 1), dtype=torch.float32)
    with torch.no_grad():
        return model(input_ids=torch.tensor(np.asarray(ids), dtype=torch.long), pixel_values=values).logits_per_image


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bias", [-3.0, None])
def test_transformers_gives_the_same_logits(transformers, tokenizer, tmp_path, bias):
    params, ids = fresh(bias=bias), tokenizer(CAPTIONS)
    write_siglip(tmp_path, IMAGE, TEXT, params, tokenizer)
    ours = logits(Towers(IMAGE, TEXT), params, UINT8, ids)
    np.testing.assert_allclose(ours, scores(transformers, tmp_path, ids), rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_fixed_positions_are_written_out(transformers, tmp_path):
    image = dataclasses.replace(IMAGE, positions="sine_cosine")
    text = dataclasses.replace(TEXT, positions="sinusoidal")
    params, ids = fresh(image, text), np.random.default_rng(1).integers(0, 40, (2, LENGTH), np.int32)
    write_siglip(tmp_path, image, text, params)
    ours = logits(Towers(image, text), params, UINT8, ids)
    np.testing.assert_allclose(ours, scores(transformers, tmp_path, ids), rtol=0, atol=1e-4)


def test_importing_an_export_gives_bit_identical_parameters(tmp_path):
    params = fresh()
    write_siglip(tmp_path, IMAGE, TEXT, params)
    imported, again = load(tmp_path)
    assert checksums.digest(again) == checksums.digest(params)
    assert (imported.image_tower, imported.text_tower) == (IMAGE, TEXT)


def test_the_covariance_of_a_head_is_not_exported(tmp_path):
    params = fresh()
    params["head"]["image_covariance"] = {"factors": {"kernel": jnp.ones((16, 3))}}
    write_siglip(tmp_path, IMAGE, TEXT, params)
    del params["head"]["image_covariance"]
    assert checksums.digest(load(tmp_path)[1]) == checksums.digest(params)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("padding_id", [None, 1])
@pytest.mark.parametrize("lowercase", [True, False])
def test_the_tokenizer_of_transformers_gives_our_ids(transformers, tokenizer, tmp_path, lowercase, padding_id):
    ours = SentencePieceTokenizer(tokenizer.model_bytes, LENGTH, lowercase, padding_id)
    write_siglip(tmp_path, IMAGE, TEXT, fresh(), ours)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    captions = [*CAPTIONS, "", "cat", " a   cat,\tdog\n", "A ＣＡＴ", "ξ猫猫 unseen", "owl " * 20, "CAT. dog! (newt)"]
    encoded = theirs(captions, padding="max_length", truncation=True)
    assert list(encoded) == ["input_ids"]
    np.testing.assert_array_equal(encoded["input_ids"], ours(captions))


def test_captions_of_another_length_than_the_text_towers_are_refused(tokenizer, tmp_path):
    short = SentencePieceTokenizer(tokenizer.model_bytes, LENGTH - 1)
    with pytest.raises(UserError, match=r"captions of 7 tokens do not fit text_tower\.length = 8"):
        write_siglip(tmp_path, IMAGE, TEXT, fresh(), short)


def test_the_sentencepiece_model_is_exported_too(tokenizer, tmp_path):
    write_siglip(tmp_path, IMAGE, TEXT, fresh(), tokenizer)
    assert (tmp_path / "spiece.model").read_bytes() == tokenizer.model_bytes


def test_a_tokenizer_whose_ids_would_differ_is_refused(tmp_path):
    model = train_sentencepiece(CAPTIONS, vocabulary_size=40, model_type="bpe")
    with pytest.raises(UserError, match="only SentencePiece models of the type unigram"):
        write_siglip(tmp_path / "model", IMAGE, TEXT, fresh(), SentencePieceTokenizer(model, LENGTH))
    assert not (tmp_path / "model").exists()


@pytest.mark.filterwarnings("ignore")
def test_the_image_processor_normalises_as_our_tower_does(transformers, tmp_path):
    write_siglip(tmp_path, IMAGE, TEXT, fresh())
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    values = processor(list(UINT8), return_tensors="np")["pixel_values"]
    np.testing.assert_allclose(values, np.moveaxis(UINT8 / 127.5 - 1, -1, 1), atol=1e-5)


REGISTERS = dataclasses.replace(IMAGE, num_registers=2)
MEAN = dataclasses.replace(IMAGE, pooling="mean")
EXPERTS = dataclasses.replace(IMAGE, encoder=dataclasses.replace(ENCODER, experts=ExpertsConfig(num_blocks=1)))
GATED = dataclasses.replace(TEXT, encoder=dataclasses.replace(ENCODER, activation="swiglu"))
FIRST = dataclasses.replace(TEXT, pooling="first")


@pytest.mark.parametrize(
    ("image", "text", "message"),
    [
        (REGISTERS, TEXT, "image_tower.num_registers = 2"),
        (MEAN, TEXT, "image_tower.pooling = 'mean'"),
        (EXPERTS, TEXT, r"image_tower.encoder.experts = ExpertsConfig\("),
        (IMAGE, GATED, "text_tower.encoder.activation = 'swiglu'"),
        (IMAGE, FIRST, "text_tower.pooling = 'first'"),
    ],
)
def test_an_unsupported_field_is_named(image, text, message, tmp_path):
    with pytest.raises(UserError, match=f"{message}.* is not supported by SiglipModel"):
        write_siglip(tmp_path, image, text, {})


def test_a_temperature_that_is_not_a_logarithm_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"head\.temperature must be a LogTemperature"):
        write_siglip(tmp_path, IMAGE, TEXT, {"head": {"temperature": {"position": jnp.float32(0)}}})


def test_the_configuration_contains_every_size(tmp_path):
    write_siglip(tmp_path, IMAGE, TEXT, fresh())
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["vision_config"]["image_size"] == 16
    assert config["text_config"]["projection_size"] == config["vision_config"]["hidden_size"] == 16
    assert config["text_config"]["hidden_act"] == "gelu_pytorch_tanh"
