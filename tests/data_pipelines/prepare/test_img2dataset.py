import json

import pytest

from lit_het.data_pipelines.prepare.img2dataset import read_img2dataset
from lit_het.errors import UserError


@pytest.fixture
def source(tmp_path, make_tar, make_image):
    """Two tars as img2dataset writes them; of the second one's samples two are not whole."""
    folder = tmp_path / "source"
    folder.mkdir()

    def sample(key: str, **changed: bytes | None) -> dict[str, bytes]:
        number = int(key)
        members = {
            "jpg": make_image(number),
            "txt": f"café {number}".encode(),
            "json": b'{"key": "%d"}' % number,
            **changed,
        }
        return {f"{key}.{kind}": content for kind, content in members.items() if content is not None}

    (folder / "00000.tar").write_bytes(make_tar({**sample("000000000"), **sample("000000001")}))
    failed = {**sample("000010000", jpg=None), **sample("000010001", txt=b""), **sample("000010002", json=None)}
    (folder / "00001.tar").write_bytes(make_tar(failed))
    (folder / "00000_stats.json").write_text("{}")
    return folder


def test_images_captions_and_metadata_are_kept(tmp_path, source, make_image, write):
    dataset = read_img2dataset(source)
    assert dataset.class_names is None
    samples = write(dataset, tmp_path, "train")
    assert [sample.key for sample in samples] == ["s0000000", "s0000001", "s0000002"]
    assert [sample.image for sample in samples] == [make_image(number) for number in (0, 1, 10002)]
    assert [sample.members["txt"].decode() for sample in samples] == ["café 0", "café 1", "café 10002"]
    assert json.loads(samples[1].members["json"]) == {"key": "1"}
    assert sorted(samples[2].members) == ["jpg", "txt"]


def test_failed_downloads_are_left_out_and_counted(source):
    expected = {"no .jpg/jpeg/png/webp": 1, "empty image or caption": 1}
    assert read_img2dataset(source).splits["train"].left_out == expected


def test_patterns_select_tars_and_the_split_has_the_requested_name(source):
    dataset = read_img2dataset(source.parent / "source/0000{0..0}.tar", "val")
    assert dataset.splits["val"].num_samples == 2


def test_a_truncated_tar_is_named(source):
    data = (source / "00001.tar").read_bytes()
    (source / "00001.tar").write_bytes(data[:1800])
    with pytest.raises(UserError, match=r"00001\.tar: is truncated or damaged"):
        read_img2dataset(source)


def test_tars_without_a_complete_sample_are_refused(tmp_path, make_tar):
    (tmp_path / "0.tar").write_bytes(make_tar({"1.jpg": b"x", "2.txt": b"x"}))
    with pytest.raises(UserError, match="none of 2 samples has both image and caption"):
        read_img2dataset(tmp_path)
