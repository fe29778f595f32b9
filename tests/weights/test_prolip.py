"""An imported ProLIP has the means, log-variances and logits of its authors' code, recorded with random weights."""

import json
import math
import re
import struct

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
from PIL import Image

import lit_het
from lit_het import parameters
from lit_het.data_pipelines.texts.tokenizers import SentencePieceConfig
from lit_het.errors import UserError
from lit_het.heads.gaussian import GaussianContrastiveConfig
from lit_het.tasks import quantities
from lit_het.tasks.two_towers import ContrastiveTask
from lit_het.towers.text import TextConfig
from lit_het.towers.vit import ViTConfig
from lit_het.weights.huggingface.importing import read_huggingface
from lit_het.weights.importing import ImportOptions, import_weights, open_imported
from tests.weights.importing import GOLDEN, assert_close, golden, load, run, shapes, unit

FOLDER = GOLDEN / "hf_prolip"
TOKENIZER = GOLDEN / "hf_siglip_tokenizer" / "spiece.model"


@pytest.fixture(scope="module")
def io():
    return golden("hf_prolip/io")


@pytest.fixture(scope="module")
def found():
    """Returns the imported task and its parameters."""
    found = open_imported(str(FOLDER))
    assert isinstance(found.task, ContrastiveTask)
    return found.task, found.params


@pytest.mark.parametrize(("side", "inputs"), [("image", "images"), ("text", "input_ids")])
def test_means_and_log_variances_are_those_of_the_authors_code(io, side, inputs):
    imported, params = load(FOLDER)
    tower = f"{side}_tower"
    embedding = run(getattr(imported, tower), params[tower], io[f"in/{inputs}"]).embedding
    mean, log_variance = np.split(embedding, 2, axis=1)
    assert_close(unit(mean), io[f"out/{side}_mean"])
    assert_close(log_variance, io[f"out/{side}_log_variance"])
    assert np.ptp(io[f"out/{side}_log_variance"], axis=0).max() > 0.1  # they differ between examples


def test_the_task_has_the_logits_of_the_authors_loss(found, io):
    task, params = found
    means, log_variances = (
        [io[f"out/{side}_{kind}"] for side in ("image", "text")] for kind in ("mean", "log_variance")
    )
    variances = [np.exp(x).sum(axis=1) for x in log_variances]
    products = means[0] @ means[1].T - (variances[0][:, None] + variances[1][None]) / 2
    expected = io["out/logit_scale"] * products + io["out/logit_bias"]

    @jax.jit
    def logits(params, images, ids):
        classifier = task.image_classifier(params, task.encode_text(params, ids))
        samples = classifier.logits(classifier.inputs(task.features(params, images)), None, 0)
        return samples.logits(samples.prepare(samples.features), None, jnp.arange(1))[:, 0] + classifier.pair_bias

    ours = logits(params, io["in/images"], io["in/input_ids"].astype(np.int32))
    assert_close(ours, expected, atol=1e-5 * np.abs(expected).max())


def test_classes_are_ranked_by_means_and_variances_and_embeddings_give_the_authors_scores_of_means(found, io):
    task, params = found
    # Each class has two prompts.
    prompts = np.array([[0, 1], [1, 2]])
    names = unit(io["out/text_mean"][prompts].mean(axis=1))
    variances = np.exp(io["out/text_log_variance"]).sum(axis=1)[prompts].mean(axis=1)
    without = 100 * io["out/image_mean"] @ names.T

    @jax.jit
    def classify(params, images, ids):
        keys = task.mean_text_key(params, task.encode_text(params, ids)[prompts])
        classifier, features = task.image_classifier(params, keys), task.features(params, images)
        log_probabilities = quantities.log_probabilities(classifier, features, jax.random.key(0), 0)
        return quantities.embeddings(classifier, features), keys, log_probabilities

    found = classify(params, io["in/images"], io["in/input_ids"].astype(np.int32))
    image, keys, logits = (np.asarray(array, np.float64) for array in found)
    assert_close(100 * image[:, :-2] @ keys[:, :-2].T, without, atol=1e-3)
    expected = (without - 50 * variances) * io["out/logit_scale"] / 100
    assert_close(logits[:, 1] - logits[:, 0], expected[:, 1] - expected[:, 0], atol=1e-4 * np.abs(expected).max())


def test_an_imported_run_classifies_and_keeps_the_preprocessing_and_the_tokenizer(tmp_path, edited, io):
    def enlarge(arrays):
        return arrays | {"text.token_embedding.weight": np.resize(arrays["text.token_embedding.weight"], (500, 12))}

    folder = edited("hf_prolip", enlarge, text_cfg={"vocab_size": 500})
    import_weights(str(folder), tmp_path / "run", ImportOptions(tokenizer=TOKENIZER))
    model = lit_het.load(tmp_path / "run")
    config = model.run.config
    assert isinstance(config.task.head, GaussianContrastiveConfig)
    assert isinstance(config.tokenizer, SentencePieceConfig)
    tokenizer = config.tokenizer
    assert (tokenizer.remove_punctuation, tokenizer.split_underscores, tokenizer.lowercase) == (True, True, True)
    assert (config.data.preprocessing.fit, config.data.preprocessing.filter) == ("crop", "bicubic")
    image = Image.fromarray(io["in/images"][0])
    assert sum(model.classify(image, ["a cat", "two dogs"]).values()) == pytest.approx(1, abs=1e-5)
    assert model.noise(image) > 0


def test_without_a_tokenizer_the_import_says_so(capsys):
    open_imported(str(FOLDER))
    assert "import it again with --tokenizer FILE" in capsys.readouterr().err
    other = GOLDEN / "hf_clip_tokenizer" / "tokenizer.json"
    with pytest.raises(UserError, match="give its SentencePiece model"):
        open_imported(str(FOLDER), ImportOptions(tokenizer=other))


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
        load(edited("hf_prolip", **{part: fields}))


def test_a_model_without_uncertainty_is_refused(edited):
    def cut(arrays):
        return {name: array for name, array in arrays.items() if "uncertainty" not in name}

    with pytest.raises(UserError, match=r"has no visual\.uncertainty_proj\.weight"):
        load(edited("hf_prolip", cut))


def test_shorter_texts_are_refused_as_padding_counts():
    with pytest.raises(UserError, match="cannot be read with fewer: text_length = 4"):
        load(FOLDER, text_length=4)


# ---- published sizes, read from configurations and the headers of files of these sizes (of zeros) ----

# Image size, patch size, layers, width, width of a head and of the MLP; the same of texts, and their tokens.
SIZES = {
    "ViT-B-16": ((224, 16, 12, 768, 64, 3072), (12, 768, 12, 3072), (64, 32_100)),
    "ViT-SO400M-14": ((224, 14, 27, 1152, 72, 4304), (27, 1152, 16, 4304), (64, 32_100)),
    "ViT-H-14": ((224, 14, 32, 1280, 80, 5120), (24, 1024, 16, 4096), (77, 49_408)),
}


@pytest.fixture(params=SIZES)
def published(request, tmp_path):
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
    theirs = {}
    with safetensors.safe_open(FOLDER / "model.safetensors", "numpy") as small:
        for name in small.keys():  # noqa: SIM118 (not a dict)
            blocks, replaced = sides[name.partition(".")[0]]
            shape = [replaced[number] for number in small.get_slice(name).get_shape()]
            if "resblocks.1" not in name:
                theirs |= {re.sub(r"\.0\.", f".{block}.", name): shape for block in range(blocks)}
    header, end = {}, 0
    for name, shape in theirs.items():
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
    return SIZES[request.param], theirs, tmp_path


def test_published_sizes_are_read_without_a_parameter_left_over(published):
    sizes, theirs, path = published
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
    total = sum(math.prod(shape) for shape in theirs.values())
    assert parameters.count(shapes(imported)) == total - merged + biases
    assert {name for source in imported.parameter_sources for name in source.array_names} == set(theirs)
