"""Times contrastive losses and measures their memory, one device, forward and backward, over batch sizes.

Deterministic embeddings, and noise on both sides with one sample; logits in blocks, whole ("dense"), or whole and in
both directions as most implementations have them, in plain JAX and, where it is installed, plain PyTorch. The gradient
is that of both embeddings, of noisy queries and of the temperature. Variants run in turn; a ratio is taken round by
round.

    python -m scripts.bench.bench_losses --batches 4096 8192 --sizes 512 [--output results]
"""

import argparse
import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

# PyTorch measures beside JAX on the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# PyTorch's threads otherwise wait by spinning: on a machine with other jobs that is several times as slow.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from rich.console import Console

from lit_het.heads.base import unit
from lit_het.losses.contrastive import ContrastiveLoss, SigmoidLoss, SoftmaxLoss
from lit_het.types import EmbeddingSamples, Queries
from scripts.bench.tools import GIB, Program, Report, assert_close, parser_of, plot, ratio, seconds_in_turn, spread

try:
    import torch  # pyright: ignore[reportMissingImports]  # of the extra "parity"
except ImportError:
    torch = None

PLAIN, PLAIN_TORCH = "plain JAX, both matrices", "plain PyTorch, both matrices"
# Matrices [b b] of the plain PyTorch loss: logits, their log-probabilities and their gradients, both ways.
TORCH_MATRICES = 6
TEMPERATURE, BIAS = 0.1, -10.0
# (numerator, denominator, what is asked of their ratio)
RATIOS = (
    ("softmax, blocks", "softmax, dense", "at most 1.1"),
    (PLAIN_TORCH, "softmax, blocks", "at least 1.5"),
    (PLAIN, "softmax, blocks", ""),
    ("noisy softmax, blocks", "softmax, blocks", "at most 2.1"),
    ("noisy softmax, blocks", "noisy softmax, dense", ""),
    ("softmax, ring", "softmax, blocks", ""),
    ("softmax with smoothing, blocks", "softmax, blocks", ""),
    ("noisy softmax with smoothing, blocks", "noisy softmax, blocks", ""),
    ("sigmoid, blocks", "sigmoid, dense", ""),
)

# Embeddings, noisy queries of both sides, τ and bias.
Inputs = dict[str, Array]


def main() -> None:
    """Prints the tables."""
    options = _options()
    if options.torch_memory:
        print(_torch_growth(*options.torch_memory))
        return
    console = Console(width=150)
    _check(options.only)
    report = Report(console, "Contrastive losses")
    threads = "" if torch is None else f"PyTorch {torch.__version__} on {_torch_device()}; "
    report.note(
        f"{threads}blocks of {options.block_sizes} queries, forward and backward. On a CPU PyTorch's memory is the "
        "growth of a fresh process' resident set over one step, plus its inputs; on a GPU its allocator's peak."
    )
    results = [result for size in options.sizes for result in _measure_size(size, options, report)]
    report.data["results"] = results
    if options.output:
        size = options.sizes[0]
        names = dict.fromkeys(row["name"] for row in results)
        lines = {
            name: [
                (row["batch"], row["median"], row["peak"])
                for row in results
                if row["name"] == name and row["size"] == size
            ]
            for name in names
        }
        figure = plot(lines, "batch size b", f"Contrastive losses, forward and backward, d = {size}")
        report.write(options.output, "bench_losses", figure)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__, "JSON, Markdown and a plot")
    batches = [4096, 8192, 16384, 32768, 65536, 131072, 262144]
    parser.add_argument("--batches", type=int, nargs="+", default=batches)
    parser.add_argument("--sizes", type=int, nargs="+", default=[512, 1152], help="of embeddings, d")
    parser.add_argument("--block-sizes", type=int, nargs="+", default=[1024])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=60.0, help="budget of a variant; at least 1 round")
    parser.add_argument("--longest", type=float, default=600.0, help="leaves out calls expected to take longer")
    parser.add_argument("--memory-limit-gb", type=float, default=None, help="20 on a CPU, 60 %% of a GPU")
    parser.add_argument("--only", nargs="+", default=None, help="variants whose name has one of these words")
    parser.add_argument("--torch-memory", type=int, nargs=2, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure_size(size: int, options: argparse.Namespace, report: Report) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for batch in options.batches:
        previous = {row["name"]: row for row in results if row["median"]}
        rows, seconds = _measure(batch, size, options, report.console, previous)
        columns = ("loss", "ms (median)", "min-max", "rounds", "peak MiB", "of which temporary", "compile s")
        report.table(f"b = {batch}, d = {size}", columns, [_cells(row) for row in rows])
        lines = []
        for first, second, goal in _ratios(options.block_sizes):
            if ratios := ratio(seconds, first, second):
                lines.append((f"{first} / {second}", spread(ratios), goal))
        report.table(f"Ratios of time, b = {batch}, d = {size}", ("ratio", "median (min-max)", "goal"), lines)
        results += rows
    _print_growth(results, size, report)
    return results


def _measure(
    batch: int, size: int, options: argparse.Namespace, console: Console, previous: dict[str, Any]
) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
    limit = _memory_limit(options)
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, Callable[[], Any]] = {}
    with console.status(f"b = {batch}, d = {size}") as status:

        def progress(text: str) -> None:
            status.update(f"b = {batch}, d = {size}: {text}")

        inputs = _inputs(batch, size)
        for name, loss in _losses(options.block_sizes).items():
            if not _is_wanted(name, options.only):
                continue
            progress(f"compiling {name}")
            arguments = {key: value for key, value in inputs.items() if key in _inputs_of(name)}
            program = Program.of(jax.value_and_grad(loss), arguments)
            figures = {"peak": program.peak, "temporary": program.temporary, "compile_seconds": program.compile_seconds}
            rows[name] = {"name": name, "batch": batch, "size": size, **figures}
            calls[name] = program.call
        if torch is not None and _is_wanted(PLAIN_TORCH, options.only):
            peak = (TORCH_MATRICES * batch**2 + 4 * batch * size) * 4
            rows[PLAIN_TORCH] = {"name": PLAIN_TORCH, "batch": batch, "size": size, "peak": peak}
            calls[PLAIN_TORCH] = _torch_call(inputs)
        for name, row in rows.items():
            row["note"] = _why_not(row, limit, options.longest, previous.get(name))
        calls = {name: call for name, call in calls.items() if not rows[name]["note"]}
        if PLAIN_TORCH in calls:
            progress(f"memory of {PLAIN_TORCH}")
            rows[PLAIN_TORCH]["peak"] = _torch_peak(batch, size)
        seconds = seconds_in_turn(calls, options.rounds, options.seconds, progress)
    for name, row in rows.items():
        row["seconds"] = seconds.get(name, [])
        row["median"] = float(np.median(row["seconds"])) if row["seconds"] else None
    return list(rows.values()), seconds


def _why_not(row: dict[str, Any], limit: float, longest: float, previous: dict[str, Any] | None) -> str:
    """Returns why a variant is not run, or nothing."""
    if row["peak"] > limit:
        return "does not fit"
    if previous and previous["median"] * (row["batch"] / previous["batch"]) ** 2 > longest:
        return "takes too long"
    return ""


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    peak, temporary = (f"{row[key] / 2**20:.0f}" if key in row else "-" for key in ("peak", "temporary"))
    compiling = f"{row['compile_seconds']:.1f}" if "compile_seconds" in row else "-"
    if row["note"]:
        return row["name"], row["note"], "-", "-", peak, temporary, compiling
    times = [1e3 * value for value in row["seconds"]]
    between = f"{min(times):.0f}-{max(times):.0f}"
    return row["name"], f"{1e3 * row['median']:.1f}", between, str(len(times)), peak, temporary, compiling


def _print_growth(results: list[dict[str, Any]], size: int, report: Report) -> None:
    """Prints by how much peak memory grows when the batch doubles: 2 is linear, 4 is quadratic."""
    rows = []
    for name in dict.fromkeys(row["name"] for row in results):
        points = [(row["batch"], row["peak"]) for row in results if row["name"] == name]
        growth = [
            f"{(after[1] / before[1]) ** (np.log(2) / np.log(after[0] / before[0])):.2f}"
            for before, after in itertools.pairwise(points)
        ]
        rows.append((name, " ".join(growth) or "-"))
    title = f"Growth of peak memory per doubling of the batch, d = {size} (2 is linear, 4 quadratic)"
    report.table(title, ("loss", "growth"), rows)


def _losses(block_sizes: list[int]) -> dict[str, Callable[[Inputs], Float[Array, ""]]]:
    losses: dict[str, Callable[[Inputs], Float[Array, ""]]] = {
        "softmax, dense": _loss(SoftmaxLoss("dense")),
        PLAIN: _plain,
        "noisy softmax, dense": _loss(SoftmaxLoss("dense")),
        "sigmoid, dense": _loss(SigmoidLoss("dense")),
    }
    for size in block_sizes:
        suffix = _suffix(size, block_sizes)
        losses |= {
            f"softmax, blocks{suffix}": _loss(SoftmaxLoss("gather", size)),
            f"softmax, ring{suffix}": _loss(SoftmaxLoss("ring", size)),
            f"noisy softmax, blocks{suffix}": _loss(SoftmaxLoss("gather", size)),
            f"softmax with smoothing, blocks{suffix}": _loss(SoftmaxLoss("gather", size, label_smoothing=0.1)),
            f"noisy softmax with smoothing, blocks{suffix}": _loss(SoftmaxLoss("gather", size, label_smoothing=0.1)),
            f"sigmoid, blocks{suffix}": _loss(SigmoidLoss("gather", size)),
        }
    return losses


def _suffix(size: int, block_sizes: list[int]) -> str:
    return f" of {size}" if size != block_sizes[0] else ""


def _ratios(block_sizes: list[int]) -> list[tuple[str, str, str]]:
    blocks = ("softmax, blocks", "noisy softmax, blocks", "sigmoid, blocks")
    between = [
        (f"{name}{_suffix(size, block_sizes)}", name, f"block {size} / {block_sizes[0]}")
        for name in blocks
        for size in block_sizes[1:]
    ]
    return [*RATIOS, *between]


def _is_wanted(name: str, words: list[str] | None) -> bool:
    return words is None or any(word in name for word in words)


def _loss(loss: ContrastiveLoss) -> Callable[[Inputs], Float[Array, ""]]:
    def of(inputs: Inputs) -> Float[Array, ""]:
        image, text, temperature = inputs["image"], inputs["text"], inputs["temperature"]
        image_queries = Queries(inputs["image_queries"]) if "image_queries" in inputs else None
        text_queries = Queries(inputs["text_queries"]) if "text_queries" in inputs else None
        samples = EmbeddingSamples(image, text, image_queries, text_queries, temperature, inputs.get("bias"))
        return loss(samples, jnp.ones(image.shape[0], bool))

    return of


def _plain(inputs: Inputs) -> Float[Array, ""]:
    image, text, temperature = inputs["image"], inputs["text"], inputs["temperature"]

    def cross_entropy(logits: Float[Array, "b b"]) -> Float[Array, ""]:
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(logits)))

    return (cross_entropy(image @ text.T / temperature) + cross_entropy(text @ image.T / temperature)) / 2


def _inputs_of(name: str) -> tuple[str, ...]:
    names = ("image", "text", "temperature")
    if name.startswith("noisy"):
        return (*names, "image_queries", "text_queries")
    return (*names, "bias") if name.startswith("sigmoid") else names


def _inputs(batch: int, size: int) -> Inputs:
    """Returns unit embeddings of which partners resemble one another, and queries that are these with noise."""

    @jax.jit
    def draw() -> Inputs:
        common, image, text, of_image, of_text = (
            jax.random.normal(key, (batch, size)) for key in jax.random.split(jax.random.key(0), 5)
        )
        image, text = unit(common + image), unit(common + text)
        noise = 0.1 / size**0.5
        return {
            "image": image,
            "text": text,
            "image_queries": (image + noise * of_image)[:, None],
            "text_queries": (text + noise * of_text)[:, None],
            "temperature": jnp.float32(TEMPERATURE),
            "bias": jnp.float32(BIAS),
        }

    return draw()


def _torch_device() -> str:
    assert torch is not None
    return "cuda" if torch.cuda.is_available() and jax.default_backend() == "gpu" else "cpu"


def _torch_tensors(arrays: list[np.ndarray]) -> list[Any]:
    assert torch is not None
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    # JAX multiplies float32 matrices in TF32 on a GPU by default.
    torch.backends.cuda.matmul.allow_tf32 = True
    return [torch.tensor(array, device=_torch_device(), requires_grad=True) for array in arrays]


def _torch_step(tensors: list[Any]) -> float:
    """Runs forward and backward and returns the loss."""
    assert torch is not None
    image, text, temperature = tensors
    labels = torch.arange(image.shape[0], device=image.device)
    cross_entropy = torch.nn.functional.cross_entropy
    there, back = image @ text.T / temperature, text @ image.T / temperature
    loss = (cross_entropy(there, labels) + cross_entropy(back, labels)) / 2
    torch.autograd.grad(loss, tensors)
    # Waits for a GPU.
    return loss.item()


def _torch_call(inputs: Inputs) -> Callable[[], float]:
    arrays = [np.asarray(inputs[name]) for name in ("image", "text", "temperature")]
    tensors: list[Any] = []

    def call() -> float:
        if not tensors:
            tensors.extend(_torch_tensors(arrays))
        loss = _torch_step(tensors)
        if torch is not None and _torch_device() == "cuda":
            # autograd.grad has run when the value is asked for, but not finished.
            torch.cuda.synchronize()
        return loss

    return call


def _torch_peak(batch: int, size: int) -> int:
    """Returns bytes at the peak of a step: on a GPU its allocator's, on a CPU of a process of its own.

    A fresh process' greatest resident set before and after the step is known to the system; JAX's own memory and
    whatever ran before would hide the growth in this process.
    """
    assert torch is not None
    if _torch_device() == "cuda":
        torch.cuda.reset_peak_memory_stats()
        _torch_growth(batch, size)
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.empty_cache()
        return peak
    command = [sys.executable, "-m", "scripts.bench.bench_losses", "--torch-memory", str(batch), str(size)]
    result = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(result.stdout.split()[-1])


def _torch_growth(batch: int, size: int) -> int:
    """Returns by how many bytes this process grew over one step, with its inputs."""
    random = np.random.default_rng(0)
    arrays = [random.standard_normal((batch, size), dtype=np.float32) for _ in range(2)]
    tensors = _torch_tensors([*arrays, np.float32(TEMPERATURE)])  # type: ignore[list-item]
    _torch_step(_torch_tensors([*(array[:8] for array in arrays), np.float32(TEMPERATURE)]))  # type: ignore[list-item]
    before = _greatest_resident_set()
    _torch_step(tensors)
    return _greatest_resident_set() - before + 2 * arrays[0].nbytes


def _greatest_resident_set() -> int:
    """Returns bytes; unlike `resource.getrusage` it does not begin with that of the parent process."""
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def _memory_limit(options: argparse.Namespace) -> float:
    if options.memory_limit_gb is not None:
        return options.memory_limit_gb * GIB
    statistics = jax.devices()[0].memory_stats() if jax.default_backend() == "gpu" else None
    return 0.6 * statistics["bytes_limit"] if statistics else 20 * GIB


def _check(only: list[str] | None, batch: int = 48, size: int = 16) -> None:
    """Asserts at a small size that all forms agree, gradients included."""
    inputs = _inputs(batch, size)
    reference: dict[str, Any] = {}
    for name, loss in _losses([16, 5]).items():
        if not _is_wanted(name, only):
            continue
        kind = name.split(",")[0] if name.startswith(("noisy", "sigmoid")) or "smoothing" in name else "softmax"
        arguments = {key: value for key, value in inputs.items() if key in _inputs_of(name)}
        results = jax.jit(jax.value_and_grad(loss))(arguments)
        for found, wanted in zip(*map(jax.tree.leaves, (results, reference.setdefault(kind, results))), strict=True):
            assert_close(found, wanted, name)
    if torch is not None and "softmax" in reference:
        np.testing.assert_allclose(_torch_call(inputs)(), reference["softmax"][0], rtol=1e-2)


if __name__ == "__main__":
    main()
