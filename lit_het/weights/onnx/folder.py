"""``lit-het export --to onnx``: towers and noise as ONNX files, with what a program without JAX needs beside them.

- ``image.onnx``: pixels ``image [b h w 3]`` in uint8 to ``embedding [b d]``, or of a classifier to ``logits [b k]`` and
  ``noise_norm [b]``;
- ``text.onnx``: token ids ``text [b l]`` in int32 to ``embedding [b d]``;
- ``covariance.onnx`` of a head with noise: ``embedding [b d]`` of images to ``factors [b r d]``, R(x) with
  ``Σ(x) = R(x)ᵀ R(x)``, and ``noise_norm [b]``;
- of ``text_members``, embeddings and factors of all of them side by side along the last and the middle axis, embeddings
  divided by √M; τ and the bias of each;
- ``model.json``: preprocessing, tokenizer or names of the classes, τ and fitted temperatures; and the
  tokenizer's own file;
- ``familiarity.npz`` of a run that was calibrated by names: which names training captions had;
- ``classify.py``: `lit_het.weights.onnx.classify`.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
from jaxtyping import Array, Float, Int, UInt8

from lit_het.calibrations import Calibration
from lit_het.console import message
from lit_het.data_pipelines.images.transforms import Filter, Preprocessing
from lit_het.data_pipelines.texts.tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer, Tokenizer
from lit_het.errors import UserError
from lit_het.heads.covariance import Covariance, Noise
from lit_het.heads.options import ContrastiveOptions
from lit_het.models.calibration.seen_names import copy_familiarity
from lit_het.models.opening import Run
from lit_het.tasks import quantities
from lit_het.tasks.base import AnyTask
from lit_het.tasks.classifier import ClassificationTask
from lit_het.tasks.two_towers import ContrastiveTask
from lit_het.types import Params
from lit_het.weights.onnx.graph import save
from lit_het.weights.onnx.tracing import convert

# With which of its filters the script, which has no OpenCV, shrinks and enlarges images.
_FILTERS: Mapping[Filter, tuple[str, str]] = {
    "fast": ("area", "bicubic"),
    "area": ("area", "bilinear"),
    "bilinear": ("bilinear", "bilinear"),
    "bicubic": ("bicubic", "bicubic"),
}


def write(run: Run, folder: Path, class_names: Sequence[str], calibration: Calibration | None) -> None:
    """Writes a model to a folder.

    Args:
        run: an image-text model or a classifier.
        folder: empty, or not there yet.
        class_names: of a classifier, in order; empty if unknown, or for an image-text model.
        calibration: the temperatures that the script applies; None for none.
    """
    if calibration is not None and run.familiarity is None:
        calibration = dataclasses.replace(calibration, names=None)  # the script could not tell names apart
    task = _in_float32(run.task)
    params = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float32)), run.params)
    # All models are converted before the first file is written: one may be refused.
    models = _towers(task, params) if task.config.embeds_texts else _classifier(task, params)
    settings: dict[str, Any] = {
        "preprocessing": preprocessing_settings(run.config.data.preprocessing, task.config.image_tower.image_size),
        "calibration": _temperatures(calibration),
    }
    if task.config.embeds_texts:
        settings |= {"tokenizer": tokenizer_settings(run.tokenizer), **_head(task, params)}
    elif class_names:
        settings["classes"] = list(class_names)
    folder.mkdir(parents=True, exist_ok=True)
    if run.tokenizer is not None:
        (folder / settings["tokenizer"]["file"]).write_bytes(run.tokenizer.model_bytes)
    if calibration is not None and calibration.names is not None:
        copy_familiarity(run.run_dir, folder, run.data_digest)
    for name, model in models.items():
        save(model, folder / f"{name}.onnx")
    (folder / "model.json").write_text(json.dumps(settings, indent=1) + "\n", "utf-8")
    script = Path(__file__).with_name("classify.py").read_text("utf-8")
    (folder / "classify.py").write_text(script, "utf-8")


def _in_float32(task: AnyTask) -> Any:
    """Returns the task with towers that compute in float32, as few runtimes have bfloat16 on a CPU."""
    towers = {}
    for name, tower in task.config.towers.items():
        if tower.experts is not None:
            raise UserError(f"experts in {name} cannot be exported to ONNX; export with --to lit-het")
        towers[name] = tower.in_float32()
    if (patches := task.config.require_image_tower().patches) is not None:
        raise UserError(f"image_tower takes {patches}, and ONNX models read squares; export with --to lit-het")
    return dataclasses.replace(task.config, **towers).build()


def _towers(task: ContrastiveTask, params: Params) -> dict[str, onnx.ModelProto]:
    image, text, model = task.config.image_tower, task.config.text_tower, task.image_classifier(params)

    def embed_image(image: UInt8[Array, "b h w c"]) -> dict[str, Array]:
        return {"embedding": task.embeddings_of(quantities.embeddings(model, task.features(params, image)))}

    def embed_text(text: Int[Array, "b l"]) -> dict[str, Array]:
        return {"embedding": task.embeddings_of(task.encode_text(params, text))}

    found = {
        "image": convert(embed_image, {"image": ((image.image_size, image.image_size, 3), np.uint8)}),
        "text": convert(embed_text, {"text": ((text.length,), np.int32)}),
    }
    heads = [task.model(of_member).head for of_member in task.members(params)]
    covariances = [head.image_covariance for head in heads if head.image_covariance is not None]
    if covariances:
        found["covariance"] = _covariance(task.config.head, covariances, image.embedding_size)
    elif task.has_image_noise:
        message("exported without its noise: ONNX has that of HET-XL only")
    return found


def _covariance(config: ContrastiveOptions, covariances: Sequence[Covariance], size: int) -> onnx.ModelProto:
    if config.normalize_after_noise and not config.normalize_before_noise:
        # Σ would depend on the norm of the tower's output, which the exported embedding has lost.
        raise UserError(
            "task.head.normalize_after_noise without normalize_before_noise cannot be exported to ONNX; export with "
            "--to lit-het"
        )

    m = len(covariances)

    def factors(embedding: Float[Array, "b md"]) -> dict[str, Array]:
        # The embeddings of all members are side by side, each divided by √M.
        parts = (math.sqrt(m) * embedding[:, size * number : size * (number + 1)] for number in range(m))
        noises = [covariance(part) for covariance, part in zip(covariances, parts, strict=True)]
        norms = jnp.concatenate([jnp.sqrt(noise.trace())[:, None] for noise in noises], axis=1)
        return {"factors": jnp.concatenate([*map(_factors, noises)], axis=1), "noise_norm": norms.mean(axis=1)}

    return convert(factors, {"embedding": ((m * size,), np.float32)})


def _factors(noise: Noise) -> Float[Array, "b r d"]:
    if not noise.is_diagonal:
        return noise.rows()
    diagonal = noise.scale[:, :, None] * jnp.eye(noise.scale.shape[1])[None]
    return jnp.concatenate([noise.low_rank(), diagonal], axis=1)


def _classifier(task: ClassificationTask, params: Params) -> dict[str, onnx.ModelProto]:
    if "head" not in params:
        raise UserError("an imported image tower has no classes; export with --to npz or --to lit-het")
    if task.num_predictions > 1:
        raise UserError(f"the mean of {task.num_predictions} predictions is not exported to ONNX; take --to lit-het")
    size, model = task.config.image_tower.image_size, task.image_classifier(params)

    def classify(image: UInt8[Array, "b h w c"]) -> dict[str, Array]:
        inputs = model.inputs(task.features(params, image))
        samples = model.logits(inputs, None, 0)
        logits = samples.logits(samples.prepare(inputs), None, jnp.arange(1))[:, 0]
        return {"logits": model.log_probabilities(logits), "noise_norm": model.noise_norm(inputs)}

    return {"image": convert(classify, {"image": ((size, size, 3), np.uint8)})}


def preprocessing_settings(preprocessing: Preprocessing, size: int) -> dict[str, Any]:
    """Returns the arguments of the script's ``read``."""
    is_whole = preprocessing.fit == "squash"
    shrink, enlarge = _FILTERS[preprocessing.filter]
    shorter = None if is_whole else preprocessing.shorter_side(size)
    names = {"shrink": shrink, "enlarge": enlarge, "transparency": preprocessing.transparency}
    return {"size": size, "shorter_side": shorter, **names}


def tokenizer_settings(tokenizer: Tokenizer | None) -> dict[str, Any]:
    """Returns the arguments of the script's ``tokenize``."""
    match tokenizer:
        case SentencePieceTokenizer():
            names = ("length", "padding_id", "lowercase", "remove_punctuation", "split_underscores")
            return {"file": "tokenizer.model", **{name: getattr(tokenizer, name) for name in names}}
        case HuggingFaceTokenizer():
            return {"file": "tokenizer.json", "length": tokenizer.length, "padding_id": tokenizer.padding_id}
        case None:
            raise UserError("the run has no tokenizer; import it again with --tokenizer FILE")
        case _:
            raise UserError("only SentencePiece and tokenizer.json are written for ONNX; export with --to lit-het")


def _head(task: ContrastiveTask, params: Params) -> dict[str, Any]:
    config = task.config.head
    members = task.members(params)
    found: dict[str, Any] = {"temperature": _of_each([task.model(one).head.temperature() for one in members])}
    if task.config.loss.has_class_probabilities:
        found["bias"] = _of_each([task.model(one).head.bias for one in members])
    found["noise_is_left_out"] = task.has_image_noise and task.model(members[0]).head.image_covariance is None
    return {**found, "normalize_after_noise": config.normalize_after_noise}


def _of_each(values: Sequence[Any]) -> float | list[float]:
    """Returns the numbers of members; of a single one its number."""
    found = [0.0 if value is None else float(value[...]) for value in values]
    return found if len(found) > 1 else found[0]


def _temperatures(calibration: Calibration | None) -> dict[str, Any]:
    """Returns T of predictions without noise, and of the mean probability over noise samples; and those of names."""
    if calibration is None:
        return {"noiseless": 1.0, "monte_carlo": 1.0}
    found: dict[str, Any] = {"noiseless": calibration.fitted(0).temperature}
    found["monte_carlo"] = calibration.fitted(1).temperature
    if calibration.names is not None:
        found |= {"rule": calibration.names.rule, "prior": calibration.prior}
        for name, samples in (("noiseless_names", 0), ("monte_carlo_names", 1)):
            names = calibration.fitted_names(samples)
            assert names is not None
            found[name] = {"temperature": names.temperature, "offset": names.offset, "alone": names.alone.temperature}
            found[name]["new_per_seen"] = names.new_per_seen
    return found
