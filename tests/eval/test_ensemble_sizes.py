import math

import pytest

from lit_het.eval.ensemble_sizes import Size, families_of, gains
from lit_het.eval.metrics.significance import Estimate
from lit_het.eval.pareto import Cost, Point, direction
from lit_het.eval.report import ensemble_sizes, trade_offs
from tests.eval.report.outline import Outline

NLL = "zero_shot/pets/nll"


def point(
    nll: float, gflop: float, e: int = 32, k: int = 1, models: int = 1, members: int = 1, width: int = 8
) -> Point:
    experts = {"num_experts": e, "num_selected": k, "num_members": members}
    settings = {f"task.image_tower.encoder.experts.{name}": value for name, value in experts.items()}
    settings |= {"task.image_tower.encoder.width": width, "task.text_tower.encoder.experts.num_selected": 7}
    name = f"E{e} K{k} M{models} of {members}, width {width}"
    return Point(name, (name,), NLL, Cost(gflop), Estimate(nll, 0.01), models, settings)


# Two models cost twice as much, a second expert 3 GFLOP.
STATIC = [point(1.0, 10.0), point(0.7, 13.0, k=2), point(0.8, 20.0, models=2), point(0.6, 26.0, k=2, models=2)]


def test_points_of_one_family_differ_in_sizes_only():
    (family,) = families_of([*STATIC, point(0.9, 30, width=16)])
    assert family.counted == "models"
    assert family.points == dict(zip([Size(32, *km) for km in ((1, 1), (2, 1), (1, 2), (2, 2))], STATIC, strict=True))
    (grid,) = family.grids()
    assert list(grid) == [Size(32, 1, 1), Size(32, 1, 2), Size(32, 2, 1), Size(32, 2, 2)]


def test_the_gain_is_the_logarithm_of_what_each_gflop_gains():
    (family,) = families_of([*STATIC, point(1.2, 40, models=4)])
    found = gains(family.grids()[0], higher_is_better=False)
    assert found[Size(32, 2, 1)] == pytest.approx(math.log10(0.3 / 3))
    assert found[Size(32, 1, 2)] == pytest.approx(math.log10(0.2 / 10))
    assert found[Size(32, 2, 2)] == pytest.approx(math.log10(0.4 / 16))
    assert math.isnan(found[Size(32, 1, 1)])
    assert math.isnan(found[Size(32, 1, 4)])  # it loses
    assert gains(family.grids()[0], higher_is_better=True)[Size(32, 1, 4)] == pytest.approx(math.log10(0.2 / 30))


def test_members_of_e3_and_models_of_deep_ensembles_are_families_of_their_own():
    e3 = [point(0.75, 14.0, members=2), point(0.65, 18.0, k=2, members=2)]
    members, plain, e3_models = sorted(
        families_of([*STATIC, *e3, point(0.6, 28.0, models=2, members=2)]), key=lambda family: family.counted
    )
    assert (members.counted, plain.counted, e3_models.counted) == (
        "members of e3",
        "models",
        "models, of 2 members each",
    )
    assert set(members.points) == {Size(32, *km) for km in ((1, 1), (2, 1), (1, 2), (2, 2))}
    assert members.points[Size(32, 2, 2)] == e3[1]
    assert plain.points[Size(32, 2, 2)] == STATIC[3]
    assert set(e3_models.points) == {Size(32, 1, 1), Size(32, 2, 1), Size(32, 1, 2)}


def test_lines_have_the_points_that_differ_in_one_number():
    (family,) = families_of([*STATIC, point(0.95, 10, e=16)])
    assert family.lines("E") == {"K = 1, M = 1": [Size(16, 1, 1), Size(32, 1, 1)]}
    assert family.lines("K") == {
        "E = 32, M = 1": [Size(32, 1, 1), Size(32, 2, 1)],
        "E = 32, M = 2": [Size(32, 1, 2), Size(32, 2, 2)],
    }


def test_a_grid_needs_several_k_and_m_and_the_least_of_both():
    for points in (STATIC[:2], STATIC[1:]):
        (family,) = families_of(points)
        assert not family.grids()
    without_experts = Point("vit", ("vit",), NLL, Cost(9), Estimate(1.1, 0.1), 1, {"task.image_tower.width": 8})
    assert families_of([without_experts, STATIC[0]]) == []


def test_the_page_has_maps_and_lines_below_the_front():
    page = trade_offs.pareto_page(STATIC, direction([NLL]))
    assert Outline(page).titles == [NLL, "Sizes of ensembles; M counts models"]
    for text in ("E = 32: GFLOP of training, per example", "log10 of the gain per GFLOP", "Over K", "Over M", "-1.00"):
        assert text in page
    assert ensemble_sizes.sections(STATIC[:1], direction([NLL])) == []
