"""Supervised pre-training of a ViT-L/32 or a ResNet152 on ImageNet-21k with a HET-XL head (HET-XL App. N.1).

    lit-het train --config configs/imagenet21k_het_xl.py:tower=resnet152

Batch size, epochs, Adam, weight decay, warm-up, factors and samples are the paper's. It specifies no loss, decay or
augmentation. Its likelihoods (NLL 5.72 at 47 % precision) are those of a sigmoid loss. Loss, bias, clipping, linear
decay, crops and flips are those of the authors' scripts in uncertainty-baselines.
"""

from pathlib import Path
from typing import Literal

from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.images.augment import HorizontalFlip
from lit_het.data_pipelines.images.transforms import InceptionCrop, Preprocessing
from lit_het.data_pipelines.labels_config import ClassIndex
from lit_het.heads.classification_config import HetXLConfig
from lit_het.heads.noise_config import CovarianceConfig, SamplingConfig
from lit_het.losses.classification_config import SigmoidCrossEntropy
from lit_het.tasks.classification import ClassificationConfig
from lit_het.towers.image_config import ResNetConfig, ViTConfig
from lit_het.towers.sizes import encoder_size
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.optimizers_config import AdamW, Optimizer
from lit_het.training.schedules import Linear, Schedule

NUM_CLASSES = 21_843
LEARNING_RATE = 1e-3


TOWERS = {
    "vit_l32": ViTConfig(224, 32, encoder_size("L"), pooling="class_token", representation_size=1024),
    "resnet152": ResNetConfig(152, compute_type="bfloat16"),
}
BATCH_SIZES = {"vit_l32": 4096, "resnet152": 1024}
WEIGHT_DECAYS = {"vit_l32": 0.1, "resnet152": 0.03}


def get_config(tower: Literal["vit_l32", "resnet152"] = "vit_l32") -> ExperimentConfig:
    """Returns the run; set ``--data.shards``. ``head`` can be any of `lit_het/heads`."""
    return ExperimentConfig(
        run_dir=Path(f"runs/imagenet21k_{tower}_het_xl"),
        task=ClassificationConfig(
            image_tower=TOWERS[tower],
            head=HetXLConfig(
                covariance=CovarianceConfig(num_factors=50, form="efficient", learning_rate_factor=1.0),
                # Blocks of 1024 vectors leave a TPU's on-chip memory at every operation of the loss: on 64 v5e chips
                # the compiled step would be bound by 136 ms, with 256 by 93 ms. Results are the same.
                sampling=SamplingConfig(num_samples=1000, num_eval_samples=1000, antithetic=False, block_size=256),
                # σ(-10) is 1 / 22,000: about the frequency of one class among 21,843.
                initial_bias=-10.0,
            ),
            num_classes=NUM_CLASSES,
            loss=SigmoidCrossEntropy(),
        ),
        data=LoaderConfig(
            shards=("data/train/{0000..1023}.tar",),
            image_size=224,
            batch_size=BATCH_SIZES[tower],
            preprocessing=Preprocessing(filter="fast"),
            crop=InceptionCrop(),
            augmentations=(HorizontalFlip(),),
            threads=16,
            labels=ClassIndex(),
        ),
        calibration=None,  # all samples of the recipe are trained on
        length=Duration(90, "epochs"),
        # The paper's weight decay is multiplied by the learning rate; ours is the decay per step.
        optimizer=Optimizer(AdamW(), weight_decay=WEIGHT_DECAYS[tower] * LEARNING_RATE),
        schedule=Schedule(
            learning_rate=LEARNING_RATE, warmup=Duration(10_000), initial_rate=1e-5, decay=Linear(final_fraction=0.01)
        ),
        cadence=Cadence(log_steps=50, save_steps=1000),
    )
