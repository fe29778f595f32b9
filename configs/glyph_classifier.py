"""A classifier of the quickstart's characters by 1,379 names, with a HET-XL head.

Small enough to be trained many times: docs/temperature.md compares temperatures and heads on it. Training sees 15
typefaces, ``data/held_out_typeface`` is a sixteenth: new images of the same characters. Some characters look the same
in every typeface, so that no classifier can reach 100 %. ``glyph_classifier.py:minival=5`` holds images out on which
``lit-het tune`` and ``lit-het shape`` can compare runs.
"""

from pathlib import Path

from lit_het.configs import quickstart_upstream
from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.labels_config import ClassIndex
from lit_het.data_pipelines.shards.portions import Portion
from lit_het.errors import UserError
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ZeroShotConfig
from lit_het.heads.classification_config import ClassificationHeadConfig, HetXLConfig
from lit_het.heads.noise_config import CovarianceConfig, SamplingConfig
from lit_het.tasks.classification import ClassificationConfig
from lit_het.towers.encoder_config import EncoderConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.optimizers_config import AdamW, Optimizer
from lit_het.training.schedules import Schedule

ROOT = quickstart_upstream.ROOT
NUM_NAMES = 1379  # of training characters
HEAD = HetXLConfig(
    covariance=CovarianceConfig(num_factors=8, form="efficient", initial_noise_norm=1.0),
    sampling=SamplingConfig(num_samples=8, num_eval_samples=100),
)


def get_config(root: Path = ROOT, head: ClassificationHeadConfig = HEAD, minival: int = 0) -> ExperimentConfig:
    """Returns the run; ``root / "data"`` contains the data that ``lit-het quickstart`` writes.

    Args:
        root: folder of the data and the run.
        head: the head.
        minival: percent of the training images that are evaluated instead, for searches of settings and shapes.
    """
    if not 0 <= minival < 100:
        raise UserError(f"minival = {minival} must be a percentage from 0 to 99")
    folder = str(root / "data" / "train")
    evaluations = (ZeroShotConfig(ImageSet("minival", folder, ".", Portion(100 - minival))),) if minival else ()
    return ExperimentConfig(
        run_dir=root / "glyph_classifier",
        task=ClassificationConfig(
            image_tower=ViTConfig(
                image_size=32,
                # A single patch: more patches learn less at this budget.
                patch_size=32,
                encoder=EncoderConfig(width=256, depth=1, mlp_width=1024, num_heads=4, unrolled=True),
                pooling="attention",
                positions="sine_cosine",
            ),
            head=head,
            num_classes=NUM_NAMES,
        ),
        data=LoaderConfig(
            shards=(folder,),
            portion=Portion(0, 100 - minival),
            image_size=32,
            batch_size=64,
            threads=1,
            labels=ClassIndex(),
            augmentations=(quickstart_upstream.AUGMENTATION,),
        ),
        calibration=None,  # its figures are compared on held-out data of their own
        length=Duration(1000),
        optimizer=Optimizer(AdamW(second_decay=0.95), weight_decay=3e-5),
        schedule=Schedule(learning_rate=2e-3, warmup=Duration(50)),
        cadence=Cadence(log_steps=25, save_steps=1000),
        evaluations=evaluations,
    )
