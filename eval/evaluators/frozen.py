"""Evaluates the features of an image tower: few-shot classification and the linear probe."""

import dataclasses

import numpy as np
import scipy

from lit_het.console import Bar, message
from lit_het.data_pipelines.shards.portions import ALL
from lit_het.errors import UserError, pluralize
from lit_het.eval.evaluation import Evaluation
from lit_het.eval.few_shot import as_trained, few_shot
from lit_het.eval.fits import FewShotOptions, LinearProbeOptions
from lit_het.eval.linear_probe import train_linear_probe
from lit_het.eval.metrics import scores
from lit_het.eval.predictions import Predictions
from lit_het.eval.sets import ImageSet, require_one_label, require_other_split
from lit_het.eval.sets.open_sets import OpenSet, Sets
from lit_het.types import EvaluatedModel


@dataclasses.dataclass(frozen=True)
class FewShot:
    """The evaluator of a `FewShotConfig`."""

    train: OpenSet
    test: OpenSet
    fit: FewShotOptions

    def check(self, model: EvaluatedModel) -> None:
        """Accepts any model: every model has an image tower."""

    def __call__(self, model: EvaluatedModel) -> Evaluation:
        """Returns ``<shots>_shot``, the mean accuracy over seeds, with standard errors over seeds."""
        train, test = self.train.features(model.features), self.test.features(model.features)
        with Bar("fitting", len(self.fit.shots) * len(self.fit.seeds), "fits") as bar:
            found = few_shot(
                train.embeddings(model.features),
                train.labels,
                test.embeddings(model.features),
                test.labels,
                self.fit,
                bar.advance,
            )
        for shots, count in zip(self.fit.shots, found.short_classes, strict=True):
            if count:
                message(f"{shots}_shot: {pluralize(count, 'class')} with fewer training images, of which all are taken")
        if len(self.fit.l2) > 1 and np.isnan(found.held_out).all():
            middle = self.fit.l2[found.chosen.flat[0]]
            message(f"no class has two training images for the choice of l2: it is {middle:g}, the middle of the grid")
        names = [f"{shots}_shot" for shots in self.fit.shots]
        return Evaluation(
            kind="few_shot",
            name=self.test.config.name,
            figures=dict(zip(names, map(float, found.mean), strict=True)),
            errors=dict(zip(names, map(float, found.standard_error), strict=True)),
            chance=dict.fromkeys(names, 1 / len(np.unique(train.labels))),
        )


@dataclasses.dataclass(frozen=True)
class Probe:
    """The evaluator of a `LinearProbeConfig`."""

    train: OpenSet
    test: OpenSet
    fit: LinearProbeOptions

    def check(self, model: EvaluatedModel) -> None:
        """Accepts any model: every model has an image tower."""

    def __call__(self, model: EvaluatedModel) -> Evaluation:
        """Returns the metrics of `lit_het.eval.metrics.scores` for the probe that is best on minival, and its setting.

        Probabilities are the softmax of the logits, although training used a sigmoid per class.
        """
        train, test = self.train.features(model.features), self.test.features(model.features)
        classes = np.unique(train.labels)
        as_trained(test.labels, classes, "linear-probe")
        rows, others = (one.joint_embeddings(model.features) for one in (train, test))
        with Bar("probing", self.fit.num_steps(len(train.labels)), "steps") as bar:
            probe = train_linear_probe(rows, train.labels, len(self.train.class_names), self.fit, bar.advance)
        logits = probe.logits(others)
        zeros = np.zeros(len(logits), np.float32)
        log_p = scipy.special.log_softmax(logits, axis=1)
        found, errors = scores.figures(Predictions(log_p, test.labels, test.positions, zeros, zeros))
        setting = dataclasses.asdict(probe.best)
        found |= {f"best/{name}": float(value) for name, value in setting.items()}
        chance = scores.chance(len(classes))
        return Evaluation("linear_probe", self.test.config.name, found, errors, chance)


def open_splits(data: ImageSet, train_split: str, sets: Sets) -> tuple[OpenSet, OpenSet]:
    """Opens the training split and the set itself; raises as `OpenSet`, and for sets of texts to translate."""
    require_one_label(data)
    require_other_split(data, train_split)
    train = dataclasses.replace(data, name=f"{data.name} ({train_split})", split=train_split, portion=ALL)
    opened = sets.open(train), sets.open(data)
    if not opened[1].has_images:
        raise UserError("few-shot and linear-probe need an image tower, and the model translates texts; use captioning")
    return opened
