"""A LiT run with a captioner: it classifies, and writes captions too."""

import dataclasses

import pytest

import lit_het
from lit_het.cli.main import main
from lit_het.configs import quickstart_decoder, quickstart_lit_deterministic
from lit_het.durations import Duration
from lit_het.errors import UserError
from lit_het.eval.decoder_suite import WriteCaptionsConfig
from lit_het.eval.evaluation import read_records
from lit_het.eval.sets import ImageSet
from lit_het.runs.embedding import EmbedOptions, embed
from lit_het.runs.training import train
from lit_het.schedules import Schedule
from lit_het.tasks.captioner import CaptionerConfig
from lit_het.tasks.captioning import CaptioningConfig
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.training.loop import Cadence
from tests import tiny
from tests.cli.tiny_decoder import NAMES, pixels

LENGTH = 12  # of the longest name and its end


@pytest.fixture(scope="module")
def config(data, upstream, tmp_path_factory):
    """A small LiT run whose captioner learns the names of shapes; tests only read it."""
    folder = tmp_path_factory.mktemp("captioner")
    config = tiny.shrink(quickstart_lit_deterministic.get_config(), data, folder / "run", pretrained=upstream)
    written = tiny.shrink(quickstart_decoder.get_config(), data, folder / "decoder", pretrained=upstream)
    assert isinstance(written.task, CaptioningConfig)
    assert isinstance(config.task, ContrastiveConfig)
    assert config.tokenizer is not None
    captioner = CaptionerConfig(dataclasses.replace(written.task.decoder, length=LENGTH, dropout=0.0), weight=2.0)
    text_tower = dataclasses.replace(config.task.text_tower, length=LENGTH)
    images = ImageSet("shapes", str(data / "train"), split=".", labelled=False)
    config = dataclasses.replace(
        config,
        task=dataclasses.replace(config.task, text_tower=text_tower, captioner=captioner),
        tokenizer=dataclasses.replace(config.tokenizer, length=LENGTH),
        data=dataclasses.replace(config.data, prompt=""),
        length=Duration(150),
        schedule=Schedule(3e-3, warmup=Duration(5)),
        cadence=Cadence(log_steps=50, save_steps=150, evaluate_steps=150),
        evaluations=(WriteCaptionsConfig(images),),
    )
    train(config)
    return config


def test_it_classifies_and_writes(config):
    model = lit_het.load(config.run_dir)
    assert "image-text model" in repr(model)
    images = list(pixels(config, 8))
    texts = [texts[0].text for texts in model.caption(images)]
    assert sum(text == name for text, name in zip(texts, NAMES, strict=True)) >= 7
    assert model.ask(images[0], "", NAMES)[0].text == NAMES[0]
    found = model.classify(images[:4], NAMES, samples=0)
    assert len(found) == 4


def test_its_captions_are_evaluated_in_training(config):
    [record] = read_records(config.run_dir)
    assert record.kind == "captioning"
    assert record.figures["exact_match"] > 0.8
    assert "token_p" in record.drawing.arrays


def test_a_folder_of_weights_writes_the_same(config, tmp_path):
    model = lit_het.load(config.run_dir)
    image = pixels(config, 1)[0]
    model.save_pretrained(tmp_path / "folder")
    assert lit_het.load(tmp_path / "folder").caption(image) == model.caption(image)


def test_stored_embeddings_have_no_tokens(config, tmp_path):
    folder = str(tmp_path / "embeddings")
    embed(config.run_dir, config, folder, EmbedOptions())
    data = dataclasses.replace(config.data, embeddings=folder)
    with pytest.raises(UserError, match=r"--task\.captioner reads images; leave it out"):
        train(dataclasses.replace(config, run_dir=tmp_path / "run", data=data))


def test_noise_is_learned_without_the_captioner(config, tmp_path, monkeypatch):
    [shards] = config.data.shards
    monkeypatch.setattr("lit_het.apps.noise.LEAST_PAIRS", 8)
    flags = ["--length", "2", "--calibration", "None"]
    line = ["add-noise", "--model", str(config.run_dir), "--data", shards, "--output", str(tmp_path / "noise"), *flags]
    assert main(line) == 0
    task = lit_het.load(tmp_path / "noise").run.config.task
    assert isinstance(task, ContrastiveConfig)
    assert task.captioner is None


def test_an_export_without_it_says_so(config, tmp_path, capsys):
    output = tmp_path / "model.npz"
    assert main(["export", "--checkpoint", str(config.run_dir), "--to", "npz", "--output", str(output)]) == 0
    assert "--to npz leaves out captioner; --to lit-het exports all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": None}, "set `data.prompt`, '' for no prompt"),
        ({"prompt": "a shape:"}, "set data.prompt to ''"),
    ],
)
def test_data_that_does_not_suit_it_is_refused(config, tmp_path, changes, message):
    data = dataclasses.replace(config.data, **changes)
    with pytest.raises(UserError, match=message):
        train(dataclasses.replace(config, run_dir=tmp_path / "run", data=data))


def test_a_decoder_of_another_length_is_refused(config, tmp_path):
    decoder = dataclasses.replace(config.task.captioner.decoder, length=99)
    task = dataclasses.replace(config.task, captioner=CaptionerConfig(decoder))
    with pytest.raises(UserError, match=r"--task\.captioner\.decoder\.length"):
        train(dataclasses.replace(config, run_dir=tmp_path / "run", task=task))
