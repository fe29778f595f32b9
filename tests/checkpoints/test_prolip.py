"""An imported ProLIP has the means, log-variances and logits of its authors' code, recorded with random weights."""

import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from PIL import Image

import lit_het
from lit_het.cli.main import main
from lit_het.data_pipelines.tokenizers import SentencePieceConfig
from lit_het.errors import UserError
from lit_het.heads.gaussian import GaussianContrastiveConfig
from lit_het.runs.importing import ImportOptions, open_imported
from lit_het.tasks import quantities
from lit_het.tasks.contrastive import ContrastiveTask
from tests.checkpoints.huggingface_models import load, run
from tests.cli.test_train import refusal

GOLDEN = Path(__file__).parents[1] / "golden"
FOLDER = GOLDEN / "hf_prolip"
TOKENIZER = GOLDEN / "hf_siglip_tokenizer" / "spiece.model"
assert_close = functools.partial(np.testing.assert_allclose, rtol=0, atol=1e-5)


def recorded():
    with np.load(FOLDER / "io.npz") as file:
        return dict(file)


def unit(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


@pytest.fixture
def edited(tmp_path):
    """Returns a function that copies the folder with other fields of a part of its configuration."""

    def edit(part, arrays=lambda arrays: arrays, **fields):
        folder = shutil.copytree(FOLDER, tmp_path / "prolip")
        config = json.loads((folder / "config.json").read_text())
        config[part] |= fields
        (folder / "config.json").write_text(json.dumps(config))
        changed = arrays(safetensors.numpy.load_file(folder / "model.safetensors"))
        safetensors.numpy.save_file(changed, folder / "model.safetensors")
        return folder

    return edit


@pytest.mark.parametrize(("side", "inputs"), [("image", "images"), ("text", "input_ids")])
def test_means_and_log_variances_are_those_of_the_authors_code(side, inputs):
    imported, params = load(FOLDER)
    io, tower = recorded(), f"{side}_tower"
    embedding = run(getattr(imported, tower), params[tower], io[f"in/{inputs}"]).embedding
    mean, log_variance = np.split(embedding, 2, axis=1)
    assert_close(unit(mean), io[f"out/{side}_mean"])
    assert_close(log_variance, io[f"out/{side}_log_variance"])
    assert np.ptp(io[f"out/{side}_log_variance"], axis=0).max() > 0.1  # they differ between examples


def test_the_task_has_the_logits_of_the_authors_loss():
    found, io = open_imported(str(FOLDER)), recorded()
    params = found.params
    assert isinstance(found.task, ContrastiveTask)
    means, log_variances = (
        [io[f"out/{side}_{kind}"] for side in ("image", "text")] for kind in ("mean", "log_variance")
    )
    variances = [np.exp(x).sum(axis=1) for x in log_variances]
    products = means[0] @ means[1].T - (variances[0][:, None] + variances[1][None]) / 2
    expected = io["out/logit_scale"] * products + io["out/logit_bias"]
    keys = found.task.encode_text(params, jnp.asarray(io["in/input_ids"], jnp.int32))
    classifier = found.task.image_classifier(params, keys)
    features = found.task.features(params, jnp.asarray(io["in/images"]))
    samples = classifier.logits(classifier.inputs(features), None, 0)
    logits = samples.logits(samples.prepare(samples.features), None, jnp.arange(1))[:, 0] + classifier.pair_bias
    assert_close(logits, expected, atol=1e-5 * np.abs(expected).max())


def test_classes_are_ranked_by_means_and_variances_and_embeddings_give_the_authors_scores_of_means():
    found, io = open_imported(str(FOLDER)), recorded()
    task, params = found.task, found.params
    assert isinstance(task, ContrastiveTask)
    # Each class has two prompts.
    prompts = np.array([[0, 1], [1, 2]])
    names = unit(io["out/text_mean"][prompts].mean(axis=1))
    variances = np.exp(io["out/text_log_variance"]).sum(axis=1)[prompts].mean(axis=1)
    without = 100 * io["out/image_mean"] @ names.T
    keys = task.mean_text_key(params, task.encode_text(params, jnp.asarray(io["in/input_ids"], jnp.int32))[prompts])
    classifier = task.image_classifier(params, keys)
    features = task.features(params, jnp.asarray(io["in/images"]))
    image = np.asarray(quantities.embeddings(classifier, features))
    assert_close(100 * image[:, :-2] @ np.asarray(keys)[:, :-2].T, without, atol=1e-3)
    logits = np.asarray(quantities.log_probabilities(classifier, features, jax.random.key(0), 0), np.float64)
    expected = (without - 50 * variances) * io["out/logit_scale"] / 100
    assert_close(logits[:, 1] - logits[:, 0], expected[:, 1] - expected[:, 0], atol=1e-4 * np.abs(expected).max())


def test_an_imported_run_classifies_and_keeps_the_preprocessing_and_the_tokenizer(tmp_path, edited):
    def enlarge(arrays):
        return arrays | {"text.token_embedding.weight": np.resize(arrays["text.token_embedding.weight"], (500, 12))}

    folder = edited("text_cfg", enlarge, vocab_size=500)
    run_dir = tmp_path / "run"
    line = ["import", "--from", str(folder), "--to", str(run_dir), "--tokenizer", str(TOKENIZER)]
    assert main(line) == 0
    model = lit_het.load(run_dir)
    config = model.run.config
    assert isinstance(config.task.head, GaussianContrastiveConfig)
    assert isinstance(config.tokenizer, SentencePieceConfig)
    assert config.tokenizer.remove_punctuation
    assert config.tokenizer.split_underscores
    assert config.tokenizer.lowercase
    assert (config.data.preprocessing.fit, config.data.preprocessing.filter) == ("crop", "bicubic")
    image = Image.fromarray(recorded()["in/images"][0])
    assert sum(model.classify(image, ["a cat", "two dogs"]).values()) == pytest.approx(1, abs=1e-5)
    assert model.noise(image) > 0


def test_without_a_tokenizer_the_import_says_so(capsys, tmp_path):
    assert main(["import", "--from", str(FOLDER), "--to", str(tmp_path / "run")]) == 0
    assert "import it again with --tokenizer FILE" in capsys.readouterr().err
    other = GOLDEN / "hf_clip_tokenizer" / "tokenizer.json"
    line = refusal(capsys, "import", "--from", FOLDER, "--to", tmp_path / "other", "--tokenizer", other)
    assert "give its SentencePiece model" in line


def test_another_image_size_resamples_the_positions():
    found = open_imported(str(FOLDER), ImportOptions(image_size=32))
    assert found.params["image_tower"]["positions"].shape == (16, 16)


@pytest.mark.parametrize(
    ("part", "fields"),
    [
        ("vision_cfg", {"pool_type": "avg"}),
        ("vision_cfg", {"no_ln_pre": True}),
        ("vision_cfg", {"timm_model_name": "vit_base_patch16_224"}),
        ("text_cfg", {"embed_cls": False}),
        ("text_cfg", {"hf_model_name": "roberta-base"}),
    ],
)
def test_other_forms_are_refused_by_the_name_of_the_field(edited, part, fields):
    with pytest.raises(UserError, match=rf"{part}\.{next(iter(fields))} = .* cannot be imported"):
        load(edited(part, **fields))


def test_a_model_without_uncertainty_is_refused(edited):
    def cut(arrays):
        return {name: array for name, array in arrays.items() if "uncertainty" not in name}

    with pytest.raises(UserError, match=r"has no visual\.uncertainty_proj\.weight"):
        load(edited("vision_cfg", cut))


def test_shorter_texts_are_refused_as_padding_counts():
    with pytest.raises(UserError, match="leave out text_length = 4"):
        load(FOLDER, text_length=4)
