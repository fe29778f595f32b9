"""LiT's BERT text tower, imported from flaxformer's names, equals a NumPy implementation."""

import dataclasses

import jax
import numpy as np
import pytest

from lit_het.errors import UserError
from lit_het.weights.big_vision.exporting import write_npz
from lit_het.weights.big_vision.importing import read_big_vision
from tests.towers.test_forms import attention, dense, mlp, norm
from tests.weights.importing import (
    GOLDEN,
    assert_close,
    assert_recorded,
    bert_tower,
    golden,
    image_tower,
    loaded,
    params_of,
    read_npz,
    run,
    save,
)

RANDOM = np.random.default_rng(0)
WIDTH, HEADS, HIDDEN, DEPTH, WORDS, LENGTH = 128, 2, 24, 2, 20, 9


def normal(*shape):
    return RANDOM.standard_normal(shape, np.float32)


def bert_arrays():
    """Returns a text tower with flaxformer's names and flat kernels."""
    dense = {"attention_block/dense_layer": (WIDTH, WIDTH)}
    dense |= {f"attention_block/attention_layer/{name}": (WIDTH, WIDTH) for name in ("query", "key", "value")}
    dense |= {"mlp_block/mlp/dense_layer": (WIDTH, HIDDEN), "mlp_block/dense_layer": (HIDDEN, WIDTH)}
    norms = ["layer_norm"]
    arrays = {"txt/head/kernel": normal(WIDTH, 6) / 10, "txt/head/bias": normal(6), "t": normal(1)}
    for kind, number in (("token", WORDS), ("position", LENGTH), ("segment", 2)):
        arrays[f"txt/BertEncoder_0/embedder/embedders_{kind}_ids/embedding"] = normal(number, WIDTH)
    for number in range(DEPTH):
        block = f"encoder_block/layer_sequence/layers_{number}"
        norms += [f"{block}/attention_block/layer_norm", f"{block}/mlp_block/layer_norm"]
        for layer, shape in dense.items():
            arrays[f"txt/BertEncoder_0/{block}/{layer}/kernel"] = normal(*shape) / np.float32(np.sqrt(shape[0]))
            arrays[f"txt/BertEncoder_0/{block}/{layer}/bias"] = normal(shape[1]) / 5
    for name in norms:
        arrays[f"txt/BertEncoder_0/{name}/scale"] = 1 + normal(WIDTH) / 5
        arrays[f"txt/BertEncoder_0/{name}/bias"] = normal(WIDTH) / 5
    return arrays


def bert_reference(arrays, text):
    """Computes BERT in float64: LN(x + f(x)) twice per block, tanh GELU, masked token 0, projected first token."""
    arrays = {name.removeprefix("txt/BertEncoder_0/"): array.astype(np.float64) for name, array in arrays.items()}

    def layer(name, leaves=("kernel", "bias")):
        return {leaf: arrays[f"{name}/{leaf}"] for leaf in leaves}

    def normalised(name, x):
        return norm(layer(f"{name}layer_norm", ("scale", "bias")), x, 1e-12)

    tokens, positions, segments = (
        arrays[f"embedder/embedders_{kind}_ids/embedding"] for kind in ("token", "position", "segment")
    )
    embeddings = []
    for ids in text:
        x = normalised("", tokens[ids] + positions[: len(ids)] + segments[0])
        for number in range(DEPTH):
            block = f"encoder_block/layer_sequence/layers_{number}"
            own = {name: layer(f"{block}/attention_block/attention_layer/{name}") for name in ("query", "key", "value")}
            own["out"] = layer(f"{block}/attention_block/dense_layer")
            x = normalised(f"{block}/attention_block/", x + attention(own, x, x, ids != 0, HEADS))
            own = {"up": layer(f"{block}/mlp_block/mlp/dense_layer"), "down": layer(f"{block}/mlp_block/dense_layer")}
            x = normalised(f"{block}/mlp_block/", x + mlp(own, x, "gelu_tanh"))
        embeddings.append(dense(layer("txt/head"), x[0]))
    return np.stack(embeddings)


def test_lits_bert_equals_the_numpy_implementation(tmp_path):
    arrays = bert_arrays()
    imported = read_big_vision(save(tmp_path / "lit.npz", arrays), text_length=6)
    config = bert_tower(imported)
    assert (config.length, config.encoder.num_heads) == (6, HEADS)
    text = np.array([[3, 7, 7, 19, 1, 2], [5, 4, 1, 0, 0, 0]], np.int32)
    params = loaded(imported)
    embedding = run(config, params["text_tower"], text).embedding
    assert_recorded(embedding, bert_reference(arrays, text))
    assert params["head"]["temperature"]["log_temperature"] == -arrays["t"][0]


def test_a_locked_image_tower_and_a_bert_are_exported_unchanged(tmp_path):
    vit = params_of(golden("vit_sovit_shape"))
    arrays = bert_arrays() | {f"img/{name}": array for name, array in vit.items() if not name.startswith("head/")}
    imported = read_big_vision(save(tmp_path / "lit.npz", arrays))
    write_npz(tmp_path / "out.npz", image_tower(imported), bert_tower(imported), loaded(imported))
    exported = read_npz(tmp_path / "out.npz")
    assert exported.keys() == arrays.keys()
    for name in arrays:
        np.testing.assert_array_equal(exported[name], arrays[name], err_msg=name)


@pytest.mark.parametrize("is_bert", [True, False])
def test_a_longer_text_length_interpolates_positions_as_jax_does(tmp_path, is_bert):
    path = save(tmp_path / "lit.npz", bert_arrays()) if is_bert else GOLDEN / "two_towers_siglip.npz"
    short, long = read_big_vision(path), read_big_vision(path, text_length=14)
    positions = loaded(short)["text_tower"]["positions"]
    assert short.text_tower is not None
    assert long.text_tower == dataclasses.replace(short.text_tower, length=14)
    resized = jax.image.resize(positions, (14, positions.shape[1]), "linear")
    assert_close(loaded(long)["text_tower"]["positions"], resized)


def test_only_a_bert_can_be_read_for_shorter_texts(tmp_path):
    assert bert_tower(read_big_vision(save(tmp_path / "lit.npz", bert_arrays()))).length == LENGTH
    with pytest.raises(UserError, match="8 tokens; only a BERT can be read with fewer: text_length = 4"):
        read_big_vision(GOLDEN / "two_towers_siglip.npz", text_length=4)
