"""Supervised pre-training of a ViT-L/32 on ImageNet-21k with a HET-XL head, in full size (HET-XL App. N.1).

Batch, epochs, Adam, weight decay, steps of warm-up, factors and samples are the paper's, whose warm-up starts at 1e-5
in the place of 0. It names no decay of the learning rate and no preprocessing: here a cosine, and pictures as the
shards hold them.
"""

from pathlib import Path

from configs.experiment import ExperimentConfig
from data_pipelines.labels import ClassIndex
from data_pipelines.loader import LoaderConfig
from data_pipelines.transforms import Preprocessing
from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.het_xl import HetXLConfig
from lit_het.heads.sampling import SamplingConfig
from lit_het.optimizers import AdamW
from lit_het.schedules import CosineSchedule
from lit_het.sharding import MeshConfig
from lit_het.tasks.classification import ClassificationConfig
from lit_het.towers.transformer import encoder_size
from lit_het.towers.vit import ViTConfig
from lit_het.training.loop import Cadence

BATCH_SIZE = 4096
NUM_EXAMPLES = 12_800_000
EPOCHS = 90
NUM_CLASSES = 21_843
LEARNING_RATE = 1e-3


def get_config() -> ExperimentConfig:
    """Returns the run; set ``--data.shards``. Any other head takes the place of this one: `lit_het/heads`."""
    return ExperimentConfig(
        run_dir=Path("runs/imagenet21k_het_xl"),
        task=ClassificationConfig(
            image_tower=ViTConfig(
                image_size=224,
                patch_size=32,
                encoder=encoder_size("L"),
                pooling="class_token",
                representation_size=1024,
            ),
            head=HetXLConfig(
                covariance=CovarianceConfig(num_factors=50, form="efficient"),
                sampling=SamplingConfig(num_samples=1000, num_eval_samples=1000),
            ),
            num_classes=NUM_CLASSES,
        ),
        data=LoaderConfig(
            shards=("data/train/{0000..1023}.tar",),
            image_size=224,
            batch_size=BATCH_SIZE,
            preprocessing=Preprocessing(filter="fast"),
            threads=16,
            labels=ClassIndex(),
        ),
        num_steps=EPOCHS * NUM_EXAMPLES // BATCH_SIZE,
        # Adam's 0.1 is multiplied by the learning rate, ours is the fraction of a step.
        optimizer=AdamW(weight_decay=0.1 * LEARNING_RATE),
        schedule=CosineSchedule(learning_rate=LEARNING_RATE, warmup_steps=10_000),
        mesh=MeshConfig(data=-1),
        cadence=Cadence(log_steps=50, save_steps=1000),
    )
