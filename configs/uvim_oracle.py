"""Stage I of UViM for panoptic segmentation, in full size (Kolesnikov et al. 2022; big_vision's vqvae_coco_panoptic).

    lit-het data prepare coco-panoptic ... data/coco_panoptic
    lit-het train --config configs/uvim_oracle.py

All numbers are those of the published configuration. Its first 4,096 training images are held out; here 4 %.
"""

import dataclasses
from pathlib import Path

from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.images.augment import HorizontalFlip
from lit_het.data_pipelines.images.transforms import InceptionCrop
from lit_het.data_pipelines.shards.portions import Portion
from lit_het.sharding import MeshConfig
from lit_het.tasks.mask_oracle import MaskOracleConfig
from lit_het.towers.oracle_config import CodebookConfig, OracleConfig
from lit_het.towers.sizes import encoder_size
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.optimizers_config import Adafactor, Optimizer
from lit_het.training.schedules import Schedule

ORACLE = OracleConfig(
    image_size=512,
    patch_size=16,
    num_classes=133,
    num_instances=99,
    code_length=256,
    codebook=CodebookConfig(num_words=4096, size=768, momentum=0.995, least_count=0.1),
    # Without remat a step of 16 images on a device would need more than 32 GiB.
    encoder=dataclasses.replace(encoder_size("B"), depth=6, remat="full"),
    decoder=dataclasses.replace(encoder_size("B"), remat="full"),
)


def get_config() -> ExperimentConfig:
    """Returns the run; set ``--data.shards``."""
    return ExperimentConfig(
        run_dir=Path("runs/uvim_oracle"),
        task=MaskOracleConfig(ORACLE, code_dropout="random", commitment=0.0),
        data=data(batch_size=1024),
        calibration=None,  # 4 % are held out by hand
        length=Duration(1000, "epochs"),
        optimizer=Optimizer(Adafactor(second_decay_cap=0.95), weight_decay=4e-5, clip_norm=1.0),
        schedule=Schedule(learning_rate=4e-4, warmup=Duration(4000)),
        mesh=MeshConfig(fsdp=-1),
        cadence=Cadence(log_steps=50, save_steps=1000),
    )


def data(batch_size: int) -> LoaderConfig:
    """Returns the training images of both stages."""
    return LoaderConfig(
        shards=("data/coco_panoptic/train",),
        portion=Portion(4),
        image_size=ORACLE.image_size,
        batch_size=batch_size,
        masks=True,
        crop=InceptionCrop(min_area=0.05),
        augmentations=(HorizontalFlip(),),
        threads=16,
    )
