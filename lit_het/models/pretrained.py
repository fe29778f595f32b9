"""Parameters that a model starts from: those of another run, or of a file of another program."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from lit_het import parameters, sharding
from lit_het.configs import experiment
from lit_het.configs.experiment import ExperimentConfig
from lit_het.console import Bar
from lit_het.errors import UserError
from lit_het.tasks.base import AnyTask
from lit_het.tasks.union import TaskConfig
from lit_het.towers.tuning import divided
from lit_het.towers.tuning_config import plain_path
from lit_het.training.directory import check_chain, checkpoint_dir, find_pretrained, load_config
from lit_het.types import Params
from lit_het.weights import adapting
from lit_het.weights.native.saving import Checkpoints

# The only fields of experts that change the parameters.
EXPERT_FIELDS = tuple(f"encoder.experts.{name}" for name in ("num_experts", "num_blocks", "blocks", "rank_one.type"))
# Fields of towers that may differ: the parameters are resampled.
RESAMPLED_FIELDS = ("image_size", "patch_size")
# Fields of towers, and the layers that each of them adds: a dense one after the pooling, or the blocks before it.
LAST_LAYERS = (
    ("representation_size", "pre_logits"),
    ("projection_size", "projection"),
    ("top", "top"),
)


def locked_params(config: ExperimentConfig, run_dir: Path, like: Params) -> Params:
    """Returns locked parameters of a run from their source, as checkpoints do not contain them."""
    wanted = parameters.flatten(like)
    # A partly locked tower is read completely.
    shapes = abstract_params(config.task.untuned().build())
    locked = parameters.flatten(load_weights(config.task, {part: shapes[part] for part in like}))
    locked |= parameters.flatten(load_sources(config.task, like, run_dir))
    missing = {plain_path(path) for path in wanted} - locked.keys()
    rest = {path: wanted.get(path, shape) for path, shape in parameters.flatten(shapes).items() if path in missing}
    if rest and config.pretrained is not None:
        source = find_pretrained(config.pretrained.run, run_dir)
        config = dataclasses.replace(config, pretrained=dataclasses.replace(config.pretrained, run=source))
    if rest:
        locked |= parameters.flatten(load_pretrained(config, parameters.unflatten(rest)))
    return parameters.unflatten(divided(locked, wanted))


def load_sources(config: TaskConfig, like: Params, run_dir: Path | None = None) -> Params:
    """Returns the parts of a model that are those of other runs, see `TaskOptions.sources`.

    Args:
        config: of the model.
        like: shapes of its parameters; parts without shapes are skipped.
        run_dir: the run that is opened, with which others may have been moved; None at the start of one.
    """
    loaded = {}
    for part, origin in config.sources.items():
        if part not in like:
            continue
        origin = origin if run_dir is None else find_pretrained(origin, run_dir)
        source = load_config(origin)
        check_chain(origin)
        theirs, ours = (getattr(task, part, None) for task in (source.task, config))
        if theirs is None:
            raise UserError(f"{origin} has no {part}; name the run that trained it with --task.{part}-run")
        for field, (before, now) in experiment.differences(theirs, ours).items():
            if not field.endswith(("remat", "unrolled", "compute_type")):
                raise UserError(
                    f"the {part} of {origin} has {field} = {before}, but this configuration has {now}; set "
                    f"--task.{part}.{field.replace('_', '-')} {before}"
                )
        flat = parameters.flatten({part: like[part]})
        loaded |= parameters.unflatten(_saved(source, origin, flat))
    return loaded


def load_pretrained(config: ExperimentConfig, like: Params) -> Params:
    """Returns the parameters that ``config.pretrained`` names, in the shapes of ``like``.

    The modules of objectives that the source does not have are no part of it, and not loaded.
    If images or patches have another size, positions and the first layer are resampled. The last dense layer may exist
    only in the source or only in the tower; it is then not loaded.
    """
    if config.pretrained is None:
        raise UserError(
            f"the configuration locks {sorted(like)[0]} but names no source of its weights; "
            "name the run that trained it as `pretrained` in the configuration file, or with --pretrained.run"
        )
    origin = config.pretrained.run
    source = load_config(origin)
    check_chain(origin)
    beside = config.task.objectives.keys() - source.task.build().shapes.keys()
    like = {part: tree for part, tree in like.items() if part not in beside}
    theirs, ours = source.task.require_image_tower(), config.task.require_image_tower()
    if "image_tower" not in like or not adapting.is_adapted(theirs, ours):
        return _load_run(config, source, ours, like)
    form = adapting.source_form(theirs, ours)
    tower = _load_run(config, source, form, {"image_tower": _tower_shapes(form)})["image_tower"]
    places = jax.tree.map(lambda leaf: leaf.sharding, like["image_tower"])
    rest = {part: tree for part, tree in like.items() if part != "image_tower"}
    others = _load_run(config, source, form, rest) if rest else {}
    return {"image_tower": _adapted(tower, theirs, ours, places), **others}


def _load_run(config: ExperimentConfig, source: ExperimentConfig, ours: Any, like: Params) -> Params:
    """Returns the parameters that a run has for our image tower and text tower, see `load_pretrained`."""
    assert config.pretrained is not None
    origin = config.pretrained.run
    theirs: Any = source.task.require_image_tower()
    ends = _check_same_tower(theirs, ours, origin)
    if "text_tower" in like:
        _check_same_text_tower(source.task, config.task, origin)
    wanted = {path: leaf for path, leaf in parameters.flatten(like).items() if not path.startswith(ends)}
    as_saved = {**wanted, **_resampled(source, wanted)}
    plain = source.task.untuned()
    if plain is source.task:
        found = _saved(source, origin, as_saved)
    else:
        shapes = abstract_params(source.task.build())
        of_parts = parameters.flatten({part: shapes[part] for part in parameters.unflatten(wanted)})
        there = source.task.untuned_params(parameters.unflatten(_saved(source, origin, of_parts)))
        found = {path: array for path, array in parameters.flatten(there).items() if path in wanted}
    from lit_het.weights.resample import resample  # needs SciPy

    for path in found:
        if found[path].sharding != wanted[path].sharding or as_saved[path] is not wanted[path]:
            array = np.asarray(found[path])
            array = resample(path.removeprefix("image_tower/"), array, theirs, ours)
            found[path] = sharding.place_on_devices(array, wanted[path].sharding)
    return parameters.unflatten(found)


def _saved(source: ExperimentConfig, origin: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a run at these paths, trained ones and those that it locks."""
    patterns, found = source.task.locked_patterns, {}
    locked = {path for path in wanted if any(re.fullmatch(pattern, path) for pattern in patterns)}
    if trained := {path: leaf for path, leaf in wanted.items() if path not in locked}:
        with Checkpoints(checkpoint_dir(origin), read_only=True) as checkpoints:
            found |= parameters.flatten(checkpoints.restore_params(parameters.unflatten(trained))[0])
    if locked:
        there = locked_params(source, origin, parameters.unflatten({path: wanted[path] for path in locked}))
        found |= parameters.flatten(there)
    return found


def _tower_shapes(tower: Any) -> Params:
    """Returns the shapes of a tower's parameters on one device."""
    return _on_one_device(nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: tower.build(nnx.Rngs(0))))))


def _adapted(params: Params, theirs: Any, ours: Any, places: Params | None) -> Params:
    """Returns those parameters of our tower that the source's determine, on the devices of ``places``."""
    flat = {path: np.asarray(array) for path, array in parameters.flatten(params).items()}
    found = adapting.adapted(flat, theirs, ours)
    where = dict.fromkeys(found) if places is None else parameters.flatten(places)
    return parameters.unflatten(
        {path: sharding.place_on_devices(found[path], where[path]) for path in where.keys() & found.keys()}
    )


def _resampled(source: ExperimentConfig, wanted: dict[str, Any]) -> dict[str, Any]:
    """Returns the shapes, in the source run, of the tower's parameters that depend on the image or patch size."""
    saved = parameters.flatten(abstract_params(source.task.build()))
    shapes = {}
    for path in {"image_tower/positions", "image_tower/patches/kernel"} & wanted.keys() & saved.keys():
        leaf = wanted[path]
        if saved[path].shape != leaf.shape:
            mesh = getattr(leaf.sharding, "mesh", None)
            place = leaf.sharding if mesh is None else sharding.replicated(mesh)
            shapes[path] = jax.ShapeDtypeStruct(saved[path].shape, leaf.dtype, sharding=place)
    return shapes


def load_weights(config: TaskConfig, shapes: Params, shardings: Params | None = None) -> Params:
    """Returns the parameters of all towers that have ``weights``, by tower.

    The last dense layer may exist only in the source or only in the tower; it is then not loaded.

    Args:
        config: of the model.
        shapes: of its parameters; towers without shapes are skipped.
        shardings: of the parameters; None for one device.
    """
    loaded = {}
    for part, tower in config.towers.items():
        if part not in shapes or tower.weights is None:
            continue
        # The readers of other programs' files; most runs need none.
        from lit_het.weights import formats

        found = formats.open_weights(tower.weights, **tower.file_options())
        if (source := getattr(found, part)) is None:
            raise UserError(f"{tower.weights} holds no {part.replace('_', ' ')}")
        is_adapted = adapting.is_adapted(source, tower)
        form = adapting.source_form(source, tower) if is_adapted else tower
        ends = _optional_layers(source, form)
        _check_same_source(source, form, part, tuple(ends))
        of_tower = _tower_shapes(form) if is_adapted else shapes[part]
        wanted = {name: tree for name, tree in of_tower.items() if name not in ends.values()}
        found = formats.without_parameters(found, tuple(f"{part}/{layer}/" for layer in ends.values()))
        places = None if shardings is None else shardings[part]
        with Bar(f"reading {tower.weights}", parameters.count(wanted), "parameters") as bar:
            of_form = None if is_adapted or places is None else {name: places[name] for name in wanted}
            loaded[part] = formats.load_part(found, part, wanted, of_form, bar.advance)
        if is_adapted:
            loaded[part] = _adapted(loaded[part], source, tower, places)
    return loaded


def _optional_layers(theirs: Any, ours: Any) -> dict[str, str]:
    """Returns the layers after the last block that only one of two towers has, by the fields that say so."""
    ends = {field: layer for field, layer in LAST_LAYERS if bool(getattr(theirs, field)) != bool(getattr(ours, field))}
    pooled = theirs.pooling, ours.pooling
    # A decoder attends to all tokens. A class token is one of them, and takes part in every block.
    if pooled in (("mean", "none"), ("first", "none"), ("attention", "none"), ("class_token", "class_and_mean")):
        ends["pooling"] = "pooling"
    elif pooled in (("class_token", "none"), ("class_and_mean", "none")):
        if not ours.class_token:
            raise UserError("the image tower has a class token; set --task.image-tower.class-token True")
        ends |= dict.fromkeys(("pooling", "class_token", "norm_twice"), "pooling")
    return ends


def _check_same_source(found: Any, tower: Any, part: str, optional: tuple[str, ...]) -> None:
    if type(found) is not type(tower):
        theirs, ours = type(found).__name__, type(tower).__name__
        raise UserError(f"{tower.weights} holds a {theirs}, but the configuration has a {ours}")
    for field, (theirs, ours) in _differences(found, tower).items():
        if field.partition(".")[0] not in optional:
            flag = f"--task.{part}.{field}".replace("_", "-")
            raise UserError(
                f"the {part.replace('_', ' ')} in {tower.weights} has {field} = {theirs}, "
                f"but this configuration has {ours}; set {flag} {theirs}, "
                f"or build the configuration with lit_het.weights.formats.{part}"
            )


def abstract_params(task: AnyTask) -> Params:
    """Returns the shapes of a task's parameters on one device, to restore into."""
    return _on_one_device(task.shapes)


def _on_one_device(shapes: Params) -> Params:
    place = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), shapes)


def _check_same_tower(theirs: Any, ours: Any, origin: Path) -> tuple[str, ...]:
    """Returns the path prefixes of layers that only one of two towers has."""
    ends = {field: f"image_tower/{layer}/" for field, layer in _optional_layers(theirs, ours).items()}
    for field, (before, now) in _differences(theirs, ours).items():
        if field.partition(".")[0] not in (*ends, *RESAMPLED_FIELDS):
            raise UserError(
                f"the image tower of {origin} has {field} = {before}, but this configuration has {now}; "
                f"set --task.image-tower.{field.replace('_', '-')} {before}"
            )
    return tuple(ends.values())


def _check_same_text_tower(source: TaskConfig, ours: TaskConfig, origin: Path) -> None:
    if source.text_tower is None:
        raise UserError(f"{origin} has no text tower; lock that of an image-text model")
    if source.text_members != ours.text_members:
        raise UserError(
            f"{origin} has text_members = {source.text_members}, but this configuration has {ours.text_members}; set "
            f"--task.text-members {source.text_members}"
        )
    for field, (before, now) in _differences(source.text_tower, ours.text_tower).items():
        raise UserError(
            f"the text tower of {origin} has {field} = {before}, but this configuration has {now}; "
            f"set --task.text-tower.{field.replace('_', '-')} {before}"
        )


def _differences(theirs: Any, ours: Any) -> dict[str, tuple[Any, Any]]:
    """Returns the fields in which two towers differ as models."""
    return {
        field: values
        for field, values in experiment.differences(theirs, ours).items()
        if not field.startswith(ours.free_fields)
        and (field in EXPERT_FIELDS or not field.startswith("encoder.experts."))
    }
