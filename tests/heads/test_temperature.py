"""τ divides logits (HET-XL Eq. 16, App. K and N.2)."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_het.heads.temperature import BoundedTemperature, FixedTemperature, LogTemperature

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize(
    ("position", "expected"), [(np.log(3), 3.7625), (-np.log(3), 1.2875), (100, 5.0), (-100, 0.05)]
)
def test_the_bounded_temperature_follows_equation_16(position, expected):
    # sigmoid(ln 3) = 3/4: 4.95 · 0.75 + 0.05 = 3.7625; sigmoid(-ln 3) = 1/4: 4.95 · 0.25 + 0.05 = 1.2875
    module = BoundedTemperature(0.05, 5.0).build()
    module.position[...] = jnp.float32(position)
    assert float(module()) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("low", "high", "initial"),
    [
        (0.05, 5.0, None),
        *((0.05, 5.0, initial) for initial in (1.25, 2.525, 3.75, 4.9)),  # Table 19
        *((low, 5.0, 2.525) for low in (0.001, 0.01)),  # Table 20
        *((0.05, high, 2.525) for high in (4.0, 3.0)),
    ],
)
def test_the_bounded_temperature_starts_where_it_is_told_or_at_the_midpoint(low, high, initial):
    # (5 - 0.05) · 1/2 + 0.05 = 2.525
    found = float(BoundedTemperature(low, high, initial).build()())
    assert found == pytest.approx(2.525 if initial is None else initial, rel=1e-6)


RANGES = [(0.05, 5.0), (0.001, 5.0), (1e-4, 0.3), (7.0, 7.5)]
TEMPERATURES = {bounds: nnx.split(BoundedTemperature(*bounds).build()) for bounds in RANGES}
VALUE_AND_SLOPE = {
    bounds: jax.jit(jax.value_and_grad(lambda t, graph=graph: nnx.merge(graph, {"position": t})()))
    for bounds, (graph, _) in TEMPERATURES.items()
}


@settings(deadline=None)  # the first call of each range compiles
@given(bounds=st.sampled_from(RANGES), t=st.floats(width=32, allow_nan=False))
def test_the_bounded_temperature_stays_in_its_range_and_follows_its_slope_for_any_position(bounds, t):
    """dτ/dt = (τmax - τmin) sigmoid(t) (1 - sigmoid(t))."""
    low, high = bounds
    value, slope = VALUE_AND_SLOPE[bounds](jnp.float32(t))
    # One unit in the last place of the largest is lost where sigmoid(t) is 0 or 1.
    assert low - np.spacing(np.float32(high)) <= float(value) <= high + np.spacing(np.float32(high))
    share = 1 / (1 + np.exp(-np.clip(np.float64(t), -300, 300)))
    assert float(value) == pytest.approx((high - low) * share + low, rel=1e-5)
    assert float(slope) == pytest.approx((high - low) * share * (1 - share), rel=1e-4, abs=1e-6)


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


def test_the_fixed_temperature_has_no_parameters():
    module = FixedTemperature(0.7).build()
    assert float(module()) == pytest.approx(0.7)
    assert not jax.tree.leaves(nnx.state(module))


@pytest.mark.parametrize("initial", [1 / 10, 1 / 3])
def test_the_log_temperature_has_the_configured_initial_value_and_learns_its_logarithm(initial):
    graph, state = nnx.split(LogTemperature(initial).build())
    assert float(nnx.merge(graph, state)()) == pytest.approx(initial)
    # dτ/dt = exp(t) = τ
    gradient = jax.grad(lambda params: nnx.merge(graph, params)())(state)
    assert float(jax.tree.leaves(gradient)[0]) == pytest.approx(initial)
