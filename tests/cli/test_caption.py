"""`lit-het caption` and `lit-het ask`, and the same from Python, on a decoder that was trained on coloured shapes."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import lit_het
from lit_het.apps.caption import table_of
from lit_het.cli.main import main
from lit_het.configs.experiment import PretrainedConfig
from lit_het.durations import Duration
from lit_het.errors import UserError
from lit_het.runs.training import train
from lit_het.schedules import Schedule
from lit_het.texts import Written
from tests import tiny
from tests.cli.test_train import refusal
from tests.cli.tiny_decoder import NAMES, QUESTION, pixels


@pytest.fixture(scope="session")
def run(decoder):
    return decoder.run_dir


@pytest.fixture(scope="session")
def images(decoder, tmp_path_factory):
    """The eight shapes, as files."""
    folder = tmp_path_factory.mktemp("images")
    paths = [folder / f"{name}.jpg" for name in NAMES]
    for path, image in zip(paths, pixels(decoder, 8), strict=True):
        path.write_bytes(tiny.encode_jpeg(image))
    return paths


def printed(capsys, *arguments):
    capsys.readouterr()
    assert main(list(map(str, arguments))) == 0
    return json.loads(capsys.readouterr().out)


def test_captions_are_those_of_training_with_the_probability_of_each_token(run, images, capsys):
    found = printed(capsys, "caption", *images, "--checkpoint", run, "--samples", 4, "--json")
    texts = [one["texts"][0] for one in found]
    assert [text["text"] for text in texts] == NAMES
    assert [one["image"] for one in found] == list(map(str, images))
    for text in texts:
        assert "".join(text["tokens"]).strip() == text["text"]
        assert text["tokens"][-1] == "", "the end"
        assert np.exp(text["log_p"]) == pytest.approx(np.prod(text["probabilities"]), rel=1e-4)
        assert len(text["bands"]) == len(text["tokens"])
        for (low, high), p in zip(text["bands"], text["probabilities"], strict=True):
            assert 0 <= low <= high <= 1
            assert low - 1e-5 <= p <= high + 1e-5 or p == pytest.approx((low + high) / 2, abs=0.1)


def test_a_table_shows_texts_and_their_tokens(run, images, capsys):
    assert main(["caption", str(images[0]), "--checkpoint", str(run), "--samples", "0"]) == 0
    shown = capsys.readouterr().out
    assert NAMES[0] in shown
    assert "end" in shown
    assert "%" in shown


def test_a_question_of_training_is_answered_and_answers_are_ranked(run, images, capsys):
    for image, name in zip(images, NAMES, strict=True):
        line = ["ask", image, QUESTION, "--checkpoint", run, "--samples", 4, "--json"]
        [[answer]] = [one["texts"] for one in printed(capsys, *line)]
        assert answer["text"] == name.split()[0]
        [ranked] = [one["texts"] for one in printed(capsys, *line, "--answers", ",".join(tiny.COLOURS))]
        assert ranked[0]["text"] == name.split()[0]
        assert [one["log_p"] for one in ranked] == sorted((one["log_p"] for one in ranked), reverse=True)
        # By the same noise, ranking and writing give the same probability.
        assert ranked[0]["log_p"] == pytest.approx(answer["log_p"], abs=1e-4)
        assert ranked[0]["bands"] == pytest.approx(np.asarray(answer["bands"]), abs=1e-4)


def test_python_and_the_command_write_the_same(run, images, capsys):
    model = lit_het.load(run)
    assert repr(model).startswith(f"<Model {run}: decoder")
    [[text]] = [one["texts"] for one in printed(capsys, "caption", images[2], "--checkpoint", run, "--json")]
    [found] = model.caption(images[2])
    assert dataclasses.asdict(found)["text"] == text["text"]
    assert found.log_p == pytest.approx(text["log_p"])
    several = model.caption([*images] * 5, samples=0)
    assert [texts[0].text for texts in several] == NAMES * 5
    sampled = model.caption(images[:2], samples=0, num_texts=3, temperature=1.0, seed=1)
    assert [len(texts) for texts in sampled] == [3, 3]
    again = model.caption(images[:2], samples=0, num_texts=3, temperature=1.0, seed=1)
    assert sampled == again
    beams = model.caption(images[0], samples=0, num_texts=4)
    assert len({text.text for text in beams}) == 4
    assert model.ask(images[0], QUESTION)[0].text == "red"
    assert len(model.ask(images[0], QUESTION, num_tokens=1)[0].tokens) == 1


def test_a_folder_of_weights_writes_the_same(run, images, tmp_path):
    model = lit_het.load(run)
    model.save_pretrained(tmp_path / "folder")
    again = lit_het.load(tmp_path / "folder")
    assert again.caption(images[0]) == model.caption(images[0])
    # In the prompt of training, which the folder has too.
    assert again.ask(images[0], QUESTION) == model.ask(images[0], QUESTION)
    assert model.ask(images[0], QUESTION) != model.caption([images[0]], QUESTION)[0]


def test_an_image_has_the_same_texts_alone_and_among_others(run, images):
    model = lit_het.load(run)
    [alone], [_, [among]] = model.caption(images[0], samples=4), model.caption([images[1], images[0]], samples=4)
    assert among.tokens == alone.tokens
    assert among.log_p == pytest.approx(alone.log_p, abs=1e-4)


def test_batches_of_images_have_the_noise_of_one(run, images, monkeypatch):
    expected = lit_het.load(run).caption(images, samples=4)
    monkeypatch.setattr("lit_het.api.model.BATCH_SIZE", 3)
    found = lit_het.load(run).caption(images, samples=4)
    assert [texts[0].tokens for texts in found] == [texts[0].tokens for texts in expected]
    for [one], [other] in zip(found, expected, strict=True):
        assert one.log_p == pytest.approx(other.log_p, abs=1e-4)
        np.testing.assert_allclose(one.bands, other.bands, atol=1e-4)


def test_there_are_no_more_texts_than_can_be_written(decoder, images):
    size = decoder.tokenizer.build().vocabulary_size
    texts = lit_het.load(decoder.run_dir).caption(images[0], samples=0, num_texts=size + 50, num_tokens=1)
    assert 1 < len(texts) <= size
    assert sum(text.probability for text in texts) == pytest.approx(1, abs=1e-2)  # without padding


def test_tokens_that_the_tokenizer_does_not_have_are_never_written(decoder, images):
    model = lit_het.load(decoder.run_dir)
    size = decoder.tokenizer.build().vocabulary_size
    assert decoder.task.decoder.vocabulary_size > size
    # At a high temperature all tokens are equally probable.
    texts = model.caption(images[0], samples=0, num_texts=50, temperature=100.0)
    assert len({text.text for text in texts}) > 30


def test_brackets_in_names_and_texts_are_no_styles(capsys):
    text = Written("stop [/b] [red]", -1.0, (" stop", " ", ""), (0.5, 0.5, 0.5))
    Console().print(table_of("photo[a].jpg", [text]))
    shown = capsys.readouterr().out
    assert "photo[a].jpg" in shown
    assert "stop [/b] [red]" in shown
    assert "stop 0.50 space 0.50 end 0.50" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "a shape: " * 20], "tokens, too many for the decoder's 24 positions; shorten it"),
        (["--num-tokens", "40"], "need more than the decoder's 24 positions"),
        (["--top-k", "3"], "set a temperature above 0"),
        (["--samples", "-1"], "--samples -1: must be at least 0"),
        (["--seed", "9" * 20], "seed = 99999999999999999999 is not in [0, 4294967295]"),
    ],
)
def test_what_cannot_be_written_is_one_line(run, images, capsys, arguments, message):
    line = ["caption", images[0], "--checkpoint", run, *arguments]
    assert message in refusal(capsys, *line)


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ("red,red", "answer 'red' is repeated; keep one"),
        (",", "no answers; give a list of at least one"),
        ("red,Red", "answer 'Red' has the tokens of 'red'; keep one"),
        ("red " * 30, "has more than the 7 tokens that the prompt leaves; shorten it"),
    ],
)
def test_answers_that_cannot_be_ranked_are_one_line(run, images, capsys, answers, message):
    line = ["ask", images[0], QUESTION, "--checkpoint", run, "--answers", answers]
    assert message in refusal(capsys, *line)


def test_ranking_takes_no_flags_of_writing(run, images, capsys):
    line = ["ask", images[0], QUESTION, "--checkpoint", run, "--answers", "red,blue", "--top-p", "0.5"]
    assert "--top-p writes answers, and --answers ranks given ones; leave one out" in refusal(capsys, *line)
    model = lit_het.load(run)
    for changes, message in (({"num_texts": 2}, "num_texts writes answers"), ({"samples": -1}, "samples = -1")):
        with pytest.raises(UserError, match=message):
            model.ask(images[0], QUESTION, ["red"], **changes)
    with pytest.raises(UserError, match="give a list"):
        model.ask(images[0], QUESTION, "red")


def test_shards_of_questions_are_checked_by_the_command_for_captions(decoder, capsys):
    [questions] = decoder.data.mixture
    assert main(["data", "check", *questions.shards, "--captions", "json/questions"]) == 0
    assert "all 40 samples can be used" in capsys.readouterr().err


def test_other_commands_say_what_a_decoder_lacks(run, trained, images, data, capsys):
    assert "is no decoder: it writes no text" in refusal(capsys, "caption", images[0], "--checkpoint", trained)
    line = refusal(capsys, "classify", images[0], "--checkpoint", run, "--labels", "a,b")
    assert "a decoder has no classes" in line
    line = refusal(capsys, "zero-shot", "--checkpoint", run, "--data", data / "train", "--split", ".")
    assert "a decoder has no classes" in line


@pytest.fixture(scope="module")
def pooling(decoder, tmp_path_factory):
    """The run of a tower that pools its tokens by attention."""
    folder = tmp_path_factory.mktemp("upstream")
    config = tiny.classifier(decoder, Path(decoder.data.shards[0]).parent, folder / "run")
    tower = dataclasses.replace(config.task.image_tower, pooling="attention")
    tiny.finish_untrained(dataclasses.replace(config, task=dataclasses.replace(config.task, image_tower=tower)))
    return folder / "run"


def test_stored_tokens_train_the_same_decoder(decoder, pooling, tmp_path, capsys):
    store = tmp_path / "tokens"
    config = dataclasses.replace(
        decoder,
        run_dir=tmp_path / "pixels",
        length=Duration(3),
        schedule=Schedule(1e-3, warmup=Duration(1)),
        data=dataclasses.replace(decoder.data, mixture=()),
        pretrained=PretrainedConfig(pooling),
    )
    train(config)
    shards = ("--data", *config.data.shards, "--dtype", "float32")
    assert main(["embed", "--tower", str(pooling), "--tokens", "--output", str(store), *shards]) == 0
    width = config.task.image_tower.encoder.width
    size = f"40 images × 4 tokens × {width} × 4 bytes = {40 * 4 * width * 4 / 1e9:.3g} GB"
    assert size in capsys.readouterr().err
    # The tokens of the decoder's own tower are the same.
    assert main(["embed", "--tower", str(config.run_dir), "--tokens", "--output", str(store), *shards]) == 0
    assert "2 of 2 shards already have embeddings" in capsys.readouterr().err
    stored = dataclasses.replace(
        config, run_dir=tmp_path / "stored", data=dataclasses.replace(config.data, embeddings=str(store))
    )
    train(stored)
    losses = []
    for run_dir in (config.run_dir, stored.run_dir):
        records = (run_dir / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(record).get("train/loss") for record in records])
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_pooled_embeddings_and_tokens_are_not_taken_for_each_other(decoder, pooling, tmp_path, capsys):
    pooled = tmp_path / "pooled"
    shards = ("--data", *decoder.data.shards)
    assert main(["embed", "--tower", str(pooling), "--output", str(pooled), *shards]) == 0
    data = dataclasses.replace(decoder.data, mixture=(), embeddings=str(pooled))
    with pytest.raises(
        UserError, match="pooled holds pooled embeddings, or is of an earlier version; embed again with --tokens"
    ):
        train(dataclasses.replace(decoder, run_dir=tmp_path / "run", data=data))
    line = refusal(capsys, "embed", "--tower", pooling, "--tokens", "--output", pooled, *shards)
    assert "pooled holds pooled embeddings, not tokens; choose another --output" in line
    line = refusal(capsys, "embed", "--tower", decoder.run_dir, "--output", tmp_path / "e", *shards)
    assert line.endswith("would be all of its 4 tokens; store them with --tokens")


def test_a_decoder_needs_a_prompt_and_positions_for_its_tokens(decoder, tmp_path):
    for changes, message in (
        ({"data": dataclasses.replace(decoder.data, prompt=None, mixture=())}, "set `data.prompt`"),
        ({"tokenizer": dataclasses.replace(decoder.tokenizer, length=9)}, "--task.decoder.length"),
    ):
        config = dataclasses.replace(decoder, run_dir=tmp_path / "run", **changes)
        with pytest.raises(UserError, match=message):
            train(config)
