"""SigLIP 2 ViT-B/16 from scratch (Tschannen et al. 2025): sigmoid loss, captions, self-distillation, masked prediction.

Sizes, lengths, batch, examples, optimizer, schedule, the decoder of half the text tower's layers, and when which loss
begins with which weight are those of Sec. 2. The paper does not give the decay of the teacher (0.996 is DINO's); its
decoder also learns boxes of regions, and its data, WebLI, are private (docs/paper_map.md, 86-88).
"""

import dataclasses
from pathlib import Path

from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.texts.tokenizers_config import SentencePieceConfig
from lit_het.heads.contrastive_config import DeterministicContrastiveConfig
from lit_het.heads.temperature_config import LogTemperature
from lit_het.losses.contrastive import SigmoidLoss
from lit_het.objectives.captioner import CaptionerConfig
from lit_het.objectives.distillation import DistillationConfig
from lit_het.sharding import MeshConfig
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.towers.decoder_config import DecoderConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.sizes import encoder_size
from lit_het.towers.text_config import TextConfig
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.optimizers_config import AdamW, Optimizer
from lit_het.training.schedules import Schedule

VOCABULARY_SIZE, LENGTH = 256_000, 64
# Both losses of self-distillation have this further factor for the size B.
FACTOR = 0.25


def get_config() -> ExperimentConfig:
    """Returns the run; set ``--data.shards`` and ``--tokenizer.model``, Gemma's SentencePiece model."""
    encoder = encoder_size("B")
    decoder = dataclasses.replace(encoder, depth=6, causal=True)
    return ExperimentConfig(
        run_dir=Path("runs/siglip2_b16"),
        task=ContrastiveConfig(
            image_tower=ViTConfig(image_size=256, patch_size=16, encoder=encoder, pooling="attention"),
            text_tower=TextConfig(VOCABULARY_SIZE, LENGTH, encoder.width, encoder, pooling="last"),
            head=DeterministicContrastiveConfig(LogTemperature(1 / 10, learning_rate_factor=1.0), initial_bias=-10.0),
            loss=SigmoidLoss(),
            locked=(),
            captioner=CaptionerConfig(DecoderConfig(VOCABULARY_SIZE, LENGTH, decoder, dropout=0.0)),
            distillation=DistillationConfig(weight=FACTOR, masked_weight=0.25 * FACTOR),
        ),
        data=LoaderConfig(
            shards=("data/train/{00000..99999}.tar",), prompt="", image_size=256, batch_size=32_768, threads=16
        ),
        tokenizer=SentencePieceConfig(Path("data/tokenizer.model"), LENGTH),
        length=Duration(40_000_000_000, "examples"),
        optimizer=Optimizer(AdamW(second_decay=0.95), weight_decay=1e-4, clip_norm=1.0),
        average_decay=0.996,
        schedule=Schedule(learning_rate=1e-3, warmup=Duration(20_000)),
        mesh=MeshConfig(fsdp=-1),
        cadence=Cadence(log_steps=50, save_steps=1000),
        calibration=None,  # all samples of the recipe are trained on
    )
