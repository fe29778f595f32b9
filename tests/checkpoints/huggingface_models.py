"""Shared by tests of imported Hugging Face models: loads a folder, builds and runs its towers."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lit_het.checkpoints import rename
from lit_het.checkpoints.huggingface.importing import read_huggingface


def shapes(config):
    """Returns the parameters of a tower, as shapes."""
    return nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: config.build(nnx.Rngs(0)))))


def expected(imported):
    """Returns the parameter tree of an imported model, as shapes."""
    tree = {"image_tower": imported.image_tower, "text_tower": imported.text_tower}
    tree = {name: shapes(config) for name, config in tree.items() if config is not None}
    head = {}
    if imported.image_tower and imported.text_tower:
        head["temperature"] = {"log_temperature": jax.ShapeDtypeStruct((), jnp.float32)}
    if imported.has_bias:
        head["bias"] = jax.ShapeDtypeStruct((), jnp.float32)
    if imported.num_classes is not None:
        size = imported.image_tower.embedding_size
        head["logits"] = {
            "kernel": jax.ShapeDtypeStruct((size, imported.num_classes), jnp.float32),
            "bias": jax.ShapeDtypeStruct((imported.num_classes,), jnp.float32),
        }
    return tree | ({"head": head} if head else {})


def load(folder, **options) -> tuple[Any, Any]:
    """Returns the imported model of a folder and its parameters."""
    imported = read_huggingface(folder, **options)
    return imported, rename.load(imported.arrays, imported.parameter_sources, expected(imported))


def run(config, params, inputs):
    """Returns a tower's output; images may be floats, because the unwrapped function skips the type check."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))))

    def call(params, inputs):
        tower = nnx.merge(graph, params)
        return inspect.unwrap(type(tower).__call__)(tower, inputs)

    return jax.jit(call)(params, jnp.asarray(inputs))


def pixels(values):
    """Returns the pixels ``[b h w c]`` that towers map to the given floats ``[b c h w]``."""
    return np.asarray((np.moveaxis(np.asarray(values, np.float64), 1, -1) + 1) * 127.5, np.float32)


def logits(imported, params, image, text):
    """Returns the logits of all pairs: inner products of unit embeddings over τ, and the bias."""
    image = run(imported.image_tower, params["image_tower"], image).embedding
    text = run(imported.text_tower, params["text_tower"], text).embedding
    image, text = (side / np.linalg.norm(side, axis=-1, keepdims=True) for side in (image, text))
    head = params["head"]
    return image @ text.T / np.exp(head["temperature"]["log_temperature"]) + head.get("bias", 0.0)
