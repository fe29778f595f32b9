"""``lit-het train`` that also writes down which samples it reads: ``python -m tests.cli.elastic_run``."""

import argparse
import json
import sys
from pathlib import Path
from unittest import mock

from lit_het.cli.main import main
from lit_het.data_pipelines.batches import BatchMaker

_MAKE = BatchMaker.make


def train(arguments: list[str], record: Path) -> int:
    """Trains, and gives ``record`` a line for every batch that was read."""

    def recorded(maker, samples, positions, num_samples):
        if positions is not None:  # not in evaluations
            with record.open("a") as file:
                keys = [sample.key for sample in samples]
                file.write(json.dumps({"positions": list(positions), "keys": keys}) + "\n")
        return _MAKE(maker, samples, positions, num_samples)

    with mock.patch.object(BatchMaker, "make", recorded):
        return main(["train", *arguments])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", type=Path, required=True)
    options, rest = parser.parse_known_args()
    sys.exit(train(rest, options.record))
