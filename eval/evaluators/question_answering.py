"""Evaluates answers of a decoder to questions about images."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from lit_het.console import message
from lit_het.data_pipelines.texts.captions import Question, questions_in
from lit_het.data_pipelines.texts.captions_config import member_of
from lit_het.errors import UserError, pluralize
from lit_het.eval.decoder_suite import AnswerFigure
from lit_het.eval.decoders import ScoredTexts, decoders_of, evaluation_of, least_tokens, writer_of
from lit_het.eval.evaluation import Evaluation
from lit_het.eval.metrics.answers import anls, exact_match, vqa_accuracy
from lit_het.eval.metrics.significance import standard_error
from lit_het.eval.sets.open_sets import OpenSet
from lit_het.texts import GenerationConfig, TextWriter, Written
from lit_het.types import EvaluatedModel


@dataclasses.dataclass(frozen=True)
class QuestionAnswering:
    """The evaluator of an `AnswerQuestionsConfig`; ``questions`` are those of each image, with answers."""

    opened: OpenSet
    questions: tuple[tuple[Question, ...], ...]
    candidates: tuple[str, ...] | None
    figure: AnswerFigure
    generation: GenerationConfig
    samples: int
    seed: int

    def check(self, model: EvaluatedModel) -> None:
        """Checks that the model writes text, and tells how many questions leave no room for an answer."""
        writer = writer_of(model, self.samples)
        least = least_tokens(writer, self.candidates)
        texts = [question.question for of_image in self.questions for question in of_image]
        too_long = [text for text in texts if _max_new_tokens(writer, writer.question_prompt(text)) < least]
        if len(too_long) == len(texts):
            raise UserError(f"{self.opened.config.name}: no question leaves room for the {least} tokens of an answer")
        if too_long:
            message(
                f"{self.opened.config.name}: {pluralize(len(too_long), 'question')} of {len(texts):,} "
                f"leave no room for the {least} tokens of an answer, and count as wrong: {too_long[0][:100]!r}"
            )

    def __call__(self, model: EvaluatedModel) -> Evaluation:
        """Returns the figure of the configuration, of all questions and of each type, and the calibration of answers.

        The confidence is the probability of the answer, or its share of that of all candidates. Metrics with noise have
        the prefix ``noisy/``.
        """
        writer = writer_of(model, self.samples)
        decoders = decoders_of(writer, self.generation, self.candidates, self.samples, self.seed)
        written: dict[str, list[Written]] = {part: [] for part in decoders}
        # The number of each question in the set, whatever images cannot be read.
        first: list[int] = np.cumsum([0, *(len(of_image) for of_image in self.questions)]).tolist()
        asked: list[Question] = []
        positions: list[int] = []
        for features in self.opened.stream(writer.features):
            questions = [self.questions[position] for position in features.positions]
            owner = np.repeat(np.arange(len(questions)), [len(of_image) for of_image in questions])
            some = [question for of_image in questions for question in of_image]
            prompts = [writer.question_prompt(question.question) for question in some]
            most = [_max_new_tokens(writer, prompt) for prompt in prompts]
            numbers = np.concatenate(
                [np.arange(first[place], first[place + 1]) for place in map(int, features.positions)]
            )
            for part, decoder in decoders.items():
                written[part] += decoder.texts(features.values[owner], prompts, most, numbers)
            asked += some
            positions += features.positions[owner].tolist()
        if not asked:
            raise UserError(f"{self.opened.config.name}: no readable image has a question with answers")
        parts = {part: self._scored(written[part], asked, positions) for part in decoders}
        titles = [
            f"{question.question} {' / '.join(filter(None, dict.fromkeys(question.answers)))}" for question in asked
        ]
        return evaluation_of("question_answering", self.opened, positions, titles, parts, writer)

    def _scored(self, written: Sequence[Written], asked: Sequence[Question], positions: Sequence[int]) -> ScoredTexts:
        name, image = self.figure, np.array(positions)
        right = _compared(name, [text.text for text in written], [question.answers for question in asked])
        found, errors = {name: float(right.mean())}, {name: standard_error(right, image)}
        for kind in sorted({question.type for question in asked if question.type}):
            is_kind, path = np.array([question.type == kind for question in asked]), f"{name}/{kind}"
            found[path], errors[path] = float(right[is_kind].mean()), standard_error(right[is_kind], image[is_kind])
        return ScoredTexts.of(written, right, positions, (found, errors))


def _max_new_tokens(writer: TextWriter, prompt: str) -> int:
    """Returns the tokens that fit behind a prompt; 0 if none does."""
    try:
        return writer.max_new_tokens(prompt)
    except UserError:
        return 0


def _compared(figure: AnswerFigure, predictions: list[str], answers: list[tuple[str, ...]]) -> Float[np.ndarray, " n"]:
    """Returns how right each answer is, 0 to 1."""
    if figure == "vqa_accuracy":
        return vqa_accuracy(predictions, answers)
    if figure == "anls":
        return anls(predictions, answers)
    # GQA's questions have one answer; of others any counts.
    pairs = zip(predictions, answers, strict=True)
    return np.array([exact_match([one] * len(texts), texts).any() for one, texts in pairs], np.float64)


def read_questions(opened: OpenSet, place: str, at_least: int) -> tuple[tuple[Question, ...], ...]:
    """Returns the questions of each image of a set that have so many answers or more."""
    of_images = opened.texts(member_of(place), lambda text: questions_in(text, place))
    found = tuple(
        tuple(question for question in questions or () if len(question.answers) >= at_least) for questions in of_images
    )
    if not any(found):
        raise UserError(
            f"{opened.config.name}: no question has {at_least} answers or more; take a split with answers, or another "
            "--figure"
        )
    return found
