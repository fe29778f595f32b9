"""Optimizers against hand arithmetic and big_vision's recorded updates."""

import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.training.durations import Duration, RunLength
from lit_het.training.optimizers import SGD, Adafactor, AdamW, Optimizer, ParameterGroup, signal_to_noise
from lit_het.training.schedules import Linear, Schedule

GOLDEN = Path(__file__).parent / "golden"
LEAVES = ("mat", "stack", "small", "vec", "scalar")


def steps(optimizer, params, gradients):
    """Returns the parameters after each update; XLA must not leave out roundings to bfloat16 when it fuses."""

    def step(gradient, state, params):
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    state, history = optimizer.init(params), []
    compiled = jax.jit(step, compiler_options={"xla_allow_excess_precision": False})
    for gradient in gradients:
        params, state = compiled(gradient, state, params)
        history.append(jax.tree.map(np.asarray, params))
    return history


def single(values):
    return np.asarray(values, np.float32)


def built(optimizer, peak=1.0, num_steps=10, warmup=0):
    return optimizer.build(Schedule(peak, Duration(warmup)), RunLength(num_steps, 8))


def schedule(step, *, peak, warmup, total, final=0.0):
    """Linear from 0 to the peak, then final + (peak - final) · ½ (1 + cos(π progress))."""
    if step < warmup:
        return peak * step / warmup
    progress = (step - warmup) / (total - warmup)
    return final * peak + (1 - final) * peak * 0.5 * (1 + math.cos(math.pi * progress))


def test_two_steps_of_adamw_follow_the_hand_arithmetic():
    """p ← p - η (m̂ / (√v̂ + 1e-8)) - (η / η_peak) λ p, the decay on kernels only, the gradient clipped before."""
    params = {"layer": {"kernel": single([[2.0]]), "bias": single([1.0])}}
    # The global norms are 5 and 1/2: only the first gradient is clipped, to (0.6, 0.8).
    gradients = [
        {"layer": {"kernel": single([[3.0]]), "bias": single([4.0])}},
        {"layer": {"kernel": single([[-0.3]]), "bias": single([0.4])}},
    ]
    peak, decay = 0.5, 0.1
    optimizer = built(Optimizer(AdamW(0.8, 0.9), decay, clip_norm=1.0), peak, 4)
    layers = [after["layer"] for after in steps(optimizer, params, gradients)]
    history = [np.concatenate([layer["kernel"][0], layer["bias"]]) for layer in layers]
    # The kernel and the bias.
    p, m, v, decays = np.asarray([2.0, 1.0]), np.zeros(2), np.zeros(2), np.asarray([1.0, 0.0])
    for t, (actual, g) in enumerate(zip(history, np.asarray([(0.6, 0.8), (-0.3, 0.4)]), strict=True), start=1):
        rate = schedule(t - 1, peak=peak, warmup=0, total=4)
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        change = (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.9**t)) + 1e-8)
        p = p - rate * change - rate / peak * decay * decays * p
        np.testing.assert_allclose(actual, p, rtol=1e-4)
    # The first step by hand: Adam's first update is the sign, so 2 - 0.5 · 1 - 0.1 · 2 = 1.3.
    assert history[0][0] == pytest.approx(1.3, rel=1e-5)


@pytest.mark.parametrize("learning_rate", [1e-3, 0.1])
def test_decay_at_the_peak_removes_its_fraction_whatever_the_learning_rate(learning_rate):
    params = {"layer": {"kernel": single(np.full((3, 3), 2.0))}}
    optimizer = built(Optimizer(weight_decay=0.25), learning_rate, 100)
    (after,) = steps(optimizer, params, [jax.tree.map(np.zeros_like, params)])
    np.testing.assert_allclose(after["layer"]["kernel"], 1.5, rtol=1e-6)


def test_decay_acts_on_kernels_only():
    paths = dict.fromkeys(("kernel", "bias", "scale", "embedding", "positions", "log_temperature"), single([1]))
    params = {"tower": paths, "head": {"temperature": {"position": single([1])}}}
    (after,) = steps(built(Optimizer(SGD(), 0.25)), params, [jax.tree.map(np.zeros_like, params)])
    assert {name for name, value in after["tower"].items() if value != 1} == {"kernel"}
    assert after["tower"]["kernel"] == 0.75
    assert after["head"]["temperature"]["position"] == 1


def test_sgd_keeps_the_sum_of_gradients_in_bfloat16_and_steps_in_float32():
    """update = g + 0.9 m, p ← p - η update, m ← bfloat16(update), with η from a cosine over four steps."""
    gradients = np.asarray([[0.1, 0.2], [1 / 3, -0.7], [0.01, 0.03]], np.float32)
    optimizer = built(Optimizer(SGD(), clip_norm=None), 0.5, 4)
    params = {"layer": {"bias": single([1.0, -2.0])}}
    assert [leaf.dtype for leaf in jax.tree.leaves(optimizer.init(params)) if leaf.shape == (2,)] == [jnp.bfloat16]
    history = steps(optimizer, params, [{"layer": {"bias": g}} for g in gradients])
    p, m = np.asarray([1.0, -2.0], np.float32), np.zeros(2, jnp.bfloat16)
    for t, (g, actual) in enumerate(zip(gradients, history, strict=True)):
        update = g + (m * np.asarray(0.9, jnp.bfloat16)).astype(np.float32)  # the product is bfloat16, as in optax
        p, m = p - schedule(t, peak=0.5, warmup=0, total=4) * update, update.astype(jnp.bfloat16)
        np.testing.assert_allclose(actual["layer"]["bias"], p, rtol=1e-6)


RULES = [AdamW(), Adafactor(), SGD()]
LAYER = {"kernel": single([[2.0]]), "bias": single([1.0])}
PARAMS = {"tower": {"low": LAYER, "high": LAYER}, "head": LAYER}
GRADIENTS = [jax.tree.map(lambda p, scale=scale: single(scale * p), PARAMS) for scale in (1.0, -0.5)]


@pytest.mark.parametrize("rule", RULES)
def test_the_first_matching_group_scales_updates_and_decay_after_clipping_of_all(rule):
    decay = 0.125
    groups = (
        ParameterGroup(".*/low/.*", learning_rate_factor=0.5, weight_decay_factor=0.0),
        ParameterGroup("tower/.*", learning_rate_factor=3.0, weight_decay_factor=2.0),
    )
    factors = {"low": (0.5, 0.0), "high": (3.0, 2.0), "head": (1.0, 1.0)}
    # Updates depend on gradients alone: those of an optimizer without decay and groups are what is to be scaled.
    plain = [PARAMS, *steps(built(Optimizer(rule, 0.0)), PARAMS, GRADIENTS)]
    grouped = steps(built(Optimizer(rule, decay, groups=groups)), PARAMS, GRADIENTS)
    expected = {path: np.asarray(value) for path, value in parameters.flatten(PARAMS).items()}
    for t, after in enumerate(grouped):
        before, behind = (parameters.flatten(tree) for tree in plain[t : t + 2])
        for path, value in expected.items():
            factor, decays = factors[path.split("/")[-2]]
            removed = decays * decay * schedule(t, peak=1.0, warmup=0, total=10) if path.endswith("kernel") else 0.0
            expected[path] = value + factor * np.asarray(behind[path] - before[path]) - removed * value
            actual = parameters.flatten(after)[path]
            np.testing.assert_allclose(actual, expected[path], rtol=1e-5, atol=1e-6, err_msg=path)


def test_a_group_without_a_trained_parameter_is_refused_by_its_pattern():
    optimizer = built(Optimizer(groups=(ParameterGroup("image_tower/.*"),)))
    with pytest.raises(UserError, match=r"'image_tower/\.\*' matches no trained parameter, .* head, tower"):
        optimizer.init(PARAMS)


def test_a_pattern_that_is_no_regular_expression_is_refused():
    with pytest.raises(UserError, match=r"pattern = '\(' is not a regular expression"):
        ParameterGroup("(")


@pytest.mark.parametrize("rule", RULES)
def test_every_layer_below_the_head_takes_smaller_steps(rule):
    params = {"tower": {"blocks": single(np.ones((3, 2))), "embedding": single([1, 1])}, "head": single([1, 1])}
    above = {"tower": {"blocks": np.asarray([[3], [2], [1]]), "embedding": 4}, "head": 0}
    factors = {"tower": {"blocks": np.asarray([[1 / 8], [1 / 4], [1 / 2]]), "embedding": 1 / 16}, "head": 1.0}
    gradients = [jax.tree.map(lambda p: 2 * p, params)] * 2
    run, warm = RunLength(10, 8), Schedule(1.0, Duration(0))
    plain = steps(Optimizer(rule).build(warm, run), params, gradients)
    scaled = steps(Optimizer(rule, layer_decay=0.5).build(warm, run, lambda _: above), params, gradients)
    for one, other in zip(plain, scaled, strict=True):
        expected = jax.tree.map(lambda p, after, factor: p + factor * (after - p), params, one, factors)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), other, expected)


@pytest.mark.slow
def test_adafactor_has_big_visions_recorded_updates_to_the_bit():
    # A learning rate of 1 over a very long run, no decay and no clipping: what is left is minus the update.
    optimizer = built(Optimizer(Adafactor(), weight_decay=0.0, clip_norm=None), 1.0, 10**9)
    with np.load(GOLDEN / "adafactor_default_bf16mom.npz") as golden:
        params = {leaf: jnp.zeros_like(golden[f"grad0/{leaf}"]) for leaf in LEAVES}
        state: Any = optimizer.init(params)
        for i in range(5):
            gradient = {leaf: jnp.asarray(golden[f"grad{i}/{leaf}"]) for leaf in LEAVES}
            # Not compiled as a whole: fused, products are rounded once where they were rounded twice.
            updates: Any
            updates, state = optimizer.update(gradient, state, params)
            for leaf in LEAVES:
                np.testing.assert_array_equal(-updates[leaf], golden[f"update{i}/{leaf}"], err_msg=f"{leaf}, step {i}")


def test_the_whole_chain_equals_big_visions_clip_adafactor_decay_and_schedule(monkeypatch):
    with np.load(GOLDEN / "optchain_lit_adafactor.npz") as golden:
        meta = json.loads(golden["meta"].tobytes())
        assert (meta["lr"], meta["wd"], meta["grad_clip_norm"], meta["total_steps"]) == (0.05, 0.01, 1.0, 8)
        # The recording factors axes of 8 and more, where the defaults of both ask for 32.
        original = optax.scale_by_factored_rms
        monkeypatch.setattr(
            optax, "scale_by_factored_rms", lambda **options: original(**{**options, "min_dim_size_to_factor": 8})
        )
        optimizer = built(Optimizer(Adafactor(), weight_decay=0.01), 0.05, 8, warmup=2)

        def tree(group):
            return {k.removeprefix(f"{group}/"): v for k, v in golden.items() if k.startswith(f"{group}/")}

        # `left_out` has the norm of the gradients that the golden file lacks, so that clipping sees the whole norm.
        gradients = [parameters.unflatten(tree(f"grad{i}") | {"left_out": golden[f"left_out{i}"]}) for i in range(4)]
        start, expected = tree("params_init"), tree("params3")
        trained = steps(optimizer, parameters.unflatten(start | {"left_out": np.float32(0)}), gradients)
        last = parameters.flatten(trained[-1])
        assert len(expected) == 12
        for path, array in expected.items():
            np.testing.assert_allclose(last[path], array, rtol=1e-4, atol=1e-5, err_msg=path)
        assert any(not np.allclose(start[path], array, atol=1e-3) for path, array in expected.items())


def test_adafactors_second_decay_is_capped():
    """v after a step of g = 0 is β2 v: with a cap of 0.5 it halves, where 1 - t^-0.8 at step 20 would be 0.909."""
    params = {"scale": np.ones(3, np.float32)}
    optimizer = built(Optimizer(Adafactor(second_decay_cap=0.5)))
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for _ in range(19):
        _, state = update(params, state, params)
    before = second_moment(state)
    _, state = update({"scale": np.zeros(3, np.float32)}, state, params)
    np.testing.assert_allclose(second_moment(state), 0.5 * before, rtol=1e-4)


def test_adafactor_keeps_its_momentum_in_bfloat16_or_float32_and_factors_large_matrices():
    params = {"layer": {"kernel": np.ones((32, 40), np.float32), "small": np.ones((31, 40), np.float32)}}
    leaves = jax.tree.leaves(built(Optimizer(Adafactor())).init(params))
    moments = {(32,), (40,), (1,), (31, 40)}
    assert {leaf.shape for leaf in leaves if leaf.dtype == jnp.bfloat16} == {(32, 40), (31, 40)}
    assert {leaf.shape for leaf in leaves if leaf.dtype == jnp.float32} == moments
    leaves = jax.tree.leaves(built(Optimizer(Adafactor(momentum_type="float32"))).init(params))
    assert {leaf.shape for leaf in leaves if leaf.dtype == jnp.float32} == {(32, 40), *moments}


def adafactors_updates(gradients, clip_rms, dtype):
    """Shazeer & Stern 2018, Alg. 4, with momentum of 0.9 at the end: updates by step of arrays of one or two axes.

    V̂ is R C / mean(R) where both axes have 32 entries or more, with R and C the means of G² over columns and rows.
    """
    squares: dict[str, Any] = {}
    momentum, history = {name: np.zeros(g.shape, dtype) for name, g in gradients[0].items()}, []
    for t, gradient in enumerate(gradients, start=1):
        decay, updates = min(0.999, 1 - t**-0.8), {}
        for name, g in gradient.items():
            is_factored = g.ndim == 2 and min(g.shape) >= 32
            new = [(g * g).mean(1), (g * g).mean(0)] if is_factored else [g * g]
            squares[name] = [decay * v + (1 - decay) * x for v, x in zip(squares.get(name, new), new, strict=True)]
            row, *column = squares[name]
            v = np.outer(row, column[0]) / row.mean() if is_factored else row
            u = g / np.sqrt(v)
            u = u if clip_rms is None else u / max(1, np.sqrt((u * u).mean()) / clip_rms)
            # The product with a bfloat16 momentum is bfloat16, as in optax.
            updates[name] = 0.1 * u + (momentum[name] * np.asarray(0.9, dtype)).astype(np.float32)
            momentum[name] = updates[name].astype(dtype)
        history.append(updates)
    return history


SHAPES = {"kernel": (40, 32), "bias": (5,), "scale": (1,)}


def gradients_of_layers():
    """Gradients of ``SHAPES`` in four steps, of two blocks and outside: those of the second block grow."""
    random = np.random.default_rng(0)

    def draw(scale):
        return {name: single(scale * random.normal(size=shape)) for name, shape in SHAPES.items()}

    return [(draw(1.0), draw(4.0**step), draw(2.0)) for step in range(4)]


def in_a_stack(first, second, outside):
    return {"encoder": {"blocks": jax.tree.map(lambda *blocks: np.stack(blocks), first, second)}, "head": outside}


@pytest.mark.parametrize(
    ("rule", "dtype"),
    [
        (Adafactor(momentum_type="float32"), np.float32),
        (Adafactor(momentum_type="float32", clip_rms=0.5), np.float32),
        (Adafactor(clip_rms=1.0), jnp.bfloat16),
    ],
)
def test_adafactor_of_a_stack_has_the_updates_of_its_algorithm_in_a_loop_over_layers(rule, dtype):
    gradients = gradients_of_layers()
    start = jax.tree.map(np.zeros_like, in_a_stack(*gradients[0]))
    # A learning rate of 1 over a very long run, no decay and no clipping by the norm: what is left is minus the update.
    optimizer = built(Optimizer(rule, weight_decay=0.0, clip_norm=None), 1.0, 10**9)
    history = [start, *steps(optimizer, start, [in_a_stack(*of_layers) for of_layers in gradients])]
    expected = [adafactors_updates(own, rule.clip_rms, dtype) for own in zip(*gradients, strict=True)]
    for t, updates in enumerate(zip(*expected, strict=True)):
        found = jax.tree.map(lambda before, after: before - after, *history[t : t + 2])
        jax.tree.map(
            lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5), found, in_a_stack(*updates)
        )


def test_clipped_updates_have_no_signal_to_noise_ratio():
    optimizer, params = Optimizer(Adafactor(clip_rms=1.0)), {"kernel": np.zeros(2, np.float32)}
    assert signal_to_noise(optimizer, built(optimizer).init(params), ".*") is None


def second_moment(state):
    paths = jax.tree_util.tree_leaves_with_path(state)
    found = [leaf for path, leaf in paths if jax.tree_util.keystr(path).endswith(".v['scale']")]
    assert len(found) == 1
    return np.asarray(found[0])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Optimizer(clip_norm=-1.0),
        lambda: Optimizer(clip_norm=0.0),
        lambda: Optimizer(AdamW(first_decay=1.5)),
        lambda: Optimizer(Adafactor(second_decay_cap=7.0)),
        lambda: Optimizer(Adafactor(clip_rms=0.0)),
        lambda: Optimizer(SGD(momentum=-3.0)),
    ],
)
def test_settings_that_would_not_descend_are_refused(wrong):
    with pytest.raises(UserError, match="must be"):
        wrong()


def test_a_momentum_of_another_type_is_refused():
    with pytest.raises(UserError, match="momentum_type = 'float16' is not one of 'bfloat16', 'float32'"):
        Adafactor(momentum_type="float16")  # pyright: ignore[reportArgumentType]


def test_a_group_after_one_that_has_all_of_its_parameters_is_refused():
    optimizer = built(Optimizer(groups=(ParameterGroup(".*"), ParameterGroup("head/.*", 2.0))))
    with pytest.raises(UserError, match="only parameters of earlier groups"):
        optimizer.init(PARAMS)


def test_a_modules_own_learning_rate_holds_where_no_group_of_the_optimizer_does():
    params = {"head": {"covariance": {"kernel": single([1])}, "temperature": {"log_temperature": single(1)}}}
    gradients = [jax.tree.map(np.ones_like, params)]
    own = (ParameterGroup("head/covariance/.*", 0.25), ParameterGroup("head/temperature/.*", 3.0))
    for groups, expected in (((), 0.25), ((ParameterGroup(".*/kernel", 0.5),), 0.5)):
        optimizer = Optimizer(SGD(), weight_decay=0.0, clip_norm=None, groups=groups)
        built_with = optimizer.build(Schedule(0.1, Duration(0)), RunLength(1, 1), learning_rates=own)
        (after,) = steps(built_with, params, gradients)
        np.testing.assert_allclose(after["head"]["covariance"]["kernel"], 1 - 0.1 * expected, rtol=1e-6)
        np.testing.assert_allclose(after["head"]["temperature"]["log_temperature"], 1 - 0.1 * 3, rtol=1e-6)


@pytest.mark.parametrize("rule", [AdamW(), Adafactor()], ids=["adamw", "adafactor"])
def test_the_signal_to_noise_ratio_of_known_gradients_is_recovered(rule):
    """g = μ + N(0, 1) in 4,000 entries with μ² = ratio."""
    optimizer = Optimizer(rule, clip_norm=None)
    params = {"head": {"kernel": np.zeros(4000, np.float32)}, "other": np.zeros(3, np.float32)}
    update = jax.jit(built(optimizer).update)
    for ratio in (0.0, 0.25, 4.0):
        state, random = built(optimizer).init(params), np.random.default_rng(0)
        for step in range(1, 61):
            gradient = (math.sqrt(ratio) + random.standard_normal(4000)).astype(np.float32)
            _, state = update({"head": {"kernel": gradient}, "other": np.ones(3, np.float32)}, state, params)
            if step in (10, 60):
                # The momentum of Adafactor is rounded to bfloat16, and its second moment is rough at first.
                expected = pytest.approx(ratio, rel=0.2, abs=0.1 if step == 10 else 0.02)
                assert signal_to_noise(optimizer, state, "head/.*") == expected
                assert signal_to_noise(optimizer, state, "nothing") is None


def test_momentum_alone_has_no_signal_to_noise_ratio():
    optimizer, params = Optimizer(SGD()), {"kernel": np.zeros(2, np.float32)}
    assert signal_to_noise(optimizer, built(optimizer).init(params), ".*") is None


LATE = {"now": {"kernel": single([1.0])}, "later": {"kernel": single([1.0])}}


def late_updates(rule, train_steps, start=100, decay=0.0):
    """Returns the updates of ``LATE`` at some steps, with a gradient that is 0 in the late part before its start."""
    built_late = Optimizer(rule, decay, clip_norm=None).build(
        Schedule(0.1, Duration(0), decay=Linear(1.0)), RunLength(10_000, 1), late={"later": start}
    )
    update = jax.jit(lambda gradient, state, step: built_late.update(gradient, state, LATE, train_step=step))
    state, found = built_late.init(LATE), []
    for step in train_steps:
        gradient = {"now": {"kernel": single([1.0])}, "later": {"kernel": single([1.0 if step >= start else 0.0])}}
        updates, state = update(gradient, state, step)
        found.append((float(updates["now"]["kernel"][0]), float(updates["later"]["kernel"][0])))
    return np.array(found)


@pytest.mark.parametrize("rule", [AdamW(), Adafactor()], ids=["adamw", "adafactor"])
def test_what_is_trained_later_begins_as_if_the_run_began_there(rule):
    from_start = late_updates(rule, range(10), start=0)[:, 1]
    found = late_updates(rule, range(110), decay=1e-3)
    assert not found[:100, 1].any()  # weight decay neither
    np.testing.assert_allclose(found[100:, 1] + 1e-3, from_start, rtol=1e-4)
    assert found[:, 0].all()


def test_adams_first_updates_of_a_late_part_are_the_learning_rate():
    """Moments that count the gradients of zero before would make them (1 - β1^k) / √(1 - β2^k) times as large."""
    np.testing.assert_allclose(late_updates(AdamW(), range(110))[100:, 1], -0.1, rtol=1e-4)


def test_a_late_part_begins_at_its_step_where_earlier_steps_were_skipped():
    found = late_updates(AdamW(), [*range(50), *range(60, 102)])
    np.testing.assert_allclose(found[-2:, 1], -0.1, rtol=1e-4)
    assert not found[:-2, 1].any()


def test_the_signal_to_noise_ratio_is_read_from_the_state_of_the_part_it_is_asked_for():
    optimizer = Optimizer(AdamW())
    state = optimizer.build(Schedule(0.1, Duration(0)), RunLength(10, 1), late={"later": 5}).init(LATE)
    assert all(signal_to_noise(optimizer, state, f"{part}/.*") is not None for part in LATE)
