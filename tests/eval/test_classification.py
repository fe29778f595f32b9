import numpy as np
import pytest

from eval.classification import SMALLEST_PROBABILITY, classify
from lit_het.errors import UserError
from lit_het.types import Batch

# Three classes; the first pixel of a picture says which row of this table the classifier answers.
ANSWERS = np.array([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.4, 0.4, 0.2], [0.0, 1.0, 0.0]], np.float32)


def answer(image):
    return ANSWERS[image[:, 0, 0, 0]]


def batch(rows, labels, valid=None):
    image = np.zeros((len(rows), 2, 2, 3), np.uint8)
    image[:, 0, 0, 0] = rows
    valid = np.ones(len(rows), bool) if valid is None else np.array(valid)
    return Batch(valid=valid, image=image, label=None if labels is None else np.array(labels))


def test_figures_equal_hand_arithmetic():
    """Right with 0.7, wrong with 0.6 (the label had 0.3), right with probability 1/2 at 0.4 (two classes tie)."""
    result = classify(answer, [batch([0, 1, 2], [0, 1, 0])])
    metrics = result.metrics()
    assert metrics["nll"] == pytest.approx(-(np.log(0.7) + np.log(0.3) + np.log(0.4)) / 3)
    assert metrics["top1"] == pytest.approx(1.5 / 3)
    # Bins of width 1/15 hold one picture each: gaps |0.7 - 1|, |0.6 - 0| and |0.4 - 0.5|.
    assert metrics["ece"] == pytest.approx((0.3 + 0.6 + 0.1) / 3)
    assert metrics["underflow"] == 0.0
    assert result.num_classes == 3


def test_rows_that_pad_take_no_part_whatever_their_label_and_the_model_sees_one_shape():
    shapes = []

    def watched(image):
        shapes.append(image.shape)
        return answer(image)

    padded = [batch([0, 1], [0, 1]), batch([2, 3], [0, -7], valid=[True, False])]
    counts = []
    result = classify(watched, padded, counts.append)
    whole = classify(answer, [batch([0, 1, 2], [0, 1, 0])])
    assert result.metrics() == whole.metrics()
    assert set(shapes) == {(2, 2, 2, 3)}
    assert counts == [2, 1]


def test_a_batch_without_valid_rows_is_survived():
    batches = [batch([0], [0]), batch([1], [1], valid=[False])]
    assert len(classify(answer, batches).labels) == 1


def test_a_label_with_probability_zero_counts_as_the_smallest_number_and_is_reported():
    metrics = classify(answer, [batch([3, 3], [0, 1])]).metrics()
    assert metrics["nll"] == pytest.approx(-np.log(SMALLEST_PROBABILITY) / 2)
    assert -np.log(SMALLEST_PROBABILITY) == pytest.approx(87.3, abs=0.05)
    assert metrics["underflow"] == 0.5


@pytest.mark.parametrize(
    ("batches", "expected"),
    [
        ([batch([0], None)], "no class indices"),
        ([batch([0], [[1.0, 0.0, 0.0]])], "no class indices"),
        ([batch([0], [3])], "label 3 lies outside the 3 classes"),
        ([batch([0], [-1])], "label -1 lies outside the 3 classes"),
        ([batch([0], [0], valid=[False])], "no valid image"),
        ([], "no valid image"),
        ([Batch(valid=np.ones(1, bool), label=np.zeros(1, int))], "no images"),
    ],
)
def test_what_cannot_be_scored_is_one_line(batches, expected):
    with pytest.raises(UserError, match=expected):
        classify(answer, batches)


def test_probabilities_that_are_not_finite_are_refused():
    with pytest.raises(UserError, match="not finite"):
        classify(lambda image: np.full((len(image), 3), np.nan, np.float32), [batch([0], [0])])
