"""Points of models that differ in their number of experts, in how many a token has, and in the predictions averaged.

E is the number of experts; K, those of a token, is adaptive, and M, predictions, is static ensembling (Allingham et al.
2022, e3, Sec. 3 and Figs. 2, 12). M counts the models of a deep ensemble, or the members of e3.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from lit_het.eval.pareto import Point

_EXPERTS, _SELECTED, _MEMBERS = (f"experts.num_{name}" for name in ("experts", "selected", "members"))


class Size(NamedTuple):
    """Numbers of an ensemble: E experts, K of them for a token, M predictions."""

    E: int
    K: int
    M: int


class Family(NamedTuple):
    """Points of models that are alike but in their sizes.

    Attributes:
        counted: what M counts.
        points: by their sizes.
    """

    counted: str
    points: Mapping[Size, Point]

    def grids(self) -> list[dict[Size, Point]]:
        """Returns for each E its points, where they have several K, several M, and the least of both."""
        found: dict[int, dict[Size, Point]] = {}
        for size in sorted(self.points):
            found.setdefault(size.E, {})[size] = self.points[size]
        return [grid for grid in found.values() if _is_grid(grid)]

    def lines(self, varied: str) -> dict[str, list[Size]]:
        """Returns the sizes that differ only in ``varied``, a field of `Size`, by the other two; two sizes or more."""
        found: dict[str, list[Size]] = {}
        for size in sorted(self.points):
            others = [f"{name} = {value}" for name, value in size._asdict().items() if name != varied]
            found.setdefault(", ".join(others), []).append(size)
        return {name: sizes for name, sizes in found.items() if len(sizes) > 1}


def families_of(points: Sequence[Point]) -> list[Family]:
    """Returns the families of models with experts that have several sizes, without those that are part of others.

    Of several figures of one model the first counts.
    """
    families: dict[str, Family] = {}
    for counted, varied, size, point in _sized(points):
        alike = {name: value for name, value in point.settings.items() if not _is(name, varied)}
        key = json.dumps([counted, alike], sort_keys=True)
        family = families.setdefault(key, Family(counted, {}))
        families[key] = family._replace(points={size: point, **family.points})
    kept: list[Family] = []
    for family in sorted(families.values(), key=lambda family: -len(family.points)):
        # Single models with one number of members would be a family of either kind.
        is_part = any(_names(family) <= _names(other) for other in kept)
        if len(family.points) > 1 and not is_part:
            kept.append(family)
    return kept


def _names(family: Family) -> set[str]:
    return {point.name for point in family.points.values()}


def gains(grid: Mapping[Size, Point], *, higher_is_better: bool) -> dict[Size, float]:
    """Returns log10 of the gain over the least size, for each GFLOP that a size costs more (e3 Fig. 2c).

    NaN where nothing is gained or nothing costs more, as at the least size itself.
    """
    first, sign = grid[min(grid)], 1.0 if higher_is_better else -1.0
    found = {}
    for size, point in grid.items():
        gain, more = sign * (point.value.mean - first.value.mean), point.cost.gflop - first.cost.gflop
        found[size] = math.log10(gain / more) if gain > 0 and more > 0 else math.nan
    return found


def _sized(points: Sequence[Point]) -> Iterator[tuple[str, tuple[str, ...], Size, Point]]:
    """Yields what M counts, the fields in which models may differ, and the size of each point with experts."""
    for point in points:
        numbers = {field: _number(point, field) for field in (_EXPERTS, _SELECTED, _MEMBERS)}
        if not numbers[_EXPERTS]:
            continue
        experts, selected, members = numbers.values()
        alone = "" if members == 1 else f", of {members} members each"
        yield f"models{alone}", (_EXPERTS, _SELECTED), Size(experts, selected, point.models), point
        if point.models == 1:
            yield "members of e3", (_EXPERTS, _SELECTED, _MEMBERS), Size(experts, selected, members), point


def _number(point: Point, field: str) -> int:
    return next((value for name, value in point.settings.items() if _is(name, (field,))), 0)


def _is(name: str, fields: tuple[str, ...]) -> bool:
    """Whether a dotted name is one of the fields of the image tower: texts have no ensembles."""
    return name.endswith(fields) and "text_tower" not in name


def _is_grid(grid: Mapping[Size, Point]) -> bool:
    least = (min(size[place] for size in grid) for place in range(3))
    return all(len({size[place] for size in grid}) > 1 for place in (1, 2)) and Size(*least) in grid
