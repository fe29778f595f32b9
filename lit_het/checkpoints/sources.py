"""Files of arrays that other programs wrote, read one array at a time; nothing is ever unpickled."""

import dataclasses
import functools
import hashlib
import json
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import fsspec.callbacks
import ml_dtypes  # gives NumPy the type bfloat16, in which safetensors may hold arrays
import numpy as np
import safetensors

from lit_het import stores
from lit_het.errors import UserError
from lit_het.files import cache_folder, completed


@dataclasses.dataclass(frozen=True)
class Stored:
    """An array in a file.

    Attributes:
        shape: known before it is read.
        read: returns the array.
    """

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


# What NumPy raises where an archive is damaged.
_BROKEN = (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error)
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
        with zipfile.ZipFile(path) as archive:
            found = {name.removesuffix(".npy"): _npy_shape(archive, name) for name in archive.namelist()}
    except _BROKEN as error:
        raise UserError(f"{path} is not a readable .npz file: {error}") from error
    prefix = f"{subtree}/" if subtree else ""
    arrays = {
        name.removeprefix(prefix): Stored(shape, lambda name=name: _read_npy(path, name))
        for name, shape in found.items()
        if name.startswith(prefix)
    }
    if not arrays:
        tops = ", ".join(sorted({name.split("/")[0] for name in found}))
        raise UserError(f"{path} holds nothing under {subtree!r}; its top level is {tops}")
    return arrays


def safetensors_names(folder: Path) -> tuple[str, ...]:
    """Returns the names of the files that hold a folder's arrays: one, or those that its index lists.

    Raises:
        UserError: the index is broken, or lists files outside the folder.
    """
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return ("model.safetensors",)
    try:
        names = sorted(map(str, set(json.loads(index.read_text("utf-8"))["weight_map"].values())))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is no index of safetensors ({type(error).__name__}: {error})") from error
    if outside := [name for name in names if Path(name).name != name]:
        raise UserError(f"{index} lists {outside[0]!r}, which is not in its folder")
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
            with safetensors.safe_open(path, framework="numpy") as file:
                shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        except (OSError, safetensors.SafetensorError) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
        for key, shape in shapes.items():
            arrays[key] = Stored(shape, functools.partial(_read_tensor, path, key))
    return arrays


def _read_tensor(path: Path, key: str) -> np.ndarray:
    # Opened anew: pages of a file that stays mapped would count as memory of ours, all of it in the end.
    with safetensors.safe_open(path, framework="numpy") as file:
        return file.get_tensor(key)


def _npy_shape(archive: zipfile.ZipFile, name: str) -> tuple[int, ...]:
    with archive.open(name) as file:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(file)
    if dtype.hasobject:
        raise ValueError(f"{name} holds pickled objects, which are never loaded")
    return shape


def _read_npy(path: Path, name: str) -> np.ndarray:
    try:
        with np.load(path) as file:
            array = file[name]
    except _BROKEN as error:
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
