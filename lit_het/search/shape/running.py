"""``lit-het shape star`` and ``grid``: lists the runs of a sweep, and trains them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from lit_het.configs.experiment import ExperimentConfig
from lit_het.errors import UserError
from lit_het.search import grid
from lit_het.search.shape import sweeps
from lit_het.search.shape.sweeps import Kind, Sweep
from lit_het.training.durations import Duration


def sweep(
    kind: Kind,
    config: ExperimentConfig,
    output: Path,
    metric: str,
    *,
    centre: Mapping[str, int],
    vary: Mapping[str, Sequence[int]],
    factors: Sequence[float] = (),
    multiple: int = sweeps.MULTIPLE,
    lengths: Sequence[str] = (),
    seeds: Sequence[int] = (0,),
    with_centre: bool = False,
    only_plan: bool = False,
) -> Sweep:
    """Writes ``sweep.json``, prints all runs with their compute, and trains them.

    Args:
        kind: "star" or "grid".
        config: of all runs, apart from shape, length and seed.
        output: folder of the sweep.
        metric: that every run must have.
        centre: values of the centre that differ from the configuration's.
        vary: values by dimension.
        factors: of the centre, for dimensions without values.
        multiple: of which values by factors are multiples.
        lengths: of training, such as "1000 steps".
        seeds: of every shape and length.
        with_centre: whether the centre of a star is trained too.
        only_plan: whether nothing is trained or written.

    Raises:
        UserError: a shape, dimension or length is impossible, or ``output`` holds another sweep; as `grid.run`.
    """
    # The shape of the centre is checked here, before its spokes are.
    config = sweeps.with_shape(config, centre)
    whole = sweeps.shape_of(config)
    values = sweeps.values_of(whole, vary, factors, sweeps.multiples_of(config, multiple))
    shapes = sweeps.star_shapes(whole, values) if kind == "star" else sweeps.grid_shapes(whole, values)
    planned = sweeps.plan(
        config, [*shapes, *([whole] if with_centre else [])], [_duration(text) for text in lengths], seeds, output
    )
    found = sweeps.describe(kind, config, planned)
    for line in sweeps.listed(found):
        print(line)
    if not only_plan:
        # A refused command must not change sweep.json.
        grid.check(planned, output)
        found = sweeps.save(found, output)
        grid.run(planned, output, (metric,))
    return found


def _duration(text: str) -> Duration:
    try:
        return Duration.parse(text)
    except ValueError as error:
        raise UserError(f"--lengths {error}") from error
