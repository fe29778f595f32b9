"""CLIP and transformers' dual encoders give the recorded zero-shot scores, and CLIP's tokenizer the recorded ids."""

import json
import shutil

import numpy as np
import pytest
import safetensors.numpy
import scipy.special

from lit_het.data_pipelines.texts.tokenizers import HuggingFaceTokenizer, HuggingFaceTokenizerConfig
from lit_het.errors import UserError
from lit_het.weights.huggingface.importing import read_huggingface
from lit_het.weights.importing import tokenizer_config
from tests.refusals import assert_refused
from tests.weights.importing import GOLDEN, assert_close, golden, load, logits, run, unit


def assert_scores(scores, theirs):
    """Asserts that scores are the recorded ones, and their softmax, to 1e-5."""
    assert_close(scores, theirs, atol=1e-5 * np.abs(theirs).max())
    assert_close(scipy.special.softmax(scores, axis=1), scipy.special.softmax(theirs, axis=1))


@pytest.mark.parametrize("name", ["hf_clip", "hf_dual_encoder"])
def test_both_towers_and_the_scores_equal_the_recorded_ones(name):
    imported, params = load(GOLDEN / name)
    io, towers = golden(f"{name}/io"), (imported.image_tower, imported.text_tower)
    for part, inputs, theirs in (("image", "images", "image_embeds"), ("text", "input_ids", "text_embeds")):
        tower = getattr(imported, f"{part}_tower")
        embedding = run(tower, params[f"{part}_tower"], io[f"in/{inputs}"]).embedding
        assert_close(unit(embedding), io[f"out/{theirs}"])
    theirs = io["out/logits_per_image"]
    assert np.ptp(theirs, axis=1).min() > 0.5  # the texts differ
    assert_scores(logits(*towers, params, io["in/images"], io["in/input_ids"]), theirs)
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
    io, towers = golden("hf_clip/io"), (imported.image_tower, imported.text_tower)
    assert_scores(logits(*towers, params, io["in/images"], io["in/input_ids"]), io["out/logits_per_image"])


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
    io = golden("hf_clip/io")
    assert_close(
        unit(run(imported.image_tower, params["image_tower"], io["in/images"]).embedding), io["out/image_embeds"]
    )


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


@pytest.fixture
def old_clip(tmp_path):
    """Recorded vocabulary and merges of CLIP in the files of before tokenizer.json."""
    model = json.loads((GOLDEN / "hf_clip_tokenizer/tokenizer.json").read_text("utf-8"))["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in model["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), "utf-8")
    return tmp_path


def test_clips_vocabulary_and_merges_give_the_recorded_ids(old_clip):
    texts, ids = zip(*json.loads((GOLDEN / "hf_clip_tokenizer/ids.json").read_text("utf-8")), strict=True)
    np.testing.assert_array_equal(tokenizer_config(old_clip / "vocab.json", len(ids[0])).build()(list(texts)), ids)


def test_clips_vocabulary_is_found_beside_the_weights(edited, old_clip):
    folder = edited("hf_clip")
    shutil.copytree(old_clip, folder, dirs_exist_ok=True)
    assert read_huggingface(folder).tokenizer == folder / "vocab.json"
    (folder / "merges.txt").unlink()
    assert read_huggingface(folder).tokenizer is None


@pytest.mark.parametrize("content", ["[]", "{", '{"a": 0}'])
def test_a_vocabulary_that_is_not_clips_is_refused(old_clip, content):
    with_name = old_clip / "vocab.json"
    with_name.write_text(content)
    assert_refused(
        r"vocab\.json: .*give the tokenizer\.json of the model", HuggingFaceTokenizerConfig(with_name, 8).build
    )


def test_the_configured_padding_token_is_taken(old_clip):
    settings = old_clip / "tokenizer_config.json"
    vocabulary = json.loads((old_clip / "vocab.json").read_text())
    for token in ("!", {"content": "!"}):
        settings.write_text(json.dumps({"pad_token": token}))
        config = tokenizer_config(old_clip / "vocab.json", 8)
        assert config.build()(["a cat"])[0, -1] == vocabulary["!"]
    settings.write_text('{"pad_token": "none of these"}')
    assert_refused("the padding token .none of these. is not in", tokenizer_config, old_clip / "vocab.json", 8)


@pytest.mark.parametrize("changes", [{}, {"normalizer": None}, {"padding_side": "left"}], ids=str)
def test_the_tokenizer_json_of_a_siglip_is_taken_if_it_lowercases_and_pads_on_the_right(edited, changes, capsys):
    """transformers 4 lowercases texts of SigLIP 2 in code, so that the file alone would give other ids."""
    folder = edited("hf_siglip")
    fields = json.loads((GOLDEN / "hf_clip_tokenizer/tokenizer.json").read_text("utf-8")) | changes
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    (folder / "tokenizer_config.json").write_text(json.dumps({"padding_side": "right"} | changes))
    assert read_huggingface(folder).tokenizer == (None if changes else folder / "tokenizer.json")
    assert ("padded on the right" in capsys.readouterr().err) == ("padding_side" in changes)


def test_beside_an_unknown_text_tower_the_image_tower_is_imported_alone(edited, capsys):
    imported = read_huggingface(edited("hf_dual_encoder", text_config={"model_type": "swin"}))
    assert imported.text_tower is None
    assert imported.image_tower == read_huggingface(GOLDEN / "hf_dual_encoder").image_tower
    assert "the text tower, 'swin', cannot be imported" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "hf_dual_encoder",
            {"vision_config": {"model_type": "swin"}},
            r"vision_config.model_type = 'swin' cannot be imported; supported are clip_vision_model,",
        ),
        (
            "hf_clip",
            {"change": lambda arrays: {k: arrays[k] for k in arrays.keys() - {"text_projection.weight"}}},
            r"no array text_projection.weight; give a CLIPModel or a CLIPTextModelWith",
        ),
        ("hf_clip", {"text_config": {"eos_token_id": 52}}, "end_token = 52 is not below the vocabulary of 52 tokens"),
    ],
)
def test_unknown_towers_missing_projections_and_impossible_end_tokens_are_refused(edited, name, changes, message):
    with pytest.raises(UserError, match=message):
        read_huggingface(edited(name, **changes))
