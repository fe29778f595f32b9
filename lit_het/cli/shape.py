"""The arguments of ``lit-het shape``."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lit_het.cli.prepare import positive
from lit_het.errors import UserError
from lit_het.paths import locate_training
from lit_het.search.law import UNITS

# JAX and the other heavy packages are imported only when the command runs, so that --help is fast.


def add_to(commands: Any) -> None:
    """Adds the command to those of ``lit-het``."""
    shape = commands.add_parser("shape", allow_abbrev=False)
    actions = shape.add_subparsers(required=True, metavar="ACTION")
    _add_star(actions)
    _add_grid(actions)
    _add_deviate(actions)
    _add_fit(actions)
    _add_scale(actions)
    _add_frontier(actions)
    _add_predict(actions)
    _add_plot(actions)


def _add_star(actions: Any) -> None:
    star = actions.add_parser(
        "star",
        allow_abbrev=False,
        help="train shapes that differ from a large one in one dimension, for the scaling exponents",
        description="Trains a star sweep: from a large shape, the centre, one dimension at a time is made smaller. "
        "Several processes may run the same command; finished runs are skipped, and interrupted ones continue. "
        "Fields are changed as for train.",
    )
    star.add_argument("--centre", nargs="+", metavar="DIM=N", help="the largest shape; default: the configuration's")
    star.add_argument("--with-centre", action="store_true", help="train the centre too, to test the law; never fitted")
    _add_sweep(star, _star)


def _add_grid(actions: Any) -> None:
    grid = actions.add_parser(
        "grid",
        allow_abbrev=False,
        help="train all small shapes of a grid, for the shape to start from",
        description="Trains a grid sweep of small shapes: all combinations of the values. Dimensions without values "
        "are the configuration's. Several processes may run the same command; finished runs are skipped, and "
        "interrupted ones continue. Fields are changed as for train.",
    )
    _add_sweep(grid, _grid)


def _add_deviate(actions: Any) -> None:
    deviate = actions.add_parser(
        "deviate",
        allow_abbrev=False,
        help="train shapes around an optimal one with the same compute",
        description="Trains a shape, and others that differ from it in one dimension, each for as many steps as the "
        "compute of the first lasts. Several processes may run the same command; finished runs are skipped, and "
        "interrupted ones continue. Fields are changed as for train.",
    )
    deviate.add_argument("--centre", nargs="+", metavar="DIM=N", help="the shape; default: the configuration's")
    _add_sweep(deviate, _deviate, has_lengths=False)


def _add_sweep(parser: Any, command: Any, *, has_lengths: bool = True) -> None:
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="configuration to train")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder of the sweep")
    parser.add_argument(
        "--vary",
        nargs="+",
        default=[],
        metavar="DIM=N,N",
        help="values of width, depth and mlp, such as width=608,768 depth=8,10,12",
    )
    parser.add_argument(
        "--factors",
        nargs="+",
        default=[],
        metavar="F|LOW..HIGH:N",
        help="values of the dimensions without --vary, as factors of the centre or configuration: numbers, or N that "
        "are exponentially spaced, such as 0.3..0.85:6",
    )
    parser.add_argument(
        "--multiple",
        type=positive,
        default=16,
        help="of which widths and MLP sizes by --factors are multiples; default: %(default)s",
    )
    if has_lengths:
        parser.add_argument(
            "--lengths", nargs="+", metavar="LENGTH", help="such as '500000 steps'; default: the configuration's"
        )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of every shape and length; default: 0")
    parser.add_argument(
        "--metric", required=True, nargs="+", metavar="NAME", help="that all runs must have, such as train/loss"
    )
    parser.add_argument("--plan", action="store_true", help="print the runs and their GFLOP, and train nothing")
    parser.set_defaults(command=command, name=parser.prog.removeprefix("lit-het "), takes_fields=True)


def _add_fit(actions: Any) -> None:
    fit = actions.add_parser(
        "fit",
        allow_abbrev=False,
        help="fit the law to a star sweep, or choose the start from a grid sweep",
        description="Of a star sweep, prints the exponents with intervals by profile likelihood and bootstrap; of a "
        "grid sweep, the shape that is optimal over the widest range of compute. Saves the result as fit.json in the "
        "folder.",
    )
    fit.add_argument("sweep", type=Path, metavar="DIR", help="the --output of lit-het shape star or grid")
    _add_metric(fit, "; of several, their mean is fitted")
    fit.add_argument("--level", type=float, default=0.9, help="of the intervals; default: %(default)s")
    fit.add_argument("--resamples", type=int, default=200, help="of the bootstrap; default: %(default)s")
    fit.set_defaults(command=_fit, name="shape fit")


def _add_scale(actions: Any) -> None:
    scale = actions.add_parser(
        "scale",
        allow_abbrev=False,
        help="print the shape for a budget",
        description="Scales a small optimal shape to a budget by scaling exponents, and rounds it.",
    )
    scale.add_argument("--budget", type=float, required=True, metavar="AMOUNT", help="compute of training, in --unit")
    scale.add_argument("--unit", choices=UNITS, default="GFLOP", help="of the budget; default: %(default)s")
    scale.add_argument("--gflop-per-hour", type=float, metavar="G", help="of one core, GPU or TPU, for hours")
    _add_law(scale)
    scale.add_argument("--config", type=Path, metavar="FILE", help="also say for how many examples the budget lasts")
    scale.set_defaults(command=_scale, name="shape scale")


def _add_law(parser: Any) -> None:
    parser.add_argument(
        "--start",
        nargs="+",
        required=True,
        metavar="DIR|DIM=N",
        help="a grid sweep with its fit, or a shape such as width=608 depth=10 mlp=928",
    )
    parser.add_argument(
        "--start-compute",
        type=float,
        metavar="GFLOP",
        help="the least for which the start is optimal; default: that of the fit",
    )
    parser.add_argument(
        "--exponents",
        nargs="+",
        metavar="DIR|DIM=S",
        help="a star sweep with its fit, or numbers; default: the published width=0.22 depth=0.45 mlp=0.6",
    )
    parser.add_argument("--heads", type=positive, help="number that divides the width; default: that of --config, or 1")
    parser.add_argument(
        "--multiple", type=positive, default=16, help="of which width and mlp are multiples; default: %(default)s"
    )
    parser.add_argument(
        "--weights", nargs="+", metavar="DIM=W", help="w of each dimension, with a sum of 1; default: equal ones"
    )


def _add_frontier(actions: Any) -> None:
    frontier = actions.add_parser(
        "frontier",
        allow_abbrev=False,
        help="write a page with shapes and parameters over compute",
        description="Prints shapes for budgets, and writes a page with the curves of SoViT Fig. 1: every dimension, "
        "with --config parameters of the image tower, with the fit of a star also the error by Eq. 3.",
    )
    frontier.add_argument(
        "--budgets", required=True, metavar="LOW..HIGH:N", help="N that are exponentially spaced, in GFLOP of training"
    )
    _add_law(frontier)
    frontier.add_argument("--config", type=Path, metavar="FILE", help="whose image tower gets the shapes")
    frontier.add_argument("--output", type=Path, required=True, metavar="FILE.html", help="the page")
    frontier.set_defaults(command=_frontier, name="shape frontier")


def _add_predict(actions: Any) -> None:
    predict = actions.add_parser(
        "predict",
        allow_abbrev=False,
        help="print the error of a whole shape by the law",
        description="Prints f of a whole shape, the sum over its dimensions (SoViT Eq. 3), by the fit of a star sweep.",
    )
    predict.add_argument("fit", type=Path, metavar="DIR", help="a star sweep with its fit")
    predict.add_argument("--shape", nargs="+", required=True, metavar="DIM=N", help="all dimensions of the law")
    predict.add_argument("--compute", type=float, required=True, metavar="GFLOP", help="of training")
    predict.set_defaults(command=_predict, name="shape predict")


def _add_plot(actions: Any) -> None:
    plot = actions.add_parser(
        "plot",
        allow_abbrev=False,
        help="write a page with the figures of sweeps",
        description="Writes a page: of a grid sweep the metric against compute with its frontier; of a star sweep the "
        "exponents, predicted against measured values, curves of equal compute, and the cost of other shapes; of "
        "deviations what other shapes cost.",
    )
    plot.add_argument("sweeps", type=Path, nargs="+", metavar="DIR", help="sweeps")
    _add_metric(plot, "; of several, the exponents are compared and the first one is drawn; A+B is a mean")
    plot.add_argument("--output", type=Path, required=True, metavar="FILE.html", help="the page")
    plot.add_argument("--level", type=float, default=0.9, help="of the intervals; default: %(default)s")
    plot.set_defaults(command=_plot, name="shape plot")


def _add_metric(parser: Any, more: str) -> None:
    parser.add_argument(
        "--metric", required=True, nargs="+", metavar="NAME", help=f"such as few_shot/imagenet/10_shot{more}"
    )
    parser.add_argument(
        "--direction",
        choices=("lower", "higher"),
        help="values that are better; of higher ones the error 1 - metric is fitted; default: by the metric's name",
    )


def numbers(texts: Sequence[str], flag: str) -> dict[str, list[float]]:
    """Reads ``DIM=N,N`` of several dimensions."""
    found: dict[str, list[float]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        if name in found:
            raise UserError(f"{flag} {text}: {name} is given twice; write all its numbers in one place")
        try:
            found[name] = [*map(float, values.split(","))]
        except ValueError as error:
            raise UserError(f"{flag} {text}: write DIM=NUMBER, such as width=608") from error
        if not all(map(math.isfinite, found[name])):
            raise UserError(f"{flag} {text}: numbers must be finite")
    return found


def factors(texts: Sequence[str], flag: str = "--factors") -> list[float]:
    """Reads numbers, and ``LOW..HIGH:N`` for N exponentially spaced ones."""
    found: list[float] = []
    for text in texts:
        ends, is_spaced, count = text.partition(":")
        try:
            if not is_spaced:
                found.append(float(text))
                continue
            (low, high), number = map(float, ends.split("..")), int(count)
        except ValueError as error:
            raise UserError(f"{flag} {text}: write a number, or LOW..HIGH:N such as 0.3..0.85:6") from error
        if not (0 < low < high < math.inf and number > 1):
            raise UserError(f"{flag} {text}: write LOW..HIGH:N with 0 < LOW < HIGH and N of at least 2")
        found += [low * (high / low) ** (place / (number - 1)) for place in range(number)]
    return found


def _shape(texts: Sequence[str], flag: str) -> dict[str, float]:
    found = numbers(texts, flag)
    if any(len(values) > 1 for values in found.values()):
        raise UserError(f"{flag}: give one number of each dimension")
    return {name: values[0] for name, values in found.items()}


def _source(texts: Sequence[str], flag: str) -> Path | dict[str, float]:
    """Returns a path, or numbers by dimension."""
    return Path(texts[0]) if len(texts) == 1 and "=" not in Path(texts[0]).name else _shape(texts, flag)


def _whole(values: Sequence[float], flag: str) -> list[int]:
    if any(value != int(value) or value < 1 for value in values):
        raise UserError(f"{flag}: sizes must be whole numbers of at least 1")
    return [int(value) for value in values]


def _star(options: argparse.Namespace, flags: list[str]) -> None:
    _sweep("star", options, flags)


def _grid(options: argparse.Namespace, flags: list[str]) -> None:
    _sweep("grid", options, flags)


def _sweep(kind: Any, options: argparse.Namespace, flags: list[str]) -> None:
    path = locate_training(options.config)
    from lit_het.configs.parsing import parse_config
    from lit_het.search.shape.sweeps import sweep

    config = parse_config(path, flags, f"lit-het shape {kind}")
    sweep(
        kind,
        config,
        options.output,
        options.metric,
        **_of_sweep(options),
        lengths=options.lengths or [str(config.length)],
        with_centre=getattr(options, "with_centre", False),
    )


def _deviate(options: argparse.Namespace, flags: list[str]) -> None:
    path = locate_training(options.config)
    from lit_het.configs.parsing import parse_config
    from lit_het.search.shape.deviations import deviate

    config = parse_config(path, flags, "lit-het shape deviate")
    deviate(config, options.output, options.metric, **_of_sweep(options))


def _of_sweep(options: argparse.Namespace) -> dict[str, Any]:
    given = _shape(getattr(options, "centre", None) or [], "--centre")
    return {
        "centre": {name: _whole([value], "--centre")[0] for name, value in given.items()},
        "vary": {name: _whole(values, "--vary") for name, values in numbers(options.vary, "--vary").items()},
        "factors": factors(options.factors),
        "multiple": options.multiple,
        "seeds": options.seeds,
        "only_plan": options.plan,
    }


def _fit(options: argparse.Namespace, _: list[str]) -> None:
    from lit_het.search.shape.fits import fit

    path = fit(options.sweep, "+".join(options.metric), options.direction, options.level, options.resamples)
    print(f"saved: {path}")


def _scale(options: argparse.Namespace, _: list[str]) -> None:
    from lit_het.search.law.scaling import gflop

    budget = gflop(options.budget, options.unit, options.gflop_per_hour)
    found, s, weights, config = _law(options, "lit-het shape scale")
    from lit_het.search.shape import budgets, fits

    shape = budgets.scaled(found, budget, s, config, options.heads, options.multiple, weights)
    fit = _star_of(options)
    # Fits of earlier versions have no centre.
    if fit is not None and set(fits.read(fit).detail.get("centre", ())) == set(shape.shape):
        print("\n".join(fits.prediction(fit, shape.shape, budget)))


def _frontier(options: argparse.Namespace, _: list[str]) -> None:
    _require_page(options.output)
    amounts = factors([options.budgets], "--budgets")
    start, s, weights, config = _law(options, "lit-het shape frontier")
    from lit_het.search.shape import budgets, fits, frontier

    fit = _star_of(options)
    law, centre, loss = (None, {}, "") if fit is None else fits.law_of(fit)
    multiples = budgets.multiples_of(config, options.heads, options.multiple)
    pair = None if law is None else (law, centre)
    found = frontier.points(start, amounts, s, multiples, weights=weights, config=config, law=pair)
    warning = "" if law is None else fits.disagreement(law, centre)
    frontier.write(found, start, loss, options.output, warning)
    print(f"page: {options.output}")


def _law(options: argparse.Namespace, command: str) -> tuple[Any, dict[str, float], dict[str, float] | None, Any]:
    """Returns the start, exponents, weights and configuration that flags name."""
    start = _source(options.start, "--start")
    exponents = None if options.exponents is None else _source(options.exponents, "--exponents")
    path = None if options.config is None else locate_training(options.config)
    weights = None if options.weights is None else _shape(options.weights, "--weights")
    from lit_het.configs.parsing import parse_config
    from lit_het.search.shape import budgets

    config = None if path is None else parse_config(path, [], command)
    found = budgets.start_of(start, options.start_compute)
    return found, budgets.exponents_of(exponents, found.metric), weights, config


def _star_of(options: argparse.Namespace) -> Path | None:
    """Returns the star sweep that gives the exponents, if one does."""
    source = None if options.exponents is None else _source(options.exponents, "--exponents")
    return source if isinstance(source, Path) else None


def _predict(options: argparse.Namespace, _: list[str]) -> None:
    shape = _shape(options.shape, "--shape")
    from lit_het.search.shape.fits import prediction

    print("\n".join(prediction(options.fit, shape, options.compute)))


def _require_page(path: Path) -> None:
    if path.suffix != ".html":
        raise UserError(f"--output {path}: name a file that ends in .html")


def _plot(options: argparse.Namespace, _: list[str]) -> None:
    _require_page(options.output)
    from lit_het.search.shape.page import write

    write(options.sweeps, options.metric, options.direction, options.level, options.output)
    print(f"page: {options.output}")
