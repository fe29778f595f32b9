"""A contiguous part of a data set, such as the last 2 % of a training set for validation."""

import bisect
import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from fractions import Fraction

from lit_het.data_pipelines.storage import canonical
from lit_het.errors import FieldError


@dataclasses.dataclass(frozen=True)
class Portion:
    """Consecutive samples, in shard order; ``parse`` is the inverse of ``str``.

    Adjacent portions (``:98%`` and ``98%:``) are disjoint and cover all samples, on any number of hosts. Percentages
    count only the samples that the index holds.

    Attributes:
        start, end: percent of the samples.

    Raises:
        UserError: percentages out of order, or not from 0 to 100.
    """

    start: int | float = 0
    end: int | float = 100

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end <= 100:
            raise FieldError(self, "start", f"{self.start} and end = {self.end} must be from 0 to 100 and in order")

    @staticmethod
    def parse(text: str) -> "Portion":
        """Returns the portion of a text such as "98%:" or "10%:20%".

        Raises:
            ValueError: the text is not a portion.
        """
        match = re.fullmatch(r"(?:([0-9.]+)%)?:(?:([0-9.]+)%)?", text.replace(" ", ""))
        if match is None:
            raise ValueError(
                f"{text!r} is not a portion; write a start and an end in percent, such as ':98%' or '98%:100%'"
            )
        start, end = (
            default if part is None else float(part) if "." in part else int(part)
            for part, default in zip(match.groups(), (0, 100), strict=True)
        )
        return Portion(start, end)

    def __str__(self) -> str:
        return f"{self.start}%:{self.end}%"

    def overlaps(self, other: "Portion") -> bool:
        """Returns whether two portions of the same samples have any in common."""
        return max(self.start, other.start) < min(self.end, other.end)

    def sample_range(self, num_samples: int) -> range:
        """Returns the indices of its samples in a data set of ``num_samples``."""
        # Exact decimal arithmetic: as a float, 0.7 % of 1,000 samples would be fewer than 7.
        start, end = (math.floor(Fraction(str(part)) * num_samples / 100) for part in (self.start, self.end))
        return range(start, end)

    def counts_per_shard(self, counts: Sequence[int]) -> list[int]:
        """Returns how many samples of each shard belong to the portion."""
        chosen = self.sample_range(sum(counts))
        ends = itertools.accumulate(counts)
        return [
            max(0, min(end, chosen.stop) - max(end - count, chosen.start))
            for end, count in zip(ends, counts, strict=True)
        ]


ALL = Portion()


def without(samples: range, left_out: Sequence[int]) -> list[range]:
    """Returns the ranges of the samples between those that are left out, which are in ascending order."""
    ends = [*(sample for sample in left_out if sample in samples), samples.stop]
    starts = [samples.start, *(end + 1 for end in ends[:-1])]
    return [range(start, end) for start, end in zip(starts, ends, strict=True) if start < end]


class ConcatenatedRanges(Sequence[int]):
    """Several ranges of integers, one after the other, without storing the integers."""

    def __init__(self, ranges: Sequence[range]):
        self._ranges = tuple(ranges)
        self._ends = list(itertools.accumulate(map(len, self._ranges)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, place: int) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= place < len(self):
            raise IndexError(place)
        number = bisect.bisect_right(self._ends, place)
        return self._ranges[number][place - self._ends[number]]

    def common_with(self, numbers: range) -> range:
        """Returns those of consecutive numbers that are in one of the ranges: in the first that has any of them."""
        for own in self._ranges:
            common = range(max(own.start, numbers.start), min(own.stop, numbers.stop))
            if common:
                return common
        return range(0)


def common_shards(shards: Sequence[str], portion: Portion, others: Sequence[str], other_portion: Portion) -> list[str]:
    """Returns the shards, however their paths are written, of which two portions may have samples in common."""
    files, other_files = ({*map(canonical, some)} for some in (shards, others))
    # Portions of different lists of shards are of different samples, and may have some in common.
    apart = files == other_files and not portion.overlaps(other_portion)
    return [] if apart else sorted(files & other_files)
