"""Equal work in one process is compiled once."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

from lit_het.heads.contrastive import DeterministicContrastiveConfig
from lit_het.models.opening import open_run
from lit_het.models.predictor import Model
from lit_het.programs import shared
from lit_het.training.train import train
from tests.cli.conftest import changed


@pytest.fixture
def compiled():
    """Lists the functions that are lowered for XLA, by JAX's events."""
    events = []

    def note(event: str, duration_secs: float, **about: str | int) -> None:
        if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
            events.append(about.get("fun_name", event))

    jax.monitoring.register_event_duration_secs_listener(note)
    yield events
    jax.monitoring.unregister_event_duration_listener(note)


def test_a_configuration_that_is_trained_again_compiles_nothing_and_gives_the_same(lit_config, tmp_path, compiled):
    first = train(lit_config)
    data = shutil.copytree(lit_config.data.shards[0], tmp_path / "data")
    again = dataclasses.replace(lit_config.data, shards=(str(data),), threads=0)
    again = dataclasses.replace(lit_config, run_dir=tmp_path / "again", data=again)
    compiled.clear()
    second = train(again)
    assert compiled == []
    jax.tree.map(np.testing.assert_array_equal, first.params, second.params)


@pytest.mark.slow
def test_another_learning_rate_or_seed_is_another_step(lit_config, tmp_path):
    config = changed(lit_config, task__head=DeterministicContrastiveConfig())
    faster = dataclasses.replace(config.schedule, learning_rate=0.1)
    params = [
        train(dataclasses.replace(config, run_dir=tmp_path / str(number), **change)).params
        for number, change in enumerate(({}, {"schedule": faster}, {"seed": 1}))
    ]
    words = [tree["text_tower"]["tokens"]["embedding"] for tree in params]
    assert len({np.asarray(one).tobytes() for one in words}) == 3


def test_a_run_that_is_opened_twice_has_one_task_and_its_programs(trained_lit):
    first, second = (open_run(trained_lit.run_dir) for _ in range(2))
    assert first.task is second.task
    models = [run.model() for run in (first, second)]
    assert len({id(model.programs._compiled) for model in models if isinstance(model, Model)}) == 1


def test_equal_arguments_share_a_result_and_lists_are_computed_anew():
    calls = []

    @shared
    def found(*arguments):
        calls.append(arguments)
        return object()

    assert found((1, 2), 3) is found((1, 2), 3)
    assert found([1, 2]) is not found([1, 2])
    assert len(calls) == 3
