"""Weights of other programs by one address: which format it is, what it holds, and its parameters."""

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from lit_het.checkpoints import rename
from lit_het.checkpoints.big_vision import importing as big_vision
from lit_het.checkpoints.huggingface import importing as huggingface
from lit_het.checkpoints.imported import Imported
from lit_het.checkpoints.sources import Advance, fetch, safetensors_names
from lit_het.checkpoints.vmoe import importing as vmoe
from lit_het.checkpoints.vmoe.files import shard_names
from lit_het.errors import UserError
from lit_het.towers.bert import BertConfig
from lit_het.towers.layers import ComputeType
from lit_het.towers.text import TextConfig
from lit_het.towers.vit import ViTConfig
from lit_het.types import Params

TextPooling: TypeAlias = Literal["last", "first", "mean", "max"]
_TOKENIZERS = ("spiece.model", "tokenizer.model")
# Files of a Hugging Face folder that are of use here; others are not downloaded.
_HUGGING_FACE_FILES = (
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer_config.json",
    *_TOKENIZERS,
)


def open_weights(
    address: str,
    *,
    image_size: int | None = None,
    patch_size: int | None = None,
    text_length: int | None = None,
    text_pooling: TextPooling | None = None,
    experts: Mapping[str, Any] = MappingProxyType({}),
    compute_type: ComputeType = "float32",
    advance: Advance = lambda count, total: None,
) -> Imported:
    """Returns what a file or folder of another program holds; sizes are inferred from it.

    Args:
        address: a big_vision file ``x.npz`` or a part of it, ``x.npz:img``; the path ``x`` of a V-MoE checkpoint
            ``x.index``; a Hugging Face folder. Local, or with a protocol that fsspec knows (``gs://``, ``hf://``,
            ``https://``).
        image_size: other than the source's, resamples positions.
        patch_size: other than the source's, resamples the first layer too.
        text_length: less than the source's, drops the last positions of a text tower that pools its first token.
        text_pooling: of a text tower in a big_vision file, which does not tell; None for "last".
        experts: fields of `ExpertsConfig` that a V-MoE checkpoint does not say, see `vmoe.describe`.
        compute_type: of the towers.
        advance: told of bytes that are downloaded.

    Raises:
        UserError: there is nothing, or nothing of a known format.
    """
    sizes: Any = {"image_size": image_size, "compute_type": compute_type}
    if match := re.fullmatch(r"(.*\.npz)(?::(.+))?", address):
        path = fetch(match[1], advance=advance)
        of_text: Any = {"text_length": text_length, "text_pooling": text_pooling or "last"}
        return big_vision.read(path, match[2] or "", patch_size=patch_size, **of_text, **sizes)
    if (prefix := _vmoe_prefix(address, advance)) is not None:
        found = vmoe.read(prefix, experts=experts, **sizes)
        if patch_size not in (None, found.image_tower and found.image_tower.patch_size):
            raise UserError(f"the patches of a V-MoE cannot be resampled; leave out patch_size = {patch_size}")
        return found
    folder = fetch(address, _HUGGING_FACE_FILES, advance)
    if (folder / "model.safetensors.index.json").is_file():
        fetch(address, safetensors_names(folder), advance)
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{address} is of no known format: neither a file .npz, nor a V-MoE checkpoint with an .index, nor a "
            "Hugging Face folder with a config.json"
        )
    found = huggingface.read(folder, patch_size=patch_size, text_length=text_length, **sizes)
    tokenizers = (folder / name for name in _TOKENIZERS)
    return dataclasses.replace(found, tokenizer=next((path for path in tokenizers if path.is_file()), None))


def image_tower(address: str, **options: Any) -> ViTConfig:
    """Returns the image tower that an address holds, to start from its weights; options are those of `open_weights`.

    Raises:
        UserError: it holds none.
    """
    return _tower(address, "image_tower", options)


def text_tower(address: str, **options: Any) -> TextConfig | BertConfig:
    """Returns the text tower that an address holds, to start from its weights; options are those of `open_weights`.

    Raises:
        UserError: it holds none.
    """
    return _tower(address, "text_tower", options)


def _tower(address: str, part: str, options: dict[str, Any]) -> Any:
    tower = getattr(open_weights(address, **options), part)
    if tower is None:
        raise UserError(f"{address} holds no {part.replace('_', ' ')}")
    return dataclasses.replace(tower, weights=address)


def without(found: Imported, prefixes: tuple[str, ...]) -> Imported:
    """Returns a source less the parameters whose paths begin with one of some prefixes."""
    return dataclasses.replace(found, pieces=[piece for piece in found.pieces if not piece.target.startswith(prefixes)])


def load_part(
    found: Imported,
    part: str,
    shapes: Params,
    shardings: Params | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Params:
    """Returns the parameters of a part, ``image_tower`` or ``text_tower``; arguments and errors are those of `load`."""
    pieces = [
        dataclasses.replace(piece, target=piece.target.removeprefix(f"{part}/"))
        for piece in found.pieces
        if piece.target.startswith(f"{part}/")
    ]
    return rename.load(found.arrays, pieces, shapes, shardings, advance)


def _vmoe_prefix(address: str, advance: Advance) -> Path | None:
    """Returns the local path of a V-MoE checkpoint without its ending, or None if the address is of no such thing."""
    address = address.removesuffix(".index")
    parent, _, name = address.rpartition("/")
    if "://" not in address:
        return Path(address) if Path(f"{address}.index").is_file() else None
    folder = fetch(parent, (f"{name}.index",), advance)
    if not (folder / f"{name}.index").is_file():
        return None
    fetch(parent, shard_names(folder / name), advance)
    return folder / name
