"""Opens weights of other programs by address, in any supported format."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from lit_het.errors import UserError
from lit_het.towers.encoder_config import ComputeType
from lit_het.towers.image_config import ViTConfig
from lit_het.towers.text_config import TextTowerConfig
from lit_het.types import Params
from lit_het.weights import rename
from lit_het.weights.big_vision.importing import read_big_vision
from lit_het.weights.huggingface import open_clip, sentence_models
from lit_het.weights.huggingface.importing import read_huggingface
from lit_het.weights.huggingface.tokenizer import JSON_FILES, SENTENCEPIECE_FILES
from lit_het.weights.imported import Imported
from lit_het.weights.sources import Advance, fetch, safetensors_names
from lit_het.weights.vmoe.files import shard_names
from lit_het.weights.vmoe.importing import read_vmoe

TextPooling: TypeAlias = Literal["last", "first", "mean", "max"]
ImagePooling: TypeAlias = Literal["mean", "first"]
# Only these files of a Hugging Face folder are downloaded.
_HUGGING_FACE_FILES = (
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer_config.json",
    open_clip.CONFIG,
    *SENTENCEPIECE_FILES,
    *itertools.chain(*JSON_FILES),
    *sentence_models.FILES,
)


def open_weights(
    address: str,
    *,
    image_size: int | None = None,
    patch_size: int | None = None,
    image_pooling: ImagePooling | None = None,
    text_length: int | None = None,
    text_pooling: TextPooling | None = None,
    experts: Mapping[str, Any] = MappingProxyType({}),
    compute_type: ComputeType = "float32",
    advance: Advance = lambda count, total: None,
) -> Imported:
    """Opens weights of another program and infers the configurations of its towers.

    Args:
        address: a big_vision file ``x.npz``, or a subtree of it, ``x.npz:img``; the path ``x`` of a V-MoE checkpoint
            ``x.index``; or a Hugging Face folder, also of OpenCLIP. Local, or with a protocol of fsspec (``gs://``, ``hf://``,
            ``https://``).
        image_size: in pixels; another size than the source's resamples the positions. None for the source's.
        patch_size: in pixels; another size than the source's also resamples the first layer. None for the source's.
        image_pooling: of an image tower without class token and attention pooling in a big_vision or V-MoE file, which
            does not record it; None for "mean".
        text_length: in tokens; a larger length than the source's interpolates its positions, a smaller one drops the
            last ones, of a text tower that does not pool its last token. None for the source's.
        text_pooling: of a text tower in a big_vision or V-MoE file, which does not record it; None for "last". Of a
            BERT or a tower like it in a Hugging Face folder, "first" or "mean"; None for what the folder says.
        experts: fields of `ExpertsConfig` that a V-MoE checkpoint does not record, see `describe_vmoe`.
        compute_type: of the towers.
        advance: called with the number of downloaded bytes.
    """
    sizes: Any = {"image_size": image_size, "compute_type": compute_type}
    if match := re.fullmatch(r"(.*\.npz)(?::(.+))?", address):
        path = fetch(match[1], advance=advance)
        options: Any = {"text_length": text_length, "text_pooling": text_pooling or "last", "patch_size": patch_size}
        return read_big_vision(path, match[2] or "", image_pooling=image_pooling or "mean", **options, **sizes)
    # Before Hugging Face: a V-MoE address has no suffix that would distinguish it from a folder.
    if (prefix := _vmoe_prefix(address, advance)) is not None:
        options = {"image_pooling": image_pooling or "mean", "text_pooling": text_pooling or "last"}
        found = read_vmoe(prefix, experts=experts, text_length=text_length, **options, **sizes)
        if patch_size not in (None, found.image_tower and found.image_tower.patch_size):
            raise UserError(f"the patches of a V-MoE cannot be resampled; leave out patch_size = {patch_size}")
        return found
    folder = fetch(address, _HUGGING_FACE_FILES, advance)
    # Only the index names the files of a large model, so they are fetched after it.
    if (folder / "model.safetensors.index.json").is_file():
        fetch(address, safetensors_names(folder), advance)
    if open_clip.is_open_clip(folder):
        fetch(address, (open_clip.WEIGHTS,), advance)
    elif not (folder / "config.json").is_file():
        raise UserError(
            f"{address} has an unknown format; give an .npz file, a V-MoE checkpoint with an .index file, or a "
            "Hugging Face folder with a config.json or an open_clip_config.json"
        )
    options = {"patch_size": patch_size, "text_length": text_length, "text_pooling": text_pooling}
    return read_huggingface(folder, **options, **sizes)


def image_tower(address: str, **options: Any) -> ViTConfig:
    """Returns the configuration of an image tower that starts from the weights at an address.

    Args:
        address: of the weights.
        **options: as for `open_weights`.
    """
    return _tower(address, "image_tower", options)


def text_tower(address: str, **options: Any) -> TextTowerConfig:
    """Returns the configuration of a text tower that starts from the weights at an address.

    Args:
        address: of the weights.
        **options: as for `open_weights`.
    """
    return _tower(address, "text_tower", options)


def _tower(address: str, part: str, options: dict[str, Any]) -> Any:
    tower = getattr(open_weights(address, **options), part)
    if tower is None:
        raise UserError(f"{address} holds no {part.replace('_', ' ')}")
    # The address stays in the configuration: a run that is opened later reads the locked tower from there.
    return dataclasses.replace(tower, weights=address)


def without_parameters(found: Imported, prefixes: tuple[str, ...]) -> Imported:
    """Returns an imported model without the parameters whose paths start with one of the prefixes."""
    remaining = [source for source in found.parameter_sources if not source.target.startswith(prefixes)]
    return dataclasses.replace(found, parameter_sources=remaining)


def load_part(
    found: Imported,
    part: str,
    shapes: Params,
    shardings: Params | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Params:
    """Returns the parameters of one part, ``image_tower`` or ``text_tower``; otherwise as `rename.load`."""
    sources = [
        dataclasses.replace(source, target=source.target.removeprefix(f"{part}/"))
        for source in found.parameter_sources
        if source.target.startswith(f"{part}/")
    ]
    return rename.load(found.arrays, sources, shapes, shardings, advance)


def _vmoe_prefix(address: str, advance: Advance) -> Path | None:
    """Returns the local path of a V-MoE checkpoint without its suffix, or None for addresses of other formats."""
    address = address.removesuffix(".index")
    parent, _, name = address.rpartition("/")
    if "://" not in address:
        return Path(address) if Path(f"{address}.index").is_file() else None
    if re.fullmatch(r"hf://[^/]*(/[^/]*)?/?", address):
        return None  # a whole repository, not a file in one
    folder = fetch(parent, (f"{name}.index",), advance)
    if not (folder / f"{name}.index").is_file():
        return None
    fetch(parent, shard_names(folder / name), advance)
    return folder / name
