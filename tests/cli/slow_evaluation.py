"""A command of ``lit-het`` whose batches take half a second each: ``python -m tests.cli.slow_evaluation COMMAND``."""

import sys
import time
from unittest import mock

from lit_het.cli.main import main
from lit_het.data_pipelines.batches import BatchMaker

_MAKE = BatchMaker.make


def _slowly(*arguments):
    print("reading", flush=True)
    time.sleep(0.5)
    return _MAKE(*arguments)


if __name__ == "__main__":
    with mock.patch.object(BatchMaker, "make", _slowly):
        sys.exit(main(sys.argv[1:]))
