"""Evaluates zero-shot classification among the distinct captions of a set, as `lit-het calibrate` measures it."""

import dataclasses

from lit_het.data_pipelines.texts.prompts import BARE_TEMPLATE
from lit_het.errors import UserError
from lit_het.eval.evaluation import Evaluation
from lit_het.eval.evaluators.retrieval import with_captions
from lit_het.eval.evaluators.zero_shot import ZeroShot
from lit_het.eval.sets.open_sets import OpenSet
from lit_het.eval.sets.recognition import Recognition, distinct_captions, report_equal
from lit_het.types import EvaluatedModel


@dataclasses.dataclass(frozen=True)
class AmongCaptions:
    """The evaluator of a `ZeroShotConfig` with captions; ``captions`` are those of each image, the first its class."""

    opened: OpenSet
    captions: tuple[tuple[str, ...], ...]
    samples: int = 0

    def check(self, model: EvaluatedModel) -> None:
        """Checks that the model can embed captions, and that these differ."""
        if model.text is None:
            raise UserError("--captions needs an image-text model; a classifier has classes of its own, leave it out")
        names = tuple({captions[0] for captions in self.captions if captions})
        distinct_captions(model.text.tokenize(list(names)), self.opened.config.name)
        self._among(names).check(model)

    def __call__(self, model: EvaluatedModel) -> Evaluation:
        """Returns the figures of a `ZeroShot`; captions of equal tokens are one class."""
        assert model.text is not None
        features = with_captions(self.opened.features(model.features), self.captions)
        texts = [self.captions[position][0] for position in features.positions]
        tokens = model.text.tokenize(texts)
        report_equal("caption", dict(zip(texts, tokens, strict=True)).items())
        first, labels = distinct_captions(tokens, self.opened.config.name)
        classes = self._among(tuple(texts[image] for image in first))
        return classes.of_features(model, dataclasses.replace(features, labels=labels))

    def _among(self, names: tuple[str, ...]) -> ZeroShot:
        return ZeroShot(self.opened, Recognition(names, BARE_TEMPLATE, names), self.samples)
