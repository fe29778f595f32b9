"""Records efficient ensembles of edward2 (github.com/google/edward2) and uncertainty-baselines
(github.com/google/uncertainty-baselines): ``python record_ensembles.py EDWARD2 UNCERTAINTY_BASELINES OUTPUT``.

Needs flax. The parameters are random numbers; inputs are images as bytes.
"""

# pyright: reportMissingImports=false

import importlib
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WIDTH, CLASSES, MEMBERS = 8, 5, 2
SIZES = {"num_layers": 2, "mlp_dim": 12, "num_heads": 2, "dropout_rate": 0.0, "attention_dropout_rate": 0.0}


def drawn(model, *inputs, **options):
    """Returns random parameters of a model, as a tree and by name."""
    random = np.random.default_rng(1)
    shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), *inputs, **options))["params"]
    params = jax.tree.map(lambda x: 0.5 * random.normal(size=x.shape).astype(np.float32), shapes)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return params, {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def main(edward2, uncertainty_baselines, output):
    # Their packages import TensorFlow and others, which these modules do not need.
    for name in ("edward2", "edward2.jax", "edward2.jax.nn", "uncertainty_baselines", "uncertainty_baselines.models"):
        sys.modules[name] = module = types.ModuleType(name)
        checkout = edward2 if name.startswith("edward2") else uncertainty_baselines
        module.__path__ = [f"{checkout}/{name.replace('.', '/')}"]
    importlib.import_module("edward2.jax.nn.utils")
    dense = importlib.import_module("edward2.jax.nn.dense")
    vars(sys.modules["edward2.jax.nn"])["DenseBatchEnsemble"] = dense.DenseBatchEnsemble
    vars(sys.modules["edward2.jax"])["nn"] = sys.modules["edward2.jax.nn"]
    vit, be, mimo = (
        importlib.import_module(f"uncertainty_baselines.models.{name}")
        for name in ("vit", "vit_batchensemble", "vit_mimo")
    )
    random = np.random.default_rng(0)
    found: dict[str, Any] = {}
    patches = types.SimpleNamespace(size=(4, 4))

    images = random.integers(0, 256, (3, 8, 8, 3)).astype(np.uint8)
    sizes = {**SIZES, "ens_size": MEMBERS, "random_sign_init": 0.5, "be_layers": (1,)}
    model = be.VisionTransformerBE(CLASSES, patches, sizes, WIDTH, classifier="gap", train=False)
    x = images / np.float32(127.5) - 1
    params, named = drawn(model, x)
    found |= {f"batch_ensemble/{name}": leaf for name, leaf in named.items()} | {"images": images}
    found["batch_ensemble_features"] = model.apply({"params": params}, x)[1]["pre_logits"]

    pairs = random.integers(0, 256, (3, 8, 8, 3 * MEMBERS)).astype(np.uint8)
    model = mimo.VisionTransformerMIMO(CLASSES, patches, SIZES, WIDTH, MEMBERS, classifier="gap")
    x = pairs / np.float32(127.5) - 1
    params, named = drawn(model, x, train=False)
    found |= {f"mimo/{name}": leaf for name, leaf in named.items()} | {"pairs": pairs}
    found["mimo_logits"] = model.apply({"params": params}, x, train=False)[0]

    tokens = random.normal(size=(6, WIDTH)).astype(np.float32)
    model = vit.MlpBlock(mlp_dim=12, dropout_rate=0.25)
    params, named = drawn(model, tokens, deterministic=True)
    applied, state = model.apply(
        {"params": params},
        jnp.asarray(tokens),
        deterministic=False,
        rngs={"dropout": jax.random.key(1)},
        capture_intermediates=True,
    )
    found |= {f"dropout/{name}": leaf for name, leaf in named.items()}
    found |= {"tokens": tokens, "dropout_outputs": applied}
    for layer in range(2):
        kept = state["intermediates"][f"Dropout_{layer}"]["__call__"][0] != 0
        found[f"dropout_kept_{layer}"] = kept
    np.savez(output, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])
