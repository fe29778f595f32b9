"""Times classification heads alone, forward and backward, and measures their memory, over numbers of samples S.

Three parts: DET, HET, HET-H and HET-XL over S; the two orders of products of the noise (`lit_het.heads.sampling`); and
what S = 1000 needs in memory over S = 16. Heads have the efficient form of the covariance. The gradient is that of the
features and of all parameters. Variants run in turn; a ratio is taken round by round.

    python -m scripts.bench.bench_heads [--batch 16] [--output results]

With ``--grid``, maps over S and the batch instead, see `bench_heads_grid`.

    python -m scripts.bench.bench_heads --grid [--memory-gib 16] [--rounds 2] [--seconds 8] [--output results]
"""

import argparse
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from rich.console import Console

from lit_het.cli.prepare import positive
from lit_het.heads.classification_config import DeterministicConfig, HetConfig, HetHConfig, HetXLConfig
from lit_het.heads.noise_config import CovarianceConfig, Order, SamplingConfig
from scripts.bench.bench_heads_grid import map_costs
from scripts.bench.bench_heads_programs import OPERATIONS_NOTE, Config, Head, Size
from scripts.bench.tools import MIB, Program, Report, assert_close, parser_of, plot, ratio, seconds_in_turn, spread


def main() -> None:
    """Prints the tables."""
    options = _options()
    report = Report(Console(width=150), "Classification heads")
    report.note(OPERATIONS_NOTE)
    _check()
    if options.grid:
        map_costs(options, report)
        return
    lines = _compare_heads(options, report)
    if options.orders:
        _compare_orders(options, report)
    if options.memory:
        _compare_memory(options, report)
    if options.output:
        title = f"Heads forward and backward, b = {options.batch}, d = {options.features}, k = {options.classes}"
        report.write(options.output, "bench_heads", plot(lines, "noise samples S", title))


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__, "JSON, Markdown and a plot")
    parser.add_argument("--features", type=positive, default=1024, help="d")
    parser.add_argument("--classes", type=positive, default=21843, help="k")
    parser.add_argument("--factors", type=positive, default=50, help="r")
    parser.add_argument("--batch", type=positive, default=16)
    parser.add_argument("--samples", type=positive, nargs="+", default=[1, 4, 16, 64, 256, 1000], help="S")
    parser.add_argument("--block-size", type=positive, default=1024)
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--seconds", type=_above_zero, default=60.0, help="budget of a variant; at least 1 round")
    parser.add_argument("--orders", action=argparse.BooleanOptionalAction, default=True, help="compare orders")
    parser.add_argument("--order-features", type=positive, default=2048)
    parser.add_argument("--order-batch", type=positive, default=4)
    parser.add_argument("--order-samples", type=positive, default=1000)
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="compare memory")
    parser.add_argument("--memory-batch", type=positive, default=64)
    parser.add_argument("--memory-samples", type=positive, nargs=2, default=[16, 1000])
    parser.add_argument("--grid", action="store_true", help="maps of time, memory and operations over S and the batch")
    parser.add_argument("--grid-batches", type=positive, nargs="+", default=[4, 16, 64, 512, 6144], metavar="B")
    parser.add_argument("--memory-gib", type=_above_zero, default=16, help="of the maps' device (a TPU v3 core has 16)")
    return parser.parse_args()


def _above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} must be above 0 and finite")
    return value


def _compare_heads(options: argparse.Namespace, report: Report) -> dict[str, list[tuple[float, float, float]]]:
    lines: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ("DET", "HET", "HET-H", "HET-XL")}
    report.data["heads"] = []
    for samples in options.samples:
        size = Size(options.batch, options.features, options.classes, samples)
        sampling = SamplingConfig(num_samples=samples, block_size=options.block_size)
        heads = {name: Head(config, size) for name, config in _heads(options, sampling, options.features).items()}
        programs, seconds = _measure(heads, f"S = {samples}", options, report.console)
        rows = []
        for name, head in heads.items():
            program, times = programs[name], seconds[name]
            rows.append(
                (
                    *_cells(name, head, program, times),
                    *(spread(ratio(seconds, name, other)) for other in ("DET", "HET")),
                )
            )
            median = float(np.median(times))
            lines[name].append((samples, median, program.peak))
            report.data["heads"].append(_record(name, size, head, program, times))
        report.table(f"S = {samples}: {_describe(size, options)}", (*COLUMNS, "time / DET", "time / HET"), rows)
    return lines


COLUMNS = ("head", "order", "ms (median)", "min-max", "peak MiB", "temporary MiB", "GFLOP", "GFLOP/s", "compile s")


def _cells(name: str, head: Head, program: Program, times: list[float]) -> tuple[str, ...]:
    median = float(np.median(times))
    return (
        name,
        "factored" if head.is_factored else "direct",
        f"{1e3 * median:.1f}",
        f"{1e3 * min(times):.1f}-{1e3 * max(times):.1f}",
        f"{program.peak / MIB:.0f}",
        f"{program.temporary / MIB:.0f}",
        f"{head.gflop:.1f}",
        f"{head.gflop / median:.0f}",
        f"{program.compile_seconds:.1f}",
    )


def _compare_orders(options: argparse.Namespace, report: Report) -> None:
    """Times both orders of products of HET-XL, of HET-XL without sharing W, and of HET-H."""
    d = options.order_features
    size = Size(options.order_batch, d, options.classes, options.order_samples)
    heads: dict[str, Head] = {}
    orders: tuple[Order, ...] = ("direct", "factored")
    for order in orders:
        sampling = SamplingConfig(num_samples=size.samples, block_size=options.block_size, order=order)
        covariance = CovarianceConfig(num_factors=options.factors, form="efficient")
        heads[f"HET-XL, {order}"] = Head(HetXLConfig(covariance, sampling=sampling), size)
        heads[f"HET-XL unshared, {order}"] = Head(HetXLConfig(covariance, d, sampling=sampling), size)
        buckets = min(d, options.classes)
        heads[f"HET-H, {order}"] = Head(HetHConfig(buckets, covariance=covariance, sampling=sampling), size)
    programs, seconds = _measure(heads, "orders", options, report.console)
    rows = [_cells(name, head, programs[name], seconds[name]) for name, head in heads.items()]
    report.table(f"Order of products: {_describe(size, options)}", COLUMNS, rows)
    ratios = []
    for name in ("HET-XL", "HET-XL unshared", "HET-H"):
        direct, factored = f"{name}, direct", f"{name}, factored"
        # HET-H moves numbers in place of products: operations predict nothing.
        predicted = "-" if name == "HET-H" else f"{heads[direct].gflop / heads[factored].gflop:.2f}"
        mapped = 4 * heads[factored].examples * (options.factors + 1) * size.classes / MIB
        # HET-H moves J to classes once for all examples.
        memory = f"{mapped:.0f}" if name != "HET-H" else f"{4 * options.factors * size.classes / MIB:.0f} (J)"
        ratios.append((name, spread(ratio(seconds, direct, factored)), predicted, memory))
    columns = ("head", "direct / factored, time", "predicted by operations", "A = W^T V of a block, MiB")
    report.table("Direct over factored order", columns, ratios)
    report.data["orders"] = [_record(name, size, head, programs[name], seconds[name]) for name, head in heads.items()]


def _compare_memory(options: argparse.Namespace, report: Report) -> None:
    """Prints peak memory of many samples over few, at equal ``block_size``."""
    rows, report.data["memory"] = [], []
    for name in ("HET", "HET-H", "HET-XL"):
        peaks = []
        for samples in options.memory_samples:
            sampling = SamplingConfig(num_samples=samples, block_size=options.block_size)
            size = Size(options.memory_batch, options.features, options.classes, samples)
            head = Head(_heads(options, sampling, options.features)[name], size)
            program = head.program(runs=False)
            peaks.append((head, program))
            report.data["memory"].append(_record(name, size, head, program, []))
        (few, of_few), (many, of_many) = peaks
        blocks = " ".join(f"{head.examples}x{head.samples_per_block}" for head in (few, many))
        peaks, temporaries = (
            tuple(getattr(program, kind) / MIB for program in (of_few, of_many)) for kind in ("peak", "temporary")
        )
        cells = [(f"{low:.0f}", f"{high:.0f}", f"{high / low:.2f}") for low, high in (peaks, temporaries)]
        rows.append((name, blocks, *cells[0], *cells[1]))
    few, many = options.memory_samples
    columns = ("head", "examples x samples of a block")
    columns += tuple(
        f"{kind}{which}" for kind in ("peak", "temporary") for which in (f" S={few}", f" S={many}", " ratio")
    )
    size = Size(options.memory_batch, options.features, options.classes, many)
    report.table(f"Memory in MiB: {_describe(size, options)} (goal of HET-XL's peak ratio: at most 1.2)", columns, rows)


def _heads(options: argparse.Namespace, sampling: SamplingConfig, features: int) -> dict[str, Config]:
    covariance = CovarianceConfig(num_factors=options.factors, form="efficient")
    buckets = min(features, options.classes)
    return {
        "DET": DeterministicConfig(),
        "HET": HetConfig(covariance, sampling=sampling),
        "HET-H": HetHConfig(buckets, covariance=covariance, sampling=sampling),
        "HET-XL": HetXLConfig(covariance, sampling=sampling),
    }


def _measure(
    heads: dict[str, Head], what: str, options: argparse.Namespace, console: Console
) -> tuple[dict[str, Program], dict[str, list[float]]]:
    with console.status(what) as status:

        def progress(text: str) -> None:
            status.update(f"{what}: {text}")

        programs = {}
        for name, head in heads.items():
            progress(f"compiling {name}")
            programs[name] = head.program()
        calls: dict[str, Callable[[], Any]] = {name: program.call for name, program in programs.items()}
        return programs, seconds_in_turn(calls, options.rounds, options.seconds, progress)


def _describe(size: Size, options: argparse.Namespace) -> str:
    sizes = f"b = {size.batch}, d = {size.features}, k = {size.classes}, r = {options.factors}, S = {size.samples}"
    return f"{sizes}, block_size = {options.block_size}"


def _record(name: str, size: Size, head: Head, program: Program, times: list[float]) -> dict[str, Any]:
    return {
        "name": name,
        **dataclasses.asdict(size),
        "factored": head.is_factored,
        "examples_per_block": head.examples,
        "samples_per_block": head.samples_per_block,
        "seconds": times,
        "peak": program.peak,
        "temporary": program.temporary,
        "gflop": head.gflop,
    }


def _check() -> None:
    """Asserts at a small size that both orders give the same loss and gradient."""
    size = Size(4, 8, 20, 130)
    for config in (HetXLConfig(), HetXLConfig(unshared_size=6), HetHConfig(5)):
        results = []
        orders: tuple[Order, ...] = ("direct", "factored")
        for order in orders:
            sampling = SamplingConfig(num_samples=size.samples, block_size=256, order=order)
            head = Head(dataclasses.replace(config, sampling=sampling), size)
            results.append(jax.tree.leaves(head.program().call()))
        for direct, factored in zip(*results, strict=True):
            assert_close(direct, factored)
        assert math.isfinite(float(results[0][0]))


if __name__ == "__main__":
    main()
