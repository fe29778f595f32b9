"""Records small models of OpenCLIP: ``PYTHONPATH=. python tests/golden/record_open_clip.py``.

Needs an environment of its own with open_clip_torch 3.3.0, timm 1.0.31, torch 2.13.0 and transformers. Weights are
random. Each folder is as ``save_for_hf`` writes it, without pickle and tokenizer; ``io.npz`` holds inputs, unit
embeddings and logits.
"""

import functools
import importlib
import types
from pathlib import Path

import numpy as np

from tests.golden.random_models import CLIP_DEVIATION, CLIP_MEAN, randomise

GOLDEN = Path(__file__).parent
SIZE, LENGTH, VOCABULARY = 24, 8, 52
IMAGES = np.random.default_rng(0).integers(0, 256, (3, SIZE, SIZE, 3), np.uint8)
# The end token 51 is the largest, and the end token 2 occurs twice and at last.
IDS = np.array([[50, 3, 2, 9, 51, 0, 0, 0], [50, 1, 51, 2, 0, 2, 0, 0], [50, 8, 7, 6, 5, 4, 51, 2]])
VISION = {"image_size": SIZE, "patch_size": 8, "layers": 2, "width": 24, "head_width": 8}
TEXT = {"context_length": LENGTH, "vocab_size": VOCABULARY, "width": 12, "heads": 3, "layers": 2}
SIGLIP = {"no_causal_mask": True, "proj_bias": True, "pool_type": "last", "norm_kwargs": {"eps": 1e-6}}
SIGLIP |= {"act_kwargs": {"approximate": "tanh"}, "tokenizer_kwargs": {"clean": "canonicalize"}}
MODELS = {
    "open_clip": {
        "quick_gelu": True,
        "vision_cfg": VISION | {"ls_init_value": 1e-4},
        "text_cfg": TEXT,
    },
    "open_clip_eos": {
        "vision_cfg": VISION | {"no_ln_pre": True},
        "text_cfg": TEXT | {"pool_type": "eos", "eos_id": 2, "proj_type": "none", "no_causal_mask": True},
    },
    "open_clip_siglip": {
        "custom_text": True,
        "init_logit_bias": -10,
        "vision_cfg": {
            "image_size": SIZE,
            "timm_model_name": "vit_base_patch16_siglip_224",
            "timm_pool": "map",
            "timm_proj": "none",
        },
        "text_cfg": TEXT | SIGLIP | {"width": 24},
    },
    "open_clip_perception": {
        "custom_text": True,
        "vision_cfg": {
            "image_size": SIZE,
            "timm_model_name": "vit_pe_core_small_patch16_384",
            "timm_pool": "map",
            "timm_proj": None,
        },
        "text_cfg": TEXT,
    },
}
PREPROCESSING = {"open_clip_siglip": {"mean": (0.5,) * 3, "std": (0.5,) * 3, "resize_mode": "squash"}}

# Sizes of timm's towers, in place of those of their names; the heads are these names'.
SMALL = {"embed_dim": 24, "depth": 2, "img_size": SIZE, "patch_size": 8}


def record(folder: Path, model, config: dict, images, ids) -> None:
    """Writes a model with its configuration, and what it computes of images and texts."""
    torch, hub = importlib.import_module("torch"), importlib.import_module("open_clip.push_to_hf_hub")
    chosen = PREPROCESSING.get(folder.name, {"mean": CLIP_MEAN, "std": CLIP_DEVIATION})
    model.visual.image_mean, model.visual.image_std = chosen["mean"], chosen["std"]
    model.visual.preprocess_cfg = {field: value for field, value in chosen.items() if field == "resize_mode"}
    silent = types.SimpleNamespace(save_pretrained=lambda folder: None)
    hub.save_for_hf(model, silent, config, str(folder), safe_serialization=True)
    pixels = np.moveaxis((images / 255 - chosen["mean"]) / chosen["std"], -1, 1)
    with torch.no_grad():
        values, long = torch.tensor(pixels, dtype=torch.float32), torch.tensor(ids, dtype=torch.long)
        out = {"image": model.encode_image(values, normalize=True), "text": model.encode_text(long, normalize=True)}
        out["logits"] = model.get_logits(values, long)[0]
    arrays = {f"out/{name}": array.numpy() for name, array in out.items()}
    np.savez(folder / "io.npz", **{"in/images": images, "in/input_ids": ids.astype(np.int32)}, **arrays)


def main() -> None:
    """Writes the folders."""
    torch, timm, open_clip = (importlib.import_module(name) for name in ("torch", "timm", "open_clip.model"))
    setattr(timm, "create_model", functools.partial(timm.create_model, **SMALL))  # noqa: B010
    for name, fields in MODELS.items():
        config = {"embed_dim": 12 if name == "open_clip_eos" else 24} | fields
        kind = open_clip.CustomTextCLIP if config.get("custom_text") else open_clip.CLIP
        torch.manual_seed(0)
        made = kind(**{field: value for field, value in config.items() if field != "custom_text"})
        record(GOLDEN / name, randomise(torch, made), config, IMAGES, IDS)


if __name__ == "__main__":
    main()
