"""Suspect samples that training leaves out, or weights less: the first rows of a table of ``lit-het data score``."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from lit_het.console import message
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.shards.index import ShardIndex
from lit_het.data_pipelines.shards.sample_tables import keys_of_shards, read_rows
from lit_het.data_pipelines.shards.suspects_config import Suspects
from lit_het.data_pipelines.shards.urls import absolute
from lit_het.errors import UserError, pluralize


class ScoreTable(NamedTuple):
    """What a table of scores says of each shard.

    Attributes:
        suspects: keys of the suspect samples.
        counts: number of rows.
    """

    suspects: Mapping[str, frozenset[str]]
    counts: Mapping[str, int]


def read(config: Suspects) -> ScoreTable:
    """Returns what `Suspects.read` does."""
    rows = list(read_rows(config.table, "lit-het data score"))
    if not rows:
        raise UserError(f"{config.table} has no rows; write it with lit-het data score")
    # Exact decimal arithmetic, as for portions: as floats, 7 % of 100 rows would be more than 7.
    suspects = keys_of_shards(rows[: math.ceil(Fraction(str(config.fraction)) * len(rows))])
    return ScoreTable(suspects, Counter(shard for shard, _ in rows))


def suspects_of(config: LoaderConfig, index: ShardIndex, shards: Sequence[str]) -> Int[np.ndarray, " n"]:
    """Returns the samples of ``config.shards`` that a table of scores ranks as suspects, in ascending order."""
    if config.suspects is None:
        return np.empty(0, "<i8")
    table, weight = config.suspects.table, config.suspects.weight
    keys, counts = config.suspects.read()
    addresses = {absolute(address): address for address in shards}
    if unknown := sorted(shard for shard in counts if absolute(shard) not in addresses):
        raise UserError(f"{table} names {unknown[0]}, which is not a training shard; score the shards of data.shards")
    samples = sum(summary.count for summary in index.summaries[: len(shards)])
    # Images that cannot be read have no row.
    if samples - (rows := sum(counts.values())) > config.max_bad_fraction * samples:
        raise UserError(
            f"{table} has {rows:,} rows for {pluralize(samples, 'sample')}: it was cut short, or samples were added; "
            "score them again, or allow unreadable images (--data.max-bad-fraction)"
        )
    found = index.samples_of({addresses[absolute(shard)]: wanted for shard, wanted in keys.items()})
    if len(found) < (named := sum(map(len, keys.values()))):
        raise UserError(
            f"{named - len(found)} of {named} samples that {table} names are not in the shards; score them again"
        )
    consequence = f"have the weight {weight:g}" if weight else "are left out"
    message(f"{len(found):,} of {len(index):,} samples {consequence} as suspects of {table}")
    return np.asarray(found, "<i8")
