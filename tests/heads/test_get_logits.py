"""Any function of noisy embeddings as `get_logits` (HET-XL Sec. 3.1): given, sampled and hierarchical softmaxes."""

import dataclasses
import functools
import math
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import log_softmax, logsumexp

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.heads import (
    CovarianceConfig,
    DenseLogits,
    DeterministicConfig,
    GivenLogits,
    HetXLConfig,
    HierarchicalSoftmax,
    SampledSoftmax,
    SamplingConfig,
    candidates,
    get_logits,
)
from lit_het.heads.base import CANDIDATES
from lit_het.heads.hierarchy import cluster_sizes
from lit_het.heads.temperature_config import FixedTemperature
from lit_het.losses import SigmoidCrossEntropy, SoftmaxCrossEntropy
from lit_het.mixtures import LabelMixture
from lit_het.tasks.classification import ClassificationConfig
from lit_het.towers.decoder_config import DecoderConfig
from tests.heads import references
from tests.losses.contrastive_cases import on_devices

B, D, K, S, R, TAU = 8, 6, 11, 4, 2, 0.7
X = jnp.asarray(np.random.default_rng(1).normal(size=(B, D)), jnp.float32)
KEY = jax.random.key(2)
LABEL = jnp.asarray([0, 3, 10, 2, 2, 9, 1, 4])
VALID = jnp.asarray([True, True, False, True, True, True, True, True])
NOISE = CovarianceConfig(R, "efficient")
SOFTMAX = SoftmaxCrossEntropy()


def het_xl(layer, block_size=1024, order: Any = "cheaper"):
    return HetXLConfig(
        NOISE,
        temperature=FixedTemperature(TAU),
        sampling=SamplingConfig(num_samples=S, block_size=block_size, order=order, antithetic=False),
        get_logits=layer,
    )


def deterministic(layer):
    return DeterministicConfig(FixedTemperature(TAU), get_logits=layer)


def make(config, num_classes=K):
    return references.with_random_parameters(lambda: config.build(D, num_classes, nnx.Rngs(0)))


@functools.cache
def trained(config, loss=SOFTMAX):
    """A head, and a compiled function of features to its loss and the gradient of parameters and features."""
    head = make(config)
    graph, state = nnx.split(head)

    def value(params, x, label, valid):
        return loss(nnx.merge(graph, params)(x, KEY), label, valid).loss

    run = jax.jit(jax.value_and_grad(value, argnums=(0, 1)))
    return head, functools.partial(run, nnx.to_pure_dict(state))


def noisy_embeddings(head, config):
    """φ + ε'_s in float64, one sample of one example at a time; φ of a head without noise."""
    if isinstance(config, DeterministicConfig):
        return np.asarray(X, np.float64)[:, None]
    normals = np.asarray(references.normals_of(head(X, KEY), config.covariance, D), np.float64)
    of_noise = {path.removeprefix("covariance/"): leaf for path, leaf in references.in_float64(head).items()}
    return np.asarray(X, np.float64)[:, None] + references.noise(of_noise, config.covariance, X, normals)


@get_logits
def cosines(feature_size, num_classes, rngs):
    """A normalised softmax, as of face recognition: not linear in the embedding."""
    return Cosines(feature_size, num_classes, rngs)


class Cosines(nnx.Module):
    def __init__(self, feature_size, num_classes, rngs):
        self.layer = nnx.Linear(feature_size, num_classes, use_bias=False, rngs=rngs)

    def __call__(self, embedding):
        norms = (
            jnp.linalg.norm(embedding, axis=-1, keepdims=True) * jnp.linalg.norm(self.layer.kernel[...], axis=0)[None]
        )
        return 5 * self.layer(embedding) / norms


def reference_cosines(kernel, embedding):
    return np.array([5 * embedding @ w / np.linalg.norm(embedding) / np.linalg.norm(w) for w in kernel.T])


@pytest.mark.parametrize("config", [het_xl(cosines), deterministic(cosines)], ids=["HET-XL", "DET"])
def test_a_given_function_maps_noisy_embeddings_to_logits_in_training_and_without_noise(config):
    head, _ = trained(config)
    kernel = references.in_float64(head)["logits/function/layer/kernel"]
    for key, embeddings in ((KEY, noisy_embeddings(head, config)), (None, np.asarray(X, np.float64)[:, None])):
        expected = [[reference_cosines(kernel, z) / TAU for z in samples] for samples in embeddings]
        found = references.all_at_once(head(X, key))
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_a_given_function_reaches_its_parameters_and_those_of_the_noise():
    _, run = trained(het_xl(cosines))
    _, (of_params, of_x) = run(X, LABEL, VALID)
    leaves = parameters.flatten(of_params)
    assert "logits/function/layer/kernel" in leaves
    for path, leaf in leaves.items():
        assert np.isfinite(leaf).all(), path
        assert np.any(leaf), path
    assert not np.any(of_x[2])  # not a valid row


def test_without_samples_the_covariance_goes_through_a_given_function_to_first_order():
    config = dataclasses.replace(het_xl(cosines), sampling=SamplingConfig(num_samples=0))
    head, _ = trained(config, SoftmaxCrossEntropy(likelihood="delta"))
    rows = np.asarray(references.all_at_once(head(X, KEY)), np.float64)
    kernel = references.in_float64(head)["logits/function/layer/kernel"]
    of_noise = {path.removeprefix("covariance/"): leaf for path, leaf in references.in_float64(head).items()}
    factors = references.noise(of_noise, NOISE, X, np.broadcast_to(np.eye(R + 1), (B, R + 1, R + 1)))
    for n, r in np.ndindex(B, R + 1):
        ends = [reference_cosines(kernel, np.asarray(X[n], np.float64) + s * 1e-5 * factors[n, r]) for s in (1, -1)]
        np.testing.assert_allclose(rows[n, 1 + r], (ends[0] - ends[1]) / 2e-5 / TAU, rtol=1e-3, atol=1e-4)


def test_the_example_of_the_documents_is_a_head():
    text = (Path(__file__).parents[2] / "docs" / "heads.md").read_text()
    (code,) = re.findall(r"^```python\n(import[^`]*?@get_logits.*?)^```", text, re.DOTALL | re.MULTILINE)
    found: dict[str, Any] = {"__name__": "documents"}
    exec(code, found)
    head = found["head"].build(D, K, nnx.Rngs(0))
    assert np.abs(head(X, None).prepare(X)).max() <= 16 / 0.05
    assert found["cosines"] == GivenLogits("documents:cosines")


@get_logits
def too_few(feature_size, num_classes, rngs):
    return nnx.Linear(feature_size, num_classes - 1, rngs=rngs)


@get_logits
def a_number(feature_size, num_classes, rngs):
    return lambda embedding: 1.0


@get_logits
def no_function(feature_size, num_classes, rngs) -> Any:
    return 3


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (too_few, rf"too_few' returns \(2, {K - 1}\) for embeddings \(2, {D}\); {K} classes need logits \(2, {K}\)"),
        (a_number, rf"a_number' returns float for embeddings \(2, {D}\); {K} classes need logits \(2, {K}\)"),
        (no_function, "no_function' returns int, and not a function of embeddings"),
    ],
    ids=lambda value: value.name.partition(":")[2] if isinstance(value, GivenLogits) else "",
)
def test_logits_of_a_wrong_shape_are_one_clear_line(layer: Any, message):
    with pytest.raises(UserError, match=message) as raised:
        het_xl(layer).build(D, K, nnx.Rngs(0))
    assert "\n" not in str(raised.value)


def test_a_function_that_this_process_lacks_is_refused_by_its_name():
    with pytest.raises(UserError, match="'theirs:softmax' is a function that this process does not have; import"):
        GivenLogits("theirs:softmax")
    # Importable, but of nobody's decoration: no name leads to code.
    with pytest.raises(UserError, match="this process does not have"):
        GivenLogits("os:system")


REFUSED = {
    "an initial bias of given logits": (lambda: DeterministicConfig(initial_bias=1.0, get_logits=cosines), "leave out"),
    "a kernel of zeros of given logits": (lambda: HetXLConfig(zero_kernel=True, get_logits=cosines), "leave out"),
    "the factored order": (lambda: het_xl(cosines, order="factored"), "needs a linear layer, not GivenLogits"),
    "W' of its own": (lambda: HetXLConfig(unshared_size=3, get_logits=SampledSoftmax()), "needs DenseLogits"),
    "no candidates": (lambda: SampledSoftmax(0), "num_candidates"),
    "an unknown distribution": (lambda: SampledSoftmax(4, "normal"), "distribution"),  # pyright: ignore[reportArgumentType]
    "sigmoids": (lambda: task(loss=SigmoidCrossEntropy()), "trains the softmax of a label among few classes"),
    "smoothing": (lambda: task(loss=SoftmaxCrossEntropy(0.1)), "without label_smoothing"),
    "mixup": (lambda: task(mixup=0.2), "trains one prediction of one label"),
    "several heads": (lambda: task(num_heads=2), "trains one prediction of one label"),
    "no samples": (
        lambda: task(
            head=HetXLConfig(sampling=SamplingConfig(num_samples=0), get_logits=SampledSoftmax()),
            loss=SoftmaxCrossEntropy(likelihood="delta"),
        ),
        "reads all classes",
    ),
    "tied tokens": (lambda: DecoderConfig(tied_output=True).check_head(deterministic(cosines), "task"), "leave one"),
}


def task(**fields):
    return ClassificationConfig(**{"head": het_xl(HierarchicalSoftmax()), **fields})


@pytest.mark.parametrize(("build", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(build, message):
    with pytest.raises(UserError, match=message):
        build()


def test_a_loss_of_mixtures_refuses_a_softmax_of_few_classes():
    head, _ = trained(deterministic(SampledSoftmax(4)))
    mixed = LabelMixture(LABEL[:, None], jnp.ones((B, 1)))
    with pytest.raises(UserError, match="trains one prediction of one label"):
        SoftmaxCrossEntropy()(head(X, KEY), mixed, VALID)


BUILT_IN = [SampledSoftmax(5), SampledSoftmax(5, "log_uniform"), HierarchicalSoftmax()]
every_layer = pytest.mark.parametrize("layer", BUILT_IN, ids=str)
of_heads = pytest.mark.parametrize("config_of", [het_xl, deterministic], ids=["HET-XL", "DET"])


def all_logits(params, layer, z):
    """u / τ of all classes, or of a hierarchy log p, class by class."""
    u = (z @ params["logits/kernel"] + params["logits/bias"]) / TAU
    if not isinstance(layer, HierarchicalSoftmax):
        return u
    of_cluster = log_softmax((z @ params["logits/clusters/kernel"] + params["logits/clusters/bias"]) / TAU)
    size = math.ceil(math.sqrt(K))
    return np.array([of_cluster[c // size] + u[c] - logsumexp(u[c // size * size :][:size]) for c in range(K)])


def inclusion(layer, c):
    q = 1 / K if layer.distribution == "uniform" else math.log((c + 2) / (c + 1)) / math.log(K + 1)
    return 1 - (1 - q) ** layer.num_candidates


def log_p_of_label(params, layer, drawn, z, y):
    """log p of the label among the candidates, by the definition of tf.nn.sampled_softmax_loss; or by the hierarchy."""
    u = all_logits(params, layer, z)
    if isinstance(layer, HierarchicalSoftmax):
        return u[y]
    own = u[y] - math.log(inclusion(layer, y))
    others = (u[c] - math.log(inclusion(layer, c)) for c in set(drawn) - {y})
    normalizer: Any = logsumexp([own, *others])
    return own - normalizer


def reference(config, place, embeddings, drawn):
    losses = [
        -np.log(np.mean([np.exp(log_p_of_label(place, config.get_logits, drawn, z, int(y))) for z in samples]))
        for samples, y in zip(embeddings, LABEL, strict=True)
    ]
    return np.mean(np.asarray(losses)[np.asarray(VALID)])


def drawn_classes(config):
    """The candidates of the step of `KEY`."""
    if isinstance(config.get_logits, HierarchicalSoftmax):
        return []
    return candidates.draw(config.get_logits, K, jax.random.fold_in(KEY, CANDIDATES)).tolist()


@every_layer
@of_heads
def test_the_loss_equals_the_numpy_reference(layer, config_of):
    config = config_of(layer)
    head, run = trained(config)
    found, _ = run(X, LABEL, VALID)
    embeddings = noisy_embeddings(head, config)
    expected = reference(config, references.in_float64(head), embeddings, drawn_classes(config))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@every_layer
def test_gradients_agree_with_finite_differences_of_the_reference(layer):
    config = deterministic(layer)
    head, run = trained(config)
    _, (of_params, of_x) = run(X, LABEL, VALID)
    gradient = {**parameters.flatten(of_params), "x": of_x}
    place = {**references.in_float64(head), "x": np.asarray(X, np.float64)}
    random, drawn = np.random.default_rng(3), drawn_classes(config)
    for path, leaf in gradient.items():
        direction = random.normal(size=leaf.shape)
        moved = ({**place, path: place[path] + s * 1e-5 * direction} for s in (1, -1))
        up, down = (reference(config, one, one["x"][:, None], drawn) for one in moved)
        np.testing.assert_allclose(np.vdot(leaf, direction), (up - down) / 2e-5, rtol=1e-3, atol=1e-5, err_msg=path)


@every_layer
def test_blocks_have_the_loss_and_the_gradient_of_the_whole(layer):
    (_, whole), (_, in_blocks) = trained(het_xl(layer)), trained(het_xl(layer, block_size=2 * S))
    for x, y in zip(*(jax.tree.leaves(run(X, LABEL, VALID)) for run in (whole, in_blocks)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


@pytest.mark.devices
@pytest.mark.slow
@every_layer
@of_heads
def test_eight_devices_have_the_loss_and_the_gradient_of_one(layer, config_of):
    _, run = trained(config_of(layer))
    one, eight = (on_devices(devices, run, (X, LABEL, VALID)) for devices in (1, 8))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5), one, eight)


@every_layer
def test_predictions_are_of_all_classes(layer):
    head, _ = trained(het_xl(layer))
    params = references.in_float64(head)
    expected = [[all_logits(params, layer, np.asarray(x, np.float64))] for x in X]
    np.testing.assert_allclose(references.all_at_once(head(X, None)), expected, rtol=1e-4, atol=1e-5)
    assert references.all_at_once(head(X, KEY, 2)).shape == (B, 2, K)


@pytest.mark.parametrize("k", [1, 2, 9, 10, 11, 100])
def test_a_hierarchy_has_probabilities_that_sum_to_one_and_no_empty_cluster(k):
    head = make(deterministic(HierarchicalSoftmax()), k)
    np.testing.assert_allclose(np.exp(head.over_temperature(X)).sum(axis=1), 1, rtol=1e-5)
    clusters, size = cluster_sizes(k)
    assert (clusters - 1) * size < k <= clusters * size
    # What training computes sums to one, too: the label, its cluster, and the other clusters.
    of_label = head(X, KEY).of_labels(jnp.full(B, k - 1))
    outcomes = references.all_at_once(of_label)
    assert outcomes.shape[-1] == HierarchicalSoftmax().num_outcomes(k)
    np.testing.assert_allclose(np.exp(outcomes).sum(axis=-1), 1, rtol=1e-5)
    np.testing.assert_allclose(outcomes[:, 0, 0], head.over_temperature(X)[:, k - 1], rtol=1e-4, atol=1e-5)


def test_with_all_classes_among_the_candidates_the_loss_is_that_of_the_full_softmax():
    few, full = (trained(deterministic(layer))[1] for layer in (SampledSoftmax(10_000), DenseLogits()))
    for x, y in zip(*(jax.tree.leaves(run(X, LABEL, VALID)) for run in (few, full)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("layer", BUILT_IN, ids=str)
def test_training_computes_no_logits_of_all_classes(layer):
    """Of the arrays of a step only parameters, and their gradients, have the size of all classes."""
    k, b = 10_000, 300
    graph, params = nnx.split(nnx.eval_shape(lambda: deterministic(layer).build(D, k, nnx.Rngs(0))))

    def value(params, x):
        return SoftmaxCrossEntropy()(nnx.merge(graph, params)(x, KEY), jnp.zeros(b, int)).loss

    compiled = jax.jit(jax.grad(value)).lower(params, jax.ShapeDtypeStruct((b, D), jnp.float32)).compile()
    memory: Any = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 4 * b * k
