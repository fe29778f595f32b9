"""Fine-tuning a SoViT-400m/14 on ImageNet at 224, 384 or 518 pixels, in full size (SoViT Table 8).

    lit-het train --config configs/fine_tune_imagenet.py:image_size=384

All numbers are the table's. It does not specify the preprocessing of evaluation (here the whole image, squashed, as
for the training of the tower) and the variants of RandAugment and mixup: docs/paper_map.md, 33 and 34. Minival is the
end of the shards, which must not be sorted by class: ``lit-het data prepare imagenet --shuffle``.
"""

import dataclasses
from pathlib import Path
from typing import Literal

from lit_het.configs.experiment import ExperimentConfig, PretrainedConfig
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.images.augment import HorizontalFlip, RandAugment
from lit_het.data_pipelines.images.transforms import InceptionCrop, Preprocessing
from lit_het.data_pipelines.labels_config import ClassIndex
from lit_het.data_pipelines.shards.portions import Portion
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ZeroShotConfig
from lit_het.heads.classification_config import DeterministicConfig
from lit_het.losses.classification_config import SigmoidCrossEntropy
from lit_het.sharding import MeshConfig
from lit_het.tasks.classification import ClassificationConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.sizes import encoder_size
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.optimizers_config import SGD, Optimizer
from lit_het.training.schedules import Schedule

# SoViT Table 8.
LAYER_DECAY = {224: 0.85, 384: 0.9, 518: 0.9}
# Bias and zero kernel: every class starts with the probability 0.001 of one in 1,000.
HEAD = DeterministicConfig(initial_bias=-6.9, zero_kernel=True)
SHARDS = "data/imagenet"
EVALUATIONS = (
    ZeroShotConfig(ImageSet("minival", SHARDS, split="train", portion=Portion(98))),
    ZeroShotConfig(ImageSet("imagenet", SHARDS)),
)


def sovit(image_size: int) -> ViTConfig:
    """Returns the tower of SoViT Table 1."""
    # Without remat, 512 images of 518 pixels on 8 devices would save 500 GB per device for the backward pass.
    encoder = dataclasses.replace(encoder_size("So400m"), remat="full")
    return ViTConfig(image_size, patch_size=14, encoder=encoder, pooling="attention")


def get_config(image_size: Literal[224, 384, 518] = 518) -> ExperimentConfig:
    """Returns the run; set ``--pretrained.run``. ``head`` can be any of `lit_het/heads`."""
    is_large = image_size >= 384
    return ExperimentConfig(
        run_dir=Path(f"runs/fine_tune_imagenet_{image_size}"),
        task=ClassificationConfig(
            image_tower=sovit(image_size),
            head=HEAD,
            num_classes=1000,
            loss=SigmoidCrossEntropy(),
            mixup=0.2 if is_large else 0.0,
        ),
        data=LoaderConfig(
            shards=(f"{SHARDS}/train",),
            image_size=image_size,
            batch_size=512,
            labels=ClassIndex(),
            portion=Portion(0, 98),
            preprocessing=Preprocessing(filter="fast"),
            crop=InceptionCrop(),
            augmentations=(HorizontalFlip(), *([RandAugment(2, 10.0)] if is_large else [])),
            threads=16,
        ),
        pretrained=PretrainedConfig(run=Path("runs/so400m")),
        calibration=None,  # all samples of the recipe are trained on
        length=Duration(50_000),
        optimizer=Optimizer(SGD(), weight_decay=0.0, clip_norm=1.0, layer_decay=LAYER_DECAY[image_size]),
        schedule=Schedule(learning_rate=0.03, warmup=Duration(500)),
        mesh=MeshConfig(fsdp=-1),
        cadence=Cadence(log_steps=50, save_steps=1000, evaluate_steps=5000),
        evaluations=EVALUATIONS,
    )
