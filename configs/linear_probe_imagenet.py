"""A linear probe of a frozen SoViT-400m/14 on ImageNet at 224 pixels, in full size (SoViT Table 9, App. E.2).

All numbers are the paper's; what Table 9 does not specify is from the fine-tuning recipe. Training images are resized
to 256 x 256 and cropped to 224 x 224; evaluation uses the whole image. Its evaluations search the grid of the paper,
both crops included, and test the best setting on the six sets of Table 2:

    lit-het evaluate --checkpoint runs/so400m --config linear_probe_imagenet
"""

import dataclasses
from pathlib import Path

from lit_het.configs import fine_tune_imagenet
from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.images.augment import HorizontalFlip
from lit_het.data_pipelines.images.transforms import RandomCrop
from lit_het.data_pipelines.shards.portions import Portion
from lit_het.eval.fits import LinearProbeOptions
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import EvaluationConfig, LinearProbeConfig, ZeroShotConfig
from lit_het.training.durations import Duration
from lit_het.training.optimizers_config import SGD, Optimizer
from lit_het.training.schedules import Schedule


def get_config() -> ExperimentConfig:
    """Returns the run; set ``--pretrained.run``."""
    recipe = fine_tune_imagenet.get_config(image_size=224)
    return dataclasses.replace(
        recipe,
        run_dir=Path("runs/linear_probe_imagenet"),
        task=dataclasses.replace(recipe.task, locked=("image_tower/.*",), mixup=0.1),
        data=dataclasses.replace(
            recipe.data, portion=Portion(0, 99), crop=RandomCrop(224 / 256), augmentations=(HorizontalFlip(),)
        ),
        evaluations=(
            ZeroShotConfig(ImageSet("minival", fine_tune_imagenet.SHARDS, split="train", portion=Portion(99))),
            recipe.evaluations[1],
        ),
        length=Duration(24_700),
        optimizer=Optimizer(SGD(), weight_decay=0.0, clip_norm=None),
        schedule=Schedule(learning_rate=3e-4, warmup=Duration(10, "percent")),
    )


def get_evaluations() -> tuple[EvaluationConfig, ...]:
    """Returns the grid of App. E.2, whose best setting is tested on all sets of Table 2.

    The sets are those of ``lit-het data prepare``, and ``real.json`` the published ReaL labels.
    """
    others = tuple(f"{name}=data/{name}" for name in ("imagenetv2", "imagenet_r", "imagenet_a", "objectnet"))
    return (
        LinearProbeConfig(
            ImageSet("imagenet", fine_tune_imagenet.SHARDS),
            fit=LinearProbeOptions(crops=("random", "inception")),
            relabels=Path("data/real.json"),
            others=others,
        ),
    )
