"""Copies of shards with corrupted images and the same keys, labels and captions."""

import collections
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import cv2
import numpy as np

from lit_het.data_pipelines.images.corruptions import CORRUPTIONS, corrupt
from lit_het.data_pipelines.images.decoding import BrokenImage, decode_whole, encode_jpeg
from lit_het.data_pipelines.labels import SOFT_LABELS
from lit_het.data_pipelines.prepare.dataset import Sample, Split, fingerprint
from lit_het.data_pipelines.shards import storage, urls
from lit_het.data_pipelines.shards.index import ShardIndex
from lit_het.data_pipelines.shards.storage import Unreadable, content_or_raise
from lit_het.data_pipelines.shards.writing import IMAGE
from lit_het.errors import UserError
from lit_het.files import write_atomically

_VERSION = "1"  # of the corrupted images; splits of other versions are not resumed
_MEMBERS = ("cls", SOFT_LABELS, "npy", "txt", "json")
_BESIDE_SHARDS = (
    *("classnames.txt", "zeroshot_classification_templates.txt", "dataset_type.txt"),
    *("candidates.txt", "classes.json"),
)


class CleanShards:
    """The clean set of shards.

    Args:
        addresses: tar files, as ``expand`` returns them.
        advance: called with 1 after each shard.
    """

    def __init__(self, addresses: Sequence[str], advance: Callable[[int], None] = lambda count: None):
        self._index = ShardIndex(addresses, [IMAGE], _MEMBERS, advance=advance)
        self._keys = [self._index.key(number) for number in range(len(self._index))]
        for key, count in collections.Counter(self._keys).most_common(1):
            if count > 1:
                raise UserError(
                    f"{addresses[0]}: key {key} occurs {count} times in the set; corrupt one split at a time"
                )

    def __len__(self) -> int:
        return len(self._index)

    def corrupted(self, corruption: str, severity: int, seed: int) -> Split:
        """Returns the set with one corruption and severity, as JPEGs of quality 95.

        The random draws of an image depend on (seed, key, corruption): severities differ only in strength.
        """
        if corruption not in CORRUPTIONS:
            raise UserError(f"--corruptions {corruption} is none of {', '.join(CORRUPTIONS)}")

        def read(numbers: Sequence[int]) -> Iterator[Sample]:
            for number in numbers:
                key, origin = self._keys[number], f"{self._index.shard(number)}: {self._keys[number]}"
                kinds = [kind for kind in _MEMBERS if self._index.span(number, kind)]
                try:
                    image, *members = map(content_or_raise, self._index.read([number], [IMAGE, *kinds])[0])
                    pixels = corrupt(decode_whole(image), corruption, severity, _generator(seed, key, corruption))
                except (BrokenImage, Unreadable) as error:
                    raise UserError(f"{origin}: {error}; remove it (lit-het data check lists all)") from error
                except cv2.error as error:  # of a side above 32,766 pixels
                    raise UserError(f"{origin}: OpenCV cannot corrupt it ({error.err}); cut or remove it") from error
                yield Sample(encode_jpeg(pixels), origin, dict(zip(kinds, members, strict=True)), key)

        source = fingerprint((_VERSION, self._index.digest, corruption, str(severity), str(seed)))
        return Split(len(self), read, source)


def copy_names(shard: str, output: Path) -> None:
    """Copies class names and prompts from the folder of a shard, or its parent, to a new folder."""
    output.mkdir(parents=True, exist_ok=True)
    folder = urls.parent(shard)
    for name in _BESIDE_SHARDS:
        for place in (f"{folder}/{name}", f"{urls.parent(folder)}/{name}"):
            if storage.exists(place):
                try:
                    text = storage.read_whole(place).decode("utf-8")
                except (OSError, UnicodeDecodeError) as error:
                    raise UserError(f"{place}: cannot be copied ({storage.reason(error)}); fix it") from error
                write_atomically(output / name, text)
                break


def _generator(seed: int, key: str, corruption: str) -> np.random.Generator:
    digest = hashlib.sha256(f"{seed} {corruption} {key}".encode("utf-8", "surrogateescape")).digest()
    return np.random.default_rng(int.from_bytes(digest[:16]))
