"""Exported runs in transformers: the probabilities of `lit-het classify` and the captions of `lit-het caption`."""

import re
import warnings

import numpy as np
import pytest
from PIL import Image

import lit_het
from tests import tiny
from tests.cli.conftest import printed, run_command
from tests.cli.tiny_decoder import NAMES, QUESTION, pixels

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
# Within the six tokens of these runs: the pipeline of a softmax cuts no text.
LABELS = [f"{colour} bar" for colour in tiny.COLOURS]


@pytest.fixture
def images(tmp_path):
    """Images of the model's size, so that nothing depends on resizing."""
    paths = []
    for number, colour in enumerate(((255, 0, 0), (0, 0, 255), (90, 160, 90))):
        pixels = np.random.default_rng(number).integers(0, 60, (32, 32, 3), np.uint8)
        pixels[8:24, 14:18] = colour
        paths.append(tmp_path / f"{number}.png")
        Image.fromarray(pixels).save(paths[-1])
    return [str(path) for path in paths]


def export(run_dir, folder):
    run_command("export", "--checkpoint", run_dir, "--to", "huggingface", "--output", folder)
    return folder


def by_classify(capsys, run_dir, images, figure):
    """Returns the figure of every image and label."""
    labels = ("--labels", ",".join(LABELS), "--samples", "0", "--json")
    answers = printed(capsys, "classify", *images, "--checkpoint", run_dir, *labels)
    return [{found["label"]: found[figure] for found in answer["labels"]} for answer in answers]


def by_pipeline(run_dir, folder, images):
    """Exports the run, and returns the score of every image and label."""
    export(run_dir, folder)
    pipeline = transformers.pipeline("zero-shot-image-classification", model=str(folder), device="cpu")
    answers = pipeline(images, candidate_labels=LABELS, hypothesis_template="{}")
    return [{found["label"]: found["score"] for found in answer} for answer in answers]


def assert_equal(ours, theirs):
    table, other = (np.array([[answer[name] for name in LABELS] for answer in side]) for side in (ours, theirs))
    np.testing.assert_allclose(other, table, rtol=0, atol=1e-5)
    assert np.ptp(table, axis=1).min() > 1e-3  # labels differ
    np.testing.assert_array_equal(np.argsort(other), np.argsort(table))


def test_a_calibrated_softmax_has_equal_probabilities(capsys, calibrated, images, tmp_path):
    theirs = by_pipeline(calibrated, tmp_path / "folder", images)
    assert_equal(by_classify(capsys, calibrated, images, "probability"), theirs)


def test_a_sigmoid_has_the_equal_probability_of_each_label(capsys, sigmoid_lit, images, tmp_path):
    theirs = by_pipeline(sigmoid_lit, tmp_path / "folder", images)
    assert_equal(by_classify(capsys, sigmoid_lit, images, "pair_probability"), theirs)


@pytest.fixture(scope="module")
def exported(decoder, tmp_path_factory):
    """The folder of a decoder."""
    return export(decoder.run_dir, tmp_path_factory.mktemp("exported") / "folder")


def test_greedy_texts_are_those_of_the_run_token_for_token(decoder, exported):
    model, run = transformers.VisionEncoderDecoderModel.from_pretrained(exported), lit_het.load(decoder.run_dir)
    tokenizer, ours = transformers.AutoTokenizer.from_pretrained(exported), decoder.tokenizer.build()
    images = list(pixels(decoder, 8))
    processed = transformers.AutoImageProcessor.from_pretrained(exported)(images, return_tensors="pt").pixel_values
    answers = [run.ask(image, QUESTION, samples=0)[0] for image in images]
    captions = [texts[0] for texts in run.caption(images, samples=0)]
    assert [text.text for text in captions] == NAMES
    for prompt, written in (("a shape:", captions), (f"answer: {QUESTION}", answers)):
        ids = tokenizer([prompt] * len(images), add_special_tokens=False, return_tensors="pt").input_ids
        found = model.generate(processed, decoder_input_ids=ids)[:, ids.shape[1] + 1 :]
        for row, text in zip(found.numpy(), written, strict=True):
            assert tokenizer.decode(row, skip_special_tokens=True).strip() == text.text
            assert tuple(ours.piece(int(number)) for number in row[: len(text.tokens)]) == text.tokens
            assert not row[len(text.tokens) :].any(), "padding"


def test_the_program_of_the_model_card_writes_the_caption(decoder, exported, tmp_path, monkeypatch, capsys):
    (tmp_path / "photo.jpg").write_bytes(tiny.encode_jpeg(pixels(decoder, 1)[0]))
    (tmp_path / "folder").symlink_to(exported)
    card = (exported / "README.md").read_text()
    assert "pipeline_tag: image-to-text" in card
    assert "these prompts: `a shape:`, `answer: {question}`." in card
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    [program] = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    exec(program, {})
    assert capsys.readouterr().out.strip() == lit_het.load(decoder.run_dir).caption("photo.jpg", samples=0)[0].text
