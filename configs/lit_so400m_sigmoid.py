"""LiT on a locked SoViT-400m/14 with the sigmoid loss and no noise, in full size: SoViT Table 7 as it stands.

The table's temperature of 10 multiplies logits, as in LiT; ours divides them by 0.1. Length of texts is LiT's.
"""

import dataclasses
from pathlib import Path

from lit_het.configs import lit_so400m_het_xl
from lit_het.configs.experiment import ExperimentConfig
from lit_het.heads.contrastive_config import DeterministicContrastiveConfig
from lit_het.heads.temperature_config import LogTemperature
from lit_het.losses.contrastive import SigmoidLoss


def get_config() -> ExperimentConfig:
    """Returns the run; set ``--data.shards``, ``--tokenizer.model`` and ``--pretrained.run``."""
    config = lit_so400m_het_xl.get_config()
    head = DeterministicContrastiveConfig(LogTemperature(1 / 10, learning_rate_factor=1.0), initial_bias=-10.0)
    task = dataclasses.replace(config.task, head=head, loss=SigmoidLoss())
    return dataclasses.replace(config, run_dir=Path("runs/lit_so400m_sigmoid"), task=task)
