"""ProLIP pretraining of both towers of ViT-B/16 from scratch (Chun et al. 2025), in full size.

Towers, losses and their weights, batch, examples, optimizer and schedule are those of the authors' training script,
which also jitters colours and removes some, and adds 1e-6, not 1e-8, in Adam's division (docs/paper_map.md, 60-62, 69).
"""

import dataclasses
from pathlib import Path

from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.images.transforms import InceptionCrop, Preprocessing
from lit_het.data_pipelines.texts.tokenizers_config import SentencePieceConfig
from lit_het.heads.contrastive_config import GaussianContrastiveConfig
from lit_het.heads.temperature_config import LogTemperature
from lit_het.losses.contrastive import SigmoidLoss
from lit_het.objectives.masking import MaskingConfig
from lit_het.sharding import MeshConfig
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.sizes import encoder_size
from lit_het.towers.text_config import TextConfig
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.optimizers_config import AdamW, Optimizer
from lit_het.training.schedules import Schedule

ENCODER = dataclasses.replace(encoder_size("B"), activation="gelu")
LENGTH, LEARNING_RATE = 64, 5e-4


def get_config() -> ExperimentConfig:
    """Returns the run; set ``--data.shards`` and ``--tokenizer.model``, SigLIP's SentencePiece model."""
    image_tower = ViTConfig(
        encoder=dataclasses.replace(ENCODER, norm_epsilon=1e-5),
        pooling="class_token",
        input_norm=True,
        projection_size=768,
        uncertainty_token=True,
    )
    text_tower = TextConfig(
        vocabulary_size=32_100,
        length=LENGTH,
        embedding_size=image_tower.embedding_size,
        encoder=ENCODER,
        pooling="class_token",
        uncertainty_token=True,
    )
    head = GaussianContrastiveConfig(
        temperature=LogTemperature(0.07, learning_rate_factor=1.0), initial_bias=-10.0, variances="towers"
    )
    return ExperimentConfig(
        run_dir=Path("runs/prolip_b16"),
        task=ContrastiveConfig(image_tower, text_tower, head, SigmoidLoss(), locked=(), masking=MaskingConfig()),
        data=LoaderConfig(
            shards=("data/train/{00000..99999}.tar",),
            image_size=224,
            batch_size=16_384,
            crop=InceptionCrop(min_area=0.8),
            preprocessing=Preprocessing(fit="crop", filter="bicubic"),
            threads=16,
        ),
        tokenizer=SentencePieceConfig(
            Path("data/spiece.model"), LENGTH, padding_id=1, remove_punctuation=True, split_underscores=True
        ),
        length=Duration(1_280_000_000, "examples"),
        # PyTorch multiplies the authors' 0.2 by the learning rate.
        optimizer=Optimizer(AdamW(second_decay=0.95), weight_decay=0.2 * LEARNING_RATE),
        schedule=Schedule(learning_rate=LEARNING_RATE, warmup=Duration(10_000)),
        mesh=MeshConfig(fsdp=-1),
        cadence=Cadence(log_steps=50, save_steps=1000),
        calibration=None,  # all samples of the recipe are trained on
    )
