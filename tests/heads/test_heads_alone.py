"""The head and the loss in a training loop of one's own, as docs/heads.md shows them."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lit_het import heads, losses

DOCUMENT = Path(__file__).parents[2] / "docs" / "heads.md"


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """What the code of the section defines."""
    section = DOCUMENT.read_text().split("\n## The head alone\n")[1].split("\n## ")[0]
    contrastive, classifier = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    found: dict[str, Any] = {}
    # Logits of fewer pairs, which are most of the time, in more steps.
    for given, small in (("size=128", "size=64"), (r"key\(0\), 400\)", "key(0), 500)")):
        contrastive, count = re.subn(given, small, contrastive)
        assert count == 1
    # As a user would run it: without this suite's rule that arrays of different rank are never added.
    with jax.numpy_rank_promotion("allow"):
        exec(contrastive, found)
        exec(classifier, found)
    return found


@pytest.mark.slow
def test_the_contrastive_example_learns_which_texts_are_vague(names: dict[str, Any]):
    assert np.mean(names["losses"][-20:]) < names["losses"][0] - 1
    noise_norm, is_vague = names["noise_norm"], names["is_vague"]
    assert noise_norm[is_vague].mean() > 1.05 * noise_norm[~is_vague].mean()


@pytest.mark.slow
def test_the_classifiers_example_learns_its_labels(names: dict[str, Any]):
    probabilities, labels = names["probabilities"], names["labels"]
    np.testing.assert_allclose(probabilities.sum(axis=1), 1, rtol=1e-4)
    is_clear = ~names["is_vague"]
    assert np.mean(np.argmax(probabilities, axis=1)[is_clear] == labels[is_clear]) > 0.5


def test_a_factor_belongs_to_every_parameter():
    head = heads.HetXLContrastiveConfig(
        covariance=heads.CovarianceConfig(num_factors=2, learning_rate_factor=0.25), initial_bias=0.0
    ).build(4, nnx.Rngs(0))
    factors = heads.learning_rate_factors(head)
    assert jax.tree.structure(factors) == jax.tree.structure(nnx.to_pure_dict(nnx.state(head)))
    assert factors["image_covariance"]["factors"] == {"bias": 0.25, "kernel": 0.25}
    assert factors["temperature"] == {"log_temperature": heads.LogTemperature().learning_rate_factor}
    assert factors["bias"] == 1.0


@pytest.mark.parametrize("loss", [losses.SoftmaxLoss(), losses.SigmoidLoss()])
def test_a_contrastive_loss_counts_every_row_unless_told(loss: Any):
    image, text = np.random.default_rng(0).normal(size=(2, 6, 4)).astype(np.float32)
    head = heads.DeterministicContrastiveConfig().build(4, nnx.Rngs(0))
    samples, mean = jax.jit(lambda image, text: head(image, text, None))(image, text), jax.jit(loss)
    assert mean(samples) == mean(samples, np.ones(6, bool))
    assert mean(samples) != mean(samples, np.arange(6) < 5)


@pytest.mark.parametrize("loss", [losses.SoftmaxCrossEntropy(), losses.SigmoidCrossEntropy()])
def test_a_classification_loss_counts_every_row_unless_told(loss: Any):
    head = heads.HetXLConfig(heads.CovarianceConfig(2)).build(4, 3, nnx.Rngs(0))
    features, target = jnp.ones((6, 4)), loss.targets(jnp.arange(6) % 3, 3)
    mean = jax.jit(lambda *valid: loss(head(features, jax.random.key(1)), target, *valid).loss)
    assert mean() == mean(np.ones(6, bool))
    assert mean() != mean(np.arange(6) < 5)


def test_importing_the_package_imports_no_jax():
    code = "import sys, lit_het; sys.exit('jax' in sys.modules or 'sklearn' in sys.modules)"
    assert not subprocess.run([sys.executable, "-c", code], check=False).returncode
