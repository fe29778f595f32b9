"""The methods of HET-XL Table 13: how τ is chosen, or trained."""

import dataclasses
import functools
from collections.abc import Callable

from lit_het.heads.temperature_config import BoundedTemperature
from lit_het.search import space
from lit_het.tasks.temperature_gradient_config import Method, TemperatureGradient
from scripts.studies.harness import Figures
from scripts.studies.temperature.data import ALL, FIT
from scripts.studies.temperature.runs import BATCH_SIZE, HEAD, Row, Runner, Setting, fixed, with_temperature

# Those of App. G.1.
GRID = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3.0, 5.0)
RANGE = BoundedTemperature()
LEARNED = Setting("simple_training", with_temperature(HEAD, RANGE))

# Of a search with three folds, with two, and after training on all; of a gradient on rows of a validation set, on 12.5
# and on 25 % of every batch.
Printed = tuple[str, str, str]
GRID_NLL: Printed = ("6.08 ± 0.04", "6.11 ± 0.05", "6.11 ± 0.05")
GRID_TOP1: Printed = ("0.433 ± 0.002", "0.434 ± 0.001", "0.434 ± 0.001")
BAYES_NLL: Printed = ("6.03 ± 0.06", "6.05 ± 0.07", "6.09 ± 0.05")
BAYES_TOP1: Printed = ("0.428 ± 0.000", "0.435 ± 0.001", "0.429 ± 0.001")
ONLINE: dict[Method, tuple[str, Printed, Printed]] = {
    "luketina": (
        "Luketina et al.",
        ("6.08 ± 0.04", "6.19 ± 0.07", "6.20 ± 0.07"),
        ("0.425 ± 0.000", "0.423 ± 0.001", "0.420 ± 0.001"),
    ),
    "simple": (
        "Simple gradient",
        ("6.22 ± 0.05", "6.18 ± 0.04", "6.16 ± 0.05"),
        ("0.432 ± 0.001", "0.432 ± 0.001", "0.429 ± 0.001"),
    ),
}


def of_temperature(runner: Runner, tau: float, shards: str, seed: int, epochs: float = LEARNED.epochs) -> Figures:
    """Returns the figures of a run with a fixed τ, and this τ."""
    setting = Setting(f"tau{tau:g}_{shards}_{epochs:g}", with_temperature(HEAD, fixed(tau)), shards, epochs=epochs)
    return {**runner.figures(setting, seed), "temperature": tau}


def search_grid(runner: Runner, shards: str, metric: str, seed: int, epochs: float = LEARNED.epochs) -> Figures:
    """Returns the run with the best τ of the grid, by a metric."""
    found = (of_temperature(runner, tau, shards, seed, epochs) for tau in GRID)
    return min(found, key=lambda of: of[metric])


def search_bayes(runner: Runner, shards: str, metric: str, seed: int, budget: int) -> Figures:
    """Returns the run with the best τ of a search by a tree-structured Parzen estimator, as that of ``lit-het tune``.

    The search has no state of its own: the same seed asks for the same τ again, and finished runs are not repeated.
    """
    field = space.Range("task.head.temperature.initial", RANGE.minimum, RANGE.maximum, True, False)
    base = runner.configuration(Setting("", with_temperature(HEAD, fixed(1.0)), shards))
    search = space.Search(base, (field,), metric, runner.root, lower=True, seed=seed)
    space.check_fields(search)
    trials, found = [], []
    for number in range(budget):
        setting = space.next_setting(search, trials)
        assert setting is not None, "a range has always another value"
        found.append(of_temperature(runner, float(setting[field.field]), shards, seed))
        trials.append(space.Trial(number, setting, "finished", found[-1][metric]))
    return min(found, key=lambda one: one[metric])


def methods(runner: Runner) -> list[Row]:
    """Returns the rows of the table; the first, with which others are compared, is the paper's choice."""
    seeds = runner.options.seeds

    def searched(title: str, search: Callable[..., Figures], nll: Printed, top1: Printed) -> list[Row]:
        chosen = {seed: search(runner, FIT, "validation/nll", seed) for seed in seeds}
        found = {
            "": chosen,
            " (2 folds)": {seed: search(runner, ALL, "test/nll", seed) for seed in seeds},
            " (+ retrain)": {seed: of_temperature(runner, of["temperature"], ALL, seed) for seed, of in chosen.items()},
        }
        rows = zip(found.items(), nll, top1, strict=True)
        return [Row(f"{title}{part}", one, other, by_seed) for (part, by_seed), one, other in rows]

    rows = [runner.row("Simple training", LEARNED, "5.99 ± 0.04", "0.435 ± 0.001")]
    rows += searched("Grid search", search_grid, GRID_NLL, GRID_TOP1)
    for method, (title, nll, top1) in ONLINE.items():
        settings = zip(_online(method).items(), nll, top1, strict=True)
        rows += [runner.row(f"{title}{part}", setting, *printed) for (part, setting), *printed in settings]
    slow = dataclasses.replace(LEARNED, name="simple_training_rate1", temperature_rate=1.0)
    less = dataclasses.replace(LEARNED, name="simple_training_fit", shards=FIT)
    rows += [
        *(runner.row(f"Simple training, batches of {size}", _smaller(size)) for size in (56, 48)),
        runner.row("Simple training, learning rate of τ that of the model", slow),
        runner.row("Simple training on 14 typefaces", less),
    ]
    if budget := runner.options.budget:
        search = functools.partial(search_bayes, budget=budget)
        rows += searched("Bayesian optimization", search, BAYES_NLL, BAYES_TOP1)
    return rows


def _online(method: Method) -> dict[str, Setting]:
    """Returns the runs whose τ learns from a validation set, and from two fractions of every batch."""
    head = LEARNED.head
    return {
        " (val)": Setting(f"{method}_val", head, FIT, TemperatureGradient(method, None), is_validated=True),
        " (12.5 %)": Setting(f"{method}_12", head, ALL, TemperatureGradient(method, 0.125)),
        " (25 %)": Setting(f"{method}_25", head, ALL, TemperatureGradient(method, 0.25)),
    }


def _smaller(size: int) -> Setting:
    """Returns simple training on as many rows and steps as the others have if some of 64 rows are held out."""
    epochs = LEARNED.epochs * (2 - size / BATCH_SIZE) * size / BATCH_SIZE
    return dataclasses.replace(LEARNED, name=f"simple_training_batch{size}", batch_size=size, epochs=epochs)
