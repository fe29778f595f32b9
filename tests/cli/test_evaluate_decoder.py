"""`lit-het captioning` and `lit-het question-answering` on a decoder that was trained on coloured shapes."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from lit_het.data_pipelines.shards.writing import write_shards
from lit_het.errors import UserError
from lit_het.eval import decoders
from lit_het.eval.decoder_suite import AnswerQuestionsConfig, WriteCaptionsConfig
from lit_het.eval.evaluation import read_records
from lit_het.eval.sets import ImageSet
from lit_het.texts import GenerationConfig
from lit_het.training.log import read_metrics
from lit_het.training.train import train
from tests import tiny
from tests.cli.conftest import last_line, run_command
from tests.cli.tiny_decoder import NAMES, QUESTION, pixels, short


def evaluated(tmp_path, kind, run, data, *flags):
    """Returns the metrics of a command."""
    output = tmp_path / "metrics.json"
    run_command(kind, "--checkpoint", run, "--data", f"shapes={data}", "--split", ".", "--output", output, *flags)
    return json.loads(output.read_text())


@pytest.fixture(scope="module")
def captions(decoder):
    [folder] = decoder.data.shards
    return folder


@pytest.fixture(scope="module")
def questions(decoder):
    [mixture] = decoder.data.mixture
    [folder] = mixture.shards
    return folder


@pytest.fixture(scope="module")
def free(decoder, captions, questions, tmp_path_factory):
    """A run whose captions and answers are evaluated, and the metrics of its answers."""
    folder = tmp_path_factory.mktemp("evaluated")
    run_dir = shutil.copytree(decoder.run_dir, folder / "run")
    evaluated(folder, "captioning", run_dir, captions)
    return run_dir, evaluated(folder, "question-answering", run_dir, questions, "--figure", "exact_match")


@pytest.fixture
def colours(tmp_path):
    """A file of the answers."""
    (tmp_path / "colours.txt").write_text("\n".join(tiny.COLOURS))
    return tmp_path / "colours.txt"


@pytest.fixture
def sets(captions, questions):
    """The captions and the questions, as evaluations read them."""
    return [ImageSet("shapes", folder, split=".", labelled=False) for folder in (captions, questions)]


def test_the_captions_of_training_are_written_and_predicted(tmp_path, decoder, captions, free):
    found = evaluated(tmp_path, "captioning", decoder.run_dir, captions, "--samples", 4)
    for part in ("", "noisy/"):
        figures = {name.rpartition("/")[2]: value for name, value in found.items() if f"shapes/{part}" in name}
        assert figures["exact_match"] == 1
        assert figures["rouge_l"] == pytest.approx(1)
        assert figures["cider"] > 0
        assert 1 <= figures["perplexity"] < 1.5
        assert figures["perplexity"] == pytest.approx(np.exp(figures["log_perplexity"]))
        assert figures["token_top1"] > 0.9
    names = tmp_path / "names.txt"
    names.write_text("\n".join(NAMES))
    chosen = evaluated(tmp_path, "captioning", decoder.run_dir, captions, "--candidates", names)
    assert chosen["captioning/shapes/exact_match"] == 1
    assert chosen["captioning/shapes/ece"] <= found["captioning/shapes/ece"]
    # All captions are right, so that the calibration error is what the confidence lacks.
    [record] = [record for record in read_records(free[0]) if record.kind == "captioning"]
    lacking = 1 - record.drawing.arrays["confidence"].mean()
    assert record.figures["ece"] == pytest.approx(lacking, abs=1e-6)
    assert record.figures["aurc"] == 0


def test_the_answers_of_training_are_written_and_chosen(tmp_path, decoder, questions, colours, free):
    flags = ("--figure", "exact_match", "--candidates", colours)
    chosen = evaluated(tmp_path, "question-answering", decoder.run_dir, questions, *flags)
    for found in (free[1], chosen):
        assert found["question_answering/shapes/exact_match"] == 1
    # Other answers than the candidates take no probability.
    assert chosen["question_answering/shapes/ece"] <= free[1]["question_answering/shapes/ece"]


@pytest.mark.slow
def test_a_training_evaluates_its_decoder(tmp_path, decoder, sets):
    few = GenerationConfig(num_tokens=4)
    evaluations = (
        WriteCaptionsConfig(sets[0], generation=few),
        AnswerQuestionsConfig(sets[1], figure="anls", generation=few),
    )
    config = short(decoder, run_dir=tmp_path / "run", evaluations=evaluations)
    train(config)
    records = {record.kind: record for record in read_records(config.run_dir)}
    assert {"exact_match", "log_perplexity"} <= records["captioning"].figures.keys()
    assert 0 <= records["question_answering"].figures["anls"] <= 1
    logged = read_metrics(config.run_dir / "metrics.jsonl")
    assert sum("captioning/shapes/cider" in one for one in logged) == 2


def test_a_report_shows_texts_with_the_probability_of_their_tokens(tmp_path, free):
    page = tmp_path / "page.html"
    run_command("report", free[0], "--output", page)
    text = page.read_text()
    for shown in ("Captioning", "Question answering", f"{QUESTION} red", 'ruby style="--doubt'):
        assert shown in text


@pytest.mark.parametrize(
    ("kind", "flags", "message"),
    [
        ("captioning", ["--prompt", "a shape: " * 20], "too many for the decoder's 24 positions; shorten it"),
        ("captioning", ["--captions", "json/captions"], "missing member"),
        ("captioning", ["--top-p", "0.5"], "set a temperature above 0"),
        ("question-answering", [], "missing member"),
    ],
)
def test_what_does_not_suit_the_set_or_the_decoder_is_one_line(decoder, captions, capsys, kind, flags, message):
    line = [kind, "--checkpoint", decoder.run_dir, "--data", captions, "--split", ".", *flags]
    assert message in last_line(capsys, *line)


def test_questions_need_enough_answers_and_different_candidates(tmp_path, decoder, questions, capsys):
    line = ["question-answering", "--checkpoint", decoder.run_dir, "--data", questions, "--split", "."]
    assert "no question has 2 answers or more" in last_line(capsys, *line)
    same = tmp_path / "same.txt"
    same.write_text("red\nred\n")
    assert "list two texts or more, each once" in last_line(capsys, *line, "--candidates", same)
    missing = last_line(capsys, *line, "--figure", "exact_match", "--questions", "json/answers")
    assert "nothing in .json/answers" in missing


def test_other_models_write_nothing(trained, captions, capsys):
    line = ["captioning", "--checkpoint", trained, "--data", captions, "--split", "."]
    assert "the model writes no text; take a run with a decoder" in last_line(capsys, *line)


@pytest.fixture
def with_a_long_question(tmp_path, decoder, questions):
    """The questions, one image with a second one that leaves two tokens, and one that leaves none."""
    tokenizer, long = decoder.tokenizer.build(), QUESTION
    while tokenizer.length - len(tokenizer.pieces(f"answer: {long}")) > 2:
        long += " ?"
    samples = []
    for number, image in enumerate(pixels(decoder, 6)):
        asked = [{"question": QUESTION, "answers": [NAMES[number].split()[0]], "type": "noisy"}]
        if number == 0:
            asked += [{"question": text, "answers": ["red"], "type": ""} for text in (long, long * 2)]
        samples.append({"__key__": f"{number}", "jpg": tiny.encode_jpeg(image), "json": {"questions": asked}})
    write_shards(tmp_path / "long", samples)
    return str(tmp_path / "long")


@pytest.mark.slow
def test_long_questions_change_nothing_for_others_and_count_as_wrong_without_room(
    tmp_path, decoder, with_a_long_question, colours, capsys
):
    line = (tmp_path, "question-answering", decoder.run_dir, with_a_long_question, "--figure", "exact_match")
    found = evaluated(*line, "--samples", 4)
    assert "1 question of 8 leave no room for the 2 tokens of an answer, and count as wrong" in capsys.readouterr().err
    for part in ("", "noisy/"):
        assert found[f"question_answering/shapes/{part}exact_match/noisy"] == 1
        assert 6 / 8 <= found[f"question_answering/shapes/{part}exact_match"] <= 7 / 8
    assert not any(name.endswith("exact_match/") for name in found)
    chosen = evaluated(*line, "--samples", 4, "--candidates", colours)
    assert chosen["question_answering/shapes/exact_match/noisy"] == 1


@pytest.mark.slow
def test_candidates_that_do_not_fit_are_refused_before_anything_is_trained(tmp_path, decoder, sets):
    long, same = tmp_path / "long.txt", tmp_path / "same.txt"
    long.write_text("red\n" + "red " * 40)
    same.write_text("red\nRed\nblue")
    for candidates, message in ((long, "for the|leaves"), (same, "has the tokens of 'red'; keep one")):
        evaluations = (
            WriteCaptionsConfig(sets[0], candidates=candidates),
            AnswerQuestionsConfig(sets[1], figure="anls", candidates=candidates),
        )
        for evaluation in evaluations:
            config = dataclasses.replace(decoder, run_dir=tmp_path / "run", evaluations=(evaluation,))
            with pytest.raises(UserError, match=message):
                train(config)
            assert read_metrics(tmp_path / "run" / "metrics.jsonl") == []


@pytest.mark.slow
def test_samples_depend_on_the_number_of_an_image_and_not_on_blocks(tmp_path, decoder, monkeypatch):
    samples = [
        {"__key__": f"{number:03d}", "jpg": tiny.encode_jpeg(image), "txt": "red circle"}
        for number, image in enumerate(np.repeat(pixels(decoder, 1), 12, axis=0))
    ]
    write_shards(tmp_path / "copies", samples)
    found = []
    for texts_at_a_time in (1, 8):
        monkeypatch.setattr(decoders, "_TEXTS", texts_at_a_time)
        evaluated(tmp_path, "captioning", decoder.run_dir, tmp_path / "copies", "--temperature", 5, "--num-tokens", 4)
        [record] = [record for record in read_records(decoder.run_dir) if record.kind == "captioning"]
        found.append(record.drawing.arrays["confidence"])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4)
    assert len(np.unique(found[0])) > 6
