"""Lower bounds of a step's time, from its compiled program and the rates of a chip (Williams et al. 2009)."""

import dataclasses

from lit_het.planning.chips import Topology
from lit_het.planning.collectives import BETWEEN_SLICES
from lit_het.planning.program import Program


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


def roofline(program: Program, topology: Topology, model_flops: float) -> Roofline:
    """Returns the bounds of a step.

    Args:
        program: of a device, compiled for the chips.
        topology: the chips.
        model_flops: floating-point operations of the step's matrix products on all devices, without recomputation.
    """
    chip = topology.chip
    share = 1 / chip.devices  # a device's part of its chip
    peak, hbm, ici = share * chip.bf16_tflops * 1e12, share * chip.hbm_gb_s * 1e9, share * chip.ici_gb_s * 1e9
    flops = hbm_bytes = serial = 0.0
    for work in program.works:
        flops += work.times * work.flops
        hbm_bytes += work.times * work.hbm_bytes
        if not work.beside:
            serial += work.times * max(work.flops / peak, work.hbm_bytes / hbm)
    limits = [
        Limit("matrix products", flops, flops / peak),
        Limit("HBM", hbm_bytes, hbm_bytes / hbm),
    ]
    within = [one for one in program.collectives if one.kind != BETWEEN_SLICES]
    sent = sum(one.bytes_sent for one in within)
    limits.append(Limit("ICI", sent, sent / ici))
    alone = sum(one.bytes_sent for one in within if not one.overlaps)
    between = sum(one.bytes_sent for one in program.collectives if one.kind == BETWEEN_SLICES)
    if chip.dcn_gb_s and topology.slices > 1:
        limits.append(Limit("DCN", between, between / (share * chip.dcn_gb_s * 1e9)))
    num_devices = topology.num_chips * chip.devices
    return Roofline(tuple(limits), serial + alone / ici, model_flops, num_devices * peak)
