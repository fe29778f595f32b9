"""Stage I of a small UViM: codes of the masks of scenes of glyphs, for two cores.

lit-het data scenes runs/scenes/data
lit-het train --config configs/scene_oracle.py
"""

from pathlib import Path

from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.images.augment import HorizontalFlip
from lit_het.tasks.mask_oracle import MaskOracleConfig
from lit_het.towers.encoder_config import EncoderConfig
from lit_het.towers.oracle_config import CodebookConfig, OracleConfig
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.optimizers_config import AdamW, Optimizer
from lit_het.training.schedules import Schedule

ROOT = Path("runs/scenes")
IMAGE_SIZE, BATCH_SIZE = 64, 16
BLOCKS = EncoderConfig(width=128, depth=2, mlp_width=256, num_heads=4, unrolled=True)
ORACLE = OracleConfig(
    image_size=IMAGE_SIZE,
    patch_size=8,
    num_classes=14,
    num_instances=9,  # a scene has at most 6 things and crowds
    code_length=64,  # a word for each patch: with 16 words instances take longer to be told apart
    # Few words, as stage II has to tell them apart.
    # A word counts as unused after 22 batches without it, not 460 as in the paper: at first all vectors are alike, and
    # nothing is learned before their word is split.
    codebook=CodebookConfig(num_words=48, size=32, momentum=0.9),
    encoder=BLOCKS,
    decoder=BLOCKS,
)


def get_config(root: Path = ROOT) -> ExperimentConfig:
    """Returns the run; ``root / "data"`` contains the scenes."""
    return ExperimentConfig(
        run_dir=root / "oracle",
        # Code dropout slows stage I: after 175 steps the loss is 1.8 in place of 1.3.
        task=MaskOracleConfig(ORACLE, code_dropout="none"),
        data=data(root),
        calibration=None,
        length=Duration(1500),
        optimizer=Optimizer(AdamW(second_decay=0.95), weight_decay=2e-5),
        schedule=Schedule(learning_rate=2e-3, warmup=Duration(50)),
        cadence=Cadence(log_steps=25, save_steps=500),
    )


def data(root: Path) -> LoaderConfig:
    """Returns the training scenes of both stages."""
    return LoaderConfig(
        shards=(str(root / "data" / "train"),),
        image_size=IMAGE_SIZE,
        batch_size=BATCH_SIZE,
        masks=True,
        augmentations=(HorizontalFlip(),),
        threads=1,
    )
