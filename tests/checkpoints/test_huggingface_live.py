"""Imports of random models agree with transformers itself; these tests need torch."""

import functools
import warnings

import numpy as np
import pytest
import scipy.special

from tests.checkpoints.huggingface_models import load, logits, pixels, run
from tests.golden.record_image_text import patched

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")
assert_close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5)
OPENAI = ([0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711])
IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3}
IMAGE = SIZES | {"intermediate_size": 40, "image_size": 24, "patch_size": 8}
DINO = SIZES | {"mlp_ratio": 2, "image_size": 24, "patch_size": 8}
TEXT = SIZES | {"intermediate_size": 40, "vocab_size": 50, "max_position_embeddings": 8}
PATCHES = {name: size for name, size in IMAGE.items() if name != "image_size"} | {"num_patches": 9}
UINT8 = np.random.default_rng(0).integers(0, 256, (2, 24, 24, 3), np.uint8)
IDS = np.random.default_rng(1).integers(0, 50, (3, 8), np.int32)


def normalised(images, mean=(0.5,) * 3, deviation=(0.5,) * 3):
    return torch.tensor(np.moveaxis((images / 255 - mean) / deviation, -1, 1), dtype=torch.float32)


@pytest.fixture
def saved(tmp_path):
    """Returns a function that randomises every parameter of a model, including zeros and ones, and saves it."""

    def save(model):
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                scale = 0.2 if parameter.ndim < 2 else parameter[0].numel() ** -0.5
                parameter.add_(scale * torch.randn_like(parameter))
        model.save_pretrained(tmp_path)
        return model.eval(), tmp_path

    return save


def agree(model, folder, theirs, mean, deviation):
    """Asserts that the imported tower gives the embedding ``theirs(output)`` of the model."""
    imported, params = load(folder)
    output = run(imported.image_tower, params["image_tower"], UINT8).embedding
    with torch.no_grad():
        assert_close(output, theirs(model(normalised(UINT8, mean, deviation))))


def test_clips_image_tower_with_its_projection(saved):
    config = transformers.CLIPVisionConfig(**IMAGE, projection_dim=16)
    model, folder = saved(transformers.CLIPVisionModelWithProjection(config))
    agree(model, folder, lambda output: output.image_embeds, *OPENAI)


def test_clips_image_tower_alone(saved):
    model, folder = saved(transformers.CLIPVisionModel(transformers.CLIPVisionConfig(**IMAGE)))
    agree(model, folder, lambda output: output.pooler_output, *OPENAI)


def scores_agree(model, folder, ids, mean, deviation, **inputs):
    """Asserts that the imported model gives the scores of transformers, and their softmax, to 1e-5."""
    imported, params = load(folder)
    with torch.no_grad():
        pixel_values, long = normalised(UINT8, mean, deviation), torch.tensor(ids, dtype=torch.long)
        theirs = model(input_ids=long, pixel_values=pixel_values, **inputs).logits_per_image
    scores = logits(imported, params, UINT8, ids)
    assert_close(scores, theirs, atol=1e-5 * max(1, np.abs(theirs).max()))
    assert_close(scipy.special.softmax(scores, axis=1), torch.softmax(theirs, dim=1))


# Texts with their end in the middle, at the last position, and twice.
ENDING = np.where(IDS == 49, 48, IDS)
ENDING[0, 3], ENDING[1, 7], ENDING[2, 2], ENDING[2, 5] = 49, 49, 49, 49


@pytest.mark.parametrize("end_token", [49, 2])
@pytest.mark.parametrize("activation", ["quick_gelu", "gelu"])
def test_clip(end_token, activation, saved):
    text = TEXT | {"bos_token_id": 0, "eos_token_id": end_token, "num_attention_heads": 4, "hidden_act": activation}
    vision = IMAGE | {"hidden_act": activation}
    model, folder = saved(
        transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    )
    scores_agree(model, folder, ENDING, *OPENAI)


def test_clips_text_tower_with_its_projection(saved):
    config = transformers.CLIPTextConfig(**TEXT, projection_dim=16, bos_token_id=0, eos_token_id=49)
    model, folder = saved(transformers.CLIPTextModelWithProjection(config))
    imported, params = load(folder)
    with torch.no_grad():
        theirs = model(torch.tensor(ENDING, dtype=torch.long)).text_embeds
    assert_close(run(imported.text_tower, params["text_tower"], ENDING).embedding, theirs)


DUAL = {
    "ViT": (lambda: transformers.ViTConfig(**IMAGE), ((0.5,) * 3, (0.5,) * 3)),
    "DINOv2": (lambda: transformers.Dinov2Config(**DINO), IMAGENET),
    "CLIP": (lambda: transformers.CLIPVisionConfig(**IMAGE), OPENAI),
}


@pytest.mark.parametrize("image", DUAL)
def test_a_dual_encoder_with_bert(image, saved):
    vision, normalization = DUAL[image]
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(
        vision(), transformers.BertConfig(**TEXT), projection_dim=16
    )
    model, folder = saved(transformers.VisionTextDualEncoderModel(config))
    ids = np.where(IDS == 0, 1, IDS)
    ids[0, 5:], ids[2, 2:] = 0, 0
    scores_agree(model, folder, ids, *normalization, attention_mask=torch.tensor(ids != 0))


def test_a_dual_encoder_with_clips_text_tower(saved):
    text = transformers.CLIPTextConfig(**TEXT, bos_token_id=0, eos_token_id=49)
    config = transformers.VisionTextDualEncoderConfig.from_vision_text_configs(
        transformers.CLIPVisionConfig(**IMAGE), text, projection_dim=16
    )
    model, folder = saved(transformers.VisionTextDualEncoderModel(config))
    scores_agree(model, folder, ENDING, *OPENAI)


def test_dinov2_with_registers_and_gates(saved):
    config = transformers.Dinov2WithRegistersConfig(**DINO, use_swiglu_ffn=True, num_register_tokens=3)
    model, folder = saved(transformers.Dinov2WithRegistersModel(config))
    agree(model, folder, lambda output: output.pooler_output, *IMAGENET)


def test_dinov2_without_its_classifier(saved):
    model, folder = saved(transformers.Dinov2ForImageClassification(transformers.Dinov2Config(**DINO)))
    agree(model.dinov2, folder, lambda output: output.pooler_output, *IMAGENET)


@pytest.mark.parametrize("size", [16, 24, 40])
def test_siglip_2_whose_first_layer_is_dense_at_its_own_and_at_other_image_sizes(size, saved):
    config = transformers.Siglip2Config(text_config=TEXT, vision_config=PATCHES)
    model, folder = saved(transformers.Siglip2Model(config))
    imported, params = load(folder, image_size=size)
    images = np.random.default_rng(size).integers(0, 256, (2, size, size, 3), np.uint8)
    with torch.no_grad():
        theirs = model(input_ids=torch.tensor(IDS, dtype=torch.long), **patched(torch, images, 8)).logits_per_image
    assert_close(logits(imported, params, images, IDS), theirs, atol=1e-4)


def test_sovit_400m_ignores_pixels_beyond_whole_patches(saved):
    """27 patches of SigLIP So400m/14 cover 378 of 384 pixels; here 2 patches cover 28 of 30 pixels."""
    wide = {"hidden_size": 1152, "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 1}
    config = transformers.SiglipVisionConfig(**wide, image_size=30, patch_size=14)
    model, folder = saved(transformers.SiglipVisionModel(config))
    images = np.random.default_rng(2).integers(0, 256, (2, 30, 30, 3), np.uint8)
    imported, params = load(folder)
    assert imported.image_tower.image_size == 28
    with torch.no_grad():
        theirs = model(normalised(images)).pooler_output.numpy()
    ours = run(imported.image_tower, params["image_tower"], pixels(normalised(images))[:, :28, :28]).embedding
    assert_close(ours, theirs, atol=1e-5 * np.abs(theirs).max())
