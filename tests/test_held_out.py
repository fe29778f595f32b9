"""Held-out rows are the last of every group, the same on any number of devices."""

import jax
import numpy as np
import pytest

from lit_het import distributed
from lit_het.errors import UserError
from lit_het.sharding import MeshConfig
from lit_het.tasks.held_out import group, split
from lit_het.types import Batch


@pytest.mark.parametrize(
    ("batch_size", "fraction", "expected"),
    [
        (64, 0.125, (8, 1)),
        (64, 0.25, (4, 1)),
        (64, 0.375, (8, 3)),
        (6, 0.5, (2, 1)),
        (10, 0.3, (10, 3)),
        (8, 0.3, (4, 1)),
    ],
)
def test_a_group_is_as_small_as_it_can_be(batch_size, fraction, expected):
    assert group(batch_size, fraction) == expected


@pytest.mark.parametrize(("batch_size", "fraction"), [(4, 0.1), (4, 0.9), (1, 0.5)])
def test_some_rows_must_be_held_out_and_some_trained_on(batch_size, fraction):
    with pytest.raises(UserError, match=r"and some must be held out and some trained on; change .*held_out or --data"):
        group(batch_size, fraction)


def batch():
    numbers = np.arange(32)
    return Batch(valid=numbers % 5 > 0, image_id=np.stack([numbers, -numbers], axis=1).astype(np.uint32))


def test_every_row_is_in_one_part_with_all_of_its_fields():
    parts = split(jax.tree.map(jax.numpy.asarray, batch()), 0.25)
    rows = [np.asarray(part.image_id)[:, 0] for part in parts]
    assert (rows[1] % 4 == 3).all()
    assert sorted(np.concatenate(rows).tolist()) == list(range(32))
    for part, numbers in zip(parts, rows, strict=True):
        np.testing.assert_array_equal(part.valid, numbers % 5 > 0)


@pytest.mark.devices
def test_eight_devices_hold_out_the_rows_of_one_without_moving_any():
    expected = split(jax.tree.map(jax.numpy.asarray, batch()), 0.25)
    mesh = MeshConfig(data=8).build()
    with jax.set_mesh(mesh):
        compiled = jax.jit(lambda x: split(x, 0.25)).lower(distributed.to_global(batch(), mesh)).compile()
        found = compiled(distributed.to_global(batch(), mesh))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)
    text = compiled.as_text()
    assert text is not None
    assert not any(name in text for name in ("all-gather", "all-to-all", "collective-permute"))


@pytest.mark.devices
def test_devices_that_would_hold_out_different_numbers_of_rows_are_refused():
    mesh = MeshConfig(data=8).build()
    with jax.set_mesh(mesh), pytest.raises(UserError, match=r"3 of 8 rows cannot .* a multiple of 64"):
        jax.eval_shape(lambda x: split(x, 0.375), distributed.to_global(batch(), mesh))
