"""A part of a data set by position, such as the last 2 % of a training set for validation."""

import bisect
import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from fractions import Fraction

from lit_het.errors import FieldError


@dataclasses.dataclass(frozen=True)
class Portion:
    """Consecutive samples, in the order of the shards; ``parse`` reads what ``str`` writes.

    Portions that meet at a percentage share no sample and leave none out, on any number of hosts. Samples that the
    index leaves out are counted in none.

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
            ValueError: the text is none.
        """
        match = re.fullmatch(r"(?:([0-9.]+)%)?:(?:([0-9.]+)%)?", text.replace(" ", ""))
        if match is None:
            raise ValueError(f"{text!r} is no portion; write percentages from and to, such as ':98%' or '98%:100%'")
        start, end = (
            default if part is None else float(part) if "." in part else int(part)
            for part, default in zip(match.groups(), (0, 100), strict=True)
        )
        return Portion(start, end)

    def __str__(self) -> str:
        return f"{self.start}%:{self.end}%"

    def of(self, num_samples: int) -> range:
        """Returns the numbers of its samples among so many."""
        # 0.1 means a tenth, not the float beside it.
        start, end = (math.floor(Fraction(str(part)) * num_samples / 100) for part in (self.start, self.end))
        return range(start, end)

    def cut(self, counts: Sequence[int]) -> list[int]:
        """Returns how many of each shard's samples belong to it."""
        chosen = self.of(sum(counts))
        ends = itertools.accumulate(counts)
        return [
            max(0, min(end, chosen.stop) - max(end - count, chosen.start))
            for end, count in zip(ends, counts, strict=True)
        ]


ALL = Portion()


class Numbers(Sequence[int]):
    """The numbers of some ranges, one range after the other."""

    def __init__(self, ranges: Sequence[range]):
        self._ranges = tuple(ranges)
        self._ends = list(itertools.accumulate(map(len, self._ranges)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, place: int) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= place < len(self):
            raise IndexError(place)
        number = bisect.bisect_right(self._ends, place)
        return self._ranges[number][place - self._ends[number]]
