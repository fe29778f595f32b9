"""Names of modules of earlier versions."""

import importlib

import pytest

from lit_het.moved import MOVED


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_an_old_name_is_the_new_module(old: str, new: str):
    assert importlib.import_module(f"lit_het.{old}") is importlib.import_module(f"lit_het.{new}")


def test_what_is_in_a_package_has_moved_with_it():
    from lit_het.checkpoints.native import saving as old  # pyright: ignore[reportMissingImports]

    from lit_het.weights.native import saving as new

    assert old is new


def test_another_missing_module_is_missing():
    for name in ("tasks.nothing", "runs.nothing", "checkpoints.nothing"):
        with pytest.raises(ModuleNotFoundError, match=r"lit_het\.\w+\.nothing"):
            importlib.import_module(f"lit_het.{name}")
