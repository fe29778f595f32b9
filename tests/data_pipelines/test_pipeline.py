"""Pipelines of webdataset as a stream: its samples become batches, in its order, on any number of processes."""

import dataclasses
import io
import os
from typing import Any

import numpy as np
import pytest
import webdataset as package
from PIL import Image

import lit_het
from lit_het.configs import quickstart_upstream
from lit_het.data_pipelines.data_config import LoaderConfig, Streaming
from lit_het.data_pipelines.shards.pipeline import PipelineStream
from lit_het.data_pipelines.shards.writing import expand
from lit_het.errors import UserError
from lit_het.training.log import read_metrics
from tests import tiny
from tests.data_pipelines.conftest import IMAGE_SIZE, NUM_SAMPLES, joined, number_tokens, take

webdataset: Any = package
# The package leaves its files to the garbage collector where a pipeline is not read to its end.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Undoes the variables by which processes are known."""
    for name in ("RANK", "WORLD_SIZE", "WORKER", "NUM_WORKERS"):
        monkeypatch.setenv(name, "0")
        monkeypatch.delenv(name)


def config(shards, **changes: Any) -> LoaderConfig:
    fields: Any = {"image_size": IMAGE_SIZE, "batch_size": 4, "threads": 0, "stream": Streaming()}
    return dataclasses.replace(LoaderConfig((str(shards),), **fields), **changes)


def of(shards, **options: Any):
    """Returns the package's own pipeline over shards."""
    return webdataset.WebDataset(expand(str(shards)), empty_check=False, **{"shardshuffle": False, **options})


def numbers(stream, count, *place):
    batch = joined(take(stream, count, *place))
    return batch.text[batch.valid, 0].tolist()


def test_shards_written_here_are_read_back_by_the_package(shards):
    samples = list(of(shards))
    assert [sample["__key__"] for sample in samples] == [f"s{number}" for number in range(NUM_SAMPLES)]
    assert [int(sample["cls"]) for sample in samples] == [*range(NUM_SAMPLES)]
    decoded = next(iter(of(shards).decode("pil")))
    assert decoded["jpg"].tobytes() == Image.open(io.BytesIO(samples[0]["jpg"])).tobytes()
    assert decoded["txt"] == samples[0]["txt"].decode()


def test_batches_are_those_samples_in_the_order_of_the_pipeline_again_and_again(shards):
    expected = [int(sample["txt"].decode()[4:]) for sample in of(shards)]
    count = 2 * NUM_SAMPLES // 4  # more than once through it
    for threads in (0, 3):
        stream = PipelineStream(config(shards, threads=threads), of(shards), number_tokens)
        assert numbers(stream, count) == (expected * 3)[: 4 * count]


def test_a_shuffled_pipeline_has_every_sample_in_another_order(shards):
    pipeline = of(shards, shardshuffle=10, seed=3).shuffle(20)
    whole = config(shards, batch_size=NUM_SAMPLES)
    found = numbers(PipelineStream(whole, pipeline, number_tokens), 1)
    plain = numbers(PipelineStream(whole, of(shards), number_tokens), 1)
    assert sorted(found) == sorted(plain)
    assert found != plain


def test_processes_share_the_shards_by_split_by_node(shards):
    def read(process):
        pipeline = of(shards, nodesplitter=webdataset.split_by_node, workersplitter=webdataset.split_by_worker)
        stream = PipelineStream(config(shards), pipeline, number_tokens)
        return set(numbers(stream, NUM_SAMPLES // 2, 0, process, 2))

    first, second = (read(process) for process in range(2))
    assert not first & second
    assert len(first | second) == NUM_SAMPLES


def test_decoded_images_and_texts_make_the_batch_of_their_bytes(shards):
    plain = joined(take(PipelineStream(config(shards), of(shards), number_tokens), 2))
    for handler in ("pil", "rgb8", "rgb"):
        decoded = joined(take(PipelineStream(config(shards), of(shards).decode(handler), number_tokens), 2))
        np.testing.assert_array_equal(decoded.text, plain.text)
        # A JPEG is decoded by Pillow there.
        assert np.abs(decoded.image.astype(int) - plain.image).mean() < 1


def test_a_sample_without_a_caption_is_an_invalid_row(shards):
    def without_first(samples):
        for number, sample in enumerate(samples):
            yield {name: value for name, value in sample.items() if number or name != "txt"}

    stream = PipelineStream(config(shards, max_bad_fraction=1.0), of(shards).compose(without_first), number_tokens)
    assert joined(take(stream, 1)).valid.tolist() == [False, True, True, True]
    assert sum(stream.faults.counts.values()) == 1


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda shards: of(shards).to_tuple("jpg;png", "txt"), "yields tuple, not samples of webdataset"),
        (lambda shards: of(shards).map(lambda sample: sample["__key__"]), "yields str, not samples"),
        (lambda shards: of(shards).select(lambda sample: False), "yields no sample on this process"),
        (
            lambda shards: of(shards).map(lambda sample: {**sample, "txt": object()}),
            "txt is object, which is no content",
        ),
        (
            lambda shards: of(shards).decode("rgb").map(lambda sample: {**sample, "jpg": 255 * sample["jpg"]}),
            "jpg is ndarray, which is no content of a shard",
        ),
        (lambda shards: iter(of(shards)), "can be iterated again and again"),
        (lambda shards: 3, "can be iterated again and again, and int cannot"),
    ],
)
def test_what_is_no_pipeline_of_samples_is_one_line(shards, make, line):
    with pytest.raises(UserError, match=line):
        take(PipelineStream(config(shards), make(shards), number_tokens), 1)


def test_a_pipeline_needs_a_stream_and_excludes_nothing(shards, tmp_path):
    with pytest.raises(UserError, match=r"set data.stream to Streaming\(\)"):
        PipelineStream(config(shards, stream=None), of(shards), number_tokens)
    with pytest.raises(UserError, match=r"leave out data.exclude"):
        PipelineStream(config(shards, exclude=(tmp_path / "x.csv",)), of(shards), number_tokens)


@pytest.mark.slow
def test_a_run_trains_and_resumes_on_a_pipeline(tmp_path):
    data = tiny.write_data(tmp_path)
    run = tiny.classifier(quickstart_upstream.get_config(), data, tmp_path / "run")
    run = dataclasses.replace(run, data=dataclasses.replace(run.data, stream=Streaming()), calibration=None)
    pipeline = of(data / "train", shardshuffle=2, seed=0).shuffle(16)
    lit_het.train(run, pipeline=pipeline)
    steps = [record["step"] for record in read_metrics(run.run_dir / "metrics.jsonl")]
    assert steps == [1, 2]
    lit_het.train(run, resume=True, pipeline=pipeline)
    assert os.environ["WORLD_SIZE"] == "1"
