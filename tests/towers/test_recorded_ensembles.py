"""BatchEnsemble, MIMO and dropout against recorded outputs of edward2's and uncertainty-baselines' layers.

``golden/record_ensembles.py`` recorded them, with the authors' code and random parameters.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from flax import nnx

from lit_het.heads.classification_config import DeterministicConfig
from lit_het.tasks import quantities
from lit_het.tasks.classification import ClassificationConfig
from lit_het.tasks.mimo import MimoConfig
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.layers import Mlp
from lit_het.towers.rank_one import RankOneConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from tests.towers.models import run
from tests.weights.importing import golden

MEMBERS, WIDTH, CLASSES, DROPOUT_RATE = 2, 8, 5, 0.25
ENCODER = EncoderConfig(width=WIDTH, depth=2, mlp_width=12, num_heads=2, unrolled=True)
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def recorded():
    return golden("ensembles")


def tower_params(recorded, prefix):
    """Returns our parameters of a recorded tower; blocks are a list, from the first to the last."""

    def layer(name):
        kernel = recorded[f"{prefix}/{name}/kernel"]
        # Attention has an axis of heads: of the outputs of query, key and value, and of the inputs of the last layer.
        rows = -1 if name == "embedding" or name.endswith("/out") else WIDTH
        kernel = kernel.reshape(rows, WIDTH) if kernel.ndim > 2 else kernel
        bias = recorded[f"{prefix}/{name}/bias"]
        return {"kernel": kernel, "bias": bias.reshape(-1) if name.endswith(("query", "key", "value")) else bias}

    def norm(name):
        return {leaf: recorded[f"{prefix}/Transformer/{name}/{leaf}"] for leaf in ("scale", "bias")}

    def block(number):
        at = f"encoderblock_{number}"
        own = f"Transformer/{at}"
        attention, mlp = f"{own}/MultiHeadDotProductAttention_1", f"{own}/MlpBlock_3"
        found = {
            "attention": {name: layer(f"{attention}/{name}") for name in ("query", "key", "value", "out")},
            "attention_norm": norm(f"{at}/LayerNorm_0"),
            "mlp_norm": norm(f"{at}/LayerNorm_2"),
            "mlp": {"up": layer(f"{mlp}/Dense_0"), "down": layer(f"{mlp}/Dense_1")},
        }
        for ours, theirs in (("up", "Dense_0"), ("down", "Dense_1")):
            vectors = f"{prefix}/{mlp}/{theirs}/fast_weight"
            if f"{vectors}_alpha" in recorded:
                own_vectors = {"input": recorded[f"{vectors}_alpha"], "output": recorded[f"{vectors}_gamma"]}
                found["mlp"][ours]["vectors"] = own_vectors
        return found

    tower = {
        "patches": layer("embedding"),
        "positions": recorded[f"{prefix}/Transformer/posembed_input/pos_embedding"][0],
        "encoder": {"norm": norm("encoder_norm")},
    }
    return tower, [block(0), block(1)]


def stacked(blocks):
    return jax.tree.map(lambda *leaves: np.stack(leaves), *blocks)


def test_a_batch_ensemble_has_the_embeddings_of_edward2s_layers(recorded):
    experts = ExpertsConfig(MEMBERS, 1, num_blocks=1, num_members=MEMBERS, rank_one=RankOneConfig())
    encoder = EncoderConfig(WIDTH, depth=2, mlp_width=12, num_heads=2, unrolled=True, experts=experts)
    config = ViTConfig(8, 4, encoder, pooling="mean", positions="learned", members="apart")
    params, (dense, members) = tower_params(recorded, "batch_ensemble")
    members["mixture"] = {"rank_one": members.pop("mlp")}
    params["encoder"] |= {"blocks": stacked([dense]), "expert_blocks": stacked([members])}
    embedding = run(config, params, recorded["images"]).embedding
    # Theirs are the images of the first member, then those of the second.
    expected = recorded["batch_ensemble_features"].reshape(MEMBERS, -1, WIDTH).swapaxes(0, 1)
    np.testing.assert_allclose(embedding.reshape(expected.shape), expected, atol=TOLERANCE, rtol=TOLERANCE)
    assert np.abs(expected[:, 0] - expected[:, 1]).max() > 0.01


def test_mimo_predicts_as_uncertainty_baselines(recorded):
    config = ViTConfig(8, 4, ENCODER, pooling="mean", positions="learned", num_inputs=MEMBERS)
    task = ClassificationConfig(
        config, DeterministicConfig(), num_classes=CLASSES, num_heads=MEMBERS, mimo=MimoConfig()
    ).build()
    tower, blocks = tower_params(recorded, "mimo")
    tower["encoder"]["blocks"] = stacked(blocks)
    head = {leaf: recorded[f"mimo/head/{leaf}"] for leaf in ("kernel", "bias")}
    params = {"image_tower": tower, "head": {"logits": head}}
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, task.shapes)

    @jax.jit
    def member_log_probabilities(params, pairs):
        classifier, features = task.image_classifier(params), task.features(params, pairs)
        return quantities.member_log_probabilities(classifier, features, jax.random.key(0), 0)

    found = member_log_probabilities(params, recorded["pairs"])
    logits = recorded["mimo_logits"].reshape(MEMBERS, -1, CLASSES).swapaxes(0, 1)
    np.testing.assert_allclose(found, scipy.special.log_softmax(logits, axis=-1), atol=TOLERANCE, rtol=TOLERANCE)


def test_dropout_falls_on_the_layers_and_scales_the_rest_as_in_uncertainty_baselines(recorded):
    graph = nnx.graphdef(nnx.eval_shape(lambda: Mlp(WIDTH, 12, "gelu_tanh", "float32", nnx.Rngs(0))))
    names = {"up": "Dense_0", "down": "Dense_1"}
    params = {k: {leaf: recorded[f"dropout/{v}/{leaf}"] for leaf in ("kernel", "bias")} for k, v in names.items()}

    def drop(x, number):
        return jnp.where(recorded[f"dropout_kept_{number}"], x / (1 - DROPOUT_RATE), 0)

    found = jax.jit(lambda params, tokens: nnx.merge(graph, params)(tokens, drop=drop))(params, recorded["tokens"])
    np.testing.assert_allclose(found, recorded["dropout_outputs"], atol=TOLERANCE, rtol=TOLERANCE)
