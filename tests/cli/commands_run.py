"""Runs commands of ``lit-het`` in a process that joins the others once: ``python -m tests.cli.commands_run FILE``."""

import json
import sys
from pathlib import Path
from unittest import mock

from lit_het import distributed
from lit_het.cli.main import main

if __name__ == "__main__":
    first, *others = json.loads(Path(sys.argv[1]).read_text())
    code = main(first)
    with mock.patch.object(distributed, "join"):
        for command in others if code == 0 else ():
            code = code or main(command)
    sys.exit(code)
