"""Names of modules of earlier versions."""

import importlib

import pytest

from lit_het.moved import MOVED


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_an_old_name_is_the_new_module(old: str, new: str):
    assert importlib.import_module(old) is importlib.import_module(new)


def test_another_missing_module_is_missing():
    with pytest.raises(ModuleNotFoundError, match=r"lit_het\.tasks\.nothing"):
        importlib.import_module("lit_het.tasks.nothing")
