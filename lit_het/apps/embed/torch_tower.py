"""``lit-het embed --tower transformers:...``: any image model of `transformers` as a locked tower, computed by PyTorch.

The only module that imports PyTorch. Weights are read from safetensors only, and no code of a repository is run. Images
are decoded here, by the steps that the model's image processor describes.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8

from lit_het.apps.embed import TRANSFORMERS
from lit_het.apps.embed.images import EmbedOptions, addresses_of, store, whole_data
from lit_het.configs import experiment
from lit_het.configs.experiment import ExperimentConfig
from lit_het.configs.flags import with_flags
from lit_het.console import message
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.embeddings import Recipe, describe
from lit_het.errors import UserError
from lit_het.models.tower_fingerprints import tower_fingerprint
from lit_het.tasks.classification import ClassificationConfig
from lit_het.towers.stored_config import StoredConfig
from lit_het.training.durations import Duration
from lit_het.types import Batch
from lit_het.weights.huggingface import image_processors
from lit_het.weights.sources import fetch, safetensors_names

_CONFIGS = ("config.json", "preprocessor_config.json", "processor_config.json", "model.safetensors.index.json")
_BATCH_SIZE = 64


def embed_by_torch(name: str, flags: Sequence[str], output: str, options: EmbedOptions, *, texts: bool = False) -> None:
    """Writes the embeddings of all images, and says how a training names the tower.

    Args:
        name: ``transformers:`` and a folder, or ``hf://owner/model``.
        flags: ``--data...`` of the configuration.
        output: the folder to write to: a local path or an fsspec address.
        options: how; without tokens and logits.
        texts: whether texts are to be embedded, which is refused.
    """
    if texts or options.tokens or options.logits:
        raise UserError(
            f"--tower {TRANSFORMERS}... stores pooled embeddings of images; leave out --texts, --tokens and --logits"
        )
    if not options.shards:
        raise UserError(f"--tower {TRANSFORMERS}... has no shards of its own; name those to embed with --data")
    address = name.removeprefix(TRANSFORMERS)
    tower = TorchTower(address)
    default = ExperimentConfig(
        run_dir=Path(),
        task=ClassificationConfig(image_tower=tower.config, num_classes=1),
        data=LoaderConfig(options.shards, tower.config.image_size, _BATCH_SIZE, preprocessing=tower.preprocessing),
        length=Duration(0),
    )
    config = with_flags(default, flags, f"lit-het embed --tower transformers:{address} --output DIR")
    fixed = ("data.image_size", "data.preprocessing")
    for field in experiment.differences(default, config):
        if not field.startswith("data.") or field.startswith(fixed):
            raise UserError(f"--{field.replace('_', '-')} is what the model of {address} says; leave it out")
    data = whole_data(config, options)
    recipe = Recipe(
        tower=tower_fingerprint(config, {}),
        inputs=describe(data.training, data.image_size, random=options.num_crops > 0),
        size=tower.config.embedding_size,
        num_crops=options.num_crops,
        dtype=options.dtype,
        seed=data.seed,
    )
    store(recipe, data, addresses_of(data, options), output, lambda: tower)
    message(f"train on them with {' '.join(tower.flags)} --data.embeddings {output}")


class TorchTower:
    """An image model of transformers, on a GPU if PyTorch sees one.

    Attributes:
        config: by which a run knows it.
        preprocessing: the steps of its image processor, without normalisation.
    """

    def __init__(self, address: str):
        try:
            import torch
        except ImportError as error:
            raise UserError(
                "--tower transformers:... needs PyTorch: pip install 'lit-het[torch-towers]' (lit-het import reads "
                "ViT, DINO, CLIP and SigLIP without it)"
            ) from error
        folder = _folder(address)
        self._torch = torch
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model = _opened(address, folder).to(self._device)
        processor = _processor(address, folder)
        reading = image_processors.read(processor, _image_size(self._model.config))
        for remark in reading.remarks:
            message(f"preprocessing of {address}: {remark}")
        scale = processor.get("rescale_factor", 1 / 255) if processor.get("do_rescale", True) else 1.0
        is_normalized = processor.get("do_normalize", True)
        mean, deviation = (processor.get(name) if is_normalized else None for name in ("image_mean", "image_std"))
        self._normal = [scale, mean or (0.0,) * 3, deviation or (1.0,) * 3]
        self.preprocessing = reading.preprocessing
        with _in_one_line(f"{address}: the model does not take images of {reading.image_size} pixels"):
            seen = self._embed(np.zeros((1, reading.image_size, reading.image_size, 3), np.uint8))
        if seen is None:
            kind = type(self._model).__name__
            raise UserError(f"{address}: {kind} has no pooled output, one vector for an image; take a model that has")
        self.config = StoredConfig(_fingerprint(folder, self._normal), seen.shape[1], reading.image_size)

    @property
    def flags(self) -> list[str]:
        """What a training on its embeddings needs."""
        tower, made_by = self.config, self.preprocessing
        return [
            f"--task.image-tower stored --task.image-tower.model {tower.model}",
            f"--task.image-tower.embedding-size {tower.embedding_size}",
            f"--task.image-tower.image-size {tower.image_size} --data.image-size {tower.image_size}",
            f"--data.preprocessing.fit {made_by.fit}",
            f"--data.preprocessing.crop-fraction {made_by.crop_fraction} --data.preprocessing.filter {made_by.filter}",
            f"--data.preprocessing.transparency {made_by.transparency}",
        ]

    def __call__(self, batch: Batch) -> Float[np.ndarray, "b d"]:
        """Returns the embeddings of images."""
        found = self._embed(np.asarray(batch.image))
        assert found is not None, "checked"
        return found

    def _embed(self, image: UInt8[np.ndarray, "b h w 3"]) -> Float[np.ndarray, "b d"] | None:
        torch, (scale, mean, deviation) = self._torch, self._normal
        with torch.inference_mode():
            pixels = torch.from_numpy(image).to(self._device).float() * scale
            pixels = (pixels - torch.tensor(mean, device=self._device)) / torch.tensor(deviation, device=self._device)
            pooled = getattr(self._model(pixel_values=pixels.permute(0, 3, 1, 2)), "pooler_output", None)
            # Those of convolutional networks have two axes of length one behind.
            return None if pooled is None else pooled.flatten(1).cpu().numpy()


def _folder(address: str) -> Path:
    """Returns the local folder of a model, after downloading what is not in the cache."""
    if "://" not in address:
        if not (Path(address) / "config.json").is_file():
            raise UserError(
                f"{address} has no config.json; give the folder that save_pretrained wrote, or hf://owner/model"
            )
        return Path(address)
    return fetch(address, safetensors_names(fetch(address, _CONFIGS)))


def _opened(address: str, folder: Path) -> Any:
    """Returns the model with all of its weights."""
    import torch
    from transformers import AutoModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    options: Any = {"use_safetensors": True, "trust_remote_code": False, "local_files_only": True}
    with _in_one_line(f"{address}: transformers cannot read this model"):
        model, found = AutoModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **options)
    if model.main_input_name != "pixel_values":
        raise UserError(
            f"{address}: {type(model).__name__} takes {model.main_input_name}, not images alone; lit-het import reads "
            "the image towers of CLIP and SigLIP"
        )
    if missing := sorted(found["missing_keys"]):
        raise UserError(f"{address}: its weights lack {missing[0]}, which would be random; take another checkpoint")
    return model.eval()


def _processor(address: str, folder: Path) -> dict[str, Any]:
    """Returns the fields of the model's image processor, with its defaults."""
    from transformers import AutoImageProcessor

    with _in_one_line(f"{address}: transformers cannot read its image processor"):
        made = AutoImageProcessor.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    return {name: int(value) if name == "resample" else value for name, value in made.to_dict().items()}


def _image_size(config: Any) -> int:
    return size if isinstance(size := getattr(config, "image_size", None), int) else 224


def _fingerprint(folder: Path, normal: Sequence[Any]) -> str:
    """Returns a hash of the weights, their configuration and of what pixels are scaled by."""
    found = hashlib.sha256(json.dumps(normal).encode())
    for name in ("config.json", *safetensors_names(folder)):
        with open(folder / name, "rb") as file:
            found.update(hashlib.file_digest(file, "sha256").digest())
    return found.hexdigest()[:16]


@contextlib.contextmanager
def _in_one_line(what: str) -> Iterator[None]:
    """Turns what transformers and PyTorch raise into one line."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of any type
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"{what} ({reason})") from error
