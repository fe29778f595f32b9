"""Counts broken samples by shard and cause, with the first example of each, and stops a run above a limit."""

import collections
import math
import threading
from collections.abc import Iterable

from lit_het.data_pipelines.labels import OUT_OF_RANGE
from lit_het.data_pipelines.shards.tables import Fault
from lit_het.errors import TooManyBadSamples, UserError, pluralize

# The rate of broken samples is noisy at the start of a run: its denominator is at least this.
_MIN_SAMPLES_FOR_RATE = 10_000


class FaultLog:
    """Counts unusable samples; safe to share between threads.

    Args:
        max_bad_fraction: the largest fraction of samples that may be excluded, and of those that may be masked;
            infinity never stops a run, not even one without usable samples.

    Attributes:
        counts: number of samples excluded or masked, by shard and cause.
        examples: a description of the first one, by shard and cause.
    """

    def __init__(self, max_bad_fraction: float):
        self.counts: collections.Counter[tuple[str, str]] = collections.Counter()
        self.examples: dict[tuple[str, str], str] = {}
        self._max_bad_fraction = max_bad_fraction
        self._lock = threading.Lock()
        self._masked: set[tuple[str, str]] = set()
        self._num_read = self._num_counted = 0

    @property
    def causes(self) -> collections.Counter[str]:
        """Number of samples by cause, over all shards."""
        causes: collections.Counter[str] = collections.Counter()
        for (_, cause), count in self.counts.items():
            causes[cause] += count
        return causes

    def count_excluded(self, faults: Iterable[tuple[str, Fault]], num_samples: int) -> None:
        """Counts the samples that the indexes of the shards exclude.

        Args:
            faults: each with the address of its shard.
            num_samples: number of usable samples.
        """
        faults = list(faults)
        for address, fault in faults:
            self.counts[address, fault.cause] += fault.count
            self.examples[address, fault.cause] = fault.example
        left_out = sum(fault.count for _, fault in faults)
        everything = left_out + num_samples
        nothing_left = not num_samples and self._max_bad_fraction < math.inf
        if faults and (left_out > self._max_bad_fraction * everything or nothing_left):
            raise self._too_many(f"{faults[0][1].example}; {left_out} of {everything} samples cannot be used")

    def count_read(self, count: int) -> None:
        """Counts samples that were read, valid or not."""
        with self._lock:
            self._num_read += count

    def count_skipped(self, shard: str, cause: str, example: str) -> None:
        """Counts a defect that a stream skips.

        Args:
            shard: its address.
            cause: a short description, equal for all samples with this defect.
            example: what happened here, and how to fix it.
        """
        with self._lock:
            self._count(shard, cause, example)
            self._check_stream(example)

    def count_masked(self, shard: str, key: str, cause: str, reason: str, num_samples: int | None) -> None:
        """Counts a sample that becomes an invalid row of its batch.

        Args:
            shard: its address.
            key: of the sample.
            cause: a short description, equal for all samples with this defect.
            reason: what happened here.
            num_samples: samples per epoch: a broken sample counts once, however often it is read. None for a stream:
                a broken sample counts each time.
        """
        name = f"{shard}: key {key}"
        with self._lock:
            if num_samples is None:
                self._count(shard, cause, f"{name}: {reason}")
                self._check_stream(f"{name}: {reason}")
                return
            # By key: a long run meets the same broken sample in every epoch, and its share must not grow.
            if (shard, key) in self._masked:
                return  # already counted in an earlier epoch
            self._count(shard, cause, f"{name}: {reason}")
            self._masked.add((shard, key))
            bad, seen = len(self._masked), min(num_samples, max(self._num_read, _MIN_SAMPLES_FOR_RATE))
        if bad > self._max_bad_fraction * seen:
            # Allowing more broken samples would be the wrong advice where the file of names is wrong.
            if cause == OUT_OF_RANGE:
                raise UserError(f"{name}: {reason}")
            raise self._too_many(f"{name}: {reason}; {bad} bad of {seen} samples")

    def _count(self, shard: str, cause: str, example: str) -> None:
        self.counts[shard, cause] += 1
        self._num_counted += 1
        self.examples.setdefault((shard, cause), example)

    def _check_stream(self, example: str) -> None:
        bad = self._num_counted
        if bad > self._max_bad_fraction * max(self._num_read, _MIN_SAMPLES_FOR_RATE):
            defects = pluralize(bad, "defect")
            where = (
                f"in the first {pluralize(self._num_read, 'sample')}" if self._num_read else "before the first sample"
            )
            raise TooManyBadSamples(f"{example}; {defects} {where} of a stream, {self._allowed}")

    @property
    def _allowed(self) -> str:
        return f"where a fraction of {self._max_bad_fraction:.3g} is allowed"

    def _too_many(self, problem: str) -> TooManyBadSamples:
        return TooManyBadSamples(f"{problem}, {self._allowed} (lit-het data check lists them)")
