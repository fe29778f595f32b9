"""Resampled positions and patches equal those of big_vision."""

from pathlib import Path

import numpy as np
import pytest

from lit_het.errors import UserError
from lit_het.weights.resample import resample_patches, resample_positions

GOLDEN = Path(__file__).parents[1] / "golden"
POSITIONS = np.load(GOLDEN / "resample_posemb.npz")
PATCHES = np.load(GOLDEN / "flexi_resample_patchemb.npz")


@pytest.mark.parametrize("sizes", [name.removeprefix("old_") for name in POSITIONS.files if name.startswith("old_")])
def test_resampled_positions_equal_big_visions(sizes):
    resampled = resample_positions(POSITIONS[f"old_{sizes}"][0], int(sizes.split("_")[1]))
    np.testing.assert_allclose(resampled, POSITIONS[f"new_{sizes}"][0], atol=1e-5)


@pytest.mark.parametrize("number", range(9))
def test_resampled_patches_equal_flexivits(number):
    new = PATCHES[f"new_{number}"]
    if new.shape[0] != new.shape[1]:
        pytest.skip("our patches are square")
    resampled = resample_patches(PATCHES[f"old_{number}"], new.shape[0])
    np.testing.assert_allclose(resampled, new, atol=2e-4 * np.abs(new).max())


def test_a_larger_patch_gives_the_same_token_for_the_enlarged_image():
    random = np.random.default_rng(0)
    kernel = random.normal(size=(4, 4, 1, 3)).astype(np.float32)
    small = np.array([[0.0, 1, 2, 3]] * 4)  # linear: resizing is exact except at the edges
    columns = np.clip((np.arange(8) + 0.5) / 2 - 0.5, 0, 3)
    large = np.broadcast_to(columns, (8, 8))
    token = np.einsum("hw,hwcd->d", small, kernel)
    np.testing.assert_allclose(np.einsum("hw,hwcd->d", large, resample_patches(kernel, 8)), token, rtol=1e-4)


def test_positions_that_do_not_form_a_square_are_refused():
    with pytest.raises(UserError, match="12 positions form no square"):
        resample_positions(np.zeros((12, 4), np.float32), 4)
