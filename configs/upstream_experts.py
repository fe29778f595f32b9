"""Supervised pre-training of the ViT and V-MoE that e3 starts from, on many classes (e3 App. A.1, A.2).

    lit-het train --config configs/upstream_experts.py:model=vmoe,size=b32 --data.shards '/data/mine/{0000..4095}.tar'

Epochs by size, classes and the V-MoE are the paper's: S/32 5 epochs of JFT-300M, H/14 14, all others 7 ("both 7 and 14
can be considered" for L/16: ``--length '14 epochs'``). For the rest it refers to Riquelme et al. 2021, App. B.2. Rates,
batch, warm-up, linear decay and weight decay are those of Dosovitskiy et al. 2021, Table 3, which has no S/32: its
rate is that of B. The loss is the sigmoid loss with the bias -log k of V-MoE's published configurations. JFT is not
public: set ``--data.shards`` and ``--task.num-classes`` of your data, and ``--data.labels class_index`` for one class
an image.
"""

import dataclasses
import math
from pathlib import Path
from typing import Literal, TypeAlias

from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.images.augment import HorizontalFlip
from lit_het.data_pipelines.images.transforms import InceptionCrop, Preprocessing
from lit_het.data_pipelines.labels_config import MultiHot
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ZeroShotConfig
from lit_het.heads.classification_config import DeterministicConfig
from lit_het.losses.classification_config import SigmoidCrossEntropy
from lit_het.sharding import MeshConfig
from lit_het.tasks.classification import ClassificationConfig
from lit_het.towers.encoder_config import EncoderConfig
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.sizes import encoder_size
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.optimizers_config import AdamW, Optimizer
from lit_het.training.schedules import Linear, Schedule

Size: TypeAlias = Literal["s32", "b32", "b16", "l32", "l16", "h14"]
EPOCHS: dict[Size, int] = {"s32": 5, "b32": 7, "b16": 7, "l32": 7, "l16": 7, "h14": 14}
LEARNING_RATES: dict[Size, float] = {"s32": 8e-4, "b32": 8e-4, "b16": 8e-4, "l32": 6e-4, "l16": 4e-4, "h14": 3e-4}
NUM_CLASSES = 18_291


def get_config(model: Literal["vit", "vmoe"] = "vmoe", size: Size = "b32") -> ExperimentConfig:
    """Returns the run."""
    experts = ExpertsConfig(num_experts=32, num_selected=2, num_blocks=5 if size == "h14" else 2)
    encoder = EncoderConfig(512, 8, 2048, 8) if size == "s32" else encoder_size(size[0].upper())
    return ExperimentConfig(
        run_dir=Path(f"runs/upstream_{model}_{size}"),
        task=ClassificationConfig(
            image_tower=ViTConfig(
                image_size=224,
                patch_size=int(size[1:]),
                encoder=dataclasses.replace(
                    encoder, experts=experts if model == "vmoe" else None, compute_type="bfloat16"
                ),
                pooling="class_token",
            ),
            head=DeterministicConfig(initial_bias=-math.log(NUM_CLASSES)),
            num_classes=NUM_CLASSES,
            loss=SigmoidCrossEntropy(),
        ),
        data=LoaderConfig(
            shards=("data/jft300m/train",),
            image_size=224,
            batch_size=4096,
            labels=MultiHot(),
            preprocessing=Preprocessing(filter="fast"),
            crop=InceptionCrop(),
            augmentations=(HorizontalFlip(),),
            threads=16,
        ),
        calibration=None,  # all samples of the recipe are trained on
        length=Duration(EPOCHS[size], "epochs"),
        # The weight decay of 0.1 is multiplied by the learning rate; ours is the decay per step.
        optimizer=Optimizer(AdamW(), weight_decay=0.1 * LEARNING_RATES[size], clip_norm=1.0),
        schedule=Schedule(learning_rate=LEARNING_RATES[size], warmup=Duration(10_000), decay=Linear()),
        mesh=MeshConfig(expert=-1) if model == "vmoe" else MeshConfig(),
        cadence=Cadence(log_steps=50, save_steps=1000, evaluate_steps=50_000),
        evaluations=(ZeroShotConfig(ImageSet("jft300m", "data/jft300m", multi_label=True)),),
    )
