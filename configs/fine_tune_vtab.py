"""Fine-tuning a ViT on the 1,000 images of a task of VTAB-1k at 384 pixels, in full size (Zhai et al. 2019).

    lit-het benchmark-vtab runs/vit_l16 --data data/wds --output runs/vtab
    lit-het train --config configs/fine_tune_vtab.py:task=pets,size=h14 --pretrained.run runs/vit_h14

The first command does it for all 19 tasks, on the image tower of any run, and chooses a setting of `get_grid` by 200 of
the images. The second trains on the folder that the first has written, ``runs/vtab/images/pets``, at one setting: rate,
steps, batch size, clipping, decay and resolution are those with which ViT trained all tasks (Dosovitskiy et al. 2021,
App. B.1.1 and Table 4). Its warm-up, and which tasks have crops and flips, which change the labels of some, are those
of scenic's configuration of plain ViTs on VTAB, with which ViT-G was tuned (Zhai et al. 2022): docs/paper_map.md, 116.
"""

import dataclasses
from pathlib import Path
from typing import Literal, TypeAlias

from lit_het.configs.experiment import ExperimentConfig, PretrainedConfig
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.images.augment import HorizontalFlip
from lit_het.data_pipelines.images.transforms import Preprocessing, RandomCrop
from lit_het.data_pipelines.labels_config import ClassIndex
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ZeroShotConfig
from lit_het.heads.classification_config import DeterministicConfig
from lit_het.sharding import MeshConfig
from lit_het.tasks.classification import ClassificationConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.sizes import encoder_size
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.optimizers_config import SGD, Optimizer
from lit_het.training.schedules import Schedule

Task: TypeAlias = Literal[
    "caltech101",
    "cifar100",
    "dtd",
    "flowers",
    "pets",
    "sun397",
    "svhn",
    "diabetic_retinopathy",
    "eurosat",
    "pcam",
    "resisc45",
    "clevr_closest_object_distance",
    "clevr_count_all",
    "dmlab",
    "dsprites_label_orientation",
    "dsprites_label_x_position",
    "kitti_closest_vehicle_distance",
    "smallnorb_label_azimuth",
    "smallnorb_label_elevation",
]
Size: TypeAlias = Literal["b16", "l16", "h14"]
CROP = RandomCrop(384 / 448)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A task: its classes, and whether training images are cropped and flipped."""

    num_classes: int
    crop: bool = True
    flip: bool = True


RECIPES: dict[Task, Recipe] = {
    "caltech101": Recipe(102),
    "cifar100": Recipe(100),
    "dtd": Recipe(47),
    "flowers": Recipe(102),
    "pets": Recipe(37),
    "sun397": Recipe(397),
    "svhn": Recipe(10),
    "diabetic_retinopathy": Recipe(5),
    "eurosat": Recipe(10),
    "pcam": Recipe(2),
    "resisc45": Recipe(45),
    "clevr_closest_object_distance": Recipe(6, crop=False),
    "clevr_count_all": Recipe(8, crop=False),
    "dmlab": Recipe(6, crop=False),
    "dsprites_label_orientation": Recipe(16, flip=False),
    "dsprites_label_x_position": Recipe(16, crop=False, flip=False),
    "kitti_closest_vehicle_distance": Recipe(4, crop=False),
    "smallnorb_label_azimuth": Recipe(18, flip=False),
    "smallnorb_label_elevation": Recipe(9),
}


def get_config(task: Task = "pets", size: Size = "l16") -> ExperimentConfig:
    """Returns the run on all 1,000 images; set ``--pretrained.run``. ``head`` can be any of `lit_het/heads`."""
    recipe, folder = RECIPES[task], f"runs/vtab/images/{task}"
    return ExperimentConfig(
        run_dir=Path(f"runs/vtab_{task}_{size}"),
        task=ClassificationConfig(
            image_tower=ViTConfig(384, int(size[1:]), encoder_size(size[0].upper()), pooling="class_token"),
            head=DeterministicConfig(zero_kernel=True),
            num_classes=recipe.num_classes,
        ),
        data=LoaderConfig(
            shards=(f"{folder}/train800", f"{folder}/val200"),
            image_size=384,
            batch_size=512,
            labels=ClassIndex(),
            preprocessing=Preprocessing(filter="fast"),
            crop=CROP if recipe.crop else None,
            augmentations=(HorizontalFlip(),) if recipe.flip else (),
            threads=16,
        ),
        pretrained=PretrainedConfig(run=Path(f"runs/vit_{size}")),
        calibration=None,  # all samples of the recipe are trained on
        length=Duration(2_500),
        optimizer=Optimizer(SGD(), weight_decay=0.0, clip_norm=1.0),
        schedule=Schedule(learning_rate=0.01, warmup=Duration(200)),
        mesh=MeshConfig(fsdp=-1),
        cadence=Cadence(log_steps=50, save_steps=1000, keep=1),
        evaluations=(ZeroShotConfig(ImageSet(task, f"data/{task}")),),
    )


def get_grid(task: Task = "pets", size: Size = "l16") -> dict[str, tuple[int | float, ...]]:
    """Returns rates and steps of ViT and of BiT-HyperRule (Kolesnikov et al. 2020, Sec. 3.3), by field."""
    return {"length": (500, 2_500), "schedule.learning-rate": (0.003, 0.01)}
