"""The angle between the row spaces of W and of the noise of a HET head (HET-XL App. I.1, Table 17)."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from flax import nnx

from lit_het.heads.classification_config import DeterministicConfig
from lit_het.heads.covariance import CovarianceConfig, Noise
from lit_het.heads.het import HetConfig
from lit_het.tasks import quantities
from lit_het.tasks.classification import ClassificationConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig

D, K, R = 6, 40, 3
FEATURES = jnp.asarray(np.random.default_rng(0).normal(size=(5, D)), jnp.float32)
TOWER = ViTConfig(8, 4, EncoderConfig(width=D, depth=1, mlp_width=8, num_heads=2), pooling="mean")


def head_of(
    form: Literal["full", "efficient"] = "full",
    second_term: Literal["rank_one", "diagonal"] = "rank_one",
    rank: int = R,
):
    covariance = CovarianceConfig(rank, form, second_term, initial_noise_norm=0.5)
    return HetConfig(covariance).build(D, K, nnx.Rngs(0))


@pytest.mark.parametrize("form", ["full", "efficient"])
def test_the_cosine_is_that_of_scipys_smallest_angle_to_the_row_space_of_the_covariance(
    form: Literal["full", "efficient"],
):
    head = head_of(form)
    found, covariance = jax.jit(lambda x: (head.kernel_alignment(x), head.covariance.covariance(x)))(FEATURES)
    kernel = np.asarray(head.logits.kernel[...])
    random = np.asarray(jax.random.normal(jax.random.key(0), kernel.shape))
    # Σ = Vᵀ V + d dᵀ has r + 1 eigenvalues that are not 0.
    spaces = np.linalg.eigh(np.asarray(covariance, np.float64))[1][:, :, -(R + 1) :]
    for column, rows in enumerate((kernel, random)):
        angles = [scipy.linalg.subspace_angles(rows.T, space).min() for space in spaces]
        np.testing.assert_allclose(np.asarray(found)[:, column], np.cos(angles), atol=1e-4)


def test_of_a_diagonal_second_term_the_factors_count():
    head = head_of(second_term="diagonal")
    factors, found = jax.jit(lambda x: (head.covariance(x).low_rank(), head.kernel_alignment(x)))(FEATURES)
    kernel = np.asarray(head.logits.kernel[...])
    angles = [scipy.linalg.subspace_angles(kernel.T, one.T).min() for one in np.asarray(factors)]
    np.testing.assert_allclose(np.asarray(found)[:, 0], np.cos(angles), atol=1e-4)
    assert jax.eval_shape(lambda x: head_of(rank=0).kernel_alignment(x), FEATURES).shape == (5, 0)


@pytest.mark.parametrize(("is_inside", "expected"), [(True, 1.0), (False, 0.0)])
def test_noise_in_the_row_space_of_the_kernel_is_aligned_and_other_noise_is_not(is_inside, expected, monkeypatch):
    head = head_of()
    kernel = np.asarray(head.logits.kernel[...])
    mixing = np.random.default_rng(1).normal(size=(R, D)).astype(np.float32)
    rows = mixing @ kernel if is_inside else np.linalg.svd(kernel)[2][D : D + R]
    factors = jnp.asarray(np.broadcast_to(rows, (5, R, K)))
    noise = Noise(jnp.asarray(np.zeros((5, K), np.float32)), factors, None, None, is_diagonal=True)
    monkeypatch.setattr(head, "covariance", lambda _: noise)
    found = jax.jit(lambda x: head.kernel_alignment(x))(FEATURES)
    np.testing.assert_allclose(np.asarray(found)[:, 0], expected, atol=1e-4)


def test_it_is_a_quantity_of_het_only():
    image = jnp.zeros((2, 8, 8, 3), jnp.uint8)
    for head, columns in ((HetConfig(CovarianceConfig(R)), 2), (DeterministicConfig(), 0)):
        task = ClassificationConfig(TOWER, head, num_classes=K).build()

        def found(key, task=task):
            params = task.initialize(key)
            return quantities.kernel_alignment(task.image_classifier(params), task.features(params, image))

        assert jax.eval_shape(found, jax.random.key(0)).shape == (2, columns)
