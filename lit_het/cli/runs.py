"""Run directories: what a run leaves behind and how it is opened again.

A run directory holds ``config.json``, ``tokenizer.model`` (if there is text), ``checkpoints/``, ``metrics.jsonl`` and
``tensorboard/``.
"""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from configs import experiment
from configs.experiment import ExperimentConfig, PretrainedConfig
from data_pipelines.tokenizers import SentencePieceTokenizer
from lit_het import parameters
from lit_het.checkpoints import weights
from lit_het.checkpoints.imported import Imported
from lit_het.checkpoints.native import Checkpoints
from lit_het.errors import UserError
from lit_het.random import keys_at
from lit_het.tasks.classification import ClassificationConfig, ClassificationTask
from lit_het.tasks.contrastive import ContrastiveConfig, ContrastiveTask
from lit_het.towers.bert import BertConfig
from lit_het.towers.text import TextConfig
from lit_het.towers.vit import ViTConfig
from lit_het.training.logging import Bar
from lit_het.types import Encoder, Params

# Fields that say how the same model is computed, or where it comes from; two runs may differ in them.
EXECUTION_FIELDS = ("encoder.unrolled", "encoder.remat", "encoder.compute_type", "compute_type", "weights", "members")
TOWERS = ("image_tower", "text_tower")


@dataclasses.dataclass(frozen=True)
class ContrastiveRun:
    """A trained image-text model, opened for use."""

    config: ExperimentConfig
    task: ContrastiveTask
    params: Params
    tokenizer: SentencePieceTokenizer

    def encoder(self) -> Encoder:
        """Returns the model as evaluators see it."""
        return make_encoder(self.task, self.params, self.tokenizer)


@dataclasses.dataclass(frozen=True)
class ClassificationRun:
    """A trained classifier, opened for use."""

    config: ExperimentConfig
    task: ClassificationTask
    params: Params

    def probabilities(self) -> Callable[[np.ndarray], np.ndarray]:
        """Returns pixels ``[b h w c]`` to mean probabilities ``[b k]`` over noise samples.

        Each call draws new noise, in an order that follows from the run's seed.
        """
        compiled = jax.jit(self.task.probabilities)
        stream = keys_at(self.config.seed, self.config.num_steps)("evaluation")
        keys = (jax.random.fold_in(stream, number) for number in itertools.count())
        return lambda pixels: np.asarray(compiled(self.params, pixels, next(keys)))


def config_path(run_dir: Path) -> Path:
    """Returns where a run keeps its configuration."""
    return run_dir / "config.json"


def checkpoint_dir(run_dir: Path) -> Path:
    """Returns where a run keeps its checkpoints."""
    return run_dir / "checkpoints"


def tokenizer_path(run_dir: Path) -> Path:
    """Returns where a run keeps the model of its tokenizer."""
    return run_dir / "tokenizer.model"


def open_contrastive(run_dir: Path, pretrained: Path | None = None) -> ContrastiveRun:
    """Opens the newest checkpoint of a contrastive run, with its locked parameters from where they came.

    Args:
        run_dir: the run.
        pretrained: where the run with the locked parameters lies now, if it has moved.

    Raises:
        UserError: something is missing, does not fit, or the locked parameters are not those of training.
    """
    config = experiment.load(config_path(run_dir))
    if not isinstance(config.task, ContrastiveConfig) or config.tokenizer is None:
        raise UserError(f"{run_dir} holds a classifier; zero-shot evaluation needs a run with a text tower")
    task = config.task.build()
    tokenizer = dataclasses.replace(config.tokenizer, model=tokenizer_path(run_dir)).build()
    return ContrastiveRun(config, task, _restore_params(config, task, run_dir, pretrained), tokenizer)


def open_classifier(run_dir: Path, pretrained: Path | None = None) -> ClassificationRun:
    """Opens the newest checkpoint of a classifier; arguments and errors are those of `open_contrastive`."""
    config = experiment.load(config_path(run_dir))
    if not isinstance(config.task, ClassificationConfig):
        raise UserError(f"{run_dir} holds an image-text model, not a classifier; see 'lit-het zero-shot --help'")
    task = config.task.build()
    return ClassificationRun(config, task, _restore_params(config, task, run_dir, pretrained))


def _restore_params(
    config: ExperimentConfig,
    task: ContrastiveTask | ClassificationTask,
    run_dir: Path,
    pretrained: Path | None,
) -> Params:
    """Returns the newest checkpoint's parameters with the locked ones that they were trained on."""
    locked_like, trainable_like = parameters.partition(abstract_params(task), task.locked)
    from_files = load_weights(config.task, locked_like)
    locked_like = {part: like for part, like in locked_like.items() if part not in from_files}
    if config.pretrained is not None and locked_like:
        source = pretrained or _find_pretrained(config.pretrained.run, run_dir)
        config = dataclasses.replace(config, pretrained=dataclasses.replace(config.pretrained, run=source))
    with Checkpoints(checkpoint_dir(run_dir), read_only=True) as checkpoints:
        trainable, info = checkpoints.restore_params(trainable_like)
    locked = {**from_files, **(load_pretrained(config, locked_like) if locked_like else {})}
    if parameters.checksum(locked) != info["locked_checksum"]:
        origin = "the files named as `weights`" if config.pretrained is None else config.pretrained.run
        raise UserError(
            f"the locked parameters in {origin} are not those that {run_dir} was trained with; "
            "point --pretrained at the original run"
        )
    locked = parameters.cast(locked, config.task.image_tower.compute_type)  # as in training
    return parameters.merge(locked, trainable)


def _find_pretrained(recorded: Path, run_dir: Path) -> Path:
    """Returns the run with the locked parameters: where it was, or beside this run if both have moved."""
    for place in (recorded, run_dir.resolve().parent / recorded.name):
        if config_path(place).is_file():
            return place
    raise UserError(f"the locked parameters were in {recorded}, which is gone; say where it is with --pretrained DIR")


def load_pretrained(config: ExperimentConfig, like: Params) -> Params:
    """Returns the parameters that ``config.pretrained`` names, in the shapes of ``like``.

    Raises:
        UserError: no source is configured, or its image tower differs from this configuration's.
    """
    if config.pretrained is None:
        raise UserError(
            f"the configuration locks {sorted(like)[0]} but nothing says where its weights come from; "
            "name the run that trained it as `pretrained` in the configuration file, or with --pretrained.run"
        )
    source = experiment.load(config_path(config.pretrained.run))
    _check_same_tower(source, config, config.pretrained)
    with Checkpoints(checkpoint_dir(config.pretrained.run), read_only=True) as checkpoints:
        return checkpoints.restore_params(like)[0]


def load_weights(
    config: ContrastiveConfig | ClassificationConfig, like: Params, shardings: Params | None = None
) -> Params:
    """Returns the towers in ``like`` whose configuration names ``weights``, each a tree under its name.

    Raises:
        UserError: the source cannot be read, or holds another tower than the configuration's.
    """
    loaded = {}
    for part in TOWERS:
        tower = getattr(config, part, None)
        # A ResNet has no weights to name.
        if part not in like or getattr(tower, "weights", None) is None:
            continue
        assert isinstance(tower, ViTConfig | TextConfig | BertConfig)
        found = _open_weights(tower)
        _check_same_source(getattr(found, part), tower, part)
        total = parameters.count(like[part])
        with Bar(f"reading {tower.weights}", total, "parameters") as bar:
            places = None if shardings is None else shardings[part]
            loaded[part] = weights.load_part(found, part, like[part], places, bar.advance)
    return loaded


def _open_weights(tower: ViTConfig | TextConfig | BertConfig) -> Imported:
    assert tower.weights is not None
    options: dict[str, Any] = {"compute_type": tower.encoder.compute_type, "experts": tower.encoder.experts}
    if isinstance(tower, ViTConfig):
        options |= {"image_size": tower.image_size, "patch_size": tower.patch_size}
    else:
        options |= {"text_length": tower.length}
    if isinstance(tower, TextConfig) and tower.pooling != "attention":
        options |= {"text_pooling": tower.pooling}
    return weights.open_weights(tower.weights, **options)


def _check_same_source(found: Any, tower: Any, part: str) -> None:
    if found is None:
        raise UserError(f"{tower.weights} holds no {part.replace('_', ' ')}")
    if type(found) is not type(tower):
        theirs, ours = type(found).__name__, type(tower).__name__
        raise UserError(f"{tower.weights} holds a {theirs}, the configuration says {ours}")
    for field, (theirs, ours) in experiment.differences(found, tower).items():
        if field not in EXECUTION_FIELDS:
            flag = f"--task.{part}.{field}".replace("_", "-")
            raise UserError(
                f"the {part.replace('_', ' ')} in {tower.weights} has {field} = {theirs}, this configuration {ours}; "
                f"set {flag} {theirs}, or let lit_het.checkpoints.weights.{part} make the configuration"
            )


def make_encoder(task: ContrastiveTask, params: Params, tokenizer: SentencePieceTokenizer) -> Encoder:
    """Returns a trained model as evaluators see it."""
    image, text = jax.jit(task.encode_image), jax.jit(task.encode_text)
    samples = jax.jit(task.sample_image, static_argnums=3)
    return Encoder(
        image_samples=lambda pixels, count, seed: np.asarray(samples(params, pixels, jax.random.key(seed), count)),
        image=lambda pixels: np.asarray(image(params, pixels)[0]),
        text=lambda tokens: np.asarray(text(params, tokens)[0]),
        image_noise_norm=lambda pixels: np.asarray(image(params, pixels)[1]),
        text_noise_norm=lambda tokens: np.asarray(text(params, tokens)[1]),
        tokenize=tokenizer,
        temperature=float(task.temperature(params)),
    )


def abstract_params(task: ContrastiveTask | ClassificationTask) -> Params:
    """Returns the shapes of a task's parameters on one device, to restore into."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.eval_shape(task.initialize, jax.random.key(0))
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes)


def _check_same_tower(source: ExperimentConfig, target: ExperimentConfig, pretrained: PretrainedConfig) -> None:
    differing = experiment.differences(source.task.image_tower, target.task.image_tower)
    for field, (theirs, ours) in differing.items():
        if field not in EXECUTION_FIELDS:
            raise UserError(
                f"the image tower of {pretrained.run} has {field} = {theirs}, this configuration {ours}; "
                f"set --task.image-tower.{field.replace('_', '-')} {theirs}"
            )
