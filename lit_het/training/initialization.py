"""Initial parameters of a run."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh
from jaxtyping import Array, Key

from lit_het import parameters, sharding
from lit_het.configs.experiment import ExperimentConfig
from lit_het.errors import UserError
from lit_het.programs import shared
from lit_het.tasks.base import AnyTask
from lit_het.towers.tuning import divided
from lit_het.towers.tuning_config import plain_path
from lit_het.types import Params


def initial_params(config: ExperimentConfig, task: AnyTask, mesh: Mesh) -> tuple[Params, Params]:
    """Returns (locked, trainable) parameters on the mesh; only those that are not loaded are drawn."""
    key = jax.random.key(config.seed)
    shapes = parameters.flatten(task.shapes)
    locked = parameters.flatten(parameters.partition(task.shapes, task.locked)[0])
    # What is loaded has the form of a tower without tuning.
    plain = config.task.untuned()
    plain_shapes = plain.build().shapes
    shardings = sharding.tree_shardings(plain_shapes, mesh)
    like = parameters.flatten(
        jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), plain_shapes, shardings)
    )
    loaded = _loaded(config, like, {plain_path(path): like[plain_path(path)] for path in locked}, shardings)
    if plain is not config.task:
        loaded = _tuned(loaded, shapes, mesh)
    if missing := locked.keys() - loaded.keys():
        pattern = config.pretrained.pattern if config.pretrained else None
        raise UserError(f"{min(missing)} is locked but --pretrained.pattern {pattern!r} does not load it")

    image_tower = config.task.image_tower
    experts = None if image_tower is None else image_tower.experts
    if experts is not None and experts.permutation is not None and not any("/router/" in path for path in loaded):
        raise UserError(
            "experts.permutation orders the experts of a trained image tower, and none is loaded; set "
            "--pretrained.run RUN or --task.image-tower.weights, or leave it out"
        )

    drawn = _drawing(task, mesh, frozenset(shapes.keys() - loaded.keys()))(key)
    return parameters.partition(parameters.unflatten({**drawn, **loaded}), task.locked)


def _tuned(loaded: dict[str, Any], shapes: dict[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Returns loaded parameters in the form of towers with tuning, on the mesh."""
    places = parameters.flatten(sharding.tree_shardings(parameters.unflatten(shapes), mesh))
    like = jax.eval_shape(lambda params: divided(params, shapes), loaded)
    return jax.jit(lambda params: divided(params, shapes), out_shardings={path: places[path] for path in like})(loaded)


def _loaded(
    config: ExperimentConfig, like: dict[str, Any], locked: dict[str, Any], shardings: Params
) -> dict[str, Any]:
    """Returns the parameters that are those of another run or of files, by their paths.

    Args:
        config: of the run.
        like: shapes of all parameters.
        locked: those of the locked ones.
        shardings: of all parameters.
    """
    has_weights = any(tower.weights for tower in config.task.towers.values())
    if not (config.pretrained or locked or has_weights):
        return {}
    from lit_het.models.pretrained import load_pretrained, load_sources, load_weights

    shapes = parameters.unflatten(like)
    loaded = parameters.flatten(load_weights(config.task, shapes, shardings))
    loaded |= parameters.flatten(load_sources(config.task, shapes))
    pattern = config.pretrained.pattern if config.pretrained else None
    if pattern:
        parameters.check_patterns(shapes, (pattern,))
    if pattern or locked.keys() - loaded.keys():
        wanted = parameters.flatten(parameters.partition(shapes, (pattern,))[0]) if pattern else locked
        if pattern and (both := wanted.keys() & loaded.keys()):
            raise UserError(f"both `pretrained` and `weights` set {min(both)}; leave out one of them")
        paths = wanted.keys() - loaded.keys()
        wanted = parameters.unflatten({path: like[path] for path in paths})
        with jax.set_mesh(None):  # those of a tuned run are put together on one device
            loaded |= parameters.flatten(load_pretrained(config, wanted))
    return loaded


@shared
def _drawing(task: AnyTask, mesh: Mesh, paths: frozenset[str]) -> Callable[[Key[Array, ""]], dict[str, Array]]:
    """Returns the function of a key that draws the parameters at these paths, on the mesh."""

    def draw(key: Key[Array, ""]) -> dict[str, Array]:
        return {path: array for path, array in parameters.flatten(task.initialize(key)).items() if path in paths}

    places = parameters.flatten(sharding.tree_shardings(task.shapes, mesh))
    return jax.jit(draw, out_shardings={path: places[path] for path in paths})
