"""Tables of a plan."""

import collections

from lit_het.errors import pluralize
from lit_het.eval.report.tables import Table, plain_table
from lit_het.planning.chips import GIB
from lit_het.planning.collectives import BETWEEN_SLICES, Collective
from lit_het.planning.plan import Plan

MIB = 2**20


def title(made: Plan) -> str:
    """Returns a line about the devices and the batch."""
    mesh = " x ".join(f"{name} {size}" for name, size in made.mesh.shape.items())
    rows = made.batch_size // made.mesh.size
    return f"{pluralize(made.mesh.size, 'device')}: {mesh}; batch {made.batch_size:,}, {rows:,} on a device"


def parameters(made: Plan) -> Table:
    """Returns the parameters of each part."""
    rows = {**made.counts, "all": tuple(map(sum, zip(*made.counts.values(), strict=True)))}
    cells = (
        (part.replace("_", " "), *(f"{count:,}" for count in (*counts, sum(counts)))) for part, counts in rows.items()
    )
    return plain_table("parameters", ("locked", "trainable", "all"), cells)


def operations(made: Plan) -> Table:
    """Returns the operations of a step."""
    unit, name = (1e12, "TFLOP") if made.flops >= 1e12 else (1e9, "GFLOP")
    rows = {"traced": made.flops}
    if made.dispatch_flops:
        rows["without dispatch"] = made.flops - made.dispatch_flops
    if made.compiled.text:
        rows["compiled"] = made.compiled.program.product_flops * made.mesh.size
    divisors = {"all devices": unit, "a device": made.mesh.size * unit, "GFLOP of an example": 1e9 * made.batch_size}
    cells = ((row, *(f"{flops / divisor:,.3f}" for divisor in divisors.values())) for row, flops in rows.items())
    return plain_table(f"{name} of a step", tuple(divisors), cells)


def memory(made: Plan) -> Table:
    """Returns the memory of a device by formula and by the compiler."""
    unit, name = (GIB, "GiB") if max(totals(made)) >= GIB else (MIB, "MiB")
    compiled, sizes = made.compiled, [f"{size / unit:.3f}" for size in made.memory.values()]
    # The compiler reports two sums; each stands in the last row that it covers.
    sums = [""] * len(sizes)
    sums[3], sums[-1] = f"{compiled.arguments / unit:.3f} all above", f"{compiled.temporary / unit:.3f} the rest"
    rows = [*zip(made.memory, sizes, sums, strict=True), ("all", *(f"{size / unit:.3f}" for size in totals(made)))]
    return plain_table(f"{name} of a device", ("by formula", "compiled"), rows)


def totals(made: Plan) -> tuple[int, int]:
    """Returns the bytes of a device by formula and by the compiler."""
    return sum(made.memory.values()), made.compiled.arguments + made.compiled.temporary


def collectives(made: Plan) -> list[Table | str]:
    """Returns what is sent between devices."""
    by_kind: dict[tuple[str, str], list[Collective]] = collections.defaultdict(list)
    for collective in made.compiled.program.collectives:
        axes = "other devices" if collective.axes is None else ", ".join(collective.axes)
        over = "slices" if collective.kind == BETWEEN_SLICES else f"{axes} ({collective.group})"
        by_kind[collective.kind, over].append(collective)
    rows = []
    for (kind, axes), ones in sorted(by_kind.items(), key=lambda item: -sum(one.bytes_sent for one in item[1])):
        times, sent = sum(one.times for one in ones), sum(one.bytes_sent for one in ones)
        beside = sum(one.bytes_sent for one in ones if one.overlaps)
        rows.append((kind, axes, str(len(ones)), str(times), f"{sent / 1e6:,.1f}", f"{beside / 1e6:,.1f}"))
    columns = ("over", "instructions", "times", "MB sent", "of them asynchronous")
    table = plain_table("collectives of a step", columns, rows)
    loops = made.compiled.program.unknown_loops
    return [table, *([f"{loops} loops of unknown length are counted as one iteration"] if loops else [])]


def size_text(size: int) -> str:
    """Returns bytes in GiB or MiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"
