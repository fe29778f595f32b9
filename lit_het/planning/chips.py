"""TPU chips and slices of them, as libtpu describes them to its compiler; none has to be there."""

import dataclasses
import importlib.metadata
import math
import os
import re
from collections.abc import Sequence
from typing import Any

from lit_het.errors import UserError
from lit_het.library_logs import NO_CHIPS

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """A chip, by the figures of Google's page of its kind ("Cloud TPU": v4, v5e, v5p, v6e, TPU7x).

    Attributes:
        hbm_gib: memory.
        bf16_tflops: matrix products of bfloat16, TFLOP/s.
        int8_tops: those of int8, Tera-operations/s; None where unpublished.
        hbm_gb_s: to and from its memory, GB/s.
        ici_gb_s: sent over all of its links to neighbours together, GB/s; half of the published sum of both directions
            (v4: Jouppi et al. 2023, Table 4).
        dcn_gb_s: sent to other slices, GB/s, a share of the published rate of a host or pod; None where unpublished.
        sizes: slices that are sold.
        devices: of JAX; only a v7x has one for each of its two cores.
        cores: TensorCores that its public name counts ("v5p-128" has 64 chips).
        options: for the description of a slice.
    """

    hbm_gib: int
    bf16_tflops: int
    int8_tops: int | None
    hbm_gb_s: int
    ici_gb_s: int
    dcn_gb_s: float | None
    sizes: tuple[str, ...]
    devices: int = 1
    cores: int = 1
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def memory(self) -> int:
        """Bytes of a device."""
        return self.hbm_gib * GIB // self.devices

    @property
    def peak(self) -> float:
        """Floating-point operations of bfloat16 a second, of a device."""
        return self.bf16_tflops * 1e12 / self.devices

    @property
    def hbm_rate(self) -> float:
        """Bytes a second to and from its memory, of a device."""
        return self.hbm_gb_s * 1e9 / self.devices

    @property
    def ici_rate(self) -> float:
        """Bytes a second to neighbours, of a device."""
        return self.ici_gb_s * 1e9 / self.devices

    @property
    def dcn_rate(self) -> float | None:
        """Bytes a second to other slices, of a device; None where unpublished."""
        return self.dcn_gb_s and self.dcn_gb_s * 1e9 / self.devices


_FLAT = tuple(["1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"])
_CUBES = tuple(["2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16"])
_MOST_CHIPS = 2**15  # several times the largest pods

CHIPS = {
    "v4": Chip(32, 275, 275, 1200, 300, None, _CUBES, cores=2, options=(("chip_config_name", "megacore"),)),
    "v5e": Chip(16, 197, 393, 819, 200, 3.125, _FLAT),
    "v5p": Chip(95, 459, 918, 2765, 600, 6.25, _CUBES, cores=2),
    "v6e": Chip(32, 918, 1836, 1638, 400, 12.5, _FLAT),
    "tpu7x": Chip(192, 2307, None, 7380, 600, 12.5, _CUBES, devices=2, cores=2),
}


@dataclasses.dataclass(frozen=True)
class Topology:
    """Slices of chips.

    Attributes:
        kind: of the chips, a key of `CHIPS`.
        size: chips along each dimension of a slice, such as ``16x16``.
        slices: number of slices, connected by the network of the data centre.
    """

    kind: str
    size: str
    slices: int = 1

    @property
    def chip(self) -> Chip:
        """Its chip."""
        return CHIPS[self.kind]

    @property
    def num_chips(self) -> int:
        """Chips of all slices."""
        return self.slices * math.prod(map(int, self.size.split("x")))

    def __str__(self) -> str:
        return f"{self.kind}:{self.size}" + (f" x {self.slices} slices" if self.slices > 1 else "")


def parse(name: str, slices: int = 1) -> Topology:
    """Returns the slices of a name: chips along each dimension, "v5e:16x16", or the name of Google Cloud, "v5e-256"."""
    kind, separator, size = name.replace("v5litepod", "v5e").replace("-", ":").partition(":")
    chip = CHIPS.get(kind)
    if chip and separator and size.isdigit():
        by_chips = {chip.cores * Topology(kind, one).num_chips: one for one in chip.sizes}
        size = by_chips.get(int(size), "")
    if chip is None or not _is_sold(size, chip):
        raise _unknown(name)
    topology = Topology(kind, size, slices)
    if topology.num_chips > _MOST_CHIPS:
        raise UserError(f"--topology {topology} has {topology.num_chips:,} chips; at most {_MOST_CHIPS:,} are planned")
    return topology


def _is_sold(size: str, chip: Chip) -> bool:
    if size in chip.sizes:
        return True
    # There are more slices of cubes than those of the list, such as 4x4x12.
    is_cubes = chip.sizes is _CUBES and re.fullmatch(r"([1-9]\d*x){2}[1-9]\d*", size)
    return bool(is_cubes) and all(int(length) % 4 == 0 for length in size.split("x"))


def _unknown(name: str) -> UserError:
    known = "; ".join(f"{kind}: {', '.join(chip.sizes)}" for kind, chip in CHIPS.items())
    return UserError(f"--topology {name} is not known; a kind and a size are, such as v5e:16x16. {known}")


def devices(topology: Topology) -> Sequence[Any]:
    """Returns descriptions of the devices, for which programs can be compiled and not run."""
    check_libtpu()
    from jax.experimental import topologies

    options: dict[str, Any] = dict(topology.chip.options)
    if topology.size == "1x1":
        options["chips_per_host_bounds"] = (1, 1, 1)
    if topology.slices > 1:
        options["num_slices"] = topology.slices
    name = f"{topology.kind}:{topology.size}"
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    except Exception as error:  # JAX raises what the library's C interface returns, of no documented class
        if "INVALID_ARGUMENT" in str(error):
            raise _unknown(name) from error
        raise UserError(f"libtpu does not describe {topology}: {' '.join(str(error).split())[:300]}") from error


def check_libtpu() -> None:
    """Checks that libtpu is installed, and is the one that this JAX needs."""
    install = "pip install 'lit-het[tpu-plan]' (a compiler; no TPU is needed)"
    try:
        installed = importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(f"--topology needs libtpu, the compiler for TPUs: {install}") from error
    needs = (re.match(r"libtpu==([\d.]+)\.\*", line) for line in importlib.metadata.requires("jax") or ())
    wanted = next((found[1] for found in needs if found), "")
    if wanted and installed != wanted and not installed.startswith(f"{wanted}."):
        raise UserError(
            f"libtpu {installed} is not the compiler of jax {importlib.metadata.version('jax')}, which needs "
            f"{wanted}.*: {install}"
        )


def environment() -> dict[str, str]:
    """Returns the environment of a process that compiles for TPUs: JAX on the CPU, and no search for chips."""
    return os.environ | {
        **NO_CHIPS,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",  # no metadata server of Google Cloud is asked for the chips of this machine
        # libtpu takes the lock of the chips, /tmp/libtpu_lockfile, when it is loaded, although no chip is opened here.
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
