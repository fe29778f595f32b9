"""The arguments of ``lit-het data prepare imagenet21k`` that other kinds lack."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_het.data_pipelines.prepare.dataset import DataSet

TEXTS = (
    "ImageNet-21k, the release of fall 2011 or winter 2021, or ImageNet-21K-P",
    "fall11_whole.tar, a folder with n00004475.tar and so on, or the gunzipped imagenet21k_resized.tar",
)
"""What it is, and its SOURCE."""

FLAGS: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "--classes",
        {
            "type": Path,
            "metavar": "FILE",
            "help": "WNIDs in the order of the labels, one per line, such as timm's imagenet21k_goog_synsets.txt; "
            "default: sorted, for the release of fall 2011 with the two of 21,843 that have no images",
        },
    ),
    (
        "--words",
        {
            "type": Path,
            "metavar": "FILE",
            "help": "names of classes, a WNID, a tab and words on each line, such as words.txt; default: WNIDs",
        },
    ),
    (
        "--test-images",
        {
            "type": int,
            "default": 102_400,
            "metavar": "N",
            "help": "images of the test split, chosen by a hash of their names, where SOURCE has no splits; "
            "default: %(default)s",
        },
    ),
)


def read(options: argparse.Namespace) -> "DataSet":
    """Opens the data set; raises as its reader."""
    from lit_het.data_pipelines.prepare.imagenet21k import read_imagenet21k

    fields = ("classes", "words", "test_images", "skip_broken")
    return read_imagenet21k(options.source, options.split, **{name: getattr(options, name) for name in fields})
