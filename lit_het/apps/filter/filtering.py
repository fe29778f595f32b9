"""Reads every sample, and writes the table of those that break a rule."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from lit_het.apps.filter.options import OF_IMAGES, OF_SCORES, FilterOptions
from lit_het.apps.filter.page import counts_table, write_page
from lit_het.apps.filter.rules import Broken, Rule, Sample, Value, judges_captions, rules_of
from lit_het.console import Bar, message
from lit_het.data_pipelines.embeddings import StoredEmbeddings, describe_captions
from lit_het.data_pipelines.images.decoding import sides_of
from lit_het.data_pipelines.images.headers import BrokenImage
from lit_het.data_pipelines.shards.index import ShardIndex
from lit_het.data_pipelines.shards.sample_tables import KEY, SHARD, read_rows
from lit_het.data_pipelines.shards.storage import TRANSIENT_CAUSES, Unreadable, content_or_raise
from lit_het.data_pipelines.shards.tables import ShardTable
from lit_het.data_pipelines.shards.urls import canonical
from lit_het.data_pipelines.shards.writing import IMAGE, expand
from lit_het.data_pipelines.texts.captions import Caption, captions_of_sample
from lit_het.data_pipelines.texts.captions_config import TextPlace
from lit_het.errors import UserError, pluralize
from lit_het.eval.report.writing import print_results
from lit_het.files import write_columns

_SAMPLES_PER_READ = 256
_SCORES, _COLUMNS = "lit-het data score", {"similarity": "similarity", "loss": "loss", "noise": "noise_norm"}


def filter_samples(shards: Sequence[str], output: Path, options: FilterOptions) -> None:
    """Writes a table with a row for each sample and rule that it breaks, and a page with some of these samples.

    Args:
        shards: of the samples.
        output: file that ends in .csv or .parquet; the page lies beside it, with the ending .html.
        options: the rules.
    """
    rules = rules_of(options)
    reader = _Reader(list(dict.fromkeys(expand(shards))), options)
    broken = list[Broken]()
    with Bar("filtering", len(reader.index), "samples") as bar:
        for number, sample in enumerate(reader.samples()):
            if values := _values(rules, sample):
                broken.append(Broken(number, sample.captions[0].text if sample.captions else "", values))
            bar.advance(1)
    reader.check_places()
    if reader.unscored:
        message(f"{reader.unscored:,} of {len(reader.index):,} samples have no score, and are not judged by it")
    _write_table(output, reader.index, broken)
    print_results(counts_table(rules, broken, len(reader.index)))
    page = output.with_suffix(".html")
    write_page(page, reader.index, rules, broken, options.shown)
    count = len(reader.index)
    message(f"{len(broken):,} of {pluralize(count, 'sample')} in {output}; some of each rule in {page}")
    if len(broken) == count:
        message("no sample is left: loosen the rules")


def _values(rules: Sequence[Rule], sample: Sample) -> dict[str, Value]:
    found = {rule.name: rule.broken_by(sample) for rule in rules}
    return {name: value for name, value in found.items() if value is not None}


class _Reader:
    """Reads what rules need of each sample, and no more.

    Attributes:
        index: of all samples, also those that training excludes.
        unscored: samples without a score, as their image or caption could not be read.
    """

    def __init__(self, addresses: Sequence[str], options: FilterOptions):
        self._options, self._place = options, options.place
        self._reads_images = any(name in options.limits for name in OF_IMAGES)
        self._images = self._texts = None
        if options.embeddings is not None and options.text_embeddings is not None:
            place = TextPlace(options.captions)
            self._images = StoredEmbeddings(options.embeddings, None)
            self._texts = StoredEmbeddings(
                options.text_embeddings, describe_captions(place), place.only_member(), "text_embedding"
            )
            _check_sizes(self._images, self._texts)
        self._stored = [one for one in (self._images, self._texts) if one is not None]
        kinds = [*self._place.members, *(one.member for one in self._stored)]
        self._kinds: list[str] = list(dict.fromkeys([*kinds, IMAGE] if self._reads_images else kinds))
        with Bar("indexing", len(addresses), "shards") as bar:
            self.index = ShardIndex(addresses, (), self._kinds, self._attach, bar.advance)
        if not len(self.index):
            raise UserError(f"{addresses[0]}: no shard has a sample; name other shards")
        self._wanted = [name for name in OF_SCORES if name in options.limits]
        self._scores = None if options.scores is None else _read_scores(options.scores, self._wanted, addresses)
        self.unscored = 0
        self._captioned, self._languages = 0, set[str | None]()

    def check_places(self) -> None:
        """Checks, after all samples, that some had what a rule of captions or languages judges."""
        options = self._options
        if judges_captions(options) and not self._captioned:
            raise UserError(f"no sample has a caption in .{options.captions}; name the place with --captions")
        if options.language is not None and self._languages == {None}:
            place = options.language.place
            raise UserError(f"no caption has a language in .{place}; name the place with --language-place")

    def _attach(self, table: ShardTable) -> ShardTable:
        for stored in self._stored:
            table = stored.attach(table)
        return table

    def samples(self) -> Iterator[Sample]:
        """Yields all samples in order."""
        for start in range(0, len(self.index), _SAMPLES_PER_READ):
            numbers = range(start, min(start + _SAMPLES_PER_READ, len(self.index)))
            for number, contents in zip(numbers, self.index.read(numbers, self._kinds), strict=True):
                try:
                    yield self._sample(number, dict(zip(self._kinds, contents, strict=True)))
                except Unreadable as error:
                    shard, key = self.index.shard(number), self.index.key(number)
                    raise UserError(f"{shard}: key {key} cannot be read ({error}); run the command again") from error

    def _sample(self, number: int, members: dict[str, bytes | Unreadable]) -> Sample:
        problems, captions, sides = dict[str, str](), list[Caption](), None
        try:
            captions = captions_of_sample(self._place, members)
            self._captioned += 1
            self._languages.update(caption.language for caption in captions)
        except Unreadable as error:
            _raise_if_transient(error)
            problems["caption"] = error.cause
        if self._reads_images:
            try:
                sides = sides_of(content_or_raise(members[IMAGE]))
            except (BrokenImage, Unreadable) as error:
                _raise_if_transient(error)
                problems["image"] = error.cause
        scores = self._scores_of(number, members)
        self.unscored += bool(self._wanted) and not scores
        return Sample(captions, sides, scores, problems)

    def _scores_of(self, number: int, members: dict[str, bytes | Unreadable]) -> dict[str, float]:
        if self._scores is not None:
            row = self._scores.get((canonical(self.index.shard(number)), self.index.key(number)), ())
            return dict(zip(self._wanted, row, strict=False))
        if self._images is None or self._texts is None:
            return {}
        try:
            image = self._images.view(content_or_raise(members[self._images.member]), 0)
            text = self._texts.view(content_or_raise(members[self._texts.member]), 0)
        except Unreadable as error:
            _raise_if_transient(error)
            return {}
        image, text = image.astype(np.float32), text.astype(np.float32)
        return {"similarity": float(image @ text / (np.linalg.norm(image) * np.linalg.norm(text) + 1e-8))}


def _raise_if_transient(error: BrokenImage | Unreadable) -> None:
    if error.cause in TRANSIENT_CAUSES:
        raise error


def _check_sizes(images: StoredEmbeddings, texts: StoredEmbeddings) -> None:
    images.require_one_of_each_image()
    if images.recipe.size != texts.recipe.size:
        raise UserError(
            f"{images.address} holds embeddings of size {images.recipe.size}, {texts.address} of size "
            f"{texts.recipe.size}: the similarity needs those of one model"
        )


def _read_scores(
    table: Path, names: Sequence[str], addresses: Sequence[str]
) -> dict[tuple[str, str], tuple[float, ...]]:
    """Returns columns of a table of scores, by the shard and the key of their samples."""
    columns = [_COLUMNS[name] for name in names]
    found = dict[tuple[str, str], tuple[float, ...]]()
    own = set(map(canonical, addresses))
    for shard, key, *values in read_rows(table, _SCORES, (SHARD, KEY, *columns)):
        if (shard := canonical(shard)) in own:
            try:
                found[shard, key] = tuple(map(float, values))
            except ValueError as error:
                raise UserError(f"{table}: {key} has {error}; write it again with {_SCORES}") from error
    if not found:
        raise UserError(f"{table} has no sample of {addresses[0]}; score these shards with {_SCORES}")
    return found


def _write_table(output: Path, index: ShardIndex, broken: Sequence[Broken]) -> None:
    rows = [(one, name, value) for one in broken for name, value in one.values.items()]
    columns = {
        SHARD: [canonical(index.shard(one.number)) for one, *_ in rows],
        KEY: [index.key(one.number) for one, *_ in rows],
        "reason": [name for _, name, _ in rows],
        # Numbers are no texts in CSV, where a negative one would look like a formula; parquet has one type a column.
        "value": [str(value) if output.suffix == ".parquet" else value for *_, value in rows],
        "caption": [one.caption for one, *_ in rows],
    }
    write_columns(output, columns)
