import dataclasses
import json

import pytest

from lit_het.configs import experiment, quickstart_lit_het_xl
from lit_het.runs.training import train
from tests import tiny


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return tiny.write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def upstream(data, tmp_path_factory):
    """A trained classifier whose image tower LiT locks."""
    config = tiny.classifier(quickstart_lit_het_xl.get_config(), data, tmp_path_factory.mktemp("runs") / "upstream")
    train(config)
    return config.run_dir


@pytest.fixture
def lit_config(data, upstream, tmp_path):
    """A small LiT experiment with a HET-XL head that writes to a fresh directory."""
    return tiny.shrink(quickstart_lit_het_xl.get_config(), data, tmp_path / "lit", pretrained=upstream)


@pytest.fixture
def config_file(lit_config, tmp_path):
    """The same experiment as a configuration file, for the command line."""
    return write_config_file(lit_config, tmp_path / "lit_config.py")


@pytest.fixture(scope="session")
def trained_lit(data, upstream, tmp_path_factory):
    """A finished LiT run; tests only read it."""
    run_dir = tmp_path_factory.mktemp("runs") / "lit"
    config = tiny.shrink(quickstart_lit_het_xl.get_config(), data, run_dir, pretrained=upstream)
    train(config)
    return config


def write_config_file(config, path):
    saved = path.with_suffix(".json")
    saved.write_text(json.dumps(experiment.to_dict(dataclasses.replace(config))))
    path.write_text(
        "from pathlib import Path\n"
        "from lit_het.configs import experiment\n\n\n"
        f"def get_config():\n    return experiment.load(Path({str(saved)!r}))\n"
    )
    return path
