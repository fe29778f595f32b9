"""A V-MoE-S/32 or the e3 of its shape on ImageNet from scratch (e3 App. K, Table 16).

    lit-het train --config configs/imagenet_experts.py:model=vmoe

Mixup, RandAugment, expert dropout, K, M and the learning rates to search, 0.001 and 0.003, are the paper's.
For the rest it refers to "AugReg" (Steiner et al. 2022): Adam, batch 4096, 300 epochs, cosine with 10,000 steps of
warm-up, clipping at 1, weight decay 0.1 times the learning rate, Inception crops and flips. Sizes are those of e3
App. A.1 (its S is 512 wide and 8 deep), the 8 experts those of the published V-MoE-S/32. Minival, on which the
paper selects, is 1 % of train (App. A.3). docs/paper_map.md, 52, lists differences from the published code.
"""

import dataclasses
from pathlib import Path
from typing import Literal

from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.images.augment import HorizontalFlip, RandAugment
from lit_het.data_pipelines.images.transforms import InceptionCrop, Preprocessing
from lit_het.data_pipelines.labels_config import ClassIndex
from lit_het.data_pipelines.shards.portions import Portion
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ZeroShotConfig
from lit_het.heads.classification_config import DeterministicConfig
from lit_het.sharding import MeshConfig
from lit_het.tasks.classification import ClassificationConfig
from lit_het.towers.encoder_config import EncoderConfig
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.optimizers_config import AdamW, Optimizer
from lit_het.training.schedules import Schedule

VMOE = ExpertsConfig(num_experts=8, num_selected=2, num_blocks=2, dropout_rate=0.2)
MODELS = {"vmoe": VMOE, "e3": dataclasses.replace(VMOE, num_selected=1, num_members=2)}
SHARDS = "data/imagenet"
LEARNING_RATE = 1e-3


def get_config(model: Literal["vmoe", "e3"] = "e3") -> ExperimentConfig:
    """Returns the run."""
    return ExperimentConfig(
        run_dir=Path(f"runs/imagenet_{model}"),
        task=ClassificationConfig(
            image_tower=ViTConfig(
                image_size=224,
                patch_size=32,
                encoder=EncoderConfig(512, 8, 2048, 8, experts=MODELS[model], compute_type="bfloat16"),
                pooling="class_token",
                members="apart",
            ),
            head=DeterministicConfig(zero_kernel=True),
            num_classes=1000,
            mixup=0.5,
        ),
        data=LoaderConfig(
            shards=(f"{SHARDS}/train",),
            image_size=224,
            batch_size=4096,
            labels=ClassIndex(),
            # The rest is minival, see the evaluations.
            portion=Portion(0, 99),
            preprocessing=Preprocessing(filter="fast"),
            crop=InceptionCrop(),
            augmentations=(HorizontalFlip(), RandAugment(2, 15.0)),
            threads=16,
        ),
        calibration=None,  # all samples of the recipe are trained on
        length=Duration(300, "epochs"),
        # AugReg's weight decay of 0.1 is multiplied by the learning rate; ours is the decay per step.
        optimizer=Optimizer(AdamW(), weight_decay=0.1 * LEARNING_RATE, clip_norm=1.0),
        schedule=Schedule(learning_rate=LEARNING_RATE, warmup=Duration(10_000)),
        mesh=MeshConfig(expert=-1),
        cadence=Cadence(log_steps=50, save_steps=1000, evaluate_steps=10_000),
        evaluations=(
            ZeroShotConfig(ImageSet("minival", SHARDS, split="train", portion=Portion(99))),
            ZeroShotConfig(ImageSet("imagenet", SHARDS)),
        ),
    )
