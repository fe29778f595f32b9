"""Opens trained runs from their directories.

A run directory holds ``config.json``, ``tokenizer.model`` (if there is text), ``manifest.json`` with their SHA-256,
``checkpoints/``, ``metrics.jsonl`` and ``tensorboard/``; after ``lit-het calibrate`` also ``calibration.json``.
"""

import dataclasses
import functools
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lit_het import parameters, sharding
from lit_het.checkpoints.native import checksums
from lit_het.checkpoints.native.saving import Checkpoints
from lit_het.configs import experiment
from lit_het.configs.experiment import ExperimentConfig
from lit_het.console import Bar
from lit_het.data_pipelines.tokenizers import Tokenizer
from lit_het.errors import UserError
from lit_het.runs import portable
from lit_het.runs.directory import check_chain, checkpoint_dir, find_pretrained, load_config, tokenizer_path
from lit_het.runs.predictor import Programs
from lit_het.runs.saved_calibration import read_calibration
from lit_het.runs.tower_fingerprints import EXECUTION_FIELDS, tower_fingerprint
from lit_het.sharding import MeshConfig
from lit_het.tasks.classification import ClassificationConfig, ClassificationTask
from lit_het.tasks.contrastive import ContrastiveConfig, ContrastiveTask
from lit_het.towers.bert import BertConfig
from lit_het.towers.text import TextConfig
from lit_het.towers.vit import ViTConfig
from lit_het.types import Calibration, EvaluatedModel, Params

# The only fields of experts that change the parameters.
EXPERT_FIELDS = ("encoder.experts.num_experts", "encoder.experts.num_blocks", "encoder.experts.blocks")
TOWERS = ("image_tower", "text_tower")
# Fields of towers that may differ: the parameters are resampled.
RESAMPLED_FIELDS = ("image_size", "patch_size")
# Fields of towers, and the dense layer after the pooling that each of them adds.
LAST_LAYERS = (("representation_size", "pre_logits"), ("pooler", "pre_logits"), ("projection_size", "projection"))


@dataclasses.dataclass(frozen=True)
class Run:
    """A trained model.

    Attributes:
        run_dir: directory of the run.
        config: configuration of its training.
        task: computes with the parameters.
        params: of all parts; without ``head`` if only an image tower was imported.
        tokenizer: for captions; None for a classifier.
        step: number of optimizer updates of the checkpoint.
    """

    run_dir: Path
    config: ExperimentConfig
    task: ContrastiveTask | ClassificationTask
    params: Params
    tokenizer: Tokenizer | None
    step: int

    def model(self, *, calibrated: bool = True, mesh: Mesh | None = None) -> EvaluatedModel:
        """Returns the model for evaluators; by default with the temperatures of ``lit-het calibrate``, on all devices.

        Raises:
            UserError: the file of the temperatures is damaged.
        """
        mesh = mesh or MeshConfig().build()
        placed = jax.device_put(self.params, sharding.tree_shardings(self.params, mesh))
        programs = Programs(self.task, mesh, self.tokenizer)
        return programs.model(placed, self.tower, self._text_tower(), self.calibration if calibrated else None)

    @functools.cached_property
    def calibration(self) -> Calibration | None:
        """The temperatures that were fitted to this checkpoint; a message tells of those of another one."""
        return read_calibration(self.run_dir, self.step)

    @functools.cached_property
    def tower(self) -> str:
        """Fingerprint of the image tower."""
        return tower_fingerprint(self.config, self.params)

    def _text_tower(self) -> str:
        """Returns a key that differs between models that embed texts differently."""
        if self.tokenizer is None:
            return ""
        fields = experiment.to_dict(self.config)
        vocabulary = hashlib.sha256(self.tokenizer.model_bytes).hexdigest()
        others = {part: params for part, params in self.params.items() if part != "image_tower"}
        return json.dumps([fields["task"], fields["tokenizer"], vocabulary, checksums.digest(others)])


def open_run(run_dir: Path, pretrained: Path | None = None) -> Run:
    """Opens the newest checkpoint of a run, and loads its locked parameters from their source.

    Args:
        run_dir: the run, or a folder of ``lit-het export --to lit-het``.
        pretrained: current path of the run or file with the locked parameters, if it was moved.

    Raises:
        UserError: a file is missing or does not fit, or the locked parameters are not those of training.
    """
    config = load_config(run_dir)
    check_chain(run_dir)
    task = config.task.build()
    tokenizer = None
    if config.tokenizer is not None:
        tokenizer = dataclasses.replace(config.tokenizer, model=tokenizer_path(run_dir)).build()
    if portable.is_portable(run_dir):
        params, step = portable.read(run_dir, task)
        return Run(run_dir, config, task, params, tokenizer, step)
    with Checkpoints(checkpoint_dir(run_dir), read_only=True) as checkpoints:
        step = checkpoints.newest_step()
        _, saved = checkpoints.at(step).read_info()
    shapes = abstract_params(task)
    if isinstance(task, ClassificationTask) and not any(path.startswith("params/head/") for path in saved):
        shapes = {"image_tower": shapes["image_tower"]}
    return Run(run_dir, config, task, _restore_params(config, shapes, run_dir, pretrained), tokenizer, step)


def _restore_params(
    config: ExperimentConfig,
    shapes: Params,
    run_dir: Path,
    pretrained: Path | None,
) -> Params:
    """Returns the newest checkpoint's parameters, merged with the locked parameters."""
    locked_like, trainable_like = parameters.partition(shapes, config.task.locked)
    if config.pretrained is not None and pretrained is not None:
        config = dataclasses.replace(config, pretrained=dataclasses.replace(config.pretrained, run=pretrained))
    locked = _locked_params(_moved(config, pretrained), run_dir, locked_like)
    with Checkpoints(checkpoint_dir(run_dir), read_only=True) as checkpoints:
        trainable, info = checkpoints.restore_params(trainable_like)
    if checksums.digest(locked) != info.get("locked_checksum"):
        origin = "the files named as `weights`" if config.pretrained is None else config.pretrained.run
        raise UserError(
            f"the locked parameters in {origin} are not those that {run_dir} was trained with; "
            "give the original with --pretrained"
        )
    locked = parameters.cast(locked, config.task.image_tower.compute_type)  # as in training
    return parameters.merge(locked, trainable)


def _locked_params(config: ExperimentConfig, run_dir: Path, like: Params) -> Params:
    """Returns locked parameters of a run from their source, as checkpoints do not contain them."""
    wanted = parameters.flatten(like)
    # A partly locked tower is read completely.
    shapes = abstract_params(config.task.build())
    read = load_weights(config.task, {part: shapes[part] for part in like})
    locked = {path: array for path, array in parameters.flatten(read).items() if path in wanted}
    rest = {path: shape for path, shape in wanted.items() if path not in locked}
    if rest and config.pretrained is not None:
        source = find_pretrained(config.pretrained.run, run_dir)
        config = dataclasses.replace(config, pretrained=dataclasses.replace(config.pretrained, run=source))
    if rest:
        locked |= parameters.flatten(load_pretrained(config, parameters.unflatten(rest)))
    return parameters.unflatten(locked)


def _moved(config: ExperimentConfig, weights: Path | None) -> ExperimentConfig:
    """Returns the configuration with the current path of the towers' weights.

    Raises:
        UserError: the towers' weights come from two files, which one path cannot replace.
    """
    towers: dict[str, Any] = {part: getattr(config.task, part, None) for part in TOWERS}
    addresses = {part: tower.weights for part, tower in towers.items() if getattr(tower, "weights", None)}
    if weights is None or not addresses:
        return config
    # The part of a file follows a colon, as in x.npz:img.
    places = {part: address.partition(".npz:") for part, address in addresses.items()}
    if len({file.removesuffix(".npz") for file, _, _ in places.values()}) > 1:
        raise UserError(
            f"the towers' weights come from {' and '.join(addresses.values())}; --pretrained {weights} can replace "
            "only one of them: move the files back, or link them"
        )
    moved = {
        part: dataclasses.replace(towers[part], weights=f"{weights}:{subtree}" if subtree else str(weights))
        for part, (_, _, subtree) in places.items()
    }
    return dataclasses.replace(config, task=dataclasses.replace(config.task, **moved))


def load_pretrained(config: ExperimentConfig, like: Params) -> Params:
    """Returns the parameters that ``config.pretrained`` names, in the shapes of ``like``.

    If images or patches have another size, positions and the first layer are resampled. The last dense layer may exist
    only in the source or only in the tower; it is then not loaded.

    Raises:
        UserError: no source is configured, or its image tower differs from this configuration's.
    """
    if config.pretrained is None:
        raise UserError(
            f"the configuration locks {sorted(like)[0]} but names no source of its weights; "
            "name the run that trained it as `pretrained` in the configuration file, or with --pretrained.run"
        )
    origin = config.pretrained.run
    source = load_config(origin)
    check_chain(origin)
    theirs, ours = source.task.image_tower, config.task.image_tower
    ends = _check_same_tower(theirs, ours, origin)
    if "text_tower" in like and isinstance(config.task, ContrastiveConfig):
        _check_same_text_tower(source.task, config.task.text_tower, origin)
    wanted = {path: leaf for path, leaf in parameters.flatten(like).items() if not path.startswith(ends)}
    as_saved = {**wanted, **_resampled(source, wanted)}
    locked = {path for path in wanted if any(re.fullmatch(pattern, path) for pattern in source.task.locked)}
    found = {}
    if trained := {path: leaf for path, leaf in as_saved.items() if path not in locked}:
        with Checkpoints(checkpoint_dir(origin), read_only=True) as checkpoints:
            found |= parameters.flatten(checkpoints.restore_params(parameters.unflatten(trained))[0])
    if locked:
        there = _locked_params(source, origin, parameters.unflatten({path: as_saved[path] for path in locked}))
        found |= parameters.flatten(there)
    for path in found:
        if path in locked or as_saved[path] is not wanted[path]:
            array = np.asarray(found[path])
            if isinstance(theirs, ViTConfig) and isinstance(ours, ViTConfig):
                from lit_het.checkpoints.resample import resample

                array = resample(path.removeprefix("image_tower/"), array, theirs, ours)
            found[path] = sharding.place_on_devices(array, wanted[path].sharding)
    return parameters.unflatten(found)


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


def load_weights(
    config: ContrastiveConfig | ClassificationConfig, shapes: Params, shardings: Params | None = None
) -> Params:
    """Returns the parameters of all towers that have ``weights``, by tower.

    The last dense layer may exist only in the source or only in the tower; it is then not loaded.

    Args:
        config: of the model.
        shapes: of its parameters; towers without shapes are skipped.
        shardings: of the parameters; None for one device.

    Raises:
        UserError: a source cannot be read, or its tower differs from the configuration's.
    """
    loaded = {}
    for part in TOWERS:
        tower = getattr(config, part, None)
        # ResNets have no field `weights`.
        if part not in shapes or getattr(tower, "weights", None) is None:
            continue
        assert isinstance(tower, ViTConfig | TextConfig | BertConfig)
        # The readers of other programs' files; most runs need none.
        from lit_het.checkpoints import weights

        assert tower.weights is not None
        found = weights.open_weights(tower.weights, **_weights_options(tower))
        source = getattr(found, part)
        ends = {field: layer for field, layer in LAST_LAYERS if _is_in_one(field, source, tower)}
        _check_same_source(source, tower, part, tuple(ends))
        wanted = {name: tree for name, tree in shapes[part].items() if name not in ends.values()}
        found = weights.without_parameters(found, tuple(f"{part}/{layer}/" for layer in ends.values()))
        with Bar(f"reading {tower.weights}", parameters.count(wanted), "parameters") as bar:
            places = None if shardings is None else {name: shardings[part][name] for name in wanted}
            loaded[part] = weights.load_part(found, part, wanted, places, bar.advance)
    return loaded


def with_absolute_weights(config: Any) -> Any:
    """Returns a task's configuration with absolute paths of weights, to open it from other directories."""
    for part in TOWERS:
        tower: Any = getattr(config, part, None)
        address = getattr(tower, "weights", None)
        if address is not None and "://" not in address:
            config = dataclasses.replace(
                config, **{part: dataclasses.replace(tower, weights=str(Path(address).resolve()))}
            )
    return config


def _is_in_one(field: str, *towers: Any) -> bool:
    """Returns whether exactly one of two towers has the layer of a field."""
    return len({bool(getattr(tower, field, None)) for tower in towers}) == 2


def _weights_options(tower: ViTConfig | TextConfig | BertConfig) -> dict[str, Any]:
    """Returns what the configuration of a tower says about its file, as arguments of `open_weights`."""
    experts = {} if tower.encoder.experts is None else dataclasses.asdict(tower.encoder.experts)
    options: dict[str, Any] = {"compute_type": tower.encoder.compute_type, "experts": experts}
    if isinstance(tower, ViTConfig):
        options |= {"image_size": tower.image_size, "patch_size": tower.patch_size}
        options |= {"image_pooling": tower.pooling} if tower.pooling in ("mean", "first") else {}
    else:
        options |= {"text_length": tower.length}
    if isinstance(tower, TextConfig) and tower.pooling != "attention":
        options |= {"text_pooling": tower.pooling}
    return options


def _check_same_source(found: Any, tower: Any, part: str, optional: tuple[str, ...]) -> None:
    if found is None:
        raise UserError(f"{tower.weights} holds no {part.replace('_', ' ')}")
    if type(found) is not type(tower):
        theirs, ours = type(found).__name__, type(tower).__name__
        raise UserError(f"{tower.weights} holds a {theirs}, but the configuration has a {ours}")
    for field, (theirs, ours) in _differences(found, tower).items():
        if field not in optional:
            flag = f"--task.{part}.{field}".replace("_", "-")
            raise UserError(
                f"the {part.replace('_', ' ')} in {tower.weights} has {field} = {theirs}, "
                f"but this configuration has {ours}; set {flag} {theirs}, "
                f"or build the configuration with lit_het.checkpoints.weights.{part}"
            )


def abstract_params(task: ContrastiveTask | ClassificationTask) -> Params:
    """Returns the shapes of a task's parameters on one device, to restore into."""
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), task.shapes)


def _check_same_tower(theirs: Any, ours: Any, origin: Path) -> tuple[str, ...]:
    """Returns the path prefixes of layers that only one of two towers has.

    Raises:
        UserError: the towers differ in anything else.
    """
    ends = {field: f"image_tower/{layer}/" for field, layer in LAST_LAYERS if _is_in_one(field, theirs, ours)}
    for field, (before, now) in _differences(theirs, ours).items():
        if field not in (*ends, *RESAMPLED_FIELDS):
            raise UserError(
                f"the image tower of {origin} has {field} = {before}, but this configuration has {now}; "
                f"set --task.image-tower.{field.replace('_', '-')} {before}"
            )
    return tuple(ends.values())


def _check_same_text_tower(source: ContrastiveConfig | ClassificationConfig, ours: Any, origin: Path) -> None:
    if not isinstance(source, ContrastiveConfig):
        raise UserError(f"{origin} is a classifier without a text tower; lock that of an image-text model")
    for field, (before, now) in _differences(source.text_tower, ours).items():
        raise UserError(
            f"the text tower of {origin} has {field} = {before}, but this configuration has {now}; "
            f"set --task.text-tower.{field.replace('_', '-')} {before}"
        )


def _differences(theirs: Any, ours: Any) -> dict[str, tuple[Any, Any]]:
    """Returns the fields in which two towers differ as models."""
    return {
        field: values
        for field, values in experiment.differences(theirs, ours).items()
        if field not in (*EXECUTION_FIELDS, "layer_input")
        and (field in EXPERT_FIELDS or not field.startswith("encoder.experts."))
    }
