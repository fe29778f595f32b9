"""Masks of panoptic segmentation: what is stored, what a batch holds, and what is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lit_het.cli.main import main
from lit_het.data_pipelines.data_config import LoaderConfig, Streaming
from lit_het.data_pipelines.images.augment import HorizontalFlip, RandomAffine
from lit_het.data_pipelines.images.transforms import InceptionCrop, Preprocessing, RandomCrop, Training, whole
from lit_het.data_pipelines.labels import ClassIndex
from lit_het.data_pipelines.masks import (
    PIXELS,
    SEGMENTS,
    Masks,
    Segment,
    encode_ids,
    ids_in,
    masks_of,
    nearest,
    parse_categories,
    read_categories,
    segments_in,
)
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.storage import Unreadable
from lit_het.data_pipelines.shards.stream import Stream
from lit_het.data_pipelines.shards.writing import write_shards
from tests.data_pipelines.conftest import FILTERS, encoded
from tests.refusals import assert_refused

ENTRIES = [
    {"id": 7, "name": "cat", "isthing": 1},
    {"id": 3, "name": "dog", "isthing": 1},
    {"id": 90, "name": "sky", "isthing": 0},
]
CATEGORIES = parse_categories(ENTRIES, "categories.json")
IDS = (0, 5, 300, 70_000)  # void, and ids of one, two and three bytes
SEGMENTS_INFO = [
    {"id": 70_000, "category_id": 7, "iscrowd": 0},
    {"id": 5, "category_id": 3, "iscrowd": 1},
    {"id": 300, "category_id": 90},
]
COLOURS = np.array([[20, 20, 20], [240, 30, 30], [30, 220, 40], [40, 60, 250]], np.uint8)
LABELS = np.array([0, 2, 3, 1])  # of IDS


def blocks(height: int, width: int, side: int) -> np.ndarray:
    """The place in IDS of each pixel: squares with random ids."""
    coarse = np.random.default_rng(0).integers(0, len(IDS), (height // side + 1, width // side + 1))
    return coarse.repeat(side, 0).repeat(side, 1)[:height, :width]


def stored(places: np.ndarray, image: bytes, segments: list[dict] | None = None) -> dict[str, Any]:
    ids = np.array(IDS, np.int32)[places]
    return {"jpg": image, PIXELS: encode_ids(ids), SEGMENTS: {"segments_info": segments or SEGMENTS_INFO}}


def write(folder: Path, samples: list[dict[str, Any]], entries: list[dict] | None = None) -> LoaderConfig:
    write_shards(folder, [{"__key__": f"{number:03d}", **members} for number, members in enumerate(samples)])
    (folder / "categories.json").write_text(json.dumps(entries or ENTRIES))
    return LoaderConfig((str(folder),), image_size=32, batch_size=4, masks=True, threads=0, max_bad_fraction=1.0)


def test_ids_of_three_bytes_survive_their_colours():
    ids = np.random.default_rng(0).integers(0, 2**24, (5, 7)).astype(np.int32)
    np.testing.assert_array_equal(ids_in(encode_ids(ids)), ids)
    red_green_blue = encoded(Image.fromarray(np.array([[[1, 2, 3]]], np.uint8)), "PNG")
    assert ids_in(red_green_blue).item() == 1 + 256 * 2 + 256**2 * 3


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
@pytest.mark.parametrize("filter", FILTERS)
@pytest.mark.parametrize("crop", [None, InceptionCrop(0.2, 0.9), RandomCrop(0.7)], ids=str)
def test_a_mask_is_cut_and_mirrored_as_its_image(format, filter, crop):
    places = blocks(300, 420, 60)  # so large that JPEG is decoded at a part of its size
    image = encoded(COLOURS[places], format)
    preprocessing = Preprocessing("crop", 0.9, filter)
    training = Training(preprocessing, crop, (HorizontalFlip(),))
    masks = Masks(CATEGORIES, training, 32)
    members = {"image": image, PIXELS: stored(places, b"")[PIXELS]}
    members[SEGMENTS] = json.dumps({"segments_info": SEGMENTS_INFO}).encode()
    for seed in (None, *range(6)):
        one, same = (None if seed is None else np.random.default_rng(seed) for _ in range(2))
        pixels = training.apply(image, 32, one) if one else preprocessing.apply(image, 32)
        shown = np.abs(pixels[..., None, :].astype(int) - COLOURS).sum(-1).argmin(-1)
        found = masks.read(members, same)[..., 0]
        # At edges the colours are mixed; a mask of another crop, or mirrored, agrees at three of ten pixels.
        assert (LABELS[shown] == found).mean() > 0.88
        assert {*np.unique(found)} <= {*LABELS}


def test_a_mask_takes_the_pixels_that_pillow_takes():
    ids = np.random.default_rng(0).integers(0, 255, (31, 45)).astype(np.int32)
    for box in (whole(31, 45), (3.0, 4.0, 40.0, 27.0), (2.25, 1.5, 33.75, 30.5)):
        for rows, columns in ((16, 16), (60, 20)):
            expected = Image.fromarray(ids).resize((columns, rows), Image.Resampling.NEAREST, box)
            np.testing.assert_array_equal(nearest(ids, (rows, columns), box), expected)


def test_instances_are_numbered_from_the_top_over_all_classes_and_stuff_has_no_number():
    ids = np.zeros((6, 9), np.int32)
    ids[4:, :2], ids[:2, 5:7], ids[:2, 1:3], ids[3] = 5, 70_000, 9, 300
    segments = [Segment(9, 1, False), Segment(70_000, 1, False), Segment(5, 2, True), Segment(300, 3, False)]
    found = masks_of(ids, [*segments, Segment(11, 1, False)], CATEGORIES)  # 11 is outside of the crop
    expected = {0: (0, 0), 9: (1, 1), 70_000: (1, 2), 5: (2, 3), 300: (3, 0)}
    for identifier, pair in expected.items():
        assert {*map(tuple, found[ids == identifier].tolist())} == {pair}
    assert found.dtype == np.int32


def test_training_and_evaluation_read_masks_beside_images_and_labels(tmp_path: Path):
    places = blocks(40, 56, 8)
    members = [stored(places, encoded(COLOURS[places], "PNG")) | {"cls": number % 2} for number in range(6)]
    config = dataclasses.replace(write(tmp_path, members), labels=ClassIndex())
    (tmp_path / "classnames.txt").write_text("a\nb\n")
    config = dataclasses.replace(config, crop=InceptionCrop(0.3), augmentations=(HorizontalFlip(),))
    loader = Loader(dataclasses.replace(config, labels=None))
    assert loader.num_classes == 3
    first, second = (next(one.batches()) for one in (loader, Loader(dataclasses.replace(config, threads=2))))
    assert first.valid.all()
    assert first.masks is not None
    assert first.masks.shape == (4, 32, 32, 2)
    assert second.label is not None
    np.testing.assert_array_equal(first.masks, second.masks)
    of_epoch = next(loader.epoch()).masks
    assert of_epoch is not None
    squashed = of_epoch[0]
    np.testing.assert_array_equal(squashed[..., 0], LABELS[nearest(places, (32, 32), whole(40, 56))])
    streamed = Stream(dataclasses.replace(config, stream=Streaming(4), labels=None, shuffle=True))
    batches = streamed.batches()
    of_stream = next(batches).masks
    assert of_stream is not None
    assert of_stream.shape == (4, 32, 32, 2)
    batches.close()


BAD = {
    "pixels without a segment": {"segments": SEGMENTS_INFO[1:]},
    "unknown category": {"segments": [*SEGMENTS_INFO, {"id": 8, "category_id": 4}]},
    "not a segment": {"segments": [*SEGMENTS_INFO, {"id": 2**24, "category_id": 7}]},
    "two segments": {"segments": [*SEGMENTS_INFO, {"id": 5, "category_id": 7}]},
    "mask of another size": {"image": np.zeros((56, 40, 3), np.uint8)},
}


@pytest.mark.parametrize("cause", BAD)
def test_masks_that_do_not_fit_are_rows_that_are_left_out(tmp_path: Path, cause: str):
    places = blocks(40, 56, 8)
    image = encoded(BAD[cause].get("image", COLOURS[places]), "PNG")
    good = stored(places, encoded(COLOURS[places], "PNG"))
    loader = Loader(write(tmp_path, [good, stored(places, image, BAD[cause].get("segments"))]))
    assert next(loader.epoch()).valid.tolist() == [True, False, False, False]
    assert any(cause in text for text in loader.faults.examples.values())


def test_data_check_lists_masks_that_do_not_fit(tmp_path: Path):
    places = blocks(40, 56, 8)
    image = encoded(COLOURS[places], "PNG")
    write(tmp_path, [stored(places, image), stored(places, image, SEGMENTS_INFO[1:])])
    check = ["data", "check", str(tmp_path), "--output", str(tmp_path / "faults.json")]
    assert main(check) == 0
    assert main([*check, "--masks"]) == 1
    [fault] = json.loads((tmp_path / "faults.json").read_text())
    assert (fault["cause"], fault["count"]) == ("pixels without a segment", 1)
    assert "001: pixels without a segment (no segment has the id 70000)" in fault["example"]


def test_segments_that_are_no_list_of_objects_are_refused():
    for content in (b"[]", b"{}", b'{"segments_info": [1]}', b'{"segments_info": {}}', b"\xff", b'{"segments_info"'):
        with pytest.raises(Unreadable):
            segments_in(content, CATEGORIES)


def test_categories_that_cannot_be_used_are_refused(tmp_path: Path):
    twice = [*ENTRIES, {"id": 7, "name": "cow", "isthing": 1}]
    for entries, message in (
        ({}, "expected a list of categories"),
        ([{"id": 1, "name": "cat"}], r"categories\[0\] needs id"),
        ([{"id": 1, "name": "cat", "isthing": 2}], r"categories\[0\] needs id"),
        (twice, "two categories have one id"),
    ):
        assert_refused(message, parse_categories, entries, "c.json")
    path = tmp_path / "categories.json"
    assert_refused("categories.json: cannot be read .*masks need COCO's list", read_categories, str(path))
    path.write_text("[")
    assert_refused("categories.json: .*write the list of categories as JSON", read_categories, str(path))
    image = encoded(COLOURS[blocks(40, 56, 8)], "PNG")
    one = write(tmp_path / "a", [stored(blocks(40, 56, 8), image)])
    other = write(tmp_path / "b", [stored(blocks(40, 56, 8), image)], ENTRIES[::-1])
    both = dataclasses.replace(one, shards=one.shards + other.shards)
    assert_refused(r"b/categories\.json: differs from .*a/categories\.json", Loader, both)


def test_masks_are_refused_where_their_pixels_would_not_be_those_of_the_image():
    config = LoaderConfig(("a.tar",), masks=True)
    for changes, message in (
        ({"embeddings": "folder"}, "`embeddings` replaces"),
        ({"source": "txt"}, "`source` replaces"),
        ({"augmentations": (HorizontalFlip(), RandomAffine())}, "RandomAffine would move pixels"),
    ):
        assert_refused(message, dataclasses.replace, config, **changes)
