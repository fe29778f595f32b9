import math
from pathlib import Path

import numpy as np
import pytest

from lit_het.eval.evaluation import Drawing, Record
from lit_het.eval.metrics.significance import Estimate
from lit_het.eval.pareto import Cost, Point, direction, front_of, points_of
from lit_het.eval.saved_runs import SavedRun
from tests.refusals import assert_refused

NLL, TOP1, JOINT = "zero_shot/pets/nll", "zero_shot/pets/top1", "deep_ensemble/pets/joint_nll"


def record(kind, figures, **settings) -> Record:
    return Record(kind, "pets", figures, {}, {}, 10, settings, Drawing())


def run(name, width, seed=0, *records) -> SavedRun:
    found = records or [record("zero_shot", {"nll": 1.0})]
    config = {"seed": seed, "task": {"width": width}, "run_dir": f"runs/{name}"}
    return SavedRun(name, Path(name), config, [], {(one.kind, one.name): one for one in found})


def cost_of(one: SavedRun) -> Cost:
    return Cost(float(one.config["task"]["width"]), 0.5)


def test_runs_that_differ_only_in_their_seeds_are_a_point_with_their_standard_error():
    values = {0: 1.0, 1: 1.2, 2: 1.7}
    small = [run(f"small-s{seed}", 8, seed, record("zero_shot", {"nll": nll})) for seed, nll in values.items()]
    large = run("large-s0", 16, 0, record("zero_shot", {"nll": 0.5}))
    one, other = points_of([large, *small], [NLL], cost_of)
    assert (one.name, one.runs, one.cost) == ("small", ("small-s0", "small-s1", "small-s2"), Cost(8.0, 0.5))
    assert one.value.mean == pytest.approx(1.3)
    assert one.value.error == pytest.approx(np.std([1.0, 1.2, 1.7], ddof=1) / np.sqrt(3))
    assert (other.name, other.value.mean) == ("large-s0", 0.5)
    assert math.isnan(other.value.error)


def test_points_are_named_by_the_words_that_their_runs_share_and_else_by_their_first_runs():
    def names_of(*runs):
        return [point.name for point in points_of([run(*one) for one in runs], [NLL], cost_of)]

    assert names_of(("vit_b32_seed0", 8, 0), ("vit_b32_seed1", 8, 1)) == ["vit_b32"]
    assert names_of(("seed0/het", 8, 0), ("seed1/het", 8, 1)) == ["het"]
    assert names_of(("s10", 8, 0), ("s11", 8, 1)) == ["s10"]
    assert names_of(("only", 8)) == ["only"]
    equal = names_of(("a/het", 8), ("b/het", 8, 1), ("c/het", 16), ("d/het", 16, 1))
    assert equal == ["het (a/het)", "het (c/het)"]


def test_a_deep_ensemble_costs_as_much_as_its_models_and_needs_no_equal_number_of_them():
    def ensemble(members, nll):
        return record("deep_ensemble", {"joint_nll": nll}, samples=0, checkpoints=["run at step 5"] * members)

    runs = [run(f"w8-s{seed}", 8, seed, ensemble(2 + 2 * (seed == 2), 1 - 0.1 * seed)) for seed in range(3)]
    two, four = points_of(runs, [JOINT], cost_of)
    assert (two.name, two.cost, two.runs) == ("2 x w8", Cost(16.0, 1.0), ("w8-s0", "w8-s1"))
    assert (four.name, four.cost, four.runs) == ("4 x w8", Cost(32.0, 2.0), ("w8-s2",))


def test_several_figures_of_the_same_runs_are_points_of_their_kinds():
    both = [record("zero_shot", {"nll": 1.0}), record("ensemble", {"joint_nll": 0.9})]
    found = points_of([run("e3", 8, 0, *both)], [NLL, "ensemble/pets/joint_nll"], cost_of)
    assert [point.name for point in found] == ["e3, zero shot", "e3, ensemble"]
    assert direction([NLL, JOINT]).label == "negative log-likelihood, nats"


def test_the_front_has_the_points_that_are_better_than_all_cheaper_ones():
    def points(*values):
        return [Point(str(n), (), NLL, Cost(float(n)), Estimate(value, 0.1)) for n, value in enumerate(values)]

    found = points(3.0, 4.0, 2.0, 2.0, 1.0)
    assert [point.name for point in front_of(found, higher_is_better=False)] == ["0", "2", "4"]
    assert [point.name for point in front_of(found, higher_is_better=True)] == ["0", "1"]
    twins = [*points(1.0), *points(1.0)]
    assert len(front_of(twins, higher_is_better=False)) == 1


def test_figures_that_no_run_has_and_evaluations_with_other_settings_are_refused():
    message = "the figure zero_shot/cars/nll; they have zero_shot/pets/nll"
    assert_refused(message, points_of, [run("a", 8)], ["zero_shot/cars/nll"], cost_of)
    without = SavedRun("a", Path("a"), {}, [], {})
    assert_refused("no run has the figure nll; they have no evaluations", points_of, [without], ["nll"], cost_of)
    many = record("zero_shot", {name: 1.0 for name in ("top1", "top5", "ece", "brier", "aurc", "joint_nll", "nll")})
    message = r"they have zero_shot/pets/nll, zero_shot/pets/joint_nll, [^,]*, [^,]*, [^,]*$"
    assert_refused(message, points_of, [run("a", 8, 0, many)], ["zero_shot/pet/nll"], cost_of)
    runs = [run(name, 8, 0, record("zero_shot", {"nll": 1.0}, names={"prompts": name})) for name in ("set", "bare")]
    message = r"zero-shot pets: names\.prompts is set in set and bare in bare"
    assert_refused(message, points_of, runs, [NLL], cost_of)


def test_figures_of_other_axes_and_without_a_better_side_are_refused():
    assert_refused(f"{TOP1} and {NLL} cannot share an axis", direction, [NLL, TOP1])
    assert_refused(r"ensemble/pets/kl: neither high nor low values are better", direction, ["ensemble/pets/kl"])
    assert direction([TOP1]).higher_is_better
