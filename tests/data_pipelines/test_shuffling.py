"""The order of training on a table in memory."""

import itertools

import numpy as np

from lit_het.data_pipelines.shuffling import shuffled_batches


def test_every_pass_is_a_permutation_which_may_begin_within_a_batch_and_depends_on_the_seed():
    rows = np.concatenate(list(itertools.islice(shuffled_batches(10, 4, seed=0), 5)))
    assert sorted(rows[:10].tolist()) == sorted(rows[10:].tolist()) == list(range(10))
    assert rows[:10].tolist() != rows[10:].tolist()
    first, same, other = (next(shuffled_batches(10, 8, seed)).tolist() for seed in (0, 0, 1))
    assert first == same != other
