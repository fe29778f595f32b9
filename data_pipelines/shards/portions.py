"""A part of a data set, such as 2 % of a training set for validation: the last, or those that a hash chooses."""

import bisect
import dataclasses
import hashlib
import itertools
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal, TypeAlias, cast

import numpy as np
from jaxtyping import Bool

from lit_het.errors import FieldError, require_choice

Rule: TypeAlias = Literal["order", "sample", "key", "caption", "name"]
"""What a portion goes by: the order of the shards, or a hash of a sample's shard and key, its key, its caption, or of
caption and sample."""

_BLOCK = 2**10


@dataclasses.dataclass(frozen=True)
class Portion:
    """Consecutive samples, in shard order or by a hash; ``parse`` is the inverse of ``str``.

    Adjacent portions (``:98%`` and ``98%:``) of one rule are disjoint and cover all samples, on any number of hosts.
    Percentages count only the samples that the index holds; by a hash they are expected, not exact.

    Attributes:
        start, end: percent of the samples.
        by: the rule. By "sample", the name of the shard counts, without its folder, so that keys may begin anew in
            every shard; by "key", equal keys are on one side; by "caption", equal captions, or keys where none is; by
            "name", the end holds all samples of some captions, and as many of the others.
    """

    start: int | float = 0
    end: int | float = 100
    by: Rule = "order"

    def __post_init__(self) -> None:
        require_choice(self, "by")
        if not 0 <= self.start < self.end <= 100:
            raise FieldError(self, "start", f"{self.start} and end = {self.end} must be from 0 to 100 and in order")

    @staticmethod
    def parse(text: str) -> "Portion":
        """Returns the portion of a text such as "98%:", "10%:20%" or "98%: by sample".

        Raises:
            ValueError: the text is not a portion.
        """
        match = re.fullmatch(
            r"(?:([0-9.]+)%)?:(?:([0-9.]+)%)?(?:by(order|sample|key|caption|name))?", text.replace(" ", "")
        )
        if match is None:
            raise ValueError(
                f"{text!r} is not a portion; write a start and an end in percent, such as ':98%' or '98%:100%'"
            )
        *bounds, by = match.groups()
        start, end = (
            default if part is None else float(part) if "." in part else int(part)
            for part, default in zip(bounds, (0, 100), strict=True)
        )
        return Portion(start, end, cast(Rule, by or "order"))

    def __str__(self) -> str:
        return f"{self.start}%:{self.end}%" + ("" if self.by == "order" else f" by {self.by}")

    def overlaps(self, other: "Portion") -> bool:
        """Returns whether two portions of the same samples may have any in common."""
        return self.by != other.by or max(self.start, other.start) < min(self.end, other.end)

    def sample_range(self, num_samples: int) -> range:
        """Returns the indices of its samples in a data set of ``num_samples``; by a hash, as many as are expected."""
        # Exact decimal arithmetic: as a float, 0.7 % of 1,000 samples would be fewer than 7.
        start, end = (math.floor(Fraction(str(part)) * num_samples / 100) for part in (self.start, self.end))
        return range(start, end)

    def marks(self, *identities: Sequence[bytes]) -> Bool[np.ndarray, " n"]:
        """Returns which samples belong to a portion by a hash, given what the rule goes by: one list, or two.

        Saved portions depend on this rule: the first 8 bytes of BLAKE2b as a fraction of 2^64. Of two fractions u and v
        the place is ``max(u, v)²``, which is as evenly spread: the last p of the samples are those with ``u`` or ``v``
        above ``sqrt(1 - p)``, half of them for either reason.
        """
        chosen, count = self.sample_range(2**64), len(identities)
        found = (max(map(_hash, contents)) ** count >> 64 * (count - 1) for contents in zip(*identities, strict=True))
        return np.fromiter((place in chosen for place in found), bool, len(identities[0]))

    def counts_per_shard(self, counts: Sequence[int]) -> list[int]:
        """Returns how many samples of each shard belong to the portion."""
        chosen = self.sample_range(sum(counts))
        ends = itertools.accumulate(counts)
        return [
            max(0, min(end, chosen.stop) - max(end - count, chosen.start))
            for end, count in zip(ends, counts, strict=True)
        ]


ALL = Portion()


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


class Marked(Sequence[int]):
    """Some of consecutive integers, in one bit for each of these.

    Attributes:
        start, stop: of the consecutive integers.
    """

    def __init__(self, start: int, marks: Bool[np.ndarray, " n"]):
        self.start, self.stop = start, start + len(marks)
        self._bits = np.packbits(marks)
        # Chosen integers up to the end of each block, so that one is found without unpacking all.
        self._ends = np.cumsum([marks[at : at + _BLOCK].sum() for at in range(0, len(marks), _BLOCK)], dtype=int)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, place: int) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        place = range(len(self))[place]
        block = int(np.searchsorted(self._ends, place, side="right"))
        marks = np.unpackbits(self._bits[block * _BLOCK // 8 :][: _BLOCK // 8])
        return self.start + block * _BLOCK + int(np.flatnonzero(marks)[place - (self._ends[block - 1] if block else 0)])

    @property
    def marks(self) -> Bool[np.ndarray, " n"]:
        """Which of the consecutive integers are chosen."""
        return np.unpackbits(self._bits, count=self.stop - self.start).astype(bool)


class Concatenated(Sequence[int]):
    """Ranges and marked integers, one after the other, without storing the integers."""

    def __init__(self, parts: Sequence[range | Marked]):
        self._parts = tuple(parts)
        self._ends = list(itertools.accumulate(map(len, self._parts)))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, place: int) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not 0 <= place < len(self):
            raise IndexError(place)
        number = bisect.bisect_right(self._ends, place)
        return self._parts[number][place - self._ends[number]]

    def marks(self, numbers: range) -> Bool[np.ndarray, " n"]:
        """Returns which of consecutive numbers are among the integers."""
        found = np.zeros(len(numbers), bool)
        for part in self._parts:
            common = range(max(part.start, numbers.start), min(part.stop, numbers.stop))
            if common:
                chosen = part.marks[common.start - part.start :][: len(common)] if isinstance(part, Marked) else True
                found[common.start - numbers.start :][: len(common)] = chosen
        return found
