"""`lit-het train` of a decoder from a stream: captions, and questions with their answers."""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from lit_het.cli.main import main
from lit_het.data_pipelines.data_config import Streaming
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.stream import Stream
from tests import tiny
from tests.cli.conftest import write_config_file
from tests.cli.tiny_decoder import NAMES, QUESTION, short


def texts_of(batches):
    """Returns the tokens of each image, and which of them are learned."""
    found = {}
    for batch in batches:
        for row in np.flatnonzero(batch.valid):
            found.setdefault(batch.image[row].tobytes(), set()).add(
                (batch.text[row].tobytes(), batch.text_target[row].tobytes())
            )
    return found


@pytest.fixture(params=["captions", "questions"])
def streamed(request, decoder, tmp_path):
    """A decoder of captions or of answers, on the stream that a command writes."""
    data = dataclasses.replace(decoder.data, mixture=())
    if request.param == "questions":
        [questions] = decoder.data.mixture
        data = dataclasses.replace(data, shards=questions.shards, captions=questions.captions, prompt=questions.prompt)
    [folder] = data.shards
    commands = tuple(f"pipe:cat {path}" for path in sorted(Path(folder).glob("*.tar")))
    return short(decoder, run_dir=tmp_path / "run", data=data), commands


@pytest.mark.slow
def test_a_decoder_trains_on_the_texts_of_a_stream(streamed, tmp_path):
    config, commands = streamed
    file = write_config_file(config, tmp_path / "config.py")
    line = ["train", "--config", str(file), "--data.stream.shuffle-buffer", "8", "--data.shards", *commands]
    assert main(line) == 0
    records = [json.loads(record) for record in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]
    assert np.isfinite([record["train/loss"] for record in records]).all()
    saved = json.loads((config.run_dir / "config.json").read_text())["data"]
    assert saved["stream"]["shuffle_buffer"] == 8
    # Each row has one text or more, whose tokens are learned.
    assert min(record["train/tokens"] for record in records) >= 2 * config.data.batch_size


def test_the_tokens_of_an_image_are_those_of_random_access(streamed):
    config, commands = streamed
    tokenizer = config.tokenizer.build()
    streaming = dataclasses.replace(config.data, shards=commands, stream=Streaming(8))
    stream = Stream(streaming, tokenizer, allow_commands=True)
    batches = stream.batches()
    drawn = texts_of(itertools.islice(batches, 20))
    batches.close()
    known = texts_of(Loader(config.data, tokenizer).epoch())
    assert len(known) == tiny.NUM_SAMPLES
    assert len(drawn) > tiny.NUM_SAMPLES // 2
    assert all(drawn[image] == known[image] for image in drawn)
    ids = {np.frombuffer(ids, np.int32)[None].tobytes() for texts in drawn.values() for ids, _ in texts}
    written = [tokenizer.decode(np.frombuffer(row, np.int32)[None])[0] for row in ids]
    prefix = "answer: " + QUESTION if config.data.captions.startswith("json") else config.data.prompt
    expected = tiny.COLOURS if config.data.captions.startswith("json") else NAMES
    assert {text.removeprefix(prefix).strip() for text in written} == set(expected)
