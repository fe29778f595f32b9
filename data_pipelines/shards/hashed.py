"""Which samples of shards belong to a portion, by their order or a hash of their names, keys or captions."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from jaxtyping import Int

from lit_het.data_pipelines.shards.index import ShardIndex
from lit_het.data_pipelines.shards.portions import Marked, Portion, Rule
from lit_het.data_pipelines.shards.storage import Unreadable
from lit_het.data_pipelines.texts.captions import OTHER_LANGUAGE, captions_of_sample
from lit_het.data_pipelines.texts.captions_config import TextPlace

_CAPTIONS_PER_READ = 1024
_IDENTITIES: Mapping[str, tuple[str, ...]] = {"name": ("caption", "sample")}
"""What the rule of a portion goes by, where it is more than one thing."""


def marked(
    portion: Portion, index: ShardIndex, shards: range, place: TextPlace, left_out: Int[np.ndarray, " n"]
) -> list[Marked]:
    """Returns the samples of each shard that are in a portion and not left out.

    Args:
        portion: of the samples of these shards.
        index: of all shards.
        shards: their numbers, which are consecutive.
        place: of their captions, which are read if the portion goes by them.
        left_out: samples to leave out, in ascending order.
    """
    parts, start = list[Marked](), sum(index.counts[: shards.start])
    in_order = portion.sample_range(sum(index.counts[shards.start : shards.stop]))
    first_of_portion, end_of_portion = start + in_order.start, start + in_order.stop
    for shard in shards:
        samples = range(start, start + index.summaries[shard].count)
        if portion.by == "order":
            marks = np.arange(samples.start, samples.stop)
            marks = (first_of_portion <= marks) & (marks < end_of_portion)
        else:
            marks = portion.marks(*identities(portion.by, index, shard, samples, place).values())
        first, end = np.searchsorted(left_out, [start, start + len(marks)])
        marks[left_out[first:end] - start] = False
        parts.append(Marked(start, marks))
        start += len(marks)
    return parts


def identities(
    rule: Rule, index: ShardIndex, shard: int, samples: range, place: TextPlace
) -> dict[str, Sequence[bytes]]:
    """Returns what a rule by a hash goes by, of each sample of a shard: its key, name or first caption.

    Args:
        rule: of a portion.
        index: of all shards.
        shard: its number.
        samples: the numbers of its samples.
        place: of the captions; a sample without a readable one has its key in its place.
    """
    keys = index.keys(shard)
    found: dict[str, Sequence[bytes]] = {"key": keys}
    if rule in ("sample", "name"):
        found["sample"] = [b"%s %s" % (index.names[shard], key) for key in keys]
    if rule in ("caption", "name"):
        found["caption"] = _first_captions(index, samples, place, keys)
    return {one: found[one] for one in _IDENTITIES.get(rule, (rule,))}


def captions_of(
    index: ShardIndex,
    samples: Sequence[int],
    place: TextPlace,
    if_unreadable: Callable[[Unreadable], object] = lambda error: None,
) -> Iterator[list[str]]:
    """Yields the captions of each sample, without its image; none where no caption can be read."""
    for start in range(0, len(samples), _CAPTIONS_PER_READ):
        for contents in index.read(samples[start : start + _CAPTIONS_PER_READ], place.members):
            try:
                found = captions_of_sample(place, dict(zip(place.members, contents, strict=True)))
                yield [caption.text for caption in found]
            except Unreadable as error:
                if_unreadable(error)
                yield []


def of_other_languages(index: ShardIndex, num_shards: Sequence[int], places: Sequence[TextPlace]) -> list[int]:
    """Returns the samples that have captions, but none in the languages that are read; arguments are of data sets."""
    found, shard, first = list[int](), 0, 0
    for count, place in zip(num_shards, places, strict=True):
        samples = range(first, first + sum(index.counts[shard : shard + count]))
        problems = list[Unreadable]()
        for sample, _ in zip(samples, captions_of(index, samples, place, problems.append), strict=True):
            found += [sample for problem in problems if problem.cause == OTHER_LANGUAGE]
            problems.clear()
        shard, first = shard + count, samples.stop
    return found


def _first_captions(index: ShardIndex, samples: range, place: TextPlace, keys: Sequence[bytes]) -> list[bytes]:
    """Returns the first caption of each sample of a shard, or its key where no caption can be read."""
    found = captions_of(index, samples, place)
    return [texts[0].encode() if texts else key for texts, key in zip(found, keys, strict=True)]
