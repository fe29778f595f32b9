"""Forms of experts that e3 compares with: partitioning, tiling, overlap, several predictions, dropout."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.heads.learning_rates import learning_rate_factors
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.rank_one import RankOneConfig, RankOneLinear
from lit_het.towers.vit import ViTConfig
from tests.towers import mixtures
from tests.towers.mixtures import contributions, mixture
from tests.towers.models import drawn, initial, like_initial, run, shapes, with_encoder
from tests.towers.test_forms import ACTIVATIONS

RANDOM = np.random.default_rng(0)
EXPERTS = ExpertsConfig(num_experts=6, num_selected=2, blocks=(0,), tokens_per_group=16)
ENCODER = dataclasses.replace(mixtures.ENCODER, experts=EXPERTS)
TOWER = ViTConfig(image_size=8, patch_size=4, encoder=ENCODER, pooling="mean", members="apart")
IMAGES = RANDOM.integers(0, 256, (4, 8, 8, 3), np.uint8)
TOKENS = RANDOM.normal(size=(6, 4, 8))


def with_experts(**changes):
    return with_encoder(TOWER, experts=dataclasses.replace(EXPERTS, **changes))


def embed(tower, params, key=None):
    return run(tower, params, IMAGES, key).embedding


ALL = list(range(6))
SUBSETS = {0: [[0, 1, 2], [3, 4, 5]], 2: [[0, 1, 4, 5], [2, 3, 4, 5]], 6: [ALL, ALL]}
either_dispatch = pytest.mark.parametrize("dispatch", ["einsum", "ragged"])


def by_token(reference, tokens):
    """Returns ``reference(row, token)`` of every token, as an array."""
    return np.stack([[reference(row, token) for token in tokens[row]] for row in range(len(tokens))])


@either_dispatch
@pytest.mark.parametrize("overlap", [0, 2, 6])
def test_members_select_among_their_own_experts_and_those_of_all(overlap, dispatch):
    config = dataclasses.replace(EXPERTS, num_members=2, overlap=overlap, dispatch=dispatch)
    np.testing.assert_array_equal(config.members, SUBSETS[overlap])
    ours, _, params = mixture(config, TOKENS)  # three images, two members
    expected = by_token(lambda row, x: contributions(params, SUBSETS[overlap][row % 2], x, 2).sum(axis=0), TOKENS)
    np.testing.assert_allclose(ours, expected, atol=1e-5)


@either_dispatch
def test_partitioning_alone_sums_the_experts_of_all_members(dispatch):
    config = dataclasses.replace(EXPERTS, num_members=2, tiled=False, dispatch=dispatch)
    ours, _, params = mixture(config, TOKENS[:3])
    parts = [by_token(lambda _, x: contributions(params, own, x, 2).sum(axis=0), TOKENS[:3]) for own in SUBSETS[0]]  # noqa: B023
    np.testing.assert_allclose(ours, sum(parts), atol=1e-5)


@either_dispatch
def test_multi_pred_keeps_the_contributions_of_a_tokens_experts_apart(dispatch):
    config = dataclasses.replace(EXPERTS, multi_pred=True, dispatch=dispatch)
    ours, _, params = mixture(config, TOKENS[:3], apart=True)
    expected = by_token(lambda _, x: contributions(params, ALL, x, 2), TOKENS[:3])
    np.testing.assert_allclose(ours.reshape(3, 2, 4, 8), expected.swapaxes(1, 2), atol=1e-5)


PREDICTIONS = [
    ({"num_members": 2}, 2),
    ({"num_members": 2, "overlap": 6}, 2),
    ({"multi_pred": True}, 2),
    ({"dropout_samples": 3, "dropout_rate": 0.5}, 3),
    ({"num_members": 2, "tiled": False}, 1),
    ({"num_members": 3, "multi_pred": True}, 6),
    ({"dropout_samples": 3, "dropout_rate": 0.5, "num_members": 2}, 6),
]


# Shapes alone. With experts in the only block; forms of two kinds with the last block, blocks in a row, and the first.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "predictions", "depth", "blocks"),
    [
        *((*form, 1, (0,)) for form in PREDICTIONS[:4]),
        (*PREDICTIONS[-3], 4, (0, 1, 3)),
        *((*PREDICTIONS[-2], 4, blocks) for blocks in ((3,), (1, 2), (0, 1, 3))),
        (*PREDICTIONS[-1], 4, (1, 2)),
    ],
)
def test_a_tower_has_as_many_embeddings_of_an_image_as_its_form_has_predictions(changes, predictions, depth, blocks):
    tower = with_encoder(TOWER, depth=depth, experts=dataclasses.replace(EXPERTS, **changes, blocks=blocks))
    assert tower.num_members == predictions
    params = shapes(tower)
    assert jax.eval_shape(functools.partial(embed, tower), params).shape == (4 * predictions, 8)
    in_training = 4 * predictions // changes.get("dropout_samples", 1)  # masks are those of evaluation
    for form in (tower, with_encoder(tower, remat="dots")):
        assert jax.eval_shape(functools.partial(embed, form), params, jax.random.key(0)).shape == (in_training, 8)


@pytest.mark.slow
def test_tiling_alone_gives_equal_predictions_without_the_noise_of_the_router():
    tiling = with_experts(num_members=2, overlap=6, eval_capacity_factor=16.0)
    params = like_initial(shapes(TOWER))
    pairs = embed(tiling, params).reshape(4, 2, 8)
    np.testing.assert_allclose(pairs[:, 0], pairs[:, 1], atol=1e-6)
    single = with_experts(eval_capacity_factor=16.0)
    np.testing.assert_allclose(pairs[:, 0], embed(single, params), atol=1e-6)
    with_noise = embed(tiling, params, jax.random.key(0)).reshape(4, 2, 8)
    assert np.abs(with_noise[:, 0] - with_noise[:, 1]).max() > 1e-4


@pytest.mark.slow
def test_dropout_samples_differ_from_one_another_and_have_no_other_noise():
    sampled, params = with_experts(dropout_samples=64, dropout_rate=0.1), like_initial(shapes(TOWER))
    samples = np.asarray(embed(sampled, params)).reshape(4, 64, 8)
    assert samples.std(axis=1).min() > 1e-4
    np.testing.assert_array_equal(samples, embed(sampled, params).reshape(4, 64, 8))
    # To first order their mean is the prediction without dropout.
    np.testing.assert_allclose(samples.mean(axis=1), embed(TOWER, params), atol=0.1)
    never = with_experts(dropout_samples=2, dropout_rate=1e-9)
    np.testing.assert_allclose(embed(never, params)[::2], embed(TOWER, params), atol=1e-6)


def test_forms_of_the_same_experts_share_their_parameters():
    for changes in ({"num_members": 2, "tiled": False}, {"num_members": 2, "overlap": 2}, {"multi_pred": True}):
        assert shapes(with_experts(**changes)) == shapes(TOWER)


@pytest.mark.slow
def test_initial_noise_spreads_the_kernels_of_experts_only():
    towers = with_experts(initial_noise=3.0), TOWER
    noisy, plain = (parameters.flatten(initial(with_encoder(tower, activation="swiglu"))) for tower in towers)
    spread = [f"encoder/expert_blocks/mixture/experts/{layer}/kernel" for layer in ("up", "gate", "down")]
    for path in spread:
        assert np.std(noisy[path] - plain[path]) == pytest.approx(3.0, rel=0.2)
    for path in plain.keys() - set(spread):
        np.testing.assert_array_equal(noisy[path], plain[path], err_msg=path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "dispatch"),
    [
        ({"overlap": 2}, "ragged"),
        ({"tiled": False}, "einsum"),
        ({"multi_pred": True}, "ragged"),
    ],
)
def test_gradients_reach_every_expert(changes, dispatch):
    tower = with_experts(num_members=2, num_selected=3, dispatch=dispatch, **changes)
    loss = jax.grad(lambda params: jnp.sum(embed(tower, params, jax.random.key(0)) ** 2))
    gradient = jax.jit(loss)(drawn(shapes(TOWER)))
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
        layer = jax.tree.map(lambda leaf: leaf.astype(np.float64), params["rank_one"][name])
        r, s = layer["vectors"]["input"][number], layer["vectors"]["output"][number]
        x = x @ (layer["kernel"] * np.outer(r, s)) + layer["bias"][number]
        x = ACTIVATIONS["gelu_tanh"](x) if name == "up" else x
    return x


BATCH_ENSEMBLE = ExpertsConfig(3, 1, num_members=3, blocks=(0,), tokens_per_group=16, rank_one=RankOneConfig())


def test_members_of_a_batch_ensemble_have_kernels_of_rank_one():
    ours, _, params = mixture(BATCH_ENSEMBLE, TOKENS)  # two images, three members
    assert "router" not in params
    np.testing.assert_allclose(ours, by_token(lambda row, x: rank_one_mlp(params, row % 3, x), TOKENS), atol=1e-5)


@pytest.mark.parametrize("subsets", [[ALL], SUBSETS[0]], ids=["one member", "two members"])
def test_a_mixture_of_rank_one_experts_sums_those_that_the_router_selects(subsets):
    config = dataclasses.replace(EXPERTS, num_members=len(subsets), rank_one=RankOneConfig())
    ours, _, params = mixture(config, TOKENS)

    def of(row, x):
        return contributions(params, subsets[row % len(subsets)], x, 2, rank_one_mlp).sum(axis=0)

    np.testing.assert_allclose(ours, by_token(of, TOKENS), atol=1e-5)


def test_a_batch_ensemble_has_vectors_and_biases_beside_the_parameters_of_a_vit():
    towers = (with_encoder(TOWER, experts=experts) for experts in (BATCH_ENSEMBLE, None))
    ensemble, plain = (parameters.count(shapes(tower)) for tower in towers)
    # Two layers, 8 to 12 and back: three pairs of vectors, and two biases more than those of a ViT.
    assert ensemble - plain == 3 * 2 * (8 + 12) + 2 * (12 + 8)


@pytest.mark.parametrize(("start", "mean", "spread"), [("signs", 0.0, 1.0), ("normal", 1.0, 0.5)])
def test_vectors_are_signs_or_normal_at_first_and_have_their_learning_rate(start, mean, spread):
    config = RankOneConfig(start, 2.0)
    layer = nnx.jit(lambda: RankOneLinear(config, 64, 100, 50, "float32", nnx.Rngs(0)))()
    drawn = np.asarray(layer.vectors.input[...])
    assert drawn.mean() == pytest.approx(mean, abs=0.05)
    assert drawn.std() == pytest.approx(spread, rel=0.05)
    assert (set(np.unique(drawn)) == {-1.0, 1.0}) == (start == "signs")
    factors = learning_rate_factors(layer)
    assert factors["vectors"] == {"input": 2.0, "output": 2.0}
    assert factors["kernel"] == 1.0
