"""Writes a split as balanced shards in clip_benchmark's layout, in parallel; a writer that was killed goes on.

```
OUTPUT/classnames.txt                               a name a line; the line number is the label
OUTPUT/zeroshot_classification_templates.txt        prompts with {c} for a name
OUTPUT/<split>/nshards.txt                          the number of shards
OUTPUT/<split>/0.tar  1.tar  ...                    s0000000.cls  s0000000.jpg  s0000001.cls  ...
OUTPUT/<split>/prepared.json                        what the split was made of
```

Shards are written to ``OUTPUT/.<split>.partial``, which takes its name at the end. Every shard there is complete, and
which samples it holds follows from the source and the options alone.
"""

import concurrent.futures
import contextlib
import dataclasses
import fcntl
import functools
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lit_het.data_pipelines.images import BrokenImage
from lit_het.data_pipelines.prepare.archives import TarFiles
from lit_het.data_pipelines.prepare.dataset import DataSet, Sample, Split
from lit_het.data_pipelines.prepare.images import as_stored
from lit_het.data_pipelines.shards import write_tar
from lit_het.errors import UserError, require_at_least
from lit_het.files import completed, write_atomically
from lit_het.untrusted import read_json

_RECORD = "prepared.json"
_VERSION = 2  # of what follows from a source and options; another one begins anew
_SHUFFLE_SEED = 0


@dataclasses.dataclass(frozen=True)
class WriteOptions:
    """How samples become shards.

    Attributes:
        samples_per_shard: at most; shards differ by one sample at most.
        workers: threads that write a shard each.
        shuffle: write samples in a random order, the same every time, in place of the source's.
        check_images: decode every image, where else its first bytes must do.
        skip_broken: leave out images that cannot be read, where else the first one is an error.

    Raises:
        UserError: no samples in a shard, or no workers.
    """

    samples_per_shard: int = 10_000
    workers: int = 1
    shuffle: bool = False
    check_images: bool = False
    skip_broken: bool = False

    def __post_init__(self) -> None:
        require_at_least(1, self, "samples_per_shard", "workers")


class SplitWriter:
    """Writes one split, from where an earlier writer was stopped.

    Args:
        folder: where the shards go, ``OUTPUT/<split>``.
        split: the samples.
        options: how they become shards.

    Attributes:
        num_kept: samples that are there already.
        finished: whether all are.

    Raises:
        UserError: the split is empty, or the folder was made, or begun, of something else.
    """

    def __init__(self, folder: Path, split: Split, options: WriteOptions):
        if not split.num_samples:
            raise UserError(f"{folder.name}: the source holds no samples; check its path and the options")
        self._folder, self._split, self._options = folder, split, options
        self._partial = folder.with_name(f".{folder.name}.partial")
        self._num_shards = -(-split.num_samples // options.samples_per_shard)
        self._plan = {
            "version": _VERSION,
            "source": split.fingerprint,
            "samples": split.num_samples,
            "shards": self._num_shards,
            "shuffle": options.shuffle,
            "check_images": options.check_images,
        }
        self.finished = folder.exists()
        self._kept: dict[int, int] = {}
        if self.finished:
            if _read_plan(folder) != self._plan:
                raise UserError(f"{folder} exists and was made otherwise; remove it or choose another output")
            self.num_kept = split.num_samples
            return
        begun = _read_plan(self._partial)
        if begun is None:
            shutil.rmtree(self._partial, ignore_errors=True)
        elif begun != self._plan:
            raise UserError(f"{self._partial} was begun from another source or with other options; remove it first")
        for shard in range(self._num_shards):
            path = self._partial / f"{shard}.tar"
            with contextlib.suppress(UserError):  # not there, or not whole
                self._kept[shard] = len({name.partition(".")[0] for name in TarFiles(path, self._partial).sizes})
        self.num_kept = sum(len(self._range(shard)) for shard in self._kept)

    def write(self, advance: Callable[[int], None]) -> int:
        """Writes what is missing and gives the folder its name.

        Args:
            advance: called with the number of samples that were just done.

        Returns:
            The number of samples written, by this writer and those before: all but broken ones.

        Raises:
            UserError: an image is broken, the disk is full, or another process writes the same folder.
        """
        try:
            return self._write(advance)
        except OSError as error:
            raise UserError(f"{self._partial}: cannot go on ({error}); mend that and run the same again") from error

    def _write(self, advance: Callable[[int], None]) -> int:
        self._partial.mkdir(parents=True, exist_ok=True)
        with _locked(self._partial):
            for half_written in self._partial.glob("*.partial-*"):  # by a writer that was killed
                half_written.unlink()
            write_atomically(self._partial / _RECORD, _json({"plan": self._plan}))
            missing = [shard for shard in range(self._num_shards) if shard not in self._kept]
            counts = [*self._kept.values(), *self._write_shards(missing, advance)]
            write_atomically(self._partial / "nshards.txt", f"{self._num_shards}\n")
            left_out = {**self._split.left_out, "broken": self._split.num_samples - sum(counts)}
            record = {"plan": self._plan, "samples": sum(counts), "left_out": left_out}
            write_atomically(self._partial / _RECORD, _json(record))
            self._partial.rename(self._folder)
        return sum(counts)

    def _write_shards(self, shards: list[int], advance: Callable[[int], None]) -> list[int]:
        stop, lock = threading.Event(), threading.Lock()
        order = np.arange(self._split.num_samples)
        if self._options.shuffle:
            order = np.random.default_rng(_SHUFFLE_SEED).permutation(order)

        def proceed() -> None:
            if stop.is_set():
                raise concurrent.futures.CancelledError
            with lock:
                advance(1)

        with concurrent.futures.ThreadPoolExecutor(self._options.workers) as pool:
            jobs = [pool.submit(functools.partial(self._write_shard, shard, order, proceed)) for shard in shards]
            try:
                return [job.result() for job in concurrent.futures.as_completed(jobs)]
            except BaseException:
                stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _write_shard(self, shard: int, order: np.ndarray, proceed: Callable[[], None]) -> int:
        with completed(self._partial / f"{shard}.tar") as temporary:
            count = write_tar(temporary, self._members(self._range(shard), order, proceed))
            if not count:
                raise UserError(f"{self._folder.name}: no sample of shard {shard} can be used; check the source")
        return count

    def _members(self, positions: range, order: np.ndarray, proceed: Callable[[], None]) -> Iterator[dict[str, Any]]:
        numbers = order[positions.start : positions.stop].tolist()
        for position, number, sample in zip(positions, numbers, self._split.read(numbers), strict=True):
            stored = self._stored(sample)
            if stored is not None:
                extension, image = stored
                members = {"__key__": sample.key or f"s{position:07d}", extension: image, **sample.members}
                if self._split.labels is not None:
                    members["cls"] = int(self._split.labels[number])
                yield members
            proceed()

    def _stored(self, sample: Sample) -> tuple[str, bytes] | None:
        """The extension and bytes of an image; None leaves its sample out."""
        if "txt" in sample.members and not _is_caption(sample.members["txt"]):
            return None
        try:
            return as_stored(sample.image, check=self._options.check_images)
        except BrokenImage as error:
            if self._options.skip_broken:
                return None
            message = f"{sample.origin}: {error}; mend it, or leave out such images with --skip-broken"
            raise UserError(message) from error

    def _range(self, shard: int) -> range:
        """The positions of a shard's samples: equally many in each, but for one."""
        bounds = [(shard + more) * self._split.num_samples // self._num_shards for more in (0, 1)]
        return range(*bounds)


def write_names(output: Path, dataset: DataSet) -> None:
    """Writes class names and prompt templates, where there are classes; templates that lie there already stay.

    Raises:
        UserError: other class names lie there, or a name has a line break.
    """
    if dataset.class_names is None:
        return
    for name in dataset.class_names:
        if not name.strip() or len(name.splitlines()) > 1:
            raise UserError(f"class name {name!r} is not one line of text; rename the class")
    path, names = output / "classnames.txt", "".join(f"{name}\n" for name in dataset.class_names)
    if path.exists() and path.read_text("utf-8") != names:
        raise UserError(f"{path} has other class names; choose another output, or remove it with its splits")
    write_atomically(path, names)
    templates = output / "zeroshot_classification_templates.txt"
    if not templates.exists():
        write_atomically(templates, "".join(f"{template}\n" for template in dataset.templates))


def _is_caption(text: bytes) -> bool:
    """Whether training takes it."""
    try:
        return bool(text.decode("utf-8").strip())
    except UnicodeDecodeError:
        return False


def _read_plan(folder: Path) -> Any:
    try:
        return read_json(folder / _RECORD)["plan"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds a folder against other processes; the lock ends with the process, however it ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise UserError(f"{folder}: another process is writing it; wait for it or stop it") from error
    finally:
        os.close(descriptor)
