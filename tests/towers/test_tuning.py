"""Towers that are trained in part: low-rank changes of dense layers, and blocks that are locked."""

import dataclasses
import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.objectives.teacher import TeacherConfig
from lit_het.planning.costs import product_flops, tree_bytes
from lit_het.random import keys_at
from lit_het.tasks.classification import ClassificationConfig
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.tasks.temperature_gradient_config import TemperatureGradient
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.resnet import ResNetConfig
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.tuning import LoRALinear, divided, with_changes
from lit_het.towers.tuning_config import LoRA, Tuning
from lit_het.towers.vit import ViTConfig
from lit_het.training.durations import Duration, RunLength
from lit_het.training.optimizers import AdamW, Optimizer
from lit_het.training.schedules import Schedule
from lit_het.training.step import initial_state, of_trainable
from tests.towers.models import apply, shapes
from tests.towers.models import drawn as drawn_on_host
from tests.training import tiny_run

ENCODER = EncoderConfig(width=16, depth=4, mlp_width=24, num_heads=2)
VIT = ViTConfig(8, 4, ENCODER, pooling="attention", num_registers=1)
IMAGES = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), dtype=np.uint8)
X = np.random.default_rng(1).normal(size=(7, 5)).astype(np.float32)
EXPERTS = ExpertsConfig(num_experts=2, num_selected=1)


def drawn(tree, **options):
    return jax.tree.map(jnp.asarray, drawn_on_host(tree, **options))


def tuned(tower, **fields):
    """Returns what a tower with a tuning computes, made of the plain one, its parameters and the tuning."""
    tuning = Tuning(**fields)
    module = nnx.eval_shape(lambda: built(tower, tuning))
    graph, state = nnx.split(module)
    return lambda params, *inputs: nnx.merge(graph, params)(*inputs), nnx.to_pure_dict(state), tuning


def built(tower, tuning):
    module = tower.build(nnx.Rngs(0))
    tuning.apply(module, nnx.Rngs(1))
    return module


def layer(rank=2, *, dora, seed=0):
    """Returns a dense layer of 5 inputs and 4 outputs with a change, whose parameters are all random."""
    plain = nnx.Linear(5, 4, rngs=nnx.Rngs(seed))
    changed = LoRALinear(plain, LoRA(rank, scale=0.7, dora=dora), nnx.Rngs(seed + 1))
    graph, state = nnx.split(changed)
    return graph, drawn_on_host(nnx.to_pure_dict(state), seed=seed)


def by_numpy(params, x, dora):
    kernel = params["kernel"] + 0.7 * params["lora"]["down"]["kernel"] @ params["lora"]["up"]["kernel"]
    if dora:
        norm = np.sqrt((kernel**2).sum(axis=0))
        kernel = kernel * np.divide(params["lora"]["magnitude"], norm, out=np.ones_like(norm), where=norm > 0)
    return x @ kernel + params["bias"]


@pytest.mark.parametrize("dora", [False, True])
def test_a_changed_layer_is_the_product_with_the_changed_kernel(dora):
    graph, params = layer(dora=dora)
    found = nnx.merge(graph, jax.tree.map(jnp.asarray, params))(jnp.asarray(X))
    np.testing.assert_allclose(found, by_numpy(params, X, dora), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dora", [False, True])
def test_gradients_are_those_of_the_formula_where_the_norm_of_dora_is_a_constant(dora):
    graph, params = layer(dora=dora, seed=3)
    target = np.random.default_rng(2).normal(size=(7, 4)).astype(np.float32)
    found = jax.grad(lambda params: jnp.sum(nnx.merge(graph, params)(jnp.asarray(X)) * target))(params)
    # By hand: with G = xᵀ t, the gradients of B and A of W + s A B are s Aᵀ G F and s G F Bᵀ, F = diag(m / norm).
    down, up = params["lora"]["down"]["kernel"], params["lora"]["up"]["kernel"]
    kernel = params["kernel"] + 0.7 * down @ up
    norm = np.sqrt((kernel**2).sum(axis=0))
    factor = params["lora"]["magnitude"] / norm if dora else np.ones(4)
    product = X.T @ target
    np.testing.assert_allclose(found["lora"]["up"]["kernel"], 0.7 * down.T @ product * factor, rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(found["lora"]["down"]["kernel"], 0.7 * product * factor @ up.T, rtol=2e-5, atol=1e-5)
    if dora:
        of_norms = (product * kernel).sum(axis=0) / norm
        np.testing.assert_allclose(found["lora"]["magnitude"], of_norms, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("dora", [False, True])
def test_a_fresh_change_changes_nothing(dora):
    plain, x = nnx.Linear(5, 4, rngs=nnx.Rngs(0)), jnp.asarray(X)
    np.testing.assert_allclose(LoRALinear(plain, LoRA(dora=dora), nnx.Rngs(1))(x), plain(x), rtol=1e-5, atol=1e-6)


def test_a_column_of_zeros_stays_so_at_first_and_has_a_finite_gradient():
    plain, config = nnx.Linear(5, 4, rngs=nnx.Rngs(0)), LoRA(2, scale=0.7, dora=True)
    plain.kernel[...] = plain.kernel[...].at[:, 1].set(0)
    graph, state = nnx.split(LoRALinear(plain, config, nnx.Rngs(1)))
    params = nnx.to_pure_dict(state)
    on_host, x, target = (
        jax.tree.map(np.asarray, params),
        jnp.asarray(X),
        np.random.default_rng(2).normal(size=(7, 4)).astype(np.float32),
    )
    np.testing.assert_allclose(nnx.merge(graph, params)(x), by_numpy(on_host, X, dora=True), rtol=1e-5, atol=1e-6)
    flat = parameters.flatten({"layer": params})
    np.testing.assert_allclose(with_changes(flat, config)["layer/kernel"], plain.kernel[...], rtol=1e-6)
    found = jax.grad(lambda params: jnp.sum(nnx.merge(graph, params)(x) * target))(params)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    # The change can make it another column: s Aᵀ xᵀ t.
    expected = 0.7 * on_host["lora"]["down"]["kernel"].T @ X.T @ target
    np.testing.assert_allclose(found["lora"]["up"]["kernel"][:, 1], expected[:, 1], rtol=2e-5, atol=1e-5)


def test_the_first_matrix_is_uniform_with_the_variance_of_loras_code():
    plain = nnx.Linear(300, 4, rngs=nnx.Rngs(0))
    down = LoRALinear(plain, LoRA(rank=200), nnx.Rngs(1)).lora.down.kernel[...]
    assert np.abs(down).max() == pytest.approx(300**-0.5, rel=1e-3)
    assert np.var(down) == pytest.approx(1 / 900, rel=0.02)


TUNINGS = {
    "low rank": {"lora": LoRA(rank=2, pattern="encoder/.*")},
    "low rank with norms": {"lora": LoRA(rank=2, dora=True, pattern="encoder/blocks/attention/(query|value)")},
    "last blocks": {"last_blocks": 1},
    "no block": {"last_blocks": 0},
    "every block": {"last_blocks": 4},
    "both": {"last_blocks": 3, "lora": LoRA(rank=2, pattern="encoder/.*")},
}


@pytest.mark.parametrize("fields", TUNINGS.values(), ids=TUNINGS)
@pytest.mark.parametrize("experts", [None, EXPERTS], ids=["plain", "experts"])
def test_a_tuned_tower_computes_what_the_plain_tower_does_with_its_parameters(fields, experts):
    tower = dataclasses.replace(VIT, encoder=dataclasses.replace(ENCODER, experts=experts))
    run, like, tuning = tuned(tower, **fields)
    params = drawn(like, scale=0.2)
    plain = tuning.plain(params)
    assert jax.tree.map(np.shape, plain) == jax.tree.map(lambda leaf: leaf.shape, shapes(tower))
    found, expected = (jax.jit(f)(p, IMAGES) for f, p in ((run, params), (functools.partial(apply, tower), plain)))
    np.testing.assert_allclose(found.embedding, expected.embedding, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fields", TUNINGS.values(), ids=TUNINGS)
def test_a_tower_starts_tuned_from_the_parameters_of_a_plain_one(fields):
    run, like, tuning = tuned(VIT, **fields)
    plain = drawn(shapes(VIT), scale=0.2)
    found = divided(parameters.flatten(plain), parameters.flatten(like))
    assert {path: array.shape for path, array in found.items()} == {
        path: leaf.shape
        for path, leaf in parameters.flatten(like).items()
        if "/lora/down" not in path and "/lora/up" not in path
    }
    lora = {
        path: jnp.zeros(leaf.shape) if "/up/" in path else jnp.ones(leaf.shape)
        for path, leaf in parameters.flatten(like).items()
        if path not in found
    }
    params = parameters.unflatten(found | lora)
    expected = jax.jit(functools.partial(apply, VIT))(plain, IMAGES).embedding
    np.testing.assert_allclose(jax.jit(run)(params, IMAGES).embedding, expected, rtol=1e-4, atol=1e-5)
    for path, array in parameters.flatten(tuning.plain(params)).items():
        np.testing.assert_allclose(array, parameters.flatten(plain)[path], rtol=1e-5, err_msg=path)


def trained(tower: Any = VIT, **fields):
    """Returns the paths of the parameters that a tuning trains."""
    _, like, tuning = tuned(tower, **fields)
    patterns = tuning.locked(tower.first_parameters)
    return {path for path in parameters.flatten(like) if not any(re.fullmatch(pattern, path) for pattern in patterns)}


def test_each_field_trains_the_parameters_that_it_names():
    everything = set(parameters.flatten(shapes(VIT)))
    assert trained() == everything
    behind = {path for path in everything if path.startswith(("encoder/norm/", "pooling/"))}
    assert trained(last_blocks=0) == behind
    assert trained(last_blocks=1) == behind | {path for path in everything if path.startswith("encoder/blocks/")}
    assert trained(embeddings=True) == {"patches/kernel", "patches/bias", "positions", "registers"}
    norms = {path for path in everything if "norm/" in path}
    assert {"encoder/norm/scale", "encoder/blocks/mlp_norm/bias", "pooling/norm/scale"} < norms
    assert trained(norms=True) == norms
    assert trained(biases=True) == {path for path in everything if path.endswith("bias")}
    assert trained(norms=True, embeddings=True) == trained(norms=True) | trained(embeddings=True)
    lora = trained(lora=LoRA(pattern="encoder/.*/query"))
    assert lora == {f"encoder/blocks/attention/query/lora/{name}/kernel" for name in ("down", "up")}
    text = TextConfig(20, 4, 16, ENCODER)
    assert trained(text, embeddings=True) == {"tokens/embedding", "positions"}


def test_the_experts_keep_their_kernels():
    tower = dataclasses.replace(VIT, encoder=dataclasses.replace(ENCODER, experts=EXPERTS))
    assert not any("mixture" in path for path in trained(tower, lora=LoRA(pattern=".*")))


def task(tuning, text_tuning=None, locked=(), **fields):
    text = TextConfig(20, 4, 16, ENCODER, tuning=text_tuning)
    return ContrastiveConfig(dataclasses.replace(VIT, tuning=tuning, **fields), text, locked=locked)


def test_a_bare_task_is_that_of_the_model_alone():
    trained = task(Tuning(lora=LoRA(2)), Tuning(last_blocks=1), ("head/.*",), weights="a.npz")
    beside = {"teacher": TeacherConfig(), "temperature_gradient": TemperatureGradient(held_out=0.5)}
    assert dataclasses.replace(trained, **beside).bare() == task(None)
    classifier = ClassificationConfig(ResNetConfig(50), num_classes=3, mixup=0.2)
    assert classifier.bare() == dataclasses.replace(classifier, mixup=0.0)


def cost(config):
    """Returns the operations of a gradient, and the bytes of what is trained and of the state of the optimizer."""
    built = config.build()
    optimizer = Optimizer(AdamW()).build(Schedule(1e-3, Duration(1)), RunLength(4, 8), built.layers_above)
    locked, trainable = parameters.partition(built.shapes, built.locked)
    state = jax.eval_shape(lambda params: initial_state(params, optimizer), trainable)
    batch = jax.tree.map(jnp.asarray, next(tiny_run.host_batches(1)))
    gradient = of_trainable(built.loss)
    keys = keys_at(0, 0)
    flops = product_flops(lambda state, locked: gradient(state, locked, batch, keys), state, locked)
    return flops, tree_bytes(state)


def test_locked_blocks_have_no_gradient_and_no_state_of_the_optimizer():
    """Forward 1, backward 1 by the parameters and 1 by the inputs, of blocks alone of all blocks."""
    nothing = cost(task(None, locked=("image_tower/.*",)))
    whole, last, low_rank = (cost(task(tuning)) for tuning in (None, Tuning(last_blocks=1), Tuning(lora=LoRA(rank=1))))
    flops = [counted[0] - nothing[0] for counted in (whole, last, low_rank)]
    assert flops[1] < 0.45 * flops[0]
    assert flops[2] < 0.75 * flops[0]
    blocks = 3 * 4 * parameters.count(shapes(VIT)["encoder"]["blocks"])
    assert whole[1] - last[1] > 3 / 4 * blocks
    assert low_rank[1] - nothing[1] < 0.2 * blocks


def test_layers_count_from_the_top_of_a_divided_tower():
    built = task(Tuning(last_blocks=3)).build()
    found = parameters.flatten(built.layers_above(built.shapes))
    assert found["image_tower/encoder/lower_blocks/mlp/up/bias"].ravel().tolist() == [4]
    assert found["image_tower/encoder/blocks/mlp/up/bias"].ravel().tolist() == [3, 2, 1]
    assert found["image_tower/patches/kernel"] == 5


def test_a_tower_that_starts_later_stays_until_then_and_leaves_the_others_gradients_alone():
    begins = task(Tuning(start=Duration(3)))
    built, never = begins.build(), task(None, locked=("image_tower/.*",)).build()
    assert built.late_parts == {"image_tower": 3}
    params = drawn(built.shapes, scale=0.1)
    batch = jax.tree.map(jnp.asarray, next(tiny_run.host_batches(1)))

    def gradient(task, step):
        locked, trainable = parameters.partition(params, task.locked)
        state = dataclasses.replace(
            initial_state(trainable, Optimizer().build(Schedule(1e-3, Duration(1)), RunLength(4, 8)))
        )
        state = dataclasses.replace(state, step=jnp.int32(step))
        return jax.jit(of_trainable(task.loss))(state, locked, batch, keys_at(0, 0))[1]

    before, after = gradient(built, 2), gradient(built, 3)
    assert not any(jnp.any(leaf) for leaf in jax.tree.leaves(before["image_tower"]))
    assert any(jnp.any(leaf) for leaf in jax.tree.leaves(after["image_tower"]))
    for path, array in parameters.flatten(gradient(never, 2)).items():
        np.testing.assert_allclose(parameters.flatten(before)[path], array, rtol=1e-5, atol=1e-7, err_msg=path)


REFUSED = {
    "a pattern of no layer": (
        lambda: task(Tuning(lora=LoRA(pattern="blocks/.*"))).build(),
        "tuning.lora.pattern = 'blocks/.*' matches no dense layer of the tower: it has encoder/blocks/attention/key",
    ),
    "a rank that no kernel has": (
        lambda: task(Tuning(lora=LoRA(rank=17))).build(),
        "tuning.lora.rank = 17 is more than the 16 of the kernel of encoder/blocks/attention/query; lower it",
    ),
    "too many blocks": (
        lambda: task(Tuning(last_blocks=5)).build(),
        "tuning.last_blocks = 5 is more than the 4 blocks",
    ),
    "locked elsewhere": (
        lambda: task(Tuning(lora=LoRA()), locked=("image_tower/.*",)).build(),
        "task.locked has 'image_tower/.*', which locks image_tower/encoder/blocks/attention/query/lora/down/kernel, "
        "but task.image_tower.tuning trains it",
    ),
    "members": (
        lambda: dataclasses.replace(task(None, Tuning(norms=True), ("image_tower/.*",)), text_members=2),
        "change task.text_tower.tuning",
    ),
    "rank": (lambda: LoRA(rank=0), "rank"),
    "blocks": (lambda: Tuning(last_blocks=-1), "last_blocks"),
    "scale": (lambda: LoRA(scale=0.0), "scale"),
    "pattern": (lambda: LoRA(pattern="("), "cannot be used as a pattern of parameters"),
}


@pytest.mark.parametrize(("make", "problem"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_trained_is_refused(make, problem):
    with pytest.raises(UserError, match=re.escape(problem)):
        make()


def test_a_resnet_has_no_tuning():
    assert "tuning" not in {field.name for field in dataclasses.fields(ResNetConfig)}
