"""LiT on a locked DINOv2 L/14 or DINOv3 L/16 by the recipe of dino.txt (Jose et al. 2024), in full size.

    lit-het train --config configs/dino_txt.py:model=dinov3_l16 --data.shards '/data/{00000..99999}.tar'

Two new blocks stand on the locked tower; the embedding is their class token and the mean of their patches. The text
tower is trained from scratch. All numbers are those of the public code, which trains on 32 devices with 256 pairs each
(facebookresearch/dinov3: ``dinov3/eval/text/configs``, ``dinov3/hub/dinotxt.py``); the authors' data are private.
Departures: docs/paper_map.md, 106. DINOv3's weights need a login (``hf auth login``).
"""

import dataclasses
from pathlib import Path
from typing import Literal

from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.images.augment import HorizontalFlip
from lit_het.data_pipelines.images.transforms import InceptionCrop, Preprocessing
from lit_het.data_pipelines.texts.tokenizers_config import HuggingFaceTokenizerConfig
from lit_het.heads.contrastive_config import DeterministicContrastiveConfig
from lit_het.heads.temperature_config import LogTemperature
from lit_het.losses.contrastive import SoftmaxLoss
from lit_het.sharding import MeshConfig
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.towers.encoder_config import EncoderConfig
from lit_het.towers.image_config import RotaryConfig, ViTConfig
from lit_het.towers.sizes import encoder_size
from lit_het.towers.text_config import TextConfig
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.optimizers_config import AdamW, Optimizer
from lit_het.training.schedules import Schedule

Model = Literal["dinov2_l14", "dinov3_l16"]

RATE, LENGTH = 7e-4, 77


def get_config(model: Model = "dinov3_l16") -> ExperimentConfig:
    """Returns the run; set ``--data.shards`` and ``--tokenizer.model``, CLIP's ``tokenizer.json``."""
    image_tower = _dinov2() if model == "dinov2_l14" else _dinov3()
    encoder = EncoderConfig(1280, 24, 5120, 20, "gelu", norm_epsilon=1e-5, causal=True, compute_type="bfloat16")
    return ExperimentConfig(
        run_dir=Path(f"runs/dino_txt_{model}"),
        task=ContrastiveConfig(
            image_tower,
            TextConfig(49_408, LENGTH, image_tower.embedding_size, encoder, pooling="end_token"),
            DeterministicContrastiveConfig(LogTemperature(0.07, learning_rate_factor=1.0)),
            SoftmaxLoss(duplicates="negatives"),
            locked=("image_tower/(?!top/).*",),
        ),
        data=LoaderConfig(
            shards=("data/train/{00000..99999}.tar",),
            image_size=image_tower.image_size,
            batch_size=8192,
            preprocessing=Preprocessing(fit="crop", crop_fraction=224 / 256, filter="bicubic"),
            crop=InceptionCrop(),
            augmentations=(HorizontalFlip(),),
            threads=16,
        ),
        tokenizer=HuggingFaceTokenizerConfig(Path("data/clip/tokenizer.json"), LENGTH),
        length=Duration(50_000),
        optimizer=Optimizer(AdamW(second_decay=0.99), weight_decay=1e-4 * RATE, clip_norm=None),
        schedule=Schedule(learning_rate=RATE, warmup=Duration(2000)),
        mesh=MeshConfig(fsdp=-1),
        cadence=Cadence(log_steps=50, save_steps=500),
    )


def _dinov2() -> ViTConfig:
    encoder = dataclasses.replace(encoder_size("L"), activation="gelu", layer_scale=True)
    name = "hf://facebook/dinov2-with-registers-large"
    return ViTConfig(224, 14, encoder, "class_and_mean", num_registers=4, weights=name, top=_top(encoder))


def _dinov3() -> ViTConfig:
    encoder = dataclasses.replace(encoder_size("L"), activation="gelu", layer_scale=True, norm_epsilon=1e-5)
    return ViTConfig(
        224,
        16,
        encoder,
        "class_and_mean",
        "none",
        num_registers=4,
        weights="hf://facebook/dinov3-vitl16-pretrain-lvd1689m",
        rotary=RotaryConfig(),
        top=_top(encoder),
    )


def _top(encoder: EncoderConfig) -> EncoderConfig:
    # Two thirds of 4 x 1024, rounded up to a multiple of 64.
    return dataclasses.replace(
        encoder, depth=2, mlp_width=2752, activation="swiglu", norm_epsilon=1e-5, initial_layer_scale=1e-5
    )
