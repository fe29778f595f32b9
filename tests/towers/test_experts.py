"""Mixtures of experts: a plain loop, ensembles, devices, and the costs that the papers print."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het import parameters, sharding
from lit_het.errors import UserError
from lit_het.sharding import MeshConfig
from lit_het.tasks.classification import ClassificationConfig
from lit_het.towers import routing
from lit_het.towers.bert import BertConfig
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.text import TextConfig
from lit_het.towers.vit import ViTConfig
from tests.towers import mixtures
from tests.towers.mixtures import expert, mixture, selected
from tests.towers.models import drawn, run, shapes, with_encoder

RANDOM = np.random.default_rng(0)
EXPERTS = ExpertsConfig(num_experts=4, num_selected=2, blocks=(0,), tokens_per_group=4)
ENCODER = dataclasses.replace(mixtures.ENCODER, experts=EXPERTS)
TOWER = ViTConfig(image_size=8, patch_size=4, encoder=ENCODER, pooling="mean")
IMAGES = RANDOM.integers(0, 256, (8, 8, 8, 3), np.uint8)


@pytest.fixture(scope="module")
def params():
    """Returns the parameters that all forms of the same experts share."""
    return drawn(shapes(TOWER))


def with_experts(**changes):
    return with_encoder(TOWER, experts=dataclasses.replace(EXPERTS, **changes))


@pytest.mark.parametrize("num_members", [1, 2])
@pytest.mark.parametrize("factor", [0.5, 8.0])
def test_a_mixture_equals_a_loop_over_tokens(num_members, factor):
    n, images, own = 4, 2, 4 // num_members
    config = dataclasses.replace(
        EXPERTS, num_members=num_members, eval_capacity_factor=factor, tokens_per_group=n * images * num_members
    )
    tokens = RANDOM.normal(size=(images * num_members, n, 8))
    ours, figures, params = mixture(config, tokens)
    slots = routing.capacity(n * images, 2, own, factor)
    expected, dropped = np.zeros_like(tokens), 0
    for member in range(num_members):
        subset, taken = range(member * own, (member + 1) * own), np.zeros(4, int)
        for choice in range(2):  # all first choices before any second one
            for row in range(member, images * num_members, num_members):
                for place, token in enumerate(tokens[row]):
                    number, gate = selected(params, subset, token, 2)[choice]
                    taken[number] += 1
                    if taken[number] > slots:
                        dropped += 1
                    else:
                        expected[row, place] += gate * expert(params, number, token)
    np.testing.assert_allclose(ours, expected, atol=1e-5)
    np.testing.assert_allclose(figures.dropped, dropped / (2 * n * images * num_members), atol=1e-6)
    assert (dropped > 0) == (factor < 1)


def test_members_of_an_ensemble_use_the_parameters_of_a_single_model():
    assert shapes(TOWER) == shapes(with_experts(num_members=2, num_selected=1))


def test_members_can_be_averaged_concatenated_or_separate(params):
    ensemble = with_experts(num_members=2, num_selected=1)
    apart, mean, joined = (
        np.asarray(run(dataclasses.replace(ensemble, members=members), params, IMAGES).embedding)
        for members in ("apart", "mean", "concatenated")
    )
    assert apart.shape == (16, 8)
    np.testing.assert_allclose(mean, apart.reshape(8, 2, 8).mean(axis=1), atol=1e-6)
    np.testing.assert_array_equal(joined, apart.reshape(8, 16))
    assert dataclasses.replace(ensemble, members="concatenated").embedding_size == 16
    assert np.abs(apart[::2] - apart[1::2]).max() > 1e-3  # each member has experts of its own


@pytest.mark.parametrize("batch_size", [3, 5])
def test_a_tower_runs_at_any_batch_size(batch_size, params):
    tower = with_experts(tokens_per_group=8)
    whole = run(tower, params, IMAGES).embedding[:batch_size]
    np.testing.assert_allclose(run(tower, params, IMAGES[:batch_size]).embedding, whole, atol=1e-5)


def test_a_batch_that_groups_do_not_divide_is_padded():
    tokens = RANDOM.normal(size=(7, 2, 8))
    config = dataclasses.replace(EXPERTS, tokens_per_group=6)  # three images: groups of 3, 3 and 1
    ours, figures, _ = mixture(config, tokens)
    outputs, of_groups, _ = zip(*(mixture(config, tokens[start : start + 3]) for start in (0, 3, 6)), strict=True)
    np.testing.assert_allclose(ours, np.concatenate(outputs), atol=1e-6)
    expected = np.mean([figures.importance_loss for figures in of_groups])
    np.testing.assert_allclose(figures.importance_loss, expected, rtol=1e-5)


def test_experts_of_a_text_tower_never_see_padding():
    experts = dataclasses.replace(EXPERTS, tokens_per_group=12, eval_capacity_factor=0.5)  # slots are scarce
    encoder = dataclasses.replace(ENCODER, experts=experts, norm_placement="after")
    config = BertConfig(vocabulary_size=7, length=6, padding_id=0, encoder=encoder, projection_size=None)
    params = drawn(shapes(config))
    text = np.array([[3, 4, 0, 0, 0, 0], [3, 5, 6, 2, 0, 0], [3, 1, 2, 0, 0, 0]], np.int32)
    changed = params["tokens"]["embedding"].copy()
    changed[0] = np.arange(8)
    before, after = run(config, params, text), run(config, {**params, "tokens": {"embedding": changed}}, text)
    np.testing.assert_allclose(after.embedding, before.embedding, atol=1e-6)
    for name, value in before.metrics.items():
        np.testing.assert_allclose(after.metrics[name], value, rtol=1e-5, err_msg=name)


def test_training_draws_noise_and_has_auxiliary_losses_where_evaluation_has_neither(params):
    first, same, other = (run(TOWER, params, IMAGES, jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.embedding, same.embedding)
    assert np.abs(np.asarray(first.embedding) - np.asarray(other.embedding)).max() > 0
    figures = first.metrics
    expected = 0.01 * (float(figures["importance_loss"]) + float(figures["load_loss"])) / 2
    np.testing.assert_allclose(first.auxiliary_losses["experts"], expected, rtol=1e-6)
    assert run(TOWER, params, IMAGES).auxiliary_losses == {}


@pytest.mark.parametrize("dispatch", ["einsum", pytest.param("ragged", marks=pytest.mark.slow)])
def test_expert_dropout_acts_in_training_only(dispatch, params):
    dropping, keeping = (with_experts(dropout_rate=rate, dispatch=dispatch) for rate in (0.5, 0.0))
    key = jax.random.key(0)
    ours, plain = (np.asarray(run(tower, params, IMAGES, key).embedding) for tower in (dropping, keeping))
    assert np.abs(ours - plain).max() > 1e-3
    np.testing.assert_array_equal(*(run(tower, params, IMAGES).embedding for tower in (dropping, keeping)))


@pytest.mark.slow
def test_unrolled_and_recomputed_blocks_give_the_same_outputs():
    plain = with_encoder(TOWER, depth=5, experts=dataclasses.replace(EXPERTS, num_blocks=2, blocks=None))
    params, key = drawn(shapes(plain)), jax.random.key(3)
    towers = with_encoder(plain, unrolled=True, remat="full"), plain
    embeddings = (run(tower, params, IMAGES, key).embedding for tower in towers)
    np.testing.assert_allclose(*embeddings, atol=1e-6)


@functools.partial(jax.value_and_grad, argnums=1)
def loss_and_gradient(tower, params, images):
    output = run(tower, params, images, jax.random.key(0))
    return jnp.sum(output.embedding**2) + sum(output.auxiliary_losses.values())


@pytest.mark.devices
@pytest.mark.slow
@pytest.mark.parametrize(
    ("dispatch", "mesh"),
    [("einsum", MeshConfig(data=2, fsdp=2, expert=2)), ("ragged", MeshConfig(data=2, expert=4))],
)
def test_eight_devices_with_split_experts_equal_one(dispatch, mesh, capfd, params):
    tower = with_experts(num_members=2, num_selected=1, dispatch=dispatch, tokens_per_group=1)
    value, gradient = jax.jit(loss_and_gradient, static_argnums=0)(tower, params, IMAGES)
    devices, mesh = mesh.expert, mesh.build()
    with jax.set_mesh(mesh):
        shardings = sharding.tree_shardings(params, mesh), sharding.batch_sharding(mesh)
        step = jax.jit(functools.partial(loss_and_gradient, tower), in_shardings=shardings)
        on_devices = jax.device_put((params, IMAGES), shardings)
        compiled = step.lower(*on_devices).compile()
        sharded_value, sharded_gradient = compiled(*on_devices)
    up = parameters.flatten(on_devices[0])["encoder/expert_blocks/mixture/experts/up/kernel"]
    assert up.sharding.shard_shape(up.shape)[1] == 4 / devices  # of four experts
    # What the compiler says where it brings activations to sharded kernels and not kernels to activations.
    assert "rematerialization" not in capfd.readouterr().err
    if dispatch == "einsum":
        assert "all-to-all" in str(compiled.as_text())
    np.testing.assert_allclose(sharded_value, value, rtol=1e-5)
    for path, theirs in parameters.flatten(gradient).items():
        ours = parameters.flatten(sharded_gradient)[path]
        np.testing.assert_allclose(ours, theirs, atol=1e-5 * float(np.abs(theirs).max() + 1), err_msg=path)


@pytest.mark.parametrize(
    "changes", [{"noise_scale": 0.0}, pytest.param({"num_members": 4, "num_selected": 1}, marks=pytest.mark.slow)]
)
def test_gradients_are_finite_without_noise_and_with_one_expert_a_member(changes, params):
    found = jax.jit(loss_and_gradient, static_argnums=0)(with_experts(**changes), params, IMAGES)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found))


def test_an_expert_has_no_more_slots_than_there_are_tokens():
    tokens = RANDOM.normal(size=(2, 4, 8))
    _, figures, _ = mixture(dataclasses.replace(EXPERTS, eval_capacity_factor=1e6), tokens)  # terabytes otherwise
    assert figures.dropped == 0


def test_a_classifier_on_averaged_members_is_refused():
    ensemble = with_experts(num_members=2, num_selected=1)
    with pytest.raises(UserError, match=r"set image_tower.members to 'apart'"):
        ClassificationConfig(image_tower=ensemble)
    ClassificationConfig(image_tower=dataclasses.replace(ensemble, members="apart"))


def test_a_text_tower_may_have_experts_but_no_ensemble():
    config = TextConfig(vocabulary_size=11, length=4, embedding_size=8, encoder=ENCODER)
    output = run(config, drawn(shapes(config)), np.ones((2, 4), np.int32), jax.random.key(0))
    assert output.auxiliary_losses["experts"] > 0
    with pytest.raises(UserError, match="num_members = 2 must be 1"):
        TextConfig(encoder=with_experts(num_members=2, num_selected=1).encoder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_members": 3}, "num_experts = 4 cannot be split in 3 members"),
        ({"num_members": 4, "num_selected": 2}, "num_selected = 2 is more than a member's 1 experts"),
        ({"eval_capacity_factor": 0.0}, "eval_capacity_factor = 0.0 must be more than 0"),
        ({"num_blocks": 1, "blocks": None}, "num_blocks = 1, but 1 blocks have 0 odd ones"),
        ({"dropout_rate": 1.0}, "dropout_rate = 1.0 must be below 1"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        with_experts(**changes)
