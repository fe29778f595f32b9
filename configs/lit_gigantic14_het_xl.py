"""LiT on a locked ViT-G/14 with a ViT-g text tower and a HET-XL head, in full size (HET-XL App. N.2).

Towers, batch, examples, schedule, weight decay, vocabulary, loss and the whole head are the paper's, with one noise
sample and one learning rate for all parameters; Adafactor, clipping and length of texts are LiT's, as in
`lit_so400m_het_xl`. The paper gives no resolution; it is 224 pixels here.
"""

import dataclasses
from pathlib import Path

from lit_het.configs import lit_so400m_het_xl
from lit_het.configs.experiment import ExperimentConfig, PretrainedConfig
from lit_het.heads.contrastive_config import HetXLContrastiveConfig
from lit_het.heads.noise_config import CovarianceConfig
from lit_het.heads.temperature_config import LogTemperature
from lit_het.losses.contrastive import SoftmaxLoss
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.sizes import encoder_size
from lit_het.towers.text_config import TextConfig
from lit_het.training.durations import Duration

BATCH_SIZE = 16_384


def get_config() -> ExperimentConfig:
    """Returns the run; set ``--data.shards``, ``--tokenizer.model`` and ``--pretrained.run``."""
    config = lit_so400m_het_xl.get_config()
    image_tower = ViTConfig(image_size=224, patch_size=14, encoder=encoder_size("G"), pooling="attention")
    text_tower = TextConfig(
        vocabulary_size=32_000,
        length=16,
        embedding_size=image_tower.embedding_size,
        encoder=encoder_size("g"),
        pooling="last",
    )
    head = HetXLContrastiveConfig(
        covariance=CovarianceConfig(num_factors=15, form="full", initial_noise_norm=0.1, learning_rate_factor=1.0),
        temperature=LogTemperature(1 / 3, learning_rate_factor=1.0),
        num_samples=1,
    )
    return dataclasses.replace(
        config,
        run_dir=Path("runs/lit_gigantic14_het_xl"),
        task=dataclasses.replace(
            config.task,
            image_tower=image_tower,
            text_tower=text_tower,
            head=head,
            loss=SoftmaxLoss(duplicates="negatives"),
        ),
        data=dataclasses.replace(config.data, batch_size=BATCH_SIZE),
        pretrained=PretrainedConfig(run=Path("runs/gigantic14")),
        length=Duration(18_000_000_000, "examples"),
        schedule=dataclasses.replace(config.schedule, warmup=Duration(10_000)),
        calibration=None,  # all samples of the recipe are trained on
    )
