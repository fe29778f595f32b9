"""The plan of a step on slices of TPUs, by the compiler for these chips: ``lit-het plan --topology``."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from lit_het.configs.experiment import ExperimentConfig
from lit_het.configs.flags import with_flags
from lit_het.console import in_minutes, message
from lit_het.errors import UserError, pluralize
from lit_het.planning import chips
from lit_het.planning.alternatives import smaller
from lit_het.planning.chips import Topology
from lit_het.planning.plan import Plan, plan
from lit_het.planning.roofline import Roofline, roofline
from lit_het.training.durations import RunLength


@dataclasses.dataclass(frozen=True)
class OnChips:
    """A plan, and the bounds of its program on chips.

    Attributes:
        name: of the column, such as the flags that differ.
        plan: the step.
        roofline: its bounds; None if the chips have too little memory for it.
        run_steps: steps of the run; None where they depend on the data.
    """

    name: str
    plan: Plan
    roofline: Roofline | None
    run_steps: int | None

    @property
    def fits(self) -> bool:
        """Whether the compiler, which knows what the runtime of a chip needs, has placed the step in its memory."""
        return self.roofline is not None

    def chip_hours(self, topology: Topology, examples: float | None = None) -> float | None:
        """Returns the hours of all chips together that a number of examples takes at the bound, or the run."""
        steps = self.run_steps if examples is None else examples / self.plan.batch_size
        if self.roofline is None or steps is None:
            return None
        return steps * self.roofline.seconds * topology.num_chips / 3600


def needed(made: Plan) -> int:
    """Returns the bytes that the compiled step takes on a device."""
    return made.compiled.arguments + made.compiled.temporary + made.compiled.code


def on_chips(config: ExperimentConfig, topology: Topology, devices: Sequence[Any], name: str) -> OnChips:
    """Returns the plan of a configuration, compiled for chips."""
    made = plan(config, devices, f"{name} for {topology}: {pluralize(topology.num_chips, 'chip')}")
    message(f"compiled in {in_minutes(made.compiled.seconds)}")
    bounds = None
    if made.compiled.text:
        bounds = roofline(made.compiled.program, topology, made.flops)
    try:
        run_steps = RunLength.resolve(config.length, config.data.batch_size, None).num_steps
    except UserError:
        run_steps = None  # in epochs
    return OnChips(name, made, bounds, run_steps)


def side_by_side(config: ExperimentConfig, topology: Topology) -> list[OnChips]:
    """Returns the plan of a configuration and, if its head has noise, that of the deterministic head."""
    devices = chips.devices(topology)
    head: Any = vars(config.task).get("head")
    variants = {"the step": config}
    if head is not None and head.has_noise:
        try:
            variants["with a deterministic head"] = with_flags(config, ("--task.head", "deterministic"), "lit-het plan")
        except UserError as error:
            message(f"no deterministic head beside it: {error}")
    return [on_chips(variant, topology, devices, name) for name, variant in variants.items()]


def fitting(config: ExperimentConfig, made: Plan, topology: Topology) -> Iterator[OnChips]:
    """Compiles changes that fit by formula: each that does alone, and the first of several together.

    If none fits by formula, the smallest is compiled.
    """
    available, devices = topology.chip.memory, list(made.mesh.devices.flat)
    chosen = [change for change in smaller(config, made, together=False) if change.bytes <= available]
    together = None
    for together in smaller(config, made, together=True):
        # Compiled steps of shipped configurations need up to a fifth more than the formula.
        if 1.2 * together.bytes <= available:
            break
    if together is not None and together.flags not in [change.flags for change in chosen]:
        chosen.append(together)
    for change in chosen:
        yield on_chips(change.config, topology, devices, str(change))
