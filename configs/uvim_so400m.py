"""Stage II of UViM on SoViT-400m/14, in full size (SoViT Sec. 5.4; big_vision's train_coco_panoptic_pretrained).

    lit-het train --config configs/uvim_so400m.py                # after configs/uvim_oracle.py

The numbers are those of the published configuration for ViT-L/16, which the paper follows closely; it prints none of
its own. There the image tower is trained at a tenth of the learning rate; ``tower=locked`` locks it.
"""

import dataclasses
from pathlib import Path
from typing import Literal

from lit_het.configs import uvim_oracle
from lit_het.configs.experiment import ExperimentConfig, PretrainedConfig
from lit_het.configs.uvim_oracle import ORACLE
from lit_het.heads.classification_config import DeterministicConfig
from lit_het.losses.classification_config import SoftmaxCrossEntropy
from lit_het.sharding import MeshConfig
from lit_het.tasks.segmentation import SegmentationConfig
from lit_het.towers.decoder_config import DecoderConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.sizes import encoder_size
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.optimizers_config import Adafactor, Optimizer, ParameterGroup
from lit_het.training.schedules import Schedule


def get_config(tower: Literal["trained", "locked"] = "trained") -> ExperimentConfig:
    """Returns the run; set ``--data.shards``, ``--pretrained.run`` and ``--task.oracle-run``."""
    is_trained = tower == "trained"
    # Without remat, the blocks of 1,296 patches would not fit into the memory of a chip.
    image = dataclasses.replace(encoder_size("So400m"), remat="full" if is_trained else "none")
    blocks = dataclasses.replace(encoder_size("L"), causal=True)
    return ExperimentConfig(
        run_dir=Path("runs/uvim_so400m"),
        task=SegmentationConfig(
            image_tower=ViTConfig(image_size=512, patch_size=14, encoder=image, pooling="none"),
            decoder=DecoderConfig(ORACLE.codebook.num_words + 1, ORACLE.code_length, blocks, dropout=0.0),
            oracle=ORACLE,
            oracle_run=Path("runs/uvim_oracle"),
            head=DeterministicConfig(zero_kernel=True),
            loss=SoftmaxCrossEntropy(),
            locked=("oracle/.*",) if is_trained else ("image_tower/.*", "oracle/.*"),
        ),
        data=uvim_oracle.data(batch_size=512),
        pretrained=PretrainedConfig(run=Path("runs/so400m")),
        calibration=None,  # 4 % are held out by hand
        length=Duration(200, "epochs"),
        optimizer=Optimizer(
            Adafactor(second_decay_cap=0.95),
            weight_decay=1e-6,
            clip_norm=None,
            groups=(ParameterGroup("image_tower/.*", learning_rate_factor=0.1),) if is_trained else (),
        ),
        schedule=Schedule(learning_rate=1e-3, warmup=Duration(4000)),
        mesh=MeshConfig(fsdp=-1),
        cadence=Cadence(log_steps=50, save_steps=1000),
    )
