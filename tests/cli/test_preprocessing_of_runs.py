"""Zero-shot evaluation sees images as the run's own preprocessing makes them."""

import dataclasses
import io
import json
import shutil
import tarfile

import numpy as np
import pytest

import lit_het.eval.sets.open_sets
from lit_het.cli.main import main
from lit_het.configs import experiment
from lit_het.data_pipelines.images.transforms import Preprocessing
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ZeroShotConfig
from lit_het.training.durations import Duration
from lit_het.training.train import train
from tests import tiny

OURS, OTHER = Preprocessing(), Preprocessing("crop", 0.5, "bicubic")


@pytest.fixture
def seen(monkeypatch):
    """The pixels that image towers are shown in evaluations, batch by batch."""
    pixels, read = [], lit_het.eval.sets.open_sets.stream_features

    def read_watched(towers, *arguments):
        [tower] = towers

        def extract(view):
            pixels.append(view)
            return tower.extract(view)

        return read([dataclasses.replace(tower, extract=extract)], *arguments)

    monkeypatch.setattr(lit_het.eval.sets.open_sets, "stream_features", read_watched)
    return pixels


def images(data, preprocessing, size):
    """Returns all images of the shards, prepared."""
    files = []
    for shard in sorted((data / "train").glob("*.tar")):
        with tarfile.open(fileobj=io.BytesIO(shard.read_bytes())) as tar:
            files += [file.read() for m in tar if m.name.endswith(".jpg") and (file := tar.extractfile(m))]
    return np.stack([preprocessing.apply(file, size) for file in files])


def test_the_command_prepares_images_as_the_run_did(trained_lit, data, tmp_path, seen):
    figures = []
    for preprocessing in (OURS, OTHER):
        run_dir = shutil.copytree(trained_lit.run_dir, tmp_path / preprocessing.fit)
        config = experiment.load(run_dir / "config.json")
        changed = dataclasses.replace(config.data, preprocessing=preprocessing)
        tiny.edit_config(run_dir, dataclasses.replace(config, data=changed))
        output = tmp_path / f"{preprocessing.fit}.json"
        arguments = ("--checkpoint", run_dir, "--data", data / "train", "--batch-size", 40, "--output", output)
        assert main(["zero-shot", *map(str, arguments)]) == 0
        np.testing.assert_array_equal(seen.pop(), images(data, preprocessing, config.data.image_size))
        assert not seen
        figures.append(json.loads(output.read_text())["zero_shot/train/nll"])
    assert figures[0] != figures[1]


@pytest.mark.slow
@pytest.mark.parametrize("preprocessing", [OURS, OTHER], ids=["squash", "crop"])
def test_evaluations_of_training_prepare_images_as_training_does(lit_config, data, seen, preprocessing):
    changed = dataclasses.replace(lit_config.data, preprocessing=preprocessing)
    shapes = ZeroShotConfig(ImageSet("shapes", str(data / "train"), split=".", batch_size=40))
    config = dataclasses.replace(lit_config, data=changed, evaluations=(shapes,), length=Duration(2))
    train(config)
    expected = images(data, preprocessing, changed.image_size)
    assert seen
    for batch in seen:
        np.testing.assert_array_equal(batch, expected)
