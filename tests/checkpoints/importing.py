"""Shared by tests of importers: recorded files, loaded parameters and compiled towers."""

import functools
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lit_het.checkpoints.rename import load
from lit_het.heads.contrastive import DeterministicContrastiveConfig
from lit_het.heads.deterministic import DeterministicConfig
from lit_het.towers.bert import BertConfig
from lit_het.towers.text import TextConfig
from lit_het.towers.vit import ViTConfig

GOLDEN = Path(__file__).parents[1] / "golden"


def golden(name):
    with np.load(GOLDEN / f"{name}.npz") as file:
        return dict(file)


def params_of(recording):
    """Returns a recording's parameters without the prefix params/."""
    return {name.removeprefix("params/"): array for name, array in recording.items() if name.startswith("params/")}


def save(path, arrays):
    np.savez(path, **arrays)
    return path


def shapes(imported):
    """Returns the parameter tree of an imported model, as shapes."""

    def of(build):
        return nnx.eval_shape(lambda: nnx.to_pure_dict(nnx.state(build(rngs=nnx.Rngs(0)))))

    tree = {}
    if imported.image_tower is not None:
        tree["image_tower"] = of(imported.image_tower.build)
    if imported.text_tower is not None:
        tree["text_tower"] = of(imported.text_tower.build)
    if imported.num_classes is not None:
        size = image_tower(imported).embedding_size
        tree["head"] = of(functools.partial(DeterministicConfig().build, size, imported.num_classes))
    if any(one.target == "head/temperature/log_temperature" for one in imported.parameter_sources):
        head = DeterministicContrastiveConfig(initial_bias=0.0 if imported.has_bias else None)
        tree["head"] = of(functools.partial(head.build, 1))
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
    return load(imported.arrays, imported.parameter_sources, shapes(imported))


def compiled(config, params):
    """Returns the tower as a function of its input; images may be floats, because the type check is skipped."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))))

    def call(params, x):
        tower = nnx.merge(graph, params)
        return inspect.unwrap(type(tower).__call__)(tower, x)

    return functools.partial(jax.jit(call), params)


def pixels(image):
    """Returns the pixels, not rounded, that the tower normalises to the recorded floats: (x + 1) · 127.5."""
    return jnp.asarray((image.astype(np.float64) + 1) * 127.5, jnp.float32)


def assert_recorded(actual, expected):
    """Asserts equality up to 1e-5 of the largest expected value."""
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
