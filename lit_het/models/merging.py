"""Means of the weights of models that started from the same ones.

Wortsman et al. 2022a, "Model soups", and 2022b, "Robust fine-tuning of zero-shot models" (WiSE-FT).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from lit_het.configs import experiment
from lit_het.errors import UserError
from lit_het.heads import options as heads
from lit_het.models import origins
from lit_het.models.opening import Run, open_run
from lit_het.towers.base import FIELDS_WITHOUT_PARAMETERS, TRAINING_FIELDS
from lit_het.types import Params

_One = TypeVar("_One")
_PARTS = ("image_tower", "text_tower", "decoder", "head", "num_classes", "text_members")
_FREE_FIELDS = (*FIELDS_WITHOUT_PARAMETERS, *TRAINING_FIELDS)


def open_mergeable(run_dirs: Sequence[Path]) -> tuple[list[Run], str]:
    """Opens runs whose weights can be averaged, as models alone: without what was trained beside them.

    Returns:
        The runs, and the digest of the towers that all started from.

    Raises:
        UserError: they are models of other shapes, read images or texts differently, or started from other weights.
    """
    runs = [_bare(open_run(run_dir)) for run_dir in run_dirs]
    first = runs[0]
    for run in runs[1:]:
        check_same_model(first, run)
    opened = {run.run_dir: run for run in runs}
    places = [origins.origin(run_dir) for run_dir in run_dirs]
    known = {place: place if isinstance(place, str) else origins.digest(_params(place, opened)) for place in places}
    for run_dir, place in zip(run_dirs, places, strict=True):
        if known[place] != known[places[0]]:
            raise UserError(
                f"{run_dirs[0]} and {run_dir} started from towers with other weights: means of weights need runs that "
                "started from the same ones; use lit-het ensemble for these"
            )
    return runs, known[places[0]]


def mean(params: Sequence[Params], shares: Sequence[float]) -> Params:
    """Returns ``Σ_i share_i params_i``, computed in float32, in the types of the first."""

    def of_leaf(*leaves: jax.Array) -> jax.Array:
        total = sum(share * jnp.asarray(leaf, jnp.float32) for share, leaf in zip(shares, leaves, strict=True))
        return jnp.asarray(total, leaves[0].dtype)

    return jax.tree.map(of_leaf, *params)


class Try(NamedTuple):
    """A model that a soup was tried with.

    Attributes:
        number: of the model.
        alone: its own score.
        score: of the soup with it; its own for the first.
        kept: whether it stays in the soup.
    """

    number: int
    alone: float
    score: float
    kept: bool


def greedy_soup(models: Sequence[_One], score: Callable[[Sequence[_One]], float]) -> list[Try]:
    """Returns the tries of a greedy soup in order (Wortsman et al. 2022a, Recipe 1).

    Models are tried from the best on, and stay where the mean of all that stay is no worse. NaN is worse than all.

    Args:
        models: the candidates.
        score: of the mean of some models, on held-out data; higher is better.

    Raises:
        UserError: all models score NaN.
    """
    alone = [score([model]) for model in models]
    if all(map(math.isnan, alone)):
        raise UserError("the figure of every run is NaN on this set: no soup; give another set, or --by another figure")
    order = sorted(range(len(models)), key=lambda number: (math.isnan(alone[number]), -alone[number]))
    best, kept = alone[order[0]], [order[0]]
    tries = [Try(order[0], best, best, kept=True)]
    for number in order[1:]:
        found = score([models[one] for one in (*kept, number)])
        is_kept = found >= best
        if is_kept:
            best, kept = found, [*kept, number]
        tries.append(Try(number, alone[number], found, is_kept))
    return tries


def _bare(run: Run) -> Run:
    """Returns the model of a run alone, with the parameters and the configuration of it."""
    task = run.config.task.bare()
    built = task.build()
    mixture = tuple(one for one in run.config.data.mixture if not one.held_out)
    data = dataclasses.replace(run.config.data.without_embeddings(), mixture=mixture)
    params = {part: tree for part, tree in run.params.items() if part in built.shapes}
    return dataclasses.replace(
        run, config=dataclasses.replace(run.config, task=task, data=data), task=built, params=params
    )


def _params(place: Path, opened: Mapping[Path, Run]) -> Params:
    return (opened[place] if place in opened else open_run(place)).params


def check_same_model(one: Run, other: Run) -> None:
    """Raises a `UserError` if two trained models compute otherwise, or read images or texts differently."""
    for field, (before, now) in experiment.differences(one.config.task, other.config.task).items():
        part, _, rest = field.partition(".")
        is_head = part == "head" and rest.rpartition(".")[2] in heads.TRAINING_FIELDS
        is_stack = part.endswith(("_tower", "decoder")) and rest.startswith(_FREE_FIELDS)
        if part in _PARTS and not (is_head or is_stack):
            raise UserError(
                f"{one.run_dir} has task.{field} = {before} and {other.run_dir} has {now}: only models of one form "
                "have a mean; use lit-het ensemble for these"
            )
    shapes = [jax.tree.map(lambda leaf: leaf.shape, run.params) for run in (one, other)]
    if shapes[0] != shapes[1]:
        raise UserError(f"{one.run_dir} and {other.run_dir} have parameters of other shapes, and no mean")
    for name in ("image_size", "preprocessing"):
        if getattr(one.config.data, name) != getattr(other.config.data, name):
            raise UserError(f"{one.run_dir} and {other.run_dir} have another data.{name}; give runs that agree")
    before, now = (_tokenizer(run) for run in (one, other))
    if differing := [name for name in before | now if before.get(name) != now.get(name)]:
        raise UserError(
            f"{one.run_dir} and {other.run_dir} have different tokenizers ({differing[0]}); give runs that agree"
        )


def _tokenizer(run: Run) -> dict[str, Any]:
    """Returns all that decides what a run reads of a text."""
    if run.config.tokenizer is None or run.tokenizer is None:
        return {}
    fields = {"type": type(run.config.tokenizer), **vars(run.config.tokenizer)}
    # The bytes, with folded case, are those of the run, and an id of padding may be that of the file.
    fields.pop("fold_case", None)
    return {**fields, "model": run.tokenizer.model_bytes, "padding_id": run.tokenizer.padding_id}
