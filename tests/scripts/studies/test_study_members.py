"""Members that share parameters: what each of them computes with, and what exists once."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from lit_het import parameters
from lit_het.configs import quickstart_lit_deterministic
from scripts.studies.study_members import Sharing, SharingConfig, SharingTask, arms

M, DEPTH = 3, 2
SHARING = {name: sharing for name, sharing in arms(DEPTH).items() if sharing is not None}


def task_of(sharing: Sharing) -> SharingTask:
    task: Any = quickstart_lit_deterministic.get_config().task
    text = dataclasses.replace(
        task.text_tower, encoder=dataclasses.replace(task.text_tower.encoder, width=8, depth=DEPTH, mlp_width=16)
    )
    fields = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
    built = SharingConfig(**fields | {"text_tower": text, "text_members": M, "sharing": sharing}).build()
    assert isinstance(built, SharingTask)
    return built


@pytest.mark.parametrize("name", SHARING)
def test_a_member_has_the_arrays_of_a_single_tower_and_shares_what_is_named(name):
    sharing = SHARING[name]
    task = task_of(sharing)
    params = task.initialize(jax.random.key(0))
    expected = parameters.flatten(task.one.shapes)
    members = [parameters.flatten(task.member(params, number)) for number in range(M)]
    for member in members:
        assert {path: array.shape for path, array in member.items()} == {p: a.shape for p, a in expected.items()}
    for path in expected:
        first, last = members[0][path], members[-1][path]
        if path.startswith("text_tower/") and path.endswith("kernel"):
            low = sharing.blocks if "blocks/" in path else 0
            whole = sharing.of(path) and not sharing.rank_one
            np.testing.assert_array_equal(first[:low], last[:low])
            assert np.array_equal(first[low:], last[low:]) == whole


def test_kernels_of_batch_ensemble_differ_by_signs_of_inputs_and_outputs():
    task = task_of(SHARING["kernels (BatchEnsemble)"])
    params = task.initialize(jax.random.key(0))
    path = "text_tower/encoder/blocks/mlp/up/kernel"
    shared = parameters.flatten(params)[f"shared/{path}"]
    r, s = (parameters.flatten(params)[f"vectors/{side}/{path}"] for side in ("in", "out"))
    for number in range(M):
        for block in range(DEPTH):
            expected = np.diag(r[number, block]) @ shared[block] @ np.diag(s[number, block])
            found = parameters.flatten(task.member(params, number))[path][block]
            np.testing.assert_allclose(found, expected, atol=1e-6)
