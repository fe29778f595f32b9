"""τ divides logits (HET-XL Eq. 16, App. K and N.2)."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lit_het.errors import UserError
from lit_het.heads.temperature import BoundedTemperature, FixedTemperature, LogTemperature

GOLDEN = Path(__file__).parents[1] / "golden"


def test_the_bounded_temperature_starts_at_the_midpoint_of_its_range():
    # (5 - 0.05) · 1/2 + 0.05
    assert float(BoundedTemperature(0.05, 5.0).build()()) == pytest.approx(2.525)


@pytest.mark.parametrize(
    ("position", "expected"), [(np.log(3), 3.7625), (-np.log(3), 1.2875), (100, 5.0), (-100, 0.05)]
)
def test_the_bounded_temperature_follows_equation_16(position, expected):
    # sigmoid(ln 3) = 3/4: 4.95 · 0.75 + 0.05 = 3.7625; sigmoid(-ln 3) = 1/4: 4.95 · 0.25 + 0.05 = 1.2875
    module = BoundedTemperature(0.05, 5.0).build()
    module.position[...] = jnp.float32(position)
    assert float(module()) == pytest.approx(expected, rel=1e-6)


def test_the_bounded_temperature_equals_the_one_of_edward2():
    with np.load(GOLDEN / "compute_temperature.npz") as golden:
        compared = 0
        for name in (name for name in golden.files if name.startswith("bounds")):
            low, high = golden[name]
            if np.isnan(low) or np.isnan(high):
                continue
            module = BoundedTemperature(float(low), float(high)).build()
            for t, tau in zip(golden["t"].ravel(), golden[name.replace("bounds", "tau")].ravel(), strict=True):
                module.position[...] = jnp.float32(t)
                np.testing.assert_allclose(module(), tau, rtol=1e-5)
                compared += 1
    assert compared


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1.0, 1.0), (2.0, 1.0), (1.0, 1.0)])
def test_impossible_bounds_are_refused(low, high):
    with pytest.raises(UserError, match=f"0 < minimum < maximum, not {low} and {high}"):
        BoundedTemperature(low, high)


def test_the_fixed_temperature_has_no_parameters():
    module = FixedTemperature(0.7).build()
    assert float(module()) == pytest.approx(0.7)
    assert not jax.tree.leaves(nnx.state(module))


@pytest.mark.parametrize("initial", [1 / 10, 1 / 3])
def test_the_log_temperature_starts_where_asked_and_learns_its_logarithm(initial):
    graph, state = nnx.split(LogTemperature(initial).build())
    assert float(nnx.merge(graph, state)()) == pytest.approx(initial)
    # dτ/dt = exp(t) = τ
    gradient = jax.grad(lambda params: nnx.merge(graph, params)())(state)
    assert float(jax.tree.leaves(gradient)[0]) == pytest.approx(initial)


def test_a_temperature_that_is_not_positive_is_refused():
    with pytest.raises(UserError, match=r"temperature.initial = 0.0 must be positive"):
        LogTemperature(0.0)
