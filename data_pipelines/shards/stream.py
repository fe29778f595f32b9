"""Batches from shards that cannot seek: commands, sockets, stores where only sequential reads are fast.

There is no index and no epoch. Every worker of every host draws shards with replacement, reads each one sequentially,
and draws samples from its own shuffle buffer. Worker ``w`` of ``W`` makes the batches ``w``, ``w + W`` and so on. So no
host waits for another host's shard, all hosts take the same number of steps, and the batches are a function of (seed,
first position, process, number of workers). The state is not a single integer: a resumed run draws other samples.

Defects are counted by shard and cause, as in the `Loader`; rates are relative to the samples read.
"""

import collections
import contextlib
import hashlib
import itertools
import random
import tarfile
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from lit_het.data_pipelines.batches import RawSample, Tokenizer, batch_maker, input_of, rows_per_process
from lit_het.data_pipelines.data_config import LoaderConfig, Streaming
from lit_het.data_pipelines.shards import urls
from lit_het.data_pipelines.shards.faults import FaultLog
from lit_het.data_pipelines.shards.pipes import Pipe
from lit_het.data_pipelines.shards.sample_tables import excluded_keys
from lit_het.data_pipelines.shards.scan import DAMAGED, EMPTY, NO_TAR, REPEATED, returning
from lit_het.data_pipelines.shards.storage import SequentialFile, Unreadable
from lit_het.data_pipelines.shards.tars import DamagedTar, streamed_members
from lit_het.data_pipelines.shards.writing import extensions, key_and_extension, missing_member
from lit_het.errors import UserError
from lit_het.types import Batch


class Stream:
    """Reads batches of NumPy arrays from shards sequentially.

    Args:
        config: which shards, and how.
        tokenizer: captions to ids ``[n l]``; None leaves ``Batch.text`` out.
        allow_commands: whether lists of shards may contain commands; the configuration itself always may.

    Attributes:
        config: as given.
        num_classes: of the labels, ``k``; None without labels.
        faults: defects skipped and samples masked since the stream was built.
    """

    def __init__(self, config: LoaderConfig, tokenizer: Tokenizer | None = None, *, allow_commands: bool = False):
        (self._addresses,) = config.data_sets(allow_commands=allow_commands)
        self.config = config
        self.faults = FaultLog(config.max_bad_fraction)
        self._excluded = dict[str, frozenset[str]]()
        for table in config.exclude:
            for shard, keys in excluded_keys(table, self._addresses).items():
                self._excluded[shard] = keys | self._excluded.get(shard, frozenset())
        self._maker = batch_maker(config, input_of(config, tokenizer), tokenizer, self._addresses, self.faults)
        self.num_classes = self._maker.num_classes

    @property
    def digest(self) -> str:
        """Identifies the addresses of the shards, whose content is unknown before it is read, and what is left out."""
        excluded = [f"{shard} {key}" for shard, keys in self._excluded.items() for key in keys]
        return digest_of([*self._addresses, *sorted(excluded)])

    @property
    def buffer_size(self) -> int:
        """Number of samples that each worker collects before its first batch."""
        return max(1, (self.config.stream or Streaming()).shuffle_buffer // max(1, self.config.threads))

    def batches(
        self,
        position: int = 0,
        process_index: int = 0,
        process_count: int = 1,
        *,
        advance: Callable[[int], None] = lambda count: None,
    ) -> Generator[Batch]:
        """Endless training batches; another position gives other draws, not a continuation of the same stream.

        Args:
            position: number of samples that all hosts together have consumed before.
            process_index: this host's number.
            process_count: how many hosts share each batch.
            advance: called with 1 for each of the ``buffer_size`` samples that are read before the first batch.

        Yields:
            This host's rows of each global batch, ``[b / process_count, ...]``.
        """
        config, size = self.config, self.config.batch_size
        rows = rows_per_process(size, process_count)
        count = max(1, config.threads)
        readers = [
            _ShardReader(
                self._addresses,
                self._maker.members,
                self.faults,
                self._excluded,
                self.buffer_size,
                (config.seed, position, process_index, worker),
                (lambda count: None) if worker else advance,
            )
            for worker in range(count)
        ]

        def make(number: int) -> Batch:
            # Positions seed augmentations, as in the `Loader`; only the choice of samples differs.
            first = position + number * size + process_index * rows
            samples = list(itertools.islice(readers[number % count].samples, rows))
            return self._maker.make(samples, range(first, first + rows), None)

        # One thread per reader: its batches come in order, and a reader is never used by two threads.
        pools = [ThreadPoolExecutor(1, "stream") for _ in readers]
        # Threads start before anything is read: one that starts while a signal arrives is unknown to `shutdown`, and
        # would still read when its reader is closed.
        for pool in pools:
            pool.submit(int)
        ahead = max(count, config.prefetch_batches) if config.threads else 0
        waiting: collections.deque[Future[Batch]] = collections.deque()
        try:
            for number in itertools.count():
                waiting.append(pools[number % count].submit(make, number))
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
        finally:
            for reader in readers:
                reader.stop()
            for pool in pools:
                pool.shutdown(cancel_futures=True)
            for reader in readers:
                reader.samples.close()


class _Stopped(Exception):
    """The consumer has stopped."""


class _ShardReader:
    """The samples of one worker; only `stop` may be called from another thread.

    Args:
        addresses: of the shards.
        kinds: of members that every sample must have.
        faults: counts defects.
        excluded: keys of the samples of each shard that are left out.
        buffer: size of the shuffle buffer, in samples.
        seed: of all draws.
        advance: called with 1 for each sample until the buffer is full.

    Attributes:
        samples: endless; a missing member is replaced by the reason.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        kinds: Sequence[str],
        faults: FaultLog,
        excluded: Mapping[str, Collection[str]],
        buffer: int,
        seed: tuple[int, ...],
        advance: Callable[[int], None],
    ):
        self._addresses, self._kinds, self._faults = addresses, kinds, faults
        self._excluded = excluded
        self._extensions = {extension for kind in kinds for extension in extensions(kind)}
        # `random.Random` takes no tuple; a string enters with all of its bytes.
        self._random = random.Random(str(seed))
        self._lock, self._is_stopped = threading.Lock(), False
        self._pipe: Pipe | None = None
        # Only for streams: webdataset imports PyTorch, which takes seconds, wherever it is installed.
        from webdataset.filters import shuffle

        self.samples: Generator[RawSample] = shuffle(buffer, initial=buffer, rng=self._random)(
            _counted(self._in_order(), buffer, advance)
        )

    def stop(self) -> None:
        """Makes the reading thread raise `_Stopped` soon; kills a command that it waits for."""
        with self._lock:
            self._is_stopped = True
            if self._pipe:
                self._pipe.kill()

    def _in_order(self) -> Iterator[RawSample]:
        empty: set[str] = set()  # shards whose last reading gave no sample
        while len(empty) < len(self._addresses):
            address = self._random.choice(self._addresses)
            # Counted as empty until it gives a sample: if no shard ever does, the stream would otherwise loop forever.
            empty.add(address)
            for sample in self._shard(address):
                empty.discard(address)
                yield sample
        example = next(iter(self._faults.examples.values()), "data.exclude leaves out all samples")
        raise UserError(f"{example}; none of {len(empty)} shards holds a readable sample: check --data.shards")

    def _shard(self, address: str) -> Iterator[RawSample]:
        keys: dict[str, tuple[str, ...]] = {}
        for key, members in itertools.groupby(self._members(address), lambda member: member[0]):
            # `groupby` joins adjacent members only: a key that returns later is a repetition.
            if key in keys:
                self._skip(address, *returning(key, next(members)[1], keys[key]))
                continue
            found: dict[str, bytes | Unreadable] = {}
            for _, extension, content in members:
                if extension in found:
                    way_out = "write the shard again with one"
                    self._skip(address, REPEATED, f"key {key} has two members .{extension}; {way_out}")
                else:
                    found[extension] = content
            keys[key] = tuple(found)
            if key in self._excluded.get(address, ()):
                continue
            yield RawSample(address, key, {kind: first_member(found, kind, key) for kind in self._kinds})

    def _members(self, address: str) -> Iterator[tuple[str, str, bytes | Unreadable]]:
        """Yields key, extension and content; counts a shard that is truncated or damaged."""
        is_empty = True
        try:
            with self._opened(address) as file:
                for name, content in streamed_members(file, self._is_read):
                    if self._is_stopped:
                        raise _Stopped
                    if names := key_and_extension(name):
                        is_empty = False
                        yield *names, content
            if is_empty:
                self._skip(address, EMPTY, "holds no samples; remove the shard or write it again")
        except tarfile.TarError as error:
            self._skip(address, NO_TAR, f"is not an uncompressed tar ({error}); unpack it or write it again")
        except DamagedTar as error:
            self._skip(address, DAMAGED, f"is {error}; fetch or write the shard again")
        except Unreadable as error:
            self._skip(address, error.cause, str(error))

    def _is_read(self, name: str) -> bool:
        names = key_and_extension(name)
        return names is not None and names[1] in self._extensions

    @contextlib.contextmanager
    def _opened(self, address: str) -> Iterator[SequentialFile | Pipe]:
        if not urls.is_pipe(address):
            with contextlib.closing(SequentialFile(address)) as file:
                yield file
            return
        with self._lock:
            if self._is_stopped:
                raise _Stopped
            self._pipe = Pipe(address)
        with contextlib.closing(self._pipe) as pipe:
            try:
                yield pipe
            except (tarfile.TarError, DamagedTar):
                pipe.check()  # if the command failed, its exit code explains the damage
                raise
            pipe.check()

    def _skip(self, address: str, cause: str, what: str) -> None:
        if self._is_stopped:
            raise _Stopped  # the reader killed the command: not a defect
        self._faults.count_skipped(address, cause, f"{address}: {what}")


def _counted(samples: Iterator[RawSample], count: int, advance: Callable[[int], None]) -> Iterator[RawSample]:
    for sample in itertools.islice(samples, count):
        advance(1)
        yield sample
    yield from samples


def digest_of(lines: Sequence[str]) -> str:
    """Identifies what a stream reads."""
    return hashlib.sha256("\n".join(lines).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def first_member(found: Mapping[str, bytes | Unreadable], kind: str, key: str) -> bytes | Unreadable:
    """Returns the member of a sample that is of a kind, or why there is none."""
    names = extensions(kind)
    for extension in names:
        if extension in found:
            return found[extension]
    return Unreadable(f"no .{'/'.join(names)}", missing_member(kind, key, found))
