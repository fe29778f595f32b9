"""Every head of the study of noise."""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from lit_het.configs import quickstart_lit_deterministic
from lit_het.random import keys_at
from lit_het.types import Batch
from scripts.studies import study_noise
from scripts.studies.noise.pairs import PairSet
from scripts.studies.noise.sources import Data


@pytest.fixture(autouse=True)
def types_of_the_library_are_not_checked():
    """Rivals stand where the library has losses and heads of its own."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


OPTIONS = argparse.Namespace(steps=1, temperature=0.05, temperature_factor=3.0, output=Path("runs"))
# One of a kind.
SHORT = ("smoothing 0.1", "S16", "classifier S16")


@pytest.mark.parametrize(
    "head", [pytest.param(head, marks=() if head in SHORT else pytest.mark.slow) for head in study_noise.HEADS]
)
def test_every_head_of_the_study_has_a_loss(head):
    config = quickstart_lit_deterministic.get_config()
    size = config.task.image_tower.embedding_size
    pairs = PairSet(np.zeros((4, size), np.float32), np.arange(4), tuple("abcd"), {})
    unused: Any = None
    data = Data(config, pairs, pairs, pairs, pairs, np.arange(4), np.arange(4), {}, tokenizer=unused)
    task = study_noise.configuration(data, head, OPTIONS).task.build()
    batch = Batch(
        jnp.ones(4, bool),
        image_embedding=jnp.asarray(pairs.features),
        label=jnp.arange(4),
        text=jnp.zeros((4, quickstart_lit_deterministic.TEXT_LENGTH), jnp.int32),
    )
    params = jax.eval_shape(task.initialize, jax.random.key(0))
    loss, _ = jax.eval_shape(lambda params: task.loss(params, batch, keys_at(0, 0)), params)
    assert (loss.shape, loss.dtype) == ((), jnp.float32)
