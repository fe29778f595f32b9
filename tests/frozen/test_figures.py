"""Losses, gradients and metrics are those that were recorded, but for rounding."""

import contextlib

import pytest

from tests.frozen import files, report, steps
from tests.frozen.figures import compare

pytestmark = pytest.mark.slow
STEPS = files.read("steps")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder for runs on each number of devices, with data and configurations."""
    found = {devices: tmp_path_factory.mktemp(f"steps_{devices}") for devices in (1, 8)}
    for folder in found.values():
        with contextlib.chdir(folder):
            steps.write({name: case["config"] for name, case in STEPS.items()})
    return found


@pytest.mark.parametrize("name", [name for name, case in STEPS.items() if "devices 1" in case])
def test_steps_on_one_device_have_the_figures_that_were_recorded(name, folders, monkeypatch):
    monkeypatch.chdir(folders[1])
    compare(STEPS[name]["devices 1"], steps.figures(name))


@pytest.mark.devices
@pytest.mark.parametrize("name", [name for name, case in STEPS.items() if "devices 8" in case])
def test_steps_on_eight_devices_have_the_figures_that_were_recorded(name, folders, monkeypatch):
    monkeypatch.chdir(folders[8])
    compare(STEPS[name]["devices 8"], steps.figures(name))


def test_a_report_has_the_files_and_figures_that_were_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    compare(files.read("report"), report.figures())
