"""Opens array files of other programs and reads one array at a time, without ever unpickling."""

import contextlib
import dataclasses
import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import fsspec.callbacks
import ml_dtypes  # registers bfloat16 with NumPy, which safetensors files may contain
import numpy as np
import safetensors

from lit_het import untrusted
from lit_het.data_pipelines.shards import stores
from lit_het.errors import UserError
from lit_het.files import cache_folder, completed
from lit_het.paths import no_weights
from lit_het.untrusted import Malformed


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """An array in a file, not yet read.

    Attributes:
        shape: from the header of the file.
        read: reads the array and returns it.
    """

    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]


MAX_EXPANSION, FREE_BYTES = 32, 2**28
"""An ``.npz`` is refused if its arrays take more than MAX_EXPANSION times the bytes of the file plus FREE_BYTES.
Trained weights are hardly compressible, so larger ratios indicate an archive that would exhaust the memory."""

MAX_NAME_CHARACTERS = 500
"""A file with a longer array name is refused."""

MAX_INDEX_BYTES = 2**24
"""A larger ``model.safetensors.index.json`` is refused."""

MAX_FILES = 1000
"""An index with more files is refused."""

Arrays: TypeAlias = Mapping[str, StoredArray]
# Called with the number of new bytes and the total number of bytes.
Advance: TypeAlias = Callable[[int, int], None]


def fetch(address: str, names: tuple[str, ...] = (), advance: Advance = lambda count, total: None) -> Path:
    """Returns a local path for an address, after downloading files that are not in the cache.

    Args:
        address: a local path or an address of fsspec: ``gs://``, ``hf://``, ``https://`` and others.
        names: files to download from a folder if they exist there; empty if the address is a single file.
        advance: see `Advance`.
    """
    if "://" not in address:
        if not Path(address).exists():
            raise no_weights(address)
        return Path(address)
    try:
        filesystem, path = stores.filesystem(address)
        # The address is hashed: as a file name it could be too long, or lead out of the cache.
        folder = cache_folder("downloads") / hashlib.sha256(address.encode()).hexdigest()[:16]
        # Not `exists`: fsspec returns False if the store does not answer.
        optional = contextlib.suppress(FileNotFoundError) if names else contextlib.nullcontext()
        for remote, name in [(f"{path}/{name}", name) for name in names] or [(path, path.rsplit("/", 1)[-1])]:
            with optional:
                _download(filesystem, remote, folder / name, advance)
    except (ImportError, OSError) as error:
        reason = f"{type(error).__name__}: {stores.reason(error)}"
        raise UserError(f"{address} cannot be read ({reason}); check the address and the network") from error
    return folder if names else folder / path.rsplit("/", 1)[-1]


def open_npz(path: Path, subtree: str = "") -> dict[str, StoredArray]:
    """Returns the arrays of an ``.npz`` file, or only those below ``subtree``, under their names within it."""
    try:
        headers = untrusted.read_npz_headers(path)
        # Sizes are taken from the headers, before anything is unpacked.
        if sum(header.nbytes for header in headers.values()) > MAX_EXPANSION * path.stat().st_size + FREE_BYTES:
            raise Malformed(f"its arrays have more than {MAX_EXPANSION} times as many bytes as the file")
    except (OSError, Malformed) as error:
        raise UserError(f"{path} is not a readable .npz file: {error}") from error
    prefix = f"{subtree}/" if subtree else ""
    arrays = {
        name.removeprefix(prefix): StoredArray(header.shape, functools.partial(_read_npy, path, name))
        for name, header in headers.items()
        if name.startswith(prefix)
    }
    if not arrays:
        check_names(headers, path)
        tops = ", ".join(sorted({name.split("/")[0] for name in headers})[:8])
        raise UserError(f"{path} holds no arrays under {subtree!r}; its top level is {tops or 'empty'}")
    return validated(arrays, path)


def validated(arrays: dict[str, StoredArray], path: Path) -> dict[str, StoredArray]:
    """Returns the arrays after checking their names and shapes."""
    check_names(arrays, path)
    for name, stored in arrays.items():
        if 0 in stored.shape:
            raise UserError(f"{path}: {name} of shape {stored.shape} is empty; is the file complete?")
    return arrays


def check_names(names: Iterable[str], path: Path) -> None:
    """Raises a `UserError` if a name is unprintable or too long for a one-line message."""
    for name in names:
        if not name.isprintable() or len(name) > MAX_NAME_CHARACTERS:
            raise UserError(f"{path} holds an array named {name!r:.100}, which cannot be the name of a parameter")


# What torch.compile and DataParallel put before the names of all arrays, in this order from outside.
_WRAPPERS = ("_orig_mod.", "module.", "_orig_mod.")


def safetensors_names(folder: Path, name: str = "model.safetensors") -> tuple[str, ...]:
    """Returns the names of a folder's safetensors files: a single file, or those in its index."""
    index = folder / f"{name}.index.json"
    if not index.is_file():
        return (name,)
    try:
        names = sorted(map(str, set(untrusted.read_json(index, MAX_INDEX_BYTES)["weight_map"].values())))
    except (OSError, Malformed, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is not a valid safetensors index ({type(error).__name__}: {error})") from error
    if outside := [name for name in names if not re.fullmatch(r"[^/\\\0-\x1f]{1,200}\.safetensors", name)]:
        raise UserError(f"{index} lists {outside[0]!r:.100}, which is not a .safetensors file in its folder")
    if not 0 < len(names) <= MAX_FILES:
        raise UserError(f"{index} lists {len(names):,} files, not 1 to {MAX_FILES:,}")
    return tuple(names)


def open_safetensors(folder: Path, file_name: str = "model.safetensors") -> dict[str, StoredArray]:
    """Returns the arrays of a folder's safetensors file, or of the files in its index."""
    arrays: dict[str, StoredArray] = {}
    for name in safetensors_names(folder, file_name):
        path = folder / name
        if not path.exists() and (pickles := sorted(folder.glob("*.bin"))):
            raise UserError(
                f"{pickles[0]} is a pickle, which may run any code, and is not read; save the model again with "
                f"save_pretrained of a recent transformers, or OpenCLIP's save_for_hf, as {file_name}"
            )
        try:
            with path.open("rb") as file:
                headers, _ = untrusted.parse_safetensors_header(functools.partial(_bytes, file), path.stat().st_size)
        except (OSError, Malformed) as error:
            raise UserError(f"{path} cannot be read: {error}") from error
        for key, header in headers.items():
            if header.dtype.startswith("F8"):
                raise UserError(f"{path}: {key} is in float8, a quantised precision; save the model in bfloat16")
            arrays[key] = StoredArray(header.shape, functools.partial(_read_tensor, path, key))
        validated(arrays, path)
    for prefix in _WRAPPERS:
        if all(name.startswith(prefix) for name in arrays):
            arrays = {name.removeprefix(prefix): array for name, array in arrays.items()}
    return arrays


def _bytes(file: BinaryIO, offset: int, count: int) -> bytes:
    file.seek(offset)
    return file.read(count)


def _read_tensor(path: Path, key: str) -> np.ndarray:
    try:
        # The file is opened for each array: the pages of a file that stays mapped count as memory of this process, up
        # to the size of the whole file.
        with safetensors.safe_open(path, framework="numpy") as file:
            return file.get_tensor(key)
    except Exception as error:  # NumPy too raises errors, for types that it lacks
        raise UserError(f"{key} in {path} cannot be read: {type(error).__name__}: {error}") from error


def _read_npy(path: Path, name: str) -> np.ndarray:
    try:
        array = untrusted.read_npz_array(path, name)
    except (OSError, Malformed) as error:
        raise UserError(f"{name} in {path} cannot be read: {error}") from error
    # NumPy writes bfloat16 to .npz files as two bytes of no type ("V2").
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
        stores.with_retries(lambda: filesystem.get_file(remote, str(partial), callback=_Progress(advance)))
