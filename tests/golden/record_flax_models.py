"""Records big_vision's NaFlex and V-MoE's two towers: ``python -m tests.golden.record_flax_models FOLDER``.

FOLDER has checkouts of the authors' code: ``big_vision``, ``vmoe`` and ``vision_transformer``. Parameters are random,
under their names in a checkpoint. Recorded are images, texts, unit embeddings and logits; of NaFlex at several sizes.
"""

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import numpy as np

GOLDEN = Path(__file__).parent
WIDTH, LENGTH, VOCABULARY = 16, 6, 40
RANDOM = np.random.default_rng(0)
IDS = RANDOM.integers(1, VOCABULARY, (4, LENGTH))
VARIANT = {"width": WIDTH, "depth": 2, "mlp_dim": 24, "num_heads": 2}
MOE = {
    "num_experts": 4,
    "group_size": 4 * LENGTH,
    "layers": (1,),
    "router": {
        "num_selected_experts": 1,
        "dispatcher": {"name": "einsum", "capacity_factor": 4.0, "batch_priority": True},
    },
}


def stub(name: str, **members: Any) -> None:
    """Adds a module without the libraries that the authors' trainings need."""
    module = types.ModuleType(name)
    vars(module).update(members)
    sys.modules[name] = module
    parent, _, own = name.rpartition(".")
    setattr(importlib.import_module(parent), own, module)


def redrawn(tree: Any) -> dict[str, np.ndarray]:
    """Returns random arrays of a tree's shapes, by name; scales of norms are around one."""
    flat: Any = flax.traverse_util.flatten_dict(tree, sep="/")
    found = {name: 0.3 * RANDOM.normal(size=leaf.shape) for name, leaf in flat.items()}
    return {name: (array + name.endswith("scale")).astype(np.float32) for name, array in found.items()}


def unflat(arrays: dict[str, np.ndarray]) -> Any:
    """Returns a tree of arrays for Flax."""
    return {"params": flax.traverse_util.unflatten_dict(arrays, sep="/")}


def patches(images: np.ndarray, size: int) -> tuple[np.ndarray, ...]:
    """Returns the inputs of a NaFlex tower: flat patches, their kind, rows and columns."""
    b, height, width, _ = images.shape
    rows, columns = height // size, width // size
    flat = images.reshape(b, rows, size, columns, size, 3).transpose(0, 1, 3, 2, 4, 5).reshape(b, rows * columns, -1)
    y, x = np.mgrid[:rows, :columns].reshape(2, -1)
    return flat, np.ones(flat.shape[:2], np.int32), np.tile(y, (b, 1)), np.tile(x, (b, 1))


def record_naflex() -> None:
    """Writes a file of two towers and the unit embeddings of images with fewer and more patches than positions."""
    stub("big_vision.utils")
    stub("big_vision.models.proj.image_text.utils", batch_shmap=lambda function, *args: function(*args))
    model = importlib.import_module("big_vision.models.proj.image_text.naflex_vit")
    text = importlib.import_module("big_vision.models.proj.image_text.text_transformer")
    image = model._Model(WIDTH, pool_type="map", nposemb=3, posemb="learn_2d(8)", head_zeroinit=False, **VARIANT)
    words = text._Model(WIDTH, vocab_size=VOCABULARY, **VARIANT)
    io: dict[str, np.ndarray] = {}
    key, params = jax.random.key(0), {}
    for size in (16, 24, 40):
        pixels = RANDOM.integers(0, 256, (2, size, size, 3)).astype(np.uint8)
        inputs = patches(pixels / np.float32(127.5) - 1, 8)
        params = params or redrawn(image.init(key, inputs)["params"])
        io |= {f"in/{size}": pixels, f"out/{size}": unit(image.apply(unflat(params), inputs)[0])}
    texts = redrawn(words.init(key, IDS)["params"])
    io |= {"in/text": IDS.astype(np.int32), "out/text": unit(words.apply(unflat(texts), IDS)[0])}
    both = {f"params/img/{name}": array for name, array in params.items()}
    both |= {f"params/txt/{name}": array for name, array in texts.items()}
    both |= {"params/t": np.full(1, 2.0, np.float32), "params/b": np.full(1, -3.0, np.float32)}
    np.savez(GOLDEN / "naflex.npz", **both, **io)  # pyright: ignore[reportArgumentType]


def record_vmoe() -> None:
    """Writes the arrays of two towers, the text tower with experts, unit embeddings and logits."""
    stub("vmoe.partitioning", with_sharding_constraint=lambda x, *_: x)
    models = importlib.import_module("vmoe.projects.contrastive.models")
    sizes = {"num_layers": 2, "mlp_dim": 24, "num_heads": 2}
    image = {"patch_size": (8, 8), "hidden_size": WIDTH, "num_classes": 12, "encoder": sizes | {"moe": None}}
    text = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "num_classes": 12, "encoder": sizes | {"moe": MOE}}
    image["classifier"] = "map"
    model = models.TwoTower(image, text, scale_init=10.0, bias_init=-10.0, deterministic=True)
    pixels = RANDOM.integers(0, 256, (4, 24, 24, 3)).astype(np.uint8)
    inputs = pixels / np.float32(127.5) - 1
    params = redrawn(model.init(jax.random.key(0), inputs, IDS)["params"])
    logits, seen = model.apply(unflat(params), inputs, IDS, mutable=["intermediates"])
    out = {"out/image": seen["intermediates"]["zimg"][0], "out/text": seen["intermediates"]["ztxt"][0]}
    arrays = {f"params/{name}": array for name, array in params.items()}
    ins = {"in/image": pixels, "in/text": IDS.astype(np.int32)}
    np.savez(GOLDEN / "vmoe_two_towers.npz", **arrays, **ins, **out, **{"out/logits": logits[0]})


def unit(x: Any) -> np.ndarray:
    """Returns rows of length one."""
    return np.asarray(x / np.linalg.norm(x, axis=-1, keepdims=True))


def main(folder: Path) -> None:
    """Writes the files."""
    sys.path[:0] = [str(folder / name) for name in ("big_vision", "vmoe", "vision_transformer")]
    jax.config.update("jax_default_matmul_precision", "highest")
    record_naflex()
    record_vmoe()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
