"""Runs of the version that recorded them are opened, evaluated, exported and resumed by this one."""

import pytest

from tests.frozen import files, kept_runs
from tests.frozen.kept_runs import FORMATS, NAMES, STOPPED, assert_close

pytestmark = pytest.mark.slow  # each opens a run or more
RECORDED = files.read("kept_runs")


@pytest.fixture(autouse=True)
def unpacked(name, tmp_path, monkeypatch):
    """The run, which commands change, and what it reads lie in the working directory."""
    kept_runs.unpack(tmp_path, name)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_predicts_what_was_recorded(name):
    assert_close(RECORDED[name]["predictions"], kept_runs.predictions(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_run_has_the_metrics_that_were_recorded(name):
    assert_close(RECORDED[name]["metrics"], kept_runs.evaluated(name))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", NAMES)
def test_an_export_has_the_files_and_arrays_that_were_recorded(name, form):
    files.compare(RECORDED[name]["exports"][form], kept_runs.exported(name, form))


@pytest.mark.parametrize("name", STOPPED)
def test_a_stopped_run_goes_on_as_if_it_had_not_been_stopped(name):
    assert_close(RECORDED[name]["steps"], kept_runs.resumed(name))
