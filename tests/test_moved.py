"""Names of modules of earlier versions."""

import functools
import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

from lit_het.errors import UserError
from lit_het.moved import MOVED, RENAMED, SPLIT


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_an_old_name_is_the_new_module(old: str, new: str):
    assert importlib.import_module(f"lit_het.{old}") is importlib.import_module(f"lit_het.{new}")


def test_what_is_in_a_package_has_moved_with_it():
    from lit_het.checkpoints.native import saving as old  # pyright: ignore[reportMissingImports]

    from lit_het.weights.native import saving as new

    assert old is new


def test_a_package_has_the_names_of_the_module_that_had_its_name():
    from lit_het.data_pipelines.images import decode_whole  # pyright: ignore[reportAttributeAccessIssue]
    from lit_het.data_pipelines.images.decoding import decode_whole as new

    assert decode_whole is new
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from lit_het.data_pipelines.images import nothing  # noqa: F401  # pyright: ignore[reportAttributeAccessIssue]


def test_another_missing_module_is_missing():
    for name in ("tasks.nothing", "runs.nothing", "checkpoints.nothing"):
        with pytest.raises(ModuleNotFoundError, match=r"lit_het\.\w+\.nothing"):
            importlib.import_module(f"lit_het.{name}")


@pytest.mark.parametrize(
    "line",
    [
        "from lit_het.checkpoints import weights",
        "from lit_het.tasks.temperature_gradient import TemperatureGradient",
        "from lit_het.data_pipelines.tensorflow_text import TensorFlowTextConfig",
        "from lit_het.tasks.contrastive import ContrastiveConfig, ContrastiveTask",
        "from lit_het.eval.sets import ImageSet, parse_set",
        "from lit_het.api.model import Model, load",
        "from lit_het.api.work import train",
    ],
)
def test_an_import_of_an_earlier_version_finds_its_names(line: str):
    exec(line, {})


def test_the_other_half_of_a_module_is_there():
    for module in SPLIT.items():
        for half in module:
            importlib.import_module(f"lit_het.{half}")


def test_a_module_of_a_package_is_not_searched_elsewhere(monkeypatch: pytest.MonkeyPatch):
    package = importlib.import_module("lit_het.data_pipelines.shards")
    importlib.import_module("lit_het.data_pipelines.shards.stores")
    # Where a module is first imported, the other half would be loaded before it, and import it again.
    monkeypatch.delattr(package, "stores")
    monkeypatch.setattr("lit_het.moved.importlib", SimpleNamespace(import_module=pytest.fail))
    assert not hasattr(package, "stores")


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_import_of_a_renamed_thing_says_what_it_is_now(old: str, new: str):
    module, _, name = old.rpartition(".")
    with pytest.raises(ImportError, match=f"^lit_het.{old} is now lit_het.{new}$"):
        exec(f"from lit_het.{module} import {name}", {})
    of_class = new.split(".")[-2][0].isupper()
    module, *names = new.rsplit(".", 2 if of_class else 1)
    functools.reduce(getattr, names, importlib.import_module(f"lit_het.{module}"))


def test_a_configuration_with_a_renamed_thing_ends_in_one_line(tmp_path: Path):
    from lit_het.configs.experiment import load_module_config

    (tmp_path / "mine.py").write_text("from lit_het.training.step import make_train_step\n\n\ndef get_config(): ...\n")
    with pytest.raises(UserError, match=r"mine.py, line 1: ImportError: .*make_train_step is now .*make_step; fix"):
        load_module_config(tmp_path / "mine.py")
