"""LiT in many languages: XLM-R, trained further on a locked ViT-H/14 or B/32 of OpenCLIP, in full size.

    lit-het train --config configs/lit_xlm_r.py:size=large --data.shards '/data/laion5b/{00000..99999}.tar'

`large` is OpenCLIP's multilingual H/14 (``CLIP-ViT-H-14-frozen-xlm-roberta-large-laion5B-s13B-b90k``): towers, mean of
the words, data, batch and examples are of its model card. It does not give the optimizer: rate, decays and crops are
OpenCLIP's defaults for a ViT, and the warm-up that of its script for LAION-5B. `base` is the same in small, where
OpenCLIP trained both towers. Departures: docs/paper_map.md, 107. Some languages alone, as img2dataset stores them:
``--data.language.place json/LANGUAGE --data.language.only en de fr``.
"""

import dataclasses
from pathlib import Path
from typing import Literal

from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.images.transforms import InceptionCrop, Preprocessing
from lit_het.data_pipelines.texts.tokenizers_config import HuggingFaceTokenizerConfig
from lit_het.heads.contrastive_config import DeterministicContrastiveConfig
from lit_het.heads.temperature_config import LogTemperature
from lit_het.losses.contrastive import SoftmaxLoss
from lit_het.sharding import MeshConfig
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.towers.encoder_config import EncoderConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.sizes import encoder_size
from lit_het.towers.text_config import BertConfig
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.optimizers_config import AdamW, Optimizer
from lit_het.training.schedules import Schedule

Size = Literal["base", "large"]

RATE, LENGTH = 5e-4, 77
# Of images: OpenCLIP's repository, size, patches and embedding.
MODELS = {
    "base": ("laion/CLIP-ViT-B-32-laion2B-s34B-b79K", "B", 32, 512),
    "large": ("laion/CLIP-ViT-H-14-laion2B-s32B-b79K", "H", 14, 1024),
}


def get_config(size: Size = "large") -> ExperimentConfig:
    """Returns the run; set ``--data.shards`` and ``--tokenizer.model``, XLM-R's ``tokenizer.json``."""
    name, image_size, patch_size, embedding_size = MODELS[size]
    return ExperimentConfig(
        run_dir=Path(f"runs/lit_xlm_r_{size}"),
        task=ContrastiveConfig(
            ViTConfig(
                224,
                patch_size,
                _form(encoder_size(image_size)),
                "class_token",
                input_norm=True,
                projection_size=embedding_size,
                weights=f"hf://{name}",
            ),
            BertConfig(
                250_002,
                LENGTH,
                projection_size=embedding_size,
                encoder=dataclasses.replace(_form(encoder_size(size[0].upper())), norm_placement="after"),
                weights=f"hf://FacebookAI/xlm-roberta-{size}",
                num_segments=1,
                padding_id=1,
                mean_pooling=True,
            ),
            DeterministicContrastiveConfig(LogTemperature(0.07, learning_rate_factor=1.0)),
            SoftmaxLoss(duplicates="negatives"),
        ),
        data=LoaderConfig(
            shards=("data/laion5b/{00000..99999}.tar",),
            image_size=224,
            batch_size=90_112,
            preprocessing=Preprocessing(fit="crop", filter="bicubic"),
            crop=InceptionCrop(min_area=0.9),
            threads=16,
        ),
        tokenizer=HuggingFaceTokenizerConfig(Path("data/xlm_r/tokenizer.json"), LENGTH),
        length=Duration(13_000_000_000, "examples"),
        optimizer=Optimizer(AdamW(second_decay=0.98, epsilon=1e-6), weight_decay=0.2 * RATE, clip_norm=None),
        schedule=Schedule(learning_rate=RATE, warmup=Duration(2000)),
        mesh=MeshConfig(fsdp=-1),
        cadence=Cadence(log_steps=50, save_steps=1000),
    )


def _form(encoder: EncoderConfig) -> EncoderConfig:
    return dataclasses.replace(encoder, activation="gelu", norm_epsilon=1e-5)
