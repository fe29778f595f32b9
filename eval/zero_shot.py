"""Zero-shot classification: images are scored against the text embeddings of class names.

The steps are separate and pure, so that embeddings serve several questions: `embed_images` and `embed_names`
run the model once, `eval.ranking` ranks the names for each image and sums up. `ZeroShotClassification` joins
them into an evaluator.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
from jaxtyping import Float, Int

from data_pipelines.labels import ClassIndex
from data_pipelines.loader import LoaderConfig
from data_pipelines.storage import read_lines
from data_pipelines.transforms import Preprocessing
from eval.calibration import check_labels
from eval.prompts import (
    BARE_TEMPLATE,
    CLASS_NAMES_FILE,
    TEMPLATES_FILE,
    check_templates,
    fill_template,
    read_classnames,
    read_templates,
)
from eval.ranking import EmbeddedImages, ZeroShotResult, join, metrics, score
from lit_het.errors import UserError, require_at_least
from lit_het.types import Batch, Encoder

# Called with the number of images or captions that were just finished.
Advance: TypeAlias = Callable[[int], object]
Batches: TypeAlias = Callable[[], Iterable[Batch]]


def _ignore(count: int) -> None:
    del count


def embed_names(
    encoder: Encoder,
    names: Sequence[str],
    templates: Sequence[str] = BARE_TEMPLATE,
    batch_size: int = 256,
    advance: Advance = _ignore,
) -> Float[np.ndarray, "k d"]:
    """Unit embedding of each class name: the mean over its prompts, renormalised (CLIP Sec. 3.1.4).

    Every call of the encoder has the same shape ``[batch_size l]``, so that nothing is compiled twice;
    ``advance`` is called with the captions done, ``len(names) * len(templates)`` in all.

    Raises:
        UserError: no names, or a template without ``{c}``.
    """
    if not names:
        raise UserError("no class names to choose from: give at least one")
    check_templates(templates)
    captions = [fill_template(template, name) for name in names for template in templates]
    owners = np.repeat(np.arange(len(names)), len(templates))
    sums: np.ndarray | None = None
    for start in range(0, len(captions), batch_size):
        chunk = captions[start : start + batch_size]
        padded = chunk + chunk[-1:] * (batch_size - len(chunk))
        embeddings = np.asarray(encoder.text(encoder.tokenize(padded)))[: len(chunk)]
        if sums is None:
            sums = np.zeros((len(names), embeddings.shape[1]), np.float32)
        np.add.at(sums, owners[start : start + batch_size], embeddings)
        advance(len(chunk))
    assert sums is not None
    norms = np.linalg.norm(sums, axis=1, keepdims=True)
    return sums / np.maximum(norms, np.finfo(np.float32).tiny)


def embed_images(encoder: Encoder, batches: Iterable[Batch], advance: Advance = _ignore) -> EmbeddedImages:
    """Unit embeddings and labels of the valid rows of all batches; rows that pad are left out.

    ``advance`` is called with the valid images done.

    Raises:
        UserError: a batch without images or without class indices, or no valid image at all.
    """
    parts = list(_embed_batches(encoder, batches, advance, num_samples=0))
    return EmbeddedImages(
        np.concatenate([part.embeddings for part in parts]), np.concatenate([part.labels for part in parts])
    )


def _embed_batches(
    encoder: Encoder, batches: Iterable[Batch], advance: Advance, num_samples: int
) -> Iterator[EmbeddedImages]:
    """Embeds batch by batch, with noise samples that are the same in every pass; raises as `embed_images`."""
    found = False
    for number, batch in enumerate(batches):
        if batch.view is None:
            raise UserError("zero-shot: a batch holds neither images nor stored embeddings; evaluate on image shards")
        if batch.label is None or np.ndim(batch.label) != 1:
            raise UserError("zero-shot: a batch holds no class indices; the shards need one .cls label an image")
        image, valid = np.asarray(batch.view), np.asarray(batch.valid)
        if not valid.any():
            continue
        found = True
        # Rows are dropped after the encoder, whose input keeps one static shape.
        samples = encoder.image_samples(image, num_samples, number)[valid] if num_samples else None
        yield EmbeddedImages(np.asarray(encoder.image(image))[valid], np.asarray(batch.label)[valid], samples)
        advance(int(valid.sum()))
    if not found:
        raise UserError("zero-shot: the set holds no valid image; check its path and its shards")


def positions_of_names(
    labels: Int[np.ndarray, " n"], label_names: Sequence[str], class_names: Sequence[str]
) -> Int[np.ndarray, " n"]:
    """Labels that index ``label_names`` as indices into ``class_names``, matched by the string.

    Raises:
        UserError: a label outside ``label_names``, or whose name is missing from ``class_names`` or
            stands there twice.
    """
    check_labels(labels, len(label_names))
    position = {name: index for index, name in enumerate(class_names)}
    repeated = {name for index, name in enumerate(class_names) if position[name] != index}
    table = np.full(len(label_names), -1)
    for label in map(int, np.unique(labels)):
        name = label_names[label]
        if name not in position:
            raise UserError(f"class {name!r} has images but is not among the {len(class_names)} candidate names")
        if name in repeated:
            raise UserError(f"class {name!r} stands twice among the candidate names; keep one")
        table[label] = position[name]
    return table[labels]


def classify(
    encoder: Encoder,
    batches: Iterable[Batch],
    class_names: Sequence[str],
    *,
    templates: Sequence[str] = BARE_TEMPLATE,
    label_names: Sequence[str] | None = None,
    name_batch_size: int = 256,
    block_size: int = 256,
    num_samples: int = 0,
    advance: Advance = _ignore,
) -> ZeroShotResult:
    """Embed images and names, and rank the names for each image.

    Args:
        encoder: the model.
        batches: NumPy batches with images and labels; rows with ``valid = False`` are left out.
        class_names: the names to choose from.
        templates: prompts with the placeholder ``{c}``.
        label_names: the names that labels index; None means ``class_names``.
        name_batch_size: captions that the text tower takes at a time.
        block_size: images, or noise samples of images, that are scored at a time.
        num_samples: S, noise samples of each image to average probabilities over; 0 leaves the noise out.
        advance: called with the captions, then the images, that were just finished.

    Raises:
        UserError: names, templates, labels or embeddings that cannot be scored.
    """
    class_embeddings = embed_names(encoder, class_names, templates, name_batch_size, advance)
    # Scored batch by batch: noise samples of all images at once would be S times as large as their embeddings.
    results = []
    for images in _embed_batches(encoder, batches, advance, num_samples):
        if label_names is not None:
            images = dataclasses.replace(images, labels=positions_of_names(images.labels, label_names, class_names))
        results.append(score(images, class_embeddings, encoder.temperature, block_size))
    return join(results)


@dataclasses.dataclass(frozen=True)
class ZeroShotClassification:
    """An evaluator (`lit_het.types.Evaluator`) that reports ``zero_shot/<name>/top1`` and its companions.

    Attributes:
        name: the set, as it stands in metric names.
        batches: starts one ordered pass over the images.
        class_names, templates, label_names, name_batch_size, num_samples, advance: as in `classify`.
        num_images: images of one pass, for a progress bar; 0 if unknown.
    """

    name: str
    batches: Batches
    class_names: tuple[str, ...]
    templates: tuple[str, ...] = BARE_TEMPLATE
    label_names: tuple[str, ...] | None = None
    name_batch_size: int = 256
    num_images: int = 0
    num_samples: int = 0
    advance: Advance = _ignore

    @property
    def num_embeddings(self) -> int:
        """How often ``advance`` counts in one pass: captions and images."""
        return len(self.class_names) * len(self.templates) + self.num_images

    def classify(self, encoder: Encoder) -> ZeroShotResult:
        """Rank the names for each image of one pass."""
        return classify(
            encoder,
            self.batches(),
            self.class_names,
            templates=self.templates,
            label_names=self.label_names,
            name_batch_size=self.name_batch_size,
            num_samples=self.num_samples,
            advance=self.advance,
        )

    def __call__(self, encoder: Encoder) -> Mapping[str, float]:
        """The figures of `metrics`, named ``zero_shot/<name>/<figure>``."""
        return {f"zero_shot/{self.name}/{name}": value for name, value in metrics(self.classify(encoder)).items()}


@dataclasses.dataclass(frozen=True)
class ZeroShotConfig:
    """Zero-shot classification on a folder in clip_benchmark's layout.

    Attributes:
        name: the set, as it stands in metric names.
        directory: holds ``classnames.txt``, which labels index.
        split: the folder of shards below it.
        templates: prompts with the placeholder ``{c}``; None reads the folder's own, or where it has none takes the
            bare names.
        candidates: a file of names to choose from, one a line; None means the folder's class names.
        batch_size: images and captions that the towers take at a time.
        num_samples: S, noise samples of each image to average probabilities over; 0 leaves the noise out, as the paper
            does (HET-XL App. M).
        embeddings: a folder that ``lit-het embed`` wrote for these shards, to be read in place of pictures.

    Raises:
        UserError: a batch without rows, or a negative number of samples.
    """

    name: str
    directory: Path
    split: str = "test"
    templates: tuple[str, ...] | None = None
    candidates: Path | None = None
    batch_size: int = 256
    num_samples: int = 0
    embeddings: str | None = None

    def __post_init__(self) -> None:
        require_at_least(1, self, "batch_size")
        require_at_least(0, self, "num_samples")

    def build(
        self, image_size: int, preprocessing: Preprocessing | None = None, tower: str = ""
    ) -> ZeroShotClassification:
        """Index the shards, and join them with the names and the templates.

        Args:
            image_size: pixels along each side.
            preprocessing: that of the model's training; None for the default.
            tower: fingerprint of the model's image tower, which stored embeddings must be of.

        Raises:
            UserError: a file that is missing or malformed, a template without ``{c}``, or embeddings of another tower.
        """
        data = LoaderConfig(
            shards=(str(self.directory / self.split),),
            image_size=image_size,
            batch_size=self.batch_size,
            labels=ClassIndex(self.directory / CLASS_NAMES_FILE),
            preprocessing=preprocessing or Preprocessing(),
            embeddings=self.embeddings,
        )
        loader = data.build()
        if loader.stored is not None:
            loader.stored.check_tower(tower)
        return dataclasses.replace(self.over(loader.epoch), num_images=loader.num_samples)

    def over(self, batches: Batches) -> ZeroShotClassification:
        """Join the names and the templates with images from elsewhere; raises as `build` does."""
        label_names = read_classnames(self.directory)
        templates = self.templates
        if templates is None:
            has_own = (self.directory / TEMPLATES_FILE).exists()
            templates = read_templates(self.directory) if has_own else BARE_TEMPLATE
        check_templates(templates, f"zero-shot set {self.name}")
        return ZeroShotClassification(
            name=self.name,
            batches=batches,
            class_names=label_names if self.candidates is None else read_lines(str(self.candidates)),
            templates=templates,
            # Without other candidates labels are used as they are: two classes may then share a name.
            label_names=None if self.candidates is None else label_names,
            name_batch_size=self.batch_size,
            num_samples=self.num_samples,
        )
