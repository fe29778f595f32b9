"""Turns the members of samples into the rows of a batch; a broken sample becomes an invalid row."""

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt32

from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.images.augment import StreamRandom
from lit_het.data_pipelines.images.decoding import BrokenImage
from lit_het.data_pipelines.images.transforms import Training
from lit_het.data_pipelines.labels import Labels, check_names_beside
from lit_het.data_pipelines.labels_config import ClassIndex, MultiHot
from lit_het.data_pipelines.masks import Masks, read_categories_beside
from lit_het.data_pipelines.shards import urls
from lit_het.data_pipelines.shards.faults import FaultLog
from lit_het.data_pipelines.shards.storage import Unreadable, content_or_raise
from lit_het.data_pipelines.shards.writing import IMAGE
from lit_het.data_pipelines.texts.captions import Captions, Sources, Text, Tokenizer
from lit_het.errors import UserError
from lit_het.types import Batch

if TYPE_CHECKING:
    from lit_het.data_pipelines.embeddings import StoredEmbeddings

# The purpose of the random numbers that draw one of several captions; 0 is that of images.
_CAPTIONS = 1


def rows_per_process(batch_size: int, process_count: int) -> int:
    """Returns how many rows of a batch each host makes."""
    if batch_size < 1 or batch_size % process_count:
        raise UserError(
            f"a batch of {batch_size} cannot be divided among {process_count} processes;"
            " set --data.batch-size to a multiple of them"
        )
    return batch_size // process_count


@dataclasses.dataclass(frozen=True)
class RawSample:
    """A sample as stored in a shard.

    Attributes:
        shard: the address of the tar file.
        key: within the shard.
        members: content by kind, or why it cannot be read.
        data_set: its number in a mixture.
    """

    shard: str
    key: str
    members: Mapping[str, bytes | Unreadable]
    data_set: int = 0


@runtime_checkable
class Input(Protocol):
    """The input of the image side: pixels, or stored embeddings of them; or of the encoder of texts to translate.

    Attributes:
        member: the kind of member that is read.
        field: the field of a `Batch` that is filled.
    """

    member: str
    field: str

    def zeros(self, count: int) -> np.ndarray:
        """Placeholder rows for invalid samples."""
        ...

    def read(self, content: bytes, generator: np.random.Generator | None) -> np.ndarray:
        """Returns one row; the generator is for training, None for evaluation.

        Raises:
            BrokenImage, Unreadable: the content is broken.
        """
        ...


class Images:
    """Pixels ``[b size size 3]`` uint8, or patches ``[b n c]`` of images of any shape."""

    member, field = IMAGE, "image"

    def __init__(self, training: Training, size: int):
        self._training, self._size = training, size

    def zeros(self, count: int) -> np.ndarray:
        """Black images."""
        return np.zeros((count, *self._training.preprocessing.shape(self._size)), np.uint8)

    def read(self, content: bytes, generator: np.random.Generator | None) -> np.ndarray:
        """Decodes an image with the training preprocessing, or without a generator with that of evaluation."""
        if generator is None:
            return self._training.preprocessing.apply(content, self._size)
        return self._training.apply(content, self._size, generator)


def input_of(config: LoaderConfig, tokenizer: Tokenizer | None) -> Input:
    """Returns what is read of a sample beside its captions: the text to translate, or the image."""
    if config.source is not None:
        return Sources(config.source, tokenizer)
    return Images(config.training, config.image_size)


class BatchMaker:
    """Makes batches from samples; safe to share between threads.

    Args:
        image_input: for the image tower, or the encoder of texts to translate.
        captions: for the text tower, or None.
        labels: or None.
        masks: of the pixels of images, or None.
        stored: embeddings that are read beside these, of the captions and of other models.
        seed: of all random draws in training.
        faults: counts broken samples.

    Attributes:
        members: the kinds of members that are read.
        shared: those of all data sets of a mixture; captions may be in another one of each.
        num_classes: of the labels, or of the masks; None without both.
    """

    def __init__(
        self,
        image_input: Input,
        captions: Captions | None,
        labels: Labels | None,
        masks: Masks | None,
        stored: "Sequence[StoredEmbeddings]",
        seed: int,
        faults: FaultLog,
    ):
        self._image_input, self._captions, self._labels, self._stored = image_input, captions, labels, stored
        self._masks = masks
        self._seed, self._faults = seed, faults
        classes = labels or masks
        self.num_classes = classes.num_classes if classes else None
        others = [part.member for part in (*stored, labels) if part is not None]
        others += masks.members if masks else ()
        self.shared = tuple(dict.fromkeys([image_input.member, *others]))
        places = captions.places if captions else ()
        self.members = tuple(dict.fromkeys([*self.shared, *(member for place in places for member in place.members)]))

    def make(
        self, samples: Sequence[RawSample | None], positions: Sequence[int] | None, num_samples: int | None
    ) -> Batch:
        """Returns one row for each sample.

        Args:
            samples: with their members; None for rows that only fill the batch.
            positions: in the stream, which seed the random draws of training; None for evaluation.
            num_samples: per epoch, as for `FaultLog.count_masked`.
        """
        count = len(samples)
        rows, valid, texts = self._image_input.zeros(count), np.zeros(count, bool), [Text("", "")] * count
        label = self._labels.zeros(count) if self._labels else None
        masks = self._masks.zeros(count) if self._masks else None
        stored_rows = {one.field: one.zeros(count) for one in self._stored}
        # One per batch: threads make batches at the same time, and a `StreamRandom` must not be shared.
        random = StreamRandom(self._seed)
        self._faults.count_read(count)
        for row, sample in enumerate(samples):
            if sample is None:
                continue
            try:
                own = self._captions.places[sample.data_set].member if self._captions else None
                wanted = (*self.shared, own) if own else self.shared
                members = {member: content_or_raise(sample.members[member]) for member in wanted}
                generator = None if positions is None else random.at(positions[row])
                image = self._image_input.read(members[self._image_input.member], generator)
                one = 0
                if self._captions:
                    found = self._captions.read(sample.members, sample.data_set)
                    # By numbers of its own: the same captions are drawn with stored embeddings, which draw no crop.
                    if positions is not None and len(found) > 1:
                        one = self._captions.draw(found, random.at(positions[row], _CAPTIONS))
                    texts[row] = found[one]
                for stored in self._stored:
                    content = members[stored.member]
                    if stored.is_of_texts:
                        stored_rows[stored.field][row] = stored.view(content, one)
                    else:
                        # The numbers of images again: of as many crops the same is drawn for each model.
                        generator = None if positions is None else random.at(positions[row])
                        stored_rows[stored.field][row] = stored.read(content, generator)
                if label is not None and self._labels:
                    label[row] = self._labels.encode(members[self._labels.member])
                if masks is not None and self._masks:
                    # The numbers of images again, so that both have the same crop.
                    generator = None if positions is None else random.at(positions[row])
                    masks[row] = self._masks.read(members, generator)
            # The row stays in place and becomes invalid, so that the batch has its shape and other rows their
            # positions.
            except (BrokenImage, Unreadable) as error:
                self._faults.count_masked(sample.shard, sample.key, error.cause, str(error), num_samples)
                continue
            rows[row], valid[row] = image, True
        fields: dict[str, Any] = {self._image_input.field: rows, **stored_rows}
        if self._captions:
            of_texts = self._captions.fields(texts, valid)
            # By the shard and the key, not the image: of a stored embedding there are several crops.
            names = ("" if sample is None else f"{sample.shard} {sample.key}" for sample in samples)
            image_id = _hashes(name.encode("utf-8", "surrogateescape") for name in names)
            text_id = _hashes(map(np.ndarray.tobytes, of_texts["text"]))
            fields |= {**of_texts, "image_id": image_id, "text_id": text_id}
        return Batch(valid=valid, label=label, masks=masks, **fields)


def _hashes(contents: Iterable[bytes]) -> UInt32[np.ndarray, "n 2"]:
    """Returns hashes of 64 bits: among the 10⁹ pairs of a large batch, different contents are never equal."""
    # Two words, as JAX has no 64-bit integers by default.
    digests = (hashlib.blake2b(content, digest_size=8).digest() for content in contents)
    return np.frombuffer(b"".join(digests), np.uint32).reshape(-1, 2)


def batch_maker(
    config: LoaderConfig,
    image_input: Input,
    tokenizer: Tokenizer | None,
    addresses: Sequence[str],
    faults: FaultLog,
    stored: "Sequence[StoredEmbeddings]" = (),
) -> BatchMaker:
    """Returns the maker of batches of a configuration; label files are searched beside the shards' addresses."""
    captions = Captions(config.texts, tokenizer) if tokenizer else None
    labels = config.labels.build(urls.parent(addresses[0])) if config.labels else None
    if isinstance(config.labels, ClassIndex | MultiHot) and config.labels.names is None:
        check_names_beside(addresses)
    masks = Masks(read_categories_beside(addresses), config.training, config.image_size) if config.masks else None
    return BatchMaker(image_input, captions, labels, masks, stored, config.seed, faults)
