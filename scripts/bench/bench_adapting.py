"""Times the ways to adapt a CLIP ViT-B/16 to one's own pairs, beside a step of OpenCLIP's model where it is installed.

All steps train on the same batch in turn, several rounds; ratios are taken round by round. Memory is that of the
compiled step: parameters, optimizer and temporary values. Weights are random, which changes no time. OpenCLIP's step is
its model and its loss with PyTorch's AdamW, without checkpoints of activations.

    python -m scripts.bench.bench_adapting --rounds 3                       # half an hour on two idle cores
    python -m scripts.bench.bench_adapting --compute-type bfloat16 --batch-size 256 --rounds 10      # on an accelerator
"""

import argparse
import dataclasses
import os
import time
from collections.abc import Callable

# PyTorch measures beside JAX on the same GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import numpy as np
from rich.console import Console

from lit_het.configs import lit_so400m_het_xl
from lit_het.configs.experiment import ExperimentConfig
from lit_het.heads.contrastive_config import DeterministicContrastiveConfig
from lit_het.losses.contrastive import SoftmaxLoss
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.towers.encoder_config import EncoderConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.text_config import TextConfig
from lit_het.towers.tuning_config import LoRA, Tuning
from lit_het.training.optimizers_config import AdamW, Optimizer
from lit_het.types import Batch
from scripts.bench.bench_train import JaxStep
from scripts.bench.tools import Report, between, parser_of, ratio, spread

try:
    from scripts.bench.bench_adapting_open_clip import open_clip_step
except ImportError:  # OpenCLIP is of no extra: it has an environment of its own
    open_clip_step = None

FULL, RIVAL = "full", "OpenCLIP, full"
WAYS = {
    FULL: None,
    "LoRA, rank 8": Tuning(lora=LoRA(rank=8)),
    "LoRA of all layers": Tuning(lora=LoRA(rank=8, pattern="encoder/.*")),
    "DoRA, rank 8": Tuning(lora=LoRA(rank=8, dora=True)),
    "last 4 blocks": Tuning(last_blocks=4),
    "biases and norms": Tuning(biases=True, norms=True),
}
AIMS = {f"{RIVAL} / {FULL}": "at least 1.0", f"LoRA, rank 8 / {FULL}": "at most 0.75"}


def main() -> None:
    """Prints tables, and writes them if a folder is named."""
    options = _options()
    report = Report(Console(width=140), "Adapting a CLIP ViT-B/16")
    batch = _batch(options.batch_size)
    steps: dict[str, Callable[[], float]] = {}
    memory: dict[str, int | None] = {}
    for name in options.ways:
        step = JaxStep(_config(WAYS[name], options), batch)
        memory[name] = step.memory
        steps[name] = _timing(step, step.place(batch))
    if open_clip_step is not None and options.open_clip:
        steps[RIVAL], memory[RIVAL] = open_clip_step(batch, options.compute_type), None
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    with report.console.status("") as status:
        for number in range(options.rounds + 1):
            for name, step in steps.items():
                status.update(f"round {number} of {options.rounds}: {name}")
                taken = step()
                if number:  # the first round warms up
                    seconds[name].append(taken)
    rows = [
        (
            name,
            "{} ({})".format(*between(times)),
            spread(ratio(seconds, name, FULL)),
            "-" if (size := memory[name]) is None else f"{size / 2**20:,.0f}",
            "-" if size is None else f"{size / (memory[FULL] or 1):.2f}",
            AIMS.get(f"{name} / {FULL}", ""),
        )
        for name, times in seconds.items()
    ]
    columns = ("step", "s (min-max)", f"/ {FULL}", "MiB", f"/ {FULL}", "aim of time")
    report.table(f"CLIP ViT-B/16, batch {options.batch_size}, {options.compute_type}", columns, rows)
    report.data["seconds"], report.data["memory"] = seconds, memory
    if options.output:
        report.write(options.output, "bench_adapting", None)


def _options() -> argparse.Namespace:
    parser = parser_of(__doc__, "JSON and Markdown")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ways", choices=WAYS, nargs="+", default=list(WAYS))
    parser.add_argument("--compute-type", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--unrolled", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--open-clip", action=argparse.BooleanOptionalAction, default=True)
    options = parser.parse_args()
    options.ways = list(dict.fromkeys([FULL, *options.ways]))
    return options


def _config(tuning: Tuning | None, options: argparse.Namespace) -> ExperimentConfig:
    config, how = lit_so400m_het_xl.get_config(), {"compute_type": options.compute_type, "unrolled": options.unrolled}
    encoder = EncoderConfig(activation="gelu", norm_epsilon=1e-5, **how)
    image = ViTConfig(224, 16, encoder, pooling="class_token", input_norm=True, projection_size=512, tuning=tuning)
    encoder = dataclasses.replace(encoder, width=512, mlp_width=2048, num_heads=8, causal=True)
    text = TextConfig(49_408, 77, 512, encoder, pooling="end_token", tuning=tuning)
    head = DeterministicContrastiveConfig()
    task = ContrastiveConfig(image, text, head, SoftmaxLoss(duplicates="negatives"), locked=())
    data = dataclasses.replace(config.data, batch_size=options.batch_size)
    return dataclasses.replace(config, task=task, data=data, optimizer=Optimizer(rule=AdamW()))


def _batch(size: int) -> Batch:
    random = np.random.default_rng(0)
    return Batch(
        valid=np.ones(size, bool),
        image=random.integers(0, 256, (size, 224, 224, 3), dtype=np.uint8),
        text=random.integers(0, 49_408, (size, 77)).astype(np.int32),
    )


def _timing(step: JaxStep, batch: Batch) -> Callable[[], float]:
    def timed() -> float:
        began = time.perf_counter()
        step(batch)()
        return time.perf_counter() - began

    return timed


if __name__ == "__main__":
    main()
