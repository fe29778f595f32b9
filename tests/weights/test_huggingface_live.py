"""Imports of random models agree with transformers itself; these tests need torch."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.special

from lit_het.configs import experiment
from lit_het.data_pipelines.images.transforms import Preprocessing
from lit_het.errors import UserError
from lit_het.patches import cut, split
from lit_het.weights import formats
from lit_het.weights.big_vision.importing import read_big_vision
from lit_het.weights.huggingface import image_processors
from lit_het.weights.huggingface.classifiers import write_classifier
from lit_het.weights.huggingface.exporting import write_image_text
from tests.golden.record_image_text import CLIP_DEVIATION, CLIP_MEAN, patched, randomise
from tests.weights.importing import GOLDEN, assert_close, image_tower, load, loaded, logits, pixels, run, text_tower

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
HALF, OPENAI = ((0.5,) * 3, (0.5,) * 3), (CLIP_MEAN, CLIP_DEVIATION)
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
IMAGE = SIZES | {"intermediate_size": 40, "image_size": 24, "patch_size": 8}
DINO = SIZES | {"mlp_ratio": 2, "image_size": 24, "patch_size": 8}
DINO_V3 = (
    SIZES | {"hidden_size": 48, "intermediate_size": 40, "image_size": 24, "patch_size": 8} | {"num_register_tokens": 4}
)
GATED = {"use_gated_mlp": True, "hidden_act": "silu", "query_bias": False, "value_bias": False, "key_bias": True}
TEXT = SIZES | {"intermediate_size": 40, "vocab_size": 50, "max_position_embeddings": 8}
CLIP_TEXT = TEXT | {"bos_token_id": 0, "eos_token_id": 49}
PATCHES = {name: size for name, size in IMAGE.items() if name != "image_size"} | {"num_patches": 9}
UINT8 = np.random.default_rng(0).integers(0, 256, (2, 24, 24, 3), np.uint8)
IDS = np.random.default_rng(1).integers(0, 50, (3, 8), np.int32)
# Texts with their end in the middle, at the last position, and twice.
ENDING = np.where(IDS == 49, 48, IDS)
ENDING[0, 3], ENDING[1, 7], ENDING[2, 2], ENDING[2, 5] = 49, 49, 49, 49
PADDED = np.where(IDS == 0, 1, IDS)
PADDED[0, 5:], PADDED[2, 2:] = 0, 0


@pytest.fixture
def torch(transformers):
    return pytest.importorskip("torch")


@pytest.fixture
def saved(torch, transformers, tmp_path):
    """Returns a function that randomises a model of transformers, saves it and imports it again."""

    def save(kind, *configs, **options):
        model = randomise(torch, getattr(transformers, kind)(*configs))
        model.save_pretrained(tmp_path)
        return model, *load(tmp_path, **options)

    return save


@pytest.fixture
def config(transformers):
    """Returns a function that makes a configuration of transformers."""
    return lambda kind, **fields: getattr(transformers, f"{kind}Config")(**fields)


def normalised(torch, images, mean=(0.5,) * 3, deviation=(0.5,) * 3):
    return torch.tensor(np.moveaxis((images / 255 - mean) / deviation, -1, 1), dtype=torch.float32)


@pytest.mark.parametrize(
    ("model", "kind", "fields", "output", "normalization"),
    [
        ("CLIPVisionModelWithProjection", "CLIPVision", IMAGE | {"projection_dim": 16}, "image_embeds", OPENAI),
        ("CLIPVisionModel", "CLIPVision", IMAGE, "pooler_output", OPENAI),
        (
            "Dinov2WithRegistersModel",
            "Dinov2WithRegisters",
            DINO | {"use_swiglu_ffn": True, "num_register_tokens": 3},
            "pooler_output",
            IMAGENET,
        ),
        ("Dinov2ForImageClassification", "Dinov2", DINO, "pooler_output", IMAGENET),
        ("Dinov2Model", "Dinov2", DINO | {"qkv_bias": False}, "pooler_output", IMAGENET),
        ("ViTModel", "ViT", IMAGE | {"qkv_bias": False}, "pooler_output", HALF),
        ("DINOv3ViTModel", "DINOv3ViT", DINO_V3, "pooler_output", IMAGENET),
        ("DINOv3ViTModel", "DINOv3ViT", DINO_V3 | GATED, "pooler_output", IMAGENET),
    ],
)
def test_an_image_tower(torch, saved, config, model, kind, fields, output, normalization):
    theirs, imported, params = saved(model, config(kind, **fields))
    theirs = getattr(theirs, "dinov2", theirs)  # without its classifier
    with torch.no_grad():
        expected = getattr(theirs(normalised(torch, UINT8, *normalization)), output)
    assert_close(run(imported.image_tower, params["image_tower"], UINT8).embedding, expected)


@pytest.mark.parametrize("shape", [(16, 40), (48, 32)])
def test_dinov3_at_other_sizes_of_images(torch, saved, config, shape):
    theirs, imported, params = saved("DINOv3ViTModel", config("DINOv3ViT", **DINO_V3, rope_theta=50.0))
    images = np.random.default_rng(1).integers(0, 256, (2, *shape, 3), np.uint8)
    with torch.no_grad():
        expected = theirs(normalised(torch, images, *IMAGENET))
    ours = run(imported.image_tower, params["image_tower"], images)
    assert_close(ours.embedding, expected.pooler_output)
    assert_close(ours.tokens, expected.last_hidden_state)


def test_dinov3_of_its_smallest_published_size(torch, saved, config):
    sizes = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 6}
    theirs, imported, params = saved("DINOv3ViTModel", config("DINOv3ViT", **sizes, num_register_tokens=4))
    images = np.random.default_rng(2).integers(0, 256, (2, 224, 224, 3), np.uint8)
    with torch.no_grad():
        expected = theirs(normalised(torch, images, *IMAGENET)).last_hidden_state.numpy()
    tokens = run(imported.image_tower, params["image_tower"], images).tokens
    assert_close(tokens, expected, atol=1e-5 * np.abs(expected).max())


def scores_agree(torch, found, ids, normalization, **inputs):
    """Asserts that the imported model gives the scores of transformers, and their softmax, to 1e-5."""
    model, imported, params = found
    with torch.no_grad():
        pixel_values, long = normalised(torch, UINT8, *normalization), torch.tensor(ids, dtype=torch.long)
        theirs = model(input_ids=long, pixel_values=pixel_values, **inputs).logits_per_image
    scores = logits(imported.image_tower, imported.text_tower, params, UINT8, ids)
    assert_close(scores, theirs, atol=1e-5 * max(1, np.abs(theirs).max()))
    assert_close(scipy.special.softmax(scores, axis=1), torch.softmax(theirs, dim=1))


@pytest.mark.parametrize("end_token", [49, 2])
@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
def test_clip(torch, saved, config, end_token, activation):
    text = CLIP_TEXT | {"eos_token_id": end_token, "num_attention_heads": 4, "hidden_act": activation}
    both = config("CLIP", text_config=text, vision_config=IMAGE | {"hidden_act": activation}, projection_dim=16)
    scores_agree(torch, saved("CLIPModel", both), ENDING, OPENAI)


@pytest.mark.parametrize("section", ["vision_config", "text_config"])
def test_clip_is_read_as_transformers_reads_sections_of_early_versions(torch, transformers, tmp_path, config, section):
    act = {"hidden_act": "gelu"}
    both = config("CLIP", text_config=CLIP_TEXT | act, vision_config=IMAGE | act, projection_dim=16)
    randomise(torch, transformers.CLIPModel(both)).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    fields |= {"vision_config_dict": None, "text_config_dict": None, f"{section}_dict": fields[section]}
    path.write_text(json.dumps(fields | {section: fields[section] | {"hidden_act": "quick_gelu"}}))
    model = transformers.CLIPModel.from_pretrained(tmp_path).eval()
    scores_agree(torch, (model, *load(tmp_path)), ENDING, OPENAI)


def test_clips_text_tower_with_its_projection(torch, saved, config):
    tower = config("CLIPText", **CLIP_TEXT, projection_dim=16)
    model, imported, params = saved("CLIPTextModelWithProjection", tower)
    with torch.no_grad():
        theirs = model(torch.tensor(ENDING, dtype=torch.long)).text_embeds
    assert_close(run(imported.text_tower, params["text_tower"], ENDING).embedding, theirs)


@pytest.mark.parametrize(
    ("image", "fields", "text", "normalization"),
    [
        ("ViT", IMAGE, "Bert", HALF),
        ("Dinov2", DINO, "Bert", IMAGENET),
        ("DINOv3ViT", DINO_V3, "Bert", IMAGENET),
        ("CLIPVision", IMAGE, "Bert", OPENAI),
        ("CLIPVision", IMAGE, "CLIPText", OPENAI),
        ("Dinov2", DINO, "XLMRoberta", IMAGENET),
    ],
)
def test_a_dual_encoder(torch, transformers, saved, config, image, fields, text, normalization):
    is_bert = text != "CLIPText"
    of_text = {"Bert": TEXT, "CLIPText": CLIP_TEXT, "XLMRoberta": TEXT | {"max_position_embeddings": 9}}[text]
    towers = config(image, **fields), config(text, **of_text | {"pad_token_id": 0})
    both = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(*towers, projection_dim=16)
    found = saved("VisionTextDualEncoderModel", both)
    inputs = {"attention_mask": torch.tensor(PADDED != 0)} if is_bert else {}
    scores_agree(torch, found, PADDED if is_bert else ENDING, normalization, **inputs)


@pytest.mark.parametrize("size", [16, 24, 40])
def test_siglip_2_whose_first_layer_is_dense_at_its_own_and_at_other_image_sizes(torch, saved, config, size):
    both = config("Siglip2", text_config=TEXT, vision_config=PATCHES)
    model, imported, params = saved("Siglip2Model", both, image_size=size)
    images = np.random.default_rng(size).integers(0, 256, (2, size, size, 3), np.uint8)
    with torch.no_grad():
        theirs = model(input_ids=torch.tensor(IDS, dtype=torch.long), **patched(torch, images, 8)).logits_per_image
    assert_close(logits(imported.image_tower, imported.text_tower, params, images, IDS), theirs, atol=1e-4)


# No grid of one column: torch 2.13 resizes positions to it as if it had more.
GRIDS = [(2, 5), (1, 10), (3, 3), (5, 2)]


def patches_of_all_shapes(torch, config):
    """Images as our towers take them, and as transformers does."""
    random = np.random.default_rng(0)
    images = [random.integers(0, 256, (rows * 8, columns * 8, 3), np.uint8) for rows, columns in GRIDS]
    ours = np.stack([cut(config.patches, image) for image in images])
    values, places = split(ours)
    theirs = {
        "pixel_values": torch.tensor(values / 127.5 - 1, dtype=torch.float32),
        "pixel_attention_mask": torch.tensor((places[..., 0] > 0).astype(np.int64)),
        "spatial_shapes": torch.tensor(places.max(axis=1)),
    }
    return ours, theirs


def test_siglip_2_on_images_of_all_shapes(torch, saved, config):
    both = config("Siglip2", text_config=TEXT, vision_config=PATCHES)
    model, imported, params = saved("Siglip2Model", both)
    tower = dataclasses.replace(imported.image_tower, max_patches=12)
    images, inputs = patches_of_all_shapes(torch, tower)
    with torch.no_grad():
        theirs = model(input_ids=torch.tensor(IDS, dtype=torch.long), **inputs)
    ours = logits(tower, imported.text_tower, params, images, IDS)
    assert_close(ours, theirs.logits_per_image, atol=1e-5 * np.abs(ours).max())


def test_big_visions_naflex_on_images_of_all_shapes(torch, transformers, tmp_path):
    imported = read_big_vision(GOLDEN / "naflex.npz")
    # transformers' has no dense layer behind the pooling.
    tower, params = dataclasses.replace(image_tower(imported), max_patches=12, projection_size=None), loaded(imported)
    del params["image_tower"]["projection"]
    write_image_text(tmp_path, tower, text_tower(imported), params, is_sigmoid=True)
    images, inputs = patches_of_all_shapes(torch, tower)
    with torch.no_grad():
        theirs = transformers.Siglip2Model.from_pretrained(tmp_path).eval().get_image_features(**inputs)
    assert_close(run(tower, params["image_tower"], images).embedding, theirs.pooler_output)


@pytest.mark.parametrize("use_head", [True, False])
def test_the_image_tower_of_siglip_2_on_images_of_all_shapes(torch, saved, config, use_head):
    theirs, imported, params = saved("Siglip2VisionModel", config("Siglip2Vision", **PATCHES, vision_use_head=use_head))
    assert imported.image_tower.max_patches == 9  # as many as it has positions, without a processor
    tower = dataclasses.replace(imported.image_tower, max_patches=12)
    images, inputs = patches_of_all_shapes(torch, tower)
    with torch.no_grad():
        expected = theirs(**inputs)
    found = run(tower, params["image_tower"], images)
    present = inputs["pixel_attention_mask"].numpy() > 0
    assert_close(np.asarray(found.tokens)[present], expected.last_hidden_state.numpy()[present])
    if use_head:
        assert_close(found.embedding, expected.pooler_output)


def test_a_classifier_of_images_of_all_shapes_is_written(torch, saved, config, transformers, tmp_path):
    _, imported, params = saved("Siglip2VisionModel", config("Siglip2Vision", **PATCHES, vision_use_head=False))
    tower = dataclasses.replace(imported.image_tower, max_patches=12)
    images, inputs = patches_of_all_shapes(torch, tower)
    kernel, bias = (np.random.default_rng(0).normal(size=size).astype(np.float32) for size in ((24, 3), 3))
    processor = image_processors.write(Preprocessing(filter="bilinear", patches=tower.patches), tower.image_size)
    whole = {"image_tower": params["image_tower"], "head": {"logits": {"kernel": kernel, "bias": bias}}}
    write_classifier(tmp_path / "written", tower, whole, 2.0, ("a", "b", "c"), processor, is_sigmoid=False)
    theirs = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "written").eval()
    with torch.no_grad():
        found = theirs(**inputs).logits
    ours = np.asarray(run(tower, params["image_tower"], images).embedding)
    assert_close(found, (ours @ kernel + bias) / 2)


@pytest.mark.parametrize("most", [0, True, 2.5, "many", 2**20])
def test_numbers_of_patches_that_no_image_has_are_refused(torch, saved, config, tmp_path, most):
    saved("Siglip2VisionModel", config("Siglip2Vision", **PATCHES))
    processor = {"max_num_patches": most, "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(processor))
    with pytest.raises(UserError, match=r"preprocessor_config\.json: max_num_patches = .* is not from 1 to"):
        load(tmp_path)


def test_sovit_400m_ignores_pixels_beyond_whole_patches(torch, saved, config):
    """27 patches of SigLIP So400m/14 cover 378 of 384 pixels; here 2 patches cover 28 of 30 pixels."""
    wide = {"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 1}
    model, imported, params = saved("SiglipVisionModel", config("SiglipVision", **wide, image_size=30, patch_size=14))
    images = np.random.default_rng(2).integers(0, 256, (2, 30, 30, 3), np.uint8)
    assert imported.image_tower.image_size == 28
    values = normalised(torch, images)
    with torch.no_grad():
        theirs = model(values).pooler_output.numpy()
    ours = run(
        imported.image_tower, params["image_tower"], pixels(np.moveaxis(np.asarray(values), 1, -1)[:, :28, :28])
    ).embedding
    assert_close(ours, theirs, atol=1e-5 * np.abs(theirs).max())


# What the configurations say that transformers reads beside the published weights, with one block and few words.
LARGE = {"hidden_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 16}
PUBLISHED = {
    "dino_txt.py:model=dinov2_l14": (
        "Dinov2WithRegistersModel",
        "Dinov2WithRegisters",
        LARGE | {"mlp_ratio": 4, "image_size": 518, "patch_size": 14, "num_register_tokens": 4},
    ),
    "dino_txt.py:model=dinov3_l16": (
        "DINOv3ViTModel",
        "DINOv3ViT",
        LARGE | {"intermediate_size": 4096, "num_register_tokens": 4, "key_bias": False},
    ),
    "lit_xlm_r.py": (
        "CLIPVisionModelWithProjection",
        "CLIPVision",
        {"hidden_size": 1280, "num_hidden_layers": 1, "num_attention_heads": 16, "intermediate_size": 5120}
        | {"patch_size": 14, "projection_dim": 1024, "hidden_act": "gelu"},
    ),
    "lit_xlm_r.py:size=large": (
        "XLMRobertaModel",
        "XLMRoberta",
        LARGE
        | {"intermediate_size": 4096, "max_position_embeddings": 514, "type_vocab_size": 1, "vocab_size": 50}
        | {"layer_norm_eps": 1e-5, "pad_token_id": 1},
    ),
}


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_a_recipe_has_the_towers_of_the_weights_that_it_names(transformers, config, recipe, tmp_path):
    model, kind, fields = PUBLISHED[recipe]
    part = "text_tower" if kind == "XLMRoberta" else "image_tower"
    task: Any = experiment.load_module_config(Path("configs") / recipe).task
    tower = getattr(task, part)
    getattr(transformers, model)(config(kind, **fields)).save_pretrained(tmp_path)
    theirs = getattr(formats.open_weights(str(tmp_path), **tower.file_options()), part)
    found = experiment.differences(theirs, tower)
    ours = {"weights", "pooling", "top", "projection_size", "vocabulary_size", "encoder.depth"}
    assert {field for field in found if field.split(".")[0] not in ours} <= ours
