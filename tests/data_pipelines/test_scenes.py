"""Scenes of glyphs: their masks describe what is drawn, in COCO's form."""

import json
from pathlib import Path

import numpy as np

from lit_het.cli.main import main
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.masks import PIXELS, SEGMENTS, ids_in, read_categories
from lit_het.data_pipelines.scenes import STUFF, THINGS, SceneConfig, draw_scene, write_scenes
from lit_het.data_pipelines.shards.index import ShardIndex
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.storage import content_or_raise
from lit_het.data_pipelines.shards.writing import expand
from tests.refusals import assert_refused

SMALL = SceneConfig(num_train=12, num_test=4)


def test_segments_are_those_of_the_pixels_with_their_areas_and_boxes():
    crowds = unlabelled = 0
    for seed in range(200):
        _, ids, segments = draw_scene(SceneConfig(crowd_fraction=0.3), np.random.default_rng(seed))
        assert {*np.unique(ids)} - {0} == {segment["id"] for segment in segments}
        for segment in segments:
            rows, columns = np.nonzero(ids == segment["id"])
            left, top, width, height = segment["bbox"]
            assert (left, top) == (columns.min(), rows.min())
            assert (left + width - 1, top + height - 1) == (columns.max(), rows.max())
            assert segment["area"] == len(rows) >= 20
        crowds += sum(segment["iscrowd"] for segment in segments)
        unlabelled += (ids == 0).sum() > 100
    assert 40 < crowds < 80
    assert 10 < unlabelled < 40


def test_stuff_has_one_segment_of_its_kind_and_things_have_one_for_each_instance():
    most = 0
    for seed in range(50):
        _, _, segments = draw_scene(SMALL, np.random.default_rng(seed))
        kinds = [segment["category_id"] for segment in segments]
        assert all(kinds.count(kind) == 1 for kind in kinds if kind > 100)
        most = max(most, *(kinds.count(kind) for kind in kinds if kind < 100), 0)
    assert most > 1  # instances of one kind in one image


def test_a_command_writes_scenes_that_the_loader_reads(tmp_path: Path):
    assert main(["data", "scenes", str(tmp_path), "--train", "12", "--test", "4", "--size", "48"]) == 0
    categories = read_categories(f"{tmp_path}/categories.json")
    assert len(categories) == len(THINGS) + len(STUFF)
    assert categories.are_things == (True,) * 10 + (False,) * 4
    assert categories.names[:4] == ("square", "circle", "up-pointing triangle", "star")
    batch = next(Loader(LoaderConfig((f"{tmp_path}/train",), 48, 12, masks=True, threads=0)).epoch())
    assert batch.valid.all()
    assert batch.image is not None
    assert batch.masks is not None
    assert batch.image.shape == (12, 48, 48, 3)
    things = np.isin(batch.masks[..., 0], np.arange(1, 11))
    np.testing.assert_array_equal(batch.masks[..., 1] > 0, things)
    index = ShardIndex(expand(f"{tmp_path}/train"), [PIXELS, SEGMENTS])
    pixels, segments = map(content_or_raise, index.read([0], [PIXELS, SEGMENTS])[0])
    assert {*np.unique(ids_in(pixels))} - {0} == {entry["id"] for entry in json.loads(segments)["segments_info"]}
    assert_refused("holds shard-.*shards already", write_scenes, SMALL, tmp_path)


def test_equal_configurations_give_equal_bytes_and_more_images_the_same_first_ones(tmp_path: Path):
    for name in ("a", "b"):
        write_scenes(SMALL, tmp_path / name)
    assert (tmp_path / "a/train/shard-000000.tar").read_bytes() == (tmp_path / "b/train/shard-000000.tar").read_bytes()
    write_scenes(SceneConfig(num_train=5, num_test=1), tmp_path / "c")
    pair = [next(Loader(LoaderConfig((f"{tmp_path}/{name}/train",), 64, 4, threads=0)).epoch()) for name in "ac"]
    assert pair[0].image is not None
    np.testing.assert_array_equal(pair[0].image, pair[1].image)
    other, _, _ = draw_scene(SMALL, np.random.default_rng([1, 0, 0]))
    assert not np.array_equal(pair[0].image[0], other)
