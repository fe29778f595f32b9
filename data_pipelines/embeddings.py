"""Embeddings of a locked tower, computed once: a folder with one safetensors file for each shard of images.

A file is named after its shard and what lies in it: shards and embeddings may move, and a shard that was written again
has none. It holds ``embeddings [samples crops size]`` in the order of the shard, not-a-number where an image was
broken, and ``keys [samples bytes]``, UTF-8 filled up with zeros. ``embeddings.json`` tells what they were made with.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal, get_args

import ml_dtypes  # gives NumPy the type bfloat16
import numpy as np
import safetensors.numpy
from jaxtyping import Float

from lit_het.data_pipelines import storage
from lit_het.data_pipelines.index import ShardSummary
from lit_het.data_pipelines.shards import IMAGE
from lit_het.data_pipelines.storage import Reader, Span, Unreadable, readable
from lit_het.data_pipelines.tables import ShardTable
from lit_het.data_pipelines.transforms import Training
from lit_het.errors import UserError
from lit_het.untrusted import parse_json, parse_safetensors_header

EMBEDDING = "embedding"
"""The kind of member that stands for a stored embedding, which lies in another file than the image."""

Precision = Literal["float32", "bfloat16", "float16"]

_DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_RECIPE_FILE = "embeddings.json"
_VERSION = 1

MAX_HEADER_BYTES = 2**20
"""A file of embeddings with a longer header is refused: it declares two arrays."""

MAX_SIZE, MAX_CROPS = 2**20, 2**16
"""What numbers an embedding and embeddings an image may have."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What embeddings were made with.

    Attributes:
        tower: fingerprint of the image tower.
        images: how images became squares, see `describe`.
        size: of an embedding; of the members of an ensemble side by side.
        num_crops: K, random crops of each image; 0 for the image as evaluation sees it.
        dtype: as they are stored.
        seed: of the crops.
        version: of the format.
    """

    tower: str
    images: dict[str, Any]
    size: int
    num_crops: int
    dtype: Precision
    seed: int
    version: int = _VERSION

    @property
    def fingerprint(self) -> str:
        """Tells recipes apart."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Returns the text of ``embeddings.json``."""
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n"

    @staticmethod
    def from_json(content: bytes) -> "Recipe":
        """Returns the recipe in ``embeddings.json``.

        Raises:
            ValueError: there is none, or a field is missing, unknown or out of range.
        """
        fields = parse_json(content)
        names = {field.name for field in dataclasses.fields(Recipe)}
        if not isinstance(fields, dict) or set(fields) != names:
            raise ValueError(f"it is no object with the fields {', '.join(sorted(names))}")
        is_whole = all(type(fields[name]) is int for name in ("size", "num_crops", "seed"))
        if not is_whole or not (1 <= fields["size"] <= MAX_SIZE and 0 <= fields["num_crops"] <= MAX_CROPS):
            raise ValueError("size, num_crops or seed is no such number")
        if not isinstance(fields["tower"], str) or not isinstance(fields["images"], dict):
            raise ValueError("tower is no text, or images no object")
        if fields["dtype"] not in get_args(Precision) or fields["version"] != _VERSION:
            raise ValueError("dtype or version is unknown")
        return Recipe(**fields)


def describe(training: Training, image_size: int, *, random: bool) -> dict[str, Any]:
    """Returns in JSON's types how images become squares, in training (``random``) or in evaluation."""
    changes: list[Any] = [*([] if training.crop is None else [training.crop]), *training.augmentations]
    return {
        "image_size": image_size,
        "preprocessing": dataclasses.asdict(training.preprocessing),
        "augmentations": [
            {"type": type(change).__name__, **dataclasses.asdict(change)} for change in changes if random
        ],
    }


class EmbeddingFolder:
    """A folder to write embeddings to, by any number of processes, each for shards of its own.

    Raises:
        UserError: it holds embeddings of another recipe, or cannot be written to.
    """

    def __init__(self, address: str, recipe: Recipe):
        self.address, self.recipe = address.rstrip("/"), recipe
        path = f"{self.address}/{_RECIPE_FILE}"
        if storage.exists(path):
            changed = _differences(dataclasses.asdict(_read_recipe(self.address)), dataclasses.asdict(recipe))
            if changed:
                field, (before, now) = next(iter(changed.items()))
                raise UserError(
                    f"{address} holds embeddings with {field} = {before}, not {now}; choose another --output"
                )
            return
        try:
            storage.write(path, recipe.to_json().encode())
        except Exception as error:  # of a store, in its client's words
            raise UserError(
                f"{address} cannot be written ({storage.reason(error)}); choose another --output"
            ) from error

    def has(self, shard: ShardSummary) -> bool:
        """Returns whether the embeddings of a shard are all there."""
        return storage.exists(_path_of(self.address, shard))

    def write(self, table: ShardTable, embeddings: Float[np.ndarray, "n crops d"]) -> None:
        """Writes the embeddings of a shard's images; nobody sees half of a file.

        Raises:
            UserError: a number is too large for the type, or the folder cannot be written to.
        """
        with np.errstate(over="ignore"):
            stored = embeddings.astype(np.dtype(self.recipe.dtype))
        if np.isinf(stored).any():
            raise UserError(f"an embedding of {table.address} is beyond {self.recipe.dtype}; take --dtype bfloat16")
        keys = table.keys[table.has([IMAGE])]
        arrays = {"embeddings": stored, "keys": keys.view(np.uint8).reshape(len(keys), keys.dtype.itemsize)}
        content = safetensors.numpy.save(arrays, {"recipe": self.recipe.fingerprint})
        try:
            storage.write(_path_of(self.address, table), content)
        except Exception as error:  # of a store, in its client's words
            raise UserError(f"{self.address} cannot be written ({storage.reason(error)}); then start again") from error


class StoredEmbeddings:
    """What a tower once made of images, in the place of images (`lit_het.data_pipelines.batches.Views`).

    Args:
        address: of the folder.
        images: how this run makes squares of images, see `describe`.

    Raises:
        UserError: there is no such folder, or its images were made otherwise.
    """

    member, field = EMBEDDING, "image_embedding"

    def __init__(self, address: str, images: dict[str, Any]):
        self.address = address.rstrip("/")
        self.recipe = _read_recipe(self.address)
        self._dtype = np.dtype(self.recipe.dtype)
        self._reader = Reader()
        changed = _differences(self.recipe.images, images)
        if changed:
            field, (theirs, ours) = next(iter(changed.items()))
            raise UserError(
                f"{address} was made with {field} = {theirs}, this run has {ours}; make them equal,"
                " or embed again into another folder"
            )

    def check_tower(self, fingerprint: str) -> None:
        """Refuses embeddings of another tower.

        Raises:
            UserError: they are.
        """
        if fingerprint != self.recipe.tower:
            raise UserError(
                f"{self.address} was made by another image tower ({self.recipe.tower}) than this run's"
                f" ({fingerprint}); embed again into another folder"
            )

    def attach(self, table: ShardTable) -> ShardTable:
        """Adds the kind `EMBEDDING` to what is known of a shard.

        Raises:
            UserError: the shard has no embeddings here, or not of this recipe.
        """
        path = _path_of(self.address, table)
        has = table.has([IMAGE])
        shape = [int(has.sum()), max(1, self.recipe.num_crops), self.recipe.size]
        stride = shape[1] * shape[2] * self._dtype.itemsize
        offsets = np.full(len(has), -1, np.int64)
        offsets[has] = self._start_of_rows(path, table, shape) + stride * np.arange(shape[0])
        return dataclasses.replace(
            table,
            offsets={**table.offsets, EMBEDDING: offsets},
            sizes={**table.sizes, EMBEDDING: np.where(has, stride, 0)},
            elsewhere={**table.elsewhere, EMBEDDING: path},
        )

    def zeros(self, count: int) -> np.ndarray:
        """Embeddings of no images."""
        return np.zeros((count, self.recipe.size), self._dtype)

    def read(self, content: bytes, generator: np.random.Generator | None) -> np.ndarray:
        """Returns one embedding of a sample, of a random crop where there are several.

        Raises:
            Unreadable: its image was broken.
        """
        crops = np.frombuffer(content, self._dtype).reshape(-1, self.recipe.size)
        row = crops[0 if generator is None or len(crops) == 1 else generator.integers(len(crops))]
        if not np.isfinite(row).all():
            raise Unreadable("no embedding", "the image was broken when it was embedded")
        return row

    def _start_of_rows(self, path: str, table: ShardTable, shape: list[int]) -> int:
        """Returns where embeddings of the expected shape begin in a file, which may be anything."""
        try:
            arrays, metadata = parse_safetensors_header(functools.partial(self._bytes, path), storage.size(path))
            rows, made_by = arrays["embeddings"], metadata["recipe"]
        except (UserError, Unreadable, ValueError, KeyError, TypeError) as error:
            message = f"{path}: cannot be read ({storage.reason(error)}); remove it and run lit-het embed"
            if not storage.exists(path):
                message = (
                    f"{table.address}: has no embeddings in {self.address}, or changed since then; run lit-het embed"
                )
            raise UserError(message) from error
        if list(rows.shape) != shape or _DTYPES.get(rows.dtype) != self._dtype:
            raise UserError(
                f"{path}: holds {list(rows.shape)} {rows.dtype}, not {shape} {self._dtype}; remove it and run"
                " lit-het embed"
            )
        if made_by != self.recipe.fingerprint:
            raise UserError(f"{path}: was not made as {_RECIPE_FILE} beside it says; remove it and run lit-het embed")
        return rows.start

    def _bytes(self, path: str, offset: int, size: int) -> bytes:
        if size > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {size:,} bytes")
        (content,) = self._reader.read([Span(path, offset, size)])
        return readable(content)


def _path_of(folder: str, shard: ShardTable | ShardSummary) -> str:
    name = shard.address.rpartition("/")[2].removesuffix(".tar")
    return f"{folder}/{name}-{shard.digest}.safetensors"


def _read_recipe(address: str) -> Recipe:
    path = f"{address}/{_RECIPE_FILE}"
    try:
        return Recipe.from_json(storage.read_whole(path))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({storage.reason(error)}); lit-het embed writes it") from error


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[str, str]]:
    """Returns the dotted fields in which two JSON objects differ, with the beginnings of both values."""
    found: dict[str, tuple[str, str]] = {}
    for name in {**theirs, **ours}:
        one, other = theirs.get(name), ours.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            found |= _differences(one, other, f"{prefix}{name}.")
        elif one != other:
            found[f"{prefix}{name}"] = str(one)[:200], str(other)[:200]
    return found
