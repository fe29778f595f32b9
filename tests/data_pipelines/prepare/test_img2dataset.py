import json

import pytest

from lit_het.data_pipelines.prepare.img2dataset import read_img2dataset
from tests.data_pipelines.prepare.conftest import make_image, make_tar, unpack, write
from tests.refusals import assert_refused


@pytest.fixture
def source(tmp_path):
    """Two tars as img2dataset writes them; of the second one's samples two are not whole."""

    def sample(key: str, **changed: bytes | None) -> dict[str, bytes]:
        number = int(key)
        whole = {"jpg": make_image(number), "txt": f"café {number}".encode(), "json": b'{"key": "%d"}' % number}
        members = {**whole, **changed}
        return {f"{key}.{kind}": content for kind, content in members.items() if content is not None}

    sound = make_tar({**sample("000000000"), **sample("000000001")})
    failed = {**sample("000010000", jpg=None), **sample("000010001", txt=b""), **sample("000010002", json=None)}
    files = {"00000.tar": sound, "00001.tar": make_tar(failed), "00000_stats.json": b"{}"}
    return unpack(files, tmp_path / "source")


def test_images_captions_and_metadata_are_kept_and_failed_downloads_left_out_and_counted(tmp_path, source):
    dataset = read_img2dataset(source)
    assert dataset.class_names is None
    assert dataset.splits["train"].left_out == {"no .jpg/jpeg/png/webp": 1, "empty image or caption": 1}
    samples = write(dataset, tmp_path, "train")
    assert [sample.key for sample in samples] == ["s0000000", "s0000001", "s0000002"]
    assert [sample.image for sample in samples] == [make_image(number) for number in (0, 1, 10002)]
    assert [sample.members["txt"].decode() for sample in samples] == ["café 0", "café 1", "café 10002"]
    assert json.loads(samples[1].members["json"]) == {"key": "1"}
    assert sorted(samples[2].members) == ["jpg", "txt"]


def test_patterns_select_tars_and_the_split_has_the_requested_name(source):
    dataset = read_img2dataset(source.parent / "source/0000{0..0}.tar", "val")
    assert dataset.splits["val"].num_samples == 2


def test_a_truncated_tar_and_tars_without_a_complete_sample_are_refused(source, tmp_path):
    data = (source / "00001.tar").read_bytes()
    (source / "00001.tar").write_bytes(data[:1800])
    assert_refused(r"00001\.tar: is truncated or damaged", read_img2dataset, source)
    (tmp_path / "0.tar").write_bytes(make_tar({"1.jpg": b"x", "2.txt": b"x"}))
    assert_refused("none of 2 samples has both image and caption", read_img2dataset, tmp_path)
    (tmp_path / "0.tar").write_bytes(make_tar({"IMG.1.jpg": b"x", "IMG.1.txt": b"x", "IMG.2.jpg": b"x"}))
    assert_refused("none of 2 .*a key ends at the first dot of a name", read_img2dataset, tmp_path)
