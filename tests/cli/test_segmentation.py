"""Both stages of UViM on scenes of glyphs: trained, stopped, resumed, opened; and what does not fit is one line."""

import dataclasses

import numpy as np
import pytest

import lit_het
from lit_het import parameters
from lit_het.cli.main import main
from lit_het.configs import quickstart_upstream, scene_oracle, scene_panoptic
from lit_het.data_pipelines.scenes import SceneConfig, write_scenes
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.errors import UserError
from lit_het.models.opening import open_run
from lit_het.tasks import quantities
from lit_het.tasks.mask_oracle import MaskOracleConfig
from lit_het.tasks.segmentation import SegmentationConfig
from lit_het.towers.oracle_config import CodebookConfig
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.log import read_metrics
from lit_het.training.schedules import Schedule
from lit_het.training.train import train
from tests import tiny
from tests.cli.conftest import last_line, refusal, stop_and_resume
from tests.scripts.conftest import write_config_file


def short(config, root, run_dir):
    """Returns a run of four steps."""
    shards = (str(root / "data" / "train"),)
    return dataclasses.replace(
        config,
        run_dir=run_dir,
        data=dataclasses.replace(config.data, shards=shards, batch_size=8),
        length=Duration(4),
        schedule=Schedule(1e-2, warmup=Duration(1)),
        cadence=Cadence(log_steps=1, save_steps=2),
        evaluations=(),
    )


def stage_1(root, run_dir):
    config = scene_oracle.get_config(root)
    assert isinstance(config.task, MaskOracleConfig)
    blocks = dataclasses.replace(scene_oracle.BLOCKS, width=32, depth=1, mlp_width=32)
    small = dataclasses.replace(
        config.task.oracle, encoder=blocks, decoder=blocks, codebook=CodebookConfig(32, 8, momentum=0.5)
    )
    task = dataclasses.replace(config.task, oracle=small)
    return short(dataclasses.replace(config, task=task), root, run_dir)


def stage_2(root, run_dir):
    config, of_oracle = scene_panoptic.get_config(root), stage_1(root, run_dir).task
    assert isinstance(config.task, SegmentationConfig)
    assert isinstance(of_oracle, MaskOracleConfig)
    oracle = of_oracle.oracle
    task = dataclasses.replace(
        config.task,
        image_tower=dataclasses.replace(config.task.image_tower, encoder=oracle.encoder),
        decoder=dataclasses.replace(
            config.task.decoder, vocabulary_size=33, encoder=dataclasses.replace(oracle.encoder, causal=True)
        ),
        oracle=oracle,
    )
    return short(dataclasses.replace(config, task=task), root, run_dir)


@pytest.fixture(scope="module")
def root(once):
    """A folder of scenes, an oracle that was trained on them, and a model of its codes; tests only read it."""

    def write(folder):
        write_scenes(SceneConfig(num_train=32, num_test=4), folder / "data")
        train(stage_1(folder, folder / "oracle"))
        train(stage_2(folder, folder / "panoptic"))

    return once("cli_segmentation", write)


def saved(run_dir):
    return {path: np.asarray(array) for path, array in parameters.flatten(open_run(run_dir).params).items()}


@pytest.mark.parametrize(("stage", "name"), [(stage_1, "oracle"), (stage_2, "panoptic")])
def test_a_run_stopped_and_resumed_equals_an_uninterrupted_one(root, stage, name, tmp_path, monkeypatch):
    train(stage(root, tmp_path / "whole"))
    stop_and_resume(stage(root, tmp_path / "run"), monkeypatch)
    whole, resumed = saved(tmp_path / "whole"), saved(tmp_path / "run")
    assert whole.keys() == resumed.keys()
    for path, array in whole.items():
        np.testing.assert_array_equal(resumed[path], array, err_msg=path)
    assert read_metrics(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == 4
    assert (root / name).is_dir()


def test_words_followed_the_vectors_of_batches(root):
    book = saved(root / "oracle")
    # Each step adds the 8 x 64 words of a batch to half of those before.
    total = 32.0
    for _ in range(4):
        total = total / 2 + 8 * 64
    # A word that is replaced loses its own count.
    assert total - 2 < book["oracle/codebook/counts"].sum() <= total
    assert book["oracle/codebook/counts"].min() >= 0.1


def test_stage_2_has_the_oracle_of_stage_1_and_predicts_masks(root):
    oracle, panoptic = saved(root / "oracle"), saved(root / "panoptic")
    for path, array in oracle.items():
        np.testing.assert_array_equal(panoptic[path], array, err_msg=path)
    run = open_run(root / "panoptic")
    model, data = run.model(), dataclasses.replace(run.config.data, shards=(str(root / "data" / "test"),))
    (batch,) = Loader(data).epoch(4)
    assert batch.image is not None
    assert batch.masks is not None
    features = np.asarray(model.features.extract(batch.image))
    found = model(quantities.masks, features[None])
    assert found.shape == batch.masks.shape == (4, 64, 64, 2)
    assert found.dtype == np.int32
    assert found.min() >= 0
    assert (found.max(axis=(0, 1, 2)) <= (14, 9)).all()


def test_a_program_gets_the_masks_of_its_images(root):
    run, model = open_run(root / "panoptic"), lit_het.load(root / "panoptic")
    (batch,) = Loader(dataclasses.replace(run.config.data, shards=(str(root / "data" / "test"),))).epoch(4)
    assert batch.image is not None
    predictor = run.model()
    expected = predictor(quantities.masks, np.asarray(predictor.features.extract(batch.image))[None])
    np.testing.assert_array_equal(model.segment(batch.image), expected)
    np.testing.assert_array_equal(model.segment(batch.image[0]), expected[0])
    assert "model of masks" in repr(model)
    for other in (model.encode_images, model.noise):
        with pytest.raises(UserError, match="the model predicts masks, and has neither embeddings nor noise"):
            other(batch.image)


def test_other_models_have_no_masks(upstream):
    with pytest.raises(UserError, match="the model predicts no masks; take a run of panoptic segmentation"):
        lit_het.load(upstream).segment(np.zeros((8, 8, 3), np.uint8))


def test_a_moved_oracle_is_named_by_a_flag(root, capsys, tmp_path):
    config = stage_2(root, tmp_path / "run")
    config = dataclasses.replace(config, task=dataclasses.replace(config.task, oracle_run=tmp_path / "gone"))
    file = write_config_file(config, tmp_path / "config.py")
    assert "gone" in refusal(capsys, "train", "--config", file)
    assert main(["train", "--config", str(file), "--task.oracle-run", str(root / "oracle")]) == 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--task.oracle.codebook.num-words", "16", "--task.decoder.vocabulary-size", "17"),
            "has codebook.num_words = 32, but this configuration has 16",
        ),
        (("--task.oracle.codebook.num-words", "16"), "the oracle has a codebook of 16 words and a start"),
        (("--task.oracle-run", "PANOPTIC_WITHOUT"), "give the directory of a run"),
        (("--data.no-masks",), "set --data.masks, and"),
        (("--task.oracle.num-classes", "13"), "the masks have 14 classes, the oracle has 13"),
        (("--data.image-size", "32", "--task.image-tower.image-size", "32"), "--task.oracle.image-size 64; make"),
    ],
)
def test_a_stage_2_of_another_oracle_or_other_masks_is_refused(root, capsys, tmp_path, flags, message):
    file = write_config_file(stage_2(root, tmp_path / "run"), tmp_path / "config.py")
    assert message in refusal(capsys, "train", "--config", file, *flags)


def test_the_oracle_of_a_model_of_codes_is_that_of_its_stage_1(root, tmp_path):
    config = stage_2(root, tmp_path / "run")
    train(dataclasses.replace(config, task=dataclasses.replace(config.task, oracle_run=root / "panoptic")))
    found = saved(tmp_path / "run")
    for path, array in saved(root / "oracle").items():
        np.testing.assert_array_equal(found[path], array, err_msg=path)


def test_a_run_without_an_oracle_is_refused(root, data, capsys, tmp_path):
    classifier = tiny.classifier(quickstart_upstream.get_config(), data, tmp_path / "classifier")
    tiny.finish_untrained(classifier)
    file = write_config_file(stage_2(root, tmp_path / "run"), tmp_path / "config.py")
    line = last_line(capsys, "train", "--config", file, "--task.oracle-run", tmp_path / "classifier")
    assert "classifier has no oracle; name the run that trained it with --task.oracle-run" in line


def test_an_exported_model_is_complete(root, tmp_path):
    assert (
        main(["export", "--to", "lit-het", "--checkpoint", str(root / "panoptic"), "--output", str(tmp_path / "model")])
        == 0
    )
    found, expected = saved(tmp_path / "model"), saved(root / "panoptic")
    assert found.keys() == expected.keys()
