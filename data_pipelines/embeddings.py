"""Embeddings of a locked tower, computed once and stored: one safetensors file per shard of images.

A file is named after its shard and the shard's digest. So shards and embeddings may move, and a shard that was
rewritten has no embeddings. A file holds ``embeddings [samples crops size]`` in the order of the shard (NaN where an
image was broken) and ``keys [samples bytes]`` (UTF-8, padded with zeros). ``embeddings.json`` records the recipe.
"""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal, get_args

import ml_dtypes  # registers bfloat16 with NumPy
import numpy as np
import safetensors.numpy
from jaxtyping import Float

from lit_het.data_pipelines import storage
from lit_het.data_pipelines.index import ShardSummary
from lit_het.data_pipelines.shards import IMAGE
from lit_het.data_pipelines.storage import Reader, Span, Unreadable, content_or_raise
from lit_het.data_pipelines.tables import ShardTable
from lit_het.data_pipelines.transforms import Training
from lit_het.errors import UserError
from lit_het.untrusted import parse_json, parse_safetensors_header

EMBEDDING = "embedding"
"""The member kind of a stored embedding, which lies in another file than the image."""

Precision = Literal["float32", "bfloat16", "float16"]

_DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_RECIPE_FILE = "embeddings.json"
_VERSION = 1

MAX_HEADER_BYTES = 2**20
"""The longest accepted header of an embedding file, which declares two arrays."""

MAX_SIZE, MAX_CROPS = 2**20, 2**16
"""The largest accepted size of an embedding, and number of crops per image."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How embeddings were computed.

    Attributes:
        tower: fingerprint of the image tower.
        images: the preprocessing of the images, see `describe`.
        size: of an embedding; for an ensemble, of its members' embeddings concatenated.
        num_crops: K, random crops of each image; 0 uses the evaluation preprocessing.
        dtype: of the stored embeddings.
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
        """Identifies the recipe."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """Returns the text of ``embeddings.json``."""
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n"

    @staticmethod
    def from_json(content: bytes) -> "Recipe":
        """Returns the recipe in ``embeddings.json``.

        Raises:
            ValueError: it is not a recipe, or a field is missing, unknown or out of range.
        """
        fields = parse_json(content)
        names = {field.name for field in dataclasses.fields(Recipe)}
        if not isinstance(fields, dict) or set(fields) != names:
            raise ValueError(f"it is not an object with the fields {', '.join(sorted(names))}")
        are_integers = all(type(fields[name]) is int for name in ("size", "num_crops", "seed"))
        if not are_integers or not (1 <= fields["size"] <= MAX_SIZE and 0 <= fields["num_crops"] <= MAX_CROPS):
            raise ValueError("size, num_crops or seed is not an integer in range")
        if not isinstance(fields["tower"], str) or not isinstance(fields["images"], dict):
            raise ValueError("tower is not a string, or images is not an object")
        if fields["dtype"] not in get_args(Precision) or fields["version"] != _VERSION:
            raise ValueError("dtype or version is unknown")
        return Recipe(**fields)


def describe(training: Training, image_size: int, *, random: bool) -> dict[str, Any]:
    """Returns the preprocessing of training (``random``) or evaluation images as JSON types."""
    changes: list[Any] = [*([] if training.crop is None else [training.crop]), *training.augmentations]
    return {
        "image_size": image_size,
        "preprocessing": dataclasses.asdict(training.preprocessing),
        "augmentations": [
            {"type": type(change).__name__, **dataclasses.asdict(change)} for change in changes if random
        ],
    }


class EmbeddingFolder:
    """Writes embeddings to a folder; several processes may write different shards at once.

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
        except Exception as error:  # clients of stores raise their own types
            raise UserError(
                f"{address} cannot be written ({storage.reason(error)}); choose another --output"
            ) from error

    def has(self, shard: ShardSummary) -> bool:
        """Returns whether the embeddings of a shard were written."""
        return storage.exists(_path_of(self.address, shard))

    def write(self, table: ShardTable, embeddings: Float[np.ndarray, "n crops d"]) -> None:
        """Writes the embeddings of a shard's images atomically.

        Raises:
            UserError: a value overflows the dtype, or the folder cannot be written to.
        """
        with np.errstate(over="ignore"):
            stored = embeddings.astype(np.dtype(self.recipe.dtype))
        # NaN marks broken images on purpose; infinity can only come from the conversion.
        if np.isinf(stored).any():
            raise UserError(f"an embedding of {table.address} overflows {self.recipe.dtype}; use --dtype bfloat16")
        keys = table.keys[table.has([IMAGE])]
        arrays = {"embeddings": stored, "keys": keys.view(np.uint8).reshape(len(keys), keys.dtype.itemsize)}
        content = safetensors.numpy.save(arrays, {"recipe": self.recipe.fingerprint})
        try:
            storage.write(_path_of(self.address, table), content)
        except Exception as error:  # clients of stores raise their own types
            raise UserError(
                f"{self.address} cannot be written ({storage.reason(error)}); fix that and start again"
            ) from error


class StoredEmbeddings:
    """Stored embeddings of a tower, read in place of images (`lit_het.data_pipelines.batches.ImageInput`).

    Args:
        address: of the folder.
        images: the preprocessing of this run, see `describe`.

    Raises:
        UserError: the folder has no recipe, or another preprocessing.
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
        """Checks that the embeddings come from this run's image tower.

        Raises:
            UserError: they come from another one.
        """
        if fingerprint != self.recipe.tower:
            raise UserError(
                f"{self.address} was computed by image tower {self.recipe.tower}, this run has {fingerprint};"
                " embed again into another folder"
            )

    def attach(self, table: ShardTable) -> ShardTable:
        """Returns the table of a shard with the member kind `EMBEDDING` added.

        Raises:
            UserError: the folder has no embeddings of the shard, or they were made with another recipe.
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
        """Placeholder embeddings for invalid rows."""
        return np.zeros((count, self.recipe.size), self._dtype)

    def read(self, content: bytes, generator: np.random.Generator | None) -> np.ndarray:
        """Returns one embedding of a sample: of a random crop if there are several.

        Raises:
            Unreadable: its image was broken.
        """
        crops = np.frombuffer(content, self._dtype).reshape(-1, self.recipe.size)
        # The same generator as for images: the crop is a function of the seed and the position.
        row = crops[0 if generator is None or len(crops) == 1 else generator.integers(len(crops))]
        if not np.isfinite(row).all():
            raise Unreadable("no embedding", "the image was broken when it was embedded")
        return row

    def _start_of_rows(self, path: str, table: ShardTable, shape: list[int]) -> int:
        """Returns the offset of the embeddings in a file, after checking its untrusted header."""
        try:
            arrays, metadata = parse_safetensors_header(functools.partial(self._bytes, path), storage.size(path))
            rows, made_by = arrays["embeddings"], metadata["recipe"]
        except (UserError, Unreadable, ValueError, KeyError, TypeError) as error:
            message = f"{path}: cannot be read ({storage.reason(error)}); remove it and run lit-het embed"
            if not storage.exists(path):
                message = (
                    f"{table.address}: has no embeddings in {self.address}, or changed after they were computed;"
                    " run lit-het embed"
                )
            raise UserError(message) from error
        if list(rows.shape) != shape or _DTYPES.get(rows.dtype) != self._dtype:
            raise UserError(
                f"{path}: holds {list(rows.shape)} {rows.dtype}, not {shape} {self._dtype}; remove it and run"
                " lit-het embed"
            )
        if made_by != self.recipe.fingerprint:
            raise UserError(
                f"{path}: was made with another recipe than {_RECIPE_FILE}; remove it and run lit-het embed"
            )
        return rows.start

    def _bytes(self, path: str, offset: int, size: int) -> bytes:
        if size > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {size:,} bytes")
        (content,) = self._reader.read([Span(path, offset, size)])
        return content_or_raise(content)


def _path_of(folder: str, shard: ShardTable | ShardSummary) -> str:
    name = shard.address.rpartition("/")[2].removesuffix(".tar")
    # The digest in the name: a shard that was written again does not find the embeddings of its old content.
    return f"{folder}/{name}-{shard.digest}.safetensors"


def _read_recipe(address: str) -> Recipe:
    path = f"{address}/{_RECIPE_FILE}"
    try:
        return Recipe.from_json(storage.read_whole(path))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({storage.reason(error)}); lit-het embed writes it") from error


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[str, str]]:
    """Returns the dotted fields in which two JSON objects differ, each with both values, truncated."""
    found: dict[str, tuple[str, str]] = {}
    for name in {**theirs, **ours}:
        one, other = theirs.get(name), ours.get(name)
        if isinstance(one, dict) and isinstance(other, dict):
            found |= _differences(one, other, f"{prefix}{name}.")
        elif one != other:
            found[f"{prefix}{name}"] = str(one)[:200], str(other)[:200]
    return found
