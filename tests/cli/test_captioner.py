"""A LiT run with a captioner: it classifies, and writes captions too."""

import jax
import numpy as np
import pytest

import lit_het
from lit_het.apps.embed.images import EmbedOptions, embed
from lit_het.configs import quickstart_decoder, quickstart_lit_deterministic
from lit_het.errors import UserError
from lit_het.eval.decoder_suite import WriteCaptionsConfig
from lit_het.eval.evaluation import read_records
from lit_het.eval.sets import ImageSet
from lit_het.objectives.captioner import CaptionerConfig
from lit_het.tasks.captioning import CaptioningConfig
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.schedules import Schedule
from lit_het.training.train import train
from tests import tiny
from tests.cli.conftest import changed, run_command
from tests.cli.tiny_decoder import NAMES, pixels

pytestmark = pytest.mark.slow  # the task has tests of its own
LENGTH = 12  # of the longest name and its end
STEPS = 100


@pytest.fixture(scope="module")
def config(data, upstream, tmp_path_factory):
    """A small LiT run whose captioner learns the names of shapes; tests only read it."""
    folder = tmp_path_factory.mktemp("captioner")
    config = tiny.shrink(quickstart_lit_deterministic.get_config(), data, folder / "run", pretrained=upstream)
    written = tiny.shrink(quickstart_decoder.get_config(), data, folder / "decoder", pretrained=upstream)
    assert isinstance(written.task, CaptioningConfig)
    captioner = CaptionerConfig(changed(written.task.decoder, length=LENGTH, dropout=0.0), weight=2.0)
    images = ImageSet("shapes", str(data / "train"), split=".", labelled=False)
    config = changed(
        config,
        task__text_tower__length=LENGTH,
        task__captioner=captioner,
        tokenizer__length=LENGTH,
        data__prompt="",
        data__batch_size=8,
        length=Duration(STEPS),
        schedule=Schedule(8e-3, warmup=Duration(5)),
        cadence=Cadence(log_steps=50, save_steps=STEPS, evaluate_steps=STEPS),
        evaluations=(WriteCaptionsConfig(images),),
    )
    train(config)
    return config


def test_it_classifies_writes_and_is_saved_as_a_folder_of_weights(config, tmp_path):
    model = lit_het.load(config.run_dir)
    assert "image-text model" in repr(model)
    images = list(pixels(config, 8))
    texts = [texts[0].text for texts in model.caption(images)]
    assert sum(text == name for text, name in zip(texts, NAMES, strict=True)) >= 7
    assert model.ask(images[0], "", NAMES)[0].text == NAMES[0]
    found = model.classify(images[:4], NAMES, samples=0)
    assert len(found) == 4
    model.save_pretrained(tmp_path / "folder")
    again = lit_het.load(tmp_path / "folder").run
    assert again.task.config == changed(model.run.task.config, locked=())
    assert again.config.data.prompt == ""
    jax.tree.map(np.testing.assert_array_equal, again.params, model.run.params)


def test_its_captions_are_evaluated_in_training(config):
    [record] = read_records(config.run_dir)
    assert record.kind == "captioning"
    assert record.figures["exact_match"] > 0.8
    assert "token_p" in record.drawing.arrays


def test_stored_embeddings_have_no_tokens(config, tmp_path):
    folder = str(tmp_path / "embeddings")
    embed(config.run_dir, config, folder, EmbedOptions())
    with pytest.raises(UserError, match=r"--task\.captioner reads images; leave it out"):
        train(changed(config, run_dir=tmp_path / "run", data__embeddings=folder))


def test_noise_is_added_without_the_captioner(config, tmp_path, monkeypatch):
    [shards] = config.data.shards
    monkeypatch.setattr("lit_het.apps.add_noise.LEAST_PAIRS", 8)
    flags = ["--length", "2", "--calibration", "None"]
    with tiny.untrained():
        run_command("add-noise", "--model", config.run_dir, "--data", shards, "--output", tmp_path / "noise", *flags)
    task = lit_het.load(tmp_path / "noise").run.config.task
    assert isinstance(task, ContrastiveConfig)
    assert task.captioner is None


def test_an_export_without_it_says_so(config, tmp_path, capsys):
    run_command("export", "--checkpoint", config.run_dir, "--to", "npz", "--output", tmp_path / "model.npz")
    assert "--to npz leaves out captioner; --to lit-het exports all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("prompt", "length", "message"),
    [
        (None, LENGTH, "set `data.prompt`, '' for no prompt"),
        ("a shape:", LENGTH, "set data.prompt to ''"),
        ("", 99, r"--task\.captioner\.decoder\.length"),
    ],
)
def test_data_that_does_not_suit_it_is_refused(config, tmp_path, prompt, length, message):
    config = changed(config, data__prompt=prompt, task__captioner__decoder__length=length)
    with pytest.raises(UserError, match=message):
        train(changed(config, run_dir=tmp_path / "run"))
