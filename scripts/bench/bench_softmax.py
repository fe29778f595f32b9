"""Times the softmax of a head with very many classes, forward and backward: all classes, some drawn, or a hierarchy.

The gradient is that of the features and of all parameters, which stays as large as the kernel with every softmax.
Variants run in turn; a ratio is taken round by round.

    python -m scripts.bench.bench_softmax [--classes 29593 1000000] [--features 128] [--batch 64] [--output results]
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console

from lit_het.cli.prepare import positive
from lit_het.heads.classification_config import DeterministicConfig, HetXLConfig
from lit_het.heads.logits_config import DenseLogits, HierarchicalSoftmax, LogitsConfig, SampledSoftmax
from lit_het.heads.noise_config import CovarianceConfig, SamplingConfig
from lit_het.losses.classification import SoftmaxCrossEntropy
from scripts.bench.tools import MIB, Program, Report, parser_of, ratio, seconds_in_turn, spread


def main() -> None:
    """Prints a table for each number of classes and of samples."""
    options = _options()
    report = Report(Console(width=150), "Softmax of very many classes")
    report.data["softmax"] = []
    for classes in options.classes:
        for samples in options.samples:
            _compare(options, report, classes, samples)
    if options.output:
        report.write(options.output, "bench_softmax", None)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__, "JSON and Markdown")
    parser.add_argument("--classes", type=positive, nargs="+", default=[29_593, 1_000_000], help="k")
    parser.add_argument(
        "--samples", type=int, nargs="+", default=[0, 4], help="S of HET-XL; 0 for a head without noise"
    )
    parser.add_argument("--features", type=positive, default=128, help="d")
    parser.add_argument("--candidates", type=positive, default=8192)
    parser.add_argument("--batch", type=positive, default=64)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="budget of a variant; at least 1 round")
    return parser.parse_args()


def _compare(options: argparse.Namespace, report: Report, classes: int, samples: int) -> None:
    layers = {"full": DenseLogits(), "sampled": SampledSoftmax(options.candidates), "two levels": HierarchicalSoftmax()}
    programs = {name: _program(options, layer, classes, samples) for name, layer in layers.items()}
    calls = {name: program.call for name, program in programs.items()}
    seconds = seconds_in_turn(calls, options.rounds, options.seconds, lambda _: None)
    rows = []
    for name, program in programs.items():
        times = seconds[name]
        outcomes = layers[name].num_outcomes(classes)
        rows.append(
            (
                name,
                f"{outcomes:,}",
                f"{1e3 * float(np.median(times)):.0f}",
                spread(ratio(seconds, name, "full")),
                f"{program.temporary / MIB:.0f}",
                f"{program.peak / MIB:.0f}",
            )
        )
        record = {"classes": classes, "samples": samples, "softmax": name, "seconds": times, "outcomes": outcomes}
        report.data["softmax"].append(record | {"temporary": program.temporary, "peak": program.peak})
    head = f"HET-XL, S = {samples}" if samples else "deterministic"
    title = f"{head}: k = {classes:,}, d = {options.features}, b = {options.batch}"
    report.table(title, ("softmax", "logits", "ms (median)", "time / full", "temporary MiB", "peak MiB"), rows)


def _program(options: argparse.Namespace, layer: LogitsConfig, classes: int, samples: int) -> Program:
    config = DeterministicConfig(get_logits=layer)
    if samples:
        noise, sampling = CovarianceConfig(8, "efficient"), SamplingConfig(num_samples=samples)
        config = HetXLConfig(noise, sampling=sampling, get_logits=layer)
    head = config.build(options.features, classes, nnx.Rngs(0))
    graph, params = nnx.split(head)
    features = jax.random.normal(jax.random.key(1), (options.batch, options.features))
    label = jax.random.randint(jax.random.key(2), (options.batch,), 0, classes)

    def loss(params: nnx.State, features: jax.Array, label: jax.Array, key: jax.Array) -> jax.Array:
        samples = nnx.merge(graph, params)(features, key)
        return SoftmaxCrossEntropy()(samples, label, jnp.ones(len(features), bool)).loss

    gradient = jax.value_and_grad(loss, argnums=(0, 1))
    return Program.of(gradient, params, features, label, jax.random.key(3))


if __name__ == "__main__":
    main()
