"""Quickstart, second stage: LiT with a deterministic head on the locked tower of the first stage."""

from pathlib import Path

from lit_het.configs.experiment import ExperimentConfig, PretrainedConfig
from lit_het.configs.quickstart_upstream import IMAGE_TOWER, ROOT
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.texts.tokenizers_config import SentencePieceConfig
from lit_het.heads.contrastive_config import DeterministicContrastiveConfig
from lit_het.losses.contrastive import SoftmaxLoss
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.towers.encoder_config import EncoderConfig
from lit_het.towers.text_config import TextConfig
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.optimizers_config import AdamW, Optimizer
from lit_het.training.schedules import Schedule

VOCABULARY_SIZE = 600
TEXT_LENGTH = 12


def get_config(root: Path = ROOT) -> ExperimentConfig:
    """Returns the run; ``root`` contains the data and the upstream run of ``lit-het quickstart``."""
    return ExperimentConfig(
        run_dir=root / "deterministic",
        task=ContrastiveConfig(
            image_tower=IMAGE_TOWER,
            text_tower=TextConfig(
                vocabulary_size=VOCABULARY_SIZE,
                length=TEXT_LENGTH,
                embedding_size=IMAGE_TOWER.embedding_size,
                encoder=EncoderConfig(width=128, depth=1, mlp_width=512, num_heads=4, unrolled=True),
                pooling="mean",
            ),
            head=DeterministicContrastiveConfig(),
            # As in the papers: its published figures were measured so.
            loss=SoftmaxLoss(duplicates="negatives"),
        ),
        data=LoaderConfig(shards=(str(root / "data" / "train"),), image_size=32, batch_size=128, threads=1),
        tokenizer=SentencePieceConfig(model=root / "data" / "tokenizer.model", length=TEXT_LENGTH),
        pretrained=PretrainedConfig(run=root / "upstream"),
        calibration=None,  # the quickstart calibrates with its held-out images
        length=Duration(700),
        optimizer=Optimizer(AdamW(second_decay=0.95), weight_decay=2e-6),
        schedule=Schedule(learning_rate=3e-3, warmup=Duration(30)),
        cadence=Cadence(log_steps=10, save_steps=200),
    )
