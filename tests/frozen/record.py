"""Records anew what the tests of this folder compare: ``python -m tests.frozen.record [NAME ...]``."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from tests import conftest  # noqa: F401  # pyright: ignore[reportUnusedImport]  # the devices that tests see
from tests.frozen import configurations, exit_codes, files, flags, imports, kept_runs, parameters, report, steps

RECORDERS: Mapping[str, Callable[[], Any]] = {
    "flags": flags.recorded,
    "configurations": configurations.recorded,
    "parameters": parameters.recorded,
    "exit_codes": exit_codes.recorded,
    "imports": imports.recorded,
    "steps": steps.recorded,
    "report": report.recorded,
    "kept_runs": kept_runs.recorded,
}


def main(names: list[str]) -> None:
    """Records what has these names, or everything."""
    for name in names or RECORDERS:
        files.write(name, RECORDERS[name]())


if __name__ == "__main__":
    main(sys.argv[1:])
