"""ProLIP's published sizes, read from its configurations, and the headers of files of these sizes (of zeros)."""

import json
import math
import re
import struct

import pytest
import safetensors

from lit_het import parameters
from lit_het.checkpoints.huggingface.importing import read_huggingface
from lit_het.towers.text import TextConfig
from lit_het.towers.vit import ViTConfig
from tests.checkpoints.huggingface_models import expected
from tests.checkpoints.test_prolip import FOLDER

# Image size, patch size, layers, width, width of a head and of the MLP; the same of texts, and their tokens.
SIZES = {
    "ViT-B-16": ((224, 16, 12, 768, 64, 3072), (12, 768, 12, 3072), (64, 32_100)),
    "ViT-SO400M-14": ((224, 14, 27, 1152, 72, 4304), (27, 1152, 16, 4304), (64, 32_100)),
    "ViT-H-14": ((224, 14, 32, 1280, 80, 5120), (24, 1024, 16, 4096), (77, 49_408)),
}


@pytest.fixture(params=SIZES)
def folder(request, tmp_path):
    """Returns the sizes, and a folder with an empty file of them: each of the small recording becomes one of these."""
    (image_size, patch, layers, width, head_width, mlp), (depth, size, heads, hidden), (length, words) = SIZES[
        request.param
    ]
    patches = (image_size // patch) ** 2
    sides = {
        "visual": (layers, {16: width, 64: mlp, 48: 3 * width, 12: size, 8: patch, 3: 3, 6: patches + 2}),
        "text": (depth, {12: size, 36: 3 * size, 48: hidden, 64: words, 10: length + 2}),
        "logit_scale": (1, {}),
        "logit_bias": (1, {}),
    }
    shapes = {}
    with safetensors.safe_open(FOLDER / "model.safetensors", "numpy") as small:
        for name in small.keys():  # noqa: SIM118 (not a dict)
            blocks, replaced = sides[name.partition(".")[0]]
            shape = [replaced[number] for number in small.get_slice(name).get_shape()]
            if "resblocks.1" not in name:
                shapes |= {re.sub(r"\.0\.", f".{block}.", name): shape for block in range(blocks)}
    header, end = {}, 0
    for name, shape in shapes.items():
        start, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)  # zeros that take no place
    config = json.loads((FOLDER / "config.json").read_text())
    config["embed_dim"] = size
    config["vision_cfg"] |= {"image_size": image_size, "patch_size": patch, "layers": layers, "head_width": head_width}
    config["text_cfg"] |= {"context_length": length, "vocab_size": words, "layers": depth, "heads": heads}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return SIZES[request.param], shapes, tmp_path


def test_published_sizes_are_read_without_a_parameter_left_over(folder):
    sizes, shapes, path = folder
    (image_size, patch, layers, width, head_width, mlp), (depth, size, heads, hidden), (_, words) = sizes
    imported = read_huggingface(path)
    image, text = imported.image_tower, imported.text_tower
    assert isinstance(image, ViTConfig)
    assert isinstance(text, TextConfig)
    assert (image.image_size, image.patch_size, image.projection_size) == (image_size, patch, size)
    assert text.vocabulary_size == words
    found = [(tower.depth, tower.width, tower.num_heads, tower.mlp_width) for tower in (image.encoder, text.encoder)]
    assert found == [(layers, width, width // head_width, mlp), (depth, size, heads, hidden)]
    # The positions of two tokens on each side are added to these; the first layer and the projection have biases.
    merged, biases = 2 * (width + size), width + size
    theirs = sum(math.prod(shape) for shape in shapes.values())
    assert parameters.count(expected(imported)) == theirs - merged + biases
    assert {name for source in imported.parameter_sources for name in source.array_names} == set(shapes)
