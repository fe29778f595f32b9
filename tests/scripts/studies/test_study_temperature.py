"""The study of temperatures: its runs can be built, and its tables follow from the figures."""

import argparse
import dataclasses
import functools

import pytest

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.heads.temperature import BoundedTemperature, FixedTemperature
from scripts.studies import study_temperature
from scripts.studies.temperature import methods, parts
from scripts.studies.temperature.data import ALL, FIT, TEST, VALIDATION
from scripts.studies.temperature.runs import BATCH_SIZE, Row, Runner

COUNTS = {FIT: 15_000, VALIDATION: 1_000, ALL: 16_000, TEST: 1_000}


# A search builds the same model for every fixed τ.
@functools.cache
def build(task):
    return task.build()


def with_temperature(task, temperature):
    return dataclasses.replace(task, head=dataclasses.replace(task.head, temperature=temperature))


class Recorder(Runner):
    """Builds the runs and trains none; the NLL is the distance of τ from 0.7, and half of it in validation."""

    built: dict = {}  # noqa: RUF012

    def figures(self, setting, seed):
        config, temperature = self.configuration(setting), setting.head.temperature
        build(
            with_temperature(config.task, FixedTemperature()) if type(temperature) is FixedTemperature else config.task
        )
        self.built[setting.name] = config
        tau = 0.6 if isinstance(temperature, BoundedTemperature) else getattr(temperature, "initial", 1.0)
        nll = abs(tau - 0.7) + seed / 100
        return {"temperature": tau, "validation/nll": nll / 2, "test/nll": nll, "test/top1": 0.5, "quiet/test/nll": nll}


@pytest.fixture
def runner(tmp_path):
    Recorder.built = {}
    return Recorder(argparse.Namespace(output=tmp_path, seeds=[0, 1], budget=5, table=False), COUNTS)


def test_a_run_that_is_not_finished_is_refused_with_table(tmp_path):
    runner = Runner(argparse.Namespace(output=tmp_path, seeds=[0], budget=0, table=True), COUNTS)
    with pytest.raises(UserError, match="simple_training_seed0 is not finished; start again without --table"):
        runner.row("Simple training", methods.LEARNED)


@pytest.mark.slow
def test_methods_search_for_the_best_temperature_and_train_on_as_many_rows(runner):
    rows = {row.title: row for row in methods.methods(runner)}
    assert len(rows) == 17
    for title in ("Grid search", "Grid search (2 folds)", "Grid search (+ retrain)"):
        assert [found["temperature"] for found in rows[title].by_seed.values()] == [0.8, 0.8]
    best = rows["Bayesian optimization"].by_seed[0]["temperature"]
    assert best == rows["Bayesian optimization (+ retrain)"].by_seed[0]["temperature"]
    assert best == methods.search_bayes(runner, FIT, "validation/nll", 0, 5)["temperature"]  # it resumes
    built = runner.built
    assert built["simple_training"].length.amount == round(2 * 16_000 / BATCH_SIZE)
    assert built["simple_25"].length.amount == round(2.5 * 16_000 / BATCH_SIZE)
    control, held_out = built["simple_training_batch48"], built["simple_25"]
    assert control.length.amount == pytest.approx(held_out.length.amount, abs=1)
    assert control.data.batch_size == held_out.data.batch_size * (1 - held_out.held_out)
    assert built["luketina_val"].length.amount == round(2 * 15_000 / BATCH_SIZE)
    assert built["luketina_val"].held_out * built["luketina_val"].data.batch_size == pytest.approx(BATCH_SIZE / 8)
    runner.options.budget = 0
    assert "Bayesian optimization" not in {row.title for row in methods.methods(runner)}


def test_tables_of_a_study_that_was_not_begun_are_refused(tmp_path, capsys):
    assert study_temperature.main(["--output", str(tmp_path), "--table"]) == 1
    assert "start once without --table" in capsys.readouterr().err


@pytest.mark.parametrize("part", [name for name in study_temperature.PARTS if name not in ("methods", "pairs")])
def test_every_part_has_rows_that_can_be_built(runner, part):
    rows = getattr(parts, part)(runner)
    assert len({row.title for row in rows}) == len(rows) > 1
    assert all(row.by_seed.keys() == {0, 1} for row in rows)


@pytest.mark.parametrize("before", [True, False])
def test_image_text_models_read_the_embeddings_of_the_study(runner, before):
    config = parts._pairs_config(runner, before=before, after=True)
    assert config.task.build().trained == {"text_tower", "head"}


def test_a_table_has_differences_from_the_first_row_beside_the_printed_figures(tmp_path):
    def found(nll):
        return {seed: {"test/nll": nll * (1 + seed), "test/top1": 0.5, "temperature": 1.5} for seed in range(3)}

    rows = [Row("first", "5.99", "0.435", found(1.0)), Row("second", "6.08", "0.433", found(1.1))]
    lines = study_temperature.write(tmp_path, "table", rows).splitlines()
    assert (tmp_path / "table.md").read_text().splitlines() == lines
    assert lines[2].startswith("| first | 2.000 ± 0.577 | 0.500 ± 0.000 | 1.50 ± 0.00 | 5.99 | 0.435 |")
    assert "(0.200 ± 0.058" in lines[3]


def test_a_fixed_temperature_is_the_one_that_the_same_seed_learned(runner):
    learned, again = parts.dynamics(runner)
    assert [found["temperature"] for found in learned.by_seed.values()] == [0.6, 0.6]
    assert [found["temperature"] for found in again.by_seed.values()] == [0.6, 0.6]
    assert runner.built[f"tau0.6_{ALL}_2"].task.head.temperature.initial == 0.6


def test_the_terms_of_the_covariance_have_equally_many_parameters(runner):
    assert [row.title for row in parts.terms(runner)] == list(parts.TERMS)
    tasks = [config.task for name, config in runner.built.items() if name.startswith("term")]
    assert [task.head.covariance.second_term for task in tasks] == ["diagonal", "rank_one", "diagonal"]
    assert len({parameters.count(build(task).shapes["head"]) for task in (tasks[1], tasks[2])}) == 1
