"""Records anew what the tests of this folder compare: ``python -m tests.frozen.record [NAME ...]``."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from tests import conftest  # noqa: F401  # pyright: ignore[reportUnusedImport]  # the devices that tests see
from tests.frozen import files, report, steps

RECORDERS: Mapping[str, Callable[[], Any]] = {"steps": steps.recorded, "report": report.recorded}


def main(names: list[str]) -> None:
    """Records what has these names, or everything."""
    for name in names or RECORDERS:
        files.write(name, RECORDERS[name]())


if __name__ == "__main__":
    main(sys.argv[1:])
