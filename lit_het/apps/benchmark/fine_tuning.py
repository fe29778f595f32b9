"""``lit-het benchmark-vtab``: an image tower, fine-tuned on 1,000 images of each task of VTAB (Zhai et al. 2019).

Every setting of a grid is trained on 800 of the images; the one with the highest top-1 accuracy on the other 200 is
trained on all 1,000, with several seeds, and tested on the whole test split.
"""

import dataclasses
import functools
import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from lit_het.apps.benchmark.page import Page
from lit_het.apps.benchmark.running import check_failures, sets_in, write_page
from lit_het.apps.benchmark.thousand import NUM_TRAIN, NUM_VALIDATION, TRAIN, VALIDATION, require_test, write_thousand
from lit_het.configs import experiment
from lit_het.configs.experiment import ExperimentConfig, PretrainedConfig
from lit_het.configs.flags import with_flags
from lit_het.console import Bar, message
from lit_het.errors import DataError, UserError, pluralize
from lit_het.eval.metrics.significance import estimate, standard_error
from lit_het.eval.report.tables import NO_FIGURE, Table, plain_table
from lit_het.eval.report.writing import write_files
from lit_het.eval.sets import ImageSet
from lit_het.eval.sets.benchmarks import VTAB_1K
from lit_het.eval.suite import ZeroShotConfig
from lit_het.search import grid, grid_runs
from lit_het.search.grid import Axis
from lit_het.search.grid_runs import Planned, Result
from lit_het.tasks.classification import ClassificationConfig
from lit_het.training.directory import checkpoint_dir, load_config
from lit_het.training.preemption import Preempted

_NOTE = (
    f"Top-1 accuracy on the test split, trained on {NUM_TRAIN} + {NUM_VALIDATION} images, ± standard error over seeds; "
    "the error of a mean is that of the means of each seed. Published figures are as printed: means over three runs "
    "with one setting for all tasks, of VTAB's own splits."
)
_SETTINGS_NOTE = (
    f"Chosen by the accuracy on {VALIDATION} after training on {TRAIN}, of equal ones by the lower NLL. Seconds are of "
    "all runs of a task, with compilation and evaluation."
)


@dataclasses.dataclass(frozen=True)
class Protocol:
    """How the tower is fine-tuned.

    Attributes:
        config: a configuration file whose ``get_config`` has an argument ``task``, and its own grid.
        axes: of the grid, as ``FIELD=VALUE,VALUE``, or ``grid`` for that of the configuration file.
        seeds: of the trainings on 1,000 images; the first is that of the grid, too.
        flags: fields of all runs, as of ``lit-het train``.
    """

    config: Path
    axes: Sequence[str] = ("grid",)
    seeds: Sequence[int] = (0,)
    flags: Sequence[str] = ()

    def __post_init__(self) -> None:
        # Those after the first would be found only after the grid.
        if min(self.seeds) < 0:
            raise UserError(f"--seeds {min(self.seeds)}: seeds are at least 0")


@dataclasses.dataclass(frozen=True)
class Tuned:
    """A task that is done.

    Attributes:
        setting: the chosen one, by field.
        validation: its top-1 accuracy on the 200 images; None if there was nothing to choose.
        top1: on the test split, of each seed.
        seconds: of all its runs.
    """

    setting: Mapping[str, str]
    validation: float | None
    top1: tuple[float, ...]
    seconds: float

    @property
    def figures(self) -> dict[str, float]:
        """The mean over seeds."""
        return {"top1": estimate(self.top1).mean}

    @property
    def errors(self) -> dict[str, float]:
        """Its standard error; NaN for one seed."""
        return {"top1": estimate(self.top1).error}


def benchmark_vtab(run_dir: Path, data: str, output: Path, protocol: Protocol) -> dict[str, Tuned]:
    """Fine-tunes and tests the image tower of a run on all tasks below a folder, prints tables, and writes a page.

    ``output`` has the 1,000 images of each task in ``images``, the grids in ``choosing``, the runs on 1,000 images in
    ``runs``, and the page. With the same output, finished runs are not repeated; several processes can share it.

    Args:
        run_dir: the run.
        data: a folder with the folders of sets, which have the splits ``train`` and ``test``; a path or a URL.
        output: the folder for everything that is written.
        protocol: how it is fine-tuned.

    Returns:
        What was measured, by task.
    """
    found, missing = sets_in(data, "vtab")
    tower = _Tower(run_dir, load_config(run_dir))
    _settings_of(next(iter(found)), tower, output, None, protocol)  # errors of flags show before images are copied
    results, failures, waiting = dict[str, Tuned](), dict[str, str](), list[str]()
    with Bar("benchmark-vtab", len(found), "tasks") as bar:
        for name, directory in found.items():
            with bar.paused():
                try:
                    tuned = _tuned(name, directory, tower, output, protocol)
                except Preempted:
                    raise
                except UserError as error:
                    failures[name] = error.problem if isinstance(error, DataError) else str(error)
                    message(f"{name}: {failures[name]}")
                else:
                    results |= {} if tuned is None else {name: tuned}
                    waiting += [name] if tuned is None else []
            bar.advance(1)
    shown = _page(run_dir.name, results, failures)
    about = {"run": str(run_dir), "missing": missing, "in_progress": waiting, "failed": failures, "means": shown.means}
    tasks = {name: dataclasses.asdict(tuned) for name, tuned in results.items()}
    content = {**about, "errors_of_means": shown.errors_of_means, "tasks": tasks}
    write_files({output / "vtab_1k.json": json.dumps(content, indent=1, ensure_ascii=False) + "\n"})
    write_page(shown, output / "vtab_1k.html")
    grid_runs.report_unfinished(len(waiting))
    check_failures(failures)
    return results


@dataclasses.dataclass(frozen=True)
class _Tower:
    """The image tower of a run, which fine-tuning starts from."""

    run_dir: Path
    source: ExperimentConfig

    def config(self, name: str, images: Path, num_classes: int | None, protocol: Protocol) -> ExperimentConfig:
        """Returns the configuration of a task, without the evaluation and the choice of images.

        Args:
            name: of the task.
            images: the folder of its 1,000 images.
            num_classes: those of the set; None for those of the configuration file.
            protocol: how it is trained.
        """
        config = experiment.load_module_config(_of_task(protocol.config, name))
        if not isinstance(config.task, ClassificationConfig):
            raise UserError(f"{protocol.config} trains no classifier; start from configs/fine_tune_vtab.py")
        tower = self.source.task.require_image_tower()
        # What it was trained from, and which part of it, are those of the other run.
        own = {"image_size": config.data.image_size, "weights": None, "tuning": None}
        tower = dataclasses.replace(
            tower, **{one.name: own[one.name] for one in dataclasses.fields(tower) if one.name in own}
        )
        preprocessing = dataclasses.replace(self.source.data.preprocessing, fit="squash")
        classes = num_classes or config.task.num_classes
        task = dataclasses.replace(config.task, image_tower=tower, num_classes=classes)
        data = dataclasses.replace(config.data, shards=(str(images / TRAIN),), preprocessing=preprocessing)
        config = dataclasses.replace(config, task=task, data=data, pretrained=PretrainedConfig(self.run_dir))
        changed = with_flags(config, protocol.flags, "lit-het benchmark-vtab RUN")
        given, size = changed.task.require_image_tower(), changed.data.image_size
        if given.image_size not in (config.data.image_size, size):
            raise UserError(
                f"--task.image-tower.image-size {given.image_size}: give --data.image-size, which sets both"
            )
        task = dataclasses.replace(changed.task, image_tower=dataclasses.replace(given, image_size=size))
        return dataclasses.replace(changed, task=task)


def _tuned(name: str, directory: str, tower: _Tower, output: Path, protocol: Protocol) -> Tuned | None:
    """Returns what was measured on a task; None while other processes train its runs."""
    images, test = output / "images" / name, ImageSet(name, directory)
    require_test(test)
    num_classes = write_thousand(name, directory, images)
    config, planned = _settings_of(name, tower, output, num_classes, protocol)
    choosing = output / "choosing" / name
    tried = {} if len(planned) == 1 else _trained(planned, choosing, VALIDATION, f"choosing a setting of {name}")
    if len(planned) > max(1, len(tried)):
        return None
    setting, validation = _best(list(tried.values())) if tried else (planned[0].setting, None)
    for one in planned:  # of no use after the choice, and large
        shutil.rmtree(checkpoint_dir(one.config.run_dir), ignore_errors=True)
    best = grid_runs.with_setting(config, setting, "--grid")
    whole = dataclasses.replace(
        best,
        data=dataclasses.replace(best.data, shards=(str(images / TRAIN), str(images / VALIDATION))),
        evaluations=(ZeroShotConfig(test),),
    )
    runs = [grid_runs.plan_run(whole, dict(setting), name, seed, output) for seed in dict.fromkeys(protocol.seeds)]
    tested = _trained(runs, output, name, f"testing {name}")
    if len(tested) < len(runs):
        return None
    if failed := [run for run, result in tested.items() if not _is_finite(result, name)]:
        path = grid_runs.result_path(output, failed[0])
        raise UserError(f"the loss of {failed[0]} was not finite; give lower rates with --grid, and delete {path}")
    seconds = sum(one.seconds for one in (*tried.values(), *tested.values()))
    return Tuned(setting, validation, tuple(one.figures[_metric(name)] for one in tested.values()), seconds)


def _settings_of(
    name: str, tower: _Tower, output: Path, num_classes: int | None, protocol: Protocol
) -> tuple[ExperimentConfig, list[Planned]]:
    """Returns the configuration of a task, and the runs on 800 images that choose a setting."""
    images = output / "images" / name
    config = tower.config(name, images, num_classes, protocol)
    axes = [Axis.parse(text) for text in grid.with_published(protocol.axes, _of_task(protocol.config, name))]
    chosen_by = ZeroShotConfig(ImageSet(VALIDATION, str(images), VALIDATION))
    of_grid = dataclasses.replace(config, evaluations=(chosen_by,))
    return config, grid.plan(of_grid, axes, protocol.seeds[:1], output / "choosing" / name)


def _trained(planned: Sequence[Planned], output: Path, evaluated: str, what: str) -> dict[str, Result]:
    """Trains runs that are not done, as ``what``; returns the results of those that are, by name."""
    grid_runs.check_folder(planned, output)
    attempt = functools.partial(grid_runs.run_unless_done, output=output, names=(_metric(evaluated),))
    grid_runs.train_all(planned, attempt, Bar(what, len(planned), "runs"))
    return grid_runs.finished([one.name for one in planned], output)


def _best(tried: Sequence[Result]) -> tuple[dict[str, str], float]:
    """Returns the setting with the highest accuracy on the validation images, and this accuracy."""
    finite = [result for result in tried if _is_finite(result, VALIDATION)]
    if not finite:
        raise UserError("the loss of every setting was not finite; give lower rates with --grid")
    best = max(finite, key=lambda one: (one.figures[_metric(VALIDATION)], -one.figures[_metric(VALIDATION, "nll")]))
    return best.setting, best.figures[_metric(VALIDATION)]


def _is_finite(result: Result, name: str) -> bool:
    # A run whose loss was not finite has no figures.
    return math.isfinite(result.figures.get(_metric(name), math.nan))


def _metric(name: str, figure: str = "top1") -> str:
    return f"supervised/{name}/{figure}"


def _of_task(config: Path, name: str) -> Path:
    """Returns the path of a configuration file with the argument of a task."""
    return Path(f"{config}{',' if '.py:' in str(config) else ':'}task={name}")


def _page(name: str, results: Mapping[str, Tuned], failures: Mapping[str, str]) -> Page:
    means = {}
    for group in VTAB_1K.groups_with_all:
        of_group = [results[task].top1 for task in group.sets if task in results]
        if of_group and len(of_group[0]) > 1:  # every task has the same seeds
            means[group.title] = standard_error(np.mean(of_group, axis=0))
    beside = (_settings(results), _SETTINGS_NOTE) if results else None
    return Page(VTAB_1K, name, results, failures, _NOTE, beside, means)


def _settings(results: Mapping[str, Tuned]) -> Table:
    """Returns the table of the chosen settings."""
    fields = list(dict.fromkeys(field for tuned in results.values() for field in tuned.setting))
    rows = (
        (
            name,
            *(tuned.setting.get(field, NO_FIGURE) for field in fields),
            NO_FIGURE if tuned.validation is None else f"{tuned.validation:.1%}",
            pluralize(len(tuned.top1), "seed"),
            f"{tuned.seconds:.0f}",
        )
        for name, tuned in results.items()
    )
    return plain_table("Chosen settings", (*fields, f"top-1 on {VALIDATION}", "test", "seconds"), rows)
