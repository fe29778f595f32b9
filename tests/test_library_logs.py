"""Logs of libraries stay off the console, also of those that set their level or add a handler when imported."""

import subprocess
import sys

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
