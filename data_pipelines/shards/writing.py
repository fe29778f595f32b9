"""Writes webdataset shards and expands patterns of shard addresses.

A shard is an uncompressed tar. The members of one sample share a key (the path up to the first dot of the base name)
and are consecutive: ``000017.jpg``, ``000017.txt``, ``000017.cls``.
"""

import functools
import glob
import itertools
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from braceexpand import braceexpand

from lit_het.data_pipelines.shards import storage, urls
from lit_het.data_pipelines.shards.portions import Portion
from lit_het.data_pipelines.shards.tars import is_hidden
from lit_het.errors import UserError, pluralize

IMAGE = "image"
"""The kind of member for an image with any of the ``IMAGE_EXTENSIONS``."""

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")

OTHER_IMAGES = ("jpe", "jfif", "gif", "bmp", "tif", "tiff", "ppm", "pgm", "pbm", "pnm")
"""Extensions of images that can be decoded too, but do not make a member the image of its sample."""

MAX_ALTERNATIVES = 2**18
"""The most addresses that the braces of a pattern may expand to."""

MAX_BRACES = 8
"""The most braces of a pattern: each adds to the time of every address."""

MAX_DEPTH_OF_LISTS = 8
"""How deep lists may be nested; a list that contains itself would never end."""

_logger = logging.getLogger(__name__)

_ARCHIVE = re.compile(r"\.(tar|tar\.(gz|bz2|xz|zst|lz4)|tgz|tbz2?|txz)$", re.IGNORECASE)
_RANGE = re.compile(r"\{(-?\d{1,18})\.\.(-?\d{1,18})")


def extensions(kind: str) -> tuple[str, ...]:
    """Returns the file extensions of a kind of member, in order of preference."""
    return IMAGE_EXTENSIONS if kind == IMAGE else (kind,)


def missing_member(kind: str, key: str, present: Iterable[str]) -> str:
    """Returns what to do about a sample without a kind of member, whose others have the given extensions."""
    ends = tuple(f".{extension}" for extension in extensions(kind))
    for other in present:
        if other.endswith(ends):
            return f"a key ends at the first dot of a name, so {key}.{other} is another kind of member; rename it"
        if kind == IMAGE and other in OTHER_IMAGES:
            return f"rename {key}.{other} to {key}.jpg, as the content decides the format"
    return "add the member or remove the sample"


def key_and_extension(name: str) -> tuple[str, str] | None:
    """Splits a member's name into sample key and extension; None for hidden files and files without extension."""
    folder, _, base = name.rpartition("/")
    stem, dot, extension = base.partition(".")
    # webdataset ignores hidden files too; others of hidden folders are copies, such as .ipynb_checkpoints.
    if not stem or not dot or (folder and is_hidden(folder)):
        return None
    return (f"{folder}/{stem}" if folder else stem), extension.lower()


def write_shards(
    directory: Path | str,
    samples: Iterable[Mapping[str, Any]],
    *,
    samples_per_shard: int = 10_000,
    name: str = "shard",
) -> list[Path]:
    """Writes samples to ``<directory>/<name>-000000.tar`` and so on; equal samples give equal bytes.

    A sample is ``{"__key__": "000017", "jpg": bytes, "txt": str, "cls": int, "json": dict}``. All shards are first
    written to a temporary folder, so that an interrupted writer leaves no incomplete shards.

    Returns:
        The paths of the shards, in order.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if any(directory.glob(f"{glob.escape(name)}-*.tar")):
        raise UserError(f"{directory}: holds {name}-*.tar shards already; remove them or choose another folder")
    # In the same folder, so that the rename does not cross file systems.
    partial = directory / f".{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        remaining = iter(samples)
        for number in itertools.count():
            part = list(itertools.islice(remaining, samples_per_shard))
            if not part:
                break
            write_tar(partial / f"{name}-{number:06d}.tar", part)
        written = sorted(partial.iterdir())
        if not written:
            raise UserError(f"{directory}: there are no samples to write")
        return [path.rename(directory / path.name) for path in written]
    finally:
        shutil.rmtree(partial)


def write_tar(path: Path, samples: Iterable[Mapping[str, Any]]) -> int:
    """Writes one shard of samples as in `write_shards`, and flushes it to disk; equal samples give equal bytes.

    Returns:
        The number of samples.
    """
    # Only where shards are written: webdataset imports PyTorch, which takes seconds, wherever it is installed.
    from webdataset.writer import TarWriter

    count = 0
    with path.open("wb") as file:
        # Without times, equal samples give equal bytes and so equal digests.
        with TarWriter(file, mtime=0, encoder=encoded) as writer:
            for sample in samples:
                key = sample["__key__"]
                if not key or "." in key.rpartition("/")[2]:
                    raise UserError(f"{path.name}: key {key!r} must not be empty or contain a dot; rename it")
                writer.write(dict(sample))
                count += 1
        file.flush()
        # Before the rename that follows: after a power failure a shard with its final name must have its content.
        os.fsync(file.fileno())
    return count


def encoded(sample: dict[str, Any]) -> dict[str, Any]:
    """Returns a sample as bytes; webdataset's own encoder would compress the bytes of a ``.gz`` again."""
    from webdataset.writer import default_handlers, encode_based_on_extension

    finished = {name: content for name, content in sample.items() if isinstance(content, bytes)}
    rest = {name: content for name, content in sample.items() if name not in finished}
    return {**encode_based_on_extension(rest, default_handlers), **finished}


def expand(patterns: Path | str | Iterable[Path | str], *, allow_commands: bool = False) -> list[str]:
    """Expands addresses, brace patterns (``{000..009}.tar``), globs, folders and lists to sorted, unique tar files.

    A list is a ``.txt`` file, local or remote, with one of these per line; empty lines and lines that start with ``#``
    are ignored. Addresses such as ``gs://bucket/{000..009}.tar`` are read through fsspec. ``pipe:COMMAND``, with
    braces too, is a shard that a shell command writes, for a `Stream`.

    Args:
        patterns: as above.
        allow_commands: whether lists, which may come from other people, may contain commands.
    """
    patterns = [patterns] if isinstance(patterns, (str, Path)) else list(patterns)
    if not patterns:
        raise UserError("no shards are given; name tar files, folders or patterns such as 'train-{000..009}.tar'")
    lists = _Lists(allow_commands)
    # Sorted: the order of the shards defines the order of samples, and file systems list files in any order.
    return sorted({address for pattern in patterns for address in _expand_one(str(pattern), lists)})


class _Lists(NamedTuple):
    """Whether lists may contain commands, and the depth of the current list."""

    allow_commands: bool
    depth: int = 0


def _expand_one(pattern: str, lists: _Lists) -> list[str]:
    # Before braces are expanded, because the name of a file may contain them.
    if os.path.isfile(pattern):
        return _listed(pattern, lists) if pattern.endswith(".txt") else [pattern]
    if urls.is_pipe(pattern):
        return _alternatives(pattern)
    return [address for alternative in _alternatives(pattern) for address in _matches(alternative, lists)]


def _alternatives(pattern: str) -> list[str]:
    # braceexpand 0.1.7 builds a whole range before it yields the first alternative: so check the length before.
    lengths = (abs(int(last) - int(first)) for first, last in _RANGE.findall(pattern))
    is_long = pattern.count("{") > MAX_BRACES or any(length >= MAX_ALTERNATIVES for length in lengths)
    try:
        # Backslashes in a command are for the shell.
        found = [] if is_long else braceexpand(pattern, escape=not urls.is_pipe(pattern))
        alternatives = list(itertools.islice(found, MAX_ALTERNATIVES + 1))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{pattern}: {error}; close every brace") from error
    if is_long or len(alternatives) > MAX_ALTERNATIVES:
        problem = f"has more than {MAX_BRACES} braces, or they expand to more than {MAX_ALTERNATIVES:,} addresses"
        raise UserError(f"{pattern}: {problem}; name a folder")
    return alternatives


def _listed(address: str, lists: _Lists) -> list[str]:
    if lists.depth == MAX_DEPTH_OF_LISTS:
        raise UserError(f"{address}: lists are nested more than {MAX_DEPTH_OF_LISTS} deep; name the shards")
    inner = lists._replace(depth=lists.depth + 1)
    found: list[str] = []
    for number, line in enumerate(storage.text_lines(address), 1):
        if not line or line.startswith("#"):
            continue
        if urls.is_pipe(line) and not lists.allow_commands:
            raise UserError(
                f"{address}:{number}: {urls.shortened(line)} is a shell command, which a list may contain only "
                "with lit-het train --allow-commands; read the list first"
            )
        try:
            found += _expand_one(line, inner)
        except UserError as error:
            raise UserError(f"{address}:{number}: {error}") from error
    if not found:
        raise UserError(f"{address}: the list names no shards; write a tar file, folder or pattern on each line")
    return found


def _matches(pattern: str, lists: _Lists) -> list[str]:
    if pattern.endswith(".txt") and not glob.has_magic(pattern):
        return _listed(pattern, lists)
    if urls.is_remote(pattern):
        if pattern.endswith(".tar") and not glob.has_magic(pattern):
            return [pattern]  # not checked: it would take one request per shard
        found = matching(pattern) if glob.has_magic(pattern) else _in_folder(matching(f"{pattern.rstrip('/')}/*"), [])
    elif os.path.isdir(pattern):
        found = _in_folder(*([str(path) for path in Path(pattern).glob(names)] for names in ("*", "*/*.tar")))
    else:
        found = matching(pattern)
    if not found:
        raise UserError(f"{pattern}: no tar file matches; check the path of the shards")
    # The name of a file must not run as a command.
    return [f"./{address}" if urls.is_pipe(address) else address for address in found]


def _in_folder(files: Sequence[str], below: Sequence[str]) -> list[str]:
    """Returns the shards among the files of a folder; a warning names other archives, also in folders below."""
    visible = [address for address in files if not is_hidden(address.rpartition("/")[2])]
    shards = [address for address in visible if address.endswith(".tar")]
    ignored = {address for address in visible if _ARCHIVE.search(address)}.difference(shards)
    ignored.update(address for address in below if not is_hidden("/".join(address.split("/")[-2:])))
    if shards and ignored:
        _warn_of_ignored(urls.parent(shards[0]), len(ignored), min(ignored))
    return shards


@functools.cache
def _warn_of_ignored(folder: str, count: int, example: str) -> None:
    """Warns once of the archives of a folder that are not read."""
    what = f"{pluralize(count, 'other archive')}, such as {example}"
    _logger.warning("%s: only its files *.tar are read, not %s; unpack, rename or list them", folder, what)


def matching(pattern: str) -> list[str]:
    """Returns the files that match a glob pattern, here or at addresses that fsspec knows."""
    if not urls.is_remote(pattern):
        return glob.glob(pattern, recursive=True)
    files, path = storage.filesystem(pattern)
    try:
        found = storage.with_retries(lambda: files.glob(path))
    except Exception as error:
        raise UserError(f"{pattern}: the store does not answer ({error}); check the address") from error
    # As glob does: a star does not stand for a dot at the start of a name.
    takes_hidden = pattern.rpartition("/")[2].startswith(".")
    visible = [name for name in found if takes_hidden or not name.rpartition("/")[2].startswith(".")]
    return [files.unstrip_protocol(name) for name in visible]


def common_shards(shards: Sequence[str], portion: Portion, others: Sequence[str], other_portion: Portion) -> list[str]:
    """Returns the shards, however their paths are written, of which two portions may have samples in common."""
    files, other_files = ({*map(urls.canonical, some)} for some in (shards, others))
    # Portions of different lists of shards are of different samples, and may have some in common.
    apart = files == other_files and not portion.overlaps(other_portion)
    return [] if apart else sorted(files & other_files)
