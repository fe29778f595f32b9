"""Opens trained runs from their directories.

A run directory holds ``config.json``, ``tokenizer.model`` (if there is text), ``manifest.json`` with their SHA-256,
``weights/``, ``metrics.jsonl`` and ``tensorboard/``; after ``lit-het calibrate`` also ``calibration.json`` and,
of an image-text model, ``familiarity.npz``.
"""

import dataclasses
import functools
import hashlib
import json
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from lit_het import parameters, sharding
from lit_het.calibrations import Calibrated, Calibration
from lit_het.configs import experiment
from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.texts.familiarity import Familiarity
from lit_het.data_pipelines.texts.tokenizers import Tokenizer
from lit_het.errors import UserError
from lit_het.eval.sets.open_sets import Sets
from lit_het.models.calibration.saved import read_calibration
from lit_het.models.calibration.seen_names import FAMILIARITY, knows, read_familiarity
from lit_het.models.predictor import Programs
from lit_het.models.pretrained import abstract_params, locked_params
from lit_het.models.tower_fingerprints import tower_fingerprint
from lit_het.sharding import MeshConfig
from lit_het.tasks.base import AnyTask
from lit_het.training.directory import check_chain, checkpoint_dir, load_config, tokenizer_path
from lit_het.types import EvaluatedModel, Knows, Params
from lit_het.weights import portable
from lit_het.weights.native import checksums
from lit_het.weights.native.saving import Checkpoints


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
        member: number of the member that is left of those of its text tower, see `alone`; None for the whole run.
    """

    run_dir: Path
    config: ExperimentConfig
    task: AnyTask
    params: Params
    tokenizer: Tokenizer | None
    step: int
    member: int | None = None

    def alone(self, number: int) -> "Run":
        """Returns one of the members that were trained beside one another, without what was measured of all."""
        count = self.task.num_members
        if not 0 <= number < count:
            raise UserError(f"member {number} is not one of the {count} of {self.run_dir}, which are counted from 0")
        one, params = self.task.one, self.task.members(self.params)[number]
        config = dataclasses.replace(self.config, task=one.config)
        return dataclasses.replace(self, config=config, task=one, params=params, member=number)

    def model(self, *, calibrated: Calibrated = True, mesh: Mesh | None = None) -> EvaluatedModel:
        """Returns the model for evaluators on all devices, by default with temperatures of ``lit-het calibrate``.

        Args:
            calibrated: whether it has these temperatures, if there are any; a prior requires those of names.
            mesh: the devices; None for all.
        """
        mesh = mesh or MeshConfig().build()
        placed = sharding.place(self.params, sharding.tree_shardings(self.params, mesh))
        programs = Programs(self.task, mesh, self.tokenizer, self.config.data.prompts)
        return programs.model(placed, self.tower, self._text_tower(), self.applied(calibrated), self._knows())

    def applied(self, calibrated: Calibrated) -> Calibration | None:
        """Returns the temperatures that are applied; raises a `UserError` for a prior that they have no names for."""
        if isinstance(calibrated, bool):
            return self.calibration if calibrated else None
        if self.calibration is None or self.calibration.names is None:
            raise UserError(
                f"--prior {calibrated}: {self.run_dir} is not calibrated by names; run lit-het calibrate "
                f"{self.run_dir} with held-out images of 100 names or more that training had not, and of names it had"
            )
        if self.familiarity is None:
            raise UserError(
                f"--prior {calibrated}: which names training had is not known, as {self.run_dir} lacks its "
                f"{FAMILIARITY}; run lit-het calibrate {self.run_dir} again, or leave --prior out"
            )
        return dataclasses.replace(self.calibration, prior=calibrated)

    def _knows(self) -> Knows | None:
        """Returns what tells names that training captions had; None without them."""
        if self.familiarity is None:
            return None
        by_names = None if self.calibration is None else self.calibration.names
        return functools.partial(knows, self.familiarity, "words" if by_names is None else by_names.rule)

    def sets(self) -> Sets:
        """Returns what opens sets of images, or of texts to translate, for evaluations of this model."""
        data = self.config.data
        return Sets(data.image_size, data.preprocessing, lambda: self.tower, data.source, self.tokenizer)

    @functools.cached_property
    def calibration(self) -> Calibration | None:
        """The temperatures that were fitted to this checkpoint; a message tells of those of another one."""
        return read_calibration(self.run_dir, self.step) if self.member is None else None

    @functools.cached_property
    def familiarity(self) -> Familiarity | None:
        """The table of training captions; None if there is none, or, with a message, only that of another run."""
        return read_familiarity(self.run_dir, self.data_digest) if self.config.task.embeds_texts else None

    @functools.cached_property
    def data_digest(self) -> str | None:
        """Identifies the samples that it was trained on; None if they are unknown."""
        if portable.is_portable(self.run_dir) or not checkpoint_dir(self.run_dir).is_dir():
            return None
        with Checkpoints(checkpoint_dir(self.run_dir), read_only=True) as checkpoints:
            return checkpoints.at(self.step).read_info()[0].get("data_digest")

    @functools.cached_property
    def tower(self) -> str:
        """Fingerprint of the tower that reads images, or texts to translate."""
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
        step, shapes = checkpoints.newest_step(), abstract_params(task)
        if task.may_lack_head:
            _, saved = checkpoints.at(step).read_info()
            if not any(path.startswith("params/head/") for path in saved):
                shapes = {"image_tower": shapes["image_tower"]}
    params = config.task.untuned_params(_restore_params(config, shapes, run_dir, pretrained))
    plain = config.task.untuned()
    return Run(run_dir, dataclasses.replace(config, task=plain), plain.build(), params, tokenizer, step)


def _restore_params(
    config: ExperimentConfig,
    shapes: Params,
    run_dir: Path,
    pretrained: Path | None,
) -> Params:
    """Returns the newest checkpoint's parameters, merged with the locked parameters."""
    locked_like, trainable_like = parameters.partition(shapes, config.task.locked_patterns)
    if config.pretrained is not None and pretrained is not None:
        config = dataclasses.replace(config, pretrained=dataclasses.replace(config.pretrained, run=pretrained))
    locked = locked_params(_moved(config, pretrained), run_dir, locked_like)
    with Checkpoints(checkpoint_dir(run_dir), read_only=True) as checkpoints:
        trainable, info = checkpoints.restore_params(trainable_like)
    if checksums.digest(locked) != info.get("locked_checksum"):
        origin = "the files named as `weights`" if config.pretrained is None else config.pretrained.run
        raise UserError(
            f"the locked parameters in {origin} are not those that {run_dir} was trained with; "
            "give the original with --pretrained"
        )
    locked = parameters.cast(locked, config.task.compute_type)  # as in training
    return parameters.merge(locked, trainable)


def _moved(config: ExperimentConfig, weights: Path | None) -> ExperimentConfig:
    """Returns the configuration with the current path of the towers' weights."""
    towers: dict[str, Any] = config.task.towers
    addresses = {part: tower.weights for part, tower in towers.items() if tower.weights}
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
