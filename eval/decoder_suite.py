"""The configurations of the evaluations of decoders; see `lit_het.eval.suite` for those of other models."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lit_het.errors import require_at_least, require_choice
from lit_het.eval.options import EvaluationOptions
from lit_het.eval.sets import ImageSet
from lit_het.texts import GenerationConfig

if TYPE_CHECKING:
    from lit_het.eval.evaluators.captioning import Captioning
    from lit_het.eval.evaluators.question_answering import QuestionAnswering
    from lit_het.eval.sets.open_sets import Sets

AnswerFigure = Literal["vqa_accuracy", "exact_match", "anls"]


@dataclasses.dataclass(frozen=True)
class WriteCaptionsConfig(EvaluationOptions):
    """Captions that a decoder writes, and its predictions of the tokens of the true ones (SoViT Tables 3, 4).

    Attributes:
        data: the set; class names are not needed.
        captions: the member with the true captions of an image: text with one caption per line, or ``json/FIELD`` with
            a list of captions.
        prompt: what captions follow; None for that of training.
        candidates: a file of captions, one per line, among which that of an image is chosen by its probability; None
            writes captions freely.
        generation: how captions are written; the best of several is evaluated. Fewer tokens are written where fewer
            fit.
        samples: S, the noise samples that the probabilities of tokens are averaged over; 0 for no noise.
        seed: of the noise and of sampling.
    """

    data: ImageSet
    captions: str = "txt"
    prompt: str | None = None
    candidates: Path | None = None
    generation: GenerationConfig = GenerationConfig()
    samples: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        require_at_least(0, self, "samples")

    def build(self, sets: "Sets") -> "Captioning":
        """Opens the set and reads all captions."""
        from lit_het.eval.decoders import read_candidates
        from lit_het.eval.evaluators.captioning import Captioning
        from lit_het.eval.evaluators.retrieval import read_captions

        candidates = None if self.candidates is None else read_candidates(self.candidates)
        opened = sets.open(dataclasses.replace(self.data, labelled=False), self.captions)
        captions = read_captions(opened, self.captions)
        return Captioning(opened, captions, self.prompt, candidates, self.generation, self.samples, self.seed)


@dataclasses.dataclass(frozen=True)
class AnswerQuestionsConfig(EvaluationOptions):
    """Answers of a decoder to questions about images, of sets that ``lit-het data prepare`` writes.

    Attributes:
        data: the set; class names are not needed.
        questions: the place of the questions of an image, with their answers and types.
        figure: how answers are compared: ``vqa_accuracy`` with those of several people (VQAv2, TextVQA),
            ``exact_match`` (GQA, OCR-VQA) or ``anls`` (ST-VQA).
        candidates: a file of answers, one per line, among which each answer is chosen by its probability; None writes
            answers freely.
        generation: how answers are written, see `WriteCaptionsConfig`.
        samples: S, the noise samples that the probabilities of tokens are averaged over; 0 for no noise.
        seed: of the noise and of sampling.
    """

    data: ImageSet
    questions: str = "json/questions"
    figure: AnswerFigure = "vqa_accuracy"
    candidates: Path | None = None
    generation: GenerationConfig = GenerationConfig(num_tokens=16)
    samples: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        require_at_least(0, self, "samples")
        require_choice(self, "figure")

    def build(self, sets: "Sets") -> "QuestionAnswering":
        """Opens the set and reads all questions."""
        from lit_het.eval.decoders import read_candidates
        from lit_het.eval.evaluators.question_answering import QuestionAnswering, read_questions

        candidates = None if self.candidates is None else read_candidates(self.candidates)
        opened = sets.open(dataclasses.replace(self.data, labelled=False))
        at_least = 2 if self.figure == "vqa_accuracy" else 1
        questions = read_questions(opened, self.questions, at_least)
        return QuestionAnswering(opened, questions, candidates, self.figure, self.generation, self.samples, self.seed)
