"""Dataclasses as trees of arrays."""

import dataclasses
from collections.abc import Iterable
from typing import Any, TypeVar

import jax

_Class = TypeVar("_Class", bound=type)


def tree_of_arrays(cls: _Class) -> _Class:
    """Registers a dataclass as a pytree of its fields; fields with the metadata ``static`` are auxiliary data."""
    # Not `jax.tree_util.register_dataclass`, which rebuilds trees by `__init__`: its annotations describe arrays, but
    # JAX also rebuilds trees of shapes, of stacked blocks and of placeholders.
    static = [field.name for field in dataclasses.fields(cls) if field.metadata.get("static")]
    names = [field.name for field in dataclasses.fields(cls) if field.name not in static]

    def flatten(tree: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(getattr(tree, name) for name in names), tuple(getattr(tree, name) for name in static)

    def flatten_with_keys(tree: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        children, fixed = flatten(tree)
        keys = (jax.tree_util.GetAttrKey(name) for name in names)
        return tuple(zip(keys, children, strict=True)), fixed

    def unflatten(fixed: tuple[Any, ...], children: Iterable[Any]) -> Any:
        tree = object.__new__(cls)
        for name, value in zip((*names, *static), (*children, *fixed), strict=True):
            object.__setattr__(tree, name, value)
        return tree

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls
