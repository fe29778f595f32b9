import itertools

import jax
import jax.numpy as jnp
import numpy as np

from lit_het.random import keys_at, shuffled_batches


def bits(key):
    return tuple(np.asarray(jax.random.key_data(key)).tolist())


def test_keys_are_a_function_of_seed_step_and_name():
    assert bits(keys_at(1, 2)("noise")) == bits(keys_at(1, 2)("noise"))


def test_other_seeds_steps_and_names_give_other_keys():
    keys = {bits(keys_at(seed, step)(name)) for seed in range(4) for step in range(50) for name in ("noise", "drop")}
    assert len(keys) == 4 * 50 * 2


def test_a_traced_step_gives_the_key_of_the_number():
    traced = jax.jit(lambda step: keys_at(0, step)("noise"))(jnp.int32(7))
    assert bits(traced) == bits(keys_at(0, 7)("noise"))


def test_neighbouring_steps_give_uncorrelated_noise():
    noise = [np.asarray(jax.random.normal(keys_at(0, step)("noise"), (10_000,))) for step in (0, 1)]
    # A correlation of independent normals has standard error 1/100.
    assert abs(np.corrcoef(noise)[0, 1]) < 0.05


def test_every_pass_is_a_permutation_which_may_begin_within_a_batch_and_depends_on_the_seed():
    rows = np.concatenate(list(itertools.islice(shuffled_batches(10, 4, seed=0), 5)))
    assert sorted(rows[:10].tolist()) == sorted(rows[10:].tolist()) == list(range(10))
    assert rows[:10].tolist() != rows[10:].tolist()
    first, same, other = (next(shuffled_batches(10, 8, seed)).tolist() for seed in (0, 0, 1))
    assert first == same != other
