"""Panoptic quality against recordings of COCO's evaluation, a slow reference, and arithmetic by hand."""

import math
from pathlib import Path

import numpy as np
import pytest

from lit_het.eval.metrics.panoptic import TrueSegments, class_errors, counts, figures, qualities

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "panoptic.npz")
NUM_CLASSES, NUM_THINGS = 7, 3
ARE_THINGS = np.arange(1, NUM_CLASSES + 1) <= NUM_THINGS


def recorded(number: int) -> tuple[TrueSegments, np.ndarray]:
    table = GOLDEN["segments"][number].astype(np.int64)
    table = table[1 : 1 + (table[:, 0] > 0).sum()]
    truth = TrueSegments(GOLDEN["places"][number].astype(np.int64), table[:, 0], table[:, 1] > 0)
    return truth, GOLDEN["predicted"][number].astype(np.int64)


ALL = [counts(*recorded(number), NUM_CLASSES) for number in range(len(GOLDEN["places"]))]


def test_each_image_counts_as_in_cocos_evaluation():
    np.testing.assert_allclose(ALL, GOLDEN["counts"], rtol=1e-12)


def test_means_over_classes_are_those_of_cocos_evaluation():
    found, _ = figures(np.array(ALL), ARE_THINGS)
    for part, name in (("", "all"), ("things/", "things"), ("stuff/", "stuff")):
        values = [found[f"{part}{figure}"] for figure in ("pq", "sq", "rq", "num_classes")]
        np.testing.assert_allclose(values, GOLDEN[name], rtol=1e-12)
    of_classes = qualities(np.sum(ALL, axis=0))
    np.testing.assert_allclose(of_classes[:-1], GOLDEN["classes"][:-1], rtol=1e-12)
    assert np.isnan(of_classes[-1]).all()  # in neither, and left out of the means


def slow_counts(truth: TrueSegments, predicted: np.ndarray) -> np.ndarray:
    """Equation 1 of Kirillov et al. 2019 by loops over segments, with the rules of Sec. 4.1 for void and groups."""
    found = np.zeros((NUM_CLASSES, 4))
    segments = [(*pair, (predicted == pair).all(-1)) for pair in {*map(tuple, predicted.reshape(-1, 2).tolist())}]
    segments = [(label, mask) for label, _, mask in segments if label]
    void = truth.places == 0
    matched = set()
    for place, (label, is_crowd) in enumerate(zip(truth.labels, truth.are_crowds, strict=True), 1):
        if is_crowd:
            continue
        mine, is_found = truth.places == place, False
        for number, (other, mask) in enumerate(segments):
            union = ((mine | mask) & ~(mask & void)).sum()
            iou = (mine & mask).sum() / union
            if other == label and iou > 0.5:
                found[label - 1, :2] += iou, 1
                matched.add(number)
                is_found = True
        found[label - 1, 3] += not is_found
    for number, (label, mask) in enumerate(segments):
        crowds = np.flatnonzero(truth.are_crowds & (truth.labels == label)) + 1
        ignored = void | (truth.places == crowds[-1] if len(crowds) else False)
        if number not in matched and (mask & ignored).sum() <= mask.sum() / 2:
            found[label - 1, 2] += 1
    return found


@pytest.mark.parametrize("seed", range(8))
def test_counts_are_those_of_loops_over_segments(seed: int):
    random = np.random.default_rng(seed)
    labels = random.integers(1, NUM_CLASSES + 1, 6)
    places = random.integers(0, 7, (5, 6)).repeat(3, 0).repeat(3, 1)
    truth = TrueSegments(places, labels, random.random(6) < 0.3)
    table = np.array([(0, 0), *zip(labels, range(1, 7), strict=True)])
    predicted = np.where(random.random((15, 18, 1)) < 0.25, random.integers(0, 5, (15, 18, 2)), table[places])
    np.testing.assert_allclose(counts(truth, predicted, NUM_CLASSES), slow_counts(truth, predicted))


def line(*cells: tuple[int, int, int]) -> np.ndarray:
    """Masks of one row: so many pixels of a class and an instance."""
    return np.concatenate([np.full((1, count, 2), (label, instance)) for count, label, instance in cells], axis=1)


def row(*cells: tuple[int, int], crowds: tuple[int, ...] = ()) -> TrueSegments:
    """The truth of one row: so many pixels of each class; 0 is void, and the crowds are numbered from 1."""
    labels = np.array([label for _, label in cells if label])
    numbers = iter(range(1, len(labels) + 1))
    places = np.concatenate([np.full(count, next(numbers) if label else 0) for count, label in cells])[None]
    return TrueSegments(places, labels, np.isin(np.arange(1, len(labels) + 1), crowds))


@pytest.mark.parametrize(
    ("truth", "predicted", "of_class_one"),
    [
        # 6 of 8 pixels and two too many: 6 / 10.
        (row((8, 1), (4, 2)), line((2, 0, 0), (8, 1, 1), (2, 2, 1)), (0.6, 1, 0, 0)),
        # An IoU of exactly one half is no match.
        (row((6, 1), (6, 2)), line((3, 1, 1), (9, 2, 1)), (0, 0, 1, 1)),
        # Pixels on void are not in the union: 4 / 4 in place of 4 / 8.
        (row((4, 1), (4, 0)), line((8, 1, 3)), (1, 1, 0, 0)),
        # Two instances in place of one: neither is above one half, and both are wrong.
        (row((8, 1)), line((4, 1, 1), (4, 1, 2)), (0, 0, 2, 1)),
        # A crowd is not missed, and what lies in it is not wrong; beside it is.
        (row((8, 1), (8, 2), crowds=(1,)), line((4, 1, 1), (4, 1, 2), (8, 2, 0)), (0, 0, 0, 0)),
        (row((8, 1), (8, 2), crowds=(1,)), line((4, 0, 0), (8, 1, 1), (4, 2, 0)), (0, 0, 1, 0)),
        # A crowd of another class ignores nothing.
        (row((8, 2), crowds=(1,)), line((8, 1, 1)), (0, 0, 1, 0)),
        # More than half on void is ignored, half is not.
        (row((5, 0), (4, 2)), line((9, 1, 1)), (0, 0, 0, 0)),
        (row((4, 0), (4, 2)), line((8, 1, 1)), (0, 0, 1, 0)),
    ],
)
def test_counts_by_hand(truth, predicted, of_class_one):
    np.testing.assert_allclose(counts(truth, predicted, 2)[0], of_class_one)


def test_the_truth_itself_has_quality_one_whatever_the_numbers_of_instances():
    truth, _ = recorded(0)
    truth = TrueSegments(truth.places, truth.labels, np.zeros(len(truth.labels), bool))
    numbers = np.random.default_rng(0).permutation(np.arange(1, 1 + len(truth.labels)))
    table = np.array([(0, 0), *zip(truth.labels, numbers, strict=True)])
    found, errors = figures(np.repeat(counts(truth, table[truth.places], NUM_CLASSES)[None], 3, 0), ARE_THINGS)
    assert found["pq"] == found["things/sq"] == found["stuff/rq"] == 1
    assert errors["pq"] == 0


def test_errors_are_those_of_other_images():
    """The bootstrap and the delta method agree with the deviation over fresh sets of images."""
    random = np.random.default_rng(0)

    def images(count: int) -> np.ndarray:
        found = random.poisson((3, 1, 0.6), (count, 4, 3)).astype(float)
        iou = found[..., :1] * random.uniform(0.6, 0.9, (count, 4, 1))
        return np.concatenate([iou, found], axis=-1)

    many = np.array([qualities(images(100).sum(axis=0)) for _ in range(800)])
    one = images(100)
    _, errors = figures(one, np.array([True, True, False, False]))
    for place, name in enumerate(("pq", "sq", "rq")):
        assert math.isclose(errors[name], many[..., place].mean(axis=1).std(), rel_tol=0.15)
        assert math.isclose(errors[f"stuff/{name}"], many[:, 2:, place].mean(axis=1).std(), rel_tol=0.2)
    np.testing.assert_allclose(class_errors(one), many[..., 0].std(axis=0), rtol=0.2)


def test_a_set_without_stuff_has_no_figures_of_it():
    counted = np.zeros((2, 3, 4))
    counted[:, 0] = 0.8, 1, 0, 0
    found, _ = figures(counted, np.array([True, True, False]))
    assert {*found} == {f"{part}{name}" for part in ("", "things/") for name in ("pq", "sq", "rq", "num_classes")}
    assert found["pq"] == pytest.approx(0.8)
    assert found["num_classes"] == 1
