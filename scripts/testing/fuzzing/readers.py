"""Every kind of bytes from others, and how a user's command reads them."""

import contextlib
import dataclasses
import functools
import itertools
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lit_het.apps import report
from lit_het.data_pipelines.data_config import LoaderConfig, Streaming
from lit_het.data_pipelines.embeddings import StoredEmbeddings, describe
from lit_het.data_pipelines.images import decoding
from lit_het.data_pipelines.labels import CaptionWordsLabels, ClassIndexLabels, MultiHotLabels
from lit_het.data_pipelines.labels_config import ClassIndex
from lit_het.data_pipelines.prepare.captions import read_captions
from lit_het.data_pipelines.prepare.cifar import read_cifar10
from lit_het.data_pipelines.prepare.dataset import DataSet
from lit_het.data_pipelines.prepare.flowers import read_flowers
from lit_het.data_pipelines.prepare.images import as_stored
from lit_het.data_pipelines.prepare.objectnet import read_objectnet
from lit_het.data_pipelines.prepare.parquet import Columns, read_parquet
from lit_het.data_pipelines.prepare.pets import read_pets
from lit_het.data_pipelines.prepare.released_corruptions import read_cifar_c
from lit_het.data_pipelines.prepare.svhn import read_svhn
from lit_het.data_pipelines.prepare.tiles import read_colorectal
from lit_het.data_pipelines.shards import storage
from lit_het.data_pipelines.shards.index import ShardIndex
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.storage import Unreadable
from lit_het.data_pipelines.shards.stream import Stream
from lit_het.data_pipelines.shards.tars import DamagedTar, streamed_members
from lit_het.data_pipelines.shards.writing import IMAGE
from lit_het.data_pipelines.texts.captions_config import TextPlace
from lit_het.data_pipelines.texts.tokenizers_config import (
    HuggingFaceTokenizerConfig,
    SentencePieceConfig,
    TensorFlowTextConfig,
)
from lit_het.errors import UserError
from lit_het.eval.saved_runs import read_runs
from lit_het.eval.sets.recognition import read_larger
from lit_het.training.directory import load_config
from lit_het.weights.formats import open_weights
from lit_het.weights.huggingface.tokenizer import read_settings, tokenizer_files
from lit_het.weights.native import inspection as checkpoint
from lit_het.weights.native.saving import Checkpoints
from scripts.testing.fuzzing import archives, seeds
from scripts.testing.fuzzing.seeds import Files


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of bytes from others.

    Attributes:
        seeds: whole files.
        read: reads a folder of such files, as a user's command would.
        refusals: what the reader raises, by its contract, where it refuses.
        changed: patterns of names of files, of which one is changed.
        cost: inputs of the cheapest kind that one of this kind takes as long as.
    """

    seeds: Callable[[], Iterator[Files]]
    read: Callable[[Path], object]
    refusals: tuple[type[BaseException], ...] = ()
    changed: tuple[str, ...] = ("*",)
    cost: int = 1


def _tokenized(texts: list[str]) -> np.ndarray:
    return np.zeros((len(texts), 4), np.int32)


def _loader(folder: Path, **changed: Any) -> LoaderConfig:
    os.utime(folder / "shard.tar", (seeds.SHARD_TIME, seeds.SHARD_TIME))
    shard = (str(folder / "shard.tar"),)
    plain = LoaderConfig(shard, seeds.IMAGE_SIZE, batch_size=2, threads=0, max_bad_fraction=1.0)
    return dataclasses.replace(plain, labels=ClassIndex(str(folder / "classnames.txt")), **changed)


def _shard_at_random(folder: Path) -> None:
    for _ in Loader(_loader(folder), _tokenized).epoch():
        pass
    index = ShardIndex([str(folder / "shard.tar")], optional=(IMAGE, "json", "txt"))
    index.read(range(min(len(index), 100)), (IMAGE, "json"))


def _shard_in_order(folder: Path) -> None:
    with (folder / "shard.tar").open("rb") as file:
        for _ in streamed_members(file):
            pass


def _stream(folder: Path) -> None:
    batches = Stream(_loader(folder, stream=Streaming(4)), _tokenized).batches()
    try:
        for _ in itertools.islice(batches, 2):
            pass
    finally:
        batches.close()


def _embeddings(folder: Path) -> None:
    StoredEmbeddings(str(folder / "embedded"), describe(seeds.EMBEDDED, seeds.IMAGE_SIZE, random=False))
    for _ in Loader(_loader(folder, embeddings=str(folder / "embedded")), _tokenized).epoch():
        pass


def _texts(content: bytes) -> None:
    for place in (TextPlace("json/caption"), TextPlace("json/questions", prompt="{question}")):
        with contextlib.suppress(Unreadable):
            place.read({place.only_member(): content})


_MEMBERS: dict[str, Callable[[bytes], Any]] = {
    "npy": MultiHotLabels("names", 8).encode,
    "txt": CaptionWordsLabels("words", ("red", "bar")).encode,
    "cls": ClassIndexLabels("names", 8).encode,
    "json": _texts,
}


def _member(folder: Path) -> None:
    for path in folder.iterdir():
        _MEMBERS[path.suffix[1:]](path.read_bytes())


def _image(folder: Path) -> None:
    content = (folder / "image").read_bytes()
    # One way of five, as the content says: large images take seconds.
    way = zlib.crc32(content) % (len(_FILTERS) + 1)
    with contextlib.suppress(decoding.BrokenImage):
        _, content = as_stored(content, check=True)
    if way < len(_FILTERS):
        decoding.decode(content, 16, filter=_FILTERS[way])
    else:
        decoding.decode_whole(content)


def _samples(dataset: DataSet) -> None:
    for split in dataset.splits.values():
        for _ in split.read(range(min(split.num_samples, 50))):
            pass


def _parquet(folder: Path) -> None:
    _samples(read_parquet(folder))
    _samples(read_parquet(folder, columns=Columns(caption="text")))


def _archives(read: Callable[[Path, Path], DataSet], folder: Path) -> None:
    _samples(read(folder, folder))


def _cifar(folder: Path) -> None:
    (source,) = folder.iterdir()
    _samples(read_cifar10(source, folder))


def _cifar_c(folder: Path) -> None:
    _samples(read_cifar_c(folder / "CIFAR-10-C", folder, 10))


def _objectnet(folder: Path) -> None:
    _samples(read_objectnet(folder / "objectnet-1.0"))


def _svhn(folder: Path) -> None:
    _samples(read_svhn(folder, "test"))


def _captions(folder: Path) -> None:
    (source,) = folder.glob("*.json")
    _samples(read_captions(source, folder))


def _huggingface_tokenizer(folder: Path) -> None:
    HuggingFaceTokenizerConfig(folder / "tokenizer.json").build()(list(seeds.CAPTIONS))


def _sentencepiece(folder: Path) -> None:
    path = folder / "spiece.model"
    how = read_settings(path)
    tokenizer = SentencePieceConfig(path, 16, how.lowercase, how.padding_id, how.remove_punctuation).build()
    tokenizer.decode(tokenizer(list(seeds.CAPTIONS)))
    with contextlib.suppress(UserError):  # of models that cannot be exported
        tokenizer_files(tokenizer)


def _vocabulary(folder: Path) -> None:
    TensorFlowTextConfig(folder / "vocab.txt").build()(list(seeds.CAPTIONS))


def _weights(name: str, folder: Path) -> None:
    for array in open_weights(str(folder / name) if name else str(folder)).arrays.values():
        array.read()


def _run(folder: Path) -> None:
    (run,) = read_runs([folder / "run"])
    run.settings()
    assert run.last_step >= 0 or run.history
    load_config(folder / "run")


def _report(folder: Path) -> None:
    report.report([folder / "run"])


@functools.cache
def _state() -> Any:
    return seeds.train_state(0)


def _checkpoint(folder: Path) -> None:
    refusal = None
    for call in (checkpoint.verify, checkpoint.show):
        try:
            call(folder / "checkpoints")
        except UserError as error:
            refusal = error
    with Checkpoints(folder / "checkpoints") as saved_steps:
        saved_steps.restore(_state())
    if refusal:
        raise refusal


def _names(folder: Path) -> None:
    storage.read_lines(str(folder / "classnames.txt"))
    ClassIndex().build(str(folder))
    read_larger(str(folder), seeds.CLASSES)


_FILTERS: tuple[decoding.Filter, ...] = ("fast", "area", "bilinear", "bicubic")
_BROKEN_TAR = (DamagedTar, tarfile.TarError)

TARGETS: Mapping[str, Target] = {
    "shard at random": Target(seeds.shards, _shard_at_random, changed=("shard.tar",), cost=4),
    "shard in order": Target(seeds.shards, _shard_in_order, _BROKEN_TAR, ("shard.tar",)),
    "stream": Target(seeds.shards, _stream, changed=("shard.tar",), cost=4),
    "index": Target(seeds.indexes, _shard_at_random, changed=("shard.tar.index.npz",), cost=4),
    "embeddings": Target(seeds.embeddings, _embeddings, changed=("embedded/*",), cost=4),
    "member": Target(seeds.members, _member, (Unreadable,)),
    "image": Target(seeds.images, _image, (decoding.BrokenImage,)),
    "parquet": Target(archives.parquet, _parquet, cost=4),
    "CIFAR": Target(archives.cifar, _cifar, cost=4),
    "CIFAR-C": Target(archives.cifar_c, _cifar_c),
    "ObjectNet": Target(archives.objectnet, _objectnet),
    "caption file": Target(archives.captions, _captions, changed=("*.json",)),
    "flowers": Target(archives.flowers, functools.partial(_archives, read_flowers), cost=20),
    "pets": Target(archives.pets, functools.partial(_archives, read_pets), cost=4),
    "SVHN": Target(archives.svhn, _svhn, cost=20),
    "colorectal histology": Target(archives.colorectal, functools.partial(_archives, read_colorectal), cost=4),
    "tokenizer.json": Target(seeds.tokenizer_json, _huggingface_tokenizer),
    "SentencePiece": Target(seeds.sentencepiece, _sentencepiece, changed=("spiece.model", "tokenizer_config.json")),
    "vocab.txt": Target(seeds.vocabulary, _vocabulary, cost=20),
    "big_vision": Target(seeds.big_vision, functools.partial(_weights, "weights.npz"), cost=10),
    "V-MoE": Target(seeds.vmoe, functools.partial(_weights, "x"), cost=10),
    "Hugging Face": Target(seeds.huggingface, functools.partial(_weights, ""), cost=10),
    "run": Target(seeds.runs, _run, cost=2),
    "report": Target(seeds.reported, _report, cost=20),
    "checkpoint": Target(seeds.checkpoints, _checkpoint, cost=20),
    "class names": Target(seeds.names, _names),
}
