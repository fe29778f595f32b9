"""Principal angles on subspaces whose angles are known (HET-XL App. I.1)."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import subspace_angles

from lit_het.errors import UserError
from lit_het.eval.alignment import (
    cosine_of_smallest_angle,
    mean_and_deviation,
    random_cosine,
    row_space,
)

K = 8
AXES = np.eye(K)


def one(kernel, factors):
    """The cosine for a single example with factors ``[k r]``."""
    return float(cosine_of_smallest_angle(np.asarray(kernel), np.asarray(factors)[None])[0])


def test_identical_spaces_have_cosine_one():
    assert one(AXES[:3], AXES[:, :3]) == pytest.approx(1.0, abs=1e-12)


def test_orthogonal_spaces_have_cosine_zero():
    assert one(AXES[:3], AXES[:, 3:5]) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("angle", [0.001, 0.3, 1.0, 1.5])
def test_a_plane_turned_by_a_known_angle_has_its_cosine(angle):
    """Both directions of the plane leave the span of axes 0 and 1, one by ``angle``, the other by more."""
    further = min(angle + 0.05, math.pi / 2)
    first = math.cos(angle) * AXES[0] + math.sin(angle) * AXES[2]
    second = math.cos(further) * AXES[1] + math.sin(further) * AXES[3]
    assert one(AXES[:2], np.stack([first, second], axis=1)) == pytest.approx(math.cos(angle), abs=1e-12)


def test_a_shared_direction_suffices_and_a_contained_space_has_cosine_one():
    assert one(AXES[:3], AXES[:, [2, 5, 6]]) == pytest.approx(1.0, abs=1e-12)
    random = np.random.default_rng(0)
    kernel = random.normal(size=(5, K))
    contained = kernel.T @ random.normal(size=(5, 2))
    assert one(kernel, contained) == pytest.approx(1.0, abs=1e-12)


def test_a_kernel_with_as_many_features_as_classes_reaches_everything():
    random = np.random.default_rng(0)
    for d in (K, K + 3):
        assert one(random.normal(size=(d, K)), random.normal(size=(K, 2))) == pytest.approx(1.0, abs=1e-12)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**16))
def test_only_the_spaces_matter_not_their_bases_and_scipy_agrees(seed):
    random = np.random.default_rng(seed)
    kernel, factors = random.normal(size=(4, 12)), random.normal(size=(12, 3))
    expected = math.cos(subspace_angles(kernel.T, factors).min())
    assert one(kernel, factors) == pytest.approx(expected, abs=1e-9)
    other_rows, other_columns = random.normal(size=(4, 4)), random.normal(size=(3, 3))
    assert one(other_rows @ kernel, 1e3 * factors @ other_columns) == pytest.approx(expected, abs=1e-7)


def test_every_example_has_a_cosine_of_its_own():
    random = np.random.default_rng(0)
    kernel, factors = random.normal(size=(3, K)), random.normal(size=(5, K, 2))
    together = row_space(kernel).cosine(factors)
    assert together.shape == (5,)
    np.testing.assert_allclose(together, [one(kernel, of_example) for of_example in factors])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_repeated_columns_add_no_direction(dtype):
    """Without the rank a third, arbitrary direction would come from rounding and might close the angle."""
    random = np.random.default_rng(0)
    kernel, factors = random.normal(size=(20, 60)), random.normal(size=(60, 2))
    repeated = (factors @ random.normal(size=(2, 10))).astype(dtype)
    assert one(kernel, repeated) == pytest.approx(one(kernel, factors), abs=1e-4)


def test_factors_that_are_zero_span_nothing():
    assert math.isnan(one(AXES[:3], np.zeros((K, 2))))


def test_random_spaces_come_near_the_value_of_the_theory():
    random = np.random.default_rng(0)
    d, k, r = 200, 2000, 20
    cosines = row_space(random.normal(size=(d, k))).cosine(random.normal(size=(5, k, r)))
    mean, deviation = mean_and_deviation(cosines)
    # With finitely many dimensions the largest cosine stays a little below its limit.
    assert random_cosine(d, k, r) - 0.03 < mean < random_cosine(d, k, r)
    assert deviation == pytest.approx(math.sqrt(((cosines - mean) ** 2).mean()))


def test_the_theory_gives_the_paper_s_value_for_a_random_kernel():
    """Table 17: 0.350 ± 0.002 for a ResNet152 (2,048 features), 21,843 classes and 50 factors."""
    assert random_cosine(2048, 21_843, 50) == pytest.approx(0.350, abs=0.002)
    assert random_cosine(5, 8, 3) == 1.0


def test_noise_of_another_head_is_refused():
    with pytest.raises(UserError, match="the noise has 5 coordinates and the classifier 8 classes"):
        row_space(AXES[:3]).cosine(np.ones((1, 5, 2)))


def test_numbers_that_are_not_finite_are_refused():
    with pytest.raises(UserError, match="not finite"):
        row_space(np.full((2, 5), np.inf))
