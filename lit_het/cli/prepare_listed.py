"""The kinds of ``lit-het data prepare`` whose images are listed by a JSON file: with captions, questions or masks."""

import argparse
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lit_het.data_pipelines.prepare.dataset import DataSet

IMAGES: tuple[str, dict[str, Any]] = (
    "--images",
    {
        "type": Path,
        "metavar": "PATH",
        "help": "folder, tar or zip archive of the images; default: beside SOURCE, or below it",
    },
)

SKIP_MISSING: tuple[str, dict[str, Any]] = (
    "--skip-missing",
    {"action": "store_true", "help": "leave out images that are missing, and say how many"},
)

MASKS: tuple[str, dict[str, Any]] = (
    "--masks",
    {"type": Path, "metavar": "PATH", "help": "folder or zip of the PNGs; default: of SOURCE's name, beside it"},
)

KINDS = {
    "captions": (
        "images with several captions each: COCO and Flickr, Karpathy's splits or COCO's own",
        "dataset_coco.json, dataset_flickr30k.json, dataset_flickr8k.json, or captions_val2017.json and the like",
    ),
    "textcaps": (
        "TextCaps, images with captions that need reading",
        "TextCaps_0.1_train.json, TextCaps_0.1_val.json or TextCaps_0.1_test.json",
    ),
    "vqa": (
        "VQAv2, questions about COCO's images with 10 answers each",
        "v2_OpenEnded_mscoco_val2014_questions.json (unzipped) beside v2_mscoco_val2014_annotations.json, the same of "
        "train2014, or the questions of test2015 or test-dev2015",
    ),
    "gqa": (
        "GQA, questions made from scene graphs",
        "val_balanced_questions.json and the like (unzipped), or the folder train_all_questions",
    ),
    "textvqa": (
        "TextVQA, questions that need reading, with 10 answers each",
        "TextVQA_0.5.1_train.json, TextVQA_0.5.1_val.json or TextVQA_0.5.1_test.json",
    ),
    "st-vqa": ("ST-VQA, questions that need reading", "train_task_3.json or test_task_3.json"),
    "ocr-vqa": ("OCR-VQA, questions about covers of books", "dataset.json"),
    "coco-panoptic": (
        "COCO's panoptic segmentation, masks of 133 classes",
        "panoptic_val2017.json or panoptic_train2017.json (unzipped) beside panoptic_val2017.zip and the like",
    ),
}
"""What each kind is, and its SOURCE."""


def flags_of(kind: str) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Returns the further arguments of a kind. Only the images of OCR-VQA must be fetched one by one from shops."""
    return (IMAGES, *{"ocr-vqa": (SKIP_MISSING,), "coco-panoptic": (MASKS,)}.get(kind, ()))


def read(options: argparse.Namespace) -> "DataSet":
    """Opens the data set of a kind; raises as its reader."""
    from lit_het.data_pipelines.prepare import captions, panoptic, questions

    readers = {
        "captions": captions.read_captions,
        "textcaps": captions.read_textcaps,
        "vqa": questions.read_vqa,
        "gqa": questions.read_gqa,
        "textvqa": questions.read_textvqa,
        "st-vqa": questions.read_stvqa,
        "ocr-vqa": functools.partial(questions.read_ocrvqa, skip_missing=getattr(options, "skip_missing", False)),
        "coco-panoptic": functools.partial(panoptic.read_coco_panoptic, masks=getattr(options, "masks", None)),
    }
    return readers[options.kind](options.source, options.output, options.split, options.images)
