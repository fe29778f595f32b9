"""Batches from a pipeline of `webdataset` that the user has put together in Python, in place of shards.

It yields samples as dictionaries, ``{"__key__": "000017", "jpg": bytes, "txt": "a cat"}``, and decides their order.
What a batch is made of them is the same as of other shards. A pipeline that ends begins anew. Like a `Stream` it cannot
seek: a resumed run draws other samples.
"""

import collections
import io
import itertools
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np

from lit_het.data_pipelines.batches import RawSample, Tokenizer, batch_maker, input_of, rows_per_process
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.shards.faults import FaultLog
from lit_het.data_pipelines.shards.stream import Stream, digest_of, first_member
from lit_het.data_pipelines.shards.writing import encoded
from lit_het.errors import UserError
from lit_het.types import Batch


def open_stream(
    config: LoaderConfig, tokenizer: Tokenizer | None, allow_commands: bool, pipeline: Iterable[Any] | None
) -> "AnyStream":
    """Returns the stream of a pipeline, or without one that of the shards; arguments as those of the two classes."""
    if pipeline is not None:
        return PipelineStream(config, pipeline, tokenizer)
    return Stream(config, tokenizer, allow_commands=allow_commands)


class PipelineStream:
    """Reads batches of NumPy arrays from a pipeline; its attributes are those of a `Stream`.

    Args:
        config: of the data; its ``shards`` are the record of what the pipeline reads.
        pipeline: such as a ``webdataset.WebDataset``, or any iterable of its samples.
        tokenizer: captions to ids ``[n l]``; None leaves ``Batch.text`` out.
    """

    buffer_size = 1

    def __init__(self, config: LoaderConfig, pipeline: Iterable[Any], tokenizer: Tokenizer | None = None):
        if config.stream is None:
            raise UserError("a pipeline cannot seek: set data.stream to Streaming()")
        if config.exclude:
            raise UserError("a pipeline chooses its samples itself: leave out data.exclude, or drop them in a select()")
        if not isinstance(pipeline, Iterable) or isinstance(pipeline, Iterator):
            raise UserError(
                f"a pipeline of webdataset can be iterated again and again, and {type(pipeline).__name__} cannot"
            )
        (self._addresses,) = config.data_sets()
        self.config, self._pipeline = config, pipeline
        self.faults = FaultLog(config.max_bad_fraction)
        self._maker = batch_maker(config, input_of(config, tokenizer), tokenizer, self._addresses, self.faults)
        self.num_classes = self._maker.num_classes

    @property
    def digest(self) -> str:
        """Identifies the shards that are named beside the pipeline."""
        return digest_of(self._addresses)

    def batches(
        self,
        position: int = 0,
        process_index: int = 0,
        process_count: int = 1,
        *,
        advance: Callable[[int], None] = lambda count: None,
    ) -> Generator[Batch]:
        """Endless training batches; arguments and rows are those of `Stream.batches`."""
        config, size = self.config, self.config.batch_size
        rows = rows_per_process(size, process_count)
        # By these, `split_by_node` and `split_by_worker` know which part of the shards is that of a process.
        os.environ |= {"RANK": str(process_index), "WORLD_SIZE": str(process_count)}
        os.environ |= {"WORKER": "0", "NUM_WORKERS": "1"}
        samples = self._samples()

        def read() -> list[RawSample]:
            return list(itertools.islice(samples, rows))

        def make(found: Future[list[RawSample]], number: int) -> Batch:
            first = position + number * size + process_index * rows
            return self._maker.make(found.result(), range(first, first + rows), None)

        # A pipeline is read by one thread; images are decoded by many.
        reader = ThreadPoolExecutor(1, "pipeline")
        makers = ThreadPoolExecutor(max(1, config.threads), "stream")
        ahead = max(config.threads, config.prefetch_batches) if config.threads else 0
        waiting: collections.deque[Future[Batch]] = collections.deque()
        try:
            for number in itertools.count():
                waiting.append(makers.submit(make, reader.submit(read), number))
                if len(waiting) > ahead:
                    batch = waiting.popleft().result()
                    if number == ahead:
                        advance(1)
                    yield batch
        finally:
            for pool in (makers, reader):
                pool.shutdown(cancel_futures=True)
            samples.close()

    def _samples(self) -> Generator[RawSample]:
        while True:
            is_empty = True
            for sample in self._pipeline:
                is_empty = False
                yield self._raw(sample)
            if is_empty:
                raise UserError(
                    "the pipeline yields no sample on this process; check its shards, and how it splits them"
                )

    def _raw(self, sample: Any) -> RawSample:
        if not isinstance(sample, Mapping) or "__key__" not in sample:
            raise UserError(
                f"the pipeline yields {type(sample).__name__}, not samples of webdataset, dictionaries with __key__: "
                "leave out to_tuple() and batched()"
            )
        key = str(sample["__key__"])
        members = {str(name).lower(): value for name, value in sample.items() if not str(name).startswith("__")}
        found = {name: _content(key, name, value) for name, value in members.items()}
        chosen = {kind: first_member(found, kind, key) for kind in self._maker.members}
        return RawSample(str(sample.get("__url__", "the pipeline")), key, chosen)


def _content(key: str, name: str, value: Any) -> bytes:
    """Returns a member as it is in a shard; what ``decode()`` has made of it is encoded again, images without loss."""
    if isinstance(value, bytes):
        return value
    try:
        if hasattr(value, "save") or isinstance(value, np.ndarray):
            return _png(value)
        return encoded({"__key__": key, name: value})[name]
    except Exception as error:  # of the encoder of any type
        raise UserError(
            f"the pipeline: {key}.{name} is {type(value).__name__}, which is no content of a shard; decode less of it"
        ) from error


def _png(image: Any) -> bytes:
    """Returns an image of Pillow, or an array ``[h w c]`` of uint8 or of floats in [0, 1], as a PNG."""
    from PIL import Image

    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 and not (image.min() >= 0 and image.max() <= 1):
            raise ValueError("floats beyond [0, 1]")  # of 255 levels all would be white
        array = image if image.dtype == np.uint8 else np.round(image * 255).clip(0, 255).astype(np.uint8)
        image = Image.fromarray(array)
    content = io.BytesIO()
    image.save(content, "png", compress_level=1)
    return content.getvalue()


AnyStream: TypeAlias = Stream | PipelineStream
