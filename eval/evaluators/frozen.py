"""Evaluates the features of an image tower: few-shot classification and the linear probe."""

import collections
import dataclasses
from collections.abc import Sequence

import numpy as np
import scipy
from jaxtyping import Int

from lit_het.console import Bar, message
from lit_het.data_pipelines.shards.portions import ALL
from lit_het.data_pipelines.shards.storage import read_lines
from lit_het.data_pipelines.texts.prompts import CANDIDATES_FILE
from lit_het.errors import UserError, pluralize
from lit_het.eval.evaluation import Drawing, Evaluation, of_part
from lit_het.eval.features import Features
from lit_het.eval.few_shot import as_trained, few_shot
from lit_het.eval.fits import FewShotOptions, LinearProbeOptions
from lit_het.eval.linear_probe import LinearProbe, train_linear_probe
from lit_het.eval.metrics import scores
from lit_het.eval.metrics.calibration import check_labels
from lit_het.eval.metrics.classes import merge_candidates, relabelled_accuracy
from lit_het.eval.predictions import Predictions
from lit_het.eval.report.naming import is_reserved
from lit_het.eval.sets import ImageSet, have_same_shards, require_one_label, require_other_split
from lit_het.eval.sets.folders import parse_set
from lit_het.eval.sets.open_sets import OpenSet, Sets
from lit_het.eval.sets.recognition import read_larger
from lit_het.eval.views import Views
from lit_het.types import EvaluatedModel


@dataclasses.dataclass(frozen=True)
class OtherSet:
    """A test set of a linear probe that was trained on another set.

    Attributes:
        opened: the set.
        groups: for each class of the set, the classes of the probe that count as this class.
    """

    opened: OpenSet
    groups: tuple[tuple[int, ...], ...]

    def require_trained(self, model: EvaluatedModel, classes: Int[np.ndarray, " c"]) -> None:
        """Checks that every class with images has training images; ``classes`` of the probe have some."""
        for label in np.unique(self.opened.features(model.features).labels):
            check_labels(label[None], len(self.groups))
            if not np.isin(self.groups[label], classes).any():
                raise UserError(
                    f"{self.opened.config.name}: class {self.opened.class_names[label]!r} has images, but no training "
                    "image; train on all classes, or leave the set out of --others"
                )

    def predictions(self, probe: LinearProbe, model: EvaluatedModel) -> Predictions:
        """Returns predictions among the set's own classes."""
        found = _predictions(probe, model, self.opened.features(model.features))
        return dataclasses.replace(found, log_probabilities=merge_candidates(found.log_probabilities, self.groups))


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
    """The evaluator of a `LinearProbeConfig`; other sets have the classes of the training images that count as theirs.

    Attributes:
        train, test: both splits.
        fit: options of the fit.
        relabels: the acceptable classes of each test image; None for the label.
        others: further test sets.
    """

    train: OpenSet
    test: OpenSet
    fit: LinearProbeOptions
    relabels: tuple[tuple[int, ...], ...] | None = None
    others: tuple[OtherSet, ...] = ()

    def check(self, model: EvaluatedModel) -> None:
        """Accepts any model, as every model has an image tower, if there are images for the crops."""
        if self.fit.random_crops:
            self.train.require_crops()

    def __call__(self, model: EvaluatedModel) -> Evaluation:
        """Returns the metrics of `lit_het.eval.metrics.scores` for the probe that is best on minival, and its setting.

        Those of other sets have the set before their names. Probabilities are the softmax of the logits, although
        training used a sigmoid per class.
        """
        train, test = self.train.features(model.features), self.test.features(model.features)
        classes = np.unique(train.labels)
        as_trained(test.labels, classes, "linear-probe")
        for other in self.others:  # before the training, which may take long
            other.require_trained(model, classes)
        probe = self._trained(model, train)
        predictions = _predictions(probe, model, test)
        found, errors = scores.figures(predictions)
        if self.relabels is not None:
            acceptable = [self.relabels[position] for position in predictions.positions]
            found["relabelled_top1"] = relabelled_accuracy(predictions.log_probabilities, acceptable)
        chance = dict(scores.chance(len(classes)))
        for other in self.others:
            of_other, name = other.predictions(probe, model), other.opened.config.name
            figures, of_figures = scores.figures(of_other)
            found |= of_part(name, figures)
            errors |= of_part(name, of_figures)
            chance |= of_part(name, scores.chance(of_other.num_classes))
        setting = dataclasses.asdict(probe.best)
        crop = setting.pop("crop")
        found |= {f"best/{name}": float(value) for name, value in setting.items()}
        for kind in self.fit.crops if len(self.fit.crops) > 1 else ():
            if of_kind := [one.accuracy for one in probe.grid if one.crop == kind and one.is_finite]:
                found[f"best/accuracy_{kind}_crop"] = max(of_kind)
        drawing = Drawing(texts={"crop": [crop]})
        return Evaluation("linear_probe", self.test.config.name, found, errors, chance, lambda: drawing)

    def _trained(self, model: EvaluatedModel, train: Features) -> LinearProbe:
        views = Views(self.train, train, model.features, self.fit)
        with Bar("probing", self.fit.num_steps(len(train.labels)), "steps") as bar:
            return train_linear_probe(
                train.joint_embeddings(model.features),
                train.labels,
                len(self.train.class_names),
                self.fit,
                bar.advance,
                views,
            )


def _predictions(probe: LinearProbe, model: EvaluatedModel, features: Features) -> Predictions:
    log_p = scipy.special.log_softmax(probe.logits(features.joint_embeddings(model.features)), axis=1)
    zeros = np.zeros(len(log_p), np.float32)
    return Predictions(log_p, features.labels, features.positions, zeros, zeros)


def open_splits(data: ImageSet, train_split: str, sets: Sets) -> tuple[OpenSet, OpenSet]:
    """Opens the training split and the set itself; raises as `OpenSet`, and for sets of texts to translate."""
    require_one_label(data)
    require_other_split(data, train_split)
    train = dataclasses.replace(data, name=f"{data.name} ({train_split})", split=train_split, portion=ALL)
    opened = sets.open(train), sets.open(data)
    if not opened[1].has_images:
        raise UserError("few-shot and linear-probe need an image tower, and the model translates texts; use captioning")
    return opened


def open_others(places: Sequence[str], train: OpenSet, test: OpenSet, sets: Sets) -> tuple[OtherSet, ...]:
    """Opens the further test sets of a probe, ``NAME=FOLDER`` or ``FOLDER``.

    Raises:
        UserError: a set has the name of another or of a part of the figures, or the training images; or a class of a
            set is none of theirs, or several.
    """
    found = dict[str, OtherSet]()
    like = dataclasses.replace(test.config, split=ImageSet.split, portion=ALL, embeddings=None)
    for place in places:
        opened = sets.open(parse_set(place, like))
        name = opened.config.name
        if name in (*found, test.config.name):
            raise UserError(f"two sets have the name {name}; give each its own name, NAME=DIR")
        if is_reserved(name):
            raise UserError(f"{name} is the name of other figures; give the set of --others another, NAME=DIR")
        if have_same_shards(opened.config, train.config):
            raise UserError(f"{name}: these are the training images of the probe; leave them out of --others")
        found[name] = OtherSet(opened, _groups(opened, train))
    return tuple(found.values())


def _groups(opened: OpenSet, train: OpenSet) -> tuple[tuple[int, ...], ...]:
    """Returns the classes of the training images that count as each class of a set, see `open_others`."""
    names, labels, name = train.class_names, opened.class_names, opened.config.name
    larger = read_larger(opened.config.directory, labels)
    if larger is not None and larger.num_classes == len(names):
        candidates = read_lines(f"{opened.config.directory}/{CANDIDATES_FILE}")
        if candidates != names and sorted(candidates) == sorted(names):
            raise UserError(
                f"{name}: its candidates.txt has the classes of {train.config.name} in another order, and would count "
                f"others; write it in the order of {train.config.directory}/{train.config.names_file}"
            )
        return larger.groups
    if labels == names:  # the same classes in the same order, where several may share a name
        return tuple((number,) for number in range(len(names)))
    ways_out = (
        f"write candidates.txt and classes.json beside its {opened.config.names_file}, as lit-het data prepare does"
    )
    if larger is not None:
        ways_out = f"take a candidates.txt of the {len(names)} classes of the probe, and not of {larger.num_classes}"
    times, own = collections.Counter(names), collections.Counter(labels)
    for label in labels:
        if times[label] != 1 or own[label] > 1:
            what = "not a single one" if label in times else "none"
            raise UserError(
                f"{name}: class {label!r} is {what} of {train.config.name}; {ways_out}, or leave it out of --others"
            )
    position = {known: number for number, known in enumerate(names)}
    return tuple((position[label],) for label in labels)
