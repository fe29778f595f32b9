"""Transformations of optax as update rules: equal to optax's own chains, saved, split over devices, refused by name."""

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lit_het import parameters, sharding
from lit_het.configs import experiment, glyph_classifier
from lit_het.configs.parsing import parse_config
from lit_het.errors import UserError
from lit_het.paths import locate_config
from lit_het.sharding import MeshConfig
from lit_het.training.durations import Duration, RunLength
from lit_het.training.optax_table import TABLE
from lit_het.training.optimizers_config import Optax, Optimizer, ParameterGroup
from lit_het.training.schedules import Schedule
from lit_het.training.step import initial_state
from lit_het.weights.native.saving import Checkpoints

NOT_OFFERED = {"learning_rate", "clip_value_fn", "ns_coeffs", "weight_dimension_numbers"}
SCHEDULE, RUN = Schedule(0.1, Duration(1)), RunLength(6, 8)


def params_and_gradients(num_steps: int = 4) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    shapes = {
        "tower/encoder/blocks/mlp/up/kernel": (3, 16, 32),
        "tower/encoder/blocks/mlp/up/bias": (3, 32),
        "tower/patches/kernel": (16, 8),
        "head/temperature/log_temperature": (),
    }
    trees = [
        parameters.unflatten(
            {path: jnp.asarray(random.normal(size=shape), jnp.float32) for path, shape in shapes.items()}
        )
        for _ in range(num_steps + 1)
    ]
    return trees[0], trees[1:]


def trained(optimizer: Any, params: Any, gradients: Any) -> tuple[Any, Any]:
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def assert_close(found, expected, **tolerance):
    for (path, one), other in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, err_msg=jax.tree_util.keystr(path), **tolerance)


def of_optax(name: str) -> Any:
    return getattr(optax, name, None) or getattr(optax.contrib, name)


@pytest.mark.parametrize("name", TABLE)
def test_every_argument_of_the_table_is_one_of_optax(name):
    if name == "scale_by_muon":
        known = inspect.signature(optax.contrib.muon).parameters
    else:
        known = inspect.signature(of_optax(name)).parameters
        assert {*known} - NOT_OFFERED == {*TABLE[name]}
    assert {*TABLE[name]} <= {*known} - NOT_OFFERED


@pytest.mark.parametrize("name", [name for name in TABLE if name != "scale_by_muon"])
def test_a_rule_under_our_clipping_groups_decay_and_schedule_is_optax_own_chain(name):
    """p ← p - η_t (factor · u + (λ / η_peak) p), decay of kernels only, where u is the transformation's."""
    params, gradients = params_and_gradients()
    optimizer = Optimizer(Optax(name), 0.05, clip_norm=1.0, groups=(ParameterGroup("head/.*", 0.5),))
    found, _ = trained(optimizer.build(SCHEDULE, RUN), params, gradients)
    factors = {path: 0.5 if path.startswith("head/") else 1.0 for path in parameters.flatten(params)}
    kernels = parameters.unflatten({path: path.endswith("/kernel") for path in factors})
    chain = optax.chain(
        optax.clip_by_global_norm(1.0),
        of_optax(name)(),
        optax.stateless(lambda updates, _: jax.tree.map(jnp.multiply, updates, parameters.unflatten(factors))),
        optax.add_decayed_weights(0.05 / 0.1, kernels),
        optax.scale_by_learning_rate(optax.warmup_cosine_decay_schedule(0.0, 0.1, 1, 6)),
    )
    expected, _ = trained(chain, params, gradients)
    assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert not np.allclose(found["tower"]["patches"]["kernel"], params["tower"]["patches"]["kernel"])


def test_lion_is_optax_lion_with_its_decay_times_the_rate():
    params, gradients = params_and_gradients()
    optimizer = Optimizer(Optax("scale_by_lion", ("b1=0.95", "b2=0.98", "mu_dtype=bfloat16")), 0.01, clip_norm=None)
    kernels = parameters.unflatten({path: path.endswith("/kernel") for path in parameters.flatten(params)})
    lion = optax.lion(optax.warmup_cosine_decay_schedule(0.0, 0.1, 1, 6), 0.95, 0.98, jnp.bfloat16, 0.1, kernels)
    found, expected = (trained(one, params, gradients)[0] for one in (optimizer.build(SCHEDULE, RUN), lion))
    assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_muon_updates_each_block_as_optax_muon_does_alone_and_the_rest_by_adam():
    params, gradients = params_and_gradients()
    optimizer = Optimizer(Optax("scale_by_muon", ("consistent_rms=0.2", "beta=0.9")), 0.0, clip_norm=None)
    found, _ = trained(optimizer.build(SCHEDULE, RUN), params, gradients)

    def of_blocks(tree):
        flat = parameters.flatten(tree)
        stack = flat.pop("tower/encoder/blocks/mlp/up/kernel")
        # A bias of a stack has two axes, of which optax would make a matrix.
        flat["tower/encoder/blocks/mlp/up/bias"] = flat["tower/encoder/blocks/mlp/up/bias"].ravel()
        return flat | {f"block {number}": matrix for number, matrix in enumerate(stack)}

    rate = optax.warmup_cosine_decay_schedule(0.0, 0.1, 1, 6)
    muon = optax.contrib.muon(rate, beta=0.9, consistent_rms=0.2)
    expected, _ = trained(muon, of_blocks(params), [of_blocks(gradient) for gradient in gradients])
    assert_close(of_blocks(found), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.devices
@pytest.mark.parametrize("name", ["scale_by_lion", "scale_by_muon", "scale_by_adan"])
def test_eight_devices_train_as_one_with_moments_split_like_parameters(name):
    params, gradients = params_and_gradients()
    mesh, optimizer = MeshConfig(fsdp=2).build(), Optimizer(Optax(name), 0.01).build(SCHEDULE, RUN)
    expected, _ = trained(optimizer, params, gradients)
    shardings = sharding.tree_shardings(params, mesh)
    placed = [jax.device_put(tree, shardings) for tree in (params, *gradients)]
    state = sharding.tree_shardings(jax.eval_shape(optimizer.init, params), mesh)
    split = {
        jax.tree_util.keystr(path, simple=True, separator="/"): "fsdp" in leaf.spec
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
    moments = [path for path in split if path.endswith("mlp/up/kernel")]
    assert moments
    assert all(split[path] for path in moments)
    with jax.set_mesh(mesh):
        found, _ = trained(optimizer, placed[0], placed[1:])
    assert_close(jax.device_get(found), jax.device_get(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["scale_by_lion", "scale_by_muon", "scale_by_amsgrad"])
def test_a_saved_state_goes_on_bit_by_bit(tmp_path, name):
    params, gradients = params_and_gradients()
    optimizer = Optimizer(Optax(name, ("mu_dtype=bfloat16",)), 0.01).build(SCHEDULE, RUN)
    whole, _ = trained(optimizer, params, gradients)
    half, opt_state = trained(optimizer, params, gradients[:2])
    state = dataclasses.replace(initial_state(half, optimizer), opt_state=opt_state)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(state, {"position": 16})
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        restored, _ = checkpoints.restore(initial_state(params, optimizer))
    params, opt_state, update = restored.params, restored.opt_state, jax.jit(optimizer.update)
    for gradient in gradients[2:]:
        updates, opt_state = update(gradient, opt_state, params)
        params = optax.apply_updates(params, updates)
    jax.tree.map(np.testing.assert_array_equal, params, whole)


FLAGS = ("--optimizer.rule", "optax", "--optimizer.rule.name")


def parsed(*flags):
    return parse_config(locate_config(Path("glyph_classifier")), flags)


def test_flags_and_json_hold_a_rule_with_its_arguments(tmp_path):
    config = parsed(*FLAGS, "scale_by_lion", "--optimizer.rule.arguments", "b1=0.95", "mode=smooth")
    assert config.optimizer.rule == Optax("scale_by_lion", ("b1=0.95", "mode=smooth"))
    experiment.save(config, tmp_path / "config.json")
    assert experiment.load(tmp_path / "config.json") == config
    changed = dataclasses.replace(glyph_classifier.get_config(), optimizer=Optimizer(Optax("scale_by_yogi")))
    assert "optimizer.rule.name" in experiment.differences(config, changed)


@pytest.mark.parametrize(
    ("name", "arguments", "line"),
    [
        ("lion", (), "--optimizer.rule.name 'lion' brings its own rate and decay; take scale_by_lion"),
        ("adamw", (), "'adamw' brings its own rate and decay; take the rule AdamW (--optimizer.rule adam_w)"),
        ("sgd", (), "take the rule SGD"),
        ("muon", (), "take scale_by_muon"),
        ("scale_by_factored_rms", (), "is another rule here; take the rule Adafactor"),
        ("scale_by_learning_rate", (), "is the work of --schedule"),
        ("sophia", (), "needs the loss itself, beside its gradient; choose from"),
        ("prodigy", (), "brings a learning rate of its own"),
        ("novograd", (), "looks at whole arrays, which here are stacks of blocks"),
        ("scale_by_lyon", (), "is not in the table of optax's transformations; did you mean scale_by_lion?"),
        ("made_up", (), "is not in the table of optax's transformations; choose from scale_by_acprop"),
        ("scale_by_lion", ("b1=1.5",), "arguments 'b1=1.5': b1 must be at least 0 and less than 1"),
        ("scale_by_lion", ("b1",), "'b1': b1 must be at least 0 and less than 1"),
        ("scale_by_lion", ("learning_rate=1",), "'learning_rate=1' is no argument of scale_by_lion; it takes b1, b2"),
        ("scale_by_lion", ("b1=0.9", "b1=0.8"), "b1 is given twice"),
        ("scale_by_adam", ("eps_root=nan",), "eps_root must be a number of 0 or more"),
        ("scale_by_radam", ("threshold=3",), "threshold must be a number of 4 or more"),
        ("scale_by_adam", ("mu_dtype=int8",), "mu_dtype must be float32|bfloat16"),
        ("scale_by_muon", ("ns_steps=2.5",), "ns_steps must be a whole number from 1 to 100"),
        ("scale_by_sign", ("b1=0.9",), "'b1=0.9' is no argument of scale_by_sign; it takes none"),
    ],
)
def test_what_is_no_rule_is_one_line_with_the_one_to_take(name, arguments, line):
    flags = ("--optimizer.rule.arguments", *arguments) if arguments else ()
    with pytest.raises(UserError) as error:
        parsed(*FLAGS, name, *flags)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", [name for name, arguments in TABLE.items() if "eps" in arguments])
def test_what_would_make_nan_of_no_gradient_is_refused(name):
    with pytest.raises(UserError, match="eps must be a number above 0"):
        Optax(name, ("eps=0",))
    params, _ = params_and_gradients(1)
    found, _ = trained(Optimizer(Optax(name)).build(SCHEDULE, RUN), params, [jax.tree.map(jnp.zeros_like, params)] * 2)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


def test_a_rule_without_a_name_is_one_line():
    with pytest.raises(UserError, match=r"--optimizer.rule.name"):
        parsed("--optimizer.rule", "optax")
