"""Metrics of texts and of the predictions of their tokens, by hand."""

import numpy as np
import pytest

from lit_het.eval.metrics.text_scores import TokenResult, caption_figures, confidence_figures
from lit_het.texts import TokenPredictions

# Two texts of image 7 and one of image 9; the first has a prompt of one token and three tokens of its own.
COUNTED = np.array([[0, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]], bool)
P = np.array([[0, 0.5, 0.25, 1], [0.5, 0.5, 0, 0], [0.1, 0, 0, 0]])
BEST = np.array([[0, 0.5, 0.75, 1], [0.5, 0.5, 0, 0], [0.6, 0, 0, 0]])


@pytest.fixture
def predictions():
    log_p = np.log(P, out=np.zeros(P.shape), where=P > 0)
    return TokenPredictions(log_p, BEST, (P == BEST) & COUNTED, COUNTED)


@pytest.fixture
def tokens(predictions):
    return TokenResult.of(predictions, np.array([7, 7, 9]))


def test_only_tokens_of_texts_count_and_parts_of_a_set_are_joined(predictions, tokens):
    assert tokens.image.tolist() == [7, 7, 7, 7, 7, 9]
    np.testing.assert_allclose(np.exp(-tokens.nll), [0.5, 0.25, 1, 0.5, 0.5, 0.1])
    assert tokens.correct.tolist() == [1, 0, 1, 1, 1, 0]
    joined = TokenResult.join([TokenResult.of(predictions.first(2), np.array([7, 7])), tokens])
    assert joined.image.tolist() == [7] * 5 + [7] * 5 + [9]


def test_the_perplexity_is_that_of_all_tokens(tokens):
    found, _ = tokens.figures()
    # The probabilities multiply to 1/2 · 1/4 · 1 · 1/2 · 1/2 · 1/10 = 1/320.
    assert found["log_perplexity"] == pytest.approx(np.log(320) / 6)
    assert found["perplexity"] == pytest.approx(320 ** (1 / 6))
    assert found["token_top1"] == pytest.approx(4 / 6)
    # Bins of width 1/15: three tokens of 0.5 are right, those of 0.6 and 0.75 wrong, that of 1 right.
    assert found["token_ece"] == pytest.approx((3 * 0.5 + 0.6 + 0.75) / 6)


def test_errors_of_tokens_are_over_images(tokens):
    """Of two images a resample has the first twice, the second twice, or each once, with 1/4, 1/4 and 1/2."""
    _, errors = tokens.figures()
    first, second, both = np.log(32) / 5, np.log(10), np.log(320) / 6
    outcomes = np.array([first, second, both, both])
    assert errors["log_perplexity"] == pytest.approx(outcomes.std(), rel=0.1)
    assert errors["perplexity"] == pytest.approx(320 ** (1 / 6) * errors["log_perplexity"])
    assert errors["token_top1"] == pytest.approx(np.std([4 / 5, 0, 4 / 6, 4 / 6]), rel=0.1)
    gaps = {1: (3 * 0.5 + 0.75) / 5, 2: 0.6, 3: (3 * 0.5 + 0.6 + 0.75) / 6}
    assert errors["token_ece"] == pytest.approx(np.std([gaps[1], gaps[2], gaps[3], gaps[3]]), rel=0.1)


def test_errors_of_the_perplexity_fall_with_the_root_of_the_images():
    nll = np.random.default_rng(0).exponential(size=4000)
    for size in (1000, 4000):
        _, errors = TokenResult(nll[:size], np.full(size, 0.5), np.ones(size), np.arange(size)).figures()
        assert errors["log_perplexity"] == pytest.approx(nll[:size].std() / np.sqrt(size), rel=0.1)


def test_errors_of_confidence_are_those_of_images():
    """Ten equal texts about each image tell no more than one."""
    random = np.random.default_rng(0)
    confidence, image = random.uniform(size=200), np.arange(200)
    right = (random.uniform(size=200) < confidence).astype(float)
    once, errors = confidence_figures(confidence, right, image)
    ten_times, of_ten = confidence_figures(*(np.repeat(x, 10) for x in (confidence, right, image)))
    assert ten_times["ece"] == pytest.approx(once["ece"])
    for name, error in errors.items():
        assert of_ten[name] == pytest.approx(error, rel=0.1), name


def test_captions_that_equal_a_true_one_have_the_best_figures():
    references = [["a red square", "the square"], ["a blue circle"], ["one green star here"]]
    found, errors = caption_figures([texts[0] for texts in references], references)
    assert found["rouge_l"] == pytest.approx(1)
    assert found["bleu4"] == pytest.approx(1, abs=1e-6)
    assert 0 < found["cider"] <= 1000
    assert errors.keys() == {"cider", "rouge_l"}
    wrong, _ = caption_figures(["x", "y", "z"], references)
    assert wrong["cider"] == wrong["rouge_l"] == 0


def test_confidence_is_compared_with_how_right_texts_are():
    confidence, right = np.array([0.9, 0.9, 0.3]), np.array([1, 0.5, 0])
    found, errors = confidence_figures(confidence, right, np.arange(len(right)))
    # Texts of 0.9 are right by 0.75; that of 0.3 is wrong.
    assert found["ece"] == pytest.approx((2 * 0.15 + 0.3) / 3)
    # Errors of the most confident: 0.25 (two tie), 0.25, 0.5.
    assert found["aurc"] == pytest.approx((0.25 + 0.25 + 0.5) / 3)
    assert errors["ece"] > 0
