"""A run that leaves suspects out: scored, embedded, trained and resumed."""

import dataclasses

import pytest

from lit_het.cli.main import main
from lit_het.data_pipelines.suspects import Suspects
from lit_het.errors import UserError
from lit_het.runs.embedding import EmbedOptions, embed
from lit_het.runs.parsing import parse_tower
from lit_het.runs.training import train


@pytest.fixture(scope="module")
def scores(trained_lit, tmp_path_factory):
    table = tmp_path_factory.mktemp("scores") / "scores.csv"
    (shards,) = trained_lit.data.shards
    assert main(["data", "score", str(trained_lit.run_dir), shards, "--output", str(table)]) == 0
    return table


def without_suspects(config, table, run_dir, **changes):
    data = dataclasses.replace(config.data, suspects=Suspects(table, 0.1))
    return dataclasses.replace(config, run_dir=run_dir, data=data, **changes)


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
    train(config)
    header, *rows = scores.read_text().splitlines(keepends=True)
    table.write_text("".join([header, *reversed(rows)]))
    with pytest.raises(UserError, match="or others are left out; restore them and the table of suspects"):
        train(config, resume=True)
    table.write_text(scores.read_text())
    assert int(train(config, resume=True).step) == config.length.amount
