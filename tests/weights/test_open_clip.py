"""Folders of OpenCLIP give its embeddings and logits; what has no counterpart is refused by name."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from lit_het.errors import UserError
from lit_het.towers.image_config import RotaryConfig
from lit_het.weights.formats import open_weights
from lit_het.weights.huggingface import image_processors
from lit_het.weights.huggingface.open_clip import CONFIG, WEIGHTS
from tests.weights.importing import (
    GOLDEN,
    assert_close,
    golden,
    image_tower,
    load,
    loaded,
    logits,
    run,
    unit,
    write_json,
)

NAMES = ("open_clip", "open_clip_eos", "open_clip_siglip", "open_clip_perception")


@pytest.fixture
def edited(tmp_path):
    """Returns a function that copies a recorded folder with other fields of its parts and other arrays."""

    def edit(name, change=lambda arrays: arrays, **parts):
        folder = Path(shutil.copytree(GOLDEN / name, tmp_path / "folder"))
        config = json.loads((folder / CONFIG).read_text())
        for part, fields in parts.items():
            model = config["model_cfg"]
            model[part] = model[part] | fields if part in model else fields
        write_json(folder / CONFIG, config)
        arrays = change(safetensors.numpy.load_file(folder / WEIGHTS))
        safetensors.numpy.save_file(arrays, folder / WEIGHTS)
        return folder

    return edit


def assert_recorded(imported, params, io):
    """Asserts that towers and head give the recorded outputs."""
    towers = imported.image_tower, imported.text_tower
    assert_close(unit(run(towers[0], params["image_tower"], io["in/images"]).embedding), io["out/image"])
    assert_close(unit(run(towers[1], params["text_tower"], io["in/input_ids"]).embedding), io["out/text"])
    scores = logits(*towers, params, io["in/images"], io["in/input_ids"])
    assert_close(scores, io["out/logits"], atol=1e-5 * max(1, np.abs(io["out/logits"]).max()))


@pytest.mark.parametrize("name", NAMES)
def test_a_model_gives_its_embeddings_and_logits(name):
    imported, params = load(GOLDEN / name)
    assert_recorded(imported, params, golden(f"{name}/io"))
    assert imported.has_bias is (name == "open_clip_siglip")


def test_configurations_say_what_the_arrays_do_not():
    clip, eos, siglip, perception = (load(GOLDEN / name)[0] for name in NAMES)
    assert (clip.image_tower.encoder.activation, clip.image_tower.encoder.layer_scale) == ("quick_gelu", True)
    assert (clip.text_tower.pooling, clip.text_tower.end_token, clip.text_tower.encoder.causal) == (
        "end_token",
        None,
        True,
    )
    assert (eos.text_tower.end_token, eos.text_tower.encoder.causal, eos.image_tower.input_norm) == (2, False, False)
    assert (siglip.image_tower.pooling, siglip.text_tower.pooling) == ("attention", "last")
    # As trained on a grid of 384 / 16 = 24 patches; the recorded one has 3, which the same angles cover.
    assert perception.image_tower.rotary == RotaryConfig(10_000.0, 0.0, 24.0, 1.0)
    assert siglip.tokenizer_fields["remove_punctuation"]
    assert clip.tokenizer_fields == {"padding_id": 0}


@pytest.mark.parametrize(
    ("name", "fit", "mean"), [("open_clip", ("crop", 1.0), 0.48145466), ("open_clip_siglip", ("squash", 1.0), 0.5)]
)
def test_images_are_prepared_as_its_own_transform_does(name, fit, mean):
    processor = load(GOLDEN / name)[0].image_processor
    found = image_processors.read(processor, 224)
    assert (found.preprocessing.fit, found.preprocessing.crop_fraction) == fit
    assert (found.preprocessing.filter, found.image_size, found.remarks) == ("bicubic", 24, ())
    assert processor["image_mean"][0] == mean


def test_an_address_is_recognised_and_a_model_of_transformers_beside_it_comes_first(edited):
    folder = edited("open_clip")
    found = open_weights(str(folder))
    assert_recorded(found, loaded(found), golden("open_clip/io"))
    # As timm writes them beside: no model of transformers.
    write_json(folder / "config.json", {"architecture": "vit_base_patch32_clip_224"})
    shutil.copy(folder / WEIGHTS, folder / "model.safetensors")
    assert open_weights(str(folder)).text_tower == found.text_tower
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GOLDEN / "hf_clip" / name, folder)
    assert image_tower(open_weights(str(folder))).image_size == 16


def test_texts_are_shorter_where_padding_is_not_seen():
    io = golden("open_clip/io")
    imported, params = load(GOLDEN / "open_clip", text_length=5)
    text = run(imported.text_tower, params["text_tower"], io["in/input_ids"][:2, :5]).embedding
    assert_close(unit(text), io["out/text"][:2])
    for name in ("open_clip_eos", "open_clip_siglip"):
        with pytest.raises(UserError, match="8 positions; it cannot be read with fewer: text_length = 5"):
            load(GOLDEN / name, text_length=5)


def test_an_image_tower_beside_another_text_tower_is_imported_alone(edited, capsys):
    def other(arrays):
        image = {name: array for name, array in arrays.items() if name.startswith("visual.")}
        return image | {"text.transformer.embeddings.weight": np.zeros((2, 2), np.float32), "logit_scale": np.ones(1)}

    imported, params = load(edited("open_clip", other, text_cfg={"hf_model_name": "roberta-base"}))
    assert imported.text_tower is None
    assert "'roberta-base', cannot be imported" in capsys.readouterr().err
    io = golden("open_clip/io")
    assert_close(unit(run(imported.image_tower, params["image_tower"], io["in/images"]).embedding), io["out/image"])


@pytest.mark.parametrize(
    ("name", "parts", "message"),
    [
        ("open_clip", {"multimodal_cfg": {"layers": 2}}, "is of a CoCa"),
        ("open_clip", {"vision_cfg": {"layers": [3, 4, 6, 3]}}, "is of a ResNet"),
        (
            "open_clip",
            {"vision_cfg": {"pool_type": "avg"}},
            "vision_cfg.pool_type = 'avg' cannot be imported, only 'tok'",
        ),
        ("open_clip", {"vision_cfg": {"qk_norm": True}}, "vision_cfg.qk_norm = True cannot"),
        ("open_clip", {"text_cfg": {"embed_cls": True}}, "text_cfg.embed_cls = True cannot"),
        ("open_clip", {"text_cfg": {"pool_type": "none"}}, "text_cfg.pool_type = 'none' is not one of"),
        ("open_clip", {"text_cfg": {"act_kwargs": {"inplace": True}}}, "act_kwargs = "),
        ("open_clip_siglip", {"vision_cfg": {"timm_model_name": "fastvit_mci2"}}, "'fastvit_mci2' cannot be imported"),
        (
            "open_clip_perception",
            {"vision_cfg": {"timm_model_name": "vit_pe_core_gigantic_patch14_448"}},
            "'vit_pe_core_gigantic_patch14_448' cannot be imported",
        ),
        ("open_clip_perception", {"vision_cfg": {"timm_proj": "linear"}}, "vision_cfg.timm_proj = 'linear' cannot"),
        ("open_clip_siglip", {"vision_cfg": {"timm_pool": "avg"}}, "vision_cfg.timm_pool = 'avg' cannot"),
    ],
)
def test_other_models_are_refused_by_the_name_of_the_field(edited, name, parts, message):
    with pytest.raises(UserError, match=message):
        load(edited(name, **parts))


def test_a_pickle_and_an_incomplete_file_are_refused(edited):
    def without(name):
        return lambda arrays: {key: array for key, array in arrays.items() if key != name}

    folder = edited("open_clip", without("text_projection"))
    with pytest.raises(UserError, match="no array text_projection"):
        load(folder)
    (folder / WEIGHTS).rename(folder / "open_clip_pytorch_model.bin")
    with pytest.raises(UserError, match=r"is a pickle.*as open_clip_model\.safetensors"):
        load(folder)
