"""A data set of a mixture that is held out has its own rows of every batch."""

import dataclasses

import numpy as np
import pytest

from lit_het.data_pipelines.data_config import WeightedShards
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.order import HeldOut, Sequential, Shuffled
from lit_het.data_pipelines.shards.portions import Portion
from tests.data_pipelines.conftest import joined, take
from tests.data_pipelines.test_loader import assert_equal, config, from_hosts, labels_of, rows
from tests.refusals import assert_refused


def test_an_order_of_held_out_positions_takes_both_orders_as_they_are():
    order = HeldOut(Sequential(100), Shuffled(7, 0), size=5, count=2)
    taken = [order[position] for position in range(50)]
    assert [sample for place, sample in enumerate(taken) if place % 5 < 3] == list(range(30))
    assert [sample for place, sample in enumerate(taken) if place % 5 >= 3] == [Shuffled(7, 0)[i] for i in range(20)]


def mixed(shards, *others: WeightedShards, **changes) -> Loader:
    return Loader(config(shards / "shard-000000.tar", batch_size=8, mixture=others, **changes))


@pytest.mark.parametrize("process_count", [1, 2, 4])
def test_the_last_rows_of_every_group_are_held_out_at_any_position_and_on_any_number_of_hosts(shards, process_count):
    loader = mixed(shards, WeightedShards((str(shards / "shard-000002.tar"),), 1 / 3, held_out=True))
    assert loader.config.held_out_share == pytest.approx(0.25)
    whole = joined(take(loader, 6))
    labels = np.array(labels_of(whole)).reshape(-1, 4)
    assert set(labels[:, 3].tolist()) == {20, 21, 22}
    assert (labels[:, :3] < 10).all()
    hosts = (take(loader, 2, 16, process, process_count) for process in range(process_count))
    assert_equal(from_hosts(hosts), rows(whole, slice(16, 32)))


def test_further_sets_of_a_mixture_share_the_other_rows(shards):
    held_out = WeightedShards((str(shards / "shard-000002.tar"),), 0.5, held_out=True)
    loader = mixed(shards, held_out, WeightedShards((str(shards / "shard-000001.tar"),), 0.5))
    labels = np.array(labels_of(joined(take(loader, 12)))).reshape(-1, 4)
    assert set(labels[:, 3].tolist()) == {20, 21, 22}
    others = labels[:, :3]
    assert (others < 20).all()
    assert (others >= 10).mean() == pytest.approx(1 / 3, abs=0.02)


def test_only_one_set_is_held_out_and_has_a_row_in_a_batch(shards):
    one = WeightedShards((str(shards),), held_out=True)
    two = (one, dataclasses.replace(one, weight=2.0))
    assert_refused(
        "only one data set of the mixture can be held_out; list its shards in one", config, shards, mixture=two
    )
    assert config(shards, mixture=(dataclasses.replace(one, held_out=False),)).held_out_share is None
    few = WeightedShards((str(shards / "shard-000002.tar"),), 0.01, held_out=True)
    assert_refused("some must be held out and some trained on", mixed, shards, few)


def test_samples_that_are_held_out_and_trained_on_are_refused(shards):
    same = WeightedShards((str(shards / "shard-000000.tar"),), held_out=True)
    assert_refused(r"shard-000000.tar is held out and trained on; give both data sets the", mixed, shards, same)
    alias = dataclasses.replace(same, shards=(f"{shards}/./shard-000000.tar",))
    assert_refused(r"shard-000000.tar is held out and trained on", mixed, shards, alias)
    # The last tenth of one shard is trained on where the first nine tenths of two are.
    more = config(shards, mixture=(dataclasses.replace(same, portion=Portion(90)),), portion=Portion(0, 90))
    assert_refused(r"shard-000000.tar is held out and trained on", Loader, more)
    apart = mixed(shards, dataclasses.replace(same, portion=Portion(50)), portion=Portion(0, 50))
    labels = np.array(labels_of(joined(take(apart, 5)))).reshape(-1, 2)
    assert not {*labels[:, 0].tolist()} & {*labels[:, 1].tolist()}
