"""Paths, shapes and types of the parameters of every shipped configuration, and of what none of them has."""

import functools
from collections.abc import Mapping
from pathlib import Path

from lit_het import parameters
from lit_het.configs import experiment
from lit_het.paths import locate_config, shipped_configs
from tests.frozen.command_line import configuration
from tests.frozen.configurations import with_arguments

_E3 = "--task.image-tower.encoder.depth 4 --task.image-tower.encoder.experts.num-experts 4"
_BERT = "--task.text-tower bert --task.text-tower.encoder.norm-placement after --task.text-tower.projection-size"
OTHERS = {
    "quickstart_lit_deterministic": (
        "--task.head.initial-bias -10",
        "--task.head.temperature fixed",
        "--task.head.temperature bounded",
        "--task.head het_xl --task.head.covariance.form efficient",
        "--task.head het_xl --task.head.covariance.second-term diagonal",
        "--task.head het_xl --task.head.noisy text",
        "--task.head gaussian",
        "--task.head prob_vlm",
        "--task.head bayes_vlm",
        "--task.head bayes_vlm --task.image-tower.projection-size 192 --task.image-tower.layer-input",
        "--task.head bayes_vlm --task.text-tower.layer-input",
        "--task.head mc_dropout",
        "--task.captioner.weight 1",
        "--task.captioner.weight 1 --task.captioner.head het_xl",
        "--task.distillation.view-size 16 --average-decay 0.9 --task.locked",
        "--task.temperature-gradient temperature_gradient",
        *(f"--task.text-tower.pooling {kind}" for kind in ("first", "mean", "max", "attention", "class_token")),
        "--task.text-tower.pooling end_token --task.text-tower.end-token 1",
        "--task.text-tower.positions sinusoidal",
        f"{_BERT} 192",
        f"{_BERT} 192 --task.head bayes_vlm --task.text-tower.layer-input",
        f"{_BERT} None --task.text-tower.encoder.width 192",
        f"{_BERT} None --task.text-tower.encoder.width 192 --task.text-tower.pooler",
    ),
    "glyph_classifier": (
        "--task.head deterministic",
        "--task.head het",
        "--task.head het --task.head.covariance.form full --task.head.covariance.second-term diagonal",
        "--task.head het_h",
        "--task.head.unshared-size 8",
        "--task.head.temperature log",
        "--task.num-heads 2",
        "--task.image-tower.num-inputs 2 --task.num-heads 2 --task.mimo mimo",
        "--task.image-tower resnet",
        "--task.image-tower resnet --task.image-tower.depth 101 --task.image-tower.width-multiplier 2",
        *(f"--task.image-tower.pooling {kind}" for kind in ("class_token", "mean", "first")),
        "--task.image-tower.positions learned",
        "--task.image-tower.num-registers 2",
        "--task.image-tower.input-norm",
        "--task.image-tower.representation-size 8",
        "--task.image-tower.projection-size 8",
        "--task.image-tower.pooling class_token --task.image-tower.norm-twice",
        "--task.image-tower.encoder.layer-scale",
        "--task.image-tower.encoder.norm-placement after",
        _E3,
        f"{_E3} --task.image-tower.encoder.experts.rank-one rank_one",
        f"{_E3} --task.image-tower.encoder.experts.num-members 2 --task.image-tower.members apart",
        f"{_E3} --task.image-tower.encoder.experts.num-members 2 --task.image-tower.members concatenated",
    ),
    "quickstart_decoder": (
        "--task.image-tower.class-token",
        "--task.head het_xl",
        "--task.decoder.no-tied-output",
        "--task.decoder.positions sinusoidal",
    ),
    "translation_base": ("--task.no-shared-embedding",),
}
"""Flags of what no shipped configuration has."""


def recorded() -> dict[str, dict[str, Mapping[str, object]]]:
    """Returns the parameters of each configuration, and what arguments and flags change."""
    return {name: {"parameters": of(name), "changes": changed(name)} for name in shipped_configs()}


def changed(name: str) -> dict[str, dict[str, str | None]]:
    """Returns the parameters that arguments and flags change in a configuration; null are those that they take away."""
    before = of(name)
    arguments = {other: _changes(before, of(other)) for other in with_arguments(name)}
    return arguments | {flags: _changes(before, of(name, *flags.split())) for flags in OTHERS.get(name, ())}


@functools.cache
def of(name: str, *flags: str) -> Mapping[str, str]:
    """Returns type and shape of the parameters of a configuration by their paths."""
    config = configuration(name, *flags) if flags else experiment.load_module_config(locate_config(Path(name)))
    shapes = parameters.flatten(config.task.build().shapes)
    return {path: f"{leaf.dtype} {','.join(map(str, leaf.shape))}".strip() for path, leaf in sorted(shapes.items())}


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    paths = sorted(before.keys() | after.keys())
    return {path: after.get(path) for path in paths if before.get(path) != after.get(path)}
