"""`lit-het captioning` and `lit-het question-answering` on a decoder that was trained on coloured shapes."""

import dataclasses
import json

import numpy as np
import pytest

from lit_het.cli.main import main
from lit_het.durations import Duration
from lit_het.eval.decoder_suite import AnswerQuestionsConfig, WriteCaptionsConfig
from lit_het.eval.evaluation import read_records
from lit_het.eval.sets import ImageSet
from lit_het.runs.training import train
from lit_het.schedules import Schedule
from lit_het.texts import GenerationConfig
from lit_het.training.loop import Cadence
from tests import tiny
from tests.cli.tiny_decoder import NAMES, QUESTION


def evaluated(tmp_path, kind, run, data, *flags):
    """Returns the metrics of a command."""
    line = [kind, "--checkpoint", run, "--data", f"shapes={data}", "--split", ".", *flags]
    assert main([*map(str, line), "--output", str(tmp_path / "metrics.json")]) == 0
    return json.loads((tmp_path / "metrics.json").read_text())


def refusal(capsys, *arguments):
    """Runs a command that must fail; returns its last line, after progress."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) != 0
    lines = capsys.readouterr().err.strip().splitlines()
    assert not any("Traceback" in line for line in lines)
    return lines[-1]


@pytest.fixture
def captions(decoder):
    [folder] = decoder.data.shards
    return folder


@pytest.fixture
def questions(decoder):
    [mixture] = decoder.data.mixture
    [folder] = mixture.shards
    return folder


def test_the_captions_of_training_are_written_and_predicted(tmp_path, decoder, captions):
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
    evaluated(tmp_path, "captioning", decoder.run_dir, captions)
    # All captions are right, so that the calibration error is what the confidence lacks.
    [record] = [record for record in read_records(decoder.run_dir) if record.kind == "captioning"]
    lacking = 1 - record.drawing.arrays["confidence"].mean()
    assert record.figures["ece"] == pytest.approx(lacking, abs=1e-6)
    assert record.figures["aurc"] == 0


def test_the_answers_of_training_are_written_and_chosen(tmp_path, decoder, questions):
    colours = tmp_path / "colours.txt"
    colours.write_text("\n".join(tiny.COLOURS))
    how = ("--figure", "exact_match")
    free = evaluated(tmp_path, "question-answering", decoder.run_dir, questions, *how)
    chosen = evaluated(tmp_path, "question-answering", decoder.run_dir, questions, *how, "--candidates", colours)
    for found in (free, chosen):
        assert found["question_answering/shapes/exact_match"] == 1
    # Other answers than the candidates take no probability.
    assert chosen["question_answering/shapes/ece"] <= free["question_answering/shapes/ece"]


def test_a_training_evaluates_its_decoder(tmp_path, decoder, captions, questions):
    sets = [ImageSet("shapes", folder, split=".", labelled=False) for folder in (captions, questions)]
    few = GenerationConfig(num_tokens=4)
    config = dataclasses.replace(
        decoder,
        run_dir=tmp_path / "run",
        length=Duration(2),
        schedule=Schedule(1e-3, warmup=Duration(1)),
        cadence=Cadence(log_steps=1, save_steps=2, evaluate_steps=1),
        evaluations=(
            WriteCaptionsConfig(sets[0], generation=few, samples=2),
            AnswerQuestionsConfig(sets[1], figure="anls", generation=few),
        ),
    )
    train(config)
    records = {record.kind: record for record in read_records(config.run_dir)}
    assert {"exact_match", "noisy/log_perplexity"} <= records["captioning"].figures.keys()
    assert 0 <= records["question_answering"].figures["anls"] <= 1
    logged = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert sum("captioning/shapes/cider" in one for one in logged) == 2


def test_a_report_shows_texts_with_the_probability_of_their_tokens(tmp_path, decoder, captions, questions):
    evaluated(tmp_path, "captioning", decoder.run_dir, captions)
    evaluated(tmp_path, "question-answering", decoder.run_dir, questions, "--figure", "exact_match")
    page = tmp_path / "page.html"
    assert main(["report", str(decoder.run_dir), "--output", str(page)]) == 0
    text = page.read_text()
    assert "Captioning" in text
    assert "Question answering" in text
    assert f"{QUESTION} red" in text
    assert 'ruby style="--doubt' in text


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
    assert message in refusal(capsys, *line)


def test_questions_need_enough_answers_and_different_candidates(tmp_path, decoder, questions, capsys):
    line = ["question-answering", "--checkpoint", decoder.run_dir, "--data", questions, "--split", "."]
    assert "no question has 2 answers or more" in refusal(capsys, *line)
    same = tmp_path / "same.txt"
    same.write_text("red\nred\n")
    assert "list two texts or more, each once" in refusal(capsys, *line, "--candidates", same)
    missing = refusal(capsys, *line, "--figure", "exact_match", "--questions", "json/answers")
    assert "no caption in .json/answers" in missing


def test_other_models_write_nothing(trained, captions, capsys):
    line = ["captioning", "--checkpoint", trained, "--data", captions, "--split", "."]
    assert "the model writes no text; take a run with a decoder" in refusal(capsys, *line)
