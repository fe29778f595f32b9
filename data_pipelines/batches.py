"""From the members of samples to the rows of a batch; a sample with something wrong leaves an invalid row."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from lit_het.data_pipelines import storage
from lit_het.data_pipelines.augment import StreamRandom
from lit_het.data_pipelines.faults import FaultLog
from lit_het.data_pipelines.images import BrokenImage
from lit_het.data_pipelines.labels import Labels, text_of
from lit_het.data_pipelines.shards import IMAGE
from lit_het.data_pipelines.storage import Unreadable, readable
from lit_het.data_pipelines.transforms import Training
from lit_het.errors import UserError
from lit_het.types import Batch
from lit_het.untrusted import parse_json

Tokenizer = Callable[[list[str]], np.ndarray]


def rows_per_process(batch_size: int, process_count: int) -> int:
    """Returns how many rows of a batch each host makes.

    Raises:
        UserError: the batch cannot be divided among the hosts.
    """
    if batch_size < 1 or batch_size % process_count:
        raise UserError(
            f"a batch of {batch_size} cannot be divided among {process_count} processes;"
            " set --data.batch-size to a multiple of them"
        )
    return batch_size // process_count


@dataclasses.dataclass(frozen=True)
class RawSample:
    """A sample as it lies in a shard.

    Attributes:
        shard: the address of the tar file.
        key: within the shard.
        members: by kind, their bytes or why they cannot be read.
    """

    shard: str
    key: str
    members: Mapping[str, bytes | Unreadable]


@runtime_checkable
class Views(Protocol):
    """What an image tower is given of a sample: pixels, or what it once made of them.

    Attributes:
        member: the kind that is read.
        field: of a `Batch`, that it goes to.
    """

    member: str
    field: str

    def zeros(self, count: int) -> np.ndarray:
        """Rows of samples without any."""
        ...

    def read(self, content: bytes, generator: np.random.Generator | None) -> np.ndarray:
        """One row; all that is random in training comes from the generator, which evaluation has none of.

        Raises:
            BrokenImage, Unreadable: there is something wrong with the content.
        """
        ...


class Images:
    """Pixels ``[b size size 3]`` uint8."""

    member, field = IMAGE, "image"

    def __init__(self, training: Training, size: int):
        self._training, self._size = training, size

    def zeros(self, count: int) -> np.ndarray:
        """Black images."""
        return np.zeros((count, self._size, self._size, 3), np.uint8)

    def read(self, content: bytes, generator: np.random.Generator | None) -> np.ndarray:
        """Decodes an image, and in training changes it."""
        if generator is None:
            return self._training.preprocessing.apply(content, self._size)
        return self._training.apply(content, self._size, generator)


class Captions:
    """Token ids ``[b l]``.

    Args:
        place: the member that holds captions; ``json/caption`` is the field ``caption`` of a JSON object.
        tokenizer: captions to ids.
    """

    def __init__(self, place: str, tokenizer: Tokenizer):
        self.member, _, self._field = place.partition("/")
        self._tokenizer = tokenizer

    def read(self, content: bytes) -> str:
        """Returns the caption in a member, which is never empty.

        Raises:
            Unreadable: there is none.
        """
        text = text_of(content)
        caption: Any = text
        if self._field:
            try:
                caption = parse_json(text)[self._field]
                if isinstance(caption, str):
                    caption.encode()  # JSON may hold half of a surrogate pair, which tokenizers cannot take
            except (ValueError, KeyError, TypeError) as error:
                place = f".{self.member}/{self._field}"
                raise Unreadable(
                    f"no caption in {place}", f"{type(error).__name__}: {storage.reason(error)}"
                ) from error
        if not isinstance(caption, str):
            raise Unreadable("empty caption", f"it is no text, but of the type {type(caption).__name__}")
        if not caption.strip():
            raise Unreadable("empty caption", repr(caption[:100]))
        return caption

    def tokenize(self, captions: list[str], valid: np.ndarray) -> np.ndarray:
        """Returns token ids, zeros in invalid rows."""
        text = self._tokenizer(captions)
        text[~valid] = 0
        return text


class BatchMaker:
    """Makes batches of samples from wherever; safe to share between threads.

    Args:
        views: for the image tower.
        captions: for the text tower, or None.
        labels: or None.
        seed: of all that is random in training.
        faults: where broken samples are counted.

    Attributes:
        members: the kinds that are read of a sample.
        num_classes: of the labels; None without labels.
    """

    def __init__(self, views: Views, captions: Captions | None, labels: Labels | None, seed: int, faults: FaultLog):
        self._views, self._captions, self._labels = views, captions, labels
        self._seed, self._faults = seed, faults
        self.num_classes = labels.num_classes if labels else None
        texts = [part.member for part in (captions, labels) if part is not None]
        self.members = tuple(dict.fromkeys([views.member, *texts]))

    def make(
        self, samples: Sequence[RawSample | None], positions: Sequence[int] | None, num_samples: int | None
    ) -> Batch:
        """Returns one row for each sample.

        Args:
            samples: with their members; None for rows that only fill the batch.
            positions: in the stream, that all randomness of training depends on; None for evaluation.
            num_samples: in one epoch, as for `FaultLog.mask`.

        Raises:
            UserError: more samples are broken than may be.
        """
        count = len(samples)
        rows, valid, captions = self._views.zeros(count), np.zeros(count, bool), [""] * count
        label = self._labels.zeros(count) if self._labels else None
        random = StreamRandom(self._seed)
        self._faults.note_read(count)
        for row, sample in enumerate(samples):
            if sample is None:
                continue
            try:
                members = {member: readable(sample.members[member]) for member in self.members}
                generator = None if positions is None else random.at(positions[row])
                view = self._views.read(members[self._views.member], generator)
                if self._captions:
                    captions[row] = self._captions.read(members[self._captions.member])
                if label is not None and self._labels:
                    label[row] = self._labels.encode(members[self._labels.member])
            except (BrokenImage, Unreadable) as error:
                self._faults.mask(sample.shard, sample.key, error.cause, str(error), num_samples)
                continue
            rows[row], valid[row] = view, True
        text = self._captions.tokenize(captions, valid) if self._captions else None
        views: dict[str, Any] = {self._views.field: rows}
        return Batch(valid=valid, text=text, label=label, **views)
