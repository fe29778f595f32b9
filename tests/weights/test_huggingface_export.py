"""Exported models give the same logits in transformers; models that it does not support are refused."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from lit_het.data_pipelines.texts.tokenizers import SentencePieceTokenizer, train_sentencepiece
from lit_het.errors import UserError
from lit_het.losses.classification import SigmoidCrossEntropy
from lit_het.towers.bert import BertConfig
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.image_config import RotaryConfig
from lit_het.towers.text import TextConfig
from lit_het.towers.text_config import ModernBertConfig, T5Config
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from lit_het.weights.huggingface.classifiers import write_classifier
from lit_het.weights.huggingface.exporting import write_image_text
from lit_het.weights.importing import open_imported
from lit_het.weights.native import checksums
from tests.towers.models import drawn, shapes, with_encoder
from tests.weights.importing import load, logits, run

CAPTIONS = [f"A photo, of the {animal}!" for animal in ("cat", "dog", "owl", "newt", "heron", "mule")]
ENCODER = EncoderConfig(width=16, depth=2, mlp_width=24, num_heads=2)
IMAGE = ViTConfig(image_size=16, patch_size=8, encoder=ENCODER)
LENGTH = 8
TEXT = TextConfig(
    vocabulary_size=40, length=LENGTH, embedding_size=16, encoder=dataclasses.replace(ENCODER, depth=1, num_heads=4)
)
UINT8 = np.random.default_rng(0).integers(0, 256, (3, 16, 16, 3), np.uint8)


def compared(test):
    """Marks a comparison with transformers, whose warnings are not ours."""
    return pytest.mark.slow(pytest.mark.filterwarnings("ignore")(test))


def fresh(image=IMAGE, text=TEXT, bias: float | None = -3.0):
    """Returns random parameters, including those that are initialised to zero or one."""
    head = {"temperature": {"log_temperature": np.float32(-2.3)}}
    towers = drawn({"image_tower": shapes(image), "text_tower": shapes(text)})
    if image.projection_size == 12:
        towers["image_tower"]["projection"]["bias"] = np.zeros(12, np.float32)  # dual encoders have none
    return towers | {"head": head | ({} if bias is None else {"bias": np.float32(bias)})}


def write(folder, image=IMAGE, text=TEXT, params=None, *arguments, is_sigmoid=True):
    params = fresh(image, text) if params is None else params
    return write_image_text(folder, image, text, params, *arguments, is_sigmoid=is_sigmoid)


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def scores(transformers, folder, ids):
    """Returns the logits that transformers gives for the images and token ids."""
    torch = pytest.importorskip("torch")
    model, loading_info = transformers.AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not any(loading_info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    values = torch.tensor(np.moveaxis(UINT8 / 127.5 - 1, -1, 1), dtype=torch.float32)
    is_bert = model.config.text_config.model_type == "bert"
    padding = model.config.text_config.pad_token_id
    mask = {"attention_mask": torch.tensor(ids != padding)} if is_bert else {}
    with torch.no_grad():
        ids = torch.tensor(np.asarray(ids), dtype=torch.long)
        return model(input_ids=ids, pixel_values=values, **mask).logits_per_image


def longer(text, ids, is_sigmoid):
    """Returns token ids with what the pipeline of transformers gives behind them, here any tokens."""
    if isinstance(text, BertConfig):
        return ids
    length = 64 if is_sigmoid else 2 * text.length - 1
    behind = np.random.default_rng(2).integers(0, 40, (len(ids), length - text.length), np.int32)
    return np.concatenate([ids, behind], axis=1)


CLASS_TOKEN = dataclasses.replace(IMAGE, pooling="class_token")
MEAN = dataclasses.replace(IMAGE, pooling="mean")
REGISTERS = dataclasses.replace(CLASS_TOKEN, num_registers=2)
CLIP = dataclasses.replace(with_encoder(CLASS_TOKEN, activation="quick_gelu"), input_norm=True, projection_size=12)
IMAGES = {
    "SigLIP": (IMAGE, "siglip_vision_model"),
    "mean": (MEAN, "siglip_vision_model"),
    "sine-cosine": (dataclasses.replace(IMAGE, positions="sine_cosine"), "siglip_vision_model"),
    "ViT with exact GELU": (with_encoder(CLASS_TOKEN, activation="gelu"), "vit"),
    "ViT with tanh": (dataclasses.replace(CLASS_TOKEN, representation_size=16), "vit"),
    "ViT with a projection": (dataclasses.replace(CLASS_TOKEN, projection_size=16), "vit"),
    "DINOv2": (with_encoder(CLASS_TOKEN, layer_scale=True, mlp_width=32), "dinov2"),
    "DINOv2 with SwiGLU": (with_encoder(CLASS_TOKEN, layer_scale=True, activation="swiglu"), "dinov2"),
    "DINOv2 with registers": (with_encoder(REGISTERS, layer_scale=True, mlp_width=32), "dinov2_with_registers"),
    "registers without scales": (with_encoder(REGISTERS, mlp_width=32), "dinov2_with_registers"),
    "CLIP": (CLIP, "clip_vision_model"),
    # Towers of a dual encoder, whose projection the exported one has again.
    "SigLIP with a projection": (dataclasses.replace(IMAGE, projection_size=12), "siglip_vision_model"),
    "ViT with a narrow projection": (dataclasses.replace(CLASS_TOKEN, projection_size=12), "vit"),
    "DINOv2 with a projection": (
        dataclasses.replace(with_encoder(CLASS_TOKEN, layer_scale=True, mlp_width=32), projection_size=12),
        "dinov2",
    ),
}
POST_NORM = EncoderConfig(16, 2, 24, 2, activation="gelu", norm_placement="after", norm_epsilon=1e-12)
BERT = BertConfig(vocabulary_size=40, length=LENGTH, projection_size=None, encoder=POST_NORM)
TEXTS = {
    "last": TEXT,
    "first": dataclasses.replace(TEXT, pooling="first"),
    "mean": dataclasses.replace(TEXT, pooling="mean"),
    "sinusoidal": dataclasses.replace(TEXT, positions="sinusoidal"),
    "BERT": BERT,
    "BERT with its pooler": dataclasses.replace(BERT, pooler=True),
    "BERT with a projection": dataclasses.replace(BERT, projection_size=16),
    "XLM-R": dataclasses.replace(BERT, padding_id=1, num_segments=1),
}


PAIRS = {
    kind: (image, dataclasses.replace(TEXT, embedding_size=image.embedding_size)) for kind, (image, _) in IMAGES.items()
}
PAIRS |= {f"texts: {kind}": (IMAGE, text) for kind, text in TEXTS.items()}


def largest_difference(transformers, folder, image, text, is_sigmoid):
    params, random = fresh(image, text, bias=-3.0 if is_sigmoid else None), np.random.default_rng(1)
    ids = random.integers(1, 40, (6, LENGTH), np.int32)
    ids[::2, -3:] = getattr(text, "padding_id", 0)
    write(folder, image, text, params, is_sigmoid=is_sigmoid)
    ours = logits(image, text, params, UINT8, ids)
    assert np.ptp(ours) > 0.3
    return np.abs(ours - scores(transformers, folder, longer(text, ids, is_sigmoid)).numpy()).max()


@pytest.mark.parametrize("kind", PAIRS)
def test_every_tower_becomes_one_of_transformers(tmp_path, kind):
    image, text = PAIRS[kind]
    write(tmp_path, image, text, is_sigmoid=False)
    config = config_of(tmp_path)
    of_text = "bert" if isinstance(text, BertConfig) else "megatron-bert"
    assert config["vision_config"]["model_type"] == IMAGES.get(kind, IMAGES["SigLIP"])[1]
    assert config["text_config"]["model_type"] == of_text


@compared
@pytest.mark.parametrize("kind", PAIRS)
def test_every_tower_has_the_same_logits_in_transformers(transformers, tmp_path, kind):
    assert largest_difference(transformers, tmp_path, *PAIRS[kind], is_sigmoid=False) < 1e-4


@compared
@pytest.mark.parametrize("kind", ["last", "first", "mean", "sinusoidal"])
@pytest.mark.parametrize("image", [IMAGE, MEAN])
def test_a_sigmoid_loss_becomes_a_siglip_model_for_texts_of_64_tokens(transformers, tmp_path, kind, image):
    assert largest_difference(transformers, tmp_path, image, TEXTS[kind], is_sigmoid=True) < 1e-4
    config = config_of(tmp_path)
    assert (config["model_type"], config["text_config"]["max_position_embeddings"]) == ("siglip", 64)


def test_a_sigmoid_loss_without_siglips_towers_loses_its_probabilities_but_no_ranking(tmp_path):
    remark = write(tmp_path, CLASS_TOKEN)[-1]
    assert "the ranking of labels is as trained, but the probabilities" in remark
    assert config_of(tmp_path)["model_type"] == "vision-text-dual-encoder"


LONG = dataclasses.replace(TEXT, length=64)


def test_importing_an_export_of_siglips_own_length_gives_bit_identical_parameters(tmp_path):
    params = fresh(text=LONG)
    write(tmp_path, IMAGE, LONG, params)
    imported, again = load(tmp_path)
    assert checksums.digest(again) == checksums.digest(params)
    assert (imported.image_tower, imported.text_tower) == (IMAGE, LONG)


def test_the_covariance_of_a_head_is_not_exported(tmp_path):
    params = fresh(text=LONG)
    covariance = {"image_covariance": {"factors": {"kernel": jnp.ones((16, 3))}}}
    write(tmp_path, IMAGE, LONG, {**params, "head": params["head"] | covariance})
    assert checksums.digest(load(tmp_path)[1]) == checksums.digest(params)


@compared
@pytest.mark.parametrize("padding_id", [None, 1])
@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("model_type", ["unigram", "bpe"])
def test_the_tokenizer_of_transformers_gives_our_ids(transformers, tmp_path, model_type, lowercase, padding_id):
    model = train_sentencepiece(CAPTIONS, vocabulary_size=40, model_type=model_type)
    ours = SentencePieceTokenizer(model, LENGTH, lowercase, padding_id)
    write(tmp_path, IMAGE, TEXT, None, ours)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    captions = [*CAPTIONS, "", "cat", " a   cat,\tdog\n", "A ＣＡＴ", "ξ猫猫 unseen", "owl " * 20, "CAT. dog! (newt)"]
    encoded = theirs(captions, padding="max_length", truncation=True)
    assert list(encoded) == ["input_ids"]
    ids = np.asarray(encoded["input_ids"])
    assert ids.shape == (len(captions), 64)
    np.testing.assert_array_equal(ids[:, :LENGTH], ours(captions))
    assert (ids[:, LENGTH:] == ours.padding_id).all()
    # The pipeline of models with a softmax truncates nothing, and pads to the longest text only.
    write(tmp_path / "softmax", IMAGE, TEXT, None, ours, is_sigmoid=False)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "softmax")
    found = [theirs([text], padding=True)["input_ids"][0] for text in captions]
    fitting = [number for number, row in enumerate(found) if len(row) < 2 * LENGTH]
    assert len(fitting) >= 3
    np.testing.assert_array_equal([found[i][:LENGTH] for i in fitting], ours([captions[i] for i in fitting]))


@pytest.mark.parametrize(
    ("model_type", "length", "message"),
    [
        ("unigram", LENGTH - 1, r"captions of 7 tokens do not fit text_tower\.length = 8"),
        ("word", LENGTH, "only SentencePiece models of the types unigram and bpe"),
    ],
)
def test_tokenizers_whose_ids_would_differ_are_refused(model_type, length, message, tmp_path):
    model = train_sentencepiece(CAPTIONS, vocabulary_size=40, model_type=model_type)
    with pytest.raises(UserError, match=message):
        write(tmp_path / "model", IMAGE, TEXT, None, SentencePieceTokenizer(model, length))
    assert not (tmp_path / "model").exists()


@compared
def test_the_image_processor_normalises_as_our_tower_does(transformers, tmp_path):
    write(tmp_path)
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path)
    values = processor(list(UINT8), return_tensors="np")["pixel_values"]
    np.testing.assert_allclose(values, np.moveaxis(UINT8 / 127.5 - 1, -1, 1), atol=1e-5)


@pytest.mark.parametrize(
    ("image", "text", "message"),
    [
        (dataclasses.replace(IMAGE, num_registers=2), TEXT, "image_tower.num_registers = 2"),
        (dataclasses.replace(IMAGE, pooling="none"), TEXT, "image_tower.pooling = 'none'"),
        (dataclasses.replace(IMAGE, rotary=RotaryConfig()), TEXT, r"image_tower.rotary = RotaryConfig\("),
        (
            with_encoder(IMAGE, experts=ExpertsConfig(num_blocks=1)),
            TEXT,
            r"image_tower.encoder.experts = ExpertsConfig\(",
        ),
        (IMAGE, with_encoder(TEXT, activation="swiglu"), "text_tower.encoder.activation = 'swiglu'"),
        (IMAGE, dataclasses.replace(TEXT, pooling="max"), "text_tower.pooling = 'max'"),
        (IMAGE, dataclasses.replace(BERT, mean_pooling=True), "text_tower.mean_pooling = True"),
    ],
)
def test_an_unsupported_field_is_named(image, text, message, tmp_path):
    params = fresh(IMAGE, TEXT)
    with pytest.raises(UserError, match=f"{message}.* is not supported by .*; export with --to lit-het"):
        write(tmp_path, image, text, params)


@pytest.mark.parametrize("text", [T5Config(40, LENGTH, 16), ModernBertConfig(40, LENGTH, 16, padding_id=0)])
def test_a_text_tower_that_no_image_text_model_of_transformers_has_is_refused(text, tmp_path):
    name = type(text).__name__
    with pytest.raises(UserError, match=f"transformers has no image-text model with a {name}; use --to lit-het"):
        write(tmp_path, IMAGE, text, fresh(IMAGE, TEXT))


def test_a_temperature_that_is_not_a_logarithm_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"head\.temperature must be a LogTemperature"):
        write(tmp_path, params={"head": {"temperature": {"position": jnp.float32(0)}}})


def test_the_folder_contains_every_size_and_the_sentencepiece_model(tmp_path):
    tokenizer = SentencePieceTokenizer(train_sentencepiece(CAPTIONS, vocabulary_size=40), LENGTH)
    write(tmp_path, IMAGE, TEXT, None, tokenizer)
    assert (tmp_path / "spiece.model").read_bytes() == tokenizer.model_bytes
    config = config_of(tmp_path)
    assert config["vision_config"]["image_size"] == 16
    assert config["text_config"]["projection_size"] == config["vision_config"]["hidden_size"] == 16
    assert config["text_config"]["hidden_act"] == "gelu_pytorch_tanh"


# ---- classifiers ----

NAMES = ("cat", "dog", "owl")
CASES = {name: IMAGES[name][0] for name in ("mean", "ViT with exact GELU", "DINOv2", "DINOv2 with registers")}


def classifier(image):
    """Returns the parameters of a tower with random logits."""
    random = np.random.default_rng(3)
    logits = {"kernel": random.normal(size=(16, 3)).astype("f4"), "bias": random.normal(size=3).astype("f4")}
    return {"image_tower": fresh(image)["image_tower"], "head": {"logits": logits}}


@compared
@pytest.mark.parametrize("kind", CASES)
def test_every_classifier_has_the_same_logits_in_transformers(transformers, tmp_path, kind):
    torch = pytest.importorskip("torch")
    image, params = CASES[kind], classifier(CASES[kind])
    write_classifier(tmp_path, image, params, 0.5, NAMES, is_sigmoid=False)
    auto = transformers.AutoModelForImageClassification
    model, report = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        theirs = model(torch.tensor(np.moveaxis(UINT8 / 127.5 - 1, -1, 1), dtype=torch.float32)).logits
    head = params["head"]["logits"]
    ours = (np.asarray(run(image, params["image_tower"], UINT8).embedding) @ head["kernel"] + head["bias"]) / 0.5
    np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-4)
    assert model.config.id2label == dict(enumerate(NAMES))
    imported, again = load(tmp_path)
    assert imported.num_classes == 3
    head = {name: np.asarray(array) for name, array in again["head"]["logits"].items()}
    found = np.asarray(run(imported.image_tower, again["image_tower"], UINT8).embedding) @ head["kernel"] + head["bias"]
    np.testing.assert_allclose(found, ours, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("is_sigmoid", "kind"), [(True, "multi_label"), (False, "single_label")])
def test_the_loss_decides_between_sigmoids_and_a_softmax(tmp_path, is_sigmoid, kind):
    write_classifier(tmp_path, MEAN, classifier(MEAN), 1.0, (), is_sigmoid=is_sigmoid)
    config = config_of(tmp_path)
    assert config["problem_type"] == f"{kind}_classification"
    assert config["id2label"]["2"] == "LABEL_2"
    assert isinstance(open_imported(str(tmp_path)).config.task.loss, SigmoidCrossEntropy) == is_sigmoid


def test_a_classifier_on_attention_pooling_is_refused(tmp_path):
    for image in (IMAGE, dataclasses.replace(MEAN, representation_size=16)):
        with pytest.raises(UserError, match="is not supported by image classification of transformers"):
            write_classifier(tmp_path, image, classifier(image), 1.0, (), is_sigmoid=False)
