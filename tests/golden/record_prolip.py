"""Records a small ProLIP: ``python -m tests.golden.record_prolip FOLDER``.

FOLDER is ``src/prolip`` of the authors' code. Needs the extra ``parity``. Weights are random. ``hf_prolip/`` is as
``ProLIPHF.save_pretrained`` writes it; ``io.npz`` holds inputs, unit means, log-variances, the scale and the bias.
"""

import importlib
import sys
import types
from pathlib import Path

import numpy as np

from tests.golden.random_models import CLIP_DEVIATION, CLIP_MEAN, randomise

GOLDEN = Path(__file__).parent
SIZE, WIDTH, LENGTH = 16, 12, 8
VISION = {"image_size": SIZE, "patch_size": 8, "layers": 2, "width": 16, "head_width": 8, "embed_unc": True}
TEXT = {"context_length": LENGTH, "vocab_size": 64, "width": WIDTH, "heads": 3, "layers": 2, "pool_type": "last"}
# Fields of the authors' configurations.
TEXT |= {"no_causal_mask": True, "proj_bias": True, "embed_cls": True, "embed_unc": True, "norm_kwargs": {"eps": 1e-6}}
TEXT |= {"hf_tokenizer_name": "timm/ViT-B-16-SigLIP", "tokenizer_kwargs": {"clean": "canonicalize"}}
IMAGES = np.random.default_rng(0).integers(0, 256, (3, SIZE, SIZE, 3), np.uint8)
# The end token 1 is the padding, too.
IDS = np.array([[5, 3, 7, 9, 1, 1, 1, 1], [8, 1, 1, 1, 1, 1, 1, 1], [2, 8, 7, 6, 5, 4, 3, 1]])


def record(source: Path) -> None:
    """Writes the folder and ``io.npz``."""
    torch = importlib.import_module("torch")
    # Without the package's own imports, which need the libraries of its training.
    package = types.ModuleType("prolip")
    package.__path__ = [str(source)]
    sys.modules["prolip"] = package
    prolip = importlib.import_module("prolip.model")
    made = prolip.ProLIPHF(embed_dim=WIDTH, init_logit_bias=-10, vision_cfg=VISION, text_cfg=TEXT)
    model = randomise(torch, made)
    pixels = (IMAGES / 255 - CLIP_MEAN) / CLIP_DEVIATION
    with torch.no_grad():
        found = model(torch.tensor(pixels.transpose(0, 3, 1, 2), dtype=torch.float32), torch.tensor(IDS))
    folder = GOLDEN / "hf_prolip"
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    out = {f"out/{name}": found[name].detach().numpy() for name in ("logit_scale", "logit_bias")}
    for side in ("image", "text"):
        # What the authors call "std" is the logarithm of the variance.
        out[f"out/{side}_mean"] = found[f"{side}_features"]["mean"].numpy()
        out[f"out/{side}_log_variance"] = found[f"{side}_features"]["std"].numpy()
    np.savez(folder / "io.npz", **{"in/images": IMAGES, "in/input_ids": IDS}, **out)


if __name__ == "__main__":
    record(Path(sys.argv[1]))
