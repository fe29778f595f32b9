"""Supervised pre-training of a ViT-L/32 or a ResNet152 with a HET-XL head on many classes (HET-XL App. N.1).

    lit-het train --config configs/imagenet21k_het_xl.py:tower=resnet152
    lit-het train --config configs/imagenet21k_het_xl.py:data_set=jft300m --data.shards '/data/mine/{0000..4095}.tar'

Batch size, epochs, Adam, weight decay, warm-up, factors and samples are the paper's. It specifies no loss, decay or
augmentation. Its likelihoods (NLL 5.72 at 47 % precision) are those of a sigmoid loss. Loss, bias, clipping, linear
decay, crops and flips are those of the authors' scripts in uncertainty-baselines. JFT is not public: its recipes are
for data of your own, with several classes an image (``--data.labels class_index`` for one) and
``--task.num-classes``; evaluations are in this file. ImageNet-21k is `lit-het data prepare imagenet21k`.
"""

import dataclasses
from pathlib import Path
from typing import Literal, TypeAlias

from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.images.augment import HorizontalFlip
from lit_het.data_pipelines.images.transforms import InceptionCrop, Preprocessing
from lit_het.data_pipelines.labels_config import ClassIndex, MultiHot
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ZeroShotConfig
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


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings of a data set (App. N.1; Sec. 6.2); weight decays and batch sizes by tower."""

    num_classes: int
    epochs: int
    learning_rate: float
    batch_sizes: dict[str, int]
    weight_decays: dict[str, float]
    multi_label: bool


DataSet: TypeAlias = Literal["imagenet21k", "jft300m", "jft4b"]
JFT_BATCH, JFT_DECAY = {"vit_l32": 4096, "resnet152": 4096}, {"vit_l32": 0.1, "resnet152": 0.1}
RECIPES: dict[DataSet, Recipe] = {
    "imagenet21k": Recipe(
        21_843, 90, 1e-3, {"vit_l32": 4096, "resnet152": 1024}, {"vit_l32": 0.1, "resnet152": 0.03}, multi_label=False
    ),
    "jft300m": Recipe(18_291, 7, 6e-4, JFT_BATCH, JFT_DECAY, multi_label=True),
    "jft4b": Recipe(29_593, 1, 6e-4, JFT_BATCH, JFT_DECAY, multi_label=True),
}
TOWERS = {
    "vit_l32": ViTConfig(224, 32, encoder_size("L"), pooling="class_token", representation_size=1024),
    "resnet152": ResNetConfig(152, compute_type="bfloat16"),
}


def get_config(
    tower: Literal["vit_l32", "resnet152"] = "vit_l32", data_set: DataSet = "imagenet21k"
) -> ExperimentConfig:
    """Returns the run. ``head`` can be any of `lit_het/heads`."""
    recipe = RECIPES[data_set]
    return ExperimentConfig(
        run_dir=Path(f"runs/{data_set}_{tower}_het_xl"),
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
            num_classes=recipe.num_classes,
            loss=SigmoidCrossEntropy(),
        ),
        data=LoaderConfig(
            shards=(f"data/{data_set}/train",),
            image_size=224,
            batch_size=recipe.batch_sizes[tower],
            preprocessing=Preprocessing(filter="fast"),
            crop=InceptionCrop(),
            augmentations=(HorizontalFlip(),),
            threads=16,
            labels=MultiHot() if recipe.multi_label else ClassIndex(),
        ),
        calibration=None,  # all samples of the recipe are trained on
        length=Duration(recipe.epochs, "epochs"),
        # The paper's weight decay is multiplied by the learning rate; ours is the decay per step.
        optimizer=Optimizer(AdamW(), weight_decay=recipe.weight_decays[tower] * recipe.learning_rate),
        schedule=Schedule(
            learning_rate=recipe.learning_rate,
            warmup=Duration(10_000),
            initial_rate=1e-5,
            decay=Linear(final_fraction=0.01),
        ),
        cadence=Cadence(log_steps=50, save_steps=1000, evaluate_steps=50_000),
        # Prec@1 is top1 or precision_at_1, the paper's NLL noisy/sigmoid_nll.
        evaluations=(
            ZeroShotConfig(ImageSet(data_set, f"data/{data_set}", multi_label=recipe.multi_label), samples=1000),
        ),
    )
