"""Shared by tests of importers and exporters: recorded files, imported models, and what their towers compute."""

import functools
import inspect
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from lit_het.heads.classification_config import DeterministicConfig
from lit_het.heads.contrastive import DeterministicContrastiveConfig
from lit_het.towers.bert import BertConfig
from lit_het.towers.text import TextConfig
from lit_het.towers.vit import ViTConfig
from lit_het.weights import rename
from lit_het.weights.huggingface.importing import read_huggingface
from tests.towers import models

GOLDEN = Path(__file__).parents[1] / "golden"
assert_close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5)


def read_npz(path):
    with np.load(path) as file:
        return dict(file)


def golden(name):
    return read_npz(GOLDEN / f"{name}.npz")


def params_of(recording):
    """Returns a recording's parameters without the prefix params/."""
    return {name.removeprefix("params/"): array for name, array in recording.items() if name.startswith("params/")}


def save(path, arrays):
    np.savez(path, **arrays)
    return path


def write_json(path, content):
    path.write_text(json.dumps(content))


def shapes(imported):
    """Returns the parameter tree of an imported model, as shapes."""

    def of_head(build):
        return nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0)))))

    towers = {"image_tower": imported.image_tower, "text_tower": imported.text_tower}
    tree = {name: models.shapes(tower) for name, tower in towers.items() if tower is not None}
    if imported.num_classes is not None:
        size = image_tower(imported).embedding_size
        tree["head"] = of_head(functools.partial(DeterministicConfig().build, size, imported.num_classes))
    if any(one.target == "head/temperature/log_temperature" for one in imported.parameter_sources):
        head = DeterministicContrastiveConfig(initial_bias=0.0 if imported.has_bias else None)
        tree["head"] = of_head(functools.partial(head.build, 1))
    return tree


def image_tower(imported):
    assert isinstance(imported.image_tower, ViTConfig)
    return imported.image_tower


def text_tower(imported):
    assert isinstance(imported.text_tower, TextConfig)
    return imported.text_tower


def bert_tower(imported):
    assert isinstance(imported.text_tower, BertConfig)
    return imported.text_tower


def loaded(imported):
    return rename.load(imported.arrays, imported.parameter_sources, shapes(imported))


def load(folder, **options) -> tuple[Any, Any]:
    """Returns the imported model of a Hugging Face folder and its parameters."""
    imported = read_huggingface(folder, **options)
    return imported, loaded(imported)


def apply(config, params, *inputs) -> Any:
    """Returns a tower's output; images may be floats, because the unwrapped function skips the type check."""
    tower = nnx.merge(models.graph(config), params)
    return inspect.unwrap(type(tower).__call__)(tower, *inputs)


run: Any = jax.jit(apply, static_argnums=0)


def pixels(values):
    """Returns the pixels, not rounded, that towers normalise to the given floats: (x + 1) · 127.5."""
    return np.asarray((np.asarray(values, np.float64) + 1) * 127.5, np.float32)


def unit(x):
    x = np.asarray(x)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def logits(image_tower, text_tower, params, image, text):
    """Returns the logits of all pairs: inner products of unit embeddings over τ, and the bias."""
    image = unit(run(image_tower, params["image_tower"], image).embedding)
    text = unit(run(text_tower, params["text_tower"], text).embedding)
    head = params["head"]
    return image @ text.T / np.exp(head["temperature"]["log_temperature"]) + np.asarray(head.get("bias", 0.0))


def assert_recorded(actual, expected):
    """Asserts equality up to 1e-5 of the largest expected value."""
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
