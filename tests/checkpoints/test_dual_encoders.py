"""CLIP and transformers' dual encoders give the recorded zero-shot scores, and CLIP's tokenizer the recorded ids."""

import functools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import scipy.special

from lit_het.checkpoints.huggingface.importing import read_huggingface
from lit_het.data_pipelines.tokenizers import HuggingFaceTokenizer
from lit_het.errors import UserError
from lit_het.runs.importing import tokenizer_config
from tests.checkpoints.huggingface_models import load, logits, run

GOLDEN = Path(__file__).parents[1] / "golden"
assert_close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5)


@pytest.fixture
def edited(tmp_path):
    """Returns a function that copies a folder with other arrays and another configuration."""

    def edit(name, change=lambda arrays: arrays, **config):
        folder = shutil.copytree(GOLDEN / name, tmp_path / "folder")
        arrays = change(safetensors.numpy.load_file(folder / "model.safetensors"))
        safetensors.numpy.save_file(arrays, folder / "model.safetensors")
        stored = json.loads((folder / "config.json").read_text())
        for field, value in config.items():
            stored[field] = {**stored[field], **value} if isinstance(value, dict) else value
        (folder / "config.json").write_text(json.dumps(stored))
        return folder

    return edit


def recorded(name):
    with np.load(GOLDEN / name / "io.npz") as file:
        return dict(file)


@pytest.mark.parametrize("name", ["hf_clip", "hf_dual_encoder"])
def test_both_towers_and_the_scores_equal_the_recorded_ones(name):
    imported, params = load(GOLDEN / name)
    io = recorded(name)
    for part, inputs, theirs in (("image", "images", "image_embeds"), ("text", "input_ids", "text_embeds")):
        tower = getattr(imported, f"{part}_tower")
        embedding = run(tower, params[f"{part}_tower"], io[f"in/{inputs}"]).embedding
        assert_close(embedding / np.linalg.norm(embedding, axis=1, keepdims=True), io[f"out/{theirs}"])
    scores = logits(imported, params, io["in/images"], io["in/input_ids"])
    theirs = io["out/logits_per_image"]
    assert np.ptp(theirs, axis=1).min() > 0.5  # the texts differ
    assert_close(scores, theirs, atol=1e-5 * np.abs(theirs).max())
    assert_close(scipy.special.softmax(scores, axis=1), scipy.special.softmax(theirs, axis=1))
    assert not imported.has_bias


def test_clip_may_be_read_for_shorter_texts():
    imported, params = load(GOLDEN / "hf_clip", text_length=5)
    full, all_params = load(GOLDEN / "hf_clip")
    ids = np.array([[50, 3, 51, 51, 51, 51, 51, 51]])
    short = run(imported.text_tower, params["text_tower"], ids[:, :5]).embedding
    assert_close(short, run(full.text_tower, all_params["text_tower"], ids).embedding)


def test_clips_old_configurations_pool_the_largest_id(edited):
    """Their end token, 2, is not in the texts; the authors of CLIP take the largest id."""
    imported, params = load(edited("hf_clip", text_config={"eos_token_id": 2}))
    assert imported.text_tower.end_token is None
    io = recorded("hf_clip")
    theirs = io["out/logits_per_image"]
    scores = logits(imported, params, io["in/images"], io["in/input_ids"])
    assert_close(scores, theirs, atol=1e-5 * np.abs(theirs).max())


def test_the_names_of_transformers_4_have_the_prefix_of_the_tower_twice(edited):
    """A CLIP image tower in a dual encoder is itself a model with a part named vision_model."""

    def as_dual_encoder(arrays):
        bert = safetensors.numpy.load_file(GOLDEN / "hf_dual_encoder/model.safetensors")
        image = {f"vision_model.{name}": array for name, array in arrays.items() if name.startswith("vision_model.")}
        text = {name: array for name, array in bert.items() if name.startswith("text_")}
        rest = {name: arrays[name] for name in ("visual_projection.weight", "logit_scale")}
        return image | text | rest

    bert = json.loads((GOLDEN / "hf_dual_encoder/config.json").read_text())["text_config"]
    imported, params = load(edited("hf_clip", as_dual_encoder, model_type="vision-text-dual-encoder", text_config=bert))
    embedding = run(imported.image_tower, params["image_tower"], recorded("hf_clip")["in/images"]).embedding
    theirs = recorded("hf_clip")["out/image_embeds"]
    assert_close(embedding / np.linalg.norm(embedding, axis=1, keepdims=True), theirs)


def test_clips_tokenizer_gives_the_recorded_ids():
    texts, ids = zip(*json.loads((GOLDEN / "hf_clip_tokenizer/ids.json").read_text("utf-8")), strict=True)
    tokenizer = tokenizer_config(GOLDEN / "hf_clip_tokenizer/tokenizer.json", len(ids[0])).build()
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    np.testing.assert_array_equal(tokenizer(list(texts)), ids)


def test_the_tokenizer_beside_the_weights_is_found_and_sentencepiece_preferred(edited):
    folder = edited("hf_clip")
    assert read_huggingface(folder).tokenizer is None
    shutil.copy(GOLDEN / "hf_clip_tokenizer/tokenizer.json", folder)
    assert read_huggingface(folder).tokenizer == folder / "tokenizer.json"
    shutil.copy(GOLDEN / "hf_siglip_tokenizer/spiece.model", folder)
    assert read_huggingface(folder).tokenizer == folder / "spiece.model"


def test_the_tokenizer_json_of_a_siglip_is_not_taken(tmp_path):
    """transformers lowercases texts of SigLIP 2 in code, so that the file alone would give other ids."""
    folder = shutil.copytree(GOLDEN / "hf_siglip", tmp_path / "folder")
    shutil.copy(GOLDEN / "hf_clip_tokenizer/tokenizer.json", folder)
    assert read_huggingface(folder).tokenizer is None


def test_an_unknown_image_tower_of_a_dual_encoder_is_named(edited):
    message = r"vision_config.model_type = 'swin' cannot be imported; supported are clip_vision_model,"
    with pytest.raises(UserError, match=message):
        read_huggingface(edited("hf_dual_encoder", vision_config={"model_type": "swin"}))


def test_beside_an_unknown_text_tower_the_image_tower_is_imported_alone(edited, capsys):
    imported = read_huggingface(edited("hf_dual_encoder", text_config={"model_type": "swin"}))
    assert imported.text_tower is None
    assert imported.image_tower == read_huggingface(GOLDEN / "hf_dual_encoder").image_tower
    assert "the text tower, 'swin', cannot be imported" in capsys.readouterr().err


def test_a_text_tower_of_clip_without_its_projection_names_the_models_that_have_it(edited):
    def without_projection(arrays):
        return {name: array for name, array in arrays.items() if name != "text_projection.weight"}

    with pytest.raises(UserError, match=r"no array text_projection.weight; give a CLIPModel or a CLIPTextModelWith"):
        read_huggingface(edited("hf_clip", without_projection))


def test_an_end_token_outside_the_vocabulary_is_refused(edited):
    with pytest.raises(UserError, match="end_token = 52 is not below the vocabulary of 52 tokens"):
        read_huggingface(edited("hf_clip", text_config={"eos_token_id": 52}))
