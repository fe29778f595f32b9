"""The small shape from which to scale: optimal over a range of compute in a grid sweep (SoViT App. B.3)."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

from lit_het.errors import UserError
from lit_het.search.law.observations import Observation, shown_shape

# A start is to be optimal "for a good range of compute" (App. B.3), not at an isolated point.
GOOD_SPAN = 2.0


@dataclasses.dataclass(frozen=True)
class Stretch:
    """A part of the Pareto frontier that belongs to one shape.

    Attributes:
        shape: the value of every dimension by its name.
        compute: the least compute in GFLOP for which the shape is optimal.
        until: compute of the first run that is better; for the last stretch the largest compute of the sweep.
        losses: (compute, metric) of its runs on the frontier.
    """

    shape: dict[str, float]
    compute: float
    until: float
    losses: tuple[tuple[float, float], ...]

    @property
    def span(self) -> float:
        """By which factor of compute the shape stays optimal."""
        return self.until / self.compute


@dataclasses.dataclass(frozen=True)
class Selection:
    """The shape to start from.

    Attributes:
        start: its part of the frontier; scale from its least compute.
        frontier: all parts, in order of compute.
        boundary: dimensions in which the shape has the least or largest value of the grid.
        excluded: number of runs whose metric is not finite.
    """

    start: Stretch
    frontier: tuple[Stretch, ...]
    boundary: tuple[str, ...]
    excluded: int

    @property
    def warning(self) -> str:
        """Why the shape may not be optimal, or empty."""
        if self.boundary:
            return (
                f"the optimal shape lies on the boundary of the grid in {', '.join(self.boundary)}: "
                "add smaller and larger values, and fit again"
            )
        if self.start.span < GOOD_SPAN:
            return (
                f"the shape is optimal only up to {self.start.span:.3g} times its least compute, which may be chance "
                f"(less than {GOOD_SPAN:g}): add lengths, shapes or seeds, and fit again"
            )
        widest = max(self.frontier, key=lambda stretch: stretch.span)
        if widest.span > self.start.span:
            return (
                f"{shown_shape(widest.shape)}, on the boundary of the grid, is optimal over a wider range of compute: "
                "add smaller and larger values, and fit again"
            )
        return ""


def select(observations: Sequence[Observation]) -> Selection:
    """Returns the shape that is optimal over the widest range of compute, as a factor.

    A shape in the interior of the grid is preferred: the cheapest run is always on the frontier, though its shape is
    the smallest. Runs of equal shape and compute are averaged; runs whose metric is not finite are left out.

    Args:
        observations: runs of a grid sweep.
    """
    finite = [one for one in observations if math.isfinite(one.loss)]
    if not finite:
        raise UserError(f"none of {len(observations)} runs of the grid has a finite metric")
    if any(one.shape.keys() != finite[0].shape.keys() for one in finite):
        raise UserError("runs of the grid have different dimensions")
    frontier = _stretches(frontier_of(finite), max(one.compute for one in finite))
    start = max(frontier, key=lambda stretch: (not boundary_of(stretch.shape, finite), stretch.span))
    return Selection(start, tuple(frontier), boundary_of(start.shape, finite), len(observations) - len(finite))


def frontier_of(observations: Sequence[Observation]) -> list[Observation]:
    """Returns the runs than which none is as good with less compute, in order of compute; seeds are averaged."""
    front: list[Observation] = []
    for one in sorted(_averaged(observations), key=lambda one: (one.compute, one.loss)):
        if not front or one.loss < front[-1].loss:
            front.append(one)
    return front


def boundary_of(shape: Mapping[str, float], observations: Sequence[Observation]) -> tuple[str, ...]:
    """Returns the dimensions in which a shape has an extreme value, beyond which a grid could be extended.

    A dimension of one value is not varied, and nothing is smaller than 1.
    """
    found = []
    for name, value in shape.items():
        values = {one.shape[name] for one in observations}
        if len(values) > 1 and (value == max(values) or value == min(values) > 1):
            found.append(name)
    return tuple(found)


def _averaged(observations: Sequence[Observation]) -> list[Observation]:
    alike: dict[tuple[float, ...], list[Observation]] = {}
    for one in observations:
        alike.setdefault((*one.shape.values(), one.compute), []).append(one)
    return [dataclasses.replace(group[0], loss=sum(one.loss for one in group) / len(group)) for group in alike.values()]


def _stretches(front: Sequence[Observation], largest: float) -> list[Stretch]:
    found: list[Stretch] = []
    for number, one in enumerate(front):
        until = front[number + 1].compute if number + 1 < len(front) else largest
        point = (one.compute, one.loss)
        if found and found[-1].shape == dict(one.shape):
            found[-1] = dataclasses.replace(found[-1], until=until, losses=(*found[-1].losses, point))
        else:
            found.append(Stretch(dict(one.shape), one.compute, until, (point,)))
    return found
