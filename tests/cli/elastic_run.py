"""Trains as one of several processes and writes down which samples it read: ``python -m tests.cli.elastic_run``."""

import argparse
import json
from pathlib import Path

import jax

from configs import experiment
from data_pipelines.loader import Loader
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
    read = Loader._read

    def recorded(loader, samples, start):
        with options.record.open("a") as file:
            file.write(json.dumps({"start": start, "keys": [loader.index.key(sample) for sample in samples]}) + "\n")
        return read(loader, samples, start)

    Loader._read = recorded
    train(experiment.load(options.config), resume=options.resume)


if __name__ == "__main__":
    main()
