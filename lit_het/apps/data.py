"""``lit-het data``: prepares shards of published data sets, indexes shards and checks them."""

import collections
import json
import math
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from lit_het import library_logs
from lit_het.console import Bar, message
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.images.corruptions import CORRUPTIONS
from lit_het.data_pipelines.labels_config import ClassIndex
from lit_het.data_pipelines.prepare.corrupted import CleanShards, copy_names
from lit_het.data_pipelines.prepare.dataset import DataSet, Split
from lit_het.data_pipelines.prepare.writer import SplitWriter, WriteOptions, write_names
from lit_het.data_pipelines.scenes import SceneConfig, write_scenes
from lit_het.data_pipelines.shards.checksums import checksum_mismatch, save_checksum
from lit_het.data_pipelines.shards.faults import FaultLog
from lit_het.data_pipelines.shards.index import summarize
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.writing import expand
from lit_het.data_pipelines.texts.captions_config import QUESTION, TextPlace
from lit_het.errors import UserError, pluralize


def prepare(read: Callable[[], DataSet], source: Path, output: Path, options: WriteOptions) -> None:
    """Writes the splits of a published data set as shards in clip_benchmark's layout.

    Args:
        read: opens the data set; it may use the output as scratch space.
        source: its path, for messages.
        output: the folder to write.
        options: of the writer.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{output}: cannot be created ({error.strerror}); choose another output") from error
    message(f"reading {source}")
    dataset = read()
    writers = {name: SplitWriter(output / name, split, options) for name, split in dataset.splits.items()}
    write_names(output, dataset)
    for name, split in dataset.splits.items():
        for remark in _remarks(split, dataset.class_names):
            message(f"{name}: {remark}")
        writer = writers[name]
        if writer.finished:
            message(f"{name}: already complete in {output / name}")
            continue
        with Bar(f"{name}", split.num_samples, "images", start=writer.num_written) as bar:
            written = writer.write(bar.advance)
        broken = split.num_samples - written
        skipped = pluralize(broken, "broken image")
        if split.labels is None:
            skipped = f"{pluralize(broken, 'sample')} with an unreadable image or caption"
        message(
            f"{name}: {pluralize(written, 'image')} in {output / name}"
            + (f", {skipped} skipped" * bool(broken))
            + (f", such as {writer.example}" * bool(writer.example))
        )


def corrupt(
    shards: str, output: Path, corruptions: Sequence[str], severities: Sequence[int], seed: int, options: WriteOptions
) -> None:
    """Writes a set once for each corruption and severity, to ``OUTPUT/<corruption>/<severity>``."""
    addresses = expand(shards)
    with Bar("indexing", len(addresses), "shards") as bar:
        clean = CleanShards(addresses, bar.advance)
    names = corruptions or tuple(CORRUPTIONS)
    splits = {(name, str(severity)): clean.corrupted(name, severity, seed) for name in names for severity in severities}
    writers = [SplitWriter(output / name / severity, split, options) for (name, severity), split in splits.items()]
    for name in names:
        copy_names(addresses[0], output / name)
    total, written = len(clean) * len(writers), sum(writer.num_written for writer in writers)
    with Bar("corrupting", total, "images", start=written) as bar:
        for writer in writers:
            if not writer.finished:
                writer.write(bar.advance)
    message(f"{pluralize(len(clean), 'image')} in {pluralize(len(writers), 'set')} in {output}")


def draw_scenes(config: SceneConfig, output: Path) -> None:
    """Draws scenes of glyphs with their masks."""
    with Bar("drawing", config.num_train + config.num_test, "images") as bar:
        write_scenes(config, output, bar.advance)
    message(f"{config.num_train:,} scenes in {output / 'train'}, {config.num_test:,} in {output / 'test'}")


def index(shards: Sequence[str], workers: int, *, checksum: bool = False) -> None:
    """Writes the index of every shard that has none."""
    addresses, faults, num_samples = expand(shards), collections.Counter[str](), 0
    with _pool(min(workers, len(addresses))) as pool, Bar("indexing", len(addresses), "shards") as bar:
        for summary in pool.map(summarize, addresses):
            num_samples += summary.count
            faults.update({fault.cause: fault.count for fault in summary.faults})
            bar.advance(1)
        if checksum:
            with Bar("hashing", len(addresses), "shards") as hashing:
                for _ in pool.map(save_checksum, addresses):
                    hashing.advance(1)
    message(f"{pluralize(num_samples, 'sample')} in {pluralize(len(addresses), 'shard')}")
    for cause, count in faults.items():
        message(f"{count:,} times: {cause}; see lit-het data check")


def _pool(workers: int) -> Executor:
    if workers == 1:
        return ThreadPoolExecutor(1)  # a process would take longer to start than to scan a few shards
    # Scanning headers is bound by the CPU, hence processes; spawned ones do not inherit this one's threads.
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), library_logs.silence)


class _AnyTokenizer:
    """Makes rows of zeros of any text."""

    length = 1

    def __call__(self, texts: list[str]) -> np.ndarray:
        return np.zeros((len(texts), self.length), np.int32)

    def whole(self, texts: list[str]) -> np.ndarray:
        return self(texts)

    def prompted(self, prompts: list[str], texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        return self(texts), np.zeros((len(texts), 1), bool)

    def fits(self, prompt: str) -> bool:
        return True


def check(
    shards: Sequence[str],
    workers: int,
    captions: str | None,
    *,
    labels: ClassIndex | None = None,
    source: str | None = None,
    masks: bool = False,
    checksum: bool = False,
    output: Path | None = None,
) -> None:
    """Reads every sample as training does and prints the broken ones, by shard and cause.

    Args:
        shards: folders, patterns or lists.
        workers: threads that read.
        captions: member with the captions, which are checked, too; None to leave them out.
        labels: to check; None to leave them out.
        source: member with the text to translate, read in place of images.
        masks: whether every sample must have the masks of panoptic segmentation.
        checksum: whether to compare shards with their checksums.
        output: file of the table as JSON.
    """
    if output is not None and not output.resolve().parent.is_dir():
        raise UserError(f"no folder {output.parent} for {output.name}; create it first")
    addresses, place = expand(shards), captions or "txt"
    config = LoaderConfig(
        tuple(addresses),
        image_size=32,
        batch_size=64,
        labels=labels,
        captions=place,
        prompt=QUESTION if TextPlace(place).has_questions else None,
        source=source,
        masks=masks,
        threads=workers,
    )
    # The loader reads texts only with a tokenizer; any tokenizer will do.
    tokenizer = _AnyTokenizer() if captions or source else None
    with Bar("indexing", len(addresses), "shards") as bar:
        loader = Loader(config, tokenizer, bar.advance, FaultLog(math.inf), has_captions=captions is not None)
    with Bar("checking", -(-loader.num_samples // config.batch_size), "batches") as bar:
        for _ in loader.epoch():
            bar.advance(1)
    if checksum:
        with ThreadPoolExecutor(workers) as pool, Bar("hashing", len(addresses), "shards") as bar:
            for address, differs in zip(addresses, pool.map(checksum_mismatch, addresses), strict=True):
                if differs:
                    loader.faults.counts[address, "other checksum"] += 1
                    loader.faults.examples[address, "other checksum"] = f"{address}: {differs}"
                bar.advance(1)
    rows = [
        (_printable(shard), _printable(cause), count, _printable(loader.faults.examples[shard, cause]))
        for (shard, cause), count in sorted(loader.faults.counts.items())
    ]
    _print_table(rows)
    if output is not None:
        names = ("shard", "cause", "count", "example")
        output.write_text(json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=2) + "\n")
    if not rows:
        message(f"all {pluralize(loader.num_samples, 'sample')} can be used")
        return
    raise UserError(
        f"{loader.faults.counts.total():,} defects; fix them, or allow some in training with --data.max-bad-fraction"
    )


def _printable(text: str) -> str:
    """Returns text with escaped non-UTF-8 bytes, which names of files and members may contain."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _print_table(rows: Sequence[tuple[str, str, int, str]]) -> None:
    """Prints a table without borders, so that long paths are not wrapped."""
    if not rows:
        return
    width = max(len(cause) for _, cause, *_ in rows)
    print(f"{'count':>9}  {'cause':{width}}  shard and first example")
    for shard, cause, count, example in rows:
        print(f"{count:>9,}  {cause:{width}}  {example if shard in example else f'{shard}: {example}'}")


def _remarks(split: Split, class_names: tuple[str, ...] | None) -> list[str]:
    """Returns remarks on a split before it is written."""
    remarks = [f"{pluralize(count, 'sample')} {reason} skipped" for reason, count in split.left_out.items() if count]
    if split.published not in (None, split.num_samples):
        remarks.append(f"{pluralize(split.num_samples, 'image')}; {split.published:,} were published")
    if split.labels is not None and class_names is not None:
        empty = np.flatnonzero(np.bincount(split.labels, minlength=len(class_names)) == 0)
        if len(empty):
            remarks.append(f"{len(empty)} of {len(class_names)} classes have no images, {class_names[empty[0]]} first")
    return remarks
