"""Quickstart, first stage: a small ViT with a HET-XL head learns to predict the words in a character's name."""

from pathlib import Path

from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.glyphs import GlyphConfig
from lit_het.data_pipelines.images.augment import RandomAffine
from lit_het.data_pipelines.labels_config import CaptionWords
from lit_het.heads.classification_config import HetXLConfig
from lit_het.heads.noise_config import CovarianceConfig, SamplingConfig
from lit_het.losses.classification_config import SigmoidCrossEntropy
from lit_het.tasks.classification import ClassificationConfig
from lit_het.towers.encoder_config import EncoderConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.optimizers_config import AdamW, Optimizer
from lit_het.training.schedules import Schedule

ROOT = Path("runs/quickstart")
NUM_WORDS = 291  # in the names of training characters
IMAGE_TOWER = ViTConfig(
    image_size=32,
    # Patches of 16 pixels learn more in the same time than those of 8 (docs/quickstart.md).
    patch_size=16,
    # As good as a width of 256 in two thirds of the time; 160 loses 3 to 5 points (docs/quickstart.md).
    encoder=EncoderConfig(width=192, depth=3, mlp_width=768, num_heads=4, unrolled=True),
    pooling="attention",
    positions="sine_cosine",
)
AUGMENTATION = RandomAffine(
    max_shift_pixels=0.7, min_scale=0.95, max_scale=1.05, max_rotation_degrees=3.0, max_shear_degrees=5.7
)


def glyphs(seed: int = 0) -> GlyphConfig:
    """Returns the data set: Latin, Greek, Cyrillic, digits; 40 % of the noisy captions in Cyrillic are wrong."""
    return GlyphConfig(noisy_script="cyrillic", seed=seed)


def get_config(root: Path = ROOT) -> ExperimentConfig:
    """Returns the run; ``root / "data"`` contains the data that ``lit-het quickstart`` writes."""
    return ExperimentConfig(
        run_dir=root / "upstream",
        task=ClassificationConfig(
            image_tower=IMAGE_TOWER,
            head=HetXLConfig(
                covariance=CovarianceConfig(num_factors=8, form="efficient", initial_noise_norm=1.0),
                sampling=SamplingConfig(num_samples=4),
                # A name has few of the 291 words: probabilities start low.
                initial_bias=-5.0,
            ),
            num_classes=NUM_WORDS,
            loss=SigmoidCrossEntropy(),
        ),
        data=LoaderConfig(
            shards=(str(root / "data" / "train"),),
            image_size=32,
            batch_size=64,
            threads=1,
            labels=CaptionWords(),
            augmentations=(AUGMENTATION,),
        ),
        calibration=None,  # its figures are compared on held-out data of their own
        length=Duration(1400),
        optimizer=Optimizer(AdamW(second_decay=0.95), weight_decay=3e-5),
        schedule=Schedule(learning_rate=1.4e-3, warmup=Duration(100)),
        cadence=Cadence(log_steps=25, save_steps=500),
    )
