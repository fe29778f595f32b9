"""The model behind the page."""

import threading
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8

from lit_het.api.candidates import candidates
from lit_het.api.images import decode
from lit_het.api.results import describe_set
from lit_het.data_pipelines.storage import read_lines
from lit_het.errors import UserError
from lit_het.eval.answers import Answer, NoiseRank, answer, features_of, noise_ranks, split_labels
from lit_het.eval.captions import CaptionIndex, index_captions
from lit_het.eval.evaluation import read_records
from lit_het.eval.predictions import samples_of
from lit_het.runs.opening import Run, open_run
from lit_het.tasks import quantities
from lit_het.tasks.classification import ClassificationTask
from lit_het.tasks.contrastive import ContrastiveTask
from lit_het.types import EvaluatedModel

_NUM_CAPTIONS = 8
_COVERAGE = 0.9  # of prediction sets
_NUM_IN_SET = 12


class DemoModel:
    """The model of a page. It is thread-safe: calls from several threads run one after the other.

    Attributes:
        run: run of the model.
        captions: captions to search, or None.
    """

    def __init__(self, run: Run, model: EvaluatedModel, captions: CaptionIndex | None):
        self.run, self.captions = run, captions
        self._model, self._records = model, read_records(run.run_dir)
        self._lock = threading.Lock()

    @property
    def calibration(self) -> str:
        """How probabilities were calibrated, in words."""
        return str(self._model.calibration or "not calibrated")

    @property
    def samples(self) -> int:
        """How many noise samples an image has unless others are chosen: as many as the temperature was fitted for."""
        return samples_of(self._model, None)

    def see(self, data: bytes, name: str) -> tuple[UInt8[np.ndarray, "h w c"], Float[np.ndarray, " f"]]:
        """Returns the preprocessed image and its features.

        Raises:
            UserError: the bytes are not an image.
        """
        with self._lock:  # one at a time: a small file may decode to a very large image
            square = decode(data, self.run.config.data, name)
            return square, next(features_of(self._model.features, [square], 1))

    def answer(
        self, features: Float[np.ndarray, " f"], labels: str, prompts: str, samples: int, seed: int
    ) -> tuple[tuple[str, ...], Answer, str]:
        """Returns the labels in the user's text, the model's predictions for an image, and its prediction set in words.

        The set is empty text without calibration.

        Raises:
            UserError: there are not at least two different labels.
        """
        found = split_labels(labels)
        coverage = None if self._model.calibration is None else _COVERAGE
        with self._lock:
            among = candidates(self._model, self.run.run_dir, found, prompts, coverage)
            predictions = answer(among.predictor, features, samples, seed)
        if among.threshold is None:
            return found, predictions, ""
        inside = [found[place] for place in predictions.prediction_set(among.threshold)]
        return found, predictions, describe_set(inside, among.coverage, _NUM_IN_SET)

    def noise(self, features: Float[np.ndarray, " f"]) -> tuple[float, list[NoiseRank]]:
        """Returns an image's noise norm, and its ranks among the sets that the run was evaluated on."""
        with self._lock:
            norm = float(self._model(quantities.noise_norm, features[None, None])[0])
        return norm, noise_ranks(norm, self._records, self.run.step)

    def nearest(self, features: Float[np.ndarray, " f"]) -> list[tuple[str, float]]:
        """Returns the captions nearest to an image and their cosines; empty without an index."""
        if self.captions is None:
            return []
        with self._lock:
            return self.captions.nearest(self._model(quantities.embeddings, features[None, None])[0], _NUM_CAPTIONS)


def open_model(
    checkpoint: Path, captions: str | None, pretrained: Path | None = None, *, calibrated: bool = True
) -> DemoModel:
    """Opens a run and embeds the captions; errors are those of `lit_het.apps.demo.server.demo`."""
    texts = None if captions is None else read_lines(captions)
    run = open_run(checkpoint, pretrained)
    if not isinstance(run.task, ContrastiveTask):
        kind = "classifier" if isinstance(run.task, ClassificationTask) else "decoder"
        raise UserError(f"{checkpoint} is a {kind}; the demo needs a run with a text tower")
    model = run.model(calibrated=calibrated)
    return DemoModel(run, model, None if texts is None else index_captions(model, texts))
