"""Figures of answers to questions about images: VQA accuracy, exact match as in GQA, and ANLS, for each question."""

import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Float

from lit_het.errors import UserError

_TO_TEN = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
_NUMBERS = {word: str(number) for number, word in enumerate(_TO_TEN)} | {"none": "0"}
_ARTICLES = {"a", "an", "the"}
_CONTRACTIONS = """
ain't aren't can't could've couldn't couldn't've didn't doesn't don't hadn't hadn't've hasn't haven't he'd he'd've he's
how'd how'll how's isn't it'd it'd've it'll ma'am mightn't mightn't've might've mustn't must've needn't not've o'clock
oughtn't 'ow's'at shan't she'd've should've shouldn't shouldn't've somebody'd've somebody'll somebody's someone'd
someone'd've someone'll someone's something'd something'd've something'll that's there'd there'd've there're there's
they'd they'd've they'll they're they've 'twas wasn't we'd've we've weren't what'll what're what's what've when's
where'd where's where've who'd who'd've who'll who's who've why'll why're why's won't would've wouldn't wouldn't've
y'all y'all'll y'all'd've you'd you'd've you'll you're you've
"""
# Each contraction without one of its apostrophes. The last entry is the official table's, which restores none there.
_RESTORED = {
    word[:place] + word[place + 1 :]: word
    for word in _CONTRACTIONS.split()
    for place, character in enumerate(word)
    if character == "'"
} | {"somebody'd": "somebodyd"}
_PUNCTUATION = ';/[]"{}()=+\\_-><@`,?!'


def vqa_accuracy(predictions: Sequence[str], answers: Sequence[Sequence[str]]) -> Float[np.ndarray, " n"]:
    """Returns the accuracy of each answer: 1 if three people or more gave it (Antol et al., ICCV 2015).

    ``min(matches / 3, 1)``, averaged over leaving out each person's answer. As in the official evaluation of VQA 2.0,
    all answers go through `normalized_answer`; but where all people gave the same one, nothing is normalised.

    Args:
        predictions: an answer to each question.
        answers: those of people to each question, ten in VQA.
    """
    _require_answers(predictions, answers, at_least=2)
    return np.array([_share_of_people(*pair) for pair in zip(predictions, answers, strict=True)])


def _share_of_people(prediction: str, answers: Sequence[str]) -> float:
    prediction, answers = _on_one_line(prediction), [_on_one_line(answer) for answer in answers]
    if len(set(answers)) > 1:
        prediction, answers = normalized_answer(prediction), [normalized_answer(answer) for answer in answers]
    matches, people = answers.count(prediction), len(answers)
    # Without one of those who agree there is one match less.
    return (matches * min((matches - 1) / 3, 1) + (people - matches) * min(matches / 3, 1)) / people


def normalized_answer(answer: str) -> str:
    """Returns an answer as VQA's official evaluation compares it.

    Punctuation, but for apostrophes and colons, becomes a space or, where a mark lies beside a space or a comma between
    digits, nothing; a period stays only before a digit. Then words are in lower case, numbers to ten are digits,
    articles are left out, and contractions that lack an apostrophe get it back.
    """
    text = _on_one_line(answer)
    has_number_with_comma = re.search(r"\d,\d", text) is not None
    found = text
    for mark in _PUNCTUATION:
        beside_space = f"{mark} " in text or f" {mark}" in text
        found = found.replace(mark, "" if beside_space or has_number_with_comma else " ")
    found = re.sub(r"\.(?!\d)", "", found)
    words = (_NUMBERS.get(word, word) for word in found.lower().split())
    return " ".join(_RESTORED.get(word, word) for word in words if word not in _ARTICLES)


def _on_one_line(answer: str) -> str:
    return answer.replace("\n", " ").replace("\t", " ").strip()


def exact_match(predictions: Sequence[str], answers: Sequence[str]) -> Bool[np.ndarray, " n"]:
    """Returns which predictions are the answer, letter by letter, as in GQA (Hudson and Manning, CVPR 2019).

    Its evaluation normalises nothing. The answers are in lower case and without a period, so a model that writes
    sentences must be asked for, or its text brought into, that form before.
    """
    _require_as_many(predictions, answers)
    return np.array([prediction == answer for prediction, answer in zip(predictions, answers, strict=True)])


def anls(
    predictions: Sequence[str], answers: Sequence[Sequence[str]], threshold: float = 0.5
) -> Float[np.ndarray, " n"]:
    """Returns the normalised Levenshtein similarity of each answer to the nearest true one (Biten et al., ICCV 2019).

    ``1 - NL`` if ``NL < threshold``, else 0, where NL is the edit distance divided by the length of the longer text.
    Case and the amount of white space do not count.

    The official scripts of ST-VQA and DocVQA differ in one case: a text of which just half is right counts half there.

    Args:
        predictions: an answer to each question.
        answers: the true ones to each question.
        threshold: the normalised distance from which on an answer is wrong.
    """
    _require_answers(predictions, answers, at_least=1)
    scores = []
    for prediction, texts in zip(predictions, answers, strict=True):
        distance = min(_normalized_distance(_folded(prediction), _folded(text)) for text in texts)
        scores.append(1 - distance if distance < threshold else 0.0)
    return np.array(scores)


def _folded(text: str) -> str:
    return " ".join(text.lower().split())


def _normalized_distance(one: str, other: str) -> float:
    longer = max(len(one), len(other))
    return _edit_distance(one, other) / longer if longer else 0.0


def _edit_distance(one: str, other: str) -> int:
    """Returns the Levenshtein distance: the fewest insertions, deletions and replacements of a character."""
    row = list(range(len(other) + 1))
    for character in one:
        above = row
        row = [above[0] + 1]
        for place, match in enumerate(other):
            row.append(min(row[-1] + 1, above[place + 1] + 1, above[place] + (character != match)))
    return row[-1]


def _require_as_many(predictions: Sequence[str], answers: Sequence[object]) -> None:
    if not predictions:
        raise UserError("no answers to score; give at least one")
    if len(predictions) != len(answers):
        raise UserError(f"{len(predictions)} predictions and answers to {len(answers)} questions; give one of each")


def _require_answers(predictions: Sequence[str], answers: Sequence[Sequence[str]], at_least: int) -> None:
    _require_as_many(predictions, answers)
    for place, texts in enumerate(answers):
        if isinstance(texts, str):
            raise UserError(f"the answers to question {place} are a single text; put it into a list")
        if len(texts) < at_least:
            raise UserError(
                f"question {place} has {len(texts)} answers and needs {at_least}; add some, or leave the question out"
            )
