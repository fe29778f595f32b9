"""Changes of a step that does not fit, as they are listed and as ``--fit`` compiles them."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest

from lit_het import sharding
from lit_het.configs import lit_so400m_het_xl
from lit_het.planning import alternatives, chips, report, slices
from lit_het.planning.chips import CHIPS, GIB, Topology
from lit_het.planning.plan import Compiled, Plan, Step
from lit_het.planning.program import Program
from lit_het.sharding import MeshConfig
from tests import tiny

pytestmark = pytest.mark.devices

TOPOLOGY = Topology("v5e", "2x4")


class Formula(NamedTuple):
    """In the place of `Step`, which takes a second to trace: bytes by arithmetic that flags change as they should."""

    config: Any
    mesh: Any

    def memory(self):
        sharding.check_batch_size(self.config.data.batch_size, self.mesh)
        rows = self.config.data.batch_size // sharding.num_batch_shards(self.mesh)
        task = self.config.task
        saved = {"none": 8, "dots": 4, "full": 1}[task.text_tower.encoder.remat] * 100_000 * rows // task.microbatches
        logits = rows * (self.config.data.batch_size if task.loss.form == "gather" else task.loss.block_size)
        state = 10_000_000 // self.mesh.shape["fsdp"]
        return {
            "trainable parameters": state,
            "optimizer state": 2 * state,
            "locked parameters": state,
            "batch": 1000 * rows,
            "saved for the backward pass": saved,
            "further temporary values": 12 * logits,
        }


@pytest.fixture(name="config")
def _config():
    config = tiny.shrink(lit_so400m_het_xl.get_config(), Path("data"), Path("run"))
    data = dataclasses.replace(config.data, batch_size=512)
    task = dataclasses.replace(config.task, loss=dataclasses.replace(config.task.loss, block_size=64))
    return dataclasses.replace(config, data=data, task=task, mesh=MeshConfig(fsdp=1))


@pytest.fixture(name="compiles")
def _compiles(config, monkeypatch):
    """Compilers that need what the formula says; returns how to set the memory of a chip."""
    counts = Step(config, config.mesh.build(jax.devices())).counts()

    def compiled(config, devices, _):
        mesh = config.mesh.build(devices)
        memory = Formula(config, mesh).memory()
        fits = sum(memory.values()) <= CHIPS["v5e"].memory
        one = Compiled(0, sum(memory.values()), 0, "a program" if fits else "", Program((), (), (), 0), 1.0)
        return Plan(mesh, config.data.batch_size, counts, 10**9, 0, memory, one)

    monkeypatch.setattr(alternatives, "Step", Formula)
    monkeypatch.setattr(slices, "plan", compiled)

    def with_memory(size):
        monkeypatch.setitem(CHIPS, "v5e", dataclasses.replace(CHIPS["v5e"], hbm_gib=size / GIB))

    return with_memory


def whole(config):
    return sum(Formula(config, config.mesh.build(jax.devices())).memory().values())


def test_changes_that_fit_alone_are_compiled_and_one_of_several_where_none_does(config, compiles):
    devices = jax.devices()
    compiles(0.9 * whole(config))
    made = slices.plan(config, devices, "")
    alone = [one.name for one in slices.fitting(config, made, TOPOLOGY)]
    assert "--task.text-tower.encoder.remat full" in alone
    assert all(one.fits for one in slices.fitting(config, made, TOPOLOGY))

    # Less than any change needs by itself.
    smallest = min(sum(one.plan.memory.values()) for one in slices.fitting(config, made, TOPOLOGY))
    compiles(0.9 * smallest)
    (together,) = slices.fitting(config, made, TOPOLOGY)
    assert len(together.name.split(" --")) > 1
    assert together.fits
    assert together.plan.memory["further temporary values"] < made.memory["further temporary values"]


def test_a_step_that_does_not_fit_names_flags_and_shows_nothing_of_a_program(config, compiles, capsys, monkeypatch):
    monkeypatch.setattr(chips, "devices", lambda _: jax.devices())
    compiles(0.9 * whole(config))
    assert not report.report_on_chips(config, TOPOLOGY, None, fit=False)
    told = capsys.readouterr().out
    assert "The step does not fit: it needs" in told
    assert ", which fits\nWith --fit they are compiled.\n" in told
    for nothing in ("compiled 0.000", "collectives of a step", "Bounds, and not measurements"):
        assert nothing not in told
