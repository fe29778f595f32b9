import dataclasses

import pytest
from rich.console import Console

from lit_het.errors import UserError
from lit_het.eval import sweeps
from lit_het.eval.sweeps import RunResult


def result(setting="tau1", seed=0, *, nll=2.0, learned=False, temperature=1.0, **config):
    return RunResult(
        setting=setting,
        title=f"title of {setting}",
        seed=seed,
        learned=learned,
        temperature=temperature,
        num_parameters=1234,
        metrics={"nll": nll, "top1": 0.5, "ece": 0.25},
        seconds=3.0,
        device="cpu",
        held_out="held_out",
        config={"num_steps": 2, "seed": seed, **config},
    )


def order(result):
    return result.learned, result.temperature


def test_a_result_is_read_back_as_it_was_written(tmp_path):
    written = [result(seed=1), result("learned", learned=True, temperature=0.75)]
    for one in written:
        sweeps.write_result(one, tmp_path / "results")
    assert len((tmp_path / "results" / "tau1_seed1.json").read_text().splitlines()) == 1
    assert sorted(sweeps.read_results(tmp_path / "results"), key=order) == written
    assert sweeps.read_results(tmp_path / "nowhere") == []


def test_an_invalid_result_is_an_error_with_its_path(tmp_path):
    for content in ('{"setting": "tau1"}', "{", "[]"):
        (tmp_path / "broken.json").write_text(content)
        with pytest.raises(UserError, match=r"broken\.json is not a result of a run .*delete it") as caught:
            sweeps.read_results(tmp_path)
        assert "\n" not in str(caught.value)


def test_rows_stand_in_the_given_order_and_join_seeds():
    results = [
        result("learned", 0, learned=True, temperature=0.5),
        result("tau3", 1, nll=4.0, temperature=3.0),
        result("tau3", 0, nll=2.0, temperature=3.0),
        result("tau0.4", 0, temperature=0.4),
        result("learned", 1, learned=True, temperature=0.7),
    ]
    rows = sweeps.summarize(results, order)
    assert [row.setting for row in rows] == ["tau0.4", "tau3", "learned"]
    assert [row.seeds for row in rows] == [(0,), (0, 1), (0, 1)]
    assert rows[1].metrics["nll"].mean == 3.0
    assert rows[1].metrics["nll"].error == pytest.approx(1.0)
    assert rows[2].temperature.mean == pytest.approx(0.6)


def test_the_markdown_table_has_a_row_for_each_setting():
    rows = sweeps.summarize([result(seed=0, nll=2.0), result(seed=1, nll=4.0)], order)
    lines = sweeps.markdown(rows).splitlines()
    assert lines[0] == "| setting | τ | NLL | Prec@1 | ECE | parameters | seeds |"
    assert lines[1] == "|" + "---|".replace("---", " --- ") * 7
    assert lines[2] == "| title of tau1 | 1 | 3.000 ± 1.000 | 0.500 ± 0.000 | 0.250 ± 0.000 | 1,234 | 0, 1 |"
    assert "lower bound" not in sweeps.markdown(rows)


def test_a_learned_temperature_is_shown_with_its_spread():
    runs = [result("learned", seed, learned=True, temperature=0.5 + seed / 10) for seed in (0, 1)]
    assert "| 0.550 ± 0.050 |" in sweeps.markdown(sweeps.summarize(runs, order))


def test_the_terminal_shows_the_rows_of_the_markdown():
    rows = sweeps.summarize([result()], order)
    console = Console(width=120)
    with console.capture() as capture:
        console.print(sweeps.table(rows, "a title"))
    for cell in ("a title", "title of tau1", "2.000", "0.500", "0.250", "1,234"):
        assert cell in capture.get()


def test_runs_of_different_experiments_never_share_a_table():
    runs = [result(), result(seed=1)]
    sweeps.check_comparable(runs, lambda field: field == "seed")
    with pytest.raises(UserError, match=r"num_steps is 2 in tau1_seed0\.json and 9 in tau1_seed1\.json.*--output"):
        sweeps.check_comparable([runs[0], result(seed=1, num_steps=9)], lambda field: field == "seed")
    elsewhere = dataclasses.replace(runs[1], held_out="elsewhere")
    with pytest.raises(UserError, match="held_out"):
        sweeps.check_comparable([runs[0], elsewhere], lambda field: field == "seed")
