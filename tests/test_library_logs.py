"""Logs of libraries stay off the console, also of those that set their level or add a handler when imported."""

import subprocess
import sys

import pytest

from lit_het import library_logs
from tests import tiny

PROGRAM = """
import logging, sys
from lit_het import library_logs
library_logs.silence()
library_logs.silence()
import fsspec, jax
from absl import logging as absl_logging
from huggingface_hub.utils import logging as hub_logging
from orbax import checkpoint
NAMES = "absl", "asyncio", "flax", "grain", "huggingface_hub", "jax", "matplotlib", "orbax", "PIL", "webdataset", "new"
for name in NAMES:
    for logger in (logging.getLogger(name), logging.getLogger(f"{name}.deep.inside")):
        logger.warning("leaked by %s", name)
        logger.error("leaked by %s", name)
absl_logging.warning("leaked by absl itself")
hub_logging.get_logger("huggingface_hub.hub").warning("leaked by its own handler")
logging.warning("leaked by the root")
logging.getLogger("lit_het.data").warning("%s", "shown")
"""


def test_no_library_logs_to_the_console_and_lit_het_does():
    command = [sys.executable, "-c", PROGRAM]
    said = subprocess.run(command, env=tiny.environment(), capture_output=True, text=True, check=True)
    assert (said.stdout, said.stderr) == ("", "lit-het: shown\n")


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ({}, False),
        ({"dev/accel0": ""}, True),
        ({"dev/vfio/0": ""}, True),
        ({"dev/vfio/vfio": ""}, False),
        ({"sys/bus/pci/devices/a/vendor": "0x1ae0\n", "sys/bus/pci/devices/a/class": "0x120000\n"}, True),
        ({"sys/bus/pci/devices/a/vendor": "0x1ae0\n"}, True),  # when in doubt
        ({"sys/bus/pci/devices/a/vendor": "0x1ae0\n", "sys/bus/pci/devices/a/class": "0x020000\n"}, False),
        ({"sys/bus/pci/devices/a/vendor": "0x10de\n", "sys/bus/pci/devices/a/class": "0x030200\n"}, False),
    ],
)
def test_the_chips_of_a_machine_are_never_hidden_from_libtpu(tmp_path, files, found):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert library_logs.may_have_chips(tmp_path) == found
