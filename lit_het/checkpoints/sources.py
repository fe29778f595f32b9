"""Files of arrays that other programs wrote, read one array at a time; nothing is ever unpickled."""

import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import fsspec.callbacks
import ml_dtypes  # gives NumPy the type bfloat16, in which safetensors may hold arrays
import numpy as np
import safetensors

from lit_het import stores, untrusted
from lit_het.errors import UserError
from lit_het.files import cache_folder, completed
from lit_het.untrusted import Malformed


@dataclasses.dataclass(frozen=True)
class Stored:
    """An array in a file.

    Attributes:
        shape: known before it is read.
        read: returns the array.
    """

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


MAX_EXPANSION, FREE_BYTES = 32, 2**28
"""The arrays of an ``.npz`` may have so many times the bytes of the file, and so many more; numbers that were trained
hardly shrink when they are compressed."""

MAX_NAME_CHARACTERS = 500
"""Arrays with longer names are refused."""

MAX_INDEX_BYTES = 2**24
"""A larger ``model.safetensors.index.json`` is refused."""

MAX_FILES = 1000
"""An index that lists more files is refused."""

Arrays: TypeAlias = Mapping[str, Stored]
# Told of so many more bytes, of so many in all.
Advance: TypeAlias = Callable[[int, int], None]


def fetch(address: str, names: tuple[str, ...] = (), advance: Advance = lambda count, total: None) -> Path:
    """Returns a local path for an address, after downloading what is not here.

    Args:
        address: a local path or an address that fsspec knows: ``gs://``, ``hf://``, ``https://`` and others.
        names: of files to take from a folder, where they exist; none takes a file.
        advance: see `Advance`.

    Raises:
        UserError: there is nothing, or no way to reach it.
    """
    if "://" not in address:
        if not Path(address).exists():
            raise UserError(f"{address} does not exist; give a file, a folder or an address such as hf://owner/model")
        return Path(address)
    try:
        filesystem, path = stores.filesystem(address)
        paths = [found for name in names if filesystem.exists(found := f"{path}/{name}")] if names else [path]
        folder = cache_folder("downloads") / hashlib.sha256(address.encode()).hexdigest()[:16]
        for remote in paths:
            _download(filesystem, remote, folder / remote.rsplit("/", 1)[-1], advance)
    except (ImportError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{address} cannot be read ({type(error).__name__}: {reason})") from error
    return folder if names else folder / path.rsplit("/", 1)[-1]


def open_npz(path: Path, subtree: str = "") -> dict[str, Stored]:
    """Returns the arrays of an ``.npz`` file, or those below ``subtree`` without its name.

    Raises:
        UserError: it is no such file, holds nothing there, or holds pickled objects.
    """
    try:
        headers = untrusted.read_npz_headers(path)
        if sum(header.nbytes for header in headers.values()) > MAX_EXPANSION * path.stat().st_size + FREE_BYTES:
            raise Malformed(f"its arrays have more than {MAX_EXPANSION} times as many bytes as the file")
    except (OSError, Malformed) as error:
        raise UserError(f"{path} is not a readable .npz file: {error}") from error
    prefix = f"{subtree}/" if subtree else ""
    arrays = {
        name.removeprefix(prefix): Stored(header.shape, functools.partial(_read_npy, path, name))
        for name, header in headers.items()
        if name.startswith(prefix)
    }
    if not arrays:
        check_names(headers, path)
        tops = ", ".join(sorted({name.split("/")[0] for name in headers})[:8])
        raise UserError(f"{path} holds nothing under {subtree!r}; its top level is {tops or 'empty'}")
    return checked(arrays, path)


def checked(arrays: dict[str, Stored], path: Path) -> dict[str, Stored]:
    """Returns arrays whose names fit into a line and whose shapes hold numbers, so that no size exceeds the file's.

    Raises:
        UserError: others.
    """
    check_names(arrays, path)
    for name, stored in arrays.items():
        if 0 in stored.shape:
            raise UserError(f"{path}: {name} of shape {stored.shape} holds nothing; is the file whole?")
    return arrays


def check_names(names: Iterable[str], path: Path) -> None:
    """Refuses names that do not fit into a line, with a `UserError`."""
    for name in names:
        if not name.isprintable() or len(name) > MAX_NAME_CHARACTERS:
            raise UserError(f"{path} holds an array of the name {name!r:.100}; that is no name of a parameter")


def safetensors_names(folder: Path) -> tuple[str, ...]:
    """Returns the names of the files that hold a folder's arrays: one, or those that its index lists.

    Raises:
        UserError: the index is broken, or lists files outside the folder.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return ("model.safetensors",)
    try:
        names = sorted(map(str, set(untrusted.read_json(index, MAX_INDEX_BYTES)["weight_map"].values())))
    except (OSError, Malformed, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is no index of safetensors ({type(error).__name__}: {error})") from error
    if outside := [name for name in names if not re.fullmatch(r"[^/\\\0-\x1f]{1,200}\.safetensors", name)]:
        raise UserError(f"{index} lists {outside[0]!r:.100}, which is no file of safetensors in its folder")
    if not 0 < len(names) <= MAX_FILES:
        raise UserError(f"{index} lists {len(names):,} files, not 1 to {MAX_FILES:,}")
    return tuple(names)


def open_safetensors(folder: Path) -> dict[str, Stored]:
    """Returns the arrays of a folder's ``model.safetensors``, or of the files that its index names.

    Raises:
        UserError: files are missing or broken.
    """
    arrays: dict[str, Stored] = {}
    for name in safetensors_names(folder):
        path = folder / name
        try:
            with path.open("rb") as file:
                headers, _ = untrusted.parse_safetensors_header(functools.partial(_bytes, file), path.stat().st_size)
        except (OSError, Malformed) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
        for key, header in headers.items():
            arrays[key] = Stored(header.shape, functools.partial(_read_tensor, path, key))
        checked(arrays, path)
    return arrays


def _bytes(file: BinaryIO, offset: int, count: int) -> bytes:
    file.seek(offset)
    return file.read(count)


def _read_tensor(path: Path, key: str) -> np.ndarray:
    try:
        # Opened anew: pages of a file that stays mapped would count as memory of ours, all of it in the end.
        with safetensors.safe_open(path, framework="numpy") as file:
            return file.get_tensor(key)
    except Exception as error:  # also those of NumPy, which does not know all types
        raise UserError(f"{key} in {path} cannot be read: {type(error).__name__}: {error}") from error


def _read_npy(path: Path, name: str) -> np.ndarray:
    try:
        array = untrusted.read_npz_array(path, name)
    except (OSError, Malformed) as error:
        raise UserError(f"{name} in {path} cannot be read: {error}") from error
    # NumPy knows no bfloat16: such arrays come back as two bytes without a meaning.
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.dtype("V2") else array


class _Progress(fsspec.callbacks.Callback):
    def __init__(self, advance: Advance):
        super().__init__()
        self.advance = advance

    def relative_update(self, inc: int = 1) -> None:
        self.advance(inc, self.size or 0)


def _download(filesystem: Any, remote: str, local: Path, advance: Advance) -> None:
    if local.exists():
        return
    local.parent.mkdir(parents=True, exist_ok=True)
    with completed(local) as partial:
        filesystem.get_file(remote, str(partial), callback=_Progress(advance))
