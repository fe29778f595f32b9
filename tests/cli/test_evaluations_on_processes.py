"""Every evaluation on two processes has the figures of one process with as many devices."""

import json
import shutil
import subprocess
import sys

import numpy as np
import pytest

from lit_het.configs import experiment
from lit_het.eval.decoder_suite import AnswerQuestionsConfig, WriteCaptionsConfig
from lit_het.eval.evaluation import read_records
from lit_het.eval.fits import FewShotOptions, LinearProbeOptions
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import (
    EnsembleConfig,
    FewShotConfig,
    LinearProbeConfig,
    OutOfDistributionConfig,
    RetrievalConfig,
    ShiftConfig,
    ZeroShotConfig,
)
from lit_het.texts import GenerationConfig
from tests import tiny
from tests.cli.conftest import changed, run_command, write_splits

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shapes(data, tmp_path_factory):
    folder = write_splits(data, tmp_path_factory.mktemp("sets") / "shapes", "train", "test")
    run_command("data", "corrupt", folder / "test", folder / "corrupted", "--corruptions", "contrast")
    return folder


@pytest.fixture(scope="module")
def of_images(shapes):
    """The evaluations of an image-text model."""
    images = ImageSet("shapes", str(shapes), batch_size=5)
    fit = LinearProbeOptions((0.1,), (0.0,), epochs=(2,), crops=("whole", "random"), images_per_step=8, minival=0.2)
    return (
        ZeroShotConfig(images, samples=2),
        RetrievalConfig(images),
        FewShotConfig(images, fit=FewShotOptions(shots=(1,), seeds=(0,), l2=(1.0,))),
        LinearProbeConfig(images, fit=fit),
        ShiftConfig(images, str(shapes / "corrupted"), samples=2),
        OutOfDistributionConfig(images, far=(str(shapes / "corrupted/contrast/5"),), samples=2),
        EnsembleConfig(images, samples=2),
    )


@pytest.fixture(scope="module")
def of_texts(decoder):
    """The evaluations of a decoder."""
    [captions], [[questions]] = decoder.data.shards, [each.shards for each in decoder.data.mixture]
    asked = AnswerQuestionsConfig(ImageSet("asked", questions, split="."), figure="exact_match", samples=2)
    return (
        WriteCaptionsConfig(ImageSet("captions", captions, split="."), generation=GenerationConfig(num_texts=2)),
        asked,
    )


def start(folder, commands, devices, place=""):
    path = folder / f"{place[-3:-2] or 'commands'}.json"
    flags = ["--distributed", place] if place else []
    path.write_text(json.dumps([[*map(str, command), *flags] for command in commands]))
    command = [sys.executable, "-m", "tests.cli.commands_run", path]
    return subprocess.Popen(command, env=tiny.environment(devices), stderr=subprocess.PIPE, stdout=subprocess.PIPE)


def evaluated(folder, runs, num_processes):
    """Evaluates copies of runs, and returns the folder."""
    folder.mkdir()
    commands = []
    for name, (run_dir, evaluations) in runs.items():
        shutil.copytree(run_dir, folder / name)
        tiny.edit_config(folder / name, changed(experiment.load(run_dir / "config.json"), evaluations=evaluations))
        commands.append(["evaluate", "--checkpoint", folder / name])
    classifier = experiment.load(folder / "classifier/config.json")
    words = ["--data", f"words={classifier.data.shards[0]}", "--caption-words", "--split", ""]
    commands.append(["zero-shot", "--checkpoint", folder / "classifier", *words])
    tiny.finish_untrained(changed(classifier, run_dir=folder / "other", seed=1))
    commands.append(["ensemble", "--checkpoint", folder / "classifier", folder / "other", *words])
    address = f"localhost:{tiny.free_port()}"
    places = [f"{address},{number}/{num_processes}" for number in range(num_processes)] if num_processes > 1 else [""]
    processes = [start(folder, commands, 4 // num_processes, place) for place in places]
    for process in processes:
        messages = process.communicate(timeout=600)[1].decode()
        assert process.returncode == 0, messages
    return folder


def test_every_evaluation_on_two_processes_has_the_figures_of_one(
    trained_lit, upstream, decoder, of_images, of_texts, tmp_path
):
    """Those within a training, which differ in where their parameters come from, are compared in test_elastic.py."""
    runs = {
        "lit": (trained_lit.run_dir, of_images),
        "classifier": (upstream, of_images[2:3]),
        "decoder": (decoder.run_dir, of_texts),
    }
    one, two = (evaluated(tmp_path / str(count), runs, count) for count in (1, 2))
    for name in runs:
        found, expected = read_records(two / name), read_records(one / name)
        assert len(expected) >= len(runs[name][1])
        for record, other in zip(found, expected, strict=True):
            assert (record.kind, record.figures, record.errors) == (other.kind, other.figures, other.errors)
            assert record.drawing.texts == other.drawing.texts
            for array, values in other.drawing.arrays.items():
                np.testing.assert_array_equal(record.drawing.arrays[array], values, err_msg=array)
