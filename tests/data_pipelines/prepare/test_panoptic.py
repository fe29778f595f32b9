"""COCO's files of panoptic segmentation become shards with masks."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lit_het.cli.main import main
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.images.decoding import decode_whole, encode_jpeg
from lit_het.data_pipelines.masks import PIXELS, SEGMENTS, encode_ids, ids_in
from lit_het.data_pipelines.prepare.panoptic import read_coco_panoptic
from lit_het.data_pipelines.scenes import SceneConfig, draw_scene, scene_categories
from lit_het.data_pipelines.shards.loader import Loader
from tests.data_pipelines.prepare.conftest import changed, make_zip, unpack, write, written
from tests.refusals import assert_refused

SCENES = [draw_scene(SceneConfig(crowd_fraction=1.0), np.random.default_rng(seed)) for seed in range(3)]
NAMES = ("000000000139", "000000000285", "000000000632")
JPEGS = {f"val2017/{name}.jpg": encode_jpeg(pixels) for name, (pixels, _, _) in zip(NAMES, SCENES, strict=True)}
PNGS = {f"panoptic_val2017/{name}.png": encode_ids(ids) for name, (_, ids, _) in zip(NAMES, SCENES, strict=True)}
CONTENT = {
    "info": {},
    "images": [
        {"id": int(name), "file_name": f"{name}.jpg", "height": 64, "width": 64} for name in (*NAMES, "000000000724")
    ],
    "annotations": [
        {"image_id": int(name), "file_name": f"{name}.png", "segments_info": segments}
        for name, (_, _, segments) in zip(NAMES, SCENES, strict=True)
    ],
    "categories": scene_categories(),
}


def make(folder: Path, content: object = CONTENT, jpegs: dict = JPEGS, pngs: dict = PNGS) -> Path:
    unpack({**jpegs, **{f"annotations/{name}": png for name, png in pngs.items()}}, folder)
    return unpack({"panoptic_val2017.json": json.dumps(content).encode()}, folder / "annotations") / (
        "panoptic_val2017.json"
    )


def test_shards_have_the_published_bytes_and_the_loader_reads_them(tmp_path: Path):
    source = make(tmp_path / "coco")
    command = ["data", "prepare", "coco-panoptic", str(source), str(tmp_path / "out")]
    assert main([*command, "--images", str(tmp_path / "coco" / "val2017")]) == 0
    samples = written(tmp_path / "out" / "val")
    assert [sample.key for sample in samples] == [*NAMES]
    for name, sample, (_, ids, segments) in zip(NAMES, samples, SCENES, strict=True):
        assert sample.image == JPEGS[f"val2017/{name}.jpg"]
        assert sample.members[PIXELS] == PNGS[f"panoptic_val2017/{name}.png"]
        np.testing.assert_array_equal(ids_in(sample.members[PIXELS]), ids)
        assert json.loads(sample.members[SEGMENTS]) == {"segments_info": segments}
        assert any(segment["iscrowd"] for segment in segments)
    loader = Loader(LoaderConfig((f"{tmp_path}/out/val",), 64, 3, masks=True, threads=0))
    assert loader.num_classes == 14
    assert next(loader.epoch()).valid.all()


def test_masks_and_images_may_be_zip_archives(tmp_path: Path):
    source = make(tmp_path, pngs={})
    assert_refused("panoptic_val2017.zip is not beside it", read_coco_panoptic, source, tmp_path)
    unpack({"panoptic_val2017.zip": make_zip(PNGS)}, source.parent)
    images = unpack({"images.zip": make_zip(JPEGS)}, tmp_path) / "images.zip"
    dataset = read_coco_panoptic(source, tmp_path, images=images)
    assert dataset.splits["val"].left_out == {"without masks": 1}
    assert dataset.splits["val"].published == 5_000
    samples = write(dataset, tmp_path / "out", "val")
    assert [sample.members[PIXELS] for sample in samples] == [*PNGS.values()]
    elsewhere = source.with_suffix(".zip").rename(tmp_path / "masks.zip")
    again = read_coco_panoptic(source, tmp_path, images=images, masks=elsewhere)
    assert again.splits["val"].fingerprint == dataset.splits["val"].fingerprint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (changed(CONTENT, "annotations.1.image_id", 8), r"annotations\[1\]: has the unknown image 8"),
        (changed(CONTENT, "annotations.1.image_id", 139), r"annotations\[1\]: is of the same image as .*tions\[0\]"),
        (changed(CONTENT, "annotations.1.file_name", "x.png"), r"holds no x\.png, which .*annotations\[1\] lists"),
        (changed(CONTENT, "annotations.1.segments_info", None), r"annotations\[1\]: has no 'segments_info'"),
        (changed(CONTENT, "annotations.1.segments_info.0.category_id", 55), r"\[1\]: unknown category .*category 55"),
        (changed(CONTENT, "annotations.1.segments_info.0.id", "7"), r"annotations\[1\]: not a segment"),
        (changed(CONTENT, "categories.0.isthing", None), r"categories\[0\] needs id .*, name .* and isthing"),
        (changed(CONTENT, "images.0.file_name", "no.jpg"), r"holds no no\.jpg, which .*annotations\[0\] lists"),
        (changed(CONTENT, "categories", None), r"has no 'categories'"),
    ],
)
def test_a_json_file_that_is_none_of_cocos_is_refused(tmp_path: Path, content, message):
    source = make(tmp_path, content)
    assert_refused(message, read_coco_panoptic, source, tmp_path, images=tmp_path / "val2017")


FIRST = f"panoptic_val2017/{NAMES[0]}.png"


@pytest.mark.parametrize(
    ("content", "pngs", "message"),
    [
        (changed(CONTENT, "annotations.0.segments_info.0", None), {}, "has pixels of the id .* segments_info lacks"),
        (CONTENT, {FIRST: encode_ids(np.zeros((64, 64), np.int32))}, "has no pixel of the id .* segments_info has"),
        (CONTENT, {FIRST: encode_ids(np.zeros((64, 60), np.int32))}, r"differs in size .*60 x 64 and 64 x 64 pixels"),
        (CONTENT, {FIRST: b"none"}, "not an image"),
    ],
)
def test_a_png_that_disagrees_with_json_or_image_is_refused(tmp_path: Path, content, pngs, message):
    source = make(tmp_path, content, pngs={**PNGS, **pngs})
    dataset = read_coco_panoptic(source, tmp_path, images=tmp_path / "val2017")
    assert_refused(f"{NAMES[0]}.png: {message}", write, dataset, tmp_path / "out", "val")


@pytest.mark.parametrize("turn", range(2, 9))
@pytest.mark.parametrize("width", [48, 64])
def test_masks_are_turned_as_exif_turns_their_image(tmp_path: Path, turn: int, width: int):
    _, ids, segments = SCENES[0]
    # The picture shows the mask, so that both can be compared.
    shown = np.where(ids == ids[0, 0], 255, 0).astype(np.uint8)[:, :width, None].repeat(3, axis=2)
    exif, image = Image.Exif(), io.BytesIO()
    exif[0x0112] = turn
    Image.fromarray(shown).save(image, "JPEG", quality=100, exif=exif)
    present = {*np.unique(ids[:, :width]).tolist()}
    content = changed(CONTENT, "annotations.0.segments_info", [one for one in segments if one["id"] in present])
    png = encode_ids(ids[:, :width])
    source = make(tmp_path, content, {**JPEGS, f"val2017/{NAMES[0]}.jpg": image.getvalue()}, {**PNGS, FIRST: png})
    [sample, *_] = write(read_coco_panoptic(source, tmp_path, images=tmp_path / "val2017"), tmp_path / "out", "val")
    found = ids_in(sample.members[PIXELS])
    upright = decode_whole(sample.image)[..., 0] > 127
    np.testing.assert_array_equal(found == ids[0, 0], upright)
    assert not np.array_equal(found, ids[:, :width])


def test_the_name_of_the_file_tells_the_split_and_other_categories_are_another_set(tmp_path: Path):
    source = make(tmp_path)
    other = source.with_name("panoptic.json")
    assert_refused("its name is not that of a published file", read_coco_panoptic, other, tmp_path)
    assert_refused("has no split 'train', only val", read_coco_panoptic, source, tmp_path, "train")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "categories.json").write_text("[]")
    images = ["--images", str(tmp_path / "val2017")]
    assert main(["data", "prepare", "coco-panoptic", str(source), str(tmp_path / "out"), *images]) == 1
