"""``lit-het shape scale``: the shape for a budget."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

from lit_het.configs.experiment import ExperimentConfig
from lit_het.errors import UserError
from lit_het.search.law.observations import shown_shape
from lit_het.search.law.scaling import MULTIPLE, PUBLISHED_EXPONENTS, Scaled, scale
from lit_het.search.shape import fits, sweeps


@dataclasses.dataclass(frozen=True)
class Start:
    """The shape from which to scale.

    Attributes:
        shape: the value of every dimension by its name.
        compute: the least compute in GFLOP for which it is optimal.
        metric: of the fit; empty for a given shape.
        warning: why the shape may not be optimal, or empty.
    """

    shape: dict[str, float]
    compute: float
    metric: str = ""
    warning: str = ""


def exponents_of(source: Path | Mapping[str, float] | None, metric: str = "") -> dict[str, float]:
    """Returns scaling exponents: of the fit of a star sweep, given ones, or for None those of SoViT Sec. 4.1.

    Args:
        source: folder or file of the fit, or exponents by dimension.
        metric: of the fit of the start; empty where it has none.
    """
    if source is None:
        return dict(PUBLISHED_EXPONENTS)
    if not isinstance(source, Path):
        return dict(source)
    saved = fits.read(source)
    if not saved.exponents:
        raise UserError(f"{source} is the fit of a grid; give that of a star sweep to --exponents")
    if metric and saved.metric != metric:
        raise UserError(
            f"{source} is the fit of {saved.metric}, but the start that of {metric}; fit both to the same metric"
        )
    for name, reason in saved.unidentified.items():
        raise UserError(f"{source} does not identify s of {name} ({reason}); train a wider sweep, or give numbers")
    return saved.exponents


def start_of(source: Path | Mapping[str, float], compute: float | None) -> Start:
    """Returns the start: that of the fit of a grid sweep, or a given shape with its compute."""
    if not isinstance(source, Path):
        if compute is None:
            raise UserError("--start of numbers needs --start-compute, the least GFLOP for which the shape is optimal")
        return Start(dict(source), compute)
    saved = fits.read(source)
    if not saved.start:
        raise UserError(f"{source} is the fit of a star; give that of a grid sweep to --start")
    compute = saved.start_compute if compute is None else compute
    return Start(saved.start, compute, saved.metric, str(saved.detail.get("warning", "")))


def multiples_of(config: ExperimentConfig | None, num_heads: int | None, multiple: int) -> dict[str, int]:
    """Returns of what rounded dimensions are multiples; see `scaled`."""
    if config is not None and num_heads is None:
        return sweeps.multiples_of(config, multiple)
    return {"width": math.lcm(multiple, num_heads or 1), "mlp": multiple}


def scaled(
    start: Start,
    budget: float,
    exponents: Mapping[str, float],
    config: ExperimentConfig | None = None,
    num_heads: int | None = None,
    multiple: int = MULTIPLE,
    weights: Mapping[str, float] | None = None,
) -> Scaled:
    """Returns the shape for a budget, and prints it with the warning of the start.

    With a configuration it also prints for how many examples the budget lasts.

    Args:
        start: the small shape.
        budget: in GFLOP.
        exponents: by dimension.
        config: a configuration, whose image tower gets the shape; None for none.
        num_heads: of which the width is a multiple; None for those of the configuration, or 1.
        multiple: of which width and size of the MLPs are multiples.
        weights: see `scale`.
    """
    sweeps.check_dimensions(start.shape)
    multiples = multiples_of(config, num_heads, multiple)
    found = scale(start.shape, start.compute, budget, exponents, multiples, weights)
    if start.warning:
        print(f"warning: {start.warning}")
    print(f"shape: {shown_shape(found.shape)}")
    print(f"before rounding: {', '.join(f'{name} {value:.1f}' for name, value in found.exact.items())}")
    shown = ", ".join(f"{name} {value:.3g}" for name, value in exponents.items())
    print(
        f"compute x {found.factor:.4g} from {shown_shape(start.shape)} at {start.compute:.4g} GFLOP; exponents {shown}"
    )
    if config is not None:
        cost = sweeps.gflop_per_example(sweeps.with_shape(config, found.shape))
        print(f"{cost:.4g} GFLOP of training per example: {budget / cost:.4g} examples for {budget:.4g} GFLOP")
    return found
