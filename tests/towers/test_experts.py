"""Mixtures of experts: a plain loop, ensembles, devices, and the costs that the papers print."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lit_het import parameters, sharding
from lit_het.errors import UserError
from lit_het.sharding import MeshConfig
from lit_het.tasks.classification import ClassificationConfig
from lit_het.towers import routing
from lit_het.towers.bert import BertConfig
from lit_het.towers.experts import ExpertKeys
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.text import TextConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig

RANDOM = np.random.default_rng(0)
EXPERTS = ExpertsConfig(num_experts=4, num_selected=2, num_blocks=1, tokens_per_group=4)
ENCODER = EncoderConfig(width=8, depth=4, mlp_width=12, num_heads=2, experts=EXPERTS)
TOWER = ViTConfig(image_size=8, patch_size=4, encoder=ENCODER, pooling="mean")
IMAGES = jnp.asarray(RANDOM.integers(0, 256, (8, 8, 8, 3)), jnp.uint8)


def with_experts(**changes):
    experts = dataclasses.replace(EXPERTS, **changes)
    return dataclasses.replace(TOWER, encoder=dataclasses.replace(ENCODER, experts=experts))


@functools.cache
def initial(tower):
    return jax.jit(lambda: nnx.to_pure_dict(nnx.state(tower.build(nnx.Rngs(0)))))()


@functools.partial(jax.jit, static_argnums=0)
def run(tower, params, images=IMAGES, key=None):
    graph = nnx.graphdef(nnx.eval_shape(lambda: tower.build(nnx.Rngs(0))))
    return nnx.merge(graph, params)(images, key)


def mixture(config, tokens, training=False):
    """Returns what one block's experts make of tokens ``[b n d]``, and their parameters."""
    encoder = dataclasses.replace(ENCODER, experts=config)
    block = nnx.eval_shape(lambda: ViTConfig(8, 4, encoder).build(nnx.Rngs(0))).encoder.expert_blocks
    graph = nnx.graphdef(block.mixture)
    params = jax.tree.map(
        lambda x: 0.5 * jnp.asarray(RANDOM.normal(size=x.shape[1:]), x.dtype), nnx.state(block.mixture)
    )
    flat = jnp.asarray(tokens.reshape(-1, tokens.shape[-1]), jnp.float32)
    keys = ExpertKeys(*jax.random.split(jax.random.key(0))) if training else ExpertKeys()
    apply = jax.jit(lambda params, x: nnx.merge(graph, params)(x, len(tokens), keys))
    output, figures = apply(params, flat)
    return output.reshape(tokens.shape), figures, nnx.to_pure_dict(params)


def expert_in_a_loop(params, number, x):
    up, down = params["experts"]["up"], params["experts"]["down"]
    hidden = x @ np.asarray(up["kernel"][number]) + np.asarray(up["bias"][number])
    hidden = np.asarray(jax.nn.gelu(jnp.asarray(hidden), approximate=True))
    return hidden @ np.asarray(down["kernel"][number]) + np.asarray(down["bias"][number])


@pytest.mark.parametrize("num_members", [1, 2])
@pytest.mark.parametrize("factor", [0.5, 8.0])
def test_a_mixture_equals_a_loop_over_tokens(num_members, factor):
    config = dataclasses.replace(EXPERTS, num_members=num_members, eval_capacity_factor=factor, num_selected=2)
    n, images = 4, 2
    tokens = RANDOM.normal(size=(images * num_members, n, 8)).astype(np.float32)
    ours, figures, params = mixture(dataclasses.replace(config, tokens_per_group=n * images * num_members), tokens)
    own = 4 // num_members
    slots = routing.capacity(n * images, 2, own, factor)
    expected, dropped = np.zeros_like(tokens), 0
    for member in range(num_members):
        rows = [(image, token) for image in range(images) for token in range(n)]
        kernel = np.asarray(params["router"]["kernel"])[:, member * own : (member + 1) * own]
        taken = np.zeros(own, int)
        for choice in range(2):  # all first choices before any second one
            for image, token in rows:
                x = tokens[image * num_members + member, token]
                gates = np.exp(x @ kernel) / np.exp(x @ kernel).sum()
                expert = np.argsort(-gates, kind="stable")[choice]
                taken[expert] += 1
                if taken[expert] > slots:
                    dropped += 1
                    continue
                output = expert_in_a_loop(params, member * own + expert, x)
                expected[image * num_members + member, token] += gates[expert] * output
    np.testing.assert_allclose(ours, expected, atol=1e-5)
    np.testing.assert_allclose(figures.dropped, dropped / (2 * n * images * num_members), atol=1e-6)
    assert (dropped > 0) == (factor < 1)


def test_members_of_an_ensemble_use_the_parameters_of_a_single_model():
    shapes = jax.tree.map(jnp.shape, initial(TOWER))
    assert shapes == jax.tree.map(jnp.shape, initial(with_experts(num_members=2, num_selected=1)))


def test_members_can_be_averaged_concatenated_or_separate():
    ensemble = with_experts(num_members=2, num_selected=1)
    params = initial(ensemble)
    apart, mean, joined = (
        run(dataclasses.replace(ensemble, members=members), params).embedding
        for members in ("apart", "mean", "concatenated")
    )
    assert apart.shape == (16, 8)
    np.testing.assert_allclose(mean, apart.reshape(8, 2, 8).mean(axis=1), atol=1e-6)
    np.testing.assert_array_equal(joined, apart.reshape(8, 16))
    assert dataclasses.replace(ensemble, members="concatenated").embedding_size == 16
    assert np.abs(apart[::2] - apart[1::2]).max() > 1e-3  # each member has experts of its own


@pytest.mark.parametrize("batch_size", [3, 5])
def test_a_tower_runs_at_any_batch_size(batch_size):
    tower = with_experts(tokens_per_group=8)
    whole = run(tower, initial(tower)).embedding[:batch_size]
    np.testing.assert_allclose(run(tower, initial(tower), IMAGES[:batch_size]).embedding, whole, atol=1e-5)


def test_a_batch_that_groups_do_not_divide_is_padded():
    tokens = RANDOM.normal(size=(7, 2, 8)).astype(np.float32)
    config = dataclasses.replace(EXPERTS, tokens_per_group=6)  # three images: groups of 3, 3 and 1
    state = RANDOM.bit_generator.state
    ours, figures, _ = mixture(config, tokens)
    parts = []
    for start in (0, 3, 6):
        RANDOM.bit_generator.state = state  # the same parameters
        parts.append(mixture(config, tokens[start : start + 3]))
    np.testing.assert_allclose(ours, np.concatenate([part[0] for part in parts]), atol=1e-6)
    expected = np.mean([part[1].importance_loss for part in parts])
    np.testing.assert_allclose(figures.importance_loss, expected, rtol=1e-5)


def test_experts_of_a_text_tower_never_see_padding():
    experts = dataclasses.replace(EXPERTS, tokens_per_group=12, eval_capacity_factor=0.5)  # slots are scarce
    encoder = dataclasses.replace(ENCODER, experts=experts, norm_placement="after")
    config = BertConfig(vocabulary_size=7, length=6, padding_id=0, encoder=encoder, projection_size=None)
    tower = nnx.jit(lambda: config.build(nnx.Rngs(0)))()
    run = nnx.jit(lambda tower, text: tower(text))
    text = jnp.asarray([[3, 4, 0, 0, 0, 0], [3, 5, 6, 2, 0, 0], [3, 1, 2, 0, 0, 0]])
    before = run(tower, text)
    tower.tokens.embedding[...] = tower.tokens.embedding[...].at[0].set(jnp.arange(8.0))
    after = run(tower, text)
    np.testing.assert_allclose(after.embedding, before.embedding, atol=1e-6)
    for name, value in before.metrics.items():
        np.testing.assert_allclose(after.metrics[name], value, rtol=1e-5, err_msg=name)


def test_training_draws_noise_and_has_auxiliary_losses_where_evaluation_has_neither():
    key = jax.random.key(1)
    first, same, other = (run(TOWER, initial(TOWER), key=k) for k in (key, key, jax.random.key(2)))
    np.testing.assert_array_equal(first.embedding, same.embedding)
    assert np.abs(first.embedding - other.embedding).max() > 0
    figures = first.metrics
    expected = 0.01 * (figures["importance_loss"] + figures["load_loss"]) / 2
    np.testing.assert_allclose(first.auxiliary_losses["experts"], expected, rtol=1e-6)
    assert run(TOWER, initial(TOWER)).auxiliary_losses == {}


@pytest.mark.parametrize("dispatch", ["einsum", "ragged"])
def test_expert_dropout_acts_in_training_only(dispatch):
    dropping, keeping = (with_experts(dropout_rate=rate, dispatch=dispatch) for rate in (0.5, 0.0))
    key = jax.random.key(0)
    ours, plain = (run(tower, initial(TOWER), key=key).embedding for tower in (dropping, keeping))
    assert np.abs(ours - plain).max() > 1e-3
    np.testing.assert_array_equal(*(run(tower, initial(TOWER)).embedding for tower in (dropping, keeping)))


@pytest.mark.parametrize("unrolled", [True, False])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_every_form_of_execution_gives_the_same_outputs(unrolled, remat):
    encoder = dataclasses.replace(ENCODER, unrolled=unrolled, remat=remat, depth=5)
    experts = dataclasses.replace(EXPERTS, num_blocks=2)
    tower = dataclasses.replace(TOWER, encoder=dataclasses.replace(encoder, experts=experts))
    plain = dataclasses.replace(TOWER, encoder=dataclasses.replace(ENCODER, depth=5, experts=experts))
    key = jax.random.key(3)
    np.testing.assert_allclose(
        run(tower, initial(plain), key=key).embedding, run(plain, initial(plain), key=key).embedding, atol=1e-6
    )


def loss_and_gradient(tower):
    def loss(params, images):
        output = run(tower, params, images, jax.random.key(0))
        return jnp.sum(output.embedding**2) + sum(output.auxiliary_losses.values())

    return jax.value_and_grad(loss)


@pytest.mark.parametrize(
    ("num_members", "dispatch", "mesh"),
    [
        (1, "einsum", MeshConfig(data=2, expert=4)),
        (2, "einsum", MeshConfig(data=2, fsdp=2, expert=2)),
        (2, "ragged", MeshConfig(data=2, expert=4)),
    ],
)
def test_eight_devices_with_split_experts_equal_one(num_members, dispatch, mesh, capfd):
    tower = with_experts(num_members=num_members, num_selected=1, dispatch=dispatch, tokens_per_group=1)
    params = initial(tower)
    value, gradient = jax.jit(loss_and_gradient(tower))(params, IMAGES)
    devices = mesh.expert
    mesh = mesh.build()
    with jax.set_mesh(mesh):
        shardings = sharding.tree_shardings(params, mesh)
        step = jax.jit(loss_and_gradient(tower), in_shardings=(shardings, sharding.batch_sharding(mesh)))
        on_devices = jax.device_put(params, shardings)
        compiled = step.lower(on_devices, jax.device_put(IMAGES, sharding.batch_sharding(mesh))).compile()
        sharded_value, sharded_gradient = compiled(on_devices, jax.device_put(IMAGES, sharding.batch_sharding(mesh)))
    up = parameters.flatten(on_devices)["encoder/expert_blocks/mixture/experts/up/kernel"]
    assert up.sharding.shard_shape(up.shape)[1] == 4 / devices  # of four experts
    # What the compiler says where it brings activations to sharded kernels and not kernels to activations.
    assert "rematerialization" not in capfd.readouterr().err
    if dispatch == "einsum":
        assert "all-to-all" in str(compiled.as_text())
    np.testing.assert_allclose(sharded_value, value, rtol=1e-5)
    for path, theirs in parameters.flatten(gradient).items():
        ours = parameters.flatten(sharded_gradient)[path]
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * float(np.abs(theirs).max() + 1), err_msg=path)


@pytest.mark.parametrize("changes", [{"noise_scale": 0.0}, {"num_members": 4, "num_selected": 1}])
def test_gradients_are_finite_without_noise_and_with_one_expert_a_member(changes):
    tower = with_experts(**changes)
    value, gradient = jax.jit(loss_and_gradient(tower))(initial(TOWER), IMAGES)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((value, gradient)))


def test_an_expert_has_no_more_slots_than_there_are_tokens():
    tokens = RANDOM.normal(size=(2, 4, 8)).astype(np.float32)
    _, figures, _ = mixture(dataclasses.replace(EXPERTS, eval_capacity_factor=1e6), tokens)  # terabytes otherwise
    assert figures.dropped == 0


def test_a_classifier_on_averaged_members_is_refused():
    ensemble = with_experts(num_members=2, num_selected=1)
    with pytest.raises(UserError, match=r"set image_tower.members to 'apart'"):
        ClassificationConfig(image_tower=ensemble)
    ClassificationConfig(image_tower=dataclasses.replace(ensemble, members="apart"))


def test_a_text_tower_may_have_experts_but_no_ensemble():
    config = TextConfig(vocabulary_size=11, length=4, embedding_size=8, encoder=ENCODER)
    output = config.build(nnx.Rngs(0))(jnp.ones((2, 4), jnp.int32), jax.random.key(0))
    assert output.auxiliary_losses["experts"] > 0
    with pytest.raises(UserError, match="num_members = 2 must be 1"):
        TextConfig(encoder=with_experts(num_members=2, num_selected=1).encoder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_members": 3}, "num_experts = 4 cannot be split in 3 members"),
        ({"num_members": 4, "num_selected": 2}, "num_selected = 2 is more than a member's 1 experts"),
        ({"eval_capacity_factor": 0.0}, "eval_capacity_factor = 0.0 must be more than 0"),
        ({"num_blocks": 3}, "num_blocks = 3, but 4 blocks have 2 odd ones"),
        ({"dropout_rate": 1.0}, "dropout_rate = 1.0 must be below 1"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        with_experts(**changes)
