"""`lit-het export --to huggingface` of a decoder: the model card's program writes the captions of the run."""

import re

import pytest

import lit_het
from lit_het.cli.main import main
from lit_het.runs.model_card import write_card
from lit_het.runs.opening import open_run
from tests import tiny
from tests.cli.test_train import refusal
from tests.cli.tiny_decoder import NAMES, QUESTION, pixels

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def exported(decoder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exported") / "folder"
    assert main(["export", "--checkpoint", str(decoder.run_dir), "--to", "huggingface", "--output", str(folder)]) == 0
    return folder


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


def test_a_message_and_the_card_tell_what_is_left_out(decoder, tmp_path, capsys):
    line = ["export", "--checkpoint", decoder.run_dir, "--to", "huggingface", "--output", tmp_path / "folder"]
    assert main(list(map(str, line))) == 0
    remark = "he noise of the head is left out: texts are those of lit-het caption --samples 0"
    assert remark in capsys.readouterr().err
    assert remark in (tmp_path / "folder" / "README.md").read_text()
    assert remark not in write_card(open_run(decoder.run_dir), "name", licence=None, library="lit-het")


@pytest.mark.parametrize("to", ["onnx", "npz"])
def test_formats_without_decoders_say_so(decoder, tmp_path, capsys, to):
    line = refusal(capsys, "export", "--checkpoint", decoder.run_dir, "--to", to, "--output", tmp_path / to)
    assert f"--to {to} has no decoders; export with --to huggingface or --to lit-het" in line
