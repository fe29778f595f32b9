import json
import shutil
import warnings
from pathlib import Path

import pytest
import safetensors.numpy

from tests.weights.importing import GOLDEN, write_json


@pytest.fixture
def edited(tmp_path):
    """Returns a function that copies a recorded folder with other arrays, another configuration and a processor."""

    def edit(name, change=lambda arrays: arrays, processor=None, **config):
        folder = Path(shutil.copytree(GOLDEN / name, tmp_path / "folder"))
        arrays = change(safetensors.numpy.load_file(folder / "model.safetensors"))
        safetensors.numpy.save_file(arrays, folder / "model.safetensors")
        stored = json.loads((folder / "config.json").read_text())
        for field, value in config.items():
            stored[field] = {**stored[field], **value} if isinstance(value, dict) else value
        write_json(folder / "config.json", stored)
        if processor is not None:
            write_json(folder / "preprocessor_config.json", processor)
        return folder

    return edit


@pytest.fixture(scope="session")
def transformers():
    """Returns the library, imported without its warnings, where PyTorch is installed as well."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("torch")
        return pytest.importorskip("transformers")
