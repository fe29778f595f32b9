"""Trains as one of several processes and writes down which samples it read: ``python -m tests.cli.elastic_run``."""

import argparse
import json
from pathlib import Path
from unittest import mock

import jax

from configs import experiment
from data_pipelines.batches import BatchMaker
from lit_het.cli.train import train


def main() -> None:
    """Trains a configuration in the form of JSON; ``--record`` gets a line for every batch that was read."""
    parser = argparse.ArgumentParser()
    parser.add_argument("config", type=Path)
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--process", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--port", type=int)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    if options.processes > 1:
        jax.distributed.initialize(f"localhost:{options.port}", options.processes, options.process)
    make = BatchMaker.make

    def recorded(maker, samples, positions, num_samples):
        if positions is not None:  # not in evaluations
            with options.record.open("a") as file:
                keys = [sample.key for sample in samples]
                file.write(json.dumps({"positions": list(positions), "keys": keys}) + "\n")
        return make(maker, samples, positions, num_samples)

    with mock.patch.object(BatchMaker, "make", recorded):
        train(experiment.load(options.config), resume=options.resume)


if __name__ == "__main__":
    main()
