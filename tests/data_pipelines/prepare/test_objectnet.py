import json

import numpy as np
import pytest
from PIL import Image

from lit_het.data_pipelines.prepare.objectnet import read_objectnet
from lit_het.data_pipelines.prepare.writer import write_names
from tests.data_pipelines.conftest import encoded
from tests.data_pipelines.prepare.conftest import labels_of, unpack, write
from tests.refusals import assert_refused

# Lines of the file of names, in an order of their own; the numbers of the lines by label of ImageNet.
LINES = ("analog clock", "digital clock", "sunglasses, dark glasses, shades", "crane", "tray", "crane")
LINE_OF = {"409": 0, "530": 1, "837": 2, "134": 3, "868": 4, "517": 5}
FOLDERS = {"tray": "Tray", "alarm_clock": "Alarm clock", "sewing_kit": "Sewing kit", "sunglasses": "Sunglasses"}
UNIONS = {"Sunglasses": LINES[2], "Alarm clock": "analog clock; digital clock", "Tray": "tray"}


def photo(level: int, size: tuple[int, int] = (7, 6), mode: str = "RGBA") -> bytes:
    """A picture within a red border of two pixels; its columns differ in blue."""
    pixels = np.zeros((size[1], size[0], 3), np.uint8)
    pixels[:, :, 0] = 255
    pixels[2:-2, 2:-2] = level
    pixels[2:-2, 2:-2, 2] = np.arange(size[0] - 4)
    return encoded(Image.fromarray(pixels).convert(mode), "PNG")


def mappings() -> dict[str, bytes]:
    return {
        "folder_to_objectnet_label.json": json.dumps(FOLDERS).encode(),
        "objectnet_to_imagenet_1k.json": json.dumps(UNIONS).encode(),
        "pytorch_to_imagenet_2012_id.json": json.dumps(LINE_OF).encode(),
        "imagenet_to_label_2012_v2": "".join(f"{line}\n" for line in LINES).encode(),
    }


@pytest.fixture
def source(tmp_path):
    """The unpacked archive in small: an image of each class, two of alarm clocks."""
    names = ("tray/a", "alarm_clock/b", "alarm_clock/c", "sewing_kit/d", "sunglasses/e")
    images = {f"images/{name}.png": photo(10 * number) for number, name in enumerate(names, 1)}
    files = {f"mappings/{name}": content for name, content in mappings().items()}
    return unpack({**images, **files}, tmp_path / "objectnet-1.0")


def test_classes_are_unions_of_imagenets_and_images_of_other_classes_are_left_out(tmp_path, source):
    dataset = read_objectnet(source)
    assert dataset.class_names == ("Alarm clock", "Sunglasses", "Tray")
    assert labels_of(dataset, "test") == [0, 0, 1, 2]
    assert dataset.splits["test"].left_out == {"of classes that ImageNet lacks": 1}
    write_names(tmp_path, dataset)
    classes = json.loads((tmp_path / "classes.json").read_text())
    assert classes == {"Alarm clock": [409, 530], "Sunglasses": [837], "Tray": [868]}
    assert (tmp_path / "candidates.txt").read_text().splitlines()[409] == "analog clock"


def test_the_red_border_is_removed_and_every_other_pixel_stays(tmp_path, source):
    samples = write(read_objectnet(source), tmp_path, "test")
    for sample, level in zip(samples, (20, 30, 50, 10), strict=True):
        assert sorted(sample.members) == ["cls", "png"]
        expected = np.full((2, 3, 3), level, np.uint8)
        expected[:, :, 2] = [0, 1, 2]
        np.testing.assert_array_equal(sample.pixels, expected)


def test_a_broken_image_ends_the_run_or_is_left_out(tmp_path, source):
    broken = source / "images" / "tray" / "a.png"
    for content, reason in ((photo(9)[:-30], "damaged PNG"), (photo(9, (4, 4)), "nothing within the border")):
        broken.write_bytes(content)
        assert_refused(
            rf"tray/a\.png: {reason}.*--skip-broken", write, read_objectnet(source), tmp_path / reason, "test"
        )
    assert [sample.label for sample in write(read_objectnet(source), tmp_path, "test", skip_broken=True)] == [0, 0, 1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("objectnet_to_imagenet_1k.json", b"{", "its mappings cannot be read .* unpack the archive again"),
        ("objectnet_to_imagenet_1k.json", b'{"Tray": 3}', "its mappings cannot be read"),
        ("objectnet_to_imagenet_1k.json", b'{"Tray": "a tray"}', r"its mappings cannot be read \('a tray'\)"),
        ("objectnet_to_imagenet_1k.json", b'{"Kite": "crane"}', "its mappings do not fit together"),
        ("folder_to_objectnet_label.json", b"[]", "its mappings cannot be read"),
        ("pytorch_to_imagenet_2012_id.json", b'{"1000": 4, "409": 0, "530": 1, "837": 2}', "do not fit together"),
        ("pytorch_to_imagenet_2012_id.json", b'{"0": 6}', "its mappings cannot be read"),
        ("imagenet_to_label_2012_v2", b"\xff", "its mappings cannot be read"),
    ],
)
def test_mappings_that_are_damaged_are_one_line(source, name, content, message):
    (source / "mappings" / name).write_bytes(content)
    assert_refused(message, read_objectnet, source)


def test_a_source_without_mappings_without_images_or_still_packed_is_refused(tmp_path, source):
    (source / "mappings" / "objectnet_to_imagenet_1k.json").rename(tmp_path / "elsewhere.json")
    assert_refused(r"holds no mappings/objectnet_to_imagenet_1k\.json; name the folder", read_objectnet, source)
    assert_refused("holds no mappings", read_objectnet, source / "images")
    (tmp_path / "elsewhere.json").rename(source / "mappings" / "objectnet_to_imagenet_1k.json")
    (source / "images").rename(tmp_path / "images")
    assert_refused("holds no images of ImageNet's classes", read_objectnet, source)
    (tmp_path / "objectnet-1.0.zip").write_bytes(b"PK\x03\x04")
    assert_refused(
        r"objectnet-1\.0\.zip: unpack it .* and name the folder", read_objectnet, tmp_path / "objectnet-1.0.zip"
    )
