"""Writes a split as balanced shards in clip_benchmark's layout, in parallel; an interrupted writer can be resumed.

```
OUTPUT/classnames.txt                               one name per line; the line number is the label
OUTPUT/zeroshot_classification_templates.txt        prompts with {c} for a name
OUTPUT/categories.json                              of masks of panoptic segmentation, in COCO's form
OUTPUT/candidates.txt  classes.json                 of a subset: names of a larger classifier, and those of each class
OUTPUT/<split>/nshards.txt                          the number of shards
OUTPUT/<split>/0.tar  1.tar  ...                    s0000000.cls  s0000000.jpg  s0000001.cls  ...
OUTPUT/<split>/prepared.json                        source, options and counts of the split
```

Shards are written to ``OUTPUT/.<split>.partial``, which is renamed at the end. Every shard there is complete, and its
samples depend only on the source and the options.
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

from lit_het.data_pipelines.images.decoding import BrokenImage
from lit_het.data_pipelines.labels import text_of
from lit_het.data_pipelines.masks import CATEGORIES_FILE
from lit_het.data_pipelines.prepare.archives import TarFiles
from lit_het.data_pipelines.prepare.dataset import DataSet, Sample, Split
from lit_het.data_pipelines.prepare.images import as_stored
from lit_het.data_pipelines.shards.storage import Unreadable
from lit_het.data_pipelines.shards.writing import write_tar
from lit_het.errors import UserError, require_at_least
from lit_het.files import completed, write_atomically
from lit_het.untrusted import read_json

_RECORD = "prepared.json"
_VERSION = 2  # of the assignment of samples to shards; splits of other versions are not resumed
_SHUFFLE_SEED = 0


@dataclasses.dataclass(frozen=True)
class WriteOptions:
    """How samples become shards.

    Attributes:
        samples_per_shard: upper bound; the sizes of shards differ by at most one sample.
        workers: threads, each of which writes one shard at a time.
        shuffle: write samples in a fixed random order instead of the source's order.
        check_images: decode every image; otherwise only its first bytes are checked.
        skip_broken: exclude unreadable images; otherwise the first one is an error.
    """

    samples_per_shard: int = 10_000
    workers: int = 1
    shuffle: bool = False
    check_images: bool = False
    skip_broken: bool = False

    def __post_init__(self) -> None:
        require_at_least(1, self, "samples_per_shard", "workers")


class SplitWriter:
    """Writes one split, and resumes an interrupted one.

    Args:
        folder: the output, ``OUTPUT/<split>``.
        split: the samples.
        options: how samples become shards.

    Attributes:
        num_written: number of samples in the shards of earlier writers.
        finished: whether the split is complete.
        example: the first image or caption that was left out, and why; empty if there is none.
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
        self.example = ""
        self.finished = folder.exists()
        self._written: dict[int, int] = {}
        if self.finished:
            if (plan := _read_plan(folder)) != self._plan:
                raise UserError(f"{folder} exists, {_difference(plan, self._plan)}; remove it or choose another output")
            self.num_written = split.num_samples
            return
        begun = _read_plan(self._partial)
        if begun is None:
            shutil.rmtree(self._partial, ignore_errors=True)
        elif begun != self._plan:
            raise UserError(
                f"{self._partial} was started {_difference(begun, self._plan)}; repeat the command that started it, or "
                "remove it and begin anew"
            )
        for shard in range(self._num_shards):
            # Reading the headers to the end proves that a shard is complete.
            path = self._partial / f"{shard}.tar"
            with contextlib.suppress(UserError):  # missing or incomplete
                self._written[shard] = len({name.partition(".")[0] for name in TarFiles(path, self._partial).sizes})
        self.num_written = sum(len(self._range(shard)) for shard in self._written)

    def write(self, advance: Callable[[int], None]) -> int:
        """Writes the missing shards and renames the folder.

        Args:
            advance: called with the number of newly processed samples.

        Returns:
            The number of samples written by this and earlier writers: all except broken ones.
        """
        try:
            return self._write(advance)
        except OSError as error:
            raise UserError(
                f"{self._partial}: cannot be written ({error}); fix that and run the command again"
            ) from error

    def _write(self, advance: Callable[[int], None]) -> int:
        self._partial.mkdir(parents=True, exist_ok=True)
        with _locked(self._partial):
            # Removed under the lock: without it they might belong to a running writer.
            for incomplete in self._partial.glob("*.partial-*"):  # of an interrupted writer
                incomplete.unlink()
            write_atomically(self._partial / _RECORD, _json({"plan": self._plan}))
            missing = [shard for shard in range(self._num_shards) if shard not in self._written]
            counts = [*self._written.values(), *self._write_shards(missing, advance)]
            write_atomically(self._partial / "nshards.txt", f"{self._num_shards}\n")
            left_out = {**self._split.left_out, "broken": self._split.num_samples - sum(counts)}
            record = {"plan": self._plan, "samples": sum(counts), "left_out": left_out}
            write_atomically(self._partial / _RECORD, _json(record))
            # The only step that makes the split visible: readers never see half of it.
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
                raise UserError(
                    f"{self._folder.name}: no sample of shard {shard} can be used ({self.example}); fix them"
                )
        return count

    def _members(self, positions: range, order: np.ndarray, proceed: Callable[[], None]) -> Iterator[dict[str, Any]]:
        numbers = order[positions.start : positions.stop].tolist()
        for number, sample in zip(numbers, self._split.read(numbers), strict=True):
            stored = self._stored(sample)
            if stored is not None:
                extension, image = stored
                # The number in the source also where samples are shuffled: files with an entry per image sort by it.
                members = {"__key__": sample.key or f"s{number:07d}", extension: image, **sample.members}
                if self._split.labels is not None:
                    members["cls"] = int(self._split.labels[number])
                yield members
            proceed()

    def _stored(self, sample: Sample) -> tuple[str, bytes] | None:
        """Returns the extension and bytes of an image; None excludes the sample."""
        if "txt" in sample.members and (fault := _fault_of(sample.members["txt"])):
            self.example = self.example or f"{sample.origin}: {fault}"
            return None
        try:
            return as_stored(sample.image, check=self._options.check_images, border=sample.border)
        except BrokenImage as error:
            if self._options.skip_broken:
                self.example = self.example or f"{sample.origin}: {error}"
                return None
            message = f"{sample.origin}: {error}; fix it, or skip broken images with --skip-broken"
            raise UserError(message) from error

    def _range(self, shard: int) -> range:
        """Returns the positions of a shard's samples; the lengths differ by at most one."""
        # Integer arithmetic, so that neighbouring shards share their bound exactly.
        bounds = [(shard + more) * self._split.num_samples // self._num_shards for more in (0, 1)]
        return range(*bounds)


def write_names(output: Path, dataset: DataSet) -> None:
    """Writes class names, prompt templates, candidates and categories, where there are any; existing templates stay."""
    if dataset.categories is not None:
        _write_same(output / CATEGORIES_FILE, json.dumps(dataset.categories, indent=1) + "\n", "categories")
    if dataset.class_names is None:
        return
    for name in dataset.class_names:
        if not name.strip() or len(name.splitlines()) > 1:
            raise UserError(f"class name {name!r} is not one line of text; rename the class")
    names = "".join(f"{name}\n" for name in dataset.class_names)
    _write_same(output / "classnames.txt", names, "class names")
    templates = output / "zeroshot_classification_templates.txt"
    if not templates.exists():
        write_atomically(templates, "".join(f"{template}\n" for template in dataset.templates))
    if dataset.candidates is not None:
        write_atomically(output / "candidates.txt", "".join(f"{name}\n" for name in dataset.candidates))
        groups = dict(zip(dataset.class_names, dataset.groups, strict=True))
        write_atomically(output / "classes.json", json.dumps(groups) + "\n")


def _write_same(path: Path, text: str, what: str) -> None:
    """Writes what all splits of a set share."""
    if path.exists() and path.read_text("utf-8") != text:
        raise UserError(f"{path} has other {what}; choose another output, or remove it with its splits")
    write_atomically(path, text)


def _fault_of(caption: bytes) -> str | None:
    """Returns why training would refuse a caption; None for those that it accepts."""
    try:
        return None if text_of(caption).strip() else "the caption is empty"
    except Unreadable as error:
        return f"{error}"


def _difference(before: Any, plan: dict[str, Any]) -> str:
    """Returns in which way shards differ from a plan, with the flags if nothing else does."""
    flags = {"shards": "--samples-per-shard", "shuffle": "--shuffle", "check_images": "--check-images"}
    changed = [name for name in plan if before.get(name) != plan[name]] if isinstance(before, dict) else []
    if not changed or not flags.keys() >= set(changed):
        return "from another source or with other options"
    return f"with another {' and '.join(flags[name] for name in changed)}"


def _read_plan(folder: Path) -> Any:
    try:
        return read_json(folder / _RECORD)["plan"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Locks a folder against other processes; the lock ends with the process, however it ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise UserError(f"{folder}: another process is writing it; wait for it or stop it") from error
    finally:
        os.close(descriptor)
