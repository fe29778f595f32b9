"""A folder's preprocessor_config.json becomes a Preprocessing, and what cannot is said."""

import functools
import io
import warnings

import numpy as np
import pytest
from PIL import Image

from lit_het.data_pipelines.images.transforms import Preprocessing
from lit_het.patches import split
from lit_het.patches_config import Patches
from lit_het.weights.huggingface import image_processors
from lit_het.weights.huggingface.image_towers import FAMILIES
from lit_het.weights.huggingface.processor import CLIP_PROCESSOR, DINO_PROCESSOR, SIGLIP_PROCESSOR, VIT_PROCESSOR

BILINEAR, BICUBIC = 2, 3
SQUARE = {"height": 224, "width": 224}
CROP = {"do_center_crop": True, "resample": BICUBIC}
imported = functools.partial(Preprocessing, transparency="dropped")


@pytest.mark.parametrize(
    ("processor", "expected", "size"),
    [
        ({"size": SQUARE, "resample": BILINEAR}, imported("squash", filter="bilinear"), 224),
        ({"size": {"height": 384, "width": 384}, "resample": BICUBIC}, imported("squash", filter="bicubic"), 384),
        ({**CROP, "size": {"shortest_edge": 224}, "crop_size": SQUARE}, imported("crop", 1.0, "bicubic"), 224),
        ({**CROP, "size": {"shortest_edge": 256}, "crop_size": SQUARE}, imported("crop", 0.875, "bicubic"), 224),
        # Files of before sizes had names.
        ({"size": 224, "resample": BILINEAR}, imported("squash", filter="bilinear"), 224),
        ({**CROP, "size": 256, "crop_size": 224}, imported("crop", 0.875, "bicubic"), 224),
        # What kinds do where nothing is said.
        (VIT_PROCESSOR, imported("squash", filter="bilinear"), 32),
        (SIGLIP_PROCESSOR, imported("squash", filter="bicubic"), 32),
        (CLIP_PROCESSOR, imported("crop", 1.0, "bicubic"), 32),
        (DINO_PROCESSOR, imported("crop", 0.875, "bicubic"), 224),
    ],
)
def test_processors_of_the_known_kinds_are_understood_in_full(processor, expected, size):
    assert image_processors.read(processor, 32) == image_processors.Reading(expected, size, ())


@pytest.fixture(scope="module")
def transformers():
    """Imported where it is used: it takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("transformers")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("siglip_vision_model", "SiglipImageProcessorPil"),
        ("siglip2_vision_model", "Siglip2ImageProcessorPil"),
        ("vit", "ViTImageProcessorPil"),
        ("clip_vision_model", "CLIPImageProcessorPil"),
    ],
)
def test_a_folder_without_a_processor_has_that_of_its_class_in_transformers(transformers, kind, name):
    theirs = getattr(transformers, name)
    for field, value in FAMILIES[kind].processor.items():
        assert np.array_equal(getattr(theirs, field), value), field


@pytest.mark.parametrize(
    ("changes", "remark"),
    [
        ({"do_resize": False}, "do_resize = False, but"),
        ({"resample": 1}, "resample = 1 is not a supported filter; bicubic"),
        ({"resample": {"a": 1}}, "resample = .* is not a supported filter"),
        ({"do_pad": True}, "do_pad = True is not supported"),
        ({"size": {"height": 224, "width": 448}}, "size = .*448.* is not square"),
        ({"size": {"longest_edge": 224}}, "size = .*longest_edge.* is not square"),
        ({"size": {"shortest_edge": 224}}, "do_center_crop = False, but"),
        ({**CROP, "crop_size": 112}, "crop_size = 112 of squashed images"),
        (
            {**CROP, "size": {"shortest_edge": 224}, "crop_size": 256},
            "crop_size = 256 is not a square within 224 pixels",
        ),
        ({**CROP, "size": 224, "crop_size": {"height": 100, "width": 99}}, "crop_size = .*99.* is not a square within"),
    ],
)
def test_unsupported_fields_are_remarked_on(changes, remark):
    reading = image_processors.read({"size": SQUARE, "resample": BILINEAR, **changes}, 224)
    assert len(reading.remarks) == 1
    with pytest.raises(ValueError, match=remark):
        raise ValueError(reading.remarks[0])


@pytest.mark.parametrize(
    "preprocessing",
    [
        imported("squash", filter="bicubic"),
        imported("crop", 1.0, "bilinear"),
        imported("crop", 0.875, "bicubic"),
    ],
)
def test_written_processors_are_read_back(preprocessing):
    processor = image_processors.write(preprocessing, 224)
    assert image_processors.read(processor, 224) == image_processors.Reading(preprocessing, 224, ())


def test_patches_are_written_and_read_back():
    kept = imported("squash", filter="bilinear", patches=Patches(14, 100))
    processor = image_processors.write(kept, 224)
    assert (processor["patch_size"], processor["max_num_patches"]) == (14, 100)
    assert image_processors.read(processor, 224, kept.patches) == image_processors.Reading(kept, 224, ())


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(75, 100), (131, 67), (20, 300), (48, 48)])
def test_patches_are_those_of_transformers(transformers, shape):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8))
    processor = transformers.Siglip2ImageProcessorPil(patch_size=8, max_num_patches=24)
    theirs = processor(image, return_tensors="np")
    patches = Patches(8, 24)
    reading = image_processors.read(processor.to_dict(), 64, patches)
    assert not reading.remarks
    pixels, places = split(reading.preprocessing.apply_to_pixels(np.asarray(image), 64))
    assert places.max(axis=0).tolist() == np.ravel(theirs["spatial_shapes"]).tolist()
    present = places[:, 0] > 0
    np.testing.assert_array_equal(present, np.ravel(theirs["pixel_attention_mask"]))
    np.testing.assert_allclose(pixels[present] / 127.5 - 1, theirs["pixel_values"][0][present], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("ViTImageProcessorPil", {"size": {"height": 64, "width": 64}}),
        ("SiglipImageProcessorPil", {"size": {"height": 64, "width": 64}}),
        ("CLIPImageProcessorPil", {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}}),
        ("BitImageProcessorPil", {"size": {"shortest_edge": 74}, "crop_size": {"height": 64, "width": 64}}),
    ],
)
def test_images_with_transparency_are_those_of_transformers(transformers, kind, fields):
    random = np.random.default_rng(0)
    coarse = Image.fromarray(random.integers(0, 256, (12, 17, 3), np.uint8))
    # Nothing is cut off by half a pixel: their two backends round it differently.
    image, file = coarse.resize((170, 120), Image.Resampling.BICUBIC), io.BytesIO()
    image.putalpha(Image.fromarray(random.integers(0, 256, (120, 170), np.uint8)))
    image.save(file, "png")
    image = transformers.image_utils.load_image(image)  # as its pipelines do
    processor = getattr(transformers, kind)(**fields, do_rescale=False, do_normalize=False)
    theirs = np.moveaxis(np.asarray(processor(image, return_tensors="np")["pixel_values"][0]), 0, -1)
    reading = image_processors.read(processor.to_dict(), 64)
    assert not reading.remarks
    ours = reading.preprocessing.apply(file.getvalue(), 64)
    assert np.abs(ours.astype(np.float64) - theirs).mean() < 0.5
