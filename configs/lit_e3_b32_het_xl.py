"""LiT on a locked e3-B/32, an ensemble of two members with 16 experts each, with a HET-XL head.

The tower is that of e3 Table 5 (K = 1, M = 2) and has the parameters of a V-MoE-B/32 (e3 Sec. 4.1). The members'
embeddings are concatenated, as in e3's few-shot evaluation (App. A.5). The rest is the recipe of HET-XL App. N.2, but
with 16 noise samples, a learning rate of their own for the covariances (docs/noise.md) and LiT's first temperature.
"""

import dataclasses
from pathlib import Path

from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.images.transforms import Preprocessing
from lit_het.data_pipelines.texts.tokenizers_config import SentencePieceConfig
from lit_het.heads.contrastive_config import HetXLContrastiveConfig
from lit_het.heads.temperature_config import LogTemperature
from lit_het.sharding import MeshConfig
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.sizes import encoder_size
from lit_het.towers.text_config import TextConfig
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.optimizers_config import Adafactor, Optimizer
from lit_het.training.schedules import Schedule

BATCH_SIZE = 16_384
B = encoder_size("B")
EXPERTS = ExpertsConfig(num_experts=32, num_selected=1, num_blocks=2, num_members=2)


def get_config() -> ExperimentConfig:
    """Returns the run; set ``--task.image-tower.weights``, ``--data.shards`` and ``--tokenizer.model``."""
    return ExperimentConfig(
        run_dir=Path("runs/lit_e3_b32_het_xl"),
        task=ContrastiveConfig(
            image_tower=ViTConfig(
                image_size=224,
                patch_size=32,
                encoder=dataclasses.replace(B, experts=EXPERTS),
                pooling="class_token",
                members="concatenated",
                weights="weights/vmoe_b32",
            ),
            text_tower=TextConfig(vocabulary_size=32_000, length=16, embedding_size=2 * B.width, encoder=B),
            head=HetXLContrastiveConfig(temperature=LogTemperature(1 / 10, learning_rate_factor=1.0)),
        ),
        data=LoaderConfig(
            shards=("data/train/{00000..99999}.tar",),
            image_size=224,
            batch_size=BATCH_SIZE,
            preprocessing=Preprocessing(filter="fast"),
            threads=16,
        ),
        tokenizer=SentencePieceConfig(model=Path("data/tokenizer.model"), length=16),
        calibration=None,  # all samples of the recipe are trained on
        length=Duration(18_000_000_000, "examples"),
        optimizer=Optimizer(Adafactor(), weight_decay=1e-4, clip_norm=1.0),
        schedule=Schedule(learning_rate=1e-3, warmup=Duration(10_000)),
        mesh=MeshConfig(expert=-1),
        cadence=Cadence(log_steps=50, save_steps=1000),
    )
