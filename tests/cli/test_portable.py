"""Folders of ``--to lit-het``: every model leaves, and is opened again with equal outputs."""

import copy
import dataclasses
import pickle
import shutil

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

import lit_het
from lit_het.models.opening import open_run
from lit_het.towers.bert import BertConfig
from lit_het.training.train import train
from lit_het.weights import portable
from lit_het.weights.cards import write_card
from lit_het.weights.native import checksums
from tests import tiny
from tests.cli.conftest import last_line, printed, run_command
from tests.cli.tiny_decoder import NAMES
from tests.refusals import assert_refused

WORDS = [*tiny.COLOURS, *tiny.SHAPES]


def export(run_dir, folder):
    run_command("export", "--checkpoint", run_dir, "--to", "lit-het", "--output", folder)
    return folder


@pytest.fixture(scope="module")
def exported(once_calibrated, tmp_path_factory):
    """A folder of the calibrated run; tests only read it."""
    return export(once_calibrated, tmp_path_factory.mktemp("exported") / "folder")


@pytest.fixture
def image(tmp_path):
    Image.new("RGB", (40, 30), (0, 0, 255)).save(tmp_path / "blue.png")
    return tmp_path / "blue.png"


def answers(capsys, run_dir, image, labels):
    line = ("classify", image, "--checkpoint", run_dir, "--labels", ",".join(labels), "--samples", 8, "--json")
    (found,) = printed(capsys, *line)
    return found


@pytest.mark.parametrize(("name", "labels"), [("once_calibrated", NAMES), ("upstream", WORDS)])
def test_an_exported_folder_answers_as_the_run_with_its_noise_and_calibration(
    capsys, request, image, tmp_path, name, labels
):
    original = request.getfixturevalue(name)
    # Elsewhere, without the run that holds the locked parameters.
    folder = shutil.move(export(original, tmp_path / "folder"), tmp_path / "moved")
    run_command("import", "--from", folder, "--to", tmp_path / "again")
    expected = answers(capsys, original, image, labels)
    assert expected["noise_norm"] > 0
    assert expected["calibrated"] == (name == "once_calibrated")
    for place in (folder, tmp_path / "again"):
        assert answers(capsys, place, image, labels) == expected


def test_a_folder_has_no_path_of_the_machine_one_mode_and_a_card_that_tells_what_the_model_is(exported):
    assert sorted(path.name for path in exported.iterdir()) == sorted([*portable.FILES, "README.md"])
    for name in ("config.json", "calibration.json", "README.md"):
        assert "/tmp" not in (exported / name).read_text()
    assert len({path.stat().st_mode for path in exported.iterdir()}) == 1, "who may read it may read the model"
    card = (exported / "README.md").read_text()
    for text in (
        "library_name: lit-het",
        "head HetXLContrastive",
        "\n\ntrain\n",
        "calibrated on",
        "No licence was given",
    ):
        assert text in card


@pytest.mark.slow
def test_towers_that_no_other_format_has_survive(lit_config, tmp_path):
    encoder = dataclasses.replace(lit_config.task.text_tower.encoder, norm_placement="after", activation="swiglu")
    text = BertConfig(64, 6, lit_config.task.image_tower.embedding_size, encoder)
    with tiny.untrained():
        train(dataclasses.replace(lit_config, task=dataclasses.replace(lit_config.task, text_tower=text)))
    folder = export(lit_config.run_dir, tmp_path / "folder")
    digests = {checksums.digest(open_run(place).params) for place in (lit_config.run_dir, folder)}
    assert len(digests) == 1


def test_a_damaged_folder_is_a_one_line_error(capsys, exported, image, tmp_path):
    folder = shutil.copytree(exported, tmp_path / "folder")
    arrays = load_file(folder / "model.safetensors")
    arrays["text_tower/tokens/embedding"] = np.zeros((3, 3), np.float32)
    save_file(arrays, folder / "model.safetensors")
    classify = ("classify", image, "--checkpoint", folder, "--labels", "a,b")
    assert "text_tower/tokens/embedding has shape (3, 3), not (64, 64)" in last_line(capsys, *classify)
    (folder / "model.safetensors").write_bytes(b"no arrays")
    assert "model.safetensors" in last_line(capsys, *classify)


def test_settings_of_other_formats_and_an_output_that_exists_are_refused(capsys, exported, once_calibrated, tmp_path):
    line = last_line(capsys, "import", "--from", exported, "--to", tmp_path / "run", "--image-size", 64)
    assert "leave out --image-size" in line
    line = last_line(capsys, "export", "--checkpoint", once_calibrated, "--to", "lit-het", "--output", "/")
    assert "is not an empty folder" in line


def test_a_folder_is_read_from_an_address(exported, once_calibrated, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run_command("import", "--from", f"file://{exported}", "--to", tmp_path / "run")
    digests = {checksums.digest(open_run(place).params) for place in (once_calibrated, tmp_path / "run")}
    assert len(digests) == 1


def test_names_in_a_model_card_are_text(upstream):
    card = write_card(open_run(upstream), 'a"|<b>`\n# c', licence=None, library="transformers")
    assert '\n# a"\\|\\<b\\>\\` # c\n' in card
    assert 'model="a\\"|<b>`\\n# c")' in card
    assert "alpha_composite" in card


def test_a_model_that_is_pickled_or_copied_is_one_line(upstream):
    model = lit_het.load(upstream)
    for act in (pickle.dumps, copy.deepcopy):
        assert_refused("load it in each process", act, model)
