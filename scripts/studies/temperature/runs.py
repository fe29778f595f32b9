"""Heads on stored embeddings of characters, trained by the runner of grids."""

import argparse
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lit_het.configs.experiment import ExperimentConfig, PretrainedConfig
from lit_het.data_pipelines.data_config import LoaderConfig, WeightedShards
from lit_het.data_pipelines.labels_config import ClassIndex
from lit_het.errors import UserError
from lit_het.eval.evaluators.zero_shot import NOISY
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ZeroShotConfig
from lit_het.heads.classification_config import ClassificationHeadConfig, HetXLConfig
from lit_het.heads.noise_config import CovarianceConfig, SamplingConfig
from lit_het.heads.temperature_config import BoundedTemperature, LogTemperature, TemperatureConfig
from lit_het.tasks.classification import ClassificationConfig
from lit_het.tasks.temperature_gradient_config import TemperatureGradient
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.optimizers_config import AdamW, Optimizer, ParameterGroup
from lit_het.training.schedules import Schedule
from scripts.studies.harness import Figures, measured, trained
from scripts.studies.temperature.data import ALL, FIT, TEST, VALIDATION, tower_config

BATCH_SIZE = 64
EVAL_SAMPLES = 64
NOISE = CovarianceConfig(num_factors=8, form="efficient", initial_noise_norm=1.0)
HEAD = HetXLConfig(NOISE, sampling=SamplingConfig(num_samples=8, num_eval_samples=EVAL_SAMPLES))
# Of the learning rate of a learned τ: Adam moves t of Eq. 16 by no more than the learning rate a step, and these runs
# have a hundredth of the paper's steps.
TEMPERATURE_RATE = 10.0
SETS = {"validation": VALIDATION, "test": TEST}
FIGURES = ("nll", "top1")
TEMPERATURE = "train/temperature"


def fixed(tau: float) -> TemperatureConfig:
    """Returns a τ that is not trained: as a parameter, so that all values share one compiled program."""
    return LogTemperature(tau, learning_rate_factor=0.0)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What the runs of the study differ in.

    Attributes:
        name: of their folders.
        head: the head, with its τ.
        shards: the typefaces of training, `FIT` or `ALL`.
        gradient: how held-out rows train τ.
        is_validated: whether these are further rows from the typeface of validation.
        epochs: over the training typefaces; held-out rows of batches are made up for by further ones (App. G.3).
        temperature_rate: of a learned τ.
        batch_size: of all rows but those of validation.
    """

    name: str
    head: ClassificationHeadConfig = HEAD
    shards: str = ALL
    gradient: TemperatureGradient | None = None
    is_validated: bool = False
    epochs: float = 2.0
    temperature_rate: float = TEMPERATURE_RATE
    batch_size: int = BATCH_SIZE


def with_temperature(head: ClassificationHeadConfig, temperature: TemperatureConfig) -> ClassificationHeadConfig:
    """Returns a head with another τ."""
    return dataclasses.replace(head, temperature=temperature)


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table.

    Attributes:
        title: what was varied.
        nll, top1: as printed in the paper; empty where it has no such row.
        by_seed: figures of a run of each seed.
    """

    title: str
    nll: str
    top1: str
    by_seed: Mapping[int, Figures]


@dataclasses.dataclass(frozen=True)
class Runner:
    """Trains settings with seeds, unless they are finished.

    Attributes:
        options: of the study; ``output`` is the folder of the data, the tower and the embeddings.
        counts: images of each set.
    """

    options: argparse.Namespace
    counts: Mapping[str, int]

    @property
    def root(self) -> Path:
        """The folder of the study."""
        return self.options.output

    def by_seed(self, setting: Setting) -> dict[int, Figures]:
        """Returns the figures of a setting for all seeds; raises as `figures`."""
        return {seed: self.figures(setting, seed) for seed in self.options.seeds}

    def row(self, title: str, setting: Setting, nll: str = "", top1: str = "") -> Row:
        """Returns the row of a setting, with the printed figures."""
        return Row(title, nll, top1, self.by_seed(setting))

    def figures(self, setting: Setting, seed: int) -> Figures:
        """Returns the figures of a run on both sets, such as ``test/nll``, and its τ."""
        return self.result_of(self.configuration(setting), setting.name, seed, "supervised")

    def result_of(self, config: ExperimentConfig, name: str, seed: int, kind: str) -> Figures:
        """Returns the figures of a run of any configuration, whose evaluations are of a kind; as `figures`."""
        run_dir, data = self.root / "runs" / f"{name}_seed{seed}", dataclasses.replace(config.data, seed=seed)
        config = dataclasses.replace(config, run_dir=run_dir, data=data, seed=seed)
        found = measured(name, seed, {"length": str(config.length)}, lambda *_: trained(config), self.options)
        if self.options.table and not found:
            raise UserError(f"{run_dir} is not finished; start again without --table")
        figures = {"temperature": found.get(TEMPERATURE, np.nan)}
        for title in SETS:
            for figure in FIGURES:
                quiet = found.get(f"{kind}/{title}/{figure}", np.nan)
                figures[f"quiet/{title}/{figure}"] = quiet
                figures[f"{title}/{figure}"] = found.get(f"{kind}/{title}/{NOISY}/{figure}", quiet)
        return figures

    def configuration(self, setting: Setting) -> ExperimentConfig:
        """Returns the run of a setting."""
        data, size = self.data(setting.shards), setting.batch_size
        share = 0.0
        if setting.is_validated:
            # An eighth more rows, so that as many are trained on as without.
            more = WeightedShards((str(self.root / "data" / VALIDATION),), 1 / 8, held_out=True)
            data, size = dataclasses.replace(data, mixture=(more,)), size * 9 // 8
        elif setting.gradient is not None:
            share = setting.gradient.held_out or 0.0
        steps = round(setting.epochs * self.counts[setting.shards] / setting.batch_size * (1 + share))
        learned = isinstance(setting.head.temperature, BoundedTemperature)
        groups = (ParameterGroup("head/temperature/.*", setting.temperature_rate),) if learned else ()
        tower = tower_config(self.root)
        assert isinstance(tower.task, ClassificationConfig)
        task = dataclasses.replace(
            tower.task, head=setting.head, locked=("image_tower/.*",), temperature_gradient=setting.gradient
        )
        noise = setting.head.sampling
        return dataclasses.replace(
            tower,
            run_dir=self.root,
            task=task,
            data=dataclasses.replace(data, batch_size=size, labels=ClassIndex()),
            pretrained=PretrainedConfig(self.root / "tower"),
            length=Duration(steps),
            # Without clipping, which would let the gradient of τ change the step of the others.
            optimizer=Optimizer(AdamW(second_decay=0.95), weight_decay=0.0, clip_norm=None, groups=groups),
            schedule=Schedule(3e-3, warmup=Duration(50)),
            cadence=Cadence(log_steps=100, save_steps=100_000),
            evaluations=self.evaluations(setting.shards, noise.num_eval_samples if noise else 0),
        )

    def data(self, shards: str) -> LoaderConfig:
        """Returns the stored embeddings of a set, to train on."""
        return LoaderConfig(
            shards=(str(self.root / "data" / shards),),
            image_size=32,
            embeddings=str(self.root / "embeddings"),
            threads=1,
        )

    def evaluations(self, shards: str, samples: int, **changes: Any) -> tuple[ZeroShotConfig, ...]:
        """Returns those on the typefaces of validation, unless it is trained on, and of the test."""
        stored = str(self.root / "embeddings")
        return tuple(
            ZeroShotConfig(
                ImageSet(title, str(self.root / "data" / name), split=".", batch_size=128, embeddings=stored),
                samples=samples,
                **changes,
            )
            for title, name in SETS.items()
            if title == "test" or shards == FIT
        )
