"""Fine-tuning a V-MoE, an e3, a ViT, or another model of e3's tables, at 384 pixels (App. A.3, Tables 2 to 7, 12).

    lit-het train --config configs/fine_tune_experts.py:data_set=pets,model=e3,size=b32
    lit-het train --config configs/fine_tune_experts.py:model=e3 --task.image-tower.encoder.experts.overlap 8
    lit-het train --config configs/fine_tune_experts.py:model=vmoe --members 4      # a deep ensemble

All models start from the checkpoint of a V-MoE or of a ViT (App. B). K, M, E and the overlap are flags below
``--task.image-tower.encoder.experts``; the defaults are those of Table 5, of the ablations those of Tables 2 to 4.

Resolution, clipping, optimizer, batch size, capacities, expert dropout, minival, and the grid of learning rates and
factors of the steps are the paper's. The configuration has factor 1 and rate 0.01; `get_grid` is the grid, which
``lit-het tune`` (``--field grid``) and scripts/sweep.py (``--grid grid``) search.
The paper gives no decay, loss, head or augmentation; they are those of Dosovitskiy et al. 2021 (App. B.1.1), whose
settings it follows: cosine decay with 500 steps of warm-up (a tenth of the run for the small data sets), softmax, crops
and flips, and a head with zero initialisation in place of the pre-logits layer. A V-MoE has K = 2, an e3 K = 1 and
M = 2, in the last two of every other block, H in the last five. Sizes are those of e3 App. A.1, whose S is 512 wide and
8 deep. Minival is the end of the shards, which must not be sorted by class: ``lit-het data prepare pets --shuffle``.
"""

import dataclasses
from pathlib import Path
from typing import Literal, TypeAlias

from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.images.augment import HorizontalFlip
from lit_het.data_pipelines.images.transforms import InceptionCrop, Preprocessing
from lit_het.data_pipelines.labels_config import ClassIndex
from lit_het.data_pipelines.shards.portions import Portion
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ZeroShotConfig
from lit_het.heads.classification_config import DeterministicConfig
from lit_het.sharding import MeshConfig
from lit_het.tasks.classification import ClassificationConfig
from lit_het.tasks.mimo import MimoConfig
from lit_het.towers.encoder_config import EncoderConfig
from lit_het.towers.experts_config import ExpertsConfig, RankOneConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.sizes import encoder_size
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.optimizers_config import SGD, Optimizer
from lit_het.training.schedules import Schedule

VMOE = ExpertsConfig(num_experts=32, num_selected=2, num_blocks=2, capacity_factor=1.5, dropout_rate=0.1)
SMALL = EncoderConfig(512, 8, 2048, 8, compute_type="bfloat16")
FACTORS = (0.5, 1.0, 1.5, 2.0)
LEARNING_RATES = (0.001, 0.003, 0.01, 0.03)
DataSet: TypeAlias = Literal["imagenet", "cifar10", "cifar100", "pets", "flowers"]
Size: TypeAlias = Literal["s32", "b32", "b16", "l32", "l16", "h14"]
Model: TypeAlias = Literal[
    "vit",
    "vmoe",
    "e3",
    "partitioning",
    "tiling",
    "overlap",
    "multi_pred",
    "batch_ensemble",
    "mc_dropout",
    "mimo",
    "heads",
]
EXPERTS: dict[Model, ExpertsConfig | None] = {
    "vit": None,
    "vmoe": VMOE,
    "e3": dataclasses.replace(VMOE, num_selected=1, num_members=2),
    "partitioning": dataclasses.replace(VMOE, num_members=2, tiled=False),
    "tiling": dataclasses.replace(VMOE, num_members=2, overlap=32),
    "overlap": dataclasses.replace(VMOE, num_members=2, overlap=8),
    "multi_pred": dataclasses.replace(VMOE, multi_pred=True),
    # Members of rank one in the MLPs where a V-MoE has experts (App. G.1).
    "batch_ensemble": ExpertsConfig(2, 1, num_blocks=2, num_members=2, rank_one=RankOneConfig()),
    "mc_dropout": dataclasses.replace(VMOE, dropout_samples=2),
    "mimo": VMOE,
    "heads": VMOE,
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Settings of a data set: classes, percent of train for minival, and of Table 7 steps at factor 1 and rates."""

    num_classes: int
    num_steps: int
    minival: int
    learning_rates: tuple[float, ...] = LEARNING_RATES


RECIPES: dict[DataSet, Recipe] = {
    "imagenet": Recipe(1000, 20_000, 1, (0.0024, *LEARNING_RATES[1:])),
    "cifar10": Recipe(10, 5_000, 2),
    "cifar100": Recipe(100, 5_000, 2),
    "pets": Recipe(37, 500, 10),
    "flowers": Recipe(102, 500, 10),
}


def get_config(
    data_set: DataSet = "imagenet",
    model: Model = "e3",
    size: Size = "b32",
) -> ExperimentConfig:
    """Returns the run; set ``--task.image-tower.weights``, or ``--pretrained.run`` and no weights."""
    recipe, folder = RECIPES[data_set], f"data/{data_set}"
    train, minival = Portion(0, 100 - recipe.minival), Portion(100 - recipe.minival)
    experts, is_dense = EXPERTS[model], model in ("vit", "batch_ensemble")
    if experts is not None and size == "h14":
        experts = dataclasses.replace(experts, num_blocks=5)
    encoder = SMALL if size == "s32" else encoder_size(size[0].upper())
    return ExperimentConfig(
        run_dir=Path(f"runs/fine_tune_{data_set}_{model}_{size}"),
        task=ClassificationConfig(
            image_tower=ViTConfig(
                image_size=384,
                patch_size=int(size[1:]),
                encoder=dataclasses.replace(encoder, experts=experts),
                pooling="class_token",
                weights=f"weights/vit_{size}.npz" if is_dense else f"weights/vmoe_{size}",
                num_inputs=2 if model == "mimo" else 1,
                # Each member has a prediction of its own, and the loss averages their losses (e3 Sec. 4.1).
                members="apart",
            ),
            # Heads that start from zero on the same images would stay equal.
            head=DeterministicConfig(zero_kernel=model != "heads"),
            num_classes=recipe.num_classes,
            num_heads=2 if model in ("mimo", "heads") else 1,
            mimo=MimoConfig() if model == "mimo" else None,
        ),
        data=LoaderConfig(
            shards=(f"{folder}/train",),
            image_size=384,
            batch_size=512,
            labels=ClassIndex(),
            portion=train,
            preprocessing=Preprocessing(filter="fast"),
            crop=InceptionCrop(),
            augmentations=(HorizontalFlip(),),
            threads=16,
        ),
        calibration=None,  # all samples of the recipe are trained on
        length=Duration(recipe.num_steps),
        optimizer=Optimizer(SGD(), weight_decay=0.0, clip_norm=10.0),
        schedule=Schedule(
            learning_rate=0.01, warmup=Duration(500) if recipe.num_steps >= 5000 else Duration(10, "percent")
        ),
        mesh=MeshConfig(expert=-1) if experts and experts.rank_one is None else MeshConfig(),
        cadence=Cadence(log_steps=50, save_steps=1000, evaluate_steps=recipe.num_steps // 5),
        evaluations=(
            ZeroShotConfig(ImageSet("minival", folder, split="train", portion=minival)),
            ZeroShotConfig(ImageSet(data_set, folder)),
        ),
    )


def get_grid(
    data_set: DataSet = "imagenet", model: Model = "e3", size: Size = "b32"
) -> dict[str, tuple[int | float, ...]]:
    """Returns the values of Table 7 by field, for every model and size; the expert dropout of 0.1 is the run's."""
    recipe = RECIPES[data_set]
    steps = tuple(round(factor * recipe.num_steps) for factor in FACTORS)
    return {"length": steps, "schedule.learning-rate": recipe.learning_rates}
