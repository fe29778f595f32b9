"""Lower bounds of a step's time, from its compiled program and the rates of a chip (Williams et al. 2009)."""

import dataclasses

from lit_het.planning.chips import Chip, Topology
from lit_het.planning.collectives import BETWEEN_SLICES
from lit_het.planning.program import Program, Work


@dataclasses.dataclass(frozen=True)
class Limit:
    """One limit of a step.

    Attributes:
        name: what limits.
        amount: operations or bytes of a device in a step.
        seconds: what they take at the published rate of the chip.
    """

    name: str
    amount: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Bounds of a step; nothing was measured.

    Attributes:
        limits: each alone, if all else were free.
        serial: seconds of instructions one after the other, each at its own limit of operations or HBM, and of
            collectives during which a device computes nothing.
        model_flops: of the step on all devices, without recomputation.
        peak: floating-point operations a second of all devices.
    """

    limits: tuple[Limit, ...]
    serial: float
    model_flops: float
    peak: float

    @property
    def seconds(self) -> float:
        """The largest bound of a step."""
        return max(self.serial, *(limit.seconds for limit in self.limits))

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization at this bound: no run can have more (Chowdhery et al. 2022, App. B)."""
        return self.model_flops / self.peak / self.seconds


def serial_seconds(work: Work, chip: Chip) -> float:
    """Returns the bound of all runs of an instruction; 0 for what it moves while others run."""
    return 0.0 if work.beside else work.times * max(work.flops / chip.peak, work.hbm_bytes / chip.hbm_rate)


def roofline(program: Program, topology: Topology, model_flops: float) -> Roofline:
    """Returns the bounds of a step.

    Args:
        program: of a device, compiled for the chips.
        topology: the chips.
        model_flops: floating-point operations of the step's matrix products on all devices, without recomputation.
    """
    chip = topology.chip
    flops = sum(work.times * work.flops for work in program.works)
    hbm_bytes = sum(work.times * work.hbm_bytes for work in program.works)
    limits = [Limit("matrix products", flops, flops / chip.peak), Limit("HBM", hbm_bytes, hbm_bytes / chip.hbm_rate)]
    within = [one for one in program.collectives if one.kind != BETWEEN_SLICES]
    sent = sum(one.bytes_sent for one in within)
    limits.append(Limit("ICI", sent, sent / chip.ici_rate))
    alone = sum(one.bytes_sent for one in within if not one.overlaps)
    between = sum(one.bytes_sent for one in program.collectives if one.kind == BETWEEN_SLICES)
    if chip.dcn_rate and topology.slices > 1:
        limits.append(Limit("DCN", between, between / chip.dcn_rate))
    serial = sum(serial_seconds(work, chip) for work in program.works) + alone / chip.ici_rate
    return Roofline(tuple(limits), serial, model_flops, topology.num_chips * chip.devices * chip.peak)
