"""Fine-tuning CLIP B/16 on ImageNet with its own loss: FLYP ("Finetune like you pretrain", Goyal et al. 2023).

    lit-het import --from hf://openai/clip-vit-base-patch16 --to runs/clip_b16
    lit-het train --config configs/flyp_imagenet.py

A caption is the name of the image's class in one of CLIP's 80 templates, drawn anew in each epoch. Rate, decays, batch,
epochs, warm-up and crops are those of the authors' code (locuslab/FLYP: ``README.md``, ``src/args.py``, ``clip.py``),
which decays all parameters, here kernels (docs/paper_map.md, 105). ``lit-het merge`` then mixes the run with the model
that it started from (WiSE-FT). Of another set: ``lit-het new --adapt full --captions cls/data/pets:pet``.
"""

import dataclasses
from pathlib import Path

from lit_het.configs import fine_tune_pair
from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.images.transforms import InceptionCrop
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ClassNamesConfig, ZeroShotConfig
from lit_het.losses.contrastive import SoftmaxLoss
from lit_het.training.cadence import Cadence
from lit_het.training.optimizers_config import AdamW, Optimizer

SHARDS, PROMPTS = "data/imagenet", "clip80"


def get_config() -> ExperimentConfig:
    """Returns the run; its model is the run that ``lit-het import`` makes."""
    config = fine_tune_pair.get_config("clip_b16", "full")
    return dataclasses.replace(
        config,
        run_dir=Path("runs/flyp_imagenet"),
        # Images of one class are wrong answers to one another's captions.
        task=dataclasses.replace(config.task, loss=SoftmaxLoss(duplicates="negatives")),
        data=dataclasses.replace(
            config.data,
            shards=(f"{SHARDS}/train",),
            captions=f"cls/{SHARDS}:{PROMPTS}",
            crop=InceptionCrop(min_area=0.9),
        ),
        optimizer=Optimizer(AdamW(), weight_decay=0.1 * fine_tune_pair.RATES["full"], clip_norm=None),
        average_decay=None,
        calibration=None,  # all samples of the recipe are trained on
        cadence=Cadence(log_steps=50, save_steps=1000, evaluate_steps=2500),
        evaluations=(ZeroShotConfig(ImageSet("imagenet", SHARDS), ClassNamesConfig(PROMPTS)),),
    )
