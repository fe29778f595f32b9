"""Which samples of shards belong to a portion by a hash of their names, keys or captions."""

import contextlib
from collections.abc import Sequence

import numpy as np

from lit_het.data_pipelines.labels import text_of
from lit_het.data_pipelines.shards.index import ShardIndex
from lit_het.data_pipelines.shards.portions import Marked, Portion
from lit_het.data_pipelines.shards.storage import Unreadable, content_or_raise
from lit_het.data_pipelines.texts.captions import captions_in
from lit_het.data_pipelines.texts.captions_config import TextPlace

_CAPTIONS_PER_READ = 1024


def marked(
    portion: Portion, index: ShardIndex, shards: range, place: TextPlace, left_out: Sequence[int]
) -> list[Marked]:
    """Returns the samples of each shard that are in a portion by a hash.

    Args:
        portion: of the samples of these shards.
        index: of all shards.
        shards: their numbers, which are consecutive.
        place: of their captions, which are read if the portion goes by them.
        left_out: samples to leave out, in ascending order.
    """
    parts, start = list[Marked](), sum(index.counts[: shards.start])
    for shard in shards:
        identities = index.keys(shard)
        if portion.by == "sample":
            name = index.names[shard]
            identities = [b"%s %s" % (name, key) for key in identities]
        elif portion.by == "caption":
            identities = _captions(index, range(start, start + len(identities)), place, identities)
        marks = portion.marks(identities)
        first, end = np.searchsorted(left_out, [start, start + len(marks)])
        marks[np.asarray(left_out[first:end], int) - start] = False
        parts.append(Marked(start, marks))
        start += len(marks)
    return parts


def _captions(index: ShardIndex, samples: range, place: TextPlace, keys: Sequence[bytes]) -> list[bytes]:
    """Returns the first caption of each sample of a shard, or its key where no caption can be read."""
    found = list(keys)
    for start in range(0, len(samples), _CAPTIONS_PER_READ):
        block = samples[start : start + _CAPTIONS_PER_READ]
        for number, (content,) in enumerate(index.read(block, [place.member]), start):
            with contextlib.suppress(Unreadable):
                text = text_of(content_or_raise(content))
                found[number] = captions_in(text, place.place, place.unit)[0].encode()
    return found
