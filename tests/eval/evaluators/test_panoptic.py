"""The evaluator of panoptic segmentation, on shards with masks."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from lit_het.data_pipelines.images.decoding import encode_jpeg
from lit_het.data_pipelines.images.transforms import Preprocessing
from lit_het.data_pipelines.masks import PIXELS, SEGMENTS, encode_ids, parse_categories
from lit_het.data_pipelines.scenes import SceneConfig, draw_scene, scene_categories
from lit_het.data_pipelines.shards.writing import write_shards
from lit_het.eval.evaluation import read_records, write_record
from lit_het.eval.metrics.panoptic import TrueSegments, counts, figures
from lit_het.eval.report.masks import drawn_masks, overlaid
from lit_het.eval.sets import ImageSet
from lit_het.eval.sets.open_sets import Sets
from lit_het.eval.suite import PanopticConfig
from lit_het.types import ImageFeatures
from tests.eval.fake_model import FakeModel
from tests.refusals import assert_refused

SIZE = 32
CATEGORIES = parse_categories(scene_categories(), "categories.json")
CONFIG = SceneConfig(64, crowd_fraction=0.5)
SCENES = [draw_scene(CONFIG, np.random.default_rng(number)) for number in range(7)]


def predicted(number: int) -> np.ndarray:
    """Masks at the size of the model: those of the scene, where a left half of the odd ones is void."""
    _, ids, segments = SCENES[number]
    found = np.zeros((SIZE, SIZE, 2), np.int32)
    for instance, segment in enumerate(segments, 1):
        label = CATEGORIES.classes[segment["category_id"]]
        found[ids[1::2, 1::2] == segment["id"]] = (label, instance if label <= 10 else 0)
    if number % 2:
        found[:, : SIZE // 2] = 0
    return found


@pytest.fixture
def scenes(tmp_path: Path) -> ImageSet:
    samples = [
        {
            "__key__": f"{number:03d}",
            "jpg": encode_jpeg(np.full_like(pixels, 30 * number)),
            PIXELS: encode_ids(ids),
            SEGMENTS: {"segments_info": segments},
        }
        for number, (pixels, ids, segments) in enumerate(SCENES)
    ]
    write_shards(tmp_path / "scenes" / "test", samples, samples_per_shard=4)
    (tmp_path / "scenes" / "categories.json").write_text(json.dumps(scene_categories()))
    return ImageSet("scenes", str(tmp_path / "scenes"), batch_size=4)


@pytest.fixture
def model() -> FakeModel:
    """Its feature of an image is the number in its pixels."""

    def extract(view: np.ndarray) -> np.ndarray:
        return np.round(view[:, 5, 5, :1] / 30).astype(np.float32)

    def masks(features: np.ndarray) -> np.ndarray:
        return np.stack([predicted(int(number)) for number in features[:, 0]])

    tower = ImageFeatures(extract, num_members=1, num_shards=1, tower="a tower")
    return FakeModel(tower, lambda *_: np.zeros(0), masks=masks, mask_classes=14)


def opened_sets() -> Sets:
    return Sets(SIZE, Preprocessing(), lambda: "a tower")


def expected() -> dict[str, float]:
    """The figures of the metric by itself, where each pixel of a prediction becomes four."""
    by_image = []
    for number, (_, ids, segments) in enumerate(SCENES):
        segments = sorted(segments, key=lambda segment: segment["id"])
        places = np.zeros(ids.shape, np.int64)
        for place, segment in enumerate(segments, 1):
            places[ids == segment["id"]] = place
        labels = np.array([CATEGORIES.classes[segment["category_id"]] for segment in segments])
        truth = TrueSegments(places, labels, np.array([segment["iscrowd"] == 1 for segment in segments]))
        by_image.append(counts(truth, predicted(number).repeat(2, 0).repeat(2, 1), 14))
    return figures(np.array(by_image), np.array(CATEGORIES.are_things))[0]


def test_masks_are_scored_at_the_size_of_the_true_ones(scenes: ImageSet, model: FakeModel):
    config = PanopticConfig(scenes, shown=3)
    evaluator = config.build(opened_sets())
    evaluator.check(model)
    found = evaluator(model)
    assert found.figures == pytest.approx(expected())
    assert 0.3 < found.figures["pq"] < 0.9
    assert found.errors["stuff/pq"] > 0
    assert found.metrics()["panoptic/scenes/things/rq"] == found.figures["things/rq"]


def test_stuff_is_one_segment_whatever_numbers_a_model_gives_it(scenes: ImageSet, model: FakeModel):
    def numbered(features: np.ndarray) -> np.ndarray:
        masks = model.masks(features)
        is_stuff = (masks[..., 0] > 10)[..., None] & [False, True]
        return np.where(is_stuff, 1 + np.indices(masks.shape)[1] // 8, masks)

    found = PanopticConfig(scenes).build(opened_sets())(dataclasses.replace(model, masks=numbered))
    assert found.figures == pytest.approx(expected())


def test_of_several_crowds_the_last_in_json_is_ignored_whatever_the_ids(scenes: ImageSet, model: FakeModel, tmp_path):
    ids = np.full((64, 64), 101, np.int32)
    ids[:32], ids[32:48] = 9, 5
    # All that is predicted lies in crowd 9.
    stuff = {"id": 101, "category_id": 104, "iscrowd": 0}
    crowds = [{"id": one, "category_id": 1, "iscrowd": 1} for one in (9, 5)]
    wrong = {}
    for name, segments in (("last", [stuff, *crowds[::-1]]), ("before", [stuff, *crowds])):
        sample = {PIXELS: encode_ids(ids), SEGMENTS: {"segments_info": segments}}
        image = encode_jpeg(np.zeros((64, 64, 3), np.uint8))
        write_shards(tmp_path / "scenes" / name, [{"__key__": "a", "jpg": image, **sample}])
        predicted = np.zeros((1, SIZE, SIZE, 2), np.int32)
        predicted[:, :12] = 1, 1
        found = PanopticConfig(dataclasses.replace(scenes, split=name)).build(opened_sets())(
            dataclasses.replace(model, masks=lambda features, predicted=predicted: predicted)
        )
        wrong[name] = found.draw().arrays["found"][0, 1]
    assert wrong == {"last": 0, "before": 1}


def test_other_batches_and_devices_give_the_same_figures(scenes: ImageSet, model: FakeModel):
    one = PanopticConfig(scenes).build(opened_sets())(model)
    split = dataclasses.replace(model, features=dataclasses.replace(model.features, num_shards=2))
    other = PanopticConfig(dataclasses.replace(scenes, batch_size=3)).build(opened_sets())(split)
    assert one.figures == other.figures
    assert one.errors == other.errors


def test_the_page_shows_masks_over_images_and_the_figures_of_classes(scenes: ImageSet, model: FakeModel, tmp_path):
    found = PanopticConfig(scenes, shown=3).build(opened_sets())(model)
    write_record(found, tmp_path, 5, {})
    [record] = read_records(tmp_path)
    arrays = record.drawing.arrays
    assert arrays["image"].shape == (3, SIZE, SIZE, 3)
    assert record.drawing.texts["keys"] == ["000", "003", "006"]
    np.testing.assert_array_equal(arrays["predicted"][1], predicted(3))
    masks, classes = drawn_masks([("scenes", record)])
    assert masks.count("<figure>") == 9
    assert "000: " in masks
    assert "square" in classes
    assert "chess knight" in classes
    assert "–" in classes or not np.isnan(arrays["quality"]).any()


def test_instances_have_outlines_inside_of_them_and_void_keeps_its_pixels():
    image, masks = np.full((2, 4, 3), 100, np.uint8), np.zeros((2, 4, 2), np.int32)
    masks[:, :2] = 3, 1
    masks[:, 2] = 3, 2
    shown = overlaid(image, masks)
    side = shown.shape[1] // 4
    assert side == 80
    white = (shown == 255).all(-1)
    assert (shown[:, 3 * side :] == 100).all()
    assert white[:, [2 * side - 1, 2 * side, 3 * side - 1]].all()
    assert white.sum() == 3 * 2 * side
    assert len(np.unique(shown[:, : 3 * side][~white[:, : 3 * side]], axis=0)) == 1


def test_models_and_sets_that_do_not_fit_are_refused(scenes: ImageSet, model: FakeModel):
    evaluator = PanopticConfig(scenes).build(opened_sets())
    without = dataclasses.replace(model, mask_classes=None)
    assert_refused("the model predicts no masks; take a run of panoptic", evaluator.check, without)
    others = dataclasses.replace(model, mask_classes=133)
    assert_refused("scenes: has 14 categories, and the model predicts masks of 133", evaluator.check, others)
    cropping = Sets(SIZE, Preprocessing("crop"), lambda: "a tower")
    assert_refused("masks are predicted of whole images", PanopticConfig(scenes).build, cropping)
    assert_refused("PanopticConfig: shown = 0", PanopticConfig, scenes, 0)


def test_a_set_whose_masks_cannot_be_read_is_refused(scenes: ImageSet, model: FakeModel, tmp_path: Path):
    pixels, ids, _ = SCENES[0]
    sample = {"__key__": "a", "jpg": encode_jpeg(0 * pixels), PIXELS: encode_ids(ids), SEGMENTS: {"segments_info": []}}
    write_shards(tmp_path / "scenes" / "bad", [sample])
    bad = PanopticConfig(dataclasses.replace(scenes, split="bad")).build(opened_sets())
    assert_refused("scenes: image 0: pixels without a segment .*prepare the set again", bad, model)
    write_shards(tmp_path / "scenes" / "none", [{"__key__": "a", "jpg": sample["jpg"]}])
    none = PanopticConfig(dataclasses.replace(scenes, split="none")).build(opened_sets())
    assert_refused(r"none.*: a: .*prepare the set again", none, model)
