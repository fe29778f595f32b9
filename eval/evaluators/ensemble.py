"""What averaging several predictions is worth: members of e3, noise samples, or separate models (a deep ensemble)."""

import dataclasses

import numpy as np

from lit_het.console import Bar
from lit_het.errors import UserError, require_at_least
from lit_het.eval.ensembles import join, score_ensemble
from lit_het.eval.evaluation import Evaluation
from lit_het.eval.predictions import member_blocks
from lit_het.eval.recognition import NamesConfig, Recognition
from lit_het.eval.sets import ImageSet, OpenSet, Sets, require_one_label
from lit_het.types import Classifier, EvaluatedModel

# Each of more members has no figures of its own.
MOST_SHOWN = 10


@dataclasses.dataclass(frozen=True)
class EnsembleConfig:
    """Joint and individual figures of an ensemble, and how much its members differ (e3 Sec. 2.2, App. I).

    Attributes:
        data: the set.
        names: between which names the members choose.
        samples: S, noise samples of each image, each of which counts as a member; 0 leaves the noise out, so that
            members are those of e3 or the models.

    Raises:
        UserError: a negative number of samples.
    """

    data: ImageSet
    names: NamesConfig = NamesConfig()
    samples: int = 0

    def __post_init__(self) -> None:
        require_at_least(0, self, "samples")

    def build(self, sets: Sets) -> "Ensemble":
        """Opens the set.

        Raises:
            UserError: images of a class that is not among the candidates; otherwise as `OpenSet`.
        """
        require_one_label(self.data)
        opened = sets.open(self.data)
        recognition = self.names.build(opened)
        recognition.check_labels(opened)
        return Ensemble(opened, recognition, self.samples)


@dataclasses.dataclass(frozen=True)
class Ensemble:
    """The evaluator of an `EnsembleConfig`."""

    opened: OpenSet
    recognition: Recognition
    samples: int

    def check(self, *models: EvaluatedModel) -> None:
        """Refuses models that are no ensemble together.

        Whether an image-text model's head has noise is seen only in what it makes of an image.

        Raises:
            UserError: there is but one member; otherwise as `Recognition.check`.
        """
        for model in models:
            self.recognition.check(model)
        _require_several(sum(map(self._num_members, models)))

    def _num_members(self, model: EvaluatedModel) -> int:
        samples = max(1, self.samples)
        if isinstance(model, Classifier):
            return model.features.num_members * (samples if model.num_samples else 1)
        return samples  # members of the tower make one embedding

    def __call__(self, *models: EvaluatedModel) -> Evaluation:
        """Returns the figures of all members of all models together: ``joint_*``, ``individual_*`` and ``kl``.

        Of at most `MOST_SHOWN` members that are no noise samples also ``member_<number>/*``, in the order of models.

        Raises:
            UserError: as `check`.
        """
        self.check(*models)
        predictors = [self.recognition.predictor(model, self.samples) for model in models]
        features = [self.recognition.matched(self.opened.features(model.features)) for model in models]
        streams, results = map(member_blocks, predictors, features), []
        with Bar(f"scoring {self.opened.config.name}", len(features[0].labels), "images") as bar:
            for blocks in zip(*streams, strict=True):
                members, labels = np.concatenate([members for members, _ in blocks], axis=1), blocks[0][1]
                _require_several(members.shape[1])
                results.append(score_ensemble(members, labels))
                bar.advance(len(labels))
        found = join(results)
        # One noise sample is like another.
        figures, errors = found.figures(each_member=not self.samples and found.num_members <= MOST_SHOWN)
        kind = "ensemble" if len(models) == 1 else "deep_ensemble"
        return Evaluation(kind, self.opened.config.name, figures, errors)


def _require_several(num_members: int) -> None:
    if num_members < 2:
        raise UserError(
            "there is but one member (a deterministic head has no noise): take noise --samples of a HET-XL head, "
            "several checkpoints, or a classifier on an e3 model"
        )
