"""Imported Hugging Face folders reproduce the outputs of transformers; malformed folders raise clear errors."""

import dataclasses
import functools
import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
import transformers

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.models.pretrained import abstract_params, load_weights
from lit_het.tasks.captioning import CaptioningConfig
from lit_het.weights.huggingface import image_processors, image_towers, text_towers
from lit_het.weights.huggingface.importing import read_huggingface
from lit_het.weights.native import checksums
from lit_het.weights.resample import resample_positions
from tests.weights.importing import GOLDEN, assert_close, golden, load, logits, pixels, run, write_json


def channels_last(values):
    return pixels(np.moveaxis(values, 1, -1))


@functools.cache
def published(name):
    """Returns the parameters of a folder as they are."""
    return load(GOLDEN / name)[1]


@pytest.mark.parametrize("kind", [*image_towers.FAMILIES, *text_towers.FAMILIES])
def test_fields_that_a_configuration_leaves_out_are_those_of_transformers(kind):
    family = (image_towers.FAMILIES | text_towers.FAMILIES)[kind]
    theirs = transformers.AutoConfig.for_model(kind)
    if kind in text_towers.T5_KINDS:
        assert text_towers.T5_KINDS[kind].items() <= theirs.to_dict().items()
        assert (family.epsilon, 0) == (theirs.layer_norm_epsilon, theirs.pad_token_id)
        return
    if kind == "modernbert":
        for field, (_, default) in text_towers.MODERN_BERT_FIELDS.items():
            assert getattr(theirs, field) == default
        return
    assert family.activation == theirs.hidden_act
    assert family.epsilon == theirs.layer_norm_eps
    assert family.num_heads == theirs.num_attention_heads


def test_siglip_gives_its_embeddings_and_logits():
    imported, params = load(GOLDEN / "hf_siglip")
    io = golden("hf_siglip/io")
    images, towers = channels_last(io["in/pixel_values"]), (imported.image_tower, imported.text_tower)
    image = run(towers[0], params["image_tower"], images)
    text = run(towers[1], params["text_tower"], io["in/input_ids"])
    assert_close(image.embedding, io["out/vision_model_output.pooler_output"])
    assert_close(image.tokens, io["out/vision_model_output.last_hidden_state"])
    assert_close(text.embedding, io["out/text_model_output.pooler_output"])
    assert_close(text.tokens, io["out/text_model_output.last_hidden_state"])
    assert imported.has_bias
    assert_close(logits(*towers, params, images, io["in/input_ids"]), io["out/logits_per_image"], atol=1e-4)


@pytest.mark.parametrize("name", ["hf_siglip_vision", "hf_vit"])
def test_image_towers_give_their_embeddings(name):
    imported, params = load(GOLDEN / name)
    io = golden(f"{name}/io")
    output = run(imported.image_tower, params["image_tower"], channels_last(io["in/pixel_values"]))
    assert_close(output.embedding, io["out/pooler_output"])
    assert_close(output.tokens, io["out/last_hidden_state"])
    assert imported.text_tower is None


@pytest.mark.parametrize("shape", ["own", "wide"])
def test_dinov3_gives_its_tokens_at_any_shape_of_images(shape):
    imported, params = load(GOLDEN / "hf_dinov3")
    io, tower = golden("hf_dinov3/io"), imported.image_tower
    output = run(tower, params["image_tower"], io[f"in/{shape}"])
    assert_close(output.tokens, io[f"out/{shape}"])
    assert_close(output.embedding, io[f"out/{shape}"][:, 0])
    assert (tower.image_size, tower.patch_size, tower.num_registers) == (24, 8, 2)
    # As its own processor, without a file: to 224 pixels, without a crop.
    fitted = image_processors.read(imported.image_processor, 224)
    assert (fitted.preprocessing.fit, fitted.preprocessing.filter, fitted.image_size) == ("squash", "bilinear", 224)


def test_dinov3_with_another_gate_is_refused_by_name(edited):
    with pytest.raises(UserError, match="hidden_act = 'gelu' of a gated MLP is not supported"):
        load(edited("hf_dinov3", hidden_act="gelu"))


def test_names_of_transformers_4_and_5_give_the_same_parameters(tmp_path):
    shutil.copy(GOLDEN / "hf_siglip_vision/config.json", tmp_path)
    shutil.copy(GOLDEN / "hf_siglip_vision/model_v4_names.safetensors", tmp_path / "model.safetensors")
    assert checksums.digest(load(tmp_path)[1]) == checksums.digest(published("hf_siglip_vision"))


def test_berts_embedding_does_not_depend_on_padding_or_unused_positions():
    imported, params = load(GOLDEN / "hf_bert", text_length=8)
    io = golden("hf_bert/io")
    np.testing.assert_array_equal(io["in/input_ids"] != imported.text_tower.padding_id, io["in/attention_mask"] == 1)
    output = run(imported.text_tower, params["text_tower"], io["in/input_ids"])
    assert_close(output.embedding, io["out/pooler_output"])
    assert_close(output.tokens, io["out/last_hidden_state"])


def test_bert_is_found_inside_a_language_model_with_old_names_and_without_a_pooler(edited):
    def as_language_model(arrays):
        old = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): array for name, array in arrays.items()}
        old = {name.replace("LayerNorm.bias", "LayerNorm.beta"): array for name, array in old.items()}
        without_pooler = {f"bert.{name}": array for name, array in old.items() if not name.startswith("pooler")}
        return without_pooler | {"cls.predictions.bias": np.zeros(64, np.float32)}

    imported, params = load(edited("hf_bert", as_language_model))
    assert not imported.text_tower.pooler
    pooled = published("hf_bert")["text_tower"]
    without = {name: array for name, array in pooled.items() if name != "pre_logits"}
    assert checksums.digest(params["text_tower"]) == checksums.digest(without)


def test_the_in_memory_names_of_transformers_5_are_supported(edited):
    new = {
        "encoder.layer.": "layers.",
        "attention.attention.query": "attention.q_proj",
        "attention.attention.key": "attention.k_proj",
        "attention.attention.value": "attention.v_proj",
        "attention.output.dense": "attention.o_proj",
        "intermediate.dense": "mlp.fc1",
        "output.dense": "mlp.fc2",
    }

    def renamed(arrays):
        return {functools.reduce(lambda name, pair: name.replace(*pair), new.items(), k): v for k, v in arrays.items()}

    assert checksums.digest(load(edited("hf_vit", renamed))[1]) == checksums.digest(published("hf_vit"))


def test_half_precision_is_read_as_float32(edited):
    def in_bfloat16(arrays):
        return {name: array.astype(ml_dtypes.bfloat16) for name, array in arrays.items()}

    half, exact = (
        parameters.flatten(params) for params in (load(edited("hf_vit", in_bfloat16))[1], published("hf_vit"))
    )
    for path, array in half.items():
        assert array.dtype == np.float32
        np.testing.assert_allclose(array, exact[path], rtol=2**-7, atol=0.02, err_msg=path)


def test_a_vits_classifier_becomes_the_head(edited):
    random = np.random.default_rng(0)
    kernel, bias = random.normal(size=(5, 24)).astype(np.float32), np.arange(5, dtype=np.float32)

    def classify(arrays):
        tower = {f"vit.{name}": array for name, array in arrays.items() if not name.startswith("pooler")}
        return tower | {"classifier.weight": kernel, "classifier.bias": bias}

    imported, params = load(edited("hf_vit", classify))
    assert imported.num_classes == 5
    assert imported.image_tower.representation_size is None
    np.testing.assert_array_equal(params["head"]["logits"]["kernel"], kernel.T)
    np.testing.assert_array_equal(params["head"]["logits"]["bias"], bias)


def test_sizes_missing_in_the_configuration_are_inferred_from_the_arrays(edited):
    folder, sizes = edited("hf_siglip"), {"num_hidden_layers": 2, "num_attention_heads": 3}
    parts = {"vision_config": "siglip_vision_model", "text_config": "siglip_text_model"}
    towers = {part: {"model_type": kind, **sizes} for part, kind in parts.items()}
    write_json(folder / "config.json", {**json.loads((folder / "config.json").read_text()), **towers})
    sparse, full = read_huggingface(folder), read_huggingface(GOLDEN / "hf_siglip")
    assert (sparse.image_tower, sparse.text_tower) == (full.image_tower, full.text_tower)


def test_larger_images_interpolate_positions_and_larger_patches_of_one_colour_give_the_same_token():
    imported, params = load(GOLDEN / "hf_vit", image_size=64, patch_size=16)
    assert (imported.image_tower.image_size, imported.image_tower.patch_size) == (64, 16)
    new, old = params["image_tower"], published("hf_vit")["image_tower"]
    half_pixel = resample_positions(np.asarray(old["positions"]), 4, keeps_corners=False)
    np.testing.assert_array_equal(new["positions"], half_pixel)
    # A patch of one colour is the same image at any size.
    for colour in np.eye(3, dtype=np.float32):
        tokens = [np.tile(colour, size**2) @ layer["patches"]["kernel"] for size, layer in ((16, new), (8, old))]
        assert_close(*tokens)


@pytest.mark.parametrize("size", [16, 24, 40])
def test_siglip_2_resamples_its_positions_for_other_image_sizes_as_its_authors(size):
    imported, params = load(GOLDEN / "hf_siglip2", image_size=size)
    io = golden("hf_siglip2/io")
    embedding = run(imported.image_tower, params["image_tower"], io[f"in/{size}"]).embedding
    assert_close(embedding, io[f"out/{size}"], atol=1e-5 * np.abs(embedding).max())


def first_layers(folder):
    trees = load(folder)[1], published("hf_vit")
    return (jax.tree.map(np.asarray, params["image_tower"]["patches"]) for params in trees)


def test_other_normalisations_are_folded_into_the_first_layer(edited):
    mean, deviation = [0.1, 0.4, 0.7], [0.2, 0.5, 0.25]
    layer, plain = first_layers(edited("hf_vit", processor={"image_mean": mean, "image_std": deviation}))
    unit = np.random.default_rng(0).random((8 * 8, 3)).astype(np.float32)  # a patch of pixels in [0, 1]
    theirs = ((unit - mean) / deviation).ravel() @ plain["kernel"] + plain["bias"]
    assert_close((2 * unit - 1).ravel() @ layer["kernel"] + layer["bias"], theirs)


@pytest.mark.parametrize(
    "processor",
    [
        {"do_rescale": False, "image_mean": [127.5] * 3, "image_std": [127.5] * 3},
        {"rescale_factor": 2 / 255, "image_mean": [1.0] * 3, "image_std": [1.0] * 3},
        {"rescale_factor": 2 / 255, "do_normalize": False},
    ],
)
def test_other_pixel_ranges_are_folded_into_the_first_layer(edited, processor):
    layer, plain = first_layers(edited("hf_vit", processor=processor))
    assert_close(layer["kernel"], plain["kernel"])
    # Without normalisation theirs sees y + 1 of our y.
    added = 0 if processor.get("do_normalize", True) else plain["kernel"].sum(axis=0)
    assert_close(layer["bias"], plain["bias"] + added)


POSITIONS = "embeddings.position_embeddings"
UP = "encoder.layer.0.intermediate.dense.weight"
MISSING = "no array for image_tower/encoder"


def without(name):
    return lambda arrays: {key: array for key, array in arrays.items() if key != name}


def added(name, *shape):
    return lambda arrays: arrays | {name: np.zeros(shape, np.float32)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, r"model_type = 'llama' cannot be imported; supported are bert, clip, .*vit"),
        ({"model_type": "dinov3_convnext"}, "model_type = 'dinov3_convnext' cannot be imported"),
        ({"hidden_act": "silu"}, "hidden_act = 'silu' is not supported; choose from gelu, gelu_pytorch_tanh"),
        ({"num_hidden_layers": "2"}, "config.json: num_hidden_layers = '2' is not an integer"),
        ({"num_attention_heads": None}, "config.json: num_attention_heads = None is not an integer"),
        ({"layer_norm_eps": "1e-6"}, "config.json: layer_norm_eps = '1e-6' is not a number"),
        *(({"processor": {"rescale_factor": factor}}, "rescale_factor = ") for factor in (0, -1, "a")),
        *(
            ({"processor": {"image_mean": mean}}, "must be three numbers each")
            for mean in (0.5, ["a", "b", "c"], [0.5])
        ),
        ({"change": added("encoder.layer.0.adapter.weight", 2)}, r"unknown arrays: encoder\.layer\.0\.adapter\.weight"),
        (
            {"change": without("encoder.layer.1.output.dense.weight")},
            f"{MISSING}/blocks/1/mlp/down/kernel",
        ),
        (
            {"change": without("encoder.layer.0.output.dense.weight")},
            f"{MISSING}/blocks/0/mlp/down/kernel",
        ),
        ({"change": without("layernorm.bias")}, f"{MISSING}/norm/bias"),
        ({"change": without(POSITIONS)}, "no array embeddings.position_embedding"),
        ({"change": added(POSITIONS, 1, 13, 24)}, "12 patches, which form no square"),
        ({"change": added(UP, 40, 23)}, rf"{UP} \(40, 23\) becomes \(23, 40\), but .*mlp/up/kernel is \(24, 40\)"),
    ],
)
def test_folders_of_another_model_are_refused_by_the_name_of_the_field_or_array(edited, changes, message):
    with pytest.raises(UserError, match=message):
        load(edited("hf_vit", **changes))


def test_a_folder_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        read_huggingface(tmp_path)


@pytest.mark.parametrize(
    "name", ["hf_bert", "hf_clip", "hf_siglip", "hf_prolip", "open_clip", "open_clip_eos", "open_clip_siglip"]
)
def test_positions_of_texts_longer_than_the_stored_ones_are_interpolated_as_jax_does(name):
    positions = published(name)["text_tower"]["positions"]
    imported, params = load(GOLDEN / name, text_length=29)
    assert imported.text_tower.length == 29
    resized = jax.image.resize(positions, (29, positions.shape[1]), "linear")
    assert_close(params["text_tower"]["positions"], resized)


def test_a_siglip_which_pools_its_last_token_is_not_read_for_shorter_texts():
    with pytest.raises(UserError, match="of which the last is pooled; it cannot be read with fewer: text_length = 4"):
        read_huggingface(GOLDEN / "hf_siglip", text_length=4)


@pytest.mark.parametrize("name", [pytest.param("hf_clip", marks=pytest.mark.slow), "hf_vit", "hf_siglip_vision"])
def test_a_decoder_reads_all_tokens_of_a_tower_its_class_token_among_them(name):
    imported, params = load(GOLDEN / name)
    tower = dataclasses.replace(imported.image_tower.without_pooling(), weights=str(GOLDEN / name))
    config = CaptioningConfig(tower)
    task = config.build()
    weights = load_weights(config, abstract_params(task))
    images = np.random.default_rng(0).integers(0, 256, (2, tower.image_size, tower.image_size, 3), np.uint8)
    tokens = run(imported.image_tower, params["image_tower"], images).tokens
    assert tower.class_token is (name != "hf_siglip_vision")
    source = jax.jit(lambda params, images: task.source(params, task.features(params, images)).tokens)
    assert_close(source(weights, images), tokens)
    if tower.class_token:
        without = CaptioningConfig(dataclasses.replace(tower, class_token=False))
        with pytest.raises(UserError, match="has a class token; set --task"):
            load_weights(without, abstract_params(without.build()))
