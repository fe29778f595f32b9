"""The part of ``lit-het new`` without weights of others: a small classifier, whose tower a later project can lock."""

import collections
import json
import math
from collections.abc import Mapping
from pathlib import Path

from lit_het.apps.tokenizer import read_captions
from lit_het.console import message
from lit_het.data_pipelines.labels import find_beside, words_of
from lit_het.data_pipelines.shards import storage, urls
from lit_het.data_pipelines.shards.index import ShardIndex
from lit_het.data_pipelines.shards.writing import IMAGE, expand
from lit_het.errors import UserError, pluralize

_IMAGE_SIZE = 64
# A word of fewer captions is not learned; of words so frequent the rarest are left out.
_LEAST_CAPTIONS, _MOST_WORDS = 10, 20_000
# What `lit_het.apps.new.project` puts into its configuration.
PARTS = {
    "summary": """{name}: a small classifier by {classes}, trained on {count:,} images.

Its image tower is for lit-het new PROJECT --tower {name}/run. Written by lit-het new for {devices}.""",
    "constants": "",
    "before": "",
    "task": """ClassificationConfig(
            image_tower=ViTConfig(
                image_size={image_size},
                patch_size={patch_size},
                encoder={encoder},
                pooling="attention",
                positions="sine_cosine",
            ),
            head=DeterministicConfig({bias}),
            num_classes={num_classes},
            loss={loss}(),
        )""",
    "images": "portion={portion},\n            image_size={image_size}",
    "texts": "labels={labels}",
    "fields": "",
    "rate": "1e-3",
    "held_out": "Not trained on, by this tower and a model on it",
}


def labels_member(shards: str) -> str:
    """Returns the labels' member: ``cls`` where a sample has one, or ``txt``, whose words are then the classes."""
    index = ShardIndex(expand(shards), [IMAGE], ["cls"])
    return "cls" if (index.sizes("cls") >= 0).any() else "txt"


def classifier_fields(
    partial: Path, shards: str, member: str, image_size: int | None, portions: tuple[str, str] | None
) -> Mapping[str, object]:
    """Returns the parts of the configuration that depend on the classes; writes ``words.txt`` where words are classes.

    Args:
        partial: the folder of the project.
        shards: a folder, pattern or list.
        member: as of `labels_member`.
        image_size: in pixels; None for 64.
        portions: those to train on and to hold out, as Python; None holds out nothing.
    """
    size = image_size or _IMAGE_SIZE
    training, held_out = portions or ("Portion()", None)
    fields = {"image_size": size, "patch_size": max(1, min(16, size // 4)), "portion": training}
    if member == "txt":
        words, bias = _words(shards)
        (partial / "words.txt").write_text("".join(f"{word}\n" for word in words), "utf-8")
        classes = f"{len(words):,} words of captions"
        message(f"{classes}, each of at least {_LEAST_CAPTIONS} captions, are the classes")
        return fields | {
            "classes": classes,
            "num_classes": len(words),
            "bias": f"initial_bias={bias:.1f}",
            "loss": "SigmoidCrossEntropy",
            "labels": 'CaptionWords(PROJECT / "words.txt", ignore_others=True)',
            "calibration": None,
            "evaluations": "()",
        }
    names = urls.absolute(find_beside(urls.parent(expand(shards)[0]), "classnames.txt"))
    classes = pluralize(num_classes := len(storage.read_lines(names)), "class")
    message(f"{classes} of {names}")
    place = json.dumps(urls.parent(names))
    evaluation = f'(ZeroShotConfig(ImageSet("held_out", {place}, SHARDS, {held_out})),)'
    return fields | {
        "classes": classes,
        "num_classes": num_classes,
        "bias": "",
        "loss": "SoftmaxCrossEntropy",
        "labels": "ClassIndex()",
        "calibration": held_out,
        "evaluations": evaluation if held_out else "()",
    }


def _words(shards: str) -> tuple[list[str], float]:
    """Returns the words that are classes, the most frequent first, and the logit of their mean frequency."""
    captions = read_captions([shards], ["txt"])
    frequency = collections.Counter(word for caption in captions for word in {*words_of(caption)})
    frequent = [(word, number) for word, number in frequency.most_common(_MOST_WORDS) if number >= _LEAST_CAPTIONS]
    if len(frequent) < 2:
        raise UserError(
            f"{shards}: fewer than two words occur in {_LEAST_CAPTIONS} captions, too few for classes; take more "
            "captions, or class folders (lit-het data prepare folder)"
        )
    share = sum(number for _, number in frequent) / len(frequent) / len(captions)
    return [word for word, _ in frequent], math.log(share / (1 - share)) if share < 1 else 0.0
