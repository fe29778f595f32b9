"""Finished runs of a star sweep: what a law is fitted to."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Float, Int

from lit_het.errors import UserError, pluralize

# Of Eq. 2: α, a, β, b, ξ and ε of each dimension; c is common.
PARAMETERS_PER_DIMENSION = 6


@dataclasses.dataclass(frozen=True)
class Observation:
    """One run of a sweep.

    Attributes:
        shape: the value of every dimension by its name.
        compute: of its training, in GFLOP.
        loss: the metric, where lower is better.
    """

    shape: Mapping[str, float]
    compute: float
    loss: float


@dataclasses.dataclass(frozen=True)
class Star:
    """The spokes of a star sweep: runs in which one dimension varies and all others have the value of the centre.

    Attributes:
        dimensions: names of the dimensions.
        dimension: index ``[n]`` of the dimension that varies.
        x: its value ``[n]``.
        t: compute ``[n]`` in GFLOP.
        f: the metric ``[n]``, where lower is better.
        centre: the largest shape.
        at_centre: runs of the centre itself, which are never fitted (SoViT Fig. 4).
        excluded: number of runs whose metric is not finite, or 0.
    """

    dimensions: tuple[str, ...]
    dimension: Int[np.ndarray, " n"]
    x: Float[np.ndarray, " n"]
    t: Float[np.ndarray, " n"]
    f: Float[np.ndarray, " n"]
    centre: Mapping[str, float]
    at_centre: tuple[Observation, ...] = ()
    excluded: int = 0

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the law."""
        return 1 + PARAMETERS_PER_DIMENSION * len(self.dimensions)

    def of(self, dimension: str) -> Bool[np.ndarray, " n"]:
        """Returns which runs vary a dimension."""
        return self.dimension == self.dimensions.index(dimension)


def star(observations: Sequence[Observation], centre: Mapping[str, float]) -> Star:
    """Sorts the runs of a star sweep by the dimension that varies.

    Runs whose metric is not finite, or 0, are left out and counted: a perfect one, such as an error of 0, has no
    relative error.

    Args:
        observations: the runs.
        centre: the value of every dimension in the centre.
    """
    dimensions = tuple(centre)
    usable = [one for one in observations if math.isfinite(one.loss) and one.loss != 0]
    spokes: list[tuple[int, float, float, float]] = []
    at_centre = []
    for one in usable:
        varied = _varied(one, centre)
        if varied is None:
            at_centre.append(one)
        else:
            spokes.append((dimensions.index(varied), one.shape[varied], one.compute, one.loss))
    excluded = len(observations) - len(usable)
    # Other seeds of a run tell of its noise, but not of the curve.
    _check_number(dimensions, [number for number, _, _ in {spoke[:3] for spoke in spokes}], excluded)
    index, x, t, f = (np.array(values) for values in zip(*spokes, strict=True))
    return Star(dimensions, index.astype(np.int64), x, t, f, dict(centre), tuple(at_centre), excluded)


def check_spokes(centre: Mapping[str, float], values: Mapping[str, Sequence[float]]) -> None:
    """Checks the values of each dimension of a star sweep before anything is trained."""
    for dimension, spoke in values.items():
        if dimension not in centre:
            raise UserError(f"{dimension} is not a dimension of the centre; it has {', '.join(centre)}")
        if not spoke or len(set(spoke)) < len(spoke):
            raise UserError(f"{dimension}: give different values, at least one")
        if not 0 < min(spoke) <= max(spoke) < centre[dimension]:
            raise UserError(
                f"{dimension}: the centre {centre[dimension]:g} must be above all values of its spoke, of which the "
                f"largest is {max(spoke):g}; in the paper it is 1.2 to 2 times as large"
            )


def _varied(one: Observation, centre: Mapping[str, float]) -> str | None:
    """Returns the dimension in which a run differs from the centre, or None for the centre."""
    shown = shown_shape(one.shape)
    if one.shape.keys() != centre.keys():
        raise UserError(f"a run has the dimensions {', '.join(one.shape)}, but the centre has {', '.join(centre)}")
    if not 0 < one.compute < math.inf or one.loss <= 0:
        raise UserError(f"{shown}: compute {one.compute:g} and metric {one.loss:g} must be above 0")
    varied = [dimension for dimension in centre if one.shape[dimension] != centre[dimension]]
    if len(varied) > 1:
        raise UserError(f"{shown} differs from the centre {shown_shape(centre)} in {', '.join(varied)}; vary only one")
    if not varied:
        return None
    check_spokes(centre, {varied[0]: [one.shape[varied[0]]]})
    return varied[0]


def _check_number(dimensions: Sequence[str], index: Sequence[int], excluded: int) -> None:
    """Checks that there are more points than parameters, given the dimension of each."""
    needed = 1 + PARAMETERS_PER_DIMENSION * len(dimensions)
    left_out = f" ({pluralize(excluded, 'run')} without a finite metric above 0 left out)" if excluded else ""
    advice = "train more sizes or lengths"
    # One more, so that an error is left to estimate.
    if len(index) <= needed:
        raise UserError(
            f"{pluralize(len(index), 'different run')}{left_out}, but the law of "
            f"{pluralize(len(dimensions), 'dimension')} has {needed} parameters; {advice}"
        )
    for number, dimension in enumerate(dimensions):
        count = index.count(number)
        if count <= PARAMETERS_PER_DIMENSION:
            raise UserError(
                f"{pluralize(count, 'different run')}{left_out} of {dimension}, but it has "
                f"{PARAMETERS_PER_DIMENSION} parameters of its own; {advice}"
            )


def shown_shape(shape: Mapping[str, int | float]) -> str:
    """Returns a shape as text: ``width 608, depth 10``."""
    return ", ".join(f"{name} {value:g}" for name, value in shape.items())
