"""Star and grid sweeps over the shape of an image tower: which runs, their compute, and training.

``output`` is a folder of `lit_het.search.grid` with ``sweep.json``, which lists shape and compute of every run.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from lit_het import untrusted
from lit_het.configs import experiment
from lit_het.configs.experiment import ExperimentConfig
from lit_het.console import Bar, message
from lit_het.errors import UserError, pluralize
from lit_het.files import locked, write_atomically
from lit_het.planning.plan import Step
from lit_het.search import grid, grid_runs
from lit_het.search.grid_runs import Planned, direction_of
from lit_het.search.law.observations import Observation, check_spokes, shown_shape
from lit_het.search.law.scaling import MULTIPLE, rounded
from lit_het.sharding import MeshConfig
from lit_het.towers.encoder_config import EncoderConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.training.durations import Duration, RunLength

Kind = Literal["star", "grid", "deviations"]
# Fields of the encoder by dimension.
FIELDS: Mapping[str, str] = {"width": "width", "depth": "depth", "mlp": "mlp_width"}
# Fields in which the runs of a sweep differ.
_VARIED = ("length", "seed", "data.seed", *(f"task.image_tower.encoder.{field}" for field in FIELDS.values()))


@dataclasses.dataclass(frozen=True)
class SweptRun:
    """A run of a sweep.

    Attributes:
        name: of its folder.
        shape: the value of every dimension by its name.
        length: of training.
        gflop: of training: matrix products of the loss and its gradient, as ``lit-het plan`` counts them.
        gflop_per_example: the same for one example.
    """

    name: str
    shape: dict[str, int]
    length: str
    gflop: float
    gflop_per_example: float


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A sweep as its folder describes it.

    Attributes:
        kind: of the sweep.
        centre: the shape from which one dimension at a time departs; of a grid the configuration's.
        runs: of all shapes, lengths and seeds.
        config: fields of the configuration of all runs, by dotted names; empty in files of earlier versions.
    """

    kind: Kind
    centre: dict[str, int]
    runs: tuple[SweptRun, ...]
    config: dict[str, Any] = dataclasses.field(default_factory=dict)


def shape_of(config: ExperimentConfig) -> dict[str, int]:
    """Returns the shape of the image tower of a configuration."""
    encoder = _encoder(config)
    return {name: getattr(encoder, field) for name, field in FIELDS.items()}


def with_shape(config: ExperimentConfig, shape: Mapping[str, int]) -> ExperimentConfig:
    """Returns a configuration whose image tower has another shape."""
    check_dimensions(shape)
    encoder = dataclasses.replace(_encoder(config), **{FIELDS[name]: value for name, value in shape.items()})
    task: Any = config.task
    tower = dataclasses.replace(task.image_tower, encoder=encoder)
    return dataclasses.replace(config, task=dataclasses.replace(task, image_tower=tower))


def check_dimensions(names: Iterable[str]) -> None:
    """Checks that all names are those of dimensions."""
    if unknown := set(names) - FIELDS.keys():
        raise UserError(f"{', '.join(sorted(unknown))} is not a dimension of a shape; they are {', '.join(FIELDS)}")


def multiples_of(config: ExperimentConfig, multiple: int = MULTIPLE) -> dict[str, int]:
    """Returns the number of which each rounded dimension is a multiple: of the width also that of the heads."""
    return {"width": math.lcm(multiple, _encoder(config).num_heads), "depth": 1, "mlp": multiple}


def values_of(
    centre: Mapping[str, int],
    given: Mapping[str, Sequence[int]],
    factors: Sequence[float],
    multiples: Mapping[str, int],
) -> dict[str, tuple[int, ...]]:
    """Returns the values of every dimension: given ones, and for others the centre times each factor, rounded."""
    check_dimensions(given)
    if not all(0 < factor < math.inf for factor in factors):
        raise UserError("--factors must be above 0 and finite")
    found = {}
    for name, value in centre.items():
        values = given.get(name) or [rounded(factor * value, multiples[name]) for factor in factors]
        if values:
            found[name] = tuple(dict.fromkeys(values))
    if not found:
        raise UserError("nothing varies: give --vary width=... depth=... mlp=..., or --factors for all of them")
    return found


def star_shapes(centre: Mapping[str, int], values: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    """Returns the shapes of a star sweep, without its centre."""
    check_spokes(_floats(centre), {name: [float(value) for value in spoke] for name, spoke in values.items()})
    return [{**centre, name: value} for name, spoke in values.items() for value in spoke]


def grid_shapes(centre: Mapping[str, int], values: Mapping[str, Sequence[int]]) -> list[dict[str, int]]:
    """Returns the shapes of a grid sweep; dimensions without values are those of the centre."""
    return [{**centre, **dict(zip(values, some, strict=True))} for some in itertools.product(*values.values())]


def plan(
    config: ExperimentConfig,
    shapes: Sequence[Mapping[str, int]],
    lengths: Sequence[Duration],
    seeds: Sequence[int],
    output: Path,
) -> list[Planned]:
    """Returns the runs of all shapes and lengths, ordered by seed."""
    planned = []
    for seed, shape, length in itertools.product(dict.fromkeys(seeds), shapes, dict.fromkeys(lengths)):
        changed = dataclasses.replace(with_shape(config, shape), length=length)
        setting = {**{name: str(value) for name, value in shape.items()}, "length": str(length)}
        name = "_".join([*(f"{name}{value}" for name, value in shape.items()), str(length).replace(" ", "_")])
        planned.append(grid_runs.plan_run(changed, setting, name, seed, output))
        _check_schedule(changed)
    return planned


def sweep(
    kind: Kind,
    config: ExperimentConfig,
    output: Path,
    metrics: Sequence[str],
    *,
    centre: Mapping[str, int],
    vary: Mapping[str, Sequence[int]],
    factors: Sequence[float] = (),
    multiple: int = MULTIPLE,
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
        metrics: that every run must have.
        centre: values of the centre that differ from the configuration's.
        vary: values by dimension.
        factors: of the centre, for dimensions without values.
        multiple: of which values by factors are multiples.
        lengths: of training, such as "1000 steps".
        seeds: of every shape and length.
        with_centre: whether the centre of a star is trained too.
        only_plan: whether nothing is trained or written.
    """
    # The shape of the centre is checked here, before its spokes are.
    config = with_shape(config, centre)
    whole = shape_of(config)
    values = values_of(whole, vary, factors, multiples_of(config, multiple))
    shapes = star_shapes(whole, values) if kind == "star" else grid_shapes(whole, values)
    planned = plan(
        config, [*shapes, *([whole] if with_centre else [])], [_duration(text) for text in lengths], seeds, output
    )
    found = describe(kind, config, planned)
    for line in listed(found):
        print(line)
    if not only_plan:
        # A refused command must not change sweep.json.
        grid_runs.check_folder(planned, output)
        found = save(found, output)
        grid.run(planned, output, tuple(metrics))
    return found


def describe(kind: Kind, config: ExperimentConfig, planned: Sequence[Planned]) -> Sweep:
    """Returns a sweep with the compute of every run; each shape is traced once, and nothing is computed.

    Args:
        kind: of the sweep.
        config: of all runs, apart from shape, length and seed; its shape is the centre.
        planned: the runs.
    """
    per_step: dict[tuple[int, ...], float] = {}
    runs = []
    shapes = {tuple(shape_of(one.config).values()): one.config for one in planned}
    with Bar("counting operations", len(shapes), "shapes") as bar:
        for shape, some in shapes.items():
            per_step[shape] = _gflop_per_step(some)
            bar.advance(1)
    for one in planned:
        shape = shape_of(one.config)
        gflop = per_step[tuple(shape.values())]
        per_example = gflop / one.config.data.batch_size
        num_steps = _run_length(one.config).num_steps
        runs.append(SweptRun(one.name, shape, str(one.config.length), gflop * num_steps, per_example))
    return Sweep(kind, shape_of(config), tuple(runs), experiment.fields(config))


def gflop_per_example(config: ExperimentConfig) -> float:
    """Returns the GFLOP of training on one example, as ``lit-het plan`` counts them."""
    return _gflop_per_step(config) / config.data.batch_size


def save(sweep: Sweep, output: Path) -> Sweep:
    """Writes ``sweep.json``, with the runs of earlier commands in the same folder; returns the sweep."""
    path = output / "sweep.json"
    output.mkdir(parents=True, exist_ok=True)
    # Several processes may extend a sweep at once.
    with locked(output / "sweep.lock"):
        if path.exists():
            sweep = _merged(load(output), sweep, output)
        write_atomically(path, json.dumps(dataclasses.asdict(sweep), indent=1) + "\n")
    return sweep


def _merged(earlier: Sweep, sweep: Sweep, output: Path) -> Sweep:
    if (earlier.kind, earlier.centre) != (sweep.kind, sweep.centre):
        raise UserError(
            f"{output} holds a {earlier.kind} sweep of centre {shown_shape(earlier.centre)}; give another --output"
        )
    if earlier.config:
        grid_runs.check_same_fields(output / "sweep.json", earlier.config, sweep.config, _VARIED)
    names = {run.name for run in sweep.runs}
    kept = tuple(run for run in earlier.runs if run.name not in names)
    return dataclasses.replace(sweep, runs=(*kept, *sweep.runs))


def load(output: Path) -> Sweep:
    """Reads ``sweep.json``."""
    path = output / "sweep.json"
    if not path.is_file():
        raise UserError(f"{path} is missing; give the --output of lit-het shape star or grid")
    with grid_runs.explained(path, "does not describe a sweep", "delete it and repeat lit-het shape star or grid"):
        return grid_runs.CONVERTER.structure(untrusted.read_json(path), Sweep)


def observations(sweep: Sweep, output: Path, metric: str, direction: str | None = None) -> list[Observation]:
    """Returns the finished runs of a sweep with a metric as a loss.

    A run whose training failed has the loss NaN.

    Args:
        sweep: as `load` returns it.
        output: its folder.
        metric: such as ``few_shot/imagenet/10_shot``; ``A+B`` is the mean of several (SoViT Sec. 4.2).
        direction: "lower" or "higher" values are better; None for what the name of the metric tells. Of the latter the
            loss is the error, 1 - metric.
    """
    metrics, is_error = metric.split("+"), _is_error(metric, direction)
    found, results = [], grid_runs.finished((run.name for run in sweep.runs), output)
    for run in sweep.runs:
        if run.name not in results:
            continue
        figures = results[run.name].figures
        for one in metrics:
            if figures and one not in figures:
                raise UserError(f"{run.name} has no metric {one}; it has {', '.join(sorted(figures))}")
            if is_error and figures.get(one, 0) > 1:
                raise UserError(
                    f"{one} = {figures[one]:g}: only of shares up to 1 the error is 1 - metric; name another"
                )
        value = sum(figures.get(one, math.nan) for one in metrics) / len(metrics)
        found.append(Observation(_floats(run.shape), run.gflop, 1 - value if is_error else value))
    if missing := len(sweep.runs) - len(results):
        message(f"{pluralize(missing, 'run')} of {len(sweep.runs)} not finished")
    if not found:
        raise UserError(f"{output}: no run is finished; repeat lit-het shape {sweep.kind}")
    return found


def training_times(sweep: Sweep, output: Path) -> list[tuple[float, float]]:
    """Returns GFLOP and hours of every run that was trained to its end (`grid_runs.Result.seconds`)."""
    gflop = {run.name: run.gflop for run in sweep.runs}
    results = grid_runs.finished(gflop, output)
    return [(gflop[name], result.seconds / 3600) for name, result in results.items() if result.figures]


def loss_name(metric: str, direction: str | None = None) -> str:
    """Returns the name of the loss made of a metric."""
    shown = metric if "+" not in metric else f"mean of {', '.join(metric.split('+'))}"
    return f"1 - {shown}" if _is_error(metric, direction) else shown


def _is_error(metric: str, direction: str | None) -> bool:
    """Returns whether higher values are better, of every metric of a mean."""
    found = {direction or direction_of(one) for one in metric.split("+")}
    if len(found) > 1:
        raise UserError(f"--metric {metric}: of some of these lower values are better, of others higher; take one kind")
    return "higher" in found


def listed(sweep: Sweep) -> Iterator[str]:
    """Yields a line for each run, and one for their sum."""
    for run in sweep.runs:
        yield f"{run.name}: {run.gflop:.4g} GFLOP"
    yield f"{pluralize(len(sweep.runs), 'run')}, {sum(run.gflop for run in sweep.runs):.4g} GFLOP of training"


def _encoder(config: ExperimentConfig) -> EncoderConfig:
    tower = config.task.image_tower
    if not isinstance(tower, ViTConfig):
        raise UserError("this configuration has no Vision Transformer, of which lit-het shape varies the shape")
    return tower.encoder


def _run_length(config: ExperimentConfig) -> RunLength:
    if config.length.unit == "epochs":
        raise UserError(f"length {config.length}: give steps or examples, so that the compute is known before training")
    return RunLength.resolve(config.length, config.data.batch_size, None)


def _check_schedule(config: ExperimentConfig) -> None:
    """Checks a run that may be the last of many: its schedule is otherwise built when it begins."""
    length = _run_length(config)
    # Epochs are known when the data are read.
    if not any("epoch" in str(value) for value in experiment.fields(config.schedule).values()):
        config.schedule.build(length)


def _gflop_per_step(config: ExperimentConfig) -> float:
    # The mesh of the run may need more devices than there are here.
    config = dataclasses.replace(config, mesh=MeshConfig())
    return Step(config, config.mesh.build(jax.devices()[:1])).flops()[0] / 1e9


def _floats(shape: Mapping[str, int]) -> dict[str, float]:
    return {name: float(value) for name, value in shape.items()}


def _duration(text: str) -> Duration:
    try:
        return Duration.parse(text)
    except ValueError as error:
        raise UserError(f"--lengths {error}") from error
