"""Times classification heads alone, forward and backward, and measures their memory, over numbers of samples S.

Three parts: DET, HET, HET-H and HET-XL over S; the two orders of products of the noise (`lit_het.heads.sampling`); and
what S = 1000 needs in memory over S = 16. Heads have the efficient form of the covariance. The gradient is that of the
features and of all parameters. Variants run in turn; a ratio is taken round by round.

    python scripts/bench_heads.py [--batch 16] [--output results]
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from bench_tools import MIB, Program, Report, assert_close, plot, ratio, seconds_in_turn, spread
from flax import nnx
from rich.console import Console

from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.deterministic import DeterministicConfig
from lit_het.heads.het import HetConfig
from lit_het.heads.het_h import GATHER_COST, HetHConfig
from lit_het.heads.het_xl import HetXLConfig
from lit_het.heads.sampling import Order, SamplingConfig, is_factored
from lit_het.losses.classification import SoftmaxCrossEntropy
from lit_het.types import LogitSamples

NoisyConfig: TypeAlias = HetConfig | HetHConfig | HetXLConfig
Config: TypeAlias = DeterministicConfig | NoisyConfig

OPERATIONS_NOTE = (
    "GFLOP: multiply-adds of matrix products, times two; forward, backward and what the backward pass computes anew. "
    "Element-wise work (normals, exp, sums over classes; HET-H's moves of noise to classes) is left out: where that is "
    "much, GFLOP/s looks low, and for HET-H the operations predict no ratio of orders."
)


def main() -> None:
    """Prints the tables."""
    options = _options()
    report = Report(Console(width=150), "Classification heads")
    report.note(OPERATIONS_NOTE)
    _check()
    lines = _compare_heads(options, report)
    if options.orders:
        _compare_orders(options, report)
    _compare_memory(options, report)
    if options.output:
        title = f"Heads forward and backward, b = {options.batch}, d = {options.features}, k = {options.classes}"
        report.write(options.output, "bench_heads", plot(lines, "noise samples S", title))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=int, default=1024, help="d")
    parser.add_argument("--classes", type=int, default=21843, help="k")
    parser.add_argument("--factors", type=int, default=50, help="r")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1000], help="S")
    parser.add_argument("--block-size", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0, help="budget of a variant; at least 1 round")
    parser.add_argument("--orders", action=argparse.BooleanOptionalAction, default=True, help="compare orders")
    parser.add_argument("--order-features", type=int, default=2048)
    parser.add_argument("--order-batch", type=int, default=4)
    parser.add_argument("--order-samples", type=int, default=1000)
    parser.add_argument("--memory-batch", type=int, default=64)
    parser.add_argument("--memory-samples", type=int, nargs=2, default=[16, 1000])
    parser.add_argument("--output", type=Path, default=None, help="directory of JSON, Markdown and a plot")
    return parser.parse_args()


@dataclasses.dataclass(frozen=True)
class Size:
    """Sizes of a measurement.

    Attributes:
        batch: b.
        features: d.
        classes: k.
        samples: S.
    """

    batch: int
    features: int
    classes: int
    samples: int


class Head:
    """A head at a size.

    Attributes:
        is_factored: whether the noise's factors are mapped to logits, instead of every sample.
        examples, samples_per_block: how much exists at a time.
        gflop: of a call, see `OPERATIONS_NOTE`.
    """

    def __init__(self, config: Config, size: Size):
        self._config, self._size = config, size
        build = functools.partial(config.build, size.features, size.classes)
        self._graph = nnx.graphdef(nnx.eval_shape(lambda: build(nnx.Rngs(0))))
        self._initialize = lambda: nnx.to_pure_dict(nnx.state(build(nnx.Rngs(0))))
        plan = self._plan()
        self.samples_per_block = plan.samples_per_block
        # A block holds equal numbers of examples.
        self.examples = max(n for n in range(1, size.batch + 1) if size.batch % n == 0 and n <= plan.examples_per_block)
        self.is_factored = _is_factored(config, size)
        self.gflop = _multiply_adds(config, size, self.is_factored, plan.samples_per_block) * 2 / 1e9

    def program(self, *, runs: bool = True) -> Program:
        """Compiles value and gradient; only shapes are made up for a program that does not run."""
        inputs = jax.jit(self._inputs)() if runs else jax.eval_shape(self._inputs)
        return Program.of(self._value_and_grad, *inputs)

    def _inputs(self) -> tuple[Any, jax.Array, jax.Array, jax.Array]:
        size = self._size
        features = jax.random.normal(jax.random.key(1), (size.batch, size.features))
        label = jax.random.randint(jax.random.key(2), (size.batch,), 0, size.classes)
        return self._initialize(), features, label, jax.random.key(3)

    def _value_and_grad(self, params: Any, features: jax.Array, label: jax.Array, key: jax.Array) -> Any:
        def loss(params: Any, features: jax.Array) -> jax.Array:
            samples = nnx.merge(self._graph, params)(features, key)
            return SoftmaxCrossEntropy()(samples, label, jnp.ones(features.shape[0], bool)).loss

        return jax.value_and_grad(loss, argnums=(0, 1))(params, features)

    def _plan(self) -> LogitSamples:
        plans: list[LogitSamples] = []

        def trace() -> None:
            params, features, _, key = self._inputs()
            plans.append(nnx.merge(self._graph, params)(features, key))

        jax.eval_shape(trace)
        return plans[0]


def _multiply_adds(config: Config, size: Size, factored: bool, samples_per_block: int) -> float:
    """Returns multiply-adds of matrix products, forward and backward.

    A product costs as much for each of its two gradients. Normals have none, so that a product of them with factors has
    one gradient. More than one block of samples computes a sample's products once more in the backward pass.
    """
    d, k = size.features, size.classes
    if isinstance(config, DeterministicConfig):
        return 3.0 * size.batch * d * k
    again = int(samples_per_block < size.samples)
    rows, q = config.covariance.num_factors, _noise_size(config, size)
    scales = 2 * d * q
    # Products of normals and rows of V(x) or J, of a sample; the row of d(x) is element-wise unless it is mapped.
    if isinstance(config, HetXLConfig) and not factored:
        base = 0 if config.unshared_size is None else d * k
        of_sample = (2 + again) * rows * q + (3 + again) * q * k
        return float(size.batch) * (3 * (base + scales) + size.samples * of_sample)
    mapped = (rows + 1) * q * k if isinstance(config, HetXLConfig) else 0
    width = q if isinstance(config, HetHConfig) and not factored else k
    return float(size.batch) * (3 * (d * k + scales + mapped) + size.samples * (2 + again) * rows * width)


def _noise_size(config: NoisyConfig, size: Size) -> int:
    if isinstance(config, HetHConfig):
        return config.num_buckets
    return size.classes if isinstance(config, HetConfig) else config.unshared_size or size.features


def _is_factored(config: Config, size: Size) -> bool:
    if isinstance(config, DeterministicConfig | HetConfig):
        return False
    return is_factored(
        config.sampling.order,
        config.covariance,
        noise_size=_noise_size(config, size),
        num_classes=size.classes,
        num_samples=size.samples,
        cost=GATHER_COST * size.classes if isinstance(config, HetHConfig) else None,
    )


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
