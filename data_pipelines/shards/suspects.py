"""Suspect samples that training leaves out, or weights less: the first rows of a table of ``lit-het data score``."""

import math
from collections import Counter
from collections.abc import Mapping
from fractions import Fraction
from typing import NamedTuple

from lit_het.data_pipelines.shards.sample_tables import keys_of_shards, read_rows
from lit_het.data_pipelines.shards.suspects_config import Suspects
from lit_het.errors import UserError


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
