"""first_tower: a small classifier by 8 classes, trained on 1,000 images.

Its image tower is for lit-het new PROJECT --tower first_tower/run. Written by lit-het new for 1 cpu, 20.3 GiB each.
Train it with lit-het train --config first_tower/config.py
"""

from pathlib import Path

from lit_het.data_pipelines.portions import Portion
from lit_het.durations import Duration
from lit_het.schedules import Schedule

from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.labels import ClassIndex
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ZeroShotConfig
from lit_het.heads.deterministic import DeterministicConfig
from lit_het.losses.classification import SoftmaxCrossEntropy
from lit_het.sharding import MeshConfig
from lit_het.tasks.classification import ClassificationConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from lit_het.training.loop import Cadence

PROJECT = Path(__file__).resolve().parent
SHARDS = "/data/pairs/train"


def get_config() -> ExperimentConfig:
    """Returns the run; every field is also a flag, such as --length "5 epochs"."""
    return ExperimentConfig(
        run_dir=PROJECT / "run",
        task=ClassificationConfig(
            image_tower=ViTConfig(
                image_size=64,
                patch_size=16,
                encoder=EncoderConfig(width=256, depth=2, mlp_width=1024, num_heads=4),
                pooling="attention",
                positions="sine_cosine",
            ),
            head=DeterministicConfig(),
            num_classes=8,
            loss=SoftmaxCrossEntropy(),
        ),
        data=LoaderConfig(
            shards=(SHARDS,),
            portion=Portion(0, 87, by="key"),
            image_size=64,
            batch_size=32,  # fits into 20.3 GiB, see lit-het plan
            labels=ClassIndex(),
            threads=2,
        ),
        length=Duration(20, "epochs"),
        schedule=Schedule(learning_rate=1e-3, warmup=Duration(10, "percent")),
        mesh=MeshConfig(),
        cadence=Cadence(log_steps=31, save_steps=100),
        # Not trained on, by this tower and a model on it: 13 %, by a hash of their keys.
        calibration=Portion(87, by="key"),
        evaluations=(ZeroShotConfig(ImageSet("held_out", "/data/pairs/train", SHARDS, Portion(87, by="key"))),),
    )
