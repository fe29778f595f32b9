"""Forms of experts that e3 compares with: partitioning, tiling, overlap, several predictions, dropout."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lit_het.errors import UserError
from lit_het.heads.learning_rates import learning_rate_factors
from lit_het.towers.experts import ExpertKeys
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.rank_one import RankOneConfig, RankOneLinear
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig

RANDOM = np.random.default_rng(0)
EXPERTS = ExpertsConfig(num_experts=6, num_selected=2, num_blocks=1, tokens_per_group=16)
ENCODER = EncoderConfig(width=8, depth=4, mlp_width=12, num_heads=2, experts=EXPERTS)
TOWER = ViTConfig(image_size=8, patch_size=4, encoder=ENCODER, pooling="mean", members="apart")
IMAGES = jnp.asarray(RANDOM.integers(0, 256, (4, 8, 8, 3)), jnp.uint8)


def with_experts(**changes):
    encoder = dataclasses.replace(ENCODER, experts=dataclasses.replace(EXPERTS, **changes))
    return dataclasses.replace(TOWER, encoder=encoder)


@functools.cache
def initial(tower=TOWER):
    return jax.jit(lambda: nnx.to_pure_dict(nnx.state(tower.build(nnx.Rngs(0)))))()


@functools.partial(jax.jit, static_argnums=0)
def embed(tower, params, key=None):
    graph = nnx.graphdef(nnx.eval_shape(lambda: tower.build(nnx.Rngs(0))))
    return nnx.merge(graph, params)(IMAGES, key).embedding


def mixture(config, tokens, *, apart=False):
    """Returns what one block's experts make of tokens ``[b n d]``, and their parameters."""
    encoder = dataclasses.replace(ENCODER, experts=config)
    block = nnx.eval_shape(lambda: ViTConfig(8, 4, encoder).build(nnx.Rngs(0))).encoder.expert_blocks
    graph = nnx.graphdef(block.mixture)
    random = np.random.default_rng(1)
    params = jax.tree.map(
        lambda x: 0.5 * jnp.asarray(random.normal(size=x.shape[1:]), x.dtype), nnx.state(block.mixture)
    )
    flat = jnp.asarray(tokens.reshape(-1, tokens.shape[-1]), jnp.float32)
    apply = jax.jit(lambda params, x: nnx.merge(graph, params)(x, len(tokens), ExpertKeys(), apart=apart)[0])
    return np.asarray(apply(params, flat)).reshape(-1, *tokens.shape[1:]), nnx.to_pure_dict(params)


def contributions(params, subset, token, num_selected):
    """Returns g_e MLP_e(token) of the K experts of a subset with the largest gates, in NumPy and float64."""
    kernel = np.asarray(params["router"]["kernel"], np.float64)[:, subset]
    gates = np.exp(token @ kernel) / np.exp(token @ kernel).sum()
    best = np.argsort(-gates, kind="stable")[:num_selected]
    return np.stack([gates[e] * expert(params, subset[e], token) for e in best])


def expert(params, number, token):
    up, down = params["experts"]["up"], params["experts"]["down"]
    hidden = token @ np.asarray(up["kernel"][number], np.float64) + np.asarray(up["bias"][number])
    hidden = np.asarray(jax.nn.gelu(jnp.asarray(hidden), approximate=True))
    return hidden @ np.asarray(down["kernel"][number], np.float64) + np.asarray(down["bias"][number])


SUBSETS = {0: [[0, 1, 2], [3, 4, 5]], 2: [[0, 1, 4, 5], [2, 3, 4, 5]], 6: [[0, 1, 2, 3, 4, 5]] * 2}


@pytest.mark.parametrize("dispatch", ["einsum", "ragged"])
@pytest.mark.parametrize("overlap", [0, 2, 6])
def test_members_select_among_their_own_experts_and_those_of_all(overlap, dispatch):
    config = dataclasses.replace(EXPERTS, num_members=2, overlap=overlap, dispatch=dispatch)
    np.testing.assert_array_equal(config.members, SUBSETS[overlap])
    tokens = RANDOM.normal(size=(6, 4, 8))  # three images, two members
    ours, params = mixture(config, tokens)
    for row in range(6):
        for place in range(4):
            expected = contributions(params, SUBSETS[overlap][row % 2], tokens[row, place], 2).sum(axis=0)
            np.testing.assert_allclose(ours[row, place], expected, atol=1e-5)


@pytest.mark.parametrize("dispatch", ["einsum", "ragged"])
def test_partitioning_alone_sums_the_experts_of_all_members(dispatch):
    tokens = RANDOM.normal(size=(3, 4, 8))
    ours, params = mixture(dataclasses.replace(EXPERTS, num_members=2, tiled=False, dispatch=dispatch), tokens)
    for image in range(3):
        for place in range(4):
            parts = [contributions(params, subset, tokens[image, place], 2).sum(axis=0) for subset in SUBSETS[0]]
            np.testing.assert_allclose(ours[image, place], sum(parts), atol=1e-5)


@pytest.mark.parametrize("dispatch", ["einsum", "ragged"])
def test_multi_pred_keeps_the_contributions_of_a_tokens_experts_apart(dispatch):
    tokens = RANDOM.normal(size=(3, 4, 8))
    ours, params = mixture(dataclasses.replace(EXPERTS, multi_pred=True, dispatch=dispatch), tokens, apart=True)
    by_image = ours.reshape(3, 2, 4, 8)
    for image in range(3):
        for place in range(4):
            expected = contributions(params, list(range(6)), tokens[image, place], 2)
            np.testing.assert_allclose(by_image[image, :, place], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "predictions"),
    [
        ({"num_members": 2}, 2),
        ({"num_members": 2, "tiled": False}, 1),
        ({"num_members": 2, "overlap": 6}, 2),
        ({"multi_pred": True}, 2),
        ({"num_members": 3, "multi_pred": True}, 6),
        ({"dropout_samples": 3, "dropout_rate": 0.5}, 3),
        ({"dropout_samples": 3, "dropout_rate": 0.5, "num_members": 2}, 6),
    ],
)
@pytest.mark.parametrize("blocks", [(3,), (1, 2), (0, 1, 3)])
@pytest.mark.parametrize("remat", ["none", "dots"])
def test_a_tower_has_as_many_embeddings_of_an_image_as_its_form_has_predictions(changes, predictions, blocks, remat):
    tower = with_experts(**changes, blocks=blocks, num_blocks=None)
    tower = dataclasses.replace(tower, encoder=dataclasses.replace(tower.encoder, remat=remat))
    assert tower.num_members == predictions
    embeddings = embed(tower, initial(tower))
    assert embeddings.shape == (4 * predictions, 8)
    joined = embed(tower.all_members(), initial(tower))
    np.testing.assert_array_equal(joined, embeddings.reshape(4, -1))
    own_masks = changes.get("dropout_samples", 1)
    assert len(embed(tower, initial(tower), jax.random.key(0))) == 4 * predictions // own_masks


def test_tiling_alone_gives_equal_predictions_without_the_noise_of_the_router():
    tiling = with_experts(num_members=2, overlap=6, eval_capacity_factor=16.0)
    pairs = np.asarray(embed(tiling, initial())).reshape(4, 2, 8)
    np.testing.assert_allclose(pairs[:, 0], pairs[:, 1], atol=1e-6)
    single = with_experts(eval_capacity_factor=16.0)
    np.testing.assert_allclose(pairs[:, 0], embed(single, initial()), atol=1e-6)
    with_noise = np.asarray(embed(tiling, initial(), jax.random.key(0))).reshape(4, 2, 8)
    assert np.abs(with_noise[:, 0] - with_noise[:, 1]).max() > 1e-4


def test_dropout_samples_differ_from_one_another_and_have_no_other_noise():
    sampled = with_experts(dropout_samples=64, dropout_rate=0.1)
    samples = np.asarray(embed(sampled, initial())).reshape(4, 64, 8)
    assert samples.std(axis=1).min() > 1e-4
    np.testing.assert_array_equal(samples, np.asarray(embed(sampled, initial())).reshape(4, 64, 8))
    # To first order their mean is the prediction without dropout.
    np.testing.assert_allclose(samples.mean(axis=1), embed(TOWER, initial()), atol=0.1)
    never = with_experts(dropout_samples=2, dropout_rate=1e-9)
    np.testing.assert_allclose(embed(never, initial())[::2], embed(TOWER, initial()), atol=1e-6)


def test_forms_of_the_same_experts_share_their_parameters():
    shapes = jax.tree.map(jnp.shape, initial())
    for changes in ({"num_members": 2, "tiled": False}, {"num_members": 2, "overlap": 2}, {"multi_pred": True}):
        assert jax.tree.map(jnp.shape, initial(with_experts(**changes))) == shapes


def test_initial_noise_spreads_the_kernels_of_experts_only():
    noisy = initial(with_experts(initial_noise=3.0))
    plain = initial()
    up, before = (tree["encoder"]["expert_blocks"]["mixture"]["experts"]["up"] for tree in (noisy, plain))
    added = np.asarray(up["kernel"] - before["kernel"])
    assert added.std() == pytest.approx(3.0, rel=0.2)
    np.testing.assert_array_equal(up["bias"], before["bias"])
    np.testing.assert_array_equal(noisy["patches"]["kernel"], plain["patches"]["kernel"])


def test_initial_noise_falls_on_all_kernels_of_experts_with_a_gate():
    def kernels(noise):
        experts = dataclasses.replace(EXPERTS, initial_noise=noise)
        tower = dataclasses.replace(TOWER, encoder=dataclasses.replace(ENCODER, activation="swiglu", experts=experts))
        return initial(tower)["encoder"]["expert_blocks"]["mixture"]["experts"]

    noisy, plain = kernels(3.0), kernels(0.0)
    for layer in ("up", "gate", "down"):
        assert np.std(noisy[layer]["kernel"] - plain[layer]["kernel"]) == pytest.approx(3.0, rel=0.2)


@pytest.mark.parametrize("changes", [{"overlap": 2}, {"tiled": False}, {"multi_pred": True}])
@pytest.mark.parametrize("dispatch", ["einsum", "ragged"])
def test_gradients_reach_every_expert(changes, dispatch):
    tower = with_experts(num_members=2, num_selected=3, dispatch=dispatch, **changes)
    gradient = jax.jit(jax.grad(lambda params: jnp.sum(embed(tower, params, jax.random.key(0)) ** 2)))(initial())
    experts = gradient["encoder"]["expert_blocks"]["mixture"]["experts"]["down"]["bias"]
    assert (np.abs(experts).max(axis=-1) > 0).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_members": 2, "overlap": 3}, "num_experts = 6 with overlap = 3 cannot be split in 2 members"),
        ({"num_members": 2, "overlap": 8}, "num_experts = 6 with overlap = 8 cannot be split in 2 members"),
        ({"overlap": -2}, "overlap = -2 must be at least 0"),
        ({"dropout_samples": 2}, "dropout_samples = 2 needs a dropout_rate above 0"),
        ({"multi_pred": True, "tiled": False}, "multi_pred = True needs tiled = True"),
    ],
)
def test_forms_that_do_not_fit_together_are_refused(changes, message):
    with pytest.raises(UserError, match=message):
        with_experts(**changes)


# ---- BatchEnsemble ----


def rank_one_mlp(params, number, x):
    """Returns what an expert makes of a token by its own kernels U ∘ (r sᵀ), in NumPy and float64 (e3 App. B.2)."""
    for name in ("up", "down"):
        layer = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["rank_one"][name])
        r, s = layer["vectors"]["input"][number], layer["vectors"]["output"][number]
        x = x @ (layer["kernel"] * np.outer(r, s)) + layer["bias"][number]
        x = np.asarray(jax.nn.gelu(jnp.asarray(x), approximate=True)) if name == "up" else x
    return x


BATCH_ENSEMBLE = ExpertsConfig(3, 1, num_members=3, num_blocks=1, tokens_per_group=16, rank_one=RankOneConfig())


def test_members_of_a_batch_ensemble_have_kernels_of_rank_one():
    tokens = RANDOM.normal(size=(6, 4, 8))  # two images, three members
    ours, params = mixture(BATCH_ENSEMBLE, tokens)
    assert "router" not in params
    for row in range(6):
        for place in range(4):
            expected = rank_one_mlp(params, row % 3, tokens[row, place])
            np.testing.assert_allclose(ours[row, place], expected, atol=1e-5)


@pytest.mark.parametrize("num_members", [1, 2])
def test_a_mixture_of_rank_one_experts_sums_those_that_the_router_selects(num_members):
    tokens = RANDOM.normal(size=(6, 4, 8))
    config = dataclasses.replace(EXPERTS, num_members=num_members, rank_one=RankOneConfig())
    ours, params = mixture(config, tokens)
    for row in range(6):
        subset = [[0, 1, 2, 3, 4, 5]] if num_members == 1 else SUBSETS[0]
        for place in range(4):
            token, numbers = tokens[row, place], subset[row % num_members]
            logits = token @ np.asarray(params["router"]["kernel"], np.float64)[:, numbers]
            gates = np.exp(logits) / np.exp(logits).sum()
            best = np.argsort(-gates)[:2]
            expected = sum(gates[e] * rank_one_mlp(params, numbers[e], token) for e in best)
            np.testing.assert_allclose(ours[row, place], expected, atol=1e-5)


def test_a_batch_ensemble_has_vectors_and_biases_beside_the_parameters_of_a_vit():
    def count(tower):
        return sum(np.size(leaf) for leaf in jax.tree.leaves(initial(tower)))

    ensemble = dataclasses.replace(TOWER, encoder=dataclasses.replace(ENCODER, experts=BATCH_ENSEMBLE))
    plain = dataclasses.replace(TOWER, encoder=dataclasses.replace(ENCODER, experts=None))
    # Two layers, 8 to 12 and back: three pairs of vectors, and two biases more than those of a ViT.
    assert count(ensemble) - count(plain) == 3 * 2 * (8 + 12) + 2 * (12 + 8)


def test_vectors_are_signs_or_normal_at_first_and_have_their_learning_rate():
    forms = (RankOneConfig("signs", 2.0), 0.0, 1.0), (RankOneConfig("normal", 2.0), 1.0, 0.5)
    for config, mean, spread in forms:
        layer = RankOneLinear(config, 64, 100, 50, "float32", nnx.Rngs(0))
        drawn = np.asarray(layer.vectors.input[...])
        assert drawn.mean() == pytest.approx(mean, abs=0.05)
        assert drawn.std() == pytest.approx(spread, rel=0.05)
        assert (set(np.unique(drawn)) == {-1.0, 1.0}) == (config.initial == "signs")
        factors = learning_rate_factors(layer)
        assert factors["vectors"] == {"input": 2.0, "output": 2.0}
        assert factors["kernel"] == 1.0
