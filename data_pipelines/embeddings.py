"""Embeddings of a locked tower, computed once and stored: one safetensors file per shard of images or captions.

A file is named after its shard and the shard's digest. So shards and embeddings may move, and a shard that was
rewritten has no embeddings. A file holds ``embeddings [samples views size]`` in the order of the shard and ``keys
[samples bytes]`` (UTF-8, padded with zeros). The views of an image are its crops, those of a text the captions of the
sample, NaN where there are fewer or the sample was broken. In place of the pooled embedding of an image all tokens of
its tower, one after the other, or the logits of a classifier may be stored. ``embeddings.json`` records the recipe.
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

from lit_het.data_pipelines.images.transforms import Training
from lit_het.data_pipelines.shards import storage
from lit_het.data_pipelines.shards.index import ShardSummary
from lit_het.data_pipelines.shards.storage import Reader, Span, Unreadable, content_or_raise
from lit_het.data_pipelines.shards.tables import ShardTable
from lit_het.data_pipelines.shards.writing import IMAGE
from lit_het.data_pipelines.texts.captions_config import TextPlace
from lit_het.errors import OtherEmbeddings, UserError
from lit_het.untrusted import parse_json, parse_safetensors_header

EMBEDDING = "image_embedding"
"""The field of a `Batch` with stored embeddings of images, and the kind of member that they are."""

Precision = Literal["float32", "bfloat16", "float16"]

_DTYPES: dict[str, Any] = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
_RECIPE_FILE = "embeddings.json"
_VERSION = 2
_LATER_FIELDS = {"num_tokens": 0, "logits": False}

MAX_HEADER_BYTES = 2**20
"""The longest accepted header of an embedding file, which declares two arrays."""

MAX_SIZE, MAX_CROPS = 2**24, 2**16
"""The largest accepted size of an embedding or of all tokens of an image, and number of crops per image."""


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How embeddings were computed.

    Attributes:
        tower: fingerprint of the tower, and for texts of its tokenizer, for logits of the head.
        inputs: the preprocessing of the images, see `describe`, or the place of the captions, see `describe_captions`.
        size: of an embedding; for an ensemble, of its members' embeddings concatenated; for tokens, of all of them; of
            logits the number of classes.
        num_crops: K, random crops of each image; 0 uses the evaluation preprocessing; 0 for texts.
        dtype: of the stored embeddings.
        seed: of the crops.
        num_tokens: tokens of an image, where these are stored; 0 for pooled embeddings.
        logits: whether the logits of a classifier are stored.
        version: of the format.
    """

    tower: str
    inputs: dict[str, Any]
    size: int
    num_crops: int
    dtype: Precision
    seed: int
    num_tokens: int = 0
    logits: bool = False
    version: int = _VERSION

    @property
    def fingerprint(self) -> str:
        """Identifies the recipe."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    @property
    def kind(self) -> str:
        """What is stored, in words."""
        return "tokens" if self.num_tokens else "logits" if self.logits else "pooled embeddings"

    @property
    def is_of_texts(self) -> bool:
        """Whether captions were embedded."""
        return "captions" in self.inputs

    def to_json(self) -> str:
        """Returns the text of ``embeddings.json``."""
        fields = dataclasses.asdict(self)
        for name in _LATER_FIELDS:
            if not fields[name]:  # so that the fingerprint of pooled embeddings is that of earlier versions
                del fields[name]
        return json.dumps(fields, indent=2, sort_keys=True) + "\n"

    @staticmethod
    def from_json(content: bytes) -> "Recipe":
        """Returns the recipe in ``embeddings.json``.

        Raises:
            ValueError: it is not a recipe, or a field is missing, unknown or out of range.
        """
        fields = parse_json(content)
        names = {field.name for field in dataclasses.fields(Recipe)}
        if not isinstance(fields, dict) or {*_LATER_FIELDS, *fields} != names:
            raise ValueError(f"it is not an object with the fields {', '.join(sorted(names))}")
        fields = {**_LATER_FIELDS, **fields}
        are_integers = all(type(fields[name]) is int for name in ("size", "num_crops", "seed", "num_tokens"))
        if not are_integers or not (1 <= fields["size"] <= MAX_SIZE and 0 <= fields["num_crops"] <= MAX_CROPS):
            raise ValueError("size, num_crops, seed or num_tokens is not an integer in range")
        if fields["num_tokens"] < 0 or (fields["num_tokens"] and fields["size"] % fields["num_tokens"]):
            raise ValueError("num_tokens does not divide size")
        if type(fields["logits"]) is not bool or (fields["logits"] and fields["num_tokens"]):
            raise ValueError("logits is not true or false, or those of tokens")
        if not isinstance(fields["tower"], str) or not isinstance(fields["inputs"], dict):
            raise ValueError("tower is not a string, or inputs is not an object")
        if isinstance(made_by := fields["inputs"].get("preprocessing"), dict):
            made_by.setdefault("transparency", "white")  # of embeddings from before there was a choice
        if fields["dtype"] not in get_args(Precision) or fields["version"] != _VERSION:
            raise ValueError("dtype or version is unknown")
        return Recipe(**fields)


def describe(training: Training, image_size: int, *, random: bool) -> dict[str, Any]:
    """Returns the preprocessing of training (``random``) or evaluation images as JSON types."""
    preprocessing = dataclasses.asdict(training.preprocessing)
    if training.preprocessing.patches is None:  # so that embeddings of earlier versions stay valid
        del preprocessing["patches"]
    changes: list[Any] = [*([] if training.crop is None else [training.crop]), *training.augmentations]
    return {
        "image_size": image_size,
        "preprocessing": preprocessing,
        "augmentations": [
            {"type": type(change).__name__, **dataclasses.asdict(change)} for change in changes if random
        ],
    }


def describe_captions(place: TextPlace) -> dict[str, Any]:
    """Returns where the captions of a sample stand, as JSON types."""
    found: dict[str, Any] = {"captions": ",".join(place.weights), "caption_unit": place.unit}
    if place.language is None:  # so that what earlier versions wrote stays equal
        return found
    return found | {"language": {**dataclasses.asdict(place.language), "only": [*place.language.only]}}


class EmbeddingFolder:
    """Writes embeddings to a folder; several processes may write different shards at once."""

    def __init__(self, address: str, recipe: Recipe):
        self.address, self.recipe = address.rstrip("/"), recipe
        path = f"{self.address}/{_RECIPE_FILE}"
        if storage.exists(path):
            theirs = _read_recipe(self.address)
            if theirs.kind != recipe.kind:
                raise OtherEmbeddings(f"{address} holds {theirs.kind}, not {recipe.kind}")
            changed = _differences(dataclasses.asdict(theirs), dataclasses.asdict(recipe))
            if changed:
                field, (before, now) = next(iter(changed.items()))
                # Fingerprints of towers say nothing to people. A head decides what its towers return.
                of_tower, other = "for another model or another --task.head", f"with {field} = {before}, not {now}"
                raise OtherEmbeddings(f"{address} holds embeddings made {of_tower if field == 'tower' else other}")
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

    def write(self, table: ShardTable, embeddings: Float[np.ndarray, "n views d"], member: str = IMAGE) -> None:
        """Writes the embeddings of a shard atomically.

        Args:
            table: of the shard.
            embeddings: of the samples that have the member, in order.
            member: the kind of member that was embedded.
        """
        with np.errstate(over="ignore"):
            stored = embeddings.astype(np.dtype(self.recipe.dtype))
        # NaN marks broken images on purpose; infinity can only come from the conversion.
        if np.isinf(stored).any():
            raise UserError(f"an embedding of {table.address} overflows {self.recipe.dtype}; use --dtype bfloat16")
        keys = table.keys[table.has([member])]
        arrays = {"embeddings": stored, "keys": keys.view(np.uint8).reshape(len(keys), keys.dtype.itemsize)}
        content = safetensors.numpy.save(arrays, {"recipe": self.recipe.fingerprint})
        try:
            storage.write(_path_of(self.address, table), content)
        except Exception as error:  # clients of stores raise their own types
            raise UserError(
                f"{self.address} cannot be written ({storage.reason(error)}); fix that and start again"
            ) from error


class StoredEmbeddings:
    """Stored embeddings of a tower, read in place of images (`lit_het.data_pipelines.batches.Input`) or beside others.

    Args:
        address: of the folder.
        inputs: the preprocessing of this run, see `describe` and `describe_captions`; None takes any.
        of: the kind of member that was embedded.
        field: of a `Batch` that is filled.

    Attributes:
        member: the kind of member of the embeddings, which lie in other files than the images and captions.
        is_of_texts: whether captions were embedded.
    """

    def __init__(self, address: str, inputs: dict[str, Any] | None, of: str = IMAGE, field: str = EMBEDDING):
        self.address = address.rstrip("/")
        self.recipe = _read_recipe(self.address)
        self.field = self.member = field
        self.is_of_texts, self._of = of != IMAGE, of
        self._dtype = np.dtype(self.recipe.dtype)
        self._reader = Reader()
        if self.recipe.is_of_texts != self.is_of_texts:
            held, wanted, flag = ("images", "captions", " --texts") if self.is_of_texts else ("captions", "images", "")
            raise UserError(
                f"{address} holds embeddings of {held}, and those of {wanted} are read here; write them to another "
                f"folder with lit-het embed{flag}"
            )
        changed = _differences(self.recipe.inputs, self.recipe.inputs if inputs is None else inputs)
        if changed:
            field, (theirs, ours) = next(iter(changed.items()))
            raise UserError(
                f"{address} was made with {field} = {theirs}, this run has {ours}; make them equal,"
                " or embed again into another folder"
            )

    def check_tower(self, fingerprint: str) -> None:
        """Checks that the embeddings come from this run's tower."""
        if fingerprint != self.recipe.tower:
            side = "text" if self.is_of_texts else "image"
            raise UserError(
                f"{self.address} was computed by {side} tower {self.recipe.tower} ({self.recipe.kind}), this run has "
                f"{fingerprint}; embed again into another folder"
            )

    def require_one_of_each_image(self) -> None:
        """Checks that what is stored is one pooled embedding of each image, as similarities need it."""
        if self.recipe.num_crops or self.recipe.kind != "pooled embeddings":
            held = "random crops" if self.recipe.num_crops else self.recipe.kind
            raise UserError(
                f"{self.address} holds {held}; similarities need one embedding of each image: lit-het embed without "
                "--crops, --tokens and --logits"
            )

    def attach(self, table: ShardTable) -> ShardTable:
        """Returns the table of a shard with the embeddings' kind of member added."""
        path = _path_of(self.address, table)
        has = table.has([self._of])
        start, (count, views, size) = self._rows(path, table, int(has.sum()))
        stride = views * size * self._dtype.itemsize
        offsets = np.full(len(has), -1, np.int64)
        offsets[has] = start + stride * np.arange(count)
        return dataclasses.replace(
            table,
            offsets={**table.offsets, self.member: offsets},
            sizes={**table.sizes, self.member: np.where(has, stride, 0)},
            elsewhere={**table.elsewhere, self.member: path},
        )

    def zeros(self, count: int) -> np.ndarray:
        """Placeholder embeddings for invalid rows."""
        return np.zeros((count, self.recipe.size), self._dtype)

    def read(self, content: bytes, generator: np.random.Generator | None) -> np.ndarray:
        """Returns one embedding of a sample: of a random crop if there are several.

        Raises:
            Unreadable: its image was broken.
        """
        crops = len(content) // (self.recipe.size * self._dtype.itemsize)
        # The same generator as for images: the crop is a function of the seed and the position.
        return self.view(content, 0 if generator is None or crops == 1 else int(generator.integers(crops)))

    def view(self, content: bytes, number: int) -> np.ndarray:
        """Returns the embedding of one view of a sample.

        Raises:
            Unreadable: there is none.
        """
        views = np.frombuffer(content, self._dtype).reshape(-1, self.recipe.size)
        if number >= len(views) or not np.isfinite(views[number]).all():
            raise Unreadable("no embedding", "the sample was broken when it was embedded, or has changed")
        return views[number]

    def _rows(self, path: str, table: ShardTable, count: int) -> tuple[int, list[int]]:
        """Returns the offset and the shape of the embeddings in a file, after checking its untrusted header."""
        try:
            arrays, metadata = parse_safetensors_header(functools.partial(self._bytes, path), storage.size(path))
            rows, made_by = arrays["embeddings"], metadata["recipe"]
        except (UserError, Unreadable, ValueError, KeyError, TypeError) as error:
            message = f"{path}: cannot be read ({storage.reason(error)}); remove it and embed its shard again"
            if not storage.exists(path):
                message = (
                    f"{table.address}: has no embeddings in {self.address}, or changed after they were computed;"
                    " run lit-het embed"
                )
            raise UserError(message) from error
        # The captions of a sample are as many as the shard's most.
        is_text = self.is_of_texts and len(rows.shape) == 3 and 1 <= rows.shape[1] <= MAX_CROPS
        views = rows.shape[1] if is_text else max(1, self.recipe.num_crops)
        shape = [count, views, self.recipe.size]
        if list(rows.shape) != shape or _DTYPES.get(rows.dtype) != self._dtype:
            raise UserError(
                f"{path}: holds {list(rows.shape)} {rows.dtype}, not {shape} {self._dtype}; remove it and"
                " embed its shard again"
            )
        if made_by != self.recipe.fingerprint:
            raise UserError(
                f"{path}: was made with another recipe than {_RECIPE_FILE}; remove it and embed its shard again"
            )
        return rows.start, shape

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
