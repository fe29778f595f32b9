"""big_vision files of all versions are imported with their recorded outputs, and exported unchanged."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lit_het import parameters
from lit_het.errors import UserError
from lit_het.patches import cut
from lit_het.patches_config import Patches
from lit_het.towers.bert import BertConfig
from lit_het.towers.experts_config import ExpertsConfig
from lit_het.towers.image_config import RotaryConfig
from lit_het.towers.text import TextConfig
from lit_het.towers.text_config import T5Config
from lit_het.towers.vit import ViTConfig
from lit_het.weights.big_vision.exporting import write_npz
from lit_het.weights.big_vision.importing import read_big_vision
from lit_het.weights.resample import resample_patches
from tests.towers.models import with_encoder
from tests.weights.importing import (
    GOLDEN,
    assert_recorded,
    golden,
    image_tower,
    loaded,
    logits,
    params_of,
    pixels,
    read_npz,
    run,
    save,
    shapes,
    text_tower,
    unit,
)

VIT = params_of(golden("vit_sovit_shape"))
TWO_TOWERS = params_of(golden("two_towers_siglip"))
RANDOM = np.random.default_rng(0)


def flat(imported):
    return {name: np.asarray(array) for name, array in parameters.flatten(loaded(imported)).items()}


def exported(folder, imported):
    """Returns the arrays of the file that an imported model is exported to."""
    write_npz(folder / "out.npz", imported.image_tower, imported.text_tower, loaded(imported))
    return read_npz(folder / "out.npz")


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(actual[name], expected[name], err_msg=name)


def normal(*shape):
    return RANDOM.standard_normal(shape, np.float32)


# Recorded outputs.


def logits_of_classes(params, output):
    kernel, bias = (np.asarray(params["head"]["logits"][name]) for name in ("kernel", "bias"))
    return np.asarray(output.embedding) @ kernel + bias


def test_a_classifier_with_attention_pooling_gives_the_recorded_logits():
    recording, imported = golden("vit_sovit_shape"), read_big_vision(GOLDEN / "vit_sovit_shape.npz")
    config, params = image_tower(imported), loaded(imported)
    assert (config.image_size, config.patch_size, config.pooling, imported.num_classes) == (28, 7, "attention", 5)
    assert (config.encoder.depth, config.encoder.mlp_width, config.encoder.num_heads) == (3, 52, 3)
    output = run(config, params["image_tower"], pixels(recording["image"]))
    assert_recorded(output.tokens, recording["out/encoded"])
    assert_recorded(output.embedding, recording["out/pre_logits"])
    assert_recorded(logits_of_classes(params, output), recording["output"])


def test_a_file_with_names_from_before_flax_linen_gives_the_recorded_logits():
    recording, imported = golden("ckpt_vit_old_names_expected"), read_big_vision(GOLDEN / "ckpt_vit_old_names.npz")
    params = loaded(imported)
    output = run(imported.image_tower, params["image_tower"], pixels(recording["image"]))
    assert_recorded(output.embedding, recording["pre_logits"])
    assert_recorded(logits_of_classes(params, output), recording["output"])


def test_siglips_towers_temperature_and_bias_give_the_recorded_embeddings_and_logits():
    recording, imported = golden("two_towers_siglip"), read_big_vision(GOLDEN / "two_towers_siglip.npz")
    params, image, text = loaded(imported), pixels(recording["image"]), recording["text"]
    towers = imported.image_tower, imported.text_tower
    assert_recorded(unit(run(towers[0], params["image_tower"], image).embedding), recording["zimg"])
    assert_recorded(unit(run(towers[1], params["text_tower"], text).embedding), recording["ztxt"])
    assert_recorded(logits(*towers, params, image, text), recording["logits"])


@pytest.mark.parametrize("size", [16, 24, 40])
def test_naflex_gives_its_embeddings_at_its_own_and_at_other_sizes_of_images(size):
    recording = golden("naflex")
    imported = read_big_vision(GOLDEN / "naflex.npz", image_size=size)
    params = loaded(imported)
    image = run(imported.image_tower, params["image_tower"], recording[f"in/{size}"]).embedding
    assert_recorded(unit(image), recording[f"out/{size}"])
    text = run(imported.text_tower, params["text_tower"], recording["in/text"]).embedding
    assert_recorded(unit(text), recording["out/text"])


def test_naflex_without_an_image_size_takes_images_of_any_shape_beside_padding():
    recording, imported = golden("naflex"), read_big_vision(GOLDEN / "naflex.npz")
    tower = image_tower(imported)
    assert (tower.image_size, tower.patches) == (24, Patches(8, 9))
    more = dataclasses.replace(tower, max_patches=26)
    for size in (16, 24, 40):
        images = np.stack([cut(Patches(8, 26), image) for image in recording[f"in/{size}"]])
        assert_recorded(unit(run(more, loaded(imported)["image_tower"], images).embedding), recording[f"out/{size}"])


# Layouts and versions.


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vit_sovit_shape", "vit_sovit_shape"),
        ("two_towers_siglip", "two_towers_siglip"),
        ("ckpt_two_towers_siglip_style", "ckpt_two_towers_siglip_style"),
        ("ckpt_vit_old_names", "ckpt_vit_old_names_expected"),
    ],
)
def test_import_and_export_give_the_same_file_with_current_names(name, expected, tmp_path):
    imported = read_big_vision(GOLDEN / f"{name}.npz")
    assert_same(exported(tmp_path, imported), params_of(golden(expected)))
    assert_same(flat(read_big_vision(tmp_path / "out.npz")), flat(imported))
    assert [file.name for file in tmp_path.iterdir()] == ["out.npz"]


def test_stacked_blocks_are_exported_separately(tmp_path):
    found = exported(tmp_path, read_big_vision(GOLDEN / "ckpt_vit_scan_layout.npz"))
    for name, array in params_of(golden("ckpt_vit_scan_layout")).items():
        blocks = [array] if "encoderblock/" not in name else array
        for number, block in enumerate(blocks):
            apart = name.replace("encoderblock/", f"encoderblock_{number}/")
            np.testing.assert_array_equal(found[apart], block, err_msg=apart)


def renamed(arrays, *changes):
    for old, new in changes:
        arrays = {name.replace(old, new): array for name, array in arrays.items()}
    return arrays


def with_stacked_blocks(arrays):
    """Returns both towers with stacked blocks, as written by big_vision with scan (SigLIP 2)."""
    apart = {name: array for name, array in arrays.items() if "encoderblock_" not in name}
    firsts = [name for name in arrays if "encoderblock_0/" in name]
    names = {name: [name, name.replace("block_0", "block_1")] for name in firsts}
    return apart | {
        first.replace("encoderblock_0", "encoderblock"): np.stack([arrays[name] for name in both])
        for first, both in names.items()
    }


def with_doubled_positions(arrays):
    """Returns a text tower whose positions are split into two arrays, each exactly half."""
    half = arrays["txt/pos_embedding"] / 2
    return {**arrays, "txt/pos_embedding": half, "txt/Encoder_0/pos_embedding": half}


def prefixed(arrays, prefix):
    return {f"{prefix}{name}": array for name, array in arrays.items()} | {"opt/state/step": np.zeros(())}


@pytest.mark.parametrize(
    ("arrays", "variant"),
    [
        pytest.param(VIT, renamed(VIT, ("MAPHead_0/", "")), id="pooling inlined"),
        pytest.param(VIT, renamed(VIT, ("pos_emb", "Transformer/pos_emb")), id="positions in the encoder"),
        pytest.param(VIT, prefixed(VIT, "opt/target/"), id="below the old optimizer"),
        pytest.param(VIT, prefixed(VIT, "opt/params/"), id="below the optimizer"),
        pytest.param(TWO_TOWERS, prefixed(TWO_TOWERS, "params/"), id="below params, beside the optimizer"),
        pytest.param(TWO_TOWERS, with_stacked_blocks(TWO_TOWERS), id="two towers, stacked"),
        pytest.param(TWO_TOWERS, with_doubled_positions(TWO_TOWERS), id="positions added twice"),
    ],
)
def test_every_layout_of_the_same_model_gives_the_same_parameters(arrays, variant, tmp_path):
    expected = read_big_vision(save(tmp_path / "plain.npz", arrays))
    actual = read_big_vision(save(tmp_path / "variant.npz", variant))
    assert (actual.image_tower, actual.text_tower) == (expected.image_tower, expected.text_tower)
    assert_same(flat(actual), flat(expected))


def test_one_tower_of_a_two_tower_file_can_be_read_alone(tmp_path):
    path = GOLDEN / "ckpt_two_towers_siglip_style.npz"
    both, image, text = (read_big_vision(path, subtree) for subtree in ("", "img", "txt"))
    assert (image.image_tower, image.text_tower, image.num_classes) == (both.image_tower, None, None)
    assert (text.image_tower, text.text_tower, text.has_bias) == (None, both.text_tower, False)
    assert image_tower(both).projection_size == text_tower(both).embedding_size == 8
    head = {name: array for name, array in flat(both).items() if name.startswith("head/")}
    assert_same(head | flat(image) | flat(text), flat(both))


def test_bfloat16_is_widened_and_summed_in_float32(tmp_path):
    def rounded(array):
        return array.astype(jnp.bfloat16)

    old_names = golden("ckpt_vit_old_names")
    path = save(tmp_path / "half.npz", {name: rounded(array) for name, array in old_names.items()})
    assert {array.dtype.str for array in read_npz(path).values()} == {"|V2"}
    actual = flat(read_big_vision(path))
    exact = {name: rounded(array).astype(np.float32) for name, array in old_names.items()}
    assert_same(actual, flat(read_big_vision(save(tmp_path / "exact.npz", exact))))


def test_pre_logits_become_the_representation(tmp_path):
    dense = {"pre_logits/kernel": normal(24, 10), "pre_logits/bias": normal(10), "head/kernel": normal(10, 5)}
    imported = read_big_vision(save(tmp_path / "vit.npz", VIT | dense))
    assert (image_tower(imported).representation_size, imported.num_classes) == (10, 5)
    params = flat(imported)
    for part in ("kernel", "bias"):
        np.testing.assert_array_equal(params[f"image_tower/pre_logits/{part}"], dense[f"pre_logits/{part}"])
    np.testing.assert_array_equal(params["head/logits/kernel"], dense["head/kernel"])


def test_text_pooling_is_attention_if_the_file_has_it_and_the_given_one_otherwise(tmp_path):
    pooled = {name.replace("img/", "txt/"): array for name, array in TWO_TOWERS.items() if "MAPHead_0" in name}
    with_attention = read_big_vision(save(tmp_path / "map.npz", TWO_TOWERS | pooled))
    assert text_tower(with_attention).pooling == "attention"
    loaded(with_attention)
    plain = read_big_vision(GOLDEN / "two_towers_siglip.npz", text_pooling="max")
    assert text_tower(plain).pooling == "max"


# Other sizes.


def test_positions_of_a_larger_image_equal_big_visions():
    imported = read_big_vision(GOLDEN / "ckpt_vit_old_names.npz", image_size=24)
    positions = flat(imported)["image_tower/positions"]
    assert_recorded(positions, golden("ckpt_vit_old_names_expected")["pos_embedding_at_24"][0])


@pytest.mark.parametrize(("image_size", "patch_size", "side"), [(60, 10, 6), (30, 10, 3), (28, 14, 2)])
def test_other_patch_sizes_resize_kernels_and_positions_as_in_flexivit(image_size, patch_size, side):
    imported = read_big_vision(GOLDEN / "vit_sovit_shape.npz", image_size=image_size, patch_size=patch_size)
    params = flat(imported)
    grid = VIT["pos_embedding"].reshape(4, 4, 24)
    positions = jax.image.resize(grid, (side, side, 24), "linear").reshape(-1, 24)
    np.testing.assert_allclose(params["image_tower/positions"], positions, atol=1e-6)
    kernel = resample_patches(VIT["embedding/kernel"], patch_size)
    np.testing.assert_array_equal(params["image_tower/patches/kernel"], kernel.reshape(-1, 24))


# Unreadable files give a one-line error.


def without(arrays, name):
    return {key: array for key, array in arrays.items() if key != name}


BLOCK = "Transformer/encoderblock_1/MultiHeadDotProductAttention_0"


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({**VIT, "extra/kernel": normal(2)}, "unknown arrays: extra/kernel"),
        (without(VIT, "embedding/bias"), "no array for image_tower/patches/bias"),
        (without(VIT, "embedding/kernel"), "becomes image_tower/patches/kernel"),
        (without(VIT, f"{BLOCK}/key/bias"), "no array for image_tower/encoder/blocks/1/attention/key/bias"),
        ({**VIT, f"{BLOCK}/key/bias": normal(3, 7)}, f"{BLOCK}/key/bias .3, 7. becomes .21"),
        ({**VIT, f"{BLOCK}/key/bias": normal(24)}, f"{BLOCK}/key/bias .24,. cannot become"),
        ({**VIT, "embedding/kernel": normal(147, 24)}, "embedding/kernel has shape"),
        ({**VIT, "pos_embedding": normal(1, 15, 24)}, "pos_embedding holds 15 positions"),
        ({**VIT, "pos_embedding": normal(2, 16, 24)}, r"pos_embedding \(2, 16, 24\) cannot"),
        (without(VIT, "pos_embedding"), "no image size; set it with --image-size"),
        (without(TWO_TOWERS, "txt/head/kernel"), "text_tower/projection/kernel"),
        ({**TWO_TOWERS, "t": normal(2)}, r"t \(2,\) cannot become"),
        ({name: VIT[name] for name in ("embedding/kernel", "pos_embedding")}, "a block"),
    ],
)
def test_files_of_another_model_are_refused_with_the_name_of_the_array(arrays, message, tmp_path):
    with pytest.raises(UserError, match=message) as error:
        loaded(read_big_vision(save(tmp_path / "file.npz", arrays)))
    assert "\n" not in str(error.value)


def test_missing_arrays_of_blocks_are_listed(tmp_path):
    arrays = golden("ckpt_vit_old_names")
    block = next(name for name in arrays if "encoderblock_1/" in name)
    with pytest.raises(UserError, match=r"no array for image_tower/encoder/blocks/1/[a-z_/]+$"):
        loaded(read_big_vision(save(tmp_path / "x.npz", without(arrays, block))))


@pytest.mark.parametrize("sizes", [{"image_size": 0}, {"patch_size": 0}])
def test_a_size_of_zero_is_refused(sizes):
    with pytest.raises(UserError, match="= 0 must be at least 1"):
        read_big_vision(GOLDEN / "ckpt_vit_old_names.npz", **sizes)


@pytest.mark.parametrize("array", [np.array(["a", "b"]), np.ones((1, 1), np.complex64)])
def test_arrays_that_are_not_real_numbers_are_refused(array, tmp_path):
    arrays = golden("ckpt_vit_old_names")
    name = next(name for name in arrays if name.endswith("head/bias"))
    wrong = np.broadcast_to(array.ravel()[0], arrays[name].shape)
    found = read_big_vision(save(tmp_path / "x.npz", {**arrays, name: wrong}))
    with pytest.raises(UserError, match=r"head/bias holds .*, not real numbers"):
        loaded(found)


def test_folders_damaged_headers_and_truncated_files_are_refused_as_npz(tmp_path):
    (tmp_path / "x.npz").mkdir()
    with pytest.raises(UserError, match=r"x\.npz is not a readable .npz file"):
        read_big_vision(tmp_path / "x.npz")
    np.savez_compressed(tmp_path / "y.npz", a=np.arange(1000.0))
    data = (tmp_path / "y.npz").read_bytes()
    whole = save(tmp_path / "z.npz", VIT).read_bytes()
    for name, damaged in (("y", data[:60] + b"\xff" * 30 + data[90:]), ("z", whole[:-1000])):
        (tmp_path / f"{name}.npz").write_bytes(damaged)
        with pytest.raises(UserError, match=rf"{name}\.npz is not a readable \.npz file") as error:
            read_big_vision(tmp_path / f"{name}.npz")
        assert "\n" not in str(error.value)


def test_pickled_objects_are_refused_without_unpickling(tmp_path):
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("unpickled",))

    path = save(tmp_path / "file.npz", {**VIT, "cls": np.array([Trap()], dtype=object)})
    with pytest.raises(UserError, match=r"cls.npy': the array holds pickled objects") as error:
        read_big_vision(path)
    assert "\n" not in str(error.value)


# Models that big_vision does not support.

IMAGE, TEXT = ViTConfig(32, 16), TextConfig()


@pytest.mark.parametrize(
    ("image", "text", "field"),
    [
        (with_encoder(IMAGE, experts=ExpertsConfig()), TEXT, "experts"),
        (with_encoder(IMAGE, layer_scale=True), TEXT, "layer_scale"),
        (with_encoder(IMAGE, activation="gelu"), TEXT, "activation"),
        (IMAGE, with_encoder(TEXT, norm_placement="after"), "norm_placement"),
        (IMAGE, with_encoder(TEXT, norm_epsilon=1e-5), "norm_epsilon"),
        (IMAGE, dataclasses.replace(TEXT, positions="sinusoidal"), "positions"),
        (IMAGE, dataclasses.replace(TEXT, pooling="end_token"), "pooling"),
        (IMAGE, with_encoder(TEXT, causal=True), "causal"),
        (IMAGE, BertConfig(), "activation"),
        (IMAGE, with_encoder(BertConfig(pooler=True), activation="gelu_tanh"), "pooler"),
        (IMAGE, with_encoder(BertConfig(mean_pooling=True), activation="gelu_tanh"), "mean_pooling"),
        (IMAGE, T5Config(), "big_vision has no T5Config; export with --to lit-het"),
        (dataclasses.replace(IMAGE, num_registers=4), TEXT, "num_registers"),
        (dataclasses.replace(IMAGE, input_norm=True), TEXT, "input_norm"),
        (dataclasses.replace(IMAGE, positions="none"), TEXT, "positions"),
        (dataclasses.replace(IMAGE, rotary=RotaryConfig()), TEXT, "rotary"),
        (dataclasses.replace(IMAGE, pooling="none"), TEXT, "pooling"),
        (dataclasses.replace(IMAGE, projection_size=8), None, "projection_size"),
    ],
)
def test_a_model_that_big_vision_does_not_support_is_not_exported(image, text, field, tmp_path):
    with pytest.raises(UserError, match=field):
        write_npz(tmp_path / "out.npz", image, text, {})
    assert not list(tmp_path.iterdir())


def test_parameters_that_big_vision_does_not_have_are_named(tmp_path):
    params = {"head": {"image_covariance": {"kernel": normal(2)}}}
    with pytest.raises(UserError, match="no parameter for head/image_covariance/kernel"):
        write_npz(tmp_path / "out.npz", IMAGE, TEXT, params)


def test_pool_type_0_is_read_where_it_is_chosen(tmp_path):
    arrays = {name: array for name, array in VIT.items() if name != "cls" and not name.startswith("MAPHead")}
    found = [read_big_vision(save(tmp_path / "in.npz", arrays), image_pooling=pooling) for pooling in ("mean", "first")]
    assert [image_tower(one).pooling for one in found] == ["mean", "first"]


def test_sine_cosine_positions_are_not_stored(tmp_path):
    arrays = without(VIT, "pos_embedding")
    imported = read_big_vision(save(tmp_path / "in.npz", arrays), image_size=28)
    assert "positions" not in shapes(imported)["image_tower"]
    assert_same(exported(tmp_path, imported), arrays)
