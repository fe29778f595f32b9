"""Supervised pre-training of a SoViT: the base of ``lit-het shape``, and the 40 billion examples of SoViT-400m.

    lit-het shape star --config configs/sovit_upstream.py --metric few_shot/imagenet/10_shot ...
    lit-het train --config configs/sovit_upstream.py:run=so400m --data.shards '/data/mine/{0000..4095}.tar'

SoViT Table 5 has resolution, batch, crops and flips, Adafactor, clipping, rate, decay and schedule; App. B.2 and B.3
patches of 14, 16 heads, and the centre of the star, which is the shape of ``run=sweep``. Loss, bias and head are open:
the sigmoid loss and attention pooling of Zhai et al. 2022. Of the run of SoViT-400m the paper has shape and examples
(Sec. 5) alone: its other settings are Table 5's, but for a batch of 4,096 in place of 128, "small in order to train
multiple models in parallel". JFT-3B is not public: set ``--data.shards`` and ``--task.num-classes`` of your data, or
take those of ``lit-het data prepare imagenet21k`` with ``--data.labels class_index --task.num-classes 21843``.
"""

from pathlib import Path
from typing import Literal

from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.images.augment import HorizontalFlip
from lit_het.data_pipelines.images.transforms import InceptionCrop, Preprocessing
from lit_het.data_pipelines.labels_config import MultiHot
from lit_het.eval.fits import FewShotOptions
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import FewShotConfig
from lit_het.heads.classification_config import DeterministicConfig
from lit_het.losses.classification_config import SigmoidCrossEntropy
from lit_het.tasks.classification import ClassificationConfig
from lit_het.towers.encoder_config import EncoderConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.sizes import encoder_size
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.optimizers_config import Adafactor, Optimizer
from lit_het.training.schedules import ReverseSquareRoot, Schedule

CENTRE = EncoderConfig(width=1968, depth=40, mlp_width=6144, num_heads=16, compute_type="bfloat16")
LEARNING_RATE = 8e-4


def get_config(run: Literal["sweep", "so400m"] = "sweep") -> ExperimentConfig:
    """Returns the run."""
    is_sweep = run == "sweep"
    return ExperimentConfig(
        run_dir=Path(f"runs/sovit_{run}"),
        task=ClassificationConfig(
            image_tower=ViTConfig(224, 14, CENTRE if is_sweep else encoder_size("So400m")),
            # Of JFT-3B, "about 30k classes"; HET-XL Sec. 6.2 has the number.
            num_classes=29_593,
            head=DeterministicConfig(initial_bias=-10.0),
            loss=SigmoidCrossEntropy(),
        ),
        data=LoaderConfig(
            shards=("data/jft3b/train",),
            image_size=224,
            batch_size=128 if is_sweep else 4096,
            preprocessing=Preprocessing(filter="fast"),
            crop=InceptionCrop(),
            augmentations=(HorizontalFlip(),),
            threads=16,
            labels=MultiHot(),
        ),
        calibration=None,  # all samples of the recipe are trained on
        length=Duration(500_000) if is_sweep else Duration(40_000_000_000, "examples"),
        # The table's weight decay, 0.03 x 8e-4, is that of a step, as ours.
        optimizer=Optimizer(Adafactor(), weight_decay=0.03 * LEARNING_RATE, clip_norm=1.0),
        schedule=Schedule(
            learning_rate=LEARNING_RATE,
            warmup=Duration(10_000),
            decay=ReverseSquareRoot(timescale=Duration(10_000), cooldown=Duration(50_000)),
        ),
        cadence=Cadence(log_steps=50, save_steps=5000),
        evaluations=(FewShotConfig(ImageSet("imagenet", "data/imagenet"), fit=FewShotOptions(shots=(5, 10, 25))),),
    )
