import re
import time

import jax
import jax.numpy as jnp
import pytest

from lit_het import parameters
from lit_het.errors import UserError

TREE = {
    "image_tower": {"norm": {"scale": jnp.ones(3), "bias": jnp.zeros(3)}, "kernel": jnp.ones((2, 3))},
    "head": {"scale": jnp.float32(2.0)},
}


def test_paths_join_names_with_slashes_and_flattening_inverts():
    flat = parameters.flatten(TREE)
    assert set(flat) == {"image_tower/norm/scale", "image_tower/norm/bias", "image_tower/kernel", "head/scale"}
    assert jax.tree.structure(parameters.unflatten(flat)) == jax.tree.structure(TREE)


def test_partition_matches_whole_paths_and_merge_inverts_it():
    locked, rest = parameters.partition(TREE, ["image_tower/.*"])
    assert set(locked) == {"image_tower"}
    assert set(rest) == {"head"}
    scales, others = parameters.partition(TREE, [".*/norm/scale", "head/.*"])
    assert set(parameters.flatten(scales)) == {"image_tower/norm/scale", "head/scale"}
    for first, second in ((locked, rest), (scales, others)):
        assert parameters.flatten(parameters.merge(first, second)) == parameters.flatten(TREE)


def test_no_pattern_matches_nothing():
    matching, rest = parameters.partition(TREE, [])
    assert matching == {}
    assert rest is not TREE
    assert set(parameters.flatten(rest)) == set(parameters.flatten(TREE))
    assert set(parameters.merge({}, rest)) == set(TREE)


@pytest.mark.parametrize("pattern", ["image_tower", "tower/.*", "text_tower/.*"])
def test_a_pattern_without_a_match_is_an_error_that_names_it(pattern):
    with pytest.raises(UserError) as error:
        parameters.check_patterns(TREE, ["image_tower/.*", pattern])
    assert str(error.value) == (f"pattern {pattern!r} matches no parameter; paths begin with: head, image_tower")


def test_count_takes_arrays_and_shapes_and_counts_a_scalar_as_one():
    assert parameters.count(TREE) == 3 + 3 + 6 + 1
    assert parameters.count(jax.eval_shape(lambda: TREE)) == 13


def test_cast_changes_every_type():
    assert {leaf.dtype for leaf in jax.tree.leaves(parameters.cast(TREE, jnp.bfloat16))} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize(
    "pattern",
    [
        "(a|[^x])*X",
        "(?:.|.)+X",
        "((.*))*X",
        "(.*){9}X",
        ".*.*.*.*.*X",
        ".?" * 30,
        "(?x)(.|.) *X",
        "(.|.)(?#c)*X",
        "(",
        "a{99999999999999999999}",
        "x" * 501,
        "(" * 5000 + ")" * 5000,
        r"(\)|.)*X",
        "([)]|.)*X",
        "([]x]|.)*X",
    ],
)
def test_patterns_that_may_backtrack_for_hours_are_refused(pattern):
    with pytest.raises(UserError, match="cannot be used as a pattern of parameters"):
        parameters.check_pattern(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "image_tower/.*",
        "(image_tower|text_tower)/.*",
        r".*/blocks_\d+/mlp/.*",
        "(?!head).*/(kernel|bias)",
        r"a\*\*\*\*\*[*+]b",
    ],
)
def test_patterns_of_parameters_are_accepted(pattern):
    parameters.check_pattern(pattern)


def test_the_slowest_accepted_pattern_ends_soon():
    pattern = ".*" * parameters.MAX_REPETITIONS + "X"
    parameters.check_pattern(pattern)
    began = time.monotonic()
    assert not re.fullmatch(pattern, "image_tower/encoder/blocks/mlp/experts/up/kernel")
    assert time.monotonic() - began < 2
