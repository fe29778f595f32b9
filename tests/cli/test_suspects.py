"""Runs that leave suspects out or weight them: scored, embedded, trained and resumed."""

import dataclasses
import shutil

import numpy as np
import pytest

from lit_het.apps.embed.images import EmbedOptions, embed
from lit_het.cli.main import main
from lit_het.configs.parsing import parse_tower
from lit_het.data_pipelines.shards.suspects import Suspects
from lit_het.errors import UserError
from lit_het.training.directory import checkpoint_dir
from lit_het.training.log import read_metrics
from lit_het.training.train import train
from tests import tiny
from tests.cli.conftest import refusal, write_config_file


@pytest.fixture(scope="module")
def scores(trained_lit, tmp_path_factory):
    table = tmp_path_factory.mktemp("scores") / "scores.csv"
    (shards,) = trained_lit.data.shards
    assert main(["data", "score", str(trained_lit.run_dir), shards, "--output", str(table)]) == 0
    return table


def without_suspects(config, table, run_dir, **changes):
    data = dataclasses.replace(config.data, suspects=Suspects(table, 0.1))
    return dataclasses.replace(config, run_dir=run_dir, data=data, **changes)


@pytest.mark.slow
def test_embeddings_are_those_of_all_samples_whatever_training_leaves_out(trained_lit, scores, tmp_path):
    whole = parse_tower(trained_lit.run_dir)
    configs = {"all": whole, "less": without_suspects(whole, scores, whole.run_dir)}
    for name, config in configs.items():
        embed(trained_lit.run_dir, config, str(tmp_path / name), EmbedOptions())
    files = [path.relative_to(tmp_path / "all") for path in (tmp_path / "all").rglob("*.safetensors")]
    assert files
    for file in files:
        assert (tmp_path / "less" / file).read_bytes() == (tmp_path / "all" / file).read_bytes()


def test_a_run_resumes_with_its_own_suspects_only(trained_lit, scores, tmp_path):
    table = tmp_path / "scores.csv"
    table.write_text(scores.read_text())
    config = without_suspects(trained_lit, table, tmp_path / "run")
    tiny.finish_untrained(config)
    header, *rows = scores.read_text().splitlines(keepends=True)
    table.write_text("".join([header, *reversed(rows)]))
    with pytest.raises(UserError, match=r"or others are left out; restore them and the tables of data\.suspects"):
        train(config, resume=True)
    table.write_text(scores.read_text())
    assert int(train(config, resume=True).step) == config.length.amount


def with_weight(config, table, run_dir, weight):
    """Returns a run in which 40 % of the samples have a weight."""
    return dataclasses.replace(
        config, run_dir=run_dir, data=dataclasses.replace(config.data, suspects=Suspects(table, 0.4, weight))
    )


def losses(run_dir):
    return [record["train/loss"] for record in read_metrics(run_dir / "metrics.jsonl")]


@pytest.mark.slow
def test_a_run_with_weights_resumes_bit_by_bit(trained_lit, scores, tmp_path, capsys):
    config = with_weight(trained_lit, scores, tmp_path / "run", 0.3)
    train(config)
    assert "16 of 40 samples have the weight 0.3 as suspects of" in capsys.readouterr().err
    assert np.abs(np.subtract(losses(config.run_dir), losses(trained_lit.run_dir))).min() > 1e-4
    again = dataclasses.replace(config, run_dir=shutil.copytree(config.run_dir, tmp_path / "again"))
    shutil.rmtree(checkpoint_dir(again.run_dir) / "4")
    train(again, resume=True)
    assert len(losses(config.run_dir)) == 4
    assert losses(again.run_dir) == losses(config.run_dir)


def test_weights_that_cannot_be_are_one_line(trained_lit, scores, tmp_path, capsys):
    file = write_config_file(with_weight(trained_lit, scores, tmp_path / "run", 0.3), tmp_path / "config.py")
    for weight in ("1.0", "-0.1"):
        line = refusal(capsys, "train", "--config", file, "--data.suspects.weight", weight)
        assert (
            line == f"lit-het: --data.suspects.weight {weight} must be below 1 and at least 0, which leaves samples out"
        )
