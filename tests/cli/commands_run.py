"""Runs commands of ``lit-het`` in a process that joins the others once: ``python -m tests.cli.commands_run FILE``."""

import functools
import json
import sys
from pathlib import Path
from unittest import mock

from lit_het import distributed
from lit_het.cli.main import main

if __name__ == "__main__":
    with mock.patch.object(distributed, "join", functools.cache(distributed.join)):
        for command in json.loads(Path(sys.argv[1]).read_text()):
            if code := main(command):
                sys.exit(code)
