"""Losses, gradients and metrics of ten steps of each kind of task, head and loss.

``python -m tests.frozen.steps FOLDER`` writes the data and every configuration to a folder, in which ``lit-het train
--config CASE.json`` trains it.
"""

import contextlib
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_het.cli.main import main as lit_het
from lit_het.configs import experiment
from tests import conftest, tiny
from tests.frozen import files, kept_runs
from tests.frozen.command_line import configuration
from tests.frozen.figures import rounded

_OF_ALL_STEPS = ("train/loss", "train/gradient_norm")
_BLOCKS = ("width 16", "depth 1", "mlp-width 16", "num-heads 2", "compute-type float32")


def _small(tower: str) -> str:
    """Returns the flags of small blocks; bfloat16 takes long to compile."""
    return " ".join(f"--task.{tower}.encoder.{flag}" for flag in _BLOCKS)


_RUN = (
    "--length 10 --schedule.learning-rate 1e-3 --schedule.warmup 2 --cadence.log-steps 1 --cadence.save-steps 10 "
    "--calibration None --data.shards data/train --data.batch-size 16 --data.threads 0"
)
_IMAGES = (
    f"{_RUN} --data.image-size 16 --task.image-tower.image-size 16 --task.image-tower.patch-size 8 "
    f"{_small('image-tower')}"
)
_TOKENS = "--tokenizer.model data/tokenizer.model --tokenizer.length 8"
_TEXTS = f"{_TOKENS} --task.text-tower.vocabulary-size 40 --task.text-tower.length 8 {_small('text-tower')}"
_WRITES = f"{_TOKENS} --task.decoder.vocabulary-size 40 --task.decoder.length 8 {_small('decoder')}"
_PAIRS = f"{_IMAGES} {_TEXTS} --task.text-tower.embedding-size 16"
_SMALL = {
    "quickstart_upstream": f"{_IMAGES} --task.num-classes 6",
    "glyph_classifier": f"{_IMAGES} --task.num-classes 8",
    "quickstart_lit_deterministic": _PAIRS,
    "quickstart_lit_het_xl": f"{_PAIRS} --task.head.num-samples 4",
    "prolip_b16": f"{_PAIRS} --task.text-tower.embedding-size 32 --task.image-tower.projection-size 16",
    "quickstart_decoder": f"{_IMAGES} {_WRITES}",
    "translation_base": f"{_RUN} {_TEXTS} {_WRITES}",
}
# Towers of kept runs: to draw parameters takes half as long to compile as a step, and locked ones need no gradient.
_UNLOCKED = "--task.locked --pretrained None"
_TOWERS_OF = "--pretrained.pattern .*_tower/.* --pretrained.run"
_LOCKED = f"{_TOWERS_OF} deterministic"
_TUNED = f"{_LOCKED} --task.locked"
_CLASSES_TUNED = "--pretrained.run classifier"
_CLASSES_LOCKED = f"{_CLASSES_TUNED} --task.locked image_tower/.*"
# It compiles faster than others; without momentum nothing is rounded to half precision.
_SGD = "--optimizer.rule sgd --optimizer.rule.momentum 0 --schedule.learning-rate 0.03"
_ADAM_W = "--optimizer.rule adam_w"
_HET_XL = "--task.head het_xl --task.head.num-samples 4 --task.head.covariance.num-factors 4"
_BIAS = "--task.loss sigmoid --task.head.initial-bias -2"

PAIRS, CLASSES = "quickstart_lit_deterministic", "glyph_classifier"
CASES = {
    "sigmoid_classifier": ("quickstart_upstream", _ADAM_W),
    "softmax": (PAIRS, f"{_UNLOCKED} {_ADAM_W}"),
    "softmax_ring": (PAIRS, f"{_TUNED} --task.loss.form ring --task.loss.duplicates positives"),
    "sigmoid_ring": (PAIRS, f"{_LOCKED} {_BIAS} --task.loss.form ring"),
    "het_xl_locked_tower": ("quickstart_lit_het_xl", f"--pretrained.run classifier {_ADAM_W}"),
    "het_xl_delta": (PAIRS, f"{_LOCKED} {_HET_XL} --task.head.num-samples 0 --task.loss.likelihood delta"),
    "het_xl_sigmoid": (PAIRS, f"{_LOCKED} {_HET_XL} {_BIAS}"),
    "gaussian_mixing": (
        PAIRS,
        # As negatives, equal captions fit as well as the partner but for rounding, which would decide.
        f"{_LOCKED} --task.head gaussian {_BIAS} --task.loss.pseudo-positives 0.1 --task.loss.duplicates positives "
        "--task.mixing.fraction 0.5",
    ),
    "prolip": ("prolip_b16", f"{_TOWERS_OF} gaussian --task.masking.every 2 --task.masking.mask-token 39"),
    "prob_vlm": (PAIRS, f"{_LOCKED} --task.head prob_vlm --task.head.hidden-size 16"),
    "mc_dropout_microbatches": (PAIRS, f"{_LOCKED} --task.head mc_dropout --task.microbatches 2"),
    "captioner": (
        PAIRS,
        f"{_LOCKED} --task.captioner.weight 2 --task.captioner.decoder.vocabulary-size 40 "
        f"--task.captioner.decoder.length 8 {_small('captioner.decoder')} --data.prompt=",
    ),
    "distillation": (
        PAIRS,
        f"{_LOCKED} --task.locked text_tower/.* --average-decay 0.9 --task.distillation.start 5 "
        "--task.distillation.num-views 2 --task.distillation.view-size 8 --task.distillation.hidden 16 "
        "--task.distillation.bottleneck 8 --task.distillation.num-prototypes 16",
    ),
    "patch_sizes": (
        CLASSES,
        "--task.head deterministic --task.image-tower.positions learned --task.image-tower.patch-sizes 4 8",
    ),
    "het_classifier": (CLASSES, f"{_CLASSES_LOCKED} --task.head het"),
    "het_h_classifier_held_out": (
        CLASSES,
        f"{_CLASSES_LOCKED} --task.head het_h --task.head.num-buckets 4 "
        "--task.temperature-gradient temperature_gradient",
    ),
    "het_xl_classifier": (CLASSES, _CLASSES_TUNED),
    "luketina": (CLASSES, f"{_CLASSES_LOCKED} --task.temperature-gradient.method luketina"),
    "mixup": (CLASSES, f"{_CLASSES_TUNED} --task.head deterministic --task.mixup 0.5"),
    "mimo": (CLASSES, "--task.image-tower.num-inputs 2 --task.num-heads 2 --task.mimo mimo"),
    "e3": (
        CLASSES,
        "--task.image-tower.encoder.depth 2 --task.image-tower.encoder.experts.num-experts 4 "
        "--task.image-tower.encoder.experts.num-blocks 1 --task.image-tower.encoder.experts.num-members 2 "
        "--task.image-tower.members apart",
    ),
    "skipped_steps": (
        CLASSES,
        f"{_CLASSES_TUNED} --task.head deterministic --on-nonfinite skip --schedule.learning-rate 1e30 "
        "--schedule.initial-rate 1e-3",
    ),
    "groups_sgd_linear": (
        CLASSES,
        f"{_CLASSES_TUNED} --task.head deterministic --optimizer.rule sgd --optimizer.weight-decay 0.01 "
        "--schedule.decay linear",
    ),
    "layer_decay_average_adafactor_square_root": (
        CLASSES,
        f"{_CLASSES_TUNED} --task.head deterministic --average-decay 0.9 --optimizer.rule adafactor "
        "--optimizer.layer-decay 0.5 --schedule.decay reverse_square_root --schedule.decay.timescale 3 "
        # The gradient of these biases is rounding, which Adafactor would scale to that of others.
        "--schedule.decay.cooldown 2 --task.locked .*/key/bias",
    ),
    "captioning": (
        "quickstart_decoder",
        "--pretrained.run classifier --data.mixture.0.shards data/train --data.mixture.0.captions txt "
        "--data.mixture.0.prompt red",
    ),
    "translation": (
        "translation_base",
        "--tokenizer.length 12 --task.text-tower.length 12 --task.decoder.length 12 "
        f"--data.source txt --data.captions txt --data.prompt= {_ADAM_W}",
    ),
}
"""Shipped configurations and flags."""

_GROUPS = [
    {"pattern": "head/.*", "learning_rate_factor": 10.0, "weight_decay_factor": 0.0},
    {"pattern": "image_tower/patches/.*", "learning_rate_factor": 0.0, "weight_decay_factor": 2.0},
]
# One of each kind of task and loss. On one device, tests/frozen/test_runs.py has steps of these tasks and a captioner.
ON_EIGHT_DEVICES = (
    *("het_xl_sigmoid", "het_xl_classifier", "captioning", "translation"),
    *("softmax_ring", "sigmoid_ring", "e3"),
)
ON_ONE_DEVICE = tuple(name for name in CASES if name not in (*ON_EIGHT_DEVICES, "captioner"))


def recorded() -> dict[str, Any]:
    """Returns the configuration of each case, and its figures on one and on eight devices."""
    found: dict[str, Any] = {name: {"config": _config(name)} for name in CASES}
    for devices, names in ((1, ON_ONE_DEVICE), (8, ON_EIGHT_DEVICES)):
        seen = conftest.one_device() if devices == 1 else contextlib.nullcontext()
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), seen:
            write({name: case["config"] for name, case in found.items()})
            for name in names:
                found[name][f"devices {devices}"] = figures(name)
    return found


def write(configs: Mapping[str, Any]) -> None:
    """Writes data, the kept runs that cases begin with, and configurations to the working directory."""
    tiny.write_data(Path("data"))
    for run in ("deterministic", "gaussian"):
        kept_runs.unpack(Path(), run)
    for name, config in configs.items():
        Path(f"{name}.json").write_text(json.dumps(config))


def figures(name: str) -> dict[str, float | list[float]]:
    """Trains a case in the working directory; returns losses and gradients of all steps, and other metrics at the end.

    Where a step is skipped, it has no loss.
    """
    assert lit_het(["train", "--config", f"{name}.json"]) == 0
    records = [json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()]
    of_steps = {key: [record[key] for record in records if key in record] for key in _OF_ALL_STEPS}
    last = {key: value for key, value in records[-1].items() if key != "train/steps_per_second"}
    return rounded(of_steps | {key: last[key] for key in sorted(last) if key not in of_steps})


def _config(name: str) -> dict[str, Any]:
    shipped, flags = CASES[name]
    rule = "" if "--optimizer.rule" in flags else _SGD
    flags = f"{_SMALL[shipped]} --run-dir {name} {rule} {flags}"
    config = experiment.to_dict(configuration(shipped, *flags.split()))
    if name == "groups_sgd_linear":  # which no flag adds
        config["optimizer"]["groups"] = _GROUPS
    return config | {"evaluations": []}


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(sys.argv[1]):
        write({name: case["config"] for name, case in files.read("steps").items()})
