"""The hashes that tell a loss which rows of a batch have the same image or the same text."""

import dataclasses

import numpy as np
import pytest

from lit_het.data_pipelines.data_config import LoaderConfig, Streaming
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.stream import Stream
from tests.data_pipelines.conftest import IMAGE_SIZE, NUM_SAMPLES, number_tokens, take

NUM_TEXTS = 4
TEXTS = {f"s{i}": {"txt": f"word{i % NUM_TEXTS}"} for i in range(NUM_SAMPLES)}


@pytest.fixture(scope="module")
def config(tmp_path_factory, make_shards):
    """Batches of three times as many rows as there are samples, with labels that number the samples."""
    shards = make_shards(tmp_path_factory.mktemp("texts"), **TEXTS)
    size = 3 * NUM_SAMPLES
    return LoaderConfig((str(shards),), image_size=IMAGE_SIZE, batch_size=size, captions="txt", threads=0)


def sharing(ids):
    """Which pairs of rows have equal ids."""
    return (ids[:, None] == ids[None]).all(axis=-1)


@pytest.mark.parametrize("is_stream", [False, True], ids=["loader", "stream"])
def test_rows_share_an_id_where_they_share_an_image_or_a_text(config, is_stream):
    stream = dataclasses.replace(config, stream=Streaming(8))
    (batch,) = take(Stream(stream, number_tokens) if is_stream else Loader(config, number_tokens), 1)
    image = batch.image.reshape(len(batch.image), -1)
    np.testing.assert_array_equal(sharing(batch.image_id), sharing(image))
    np.testing.assert_array_equal(sharing(batch.text_id), sharing(batch.text))
    assert sharing(batch.image_id).sum() > len(image)
    if not is_stream:
        assert sharing(batch.image_id).sum(axis=1).tolist() == [3] * len(image)


def test_ids_are_the_same_on_three_hosts(config):
    loader = Loader(config, number_tokens)
    (whole,) = take(loader, 1)
    parts = [take(loader, 1, 0, host, 3)[0] for host in range(3)]
    for field in ("image_id", "text_id"):
        np.testing.assert_array_equal(np.concatenate([getattr(part, field) for part in parts]), getattr(whole, field))


def test_batches_without_text_have_no_ids(config):
    (batch,) = take(Loader(config), 1)
    assert batch.image_id is batch.text_id is None
