"""Evaluates ensembles of e3 members, noise samples, or separate models (deep ensembles)."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from lit_het.console import Bar, message
from lit_het.errors import UserError, pluralize
from lit_het.eval.evaluation import Drawing, Evaluation
from lit_het.eval.metrics.diversity import information_of_members
from lit_het.eval.metrics.ensembles import EnsembleResult, join, mean_prediction, score_ensemble
from lit_het.eval.metrics.multi_label import ensemble_figures
from lit_het.eval.metrics.significance import standard_error
from lit_het.eval.predictions import Predictor, class_log_probabilities, member_blocks, num_members
from lit_het.eval.sets.open_sets import OpenSet
from lit_het.eval.sets.recognition import Recognition
from lit_het.types import EvaluatedModel

# With more members, the metrics of single members are left out.
MOST_SHOWN = 10


@dataclasses.dataclass(frozen=True)
class Ensemble:
    """The evaluator of an `EnsembleConfig`."""

    opened: OpenSet
    recognition: Recognition
    samples: int
    weights: tuple[int, ...] = ()

    def check(self, *models: EvaluatedModel) -> None:
        """Checks that the models have at least two members together."""
        if self.weights and len(self.weights) != len(models):
            raise UserError(
                f"there are {pluralize(len(models), 'model')} and {len(self.weights)} --weights; give one each"
            )
        for model in models:
            self.recognition.check(model, self.samples)
            if self.opened.config.has_several_labels:
                self.recognition.require_class_probabilities(model, "an ensemble")
        if sum(num_members(model, self.samples) for model in models) < 2:
            raise UserError(
                "there is only one member (a deterministic head has no noise): use --samples with a HET-XL head, "
                "several checkpoints, or a classifier on an e3 model"
            )

    def __call__(self, *models: EvaluatedModel) -> Evaluation:
        """Returns ``joint_*``, ``individual_*`` and the measures of `Diversity` over the members of all models.

        For up to `MOST_SHOWN` members without noise samples also returns ``member_<number>/*``, in the order of models.

        The joint prediction is the mean over members, where each model contributes its own calibrated prediction: its
        temperature was fitted to the mean of its members. A model that is a single member is calibrated as such; the
        members of a model with several are scored as trained, since they have no temperature of their own. Where these
        have noise samples, ``mutual_information_of_members`` is that of the members without their samples. Images with
        several labels have the figures of `lit_het.eval.metrics.multi_label`, as trained.
        """
        self.check(*models)
        predictors = [self.recognition.predictor(model, self.samples) for model in models]
        read = self.opened.features_of([model.features for model in models])
        kind = "ensemble" if len(models) == 1 else "deep_ensemble"
        if self.opened.config.has_several_labels:
            pairs = zip(predictors, read, strict=True)
            members = np.concatenate([class_log_probabilities(*pair) for pair in pairs], axis=1)
            found = ensemble_figures(members, read[0].labels, each_member=self._shows_members(members.shape[1]))
            return Evaluation(kind, self.opened.config.name, *found)
        features = [self.recognition.matched(rows) for rows in read]
        streams, results, information = map(member_blocks, predictors, features), [], []
        equal = [*itertools.combinations(range(len(models)), 2)]
        with Bar(f"scoring {self.opened.config.name}", len(features[0].labels), "images") as bar:
            for blocks in zip(*streams, strict=True):
                members, labels = [members for members, _ in blocks], blocks[0][1]
                equal = [(one, other) for one, other in equal if np.array_equal(members[one], members[other])]
                results.append(_score(predictors, members, labels, self.weights))
                if self._has_both(models):
                    information.append(information_of_members(members[0], models[0].num_predictions))
                bar.advance(len(labels))
        if equal:
            one, other = (number + 1 for number in equal[0])
            message(f"models {one} and {other} predict the same of every image, as copies of one run do")
        found = join(results)
        figures, errors = found.figures(each_member=self._shows_members(found.num_members))
        if information:
            name, values = "mutual_information_of_members", np.concatenate(information)
            figures[name], errors[name] = float(values.mean()), standard_error(values)
        calibrated = "; ".join(str(model.calibration or "not calibrated") for model in models)
        if not any(model.calibration for model in models):
            calibrated = ""
        name, draw = self.opened.config.name, lambda: Drawing(found.figures_of_smaller())
        return Evaluation(kind, name, figures, errors, draw=draw, calibrated=calibrated)

    def _has_both(self, models: Sequence[EvaluatedModel]) -> bool:
        """Whether the members of one model have noise samples: then there is information of members beside theirs."""
        return len(models) == 1 and models[0].num_predictions > 1 and self.samples > 1 and models[0].has_noise

    def _shows_members(self, count: int) -> bool:
        # Single noise samples are interchangeable, so they have no metrics of their own.
        return not self.samples and count <= MOST_SHOWN


def _score(
    predictors: Sequence[Predictor],
    members: Sequence[Float[np.ndarray, "b _ k"]],
    labels: Int[np.ndarray, " b"],
    weights: Sequence[int],
) -> EnsembleResult:
    """Scores the members of all models, and the weighted mean of the models' predictions.

    Args:
        predictors: the models.
        members: log-probabilities of the members of each model, as trained.
        labels: true classes.
        weights: of the models; without any, their numbers of members.
    """
    models = [predictor.pooled(one) for predictor, one in zip(predictors, members, strict=True)]
    shown = [model[:, None] if one.shape[1] == 1 else one for model, one in zip(models, members, strict=True)]
    counts = np.array(weights or [one.shape[1] for one in members], float)
    joint = mean_prediction(np.stack(models, axis=1), counts)
    return score_ensemble(np.concatenate(shown, axis=1), labels, joint)
