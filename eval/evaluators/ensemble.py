"""What averaging several predictions is worth: members of e3, noise samples, or separate models (a deep ensemble)."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from eval.ensembles import join, score_ensemble
from eval.evaluation import Evaluation
from eval.predictions import member_blocks
from eval.recognition import NamesConfig, Recognition
from eval.sets import ImageSet, OpenSet, Sets, require_one_label
from lit_het.errors import UserError, require_at_least
from lit_het.types import Classifier, EvaluatedModel


@dataclasses.dataclass(frozen=True)
class EnsembleConfig:
    """Joint and individual figures of an ensemble, and how much its members differ (e3 Sec. 2.2, App. I).

    Attributes:
        data: the set.
        names: between which names the members choose.
        samples: S, noise samples of each picture, each of which counts as a member; 0 leaves the noise out, so that
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
        """Opens the set; raises as `OpenSet`."""
        require_one_label(self.data)
        opened = sets.open(self.data)
        return Ensemble(opened, self.names.build(opened), self.samples)


@dataclasses.dataclass(frozen=True)
class Ensemble:
    """The evaluator of an `EnsembleConfig`."""

    opened: OpenSet
    recognition: Recognition
    samples: int

    def __call__(self, model: EvaluatedModel) -> Evaluation:
        """Returns the figures of one model's members or noise samples."""
        return self.of_models([model])

    def of_models(self, models: Sequence[EvaluatedModel]) -> Evaluation:
        """Returns the figures of all members of all models together: ``joint_*``, ``individual_*`` and ``kl``.

        Raises:
            UserError: there is but one member.
        """
        for model in models:
            if isinstance(model, Classifier) and self.samples:
                raise UserError("a classifier's head averages its noise samples itself; leave out --samples")
        streams = []
        for model in models:
            features = self.recognition.matched(self.opened.features(model.features))
            streams.append(member_blocks(self.recognition.predictor(model, self.samples), features))
        results = []
        for blocks in zip(*streams, strict=True):
            members, labels = np.concatenate([members for members, _ in blocks], axis=1), blocks[0][1]
            if members.shape[1] < 2:
                raise UserError(
                    "there is but one member (a deterministic head has no noise): take noise --samples of a HET-XL "
                    "head, several checkpoints, or a classifier on an e3 model"
                )
            results.append(score_ensemble(members, labels))
        kind = "ensemble" if len(models) == 1 else "deep_ensemble"
        return Evaluation(kind, self.opened.config.name, join(results).metrics())
