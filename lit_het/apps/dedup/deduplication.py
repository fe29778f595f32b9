"""Searches shards for near-duplicates, and writes the table of samples to leave out and a page with pairs of them."""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np

from lit_het.apps.dedup.options import DedupOptions
from lit_het.apps.dedup.page import write_page
from lit_het.apps.dedup.pairs import Found, LeftOut, left_out
from lit_het.apps.dedup.search import BlockSearch
from lit_het.console import Bar, message
from lit_het.data_pipelines.embeddings import EMBEDDING, StoredEmbeddings
from lit_het.data_pipelines.shards.index import ShardIndex
from lit_het.data_pipelines.shards.storage import Reader, Span, Unreadable, content_or_raise
from lit_het.data_pipelines.shards.urls import canonical
from lit_het.data_pipelines.shards.writing import IMAGE, expand
from lit_het.errors import UserError, pluralize
from lit_het.files import write_columns
from lit_het.sharding import MeshConfig

TABLE, PAGE = "exclude.csv", "duplicates.html"
# Blocks of rows: of many samples few bytes, so that they fit on a device, and enough blocks that half of the products
# are left out. Of few samples fewer blocks.
_BYTES, _BLOCKS, _LEAST_ROWS = 2**31, 16, 1024


def dedup(shards: Sequence[str], output: Path, options: DedupOptions) -> None:
    """Writes the table of near-duplicates to leave out of training, and a page with pairs of them.

    What a search found is saved by blocks, so that an interrupted one goes on, several hosts share one, and another
    threshold needs none.

    Args:
        shards: the samples to train on, of which the first of each group is kept.
        output: the folder to write.
        options: what is searched.
    """
    samples = EmbeddedSamples(expand(shards), expand(options.against) if options.against else [], options.embeddings)
    blocks = samples.blocks(output, options.floor)
    number, parts = options.part or (0, 1)
    # One block after the other has fewer samples after it: of 2 N the first and the last are those of one host.
    own = [
        block
        for place, block in enumerate(blocks)
        if min(place % (2 * parts), -1 - place % (2 * parts) + 2 * parts) == number
    ]
    _search(samples, [block for block in own if not block.path.exists()], options.floor)
    if options.part is not None:
        message(
            f"part {number}/{parts} is searched ({len(own)} of {pluralize(len(blocks), 'block')}); after all parts the "
            "same command without --part writes the table"
        )
        return
    found = Found.joined((Found.load(block.path) for block in blocks), samples.num_train)
    chosen = left_out(found, options.threshold)
    _write_table(output / TABLE, samples, chosen)
    write_page(output / PAGE, samples.index, samples.num_train, found, options)
    tests = int(chosen.is_test.sum())
    message(
        f"{pluralize(len(chosen.sample), 'sample')} of {samples.num_train:,} in {output / TABLE} ({tests:,} are of the "
        f"evaluation sets); pairs of them in {output / PAGE}"
    )


@dataclasses.dataclass(frozen=True)
class _Block:
    """Consecutive rows of a search, and the file with the pairs of these."""

    rows: range
    path: Path


class EmbeddedSamples:
    """The samples to train on and then those of evaluation sets, and their embeddings.

    Attributes:
        index: of all.
        num_train: how many are to be trained on.
    """

    def __init__(self, train: Sequence[str], test: Sequence[str], embeddings: str):
        train, test = list(dict.fromkeys(train)), list(dict.fromkeys(test))
        if common := {canonical(shard) for shard in train} & {canonical(shard) for shard in test}:
            raise UserError(f"{min(common)} is also a shard of --against; leave it out of one of them")
        self._stored = stored = StoredEmbeddings(embeddings, None)
        stored.require_one_of_each_image()
        with Bar("indexing", len(train) + len(test), "shards") as bar:
            self.index = ShardIndex([*train, *test], [IMAGE], [EMBEDDING], stored.attach, bar.advance)
        self.num_train = sum(self.index.counts[: len(train)])
        if not self.num_train:
            raise UserError(f"{train[0]}: no sample has an image; name other shards")
        self._ends, self._reader = np.cumsum(self.index.counts), Reader()

    def blocks(self, output: Path, floor: float) -> list[_Block]:
        """Returns the blocks of rows of a search, the same for any number of hosts."""
        recipe, count = self._stored.recipe, self.num_train
        number = max(_BLOCKS, -(-count * recipe.size * 4 // _BYTES))
        number = min(number, -(-count // _LEAST_ROWS))
        identity = json.dumps([recipe.fingerprint, self.index.digest, count, floor, number])
        # Of other shards, embeddings or floors the name is another one, so that no pairs are taken for these.
        folder = output / f"pairs-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{folder} cannot be made ({error.strerror}); choose another --output") from error
        ends = [count * place // number for place in range(number + 1)]
        rows = enumerate(itertools.starmap(range, itertools.pairwise(ends)))
        return [_Block(some, folder / f"{place:05d}-of-{number:05d}.safetensors") for place, some in rows]

    def read(self, samples: range) -> np.ndarray:
        """Returns the embeddings of consecutive samples ``[n d]``."""
        inner = self._ends[
            np.searchsorted(self._ends, samples.start, "right") : np.searchsorted(self._ends, samples.stop)
        ]
        spans = []
        for first, end in itertools.pairwise([samples.start, *dict.fromkeys(inner.tolist()), samples.stop]):
            one, last = self.index.span(first, EMBEDDING), self.index.span(end - 1, EMBEDDING)
            assert one is not None
            assert last is not None
            spans.append(Span(one.address, one.offset, last.offset + last.size - one.offset))
        recipe = self._stored.recipe
        try:
            content = b"".join(map(content_or_raise, self._reader.read(spans)))
        except Unreadable as error:
            raise UserError(f"{self._stored.address} cannot be read ({error}); run the same command again") from error
        return np.frombuffer(content, recipe.dtype).reshape(len(samples), recipe.size)


def _search(samples: EmbeddedSamples, blocks: Sequence[_Block], floor: float) -> None:
    """Searches blocks of rows, and saves what is found of each."""
    if not blocks:
        return
    mesh, count = MeshConfig().build(jax.local_devices()), len(samples.index)
    total = sum(len(block.rows) * (count - block.rows.start) for block in blocks)
    with Bar("searching", total, "pairs") as bar:
        for block in blocks:
            pairs = BlockSearch(samples.read, block.rows, floor, mesh).pairs(samples.num_train, count, bar.advance)
            Found.of(pairs, samples.num_train).save(block.path)


def _write_table(path: Path, samples: EmbeddedSamples, chosen: LeftOut) -> None:
    index = samples.index
    # Row by row: there may be many million.
    columns = {
        "shard": (canonical(index.shard(int(number))) for number in chosen.sample),
        "key": (index.key(int(number)) for number in chosen.sample),
        "reason": ("test" if is_test else "duplicate" for is_test in chosen.is_test),
        "similarity": (f"{similarity:.4f}" for similarity in chosen.similarity),
        "twin_shard": (canonical(index.shard(int(number))) for number in chosen.twin),
        "twin_key": (index.key(int(number)) for number in chosen.twin),
    }
    write_columns(path, columns)
