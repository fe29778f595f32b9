"""CoCa-Large from scratch (Yu et al. 2022): a contrastive loss, and a decoder that learns to write the captions.

Widths, depths, image and patch size, vocabulary, batch, steps, optimizer, weight decay, schedule and weights of both
losses are those of Sec. 3 and 4.1. The paper's decoder continues the causal text tower and reads 256 pooled queries of
the image; ours has tokens of its own and reads the 256 tokens of the image (docs/paper_map.md, 86). The length of texts
is ours. Its data, JFT-3B and ALIGN, are private.
"""

import dataclasses
from pathlib import Path

from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.texts.tokenizers_config import SentencePieceConfig
from lit_het.heads.contrastive_config import DeterministicContrastiveConfig
from lit_het.heads.temperature_config import LogTemperature
from lit_het.losses.contrastive import SoftmaxLoss
from lit_het.objectives.captioner import CaptionerConfig
from lit_het.sharding import MeshConfig
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.towers.decoder_config import DecoderConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.sizes import encoder_size
from lit_het.towers.text_config import TextConfig
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.optimizers_config import Adafactor, Optimizer
from lit_het.training.schedules import Linear, Schedule

VOCABULARY_SIZE, LENGTH = 64_000, 64


def get_config() -> ExperimentConfig:
    """Returns the run; set ``--data.shards`` and ``--tokenizer.model``."""
    image = encoder_size("L")
    # Half of the paper's 24 layers of text read no image, and are the text tower.
    text = dataclasses.replace(image, depth=12, causal=True)
    return ExperimentConfig(
        run_dir=Path("runs/coca_large"),
        task=ContrastiveConfig(
            image_tower=ViTConfig(image_size=288, patch_size=18, encoder=image, pooling="attention"),
            text_tower=TextConfig(VOCABULARY_SIZE, LENGTH, image.width, text, pooling="class_token"),
            head=DeterministicContrastiveConfig(LogTemperature(0.07, learning_rate_factor=1.0)),
            loss=SoftmaxLoss(),
            locked=(),
            captioner=CaptionerConfig(DecoderConfig(VOCABULARY_SIZE, LENGTH, text, dropout=0.0), weight=2.0),
        ),
        data=LoaderConfig(
            shards=("data/train/{00000..99999}.tar",), prompt="", image_size=288, batch_size=65_536, threads=16
        ),
        tokenizer=SentencePieceConfig(Path("data/tokenizer.model"), LENGTH),
        length=Duration(500_000),
        optimizer=Optimizer(Adafactor(), weight_decay=0.01 * 8e-4),
        schedule=Schedule(learning_rate=8e-4, warmup=Duration(2, "percent"), decay=Linear()),
        mesh=MeshConfig(fsdp=-1),
        cadence=Cadence(log_steps=50, save_steps=1000),
        calibration=None,  # all samples of the recipe are trained on
    )
