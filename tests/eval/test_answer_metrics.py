import functools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_het.data_pipelines.texts.captions import questions_in
from lit_het.eval.metrics.answers import anls, exact_match, normalized_answer, vqa_accuracy
from tests.refusals import assert_refused

words = st.sampled_from(["yes", "no", "Yes.", "a cat", "cat", "2", "two", "dont", "1,000", ""])
people = st.lists(words, min_size=2, max_size=10)


@functools.cache
def distance_by_recursion(one: str, other: str) -> int:
    """The Levenshtein distance from its definition."""
    if not one or not other:
        return len(one) + len(other)
    return min(
        distance_by_recursion(one[1:], other) + 1,
        distance_by_recursion(one, other[1:]) + 1,
        distance_by_recursion(one[1:], other[1:]) + (one[0] != other[0]),
    )


def accuracy_by_loop(prediction: str, answers: list[str]) -> float:
    """Leaves out each person in turn, and compares with the others."""
    if len(set(map(str.strip, answers))) > 1:
        prediction, answers = normalized_answer(prediction), [normalized_answer(answer) for answer in answers]
    shares = []
    for left_out in range(len(answers)):
        others = answers[:left_out] + answers[left_out + 1 :]
        shares.append(min(sum(answer == prediction for answer in others) / 3, 1))
    return sum(shares) / len(shares)


@pytest.mark.parametrize(
    ("answer", "normalized"),
    [
        ("Yes", "yes"),
        ("  two\tdogs\n", "2 dogs"),
        ("none", "0"),
        ("Ten", "10"),
        ("eleven", "eleven"),
        ("the cat", "cat"),
        ("A man and an apple", "man and apple"),
        ("a", ""),
        # Contractions: any one apostrophe may lack; a whole word must match.
        ("dont", "don't"),
        ("Im", "im"),
        ("its", "its"),
        ("cant wont", "can't won't"),
        ("couldntve", "couldntve"),
        ("couldnt've", "couldn't've"),
        ("couldn'tve", "couldn't've"),
        ("yall'd've", "y'all'd've"),
        ("twas", "'twas"),
        ("somebody'd", "somebodyd"),
        ("don't", "don't"),
        # Punctuation beside a space vanishes, else it becomes a space.
        ("red, white", "red white"),
        ("red,white", "red white"),
        ("black/white", "black white"),
        ("t-shirt", "t shirt"),
        ("t- shirt", "t shirt"),
        ("t-shirt - red", "tshirt red"),
        ("what?!", "what"),
        ("10:30", "10:30"),
        ("man's", "man's"),
        # A comma between digits makes all punctuation vanish.
        ("1,000", "1000"),
        ("1,000/month", "1000month"),
        # A period stays before a digit.
        ("3.5", "3.5"),
        ("$.50", "$.50"),
        ("u.s.", "us"),
        ("5.", "5"),
        ("st. louis", "st louis"),
    ],
)
def test_answers_are_normalized_as_by_the_official_evaluation(answer, normalized):
    assert normalized_answer(answer) == normalized


@given(st.text(max_size=30))
def test_a_normalized_answer_has_neither_articles_nor_numbers_in_words_nor_spare_space(answer):
    found = normalized_answer(answer)
    assert found == " ".join(found.split())
    assert not {"a", "an", "the", "one", "ten", "none"} & set(found.split())


@pytest.mark.parametrize(("matches", "accuracy"), [(0, 0.0), (1, 0.3), (2, 0.6), (3, 0.9), (4, 1.0), (10, 1.0)])
def test_accuracy_by_the_number_of_ten_people_who_agree(matches, accuracy):
    # Of three who agree, the others have 3/3 in seven cases and 2/3 in three: (7 + 3 * 2/3) / 10.
    answers = ["yes"] * matches + [f"no {place}" for place in range(10 - matches)]
    np.testing.assert_allclose(vqa_accuracy(["yes"], [answers]), [accuracy])


@given(words, people)
def test_accuracy_agrees_with_leaving_out_each_person_and_an_answer_among_the_true_ones_is_right(prediction, answers):
    np.testing.assert_allclose(vqa_accuracy([prediction], [answers]), accuracy_by_loop(prediction, answers))
    assert anls([prediction], [[*answers, prediction]]) == 1
    assert exact_match([prediction], [prediction]).all()
    assert vqa_accuracy([prediction], [[prediction] * 4 + answers]) == pytest.approx(1)


def test_answers_are_normalized_only_where_people_disagree_and_for_an_exact_match_never():
    np.testing.assert_allclose(vqa_accuracy(["A cat."] * 2, [["cat"] * 10, ["cat"] * 9 + ["dog"]]), [0, 1])
    np.testing.assert_allclose(vqa_accuracy([" cat\n"], [["cat"] * 10]), 1)
    found = exact_match(["cat", "Cat", "cat.", " cat", "dog"], ["cat", "cat", "cat", "cat", "cat"])
    assert found.tolist() == [True, False, False, False, False]
    assert found.dtype == bool


def test_anls_by_hand():
    # "kitten" and "sitting" differ in three of seven characters; "abcd" and "abxy" in half: too far.
    found = anls(["kitten", "abcd", "abc", "cat"], [["sitting"], ["abxy"], ["xyz"], ["cat"]])
    np.testing.assert_allclose(found, [1 - 3 / 7, 0, 0, 1])
    np.testing.assert_allclose(anls(["abcd"], [["abxy"]], threshold=0.6), 0.5)
    # It is of the nearest answer, without case and outer space.
    np.testing.assert_allclose(anls([" The  Cat\n"], [["a dog", "the cat"]]), 1)
    np.testing.assert_allclose(anls(["", "", "a"], [[""], ["a"], ["", " "]]), [1, 0, 0])


@settings(deadline=None)
@given(st.text("abc", max_size=7), st.lists(st.text("abc", max_size=7), min_size=1, max_size=3))
def test_anls_agrees_with_its_equation(prediction, answers):
    expected = 0.0
    for answer in answers:
        longer = max(len(prediction), len(answer))
        normalized = distance_by_recursion(prediction, answer) / longer if longer else 0.0
        expected = max(expected, 1 - normalized if normalized < 0.5 else 0.0)
    np.testing.assert_allclose(anls([prediction], [answers]), expected)


@pytest.mark.parametrize(("figure", "at_least"), [(vqa_accuracy, 2), (anls, 1), (exact_match, 0)])
def test_questions_and_answers_that_do_not_fit_are_named(figure, at_least):
    assert_refused("no answers to score; give at least one", figure, [], [])
    answers = [["yes", "no"]] if at_least else ["yes"]
    assert_refused("2 predictions and answers to 1 questions; give one of each", figure, ["yes", "no"], answers)
    if at_least:
        message = f"question 1 has {at_least - 1} answers and needs {at_least}; add some"
        assert_refused(message, figure, ["yes", "no"], [["yes"] * at_least, ["yes"] * (at_least - 1)])
        assert_refused("answers to question 0 are a single text; put it into a list", figure, ["yes"], ["yes"])


def test_blank_answers_count_among_those_of_people():
    """Ten people, of whom four gave no answer and two the predicted one: without the four it would be more."""
    entry = {"question": "what?", "answers": ["cat"] * 2 + ["dog"] * 4 + [" "] * 4}
    ((_, answers, _),) = questions_in(json.dumps({"questions": [entry]}), "json/questions")
    assert len(answers) == 10
    # Leaving out one of the two who said so leaves one match.
    assert vqa_accuracy(["cat"], [answers]) == pytest.approx((2 * 1 / 3 + 8 * 2 / 3) / 10)
    blank = json.dumps({"questions": [entry | {"answers": ["", " "]}]})
    assert questions_in(blank, "json/questions")[0].answers == ()
