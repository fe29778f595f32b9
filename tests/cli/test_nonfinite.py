"""A run whose loss explodes, from the command line: what it says, what it writes down, and what it keeps."""

import dataclasses
import itertools
import json
import re

import jax
import numpy as np
import pytest

from lit_het.cli.main import main
from lit_het.configs import experiment, glyph_classifier
from lit_het.data_pipelines.labels import ClassIndex
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.models.opening import open_run
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.schedules import Schedule
from tests import tiny

KIND_OF = len(tiny.COLOURS) * len(tiny.SHAPES)


@pytest.fixture
def exploding(data, tmp_path):
    config = tiny.shrink(glyph_classifier.get_config(), data, tmp_path / "run")
    return dataclasses.replace(
        config,
        length=Duration(20),
        schedule=Schedule(learning_rate=1e30, warmup=Duration(2), initial_rate=1e-3),
        data=dataclasses.replace(config.data, labels=ClassIndex()),
        cadence=Cadence(log_steps=1, save_steps=1),
    )


@pytest.mark.slow
def test_the_samples_of_the_batch_are_written_down_and_the_step_before_stays(exploding, data, tmp_path, capsys):
    experiment.save(exploding, tmp_path / "exploding.json")
    assert main(["train", "--config", str(tmp_path / "exploding.json")]) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    found = re.search(r"nonfinite_(\d+)\.json lists its samples", last)
    assert found, last
    step = int(found[1])
    assert step > 1

    told = json.loads((exploding.run_dir / f"nonfinite_{step}.json").read_text())
    (batch,) = itertools.islice(Loader(exploding.data).batches(), step - 1, step)
    rows = exploding.data.batch_size
    assert told["step"] == step
    assert told["positions"] == [(step - 1) * rows, step * rows]
    assert [int(sample["key"]) % KIND_OF for sample in told["samples"]] == np.asarray(batch.label).tolist()
    shards = {sample["shard"] for sample in told["samples"]}
    assert shards <= {str(path) for path in (data / "train").glob("*.tar")}

    opened = open_run(exploding.run_dir)
    assert opened.step == step - 1
    assert all(np.isfinite(array).all() for array in jax.tree.leaves(opened.params))
