"""Shared by tests of towers: parameters of a configuration and its outputs, compiled once for each form."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from flax import nnx


def with_encoder(config, **changes) -> Any:
    """Returns a configuration whose encoder has other values of the given fields."""
    return dataclasses.replace(config, encoder=dataclasses.replace(config.encoder, **changes))


def graph(config) -> Any:
    """Returns a tower without its parameters."""
    return _split(config)[0]


def shapes(config) -> Any:
    """Returns the parameters of a tower, as shapes."""
    return nnx.to_pure_dict(_split(config)[1])


def initial(config) -> Any:
    """Returns the initial parameters."""
    return jax.tree.map(lambda leaf: leaf, _initial(config))


def drawn(tree, scale=0.3, seed=0) -> Any:
    """Returns random arrays of a tree's shapes: no parameter is zero or one, and none takes time to compile."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: (scale * random.normal(size=leaf.shape)).astype(np.float32), tree)


def like_initial(tree, seed=0) -> Any:
    """Returns arrays of a tree's shapes with the spread of a tower's initial parameters, equal at equal paths."""

    def draw(path, leaf):
        name, random = path[-1].key, np.random.default_rng([seed, *jax.tree_util.keystr(path).encode()])
        if name in ("bias", "scale"):
            return np.full(leaf.shape, name == "scale", np.float32)
        spread = leaf.shape[-2] ** -0.5 if name == "kernel" else 0.25
        return (spread * random.normal(size=leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, tree)


def apply(config, params, *inputs, **named) -> Any:
    """Returns what a tower makes of its inputs."""
    return nnx.merge(graph(config), params)(*inputs, **named)


run: Any = jax.jit(apply, static_argnums=0)


@functools.cache
def _split(config):
    return nnx.split(nnx.eval_shape(lambda: config.build(nnx.Rngs(0))))


@functools.cache
def _initial(config):
    return jax.tree.map(np.asarray, jax.jit(lambda: nnx.to_pure_dict(nnx.state(config.build(nnx.Rngs(0)))))())
