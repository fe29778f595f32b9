"""The suites of ``lit-het benchmark``: their sets, the folders that hold them, and means over sets."""

import dataclasses
import glob
from collections.abc import Iterable, Mapping

import numpy as np

from lit_het.data_pipelines.labels_config import CLASS_NAMES_FILE
from lit_het.data_pipelines.shards import storage, urls
from lit_het.data_pipelines.shards.writing import expand, matching
from lit_het.errors import UserError
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import (
    ClassNamesConfig,
    EvaluationConfig,
    FewShotConfig,
    RetrievalConfig,
    ShiftConfig,
    ZeroShotConfig,
)

CORRUPTED = "corrupted/top1"
# Copies of ImageNet, which lie in its folder.
_COPIES = "imagenet_c"
NUM_SHARDS_FILE = "nshards.txt"
# How far below the given folder sets may lie: `FOLDER/datasets--OWNER--wds_cifar10/snapshots/REVISION`.
_DEPTH = 3
# Other names of folders: those of `lit-het data prepare`, of tfds and of the sets' authors.
_ALIASES = {
    "imagenet": "imagenet1k",
    "imagenet2012": "imagenet1k",
    "imagenet_v2": "imagenetv2",
    "imagenetv2_matched_frequency": "imagenetv2",
    "cub": "birds",
    "caltech_101": "caltech101",
    "stanford_cars": "cars",
    "colorectal_histology": "colorectal",
    "oxford_iiit_pet": "pets",
    "oxford_flowers102": "flowers",
    "coco": "mscoco_captions",
}


@dataclasses.dataclass(frozen=True)
class Group:
    """Sets of which one figure is shown, and its mean.

    Attributes:
        title: heading in tables.
        figure: of every set, as its evaluation names it.
        sets: in the order of tables.
        is_mean: whether only the mean is shown, as the sets are those of other groups.
    """

    title: str
    figure: str
    sets: tuple[str, ...]
    is_mean: bool = False


@dataclasses.dataclass(frozen=True)
class Suite:
    """Sets that are evaluated together.

    Attributes:
        groups: in the order of tables.
        published: models of ``published.csv`` to compare with.
        has_mean: whether the mean top-1 over all groups is a figure of the suite.
    """

    groups: tuple[Group, ...]
    published: tuple[str, ...]
    has_mean: bool = False

    @property
    def groups_with_all(self) -> tuple[Group, ...]:
        """The groups, and that of the mean over all of them."""
        names = tuple(name for group in self.groups if group.figure == "top1" for name in group.sets)
        overall = Group(f"all {len(names)} sets, top-1", "top1", names, is_mean=True)
        return (*self.groups, overall) if self.has_mean else self.groups

    @property
    def sets(self) -> tuple[str, ...]:
        """All sets, each once."""
        return tuple(dict.fromkeys(name for group in self.groups for name in group.sets))

    def evaluation(self, name: str, directory: str, names: ClassNamesConfig, samples: int) -> EvaluationConfig:
        """Returns the evaluation of a set that lies in a folder; its kind follows from the metric."""
        figure = next(group.figure for group in self.groups if name in group.sets)
        data = ImageSet(name, directory)
        if figure == CORRUPTED:
            return ShiftConfig(data, names=names, samples=samples)
        if figure.endswith("_shot"):
            return FewShotConfig(data)
        if "recall" in figure:
            return RetrievalConfig(dataclasses.replace(data, labelled=False))
        if figure == "mean_average_precision":
            # Without noise: only a sigmoid loss has figures of it.
            return ZeroShotConfig(dataclasses.replace(data, multi_label=True), names)
        return ZeroShotConfig(data, names, samples)


_VARIANTS = ("imagenetv2", "imagenet_sketch", "imagenet_a", "imagenet_r", "objectnet")
_VTAB_NATURAL = ("caltech101", "cifar100", "dtd", "flowers", "pets", "sun397", "svhn")
_SPECIALISED = ("diabetic_retinopathy", "eurosat", "pcam", "resisc45")
_STRUCTURED = (
    *("clevr_closest_object_distance", "clevr_count_all", "dmlab"),
    *("dsprites_label_orientation", "dsprites_label_x_position", "kitti_closest_vehicle_distance"),
    *("smallnorb_label_azimuth", "smallnorb_label_elevation"),
)
_NATURAL = (
    *("imagenet1k", "imagenetv2", "imagenet_a", "imagenet_r", "objectnet"),
    *("fer2013", "voc2007", "cars", "fgvc_aircraft", "stl10", "gtsrb", "country211", "cifar10"),
    *_VTAB_NATURAL,
)
_CAPTIONED = ("mscoco_captions", "flickr8k", "flickr30k")
_ZERO_SHOT_MODELS = ("CLIP ViT-B/32", "CLIP ViT-B/16", "CLIP ViT-L/14", "SigLIP B/16", "SigLIP So400m/14")
_FEW_SHOT = ("imagenet1k", "cifar100", "pets", "birds", "caltech101", "cars", "colorectal", "dtd", "uc_merced")

SUITES: Mapping[str, Suite] = {
    # The collection vtab+ of clip_benchmark's builder.py, grouped as by its dataset_type.csv, and its retrieval sets.
    "clip_benchmark": Suite(
        (
            Group("natural", "top1", _NATURAL),
            Group("specialised", "top1", ("imagenet_sketch", "mnist", "renderedsst2", *_SPECIALISED)),
            Group("structured", "top1", _STRUCTURED),
            Group("several labels, mean average precision", "mean_average_precision", ("voc2007_multilabel",)),
            Group("image → text, recall@5", "image_to_text_recall5", _CAPTIONED),
            Group("text → image, recall@5", "text_to_image_recall5", _CAPTIONED),
        ),
        (*_ZERO_SHOT_MODELS, "LiT SoViT-400m/14", "LiT G/14", "LiT G/14 HET-XL"),
        has_mean=True,
    ),
    # The 19 tasks of Zhai et al., "A large-scale study of representation learning", 2019, here by class names;
    # `VTAB_1K` trains on 1,000 images of each.
    "vtab": Suite(
        (
            Group("natural", "top1", _VTAB_NATURAL),
            Group("specialised", "top1", _SPECIALISED),
            Group("structured", "top1", _STRUCTURED),
        ),
        _ZERO_SHOT_MODELS,
        has_mean=True,
    ),
    "robustness": Suite(
        (
            Group("ImageNet", "top1", ("imagenet1k",)),
            Group("ImageNet variants", "top1", _VARIANTS),
            Group("corrupted, mean over corruptions and severities", CORRUPTED, (_COPIES,)),
        ),
        ("CLIP ViT-L/14", "SigLIP So400m/14", "SoViT-400m/14 probe", "e3 H/14", "V-MoE H/14", "ViT-H/14"),
    ),
    # HET-XL App. O, SoViT Table 3; e3 App. A.5 leaves ImageNet out.
    "fewshot": Suite(
        tuple(Group(f"{shots}-shot", f"{shots}_shot", _FEW_SHOT) for shots in (1, 5, 10, 25)),
        ("SoViT-400m/14", "ViT-g/14", "DET", "HET-XL", "e3 H/14", "V-MoE H/14", "ViT-H/14"),
    ),
}

VTAB_1K = dataclasses.replace(SUITES["vtab"], published=("ViT-H/14 JFT", "ViT-L/16 JFT", "ViT-L/16 I21k"))
"""The sets of VTAB and who fine-tuned on 1,000 images of each, see `lit_het.apps.benchmark.fine_tuning`."""


def group_means(group: Group, values: Mapping[str, float]) -> dict[str, float]:
    """Returns the means over the sets of a group, by title; none of a single set.

    Args:
        group: the sets.
        values: of those sets that are known.
    """
    if len(group.sets) == 1 or not values:
        return {}
    means = {"mean": float(np.mean(list(values.values())))}
    others = [value for name, value in values.items() if name != "imagenet1k"]
    if group.figure.endswith("_shot") and others:
        means["mean without imagenet1k"] = float(np.mean(others))
    return means


def find_sets(folder: str, suite: Suite) -> tuple[dict[str, str], tuple[str, ...]]:
    """Finds the folders of a suite's sets below a folder, a path or a URL.

    A set is a folder with ``classnames.txt``, or with shards in its folder ``test``. It is found by its name: as
    clip_benchmark (``wds_vtab-cifar100``, ``vtab/cifar100``, ``imagenet-a``) and the cache of the Hugging Face hub
    (``datasets--OWNER--wds_cifar10/snapshots/REVISION``) write it, or without prefix. The corrupted copies of
    ``imagenet_c`` lie in the folder ``corrupted`` of ``imagenet1k``.

    Returns:
        The folder of each set that was found, in the order of the suite, and other folders.
    """
    by_name: dict[str, list[str]] = {}
    for directory in _directories(folder):
        by_name.setdefault(set_name(directory), []).append(directory)
    found = {}
    for name in suite.sets:
        if name == _COPIES:
            clean = found.get("imagenet1k")
            if clean is not None and matching(f"{glob.escape(clean)}/corrupted/*/*/*.tar"):
                found[name] = clean
        elif places := by_name.pop(name, []):
            if len(places) > 1:
                raise UserError(f"the set {name} lies in {' and in '.join(places)}; leave one of them below {folder}")
            found[name] = places[0]
    return found, tuple(place for places in by_name.values() for place in places)


def _directories(folder: str) -> list[str]:
    start = glob.escape(folder.rstrip("/"))
    found: set[str] = set()
    for depth in range(1, _DEPTH + 1):
        below = start + "/*" * depth
        found |= set(map(urls.parent, matching(f"{below}/{CLASS_NAMES_FILE}")))
        found |= {urls.parent(urls.parent(shard)) for shard in matching(f"{below}/test/*.tar")}
    # Class names beside shards, and corrupted copies, belong to the set above.
    return sorted(one for one in found if not _is_inside(one, found - {one}))


def _is_inside(directory: str, others: Iterable[str]) -> bool:
    return any(directory.startswith(f"{other}/") for other in others)


def set_name(directory: str) -> str:
    """Returns the name of a set by its folder: of clip_benchmark's forms ``wds_vtab-cifar100`` is ``cifar100``."""
    parts = directory.rstrip("/").split("/")
    is_revision = len(parts) > 2 and parts[-2] == "snapshots"
    name = parts[-3].rpartition("--")[2] if is_revision else parts[-1]
    name = name.lower().replace("-", "_").removeprefix("wds_").removeprefix("vtab_")
    return _ALIASES.get(name, name)


def check_complete(data: ImageSet) -> None:
    """Checks that a split has as many shards as clip_benchmark's ``nshards.txt`` says, if there is one."""
    address = f"{data.shards}/{NUM_SHARDS_FILE}"
    if not storage.exists(address):
        return
    (line, *_) = storage.read_lines(address)
    found = len(expand(data.shards))
    if line != str(found):
        raise UserError(f"{address} says {line[:20]!r} shards, and there are {found}; download the set again")
