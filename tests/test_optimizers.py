"""Optimizers and schedules against hand arithmetic and big_vision's recorded updates."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.optimizers import Adafactor, AdamW, decay_mask
from lit_het.schedules import CosineSchedule

GOLDEN = Path(__file__).parent / "golden"
LEAVES = ("mat", "small", "vec", "scalar")


def steps(optimizer, params, gradients):
    """Returns the parameters after each update; XLA must not leave out roundings to bfloat16 when it fuses."""
    state, history = optimizer.init(params), []
    update = jax.jit(optimizer.update, compiler_options={"xla_allow_excess_precision": False})
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        history.append(params)
    return history


def schedule(step, *, peak, warmup, total, final=0.0):
    """Linear from 0 to the peak, then final + (peak - final) · ½ (1 + cos(π progress))."""
    if step < warmup:
        return peak * step / warmup
    progress = (step - warmup) / (total - warmup)
    return final * peak + (1 - final) * peak * 0.5 * (1 + math.cos(math.pi * progress))


def test_the_schedule_equals_the_formula_and_big_visions():
    with np.load(GOLDEN / "lr_schedules.npz") as golden:
        actual = CosineSchedule(0.3, warmup_steps=10).build(100)
        for step, expected in zip(golden["steps"], golden["cosine_w10"], strict=True):
            np.testing.assert_allclose(actual(int(step)), expected, rtol=1e-5, atol=1e-7)
            assert expected == pytest.approx(schedule(step, peak=0.3, warmup=10, total=100), abs=1e-6)


def test_the_schedule_can_end_above_zero():
    built = CosineSchedule(2.0, warmup_steps=0, final_fraction=0.25).build(10)
    assert np.asarray([built(step) for step in (0, 5, 10)]) == pytest.approx([2.0, 1.25, 0.5])


def test_a_warm_up_as_long_as_the_run_is_refused():
    with pytest.raises(UserError, match=r"schedule.warmup_steps = 10 must be smaller than the run's 10 steps"):
        CosineSchedule(warmup_steps=10).build(10)


def test_two_steps_of_adamw_follow_the_hand_arithmetic():
    """p ← p - η (m̂ / (√v̂ + 1e-8)) - (η / η_peak) λ p, the decay on kernels only, the gradient clipped before."""
    params = {"layer": {"kernel": jnp.asarray([[2.0]]), "bias": jnp.asarray([1.0])}}
    # The global norms are 5 and 1/2: only the first gradient is clipped, to (0.6, 0.8).
    gradients = [
        {"layer": {"kernel": jnp.asarray([[3.0]]), "bias": jnp.asarray([4.0])}},
        {"layer": {"kernel": jnp.asarray([[-0.3]]), "bias": jnp.asarray([0.4])}},
    ]
    peak, decay = 0.5, 0.1
    optimizer = AdamW(0.8, 0.9, decay, clip_norm=1.0).build(CosineSchedule(peak, warmup_steps=0), 4)
    kernel, bias = 2.0, 1.0
    moments = {"kernel": (0.0, 0.0), "bias": (0.0, 0.0)}
    for t, (actual, clipped) in enumerate(
        zip(steps(optimizer, params, gradients), [(0.6, 0.8), (-0.3, 0.4)], strict=True), start=1
    ):
        rate = schedule(t - 1, peak=peak, warmup=0, total=4)
        change = {}
        for name, g in zip(("kernel", "bias"), clipped, strict=True):
            m, v = moments[name]
            m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
            moments[name] = (m, v)
            change[name] = (m / (1 - 0.8**t)) / (math.sqrt(v / (1 - 0.9**t)) + 1e-8)
        kernel -= rate * change["kernel"] + rate / peak * decay * kernel
        bias -= rate * change["bias"]
        np.testing.assert_allclose(actual["layer"]["kernel"], [[kernel]], rtol=1e-5)
        np.testing.assert_allclose(actual["layer"]["bias"], [bias], rtol=1e-5)
    # The first step by hand: Adam's first update is the sign, so 2 - 0.5 · 1 - 0.1 · 2 = 1.3.
    assert float(steps(optimizer, params, gradients)[0]["layer"]["kernel"][0, 0]) == pytest.approx(1.3, rel=1e-5)


@pytest.mark.parametrize("learning_rate", [1e-3, 0.1])
def test_decay_at_the_peak_removes_its_fraction_whatever_the_learning_rate(learning_rate):
    params = {"layer": {"kernel": jnp.full((3, 3), 2.0)}}
    optimizer = AdamW(weight_decay=0.25).build(CosineSchedule(learning_rate, warmup_steps=0), 100)
    (after,) = steps(optimizer, params, [jax.tree.map(jnp.zeros_like, params)])
    np.testing.assert_allclose(after["layer"]["kernel"], 1.5, rtol=1e-6)


def test_decay_acts_on_kernels_only():
    paths = {"kernel": 1, "bias": 1, "scale": 1, "embedding": 1, "positions": 1, "log_temperature": 1}
    mask = decay_mask({"tower": paths, "head": {"temperature": {"position": 1}}})
    assert mask["tower"] == {name: name == "kernel" for name in paths}
    assert mask["head"] == {"temperature": {"position": False}}


def test_adafactor_equals_big_visions_recorded_updates():
    with np.load(GOLDEN / "adafactor_default_bf16mom.npz") as golden:
        gradients = [{leaf: jnp.asarray(golden[f"grad{i}/{leaf}"]) for leaf in LEAVES} for i in range(3)]
        # Learning rate 1 over a very long run, no decay and no clipping: what is left is minus the update.
        optimizer = Adafactor(weight_decay=0.0, clip_norm=1e30).build(CosineSchedule(1.0, warmup_steps=0), 10**9)
        start = jax.tree.map(jnp.zeros_like, gradients[0])
        total = {leaf: np.zeros_like(golden[f"update0/{leaf}"]) for leaf in LEAVES}
        for i, params in enumerate(steps(optimizer, start, gradients)):
            for leaf in LEAVES:
                total[leaf] += golden[f"update{i}/{leaf}"]
                np.testing.assert_allclose(-params[leaf], total[leaf], rtol=1e-4, atol=1e-5, err_msg=leaf)


def test_the_whole_chain_equals_big_visions_clip_adafactor_decay_and_schedule(monkeypatch):
    with np.load(GOLDEN / "optchain_lit_adafactor.npz") as golden:
        meta = json.loads(golden["meta"].tobytes())
        assert (meta["lr"], meta["wd"], meta["grad_clip_norm"], meta["total_steps"]) == (0.05, 0.01, 1.0, 8)
        # The recording factors axes of 8 and more, where the defaults of both ask for 32.
        original = optax.scale_by_factored_rms
        monkeypatch.setattr(
            optax, "scale_by_factored_rms", lambda **options: original(**{**options, "min_dim_size_to_factor": 8})
        )
        optimizer = Adafactor(weight_decay=0.01).build(CosineSchedule(0.05, warmup_steps=2), 8)

        def tree(group):
            return {k.removeprefix(f"{group}/"): jnp.asarray(v) for k, v in golden.items() if k.startswith(f"{group}/")}

        # `left_out` has the norm of the gradients that the golden file lacks, so that clipping sees the whole norm.
        gradients = [
            parameters.unflatten(tree(f"grad{i}") | {"left_out": jnp.asarray(golden[f"left_out{i}"])}) for i in range(4)
        ]
        start, expected = tree("params_init"), tree("params3")
        trained = steps(optimizer, parameters.unflatten(start | {"left_out": jnp.float32(0)}), gradients)
        last = parameters.flatten(trained[-1])
        assert len(expected) == 12
        for path, array in expected.items():
            np.testing.assert_allclose(last[path], array, rtol=1e-4, atol=1e-5, err_msg=path)
        assert any(not np.allclose(start[path], array, atol=1e-3) for path, array in expected.items())


def test_adafactors_second_decay_is_capped():
    """v after a step of g = 0 is β2 v: with a cap of 0.5 it halves, where 1 - t^-0.8 at step 20 would be 0.909."""
    params = {"scale": jnp.ones(3)}
    optimizer = Adafactor(second_decay_cap=0.5).build(CosineSchedule(warmup_steps=0), 100)
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for _ in range(19):
        _, state = update(params, state, params)
    before = second_moment(state)
    _, state = update({"scale": jnp.zeros(3)}, state, params)
    np.testing.assert_allclose(second_moment(state), 0.5 * before, rtol=1e-5)


def test_adafactor_keeps_its_momentum_in_bfloat16_and_factors_large_matrices():
    params = {"layer": {"kernel": jnp.ones((32, 40)), "small": jnp.ones((31, 40))}}
    state = Adafactor().build(CosineSchedule(warmup_steps=0), 100).init(params)
    leaves = jax.tree.leaves(state)
    assert {leaf.shape for leaf in leaves if leaf.dtype == jnp.bfloat16} == {(32, 40), (31, 40)}
    assert {leaf.shape for leaf in leaves if leaf.dtype == jnp.float32} == {(32,), (40,), (1,), (31, 40)}


def second_moment(state):
    paths = jax.tree_util.tree_leaves_with_path(state)
    found = [leaf for path, leaf in paths if jax.tree_util.keystr(path).endswith(".v['scale']")]
    assert len(found) == 1
    return np.asarray(found[0])
