import argparse
import json

import pytest

from lit_het.configs import experiment, glyph_classifier
from tests import tiny


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return tiny.write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def config_file(data, tmp_path_factory):
    """The glyph classifier, shrunk, as a configuration file."""
    folder = tmp_path_factory.mktemp("config")
    return write_config_file(tiny.shrink(glyph_classifier.get_config(), data, folder / "run"), folder / "tiny.py")


def write_config_file(config, path):
    saved = path.with_suffix(".json")
    saved.write_text(json.dumps(experiment.to_dict(config)))
    path.write_text(
        "from pathlib import Path\n"
        "from lit_het.configs import experiment\n\n\n"
        f"def get_config():\n    return experiment.load(Path({str(saved)!r}))\n"
    )
    return path


def classifier_options(config_file, data, length=None):
    """The flags with which sweeps and comparisons load a classifier."""
    return argparse.Namespace(config=config_file, held_out=data / "train", length=length, batch_size=16)


def refusal(capsys, main, *arguments):
    """Runs a script that must fail with one line, beside progress; returns the line."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 1
    lines = capsys.readouterr().err.strip().splitlines()
    lines = [line for line in lines if not line.startswith(("indexing: ", "study: "))]
    assert len(lines) == 1, lines
    return lines[0]
