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
