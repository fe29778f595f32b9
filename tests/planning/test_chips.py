import importlib.metadata

import pytest

from lit_het.errors import UserError
from lit_het.planning import chips
from lit_het.planning.chips import CHIPS, Topology
from lit_het.planning.plan import memory_needed


@pytest.mark.parametrize(
    ("name", "topology", "num_chips"),
    [
        ("v5e:16x16", Topology("v5e", "16x16"), 256),
        ("v5e-256", Topology("v5e", "16x16"), 256),
        ("v5litepod-16", Topology("v5e", "4x4"), 16),
        ("v6e-64", Topology("v6e", "8x8"), 64),
        ("v5p-128", Topology("v5p", "4x4x4"), 64),  # its name counts TensorCores
        ("v4:2x2x1", Topology("v4", "2x2x1"), 4),
        ("tpu7x:4x4x12", Topology("tpu7x", "4x4x12"), 192),
        ("tpu7x-128", Topology("tpu7x", "4x4x4"), 64),
    ],
)
def test_a_topology_is_named_by_its_sizes_or_as_it_is_sold(name, topology, num_chips):
    assert chips.parse(name) == topology
    assert topology.num_chips == num_chips
    assert chips.parse(name, 2).num_chips == 2 * num_chips


@pytest.mark.parametrize(
    "name",
    ["v5e", "v5e:3", "v5e-7", "v5e:4x4x4", "v5p:4x4", "v9:2x2", "v5e:0x4", "h100:8", "v5e:32x32", "v4:3x4x4", ""],
)
def test_an_unknown_topology_lists_the_known_ones(name):
    with pytest.raises(UserError, match=r"is not known.*v5e: 1x1, 2x2"):
        chips.parse(name)


@pytest.mark.parametrize(("name", "slices"), [("v5p:400x400x400", 1), ("v5e:16x16", 1_000_000)])
def test_more_chips_than_there_are_is_refused(name, slices):
    with pytest.raises(UserError, match=r"chips; at most 32,768 are planned"):
        chips.parse(name, slices)


def test_the_rates_of_chips_agree_with_each_other():
    for chip in CHIPS.values():
        assert chip.int8_tops is None or 0.99 < chip.int8_tops / chip.bf16_tflops < 2.01
        assert chip.ici_gb_s < chip.hbm_gb_s < chip.bf16_tflops * 1e3
        assert chip.dcn_gb_s is None or chip.dcn_gb_s < chip.ici_gb_s


def test_without_libtpu_or_with_that_of_another_jax_one_line_says_what_to_install(monkeypatch):
    real = importlib.metadata.version

    def version(name):
        if name == "libtpu":
            raise importlib.metadata.PackageNotFoundError
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(UserError, match=r"needs libtpu.*pip install 'lit-het\[tpu-plan\]'"):
        chips.devices(chips.parse("v5e:2x2"))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0.1" if name == "libtpu" else real(name))
    with pytest.raises(UserError, match=r"libtpu 0\.0\.1 is not .* of jax .*, which needs .*\.\*: pip install"):
        chips.devices(chips.parse("v5e:2x2"))


@pytest.mark.parametrize(
    ("reason", "gib"),
    [
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (22.25G) "
            "exceeds available HBM (15.75G).",
            22.25,
        ),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 512.00M of 15.48G hbm.", 0.5),
    ],
)
def test_a_program_that_does_not_fit_says_what_it_needs(reason, gib):
    assert memory_needed(RuntimeError(reason)) == gib * 2**30


def test_another_failure_of_the_compiler_is_one_line():
    with pytest.raises(UserError, match=r"XLA cannot compile the step for these devices: INTERNAL: bad layout$"):
        memory_needed(RuntimeError("INTERNAL: bad\n layout"))
