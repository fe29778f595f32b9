"""`lit-het caption` and `lit-het ask`, and the same from Python, on a decoder that was trained on coloured shapes."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import lit_het
from lit_het.configs.experiment import PretrainedConfig
from lit_het.errors import UserError
from lit_het.models.caption import table_of
from lit_het.models.opening import open_run
from lit_het.texts import Written
from lit_het.training.train import train
from lit_het.weights.cards import write_card
from tests import tiny
from tests.cli.conftest import changed, printed, refusal, run_command
from tests.cli.test_embed import losses
from tests.cli.tiny_decoder import NAMES, QUESTION, pixels, short


@pytest.fixture(scope="session")
def run(decoder):
    return decoder.run_dir


@pytest.fixture(scope="module")
def model(run):
    return lit_het.load(run)


@pytest.fixture(scope="session")
def images(decoder, tmp_path_factory):
    """The eight shapes, as files."""
    folder = tmp_path_factory.mktemp("images")
    paths = [folder / f"{name}.jpg" for name in NAMES]
    for path, image in zip(paths, pixels(decoder, 8), strict=True):
        path.write_bytes(tiny.encode_jpeg(image))
    return paths


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
    run_command("caption", images[0], "--checkpoint", run, "--samples", "0")
    shown = capsys.readouterr().out
    assert all(part in shown for part in (NAMES[0], "end", "%"))


def test_a_question_of_training_is_answered_and_answers_are_ranked(run, model, images, capsys):
    answers = [model.ask(image, QUESTION, samples=4) for image in images]
    rankings = [model.ask(image, QUESTION, tiny.COLOURS, samples=4) for image in images]
    for [answer], ranked, name in zip(answers, rankings, NAMES, strict=True):
        assert ranked[0].text == answer.text == name.split()[0]
        assert [one.log_p for one in ranked] == sorted((one.log_p for one in ranked), reverse=True)
        # By the same noise, ranking and writing give the same probability.
        assert ranked[0].log_p == pytest.approx(answer.log_p, abs=1e-4)
        np.testing.assert_allclose(ranked[0].bands, answer.bands, atol=1e-4)
    line = ("ask", images[-1], QUESTION, "--checkpoint", run, "--samples", 4, "--json")
    for flags, texts in (((), answers[-1]), (("--answers", ",".join(tiny.COLOURS)), rankings[-1])):
        [found] = printed(capsys, *line, *flags)
        assert [one["text"] for one in found["texts"]] == [text.text for text in texts]
        assert [one["log_p"] for one in found["texts"]] == pytest.approx([text.log_p for text in texts])


@pytest.mark.slow
def test_python_and_the_command_write_the_same(run, model, images, capsys):
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


@pytest.mark.slow
def test_a_folder_of_weights_writes_the_same(model, images, tmp_path):
    model.save_pretrained(tmp_path / "folder")
    again = lit_het.load(tmp_path / "folder")
    assert again.caption(images[0]) == model.caption(images[0])
    # In the prompt of training, which the folder has too.
    assert again.ask(images[0], QUESTION) == model.ask(images[0], QUESTION)
    assert model.ask(images[0], QUESTION) != model.caption([images[0]], QUESTION)[0]


@pytest.mark.slow
def test_an_image_has_the_same_texts_and_noise_alone_among_others_and_in_batches(model, images, monkeypatch):
    expected = model.caption(images, samples=4)
    among = model.caption([images[1], images[0]], samples=4)[::-1]
    alone = [model.caption(images[0], samples=4)]
    monkeypatch.setattr("lit_het.models.writing.BATCH_SIZE", 3)
    in_batches = model.caption(images, samples=4)
    for found in (among, alone, in_batches):
        for [one], [other] in zip(found, expected, strict=False):
            assert one.tokens == other.tokens
            assert one.log_p == pytest.approx(other.log_p, abs=1e-4)
            np.testing.assert_allclose(one.bands, other.bands, atol=1e-4)
    assert len(in_batches) == len(expected)


@pytest.mark.slow
def test_only_tokens_that_the_tokenizer_has_are_written(decoder, model, images):
    size = decoder.tokenizer.build().vocabulary_size
    texts = model.caption(images[0], samples=0, num_texts=size + 50, num_tokens=1)
    assert 1 < len(texts) <= size
    assert {len(text.tokens) for text in texts} == {1}
    assert sum(text.probability for text in texts) == pytest.approx(1, abs=1e-2)  # without padding
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
    ("command", "flags", "message"),
    [
        (["caption"], ["--prompt", "a shape: " * 20], "tokens, too many for the decoder's 24 positions; shorten it"),
        (["caption"], ["--num-tokens", "40"], "need more than the decoder's 24 positions"),
        (["caption"], ["--top-k", "3"], "set a temperature above 0"),
        (["caption"], ["--samples", "-1"], "--samples -1: must be at least 0"),
        (["caption"], ["--seed", "9" * 20], "seed = 99999999999999999999 must be from 0 to 4,294,967,295"),
        (["ask", QUESTION], ["--answers", "red,red"], "answer 'red' is repeated; keep one"),
        (["ask", QUESTION], ["--answers", ","], "no answers; give a list of at least one"),
        (["ask", QUESTION], ["--answers", "red,Red"], "answer 'Red' has the tokens of 'red'; keep one"),
        (["ask", QUESTION], ["--answers", "red " * 30], "more than the 7 tokens that the prompt leaves; shorten it"),
        (
            ["ask", QUESTION],
            ["--answers", "red,blue", "--top-p", "0.5"],
            "--top-p writes answers, and --answers ranks given ones; leave one out",
        ),
    ],
)
def test_what_cannot_be_written_or_ranked_is_one_line(run, images, capsys, command, flags, message):
    [name, *question] = command
    assert message in refusal(capsys, name, images[0], *question, "--checkpoint", run, *flags)


def test_ranking_takes_no_flags_of_writing(model, images):
    for changes, message in (({"num_texts": 2}, "num_texts writes answers"), ({"samples": -1}, "samples = -1")):
        with pytest.raises(UserError, match=message):
            model.ask(images[0], QUESTION, ["red"], **changes)
    with pytest.raises(UserError, match="give a list"):
        model.ask(images[0], QUESTION, "red")


def test_shards_of_questions_are_checked_by_the_command_for_captions(decoder, capsys):
    [questions] = decoder.data.mixture
    run_command("data", "check", *questions.shards, "--captions", "json/questions")
    assert "all 40 samples can be used" in capsys.readouterr().err


def test_other_commands_say_what_a_decoder_lacks(run, trained, images, data, capsys):
    assert "is not a decoder" in refusal(capsys, "caption", images[0], "--checkpoint", trained)
    for line in (
        ("classify", images[0], "--checkpoint", run, "--labels", "a,b"),
        ("zero-shot", "--checkpoint", run, "--data", data / "train", "--split", "."),
    ):
        assert "a decoder has no classes" in refusal(capsys, *line)


@pytest.fixture(scope="module")
def pooling(decoder, tmp_path_factory):
    """The run of a tower that pools its tokens by attention."""
    folder = tmp_path_factory.mktemp("upstream")
    config = tiny.classifier(decoder, Path(decoder.data.shards[0]).parent, folder / "run")
    tiny.finish_untrained(changed(config, task__image_tower__pooling="attention"))
    return folder / "run"


@pytest.mark.slow
def test_stored_tokens_train_the_same_decoder(decoder, pooling, tmp_path, capsys):
    store = tmp_path / "tokens"
    config = short(decoder, run_dir=tmp_path / "pixels", pretrained=PretrainedConfig(pooling))
    config = changed(config, data__mixture=())
    train(config)
    shards = ("--data", *config.data.shards, "--dtype", "float32")
    run_command("embed", "--tower", pooling, "--tokens", "--output", store, *shards)
    width = config.task.image_tower.encoder.width
    size = f"40 images × 4 tokens × {width} × 4 bytes = {40 * 4 * width * 4 / 1e9:.3g} GB"
    assert size in capsys.readouterr().err
    # The tokens of the decoder's own tower are the same.
    run_command("embed", "--tower", config.run_dir, "--tokens", "--output", store, *shards)
    assert "2 of 2 shards already have embeddings" in capsys.readouterr().err
    stored = changed(config, run_dir=tmp_path / "stored", data__embeddings=str(store))
    train(stored)
    np.testing.assert_allclose(losses(stored.run_dir), losses(config.run_dir), rtol=1e-5)


@pytest.mark.slow
def test_pooled_embeddings_and_tokens_are_not_taken_for_each_other(decoder, pooling, tmp_path, capsys):
    pooled = tmp_path / "pooled"
    shards = ("--data", *decoder.data.shards)
    run_command("embed", "--tower", pooling, "--output", pooled, *shards)
    config = changed(decoder, data__mixture=(), data__embeddings=str(pooled))
    message = "pooled holds pooled embeddings, or is of an earlier version; embed again with --tokens"
    with pytest.raises(UserError, match=message):
        train(changed(config, run_dir=tmp_path / "run"))
    line = refusal(capsys, "embed", "--tower", pooling, "--tokens", "--output", pooled, *shards)
    assert "pooled holds pooled embeddings, not tokens; choose another --output" in line
    line = refusal(capsys, "embed", "--tower", decoder.run_dir, "--output", tmp_path / "e", *shards)
    assert line.endswith("would be all of its 4 tokens; store them with --tokens")


def test_a_decoder_needs_a_prompt_and_positions_for_its_tokens(decoder, tmp_path):
    for changes, message in (
        ({"data__prompt": None, "data__mixture": ()}, "set `data.prompt`"),
        ({"tokenizer__length": 9}, "--task.decoder.length"),
    ):
        with pytest.raises(UserError, match=message):
            train(changed(decoder, run_dir=tmp_path / "run", **changes))


def test_an_export_and_its_card_tell_what_is_left_out(decoder, tmp_path, capsys):
    run_command("export", "--checkpoint", decoder.run_dir, "--to", "huggingface", "--output", tmp_path / "folder")
    remark = "he noise of the head is left out: texts are those of lit-het caption --samples 0"
    assert remark in capsys.readouterr().err
    assert remark in (tmp_path / "folder" / "README.md").read_text()
    assert remark not in write_card(open_run(decoder.run_dir), "name", licence=None, library="lit-het")


@pytest.mark.parametrize("to", ["onnx", "npz"])
def test_formats_without_decoders_say_so(decoder, tmp_path, capsys, to):
    line = refusal(capsys, "export", "--checkpoint", decoder.run_dir, "--to", to, "--output", tmp_path / to)
    assert (
        f"--to {to} does not write a text decoder on an image tower; export with --to lit-het or --to huggingface"
        in line
    )
