"""The models behind the pages: image-text models and decoders."""

import threading
from pathlib import Path

import numpy as np
from jaxtyping import Float, UInt8

from lit_het.calibrations import Calibrated
from lit_het.data_pipelines.shards.storage import read_lines
from lit_het.errors import UserError
from lit_het.eval.answers import Answer, NoiseRank, answer, features_of, noise_ranks, split_labels
from lit_het.eval.captions import CaptionIndex, index_captions
from lit_het.eval.evaluation import read_records
from lit_het.eval.predictions import samples_of
from lit_het.models.candidates import candidates
from lit_het.models.images import decode
from lit_het.models.opening import Run, open_run
from lit_het.models.results import describe_set
from lit_het.tasks import quantities
from lit_het.texts import GenerationConfig, TextWriter, Written
from lit_het.types import EvaluatedModel

MAX_CHARACTERS = 10_000
"""Longer questions and lists of answers are refused."""
MAX_ANSWERS = 100
"""The most answers that are ranked."""

_NUM_CAPTIONS = 8
_COVERAGE = 0.9  # of prediction sets
_NUM_IN_SET = 12


class PageModel:
    """The model of any page. It is thread-safe: calls from several threads run one after the other.

    Attributes:
        run: run of the model.
    """

    def __init__(self, run: Run, model: EvaluatedModel):
        self.run = run
        self._model, self._lock = model, threading.Lock()

    @property
    def calibration(self) -> str:
        """How probabilities were calibrated, in words."""
        return str(self._model.calibration or "not calibrated")

    def see(self, data: bytes, name: str) -> tuple[UInt8[np.ndarray, "h w c"], Float[np.ndarray, " f"]]:
        """Returns the image as the tower sees it, and its features."""
        with self._lock:  # one at a time: a small file may decode to a very large image
            seen = decode(data, self.run.config.data, name)
            picture = self.run.config.data.preprocessing.picture(seen)
            return picture, next(features_of(self._model.features, [seen], 1))


class DemoModel(PageModel):
    """The image-text model of a page.

    Attributes:
        captions: captions to search, or None.
    """

    def __init__(self, run: Run, model: EvaluatedModel, captions: CaptionIndex | None):
        super().__init__(run, model)
        self.captions = captions
        self._records = read_records(run.run_dir)

    @property
    def samples(self) -> int:
        """How many noise samples an image has unless others are chosen: as many as the temperature was fitted for."""
        return samples_of(self._model, None)

    def answer(
        self, features: Float[np.ndarray, " f"], labels: str, prompts: str, samples: int, seed: int
    ) -> tuple[tuple[str, ...], Answer, str]:
        """Returns the labels in the user's text, the model's predictions for an image, and remarks.

        These are its prediction set, which needs calibration, and how many labels training captions did not have.
        """
        found, calibration = split_labels(labels), self._model.calibration
        coverage = None if calibration is None or calibration.prior != "seen" else _COVERAGE
        with self._lock:
            among = candidates(self._model, self.run.run_dir, found, prompts, coverage)
            predictions = answer(among.predictor, features, samples, seed)
        remarks = [among.new_in_words]
        if among.threshold is not None:
            inside = [found[place] for place in predictions.prediction_set(among.threshold)]
            remarks.insert(0, describe_set(inside, among.coverage, _NUM_IN_SET))
        return found, predictions, "; ".join(filter(None, remarks))

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


class DemoDecoder(PageModel):
    """The decoder of a page."""

    def __init__(self, run: Run, model: EvaluatedModel, writer: TextWriter):
        super().__init__(run, model)
        self._writer = writer

    @property
    def has_noise(self) -> bool:
        """Whether probabilities may be averaged over noise samples."""
        return self._writer.check_samples(2) > 0

    def caption(self, features: Float[np.ndarray, " f"], num_texts: int, samples: int, seed: int) -> list[Written]:
        """Returns captions of an image, the best first."""
        return self._written(features, self._writer.caption_prompt, num_texts, samples, seed)

    def ask(
        self, features: Float[np.ndarray, " f"], question: str, answers: str, num_texts: int, samples: int, seed: int
    ) -> list[Written]:
        """Returns answers to a question about an image, the best first.

        Args:
            features: of the image.
            question: as the user writes it.
            answers: to rank, separated by commas; blank to answer freely.
            num_texts: how many free answers.
            samples: S, the number of noise samples; 0 for no noise.
            seed: of the noise.
        """
        if not question.strip():
            raise UserError("the question is empty; ask one")
        prompt = self._writer.question_prompt(_limited("question", question))
        if not answers.strip():
            return self._written(features, prompt, num_texts, samples, seed)
        among = split_labels(_limited("list of answers", answers))
        if len(among) > MAX_ANSWERS:
            raise UserError(f"{len(among):,} answers; give at most {MAX_ANSWERS}")
        self._writer.max_new_tokens(prompt)  # so that no answer is blamed for a long question
        with self._lock:
            return self._writer.rank(features, prompt, among, samples=samples, seed=seed)

    def _written(
        self, features: Float[np.ndarray, " f"], prompt: str, num_texts: int, samples: int, seed: int
    ) -> list[Written]:
        how = GenerationConfig(num_texts=num_texts).within(self._writer.max_new_tokens(prompt))
        with self._lock:
            return self._writer.write(features[None], [prompt], how, samples=samples, seed=seed)[0]


def open_model(
    checkpoint: Path, captions: str | None, pretrained: Path | None = None, *, calibrated: Calibrated = True
) -> DemoModel | DemoDecoder:
    """Opens a run and embeds the captions; errors are those of `lit_het.apps.demo.server.demo`."""
    texts = None if captions is None else read_lines(captions)
    run = open_run(checkpoint, pretrained)
    task = run.config.task
    if not (task.embeds_texts or task.writes_text):
        raise UserError(f"{checkpoint} is a classifier; the demo needs a run with a text tower, or a decoder")
    if task.reads == "text":
        raise UserError(f"{checkpoint} translates texts, and the demo shows images; use lit-het translate")
    if task.writes_text and texts is not None:
        raise UserError(f"{checkpoint} is a decoder, which writes captions and searches none; leave out --captions")
    model = run.model(calibrated=calibrated)
    if task.embeds_texts:
        return DemoModel(run, model, None if texts is None else index_captions(model, texts))
    assert model.writer is not None, "a decoder writes"
    return DemoDecoder(run, model, model.writer)


def _limited(name: str, text: str) -> str:
    """Returns a text, or raises a `UserError` if no decoder can have use of it."""
    if len(text) > MAX_CHARACTERS:
        raise UserError(f"the {name} has {len(text):,} characters, and may have {MAX_CHARACTERS:,}; shorten it")
    return text
