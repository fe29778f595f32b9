"""A SigLIP folder in transformers and, imported, in `lit-het zero-shot`: the same answer for every image."""

import io
import json
import shutil

import numpy as np
import pytest
from PIL import Image

from lit_het.cli.main import main
from lit_het.data_pipelines.shards.writing import write_shards
from lit_het.data_pipelines.texts.tokenizers import train_sentencepiece
from lit_het.eval.evaluators.zero_shot import ZeroShot
from lit_het.eval.sets import ImageSet
from lit_het.eval.sets.open_sets import Sets
from lit_het.eval.suite import ZeroShotConfig
from lit_het.models.opening import open_run

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
NAMES = ("cat's eye", "owl, snowy", "St. Bernard", "newt (great crested)", "ice-cream", "MULE")
TEMPLATE = "A photo,  of the {c}!"
SIDE, LENGTH = 24, 32
SIZES = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}
RANDOM = np.random.default_rng(0)
LABELS = RANDOM.integers(0, len(NAMES), 30).tolist()
SQUARES = [(SIDE, SIDE)] * len(LABELS)
# Smaller and larger ones, wide and high.
OBLONGS = [tuple(RANDOM.integers(16, 70, 2).tolist()) for _ in LABELS]
BILINEAR = {"resample": 2, "image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}


@pytest.fixture(scope="module")
def siglip(tmp_path_factory, transformers):
    """A folder with a random model, every parameter redrawn, and a tokenizer, without an image processor."""
    torch, folder = pytest.importorskip("torch"), tmp_path_factory.mktemp("siglip")
    captions = [TEMPLATE.format(c=name).lower() for name in NAMES]
    (folder / "spiece.model").write_bytes(train_sentencepiece(captions, vocabulary_size=80))
    tokenizer = transformers.SiglipTokenizer(
        str(folder / "spiece.model"), model_max_length=LENGTH, model_input_names=["input_ids"]
    )
    tokenizer.save_pretrained(folder)
    config = transformers.SiglipConfig(
        text_config=SIZES | {"vocab_size": len(tokenizer), "max_position_embeddings": LENGTH},
        vision_config=SIZES | {"image_size": SIDE, "patch_size": 8},
    )
    torch.manual_seed(0)
    model = transformers.SiglipModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.2 if parameter.ndim < 2 else 1.5 * parameter[0].numel() ** -0.5
            parameter.add_(scale * torch.randn_like(parameter))
        # Centred embeddings, so that images and names differ much.
        prompts = tokenizer(captions, padding="max_length", truncation=True, return_tensors="pt")
        texts, images = model.text_model(**prompts), model.vision_model(torch.randn(64, 3, SIDE, SIDE))
        model.text_model.head.bias.sub_(texts.pooler_output.mean(0))
        model.vision_model.head.mlp.fc2.bias.sub_(images.pooler_output.mean(0))
        model.logit_scale.fill_(2.0)
        model.logit_bias.fill_(-7.0)
    model.save_pretrained(folder)
    return folder


def image_files(sizes):
    """Returns PNG files of soft patches of colours, with some noise."""
    files, random = [], np.random.default_rng(1)
    for height, width in sizes:
        colours = Image.fromarray(random.integers(0, 256, (3, 3, 3), np.uint8)).resize((width, height))
        noise = random.integers(-20, 21, (height, width, 3))
        pixels = np.clip(np.asarray(colours, np.int64) + noise, 0, 255).astype(np.uint8)
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, "PNG")
        files.append(stream.getvalue())
    return files


def prepare(transformers, folder, in_a_file_of_its_own, **options):
    """Writes how images are prepared, in either of the files that transformers has for it, and returns the processor.

    It is Pillow's, whether or not torchvision is there.
    """
    images = transformers.SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}, **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert isinstance(tokenizer, transformers.SiglipTokenizer)
    processor = transformers.SiglipProcessor(images, tokenizer)
    (images if in_a_file_of_its_own else processor).save_pretrained(folder)
    assert (folder / "preprocessor_config.json").exists() is in_a_file_of_its_own
    return processor


def answers_of(model, processor, files):
    """Returns the probabilities of all names for every image; a softmax over names ignores the model's bias."""
    inputs = processor(
        text=[TEMPLATE.format(c=name) for name in NAMES],
        images=[Image.open(io.BytesIO(file)) for file in files],
        padding="max_length",
        truncation=True,
        return_tensors="pt",
    )
    return model(**inputs).logits_per_image.softmax(-1).detach().numpy()


def write_set(folder, files):
    samples = [
        {"__key__": f"{number:04d}", "png": file, "cls": label}
        for number, (file, label) in enumerate(zip(files, LABELS, strict=True))
    ]
    write_shards(folder / "test", samples, samples_per_shard=13)
    (folder / "classnames.txt").write_text("".join(f"{name}\n" for name in NAMES))
    (folder / "zeroshot_classification_templates.txt").write_text(f"{TEMPLATE}\n")


@pytest.fixture(
    params=[
        pytest.param((SQUARES, False, {}), id="images of the model's size"),
        pytest.param((OBLONGS, False, {}), id="resized by the default filter"),
        pytest.param((OBLONGS, True, BILINEAR), id="resized bilinearly, otherwise normalised, in a file of its own"),
    ]
)
def compared(request, siglip, transformers, tmp_path):
    """Returns an imported run, a set, and what transformers says of its images."""
    sizes, in_a_file_of_its_own, options = request.param
    folder, files = shutil.copytree(siglip, tmp_path / "folder"), image_files(sizes)
    processor = prepare(transformers, folder, in_a_file_of_its_own, **options)
    theirs = answers_of(transformers.AutoModel.from_pretrained(folder), processor, files)
    write_set(tmp_path / "set", files)
    assert main(["import", "--from", str(folder), "--to", str(tmp_path / "run")]) == 0
    return tmp_path / "run", tmp_path / "set", theirs


def test_every_image_has_the_probabilities_of_transformers(compared, tmp_path):
    run_dir, folder, theirs = compared
    run = open_run(run_dir)
    sets = Sets(run.config.data.image_size, run.config.data.preprocessing, lambda: run.tower)
    evaluator = ZeroShotConfig(ImageSet("set", str(folder))).build(sets)
    assert isinstance(evaluator, ZeroShot)
    model, recognition = run.model(), evaluator.recognition
    predictions = recognition.predict(recognition.predictor(model), evaluator.opened.features(model.features))
    ours = np.exp(predictions.log_probabilities)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
    predicted = theirs.argmax(1)
    np.testing.assert_array_equal(ours.argmax(1), predicted)
    assert len(set(predicted.tolist())) > 3  # else models would agree that have little in common

    output = tmp_path / "figures.json"
    assert main(["zero-shot", "--checkpoint", str(run_dir), "--data", str(folder), "--output", str(output)]) == 0
    figures = json.loads(output.read_text())
    assert figures["zero_shot/set/top1"] == pytest.approx((predicted == LABELS).mean())
    nll = -np.log(theirs[np.arange(len(LABELS)), LABELS]).mean()
    assert figures["zero_shot/set/nll"] == pytest.approx(nll, abs=1e-5)
