"""Which shards to read and how: the configuration of a `Loader`, or of a `Stream`.

It stands apart from both, so that a configuration is read and checked without the packages that read data.
"""

import dataclasses
import math
from pathlib import Path

from lit_het.data_pipelines.images.augment import HorizontalFlip
from lit_het.data_pipelines.images.transforms import Augmentation, InceptionCrop, Preprocessing, RandomCrop, Training
from lit_het.data_pipelines.labels_config import LabelsConfig
from lit_het.data_pipelines.shards.portions import ALL, Portion
from lit_het.data_pipelines.shards.suspects_config import Suspects
from lit_het.data_pipelines.texts.captions_config import QUESTION, CaptionUnit, Language, TextPlace
from lit_het.errors import UserError, require_at_least, require_choice

STORED = ("embeddings", "text_embeddings", "teacher_embeddings", "teacher_text_embeddings", "teacher_logits")
"""The fields of a `LoaderConfig` that name folders of stored embeddings."""


@dataclasses.dataclass(frozen=True)
class WeightedShards:
    """A data set that is mixed into another.

    Attributes:
        shards: as those of a `LoaderConfig`.
        weight: samples of this set for each one of the `LoaderConfig`'s own shards.
        portion: of its samples.
        captions, prompt: as those of a `LoaderConfig`; None takes its own.
        held_out: whether its samples are the rows of every batch that ``task.temperature_gradient`` holds out.
    """

    shards: tuple[str, ...]
    weight: float = 1.0
    portion: Portion = ALL
    captions: str | None = None
    prompt: str | None = None
    held_out: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.weight < math.inf:
            raise UserError(
                f"WeightedShards: weight = {self.weight} must be more than 0 and finite; leave the data set out instead"
            )


@dataclasses.dataclass(frozen=True)
class Streaming:
    """How a `Stream` reads shards that cannot seek.

    Attributes:
        shuffle_buffer: size of the shuffle buffer of a host, in undecoded samples over all threads.
    """

    shuffle_buffer: int = 10_000

    def __post_init__(self) -> None:
        require_at_least(1, self, "shuffle_buffer")


LATER_FIELDS = {"masks": False}
"""Fields that loaders gained after runs had been trained, with the value that changes nothing."""


@dataclasses.dataclass(frozen=True)
class LoaderConfig:
    """Which shards to read and how.

    Attributes:
        shards: tar files, brace patterns, globs, folders or lists of these, local or at addresses of fsspec.
        image_size: pixels along each side of squares, and of the tower's grid of positions.
        batch_size: samples over all hosts.
        labels: how to read labels; None reads none.
        portion: of the samples of ``shards``, to hold out a part of a training set for validation.
        suspects: samples of ``shards`` that training leaves out or weights less, by a table of ``lit-het data score``.
        exclude: tables (.csv or .parquet) of samples that training leaves out, by their columns ``shard`` and ``key``,
            such as those of ``lit-het data dedup``; of ``shards`` and the mixture, and of a stream too.
        mixture: further data sets, each in a fixed proportion to ``shards`` and with its own order.
        captions: the member with the captions; ``json/caption`` is the field ``caption`` of a JSON object. A decoder
            also reads the questions and answers that ``lit-het data prepare vqa`` writes, ``json/questions``. Of
            several places, as ``json/caption=0.7,json/alt_text=0.3``, training draws one of those that a sample has, by
            weight. ``cls/data/imagenet:clip80`` are names of classes in templates, see `classes_of`.
        caption_unit: "line" takes each line of a text, or each text of a JSON list, for a caption, of which training
            draws one by position and evaluation takes the first; "text" takes the whole text for one.
        language: of the captions, to read some languages only or to put tags before captions; None for neither.
        prompt: what a decoder is given before a caption or an answer, whose question is ``{question}`` in it; may be
            empty. None for texts of a text tower.
        source: the member with the text that a decoder translates, named as ``captions``, one for each sample; it is
            read in place of images.
        preprocessing: of evaluation images.
        crop: the random crop of training images; None uses the evaluation preprocessing.
        augmentations: of training images, in order; not applied in evaluation.
        seed: of order, crops and augmentations.
        shuffle: whether to shuffle each training epoch.
        window: number of shards that are shuffled together, for stores with slow random access; None shuffles all.
        threads: that read and decode batches ahead; 0 makes each batch on demand.
        prefetch_batches: number of batches prepared ahead.
        max_bad_fraction: fraction of the samples that may be broken or missing before the run stops.
        embeddings: a folder that ``lit-het embed`` wrote for these shards, read in place of images.
        text_embeddings: a folder that ``lit-het embed --texts`` wrote, for a locked text tower.
        teacher_embeddings, teacher_text_embeddings, teacher_logits: folders that ``lit-het embed`` wrote for these
            shards with another model, from which ``task.teacher`` learns; they are read beside images and captions.
        slow_read_seconds: after which a pending read is reported, and again at growing intervals.
        stuck_read_seconds: after which a pending read ends the process, so that a scheduler restarts it.
        stream: reads shards that cannot seek sequentially, as a `Stream`; None has random access, as a `Loader`.
        masks: whether to read masks of panoptic segmentation, see `lit_het.data_pipelines.masks`.
    """

    shards: tuple[str, ...]
    image_size: int = 32
    batch_size: int = 256
    labels: LabelsConfig | None = None
    portion: Portion = ALL
    suspects: Suspects | None = None
    exclude: tuple[Path, ...] = ()
    mixture: tuple[WeightedShards, ...] = ()
    captions: str = "txt"
    caption_unit: CaptionUnit = "line"
    language: Language | None = None
    prompt: str | None = None
    source: str | None = None
    preprocessing: Preprocessing = Preprocessing()
    crop: InceptionCrop | RandomCrop | None = None
    augmentations: tuple[Augmentation, ...] = ()
    seed: int = 0
    shuffle: bool = True
    window: int | None = None
    threads: int = 2
    prefetch_batches: int = 4
    max_bad_fraction: float = 0.0
    embeddings: str | None = None
    text_embeddings: str | None = None
    teacher_embeddings: str | None = None
    teacher_text_embeddings: str | None = None
    teacher_logits: str | None = None
    stream: Streaming | None = None
    slow_read_seconds: float = 60.0
    stuck_read_seconds: float = 1800.0
    masks: bool = False

    def __post_init__(self) -> None:
        require_at_least(0, self, "seed", "threads")
        require_choice(self, "caption_unit")
        require_at_least(1, self, "image_size", "batch_size", "prefetch_batches")
        if not 0 <= self.max_bad_fraction <= 1:
            raise UserError(f"LoaderConfig: max_bad_fraction = {self.max_bad_fraction} must be from 0 to 1")
        if not 0 < self.slow_read_seconds <= self.stuck_read_seconds:
            raise UserError(
                f"LoaderConfig: slow_read_seconds = {self.slow_read_seconds} must be more than 0 and at most "
                f"stuck_read_seconds = {self.stuck_read_seconds}"
            )
        if self.window is not None:
            require_at_least(1, self, "window")
        if self.prompt is None and any(one.prompt is not None for one in self.mixture):
            raise UserError("LoaderConfig: a data set of the mixture has a `prompt`; give the others one, '' for none")
        for text in self.texts:
            if text.prompt is not None and (QUESTION in text.prompt) != text.has_questions:
                raise UserError(
                    f"LoaderConfig: the prompt {text.prompt!r} does not fit captions = {text.place!r}: questions "
                    "(json/questions) need '{question}' in their prompt, and captions have none"
                )
        for field in ("text_embeddings", "teacher_text_embeddings"):
            if getattr(self, field) is not None and any(one.captions is not None for one in self.mixture):
                raise UserError(f"LoaderConfig: {field} are of one kind of `captions`; leave them out of the mixture")
        if self.source is not None and any(getattr(self, field) for field in STORED):
            raise UserError("LoaderConfig: `source` is read in place of images; leave out the embeddings")
        if self.masks:
            self._check_masks()
        if len(self._held_out) > 1:
            raise UserError("LoaderConfig: only one data set of the mixture can be held_out; list its shards in one")
        if self.stream is not None:
            for field in ("portion", "suspects", "mixture", "shuffle", "window", *STORED):
                if getattr(self, field) != getattr(LoaderConfig, field):
                    raise UserError(f"LoaderConfig: a `stream` has no `{field}`; leave out one of them")
            if self.language is not None and self.language.only:
                raise UserError("LoaderConfig: a `stream` reads all languages; leave out `language.only`")

    def _check_masks(self) -> None:
        for field, has in (("source", self.source), ("embeddings", self.embeddings)):
            if has is not None:
                raise UserError(f"LoaderConfig: masks are of pixels, which `{field}` replaces; leave out one of them")
        if self.preprocessing.patches is not None:
            raise UserError("LoaderConfig: masks are of squares; leave out `masks` or preprocessing.patches")
        for augmentation in self.augmentations:
            if not isinstance(augmentation, HorizontalFlip):
                raise UserError(
                    f"LoaderConfig: {type(augmentation).__name__} would move pixels of images, and not their masks; "
                    "leave it out of `augmentations`, or leave out `masks`"
                )

    @property
    def training(self) -> Training:
        """The preprocessing of training images."""
        return Training(self.preprocessing, self.crop, self.augmentations)

    def without_embeddings(self) -> "LoaderConfig":
        """Returns the configuration that reads images and captions alone."""
        return dataclasses.replace(self, **dict.fromkeys(STORED))

    @property
    def _held_out(self) -> list[WeightedShards]:
        return [one for one in self.mixture if one.held_out]

    @property
    def held_out_share(self) -> float | None:
        """The share of the samples that are from the data set that is held out; None if there is none."""
        weights = [one.weight for one in self._held_out]
        return weights[0] / (1 + sum(one.weight for one in self.mixture)) if weights else None

    @property
    def texts(self) -> list[TextPlace]:
        """Where the texts of each data set are, that of ``shards`` first."""
        own = TextPlace(self.captions, self.caption_unit, self.prompt, self.language)
        found = [own]
        for one in self.mixture:
            place, prompt = one.captions or own.place, own.prompt if one.prompt is None else one.prompt
            found.append(TextPlace(place, own.unit, prompt, own.language))
        return found

    @property
    def prompts(self) -> list[str]:
        """What a decoder is given before the texts of each data set; empty where there is nothing."""
        return [place.prompt or "" for place in self.texts]

    def data_sets(self, *, allow_commands: bool = False) -> list[list[str]]:
        """Returns the tar files of each data set, that of ``shards`` first.

        Args:
            allow_commands: see ``expand``.
        """
        from lit_het.data_pipelines.shards.writing import expand

        data_sets = (self.shards, *(data_set.shards for data_set in self.mixture))
        return [expand(shards, allow_commands=allow_commands) for shards in data_sets]
