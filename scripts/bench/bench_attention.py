"""Times a ViT-B/16 as SigLIP has it, with attention in groups and of all images at once, beside transformers.

Variants run in turn; a ratio is taken round by round. Weights are random, which changes no time.

    python -m scripts.bench.bench_attention [--gradients] [--output results]
"""

import argparse
import os
from collections.abc import Callable
from typing import Any

# PyTorch's threads otherwise wait by spinning: on a machine with other jobs that is several times as slow.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console

from lit_het.planning.costs import product_flops
from lit_het.towers import attention
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.sizes import encoder_size
from scripts.bench.tools import MIB, Program, Report, parser_of, product_rate, ratio, seconds_in_turn, spread

try:
    import torch  # pyright: ignore[reportMissingImports]  # of the extra "parity"
except ImportError:
    torch = None

GROUPS, WHOLE, THEIRS = "in groups", "of all images", "transformers"
TOWER = ViTConfig(224, 16, encoder_size("B", compute_type="float32"), pooling="attention")


def main() -> None:
    """Prints the table."""
    parser = parser_of(__doc__, "JSON and Markdown")
    parser.add_argument("--images", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gradients", action="store_true", help="of the tower's parameters too")
    options = parser.parse_args()
    report = Report(Console(width=150), "ViT-B/16")
    report.note(f"{options.images} images, float32")
    programs, flops = _programs(options)
    calls: dict[str, Callable[[], Any]] = {name: one.call for name, one in programs.items()}
    if torch is not None:
        calls[THEIRS] = _theirs(options)
    with report.console.status("") as status:
        seconds = seconds_in_turn(calls, options.rounds, 1e9, status.update)
        peak = product_rate(4096, 768, 3072)
    rows = [
        (
            name,
            spread(times),
            f"{flops / np.median(times) / peak:.0%}",
            f"{programs[name].temporary / MIB:.0f}" if name in programs else "",
            spread(ratio(seconds, name, GROUPS)),
        )
        for name, times in seconds.items()
    ]
    report.table("ViT-B/16", ("attention", "seconds", "of bare products", "MiB", f"over {GROUPS}"), rows)
    if options.output:
        report.write(options.output, "bench_attention", None)


def _programs(options: argparse.Namespace) -> tuple[dict[str, Program], int]:
    graph, params = nnx.split(TOWER.build(nnx.Rngs(0)))
    images = jax.random.randint(jax.random.key(0), (options.images, 224, 224, 3), 0, 255).astype(jnp.uint8)

    def forward(params: Any, images: Any) -> Any:
        return jnp.sum(nnx.merge(graph, params)(images).embedding ** 2)

    function = jax.grad(forward) if options.gradients else forward
    limits = {GROUPS: attention._LOGITS_AT_ONCE, WHOLE: 2**60}
    programs = {}
    for name, limit in limits.items():
        attention._LOGITS_AT_ONCE = limit
        # JAX would return the program of the other limit for the same function.
        programs[name] = Program.of(lambda *args: function(*args), params, images)
    attention._LOGITS_AT_ONCE = limits[GROUPS]
    return programs, product_flops(function, params, images)


def _theirs(options: argparse.Namespace) -> Callable[[], Any]:
    from transformers import SiglipVisionConfig, SiglipVisionModel  # pyright: ignore[reportMissingImports]

    assert torch is not None
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    model = SiglipVisionModel(SiglipVisionConfig()).eval()
    images = torch.zeros(options.images, 3, 224, 224)

    def call() -> None:
        with torch.set_grad_enabled(options.gradients):  # pyright: ignore[reportOptionalMemberAccess]
            embedding = model(images).pooler_output
        if options.gradients:
            model.zero_grad()
            (embedding**2).sum().backward()

    return call


if __name__ == "__main__":
    main()
