"""Time and memory of a mixture of experts by dispatch: one-hot products of three group sizes, and sorted tokens.

One mixture, forward and backward, with gradients of parameters and tokens, compared with the MLP that it replaces. The
script checks that all forms agree when their capacity suffices for every token.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console

from lit_het.towers.experts import ExpertKeys, Experts
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.layers import Mlp
from scripts.bench.tools import Program, Report, assert_close, parser_of, plot, ratio, seconds_in_turn, spread

# V-MoE S/32 at 384 px (e3 Table 20): 144 patches and the class token.
WIDTH, HIDDEN, TOKENS = 512, 2048, 145
DENSE = "dense MLP"


def main() -> None:
    """Prints the table."""
    parser = parser_of(__doc__, "JSON, Markdown and a plot")
    parser.add_argument("--images", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--num-experts", type=int, default=32)
    parser.add_argument("--num-selected", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--capacity-factor", type=float, default=1.5, help="of the timed one-hot forms")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=60.0, help="budget of a form; at least 1 round")
    options = parser.parse_args()
    console = Console(width=150)
    report = Report(console, "Mixtures of experts by dispatch")
    report.note(f"d = {WIDTH}, hidden {HIDDEN}, {options.num_experts} experts, {TOKENS} tokens an image, C = 1.5")
    _check(options.num_experts)
    lines: dict[str, list[tuple[float, float | None, float | None]]] = {}
    for selected in options.num_selected:
        for images in options.images:
            measured = _measure(images, selected, options, console)
            _show(measured, images, selected, report)
            report.data[f"images {images}, K {selected}"] = measured
            for name, row in measured.items():
                label = name if name == DENSE else f"{name}, K = {selected}"
                lines.setdefault(label, []).append((images, float(np.median(row["seconds"])), row["peak"]))
    if options.output:
        report.write(
            options.output, "bench_experts", plot(lines, "images", "A mixture of 32 experts, forward and backward")
        )


def _forms(images: int, num_experts: int, selected: int, factor: float) -> dict[str, ExpertsConfig]:
    groups = {f"one-hot, groups of {n}": n for n in (1, 4, 16) if n <= images}
    config = {"num_experts": num_experts, "num_selected": selected, "eval_capacity_factor": factor}
    forms = {name: ExpertsConfig(**config, tokens_per_group=n * TOKENS) for name, n in groups.items()}
    return {**forms, "sorted, ragged_dot": ExpertsConfig(**config, dispatch="ragged")}


def _measure(images: int, selected: int, options: argparse.Namespace, console: Console) -> dict[str, dict[str, Any]]:
    programs = {DENSE: Program.of(*_mlp(images))}
    for name, config in _forms(images, options.num_experts, selected, options.capacity_factor).items():
        programs[name] = Program.of(*_mixture(config, images))
    calls = {name: program.call for name, program in programs.items()}
    with console.status(f"{images} images, K = {selected}") as status:
        seconds = seconds_in_turn(calls, options.rounds, options.seconds, lambda text: status.update(text))
    return {name: {"seconds": seconds[name], "peak": program.peak} for name, program in programs.items()}


def _show(measured: dict[str, dict[str, Any]], images: int, selected: int, report: Report) -> None:
    seconds = {name: row["seconds"] for name, row in measured.items()}
    fastest = min((name for name in measured if "one-hot" in name), key=lambda name: float(np.median(seconds[name])))
    rows = [
        (
            name,
            f"{1e3 * np.median(row['seconds']):.1f}",
            f"{row['peak'] / 2**20:.0f}",
            spread(ratio(seconds, name, DENSE)),
            spread(ratio(seconds, fastest, name)),
        )
        for name, row in measured.items()
    ]
    columns = ("form", "ms (median)", "peak MiB", "time over dense MLP", f"{fastest} over it")
    report.table(f"{images} images, K = {selected}", columns, rows)


def _mixture(config: ExpertsConfig, images: int) -> tuple[Callable, Any, Any]:
    """Returns loss and gradient of a mixture, with its parameters and tokens."""

    def build() -> Experts:
        rngs = nnx.Rngs(0)
        return Experts(config, WIDTH, lambda rngs: Mlp(WIDTH, HIDDEN, "gelu_tanh", "float32", rngs), rngs)

    graph, params = nnx.split(build())

    def loss(params: Any, tokens: Any) -> Any:
        return jnp.sum(nnx.merge(graph, params)(tokens, images, ExpertKeys())[0] ** 2)

    return jax.value_and_grad(loss, argnums=(0, 1)), params, _tokens(images)


def _mlp(images: int) -> tuple[Callable, Any, Any]:
    graph, params = nnx.split(Mlp(WIDTH, HIDDEN, "gelu_tanh", "float32", nnx.Rngs(0)))

    def loss(params: Any, tokens: Any) -> Any:
        return jnp.sum(nnx.merge(graph, params)(tokens) ** 2)

    return jax.value_and_grad(loss, argnums=(0, 1)), params, _tokens(images)


def _tokens(images: int) -> Any:
    return jnp.asarray(np.random.default_rng(0).normal(size=(images * TOKENS, WIDTH)), jnp.float32)


def _check(num_experts: int) -> None:
    """Asserts that all forms agree."""
    values = {}
    for name, config in _forms(2, num_experts, 2, float(num_experts)).items():
        function, params, tokens = _mixture(config, 2)
        values[name] = jax.jit(function)(params, tokens)
    first, *others = values
    for other in others:
        assert_close(values[other][0], values[first][0], other)
        assert_close(values[other][1][1], values[first][1][1], other)


if __name__ == "__main__":
    main()
