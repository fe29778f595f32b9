"""Fields to search, and which setting of them to try next, as a function of the trials so far."""

import dataclasses
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from lit_het.configs import experiment
from lit_het.configs.experiment import ExperimentConfig
from lit_het.errors import UserError, pluralize
from lit_het.search import grid_runs
from lit_het.search.grid import Axis

if TYPE_CHECKING:
    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

Method: TypeAlias = Literal["bayes", "random", "grid"]
State: TypeAlias = Literal["running", "finished", "given up", "failed"]

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
# Settings of a grid are listed and shuffled.
_MOST_LISTED = 100_000
# So often a setting that was tried before is drawn again: by the method, then at random.
_DRAWS = 10
_RANDOM_DRAWS = 100
# The first trials of `bayes` are random. The number does not depend on the budget, which may be raised.
_RANDOM_TRIALS = 10


@dataclasses.dataclass(frozen=True)
class Range:
    """A field with a range of numbers.

    Attributes:
        field: dotted path, as in a flag.
        low, high: the ends, which belong to it.
        logarithmic: whether the logarithm is searched evenly.
        whole: whether the numbers are integers.
    """

    field: str
    low: int | float
    high: int | float
    logarithmic: bool
    whole: bool

    def text(self, value: int | float) -> str:
        """Returns a value as in a flag, with four digits; with more where the range is narrow."""
        if self.whole:
            return str(int(value))
        # Four digits of 0.9991 would leave few values of a range from 0.999 to 0.9999.
        width = self.high - self.low
        decimals = 3 - math.floor(math.log10(min(abs(value) or width, width)))
        return repr(float(min(max(round(value, decimals), self.low), self.high))).removesuffix(".0")


Field: TypeAlias = Axis | Range


@dataclasses.dataclass(frozen=True)
class Trial:
    """A setting that was tried.

    Attributes:
        number: counted from 0.
        setting: the value of every field.
        state: what became of its run; ``failed`` if its loss or its metric is not finite, or its configuration invalid.
        value: the metric; NaN unless the trial is finished.
        history: the metric by steps of training, where pruning needs it.
        figures: the last value of each metric of the run.
        note: why it failed or was given up.
    """

    number: int
    setting: dict[str, str]
    state: State
    value: float = math.nan
    history: Mapping[int, float] = dataclasses.field(default_factory=dict)
    figures: Mapping[str, float] = dataclasses.field(default_factory=dict)
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Search:
    """What is searched, and how.

    Attributes:
        config: of all runs, apart from the fields and the seeds.
        fields: to search.
        metric: to improve, such as ``supervised/minival/nll``.
        output: folder of the runs and the tables.
        shown: further metrics in the table.
        lower: whether lower values are better; None decides by the name of the metric.
        method: how settings are chosen.
        seed: of the choices, and of initialisation, noise and data order in every run.
        prune: whether runs that are worse than the median of the others at the same step are given up.
    """

    config: ExperimentConfig
    fields: tuple[Field, ...]
    metric: str
    output: Path
    shown: tuple[str, ...] = ()
    lower: bool | None = None
    method: Method = "bayes"
    seed: int = 0
    prune: bool = False

    @property
    def minimizes(self) -> bool:
        """Whether lower values of the metric are better."""
        return grid_runs.direction_of(self.metric) == "lower" if self.lower is None else self.lower

    def ranked(self, trials: Sequence[Trial]) -> list[Trial]:
        """Returns trials, the best first and those without a value last."""
        sign = 1 if self.minimizes else -1

        def order(trial: Trial) -> tuple[bool, float, int]:
            is_finished = trial.state == "finished"
            return not is_finished, sign * trial.value if is_finished else 0.0, trial.number

        return sorted(trials, key=order)


def parse_field(text: str, config: ExperimentConfig) -> Field:
    """Returns the field of ``FIELD=LOW..HIGH``, ``FIELD=LOW..HIGH:log`` or ``FIELD=VALUE,VALUE``.

    Args:
        text: as above. A range of whole numbers is one of integers, unless the field has decimals.
        config: that has the field.
    """
    field, _, values = text.partition("=")
    field, values = field.strip().lstrip("-").replace("_", "-"), values.strip()
    if ".." in values and "," not in values:
        return _parse_range(text, field, values, config)
    usage = f"--field {text}: write FIELD=LOW..HIGH, FIELD=LOW..HIGH:log or FIELD=VALUE,VALUE with different values"
    return Axis.read(field, values, usage)


def _parse_range(text: str, field: str, values: str, config: ExperimentConfig) -> Range:
    match = re.fullmatch(rf"({_NUMBER})\.\.({_NUMBER})(:log)?", values)
    if not field or match is None:
        raise UserError(
            f"--field {text}: write a range as LOW..HIGH or LOW..HIGH:log, such as schedule.learning-rate=1e-4..1e-2"
        )
    (low, high), logarithmic = map(float, match.groups()[:2]), match[3] is not None
    if not -math.inf < low < high < math.inf:
        raise UserError(f"--field {text}: the lower end must be below the upper one")
    if logarithmic and low <= 0:
        raise UserError(f"--field {text}: a logarithmic range must lie above 0")
    are_whole = all(re.fullmatch(r"[-+]?\d+", end) for end in match.groups()[:2])
    found = experiment.fields(with_setting(config, {field: match[1]})).get(field.replace("-", "_"))
    return Range(field, low, high, logarithmic, are_whole and not isinstance(found, float))


def with_setting(config: ExperimentConfig, setting: Mapping[str, str]) -> ExperimentConfig:
    """Returns the configuration with the values of a setting; raises as `grid_runs.with_setting`."""
    return grid_runs.with_setting(config, setting, "lit-het tune --config FILE")


def check_fields(search: Search) -> None:
    """Checks every value, and the ends of every range, beside the first values of the other fields."""
    fields = search.fields
    names = [field.field for field in fields]
    if not fields or len({*names}) < len(names):
        raise UserError("give --field FIELD=..., once for each field to search")
    ends = {
        field.field: field.values if isinstance(field, Axis) else (field.text(field.low), field.text(field.high))
        for field in fields
    }
    first = {name: values[0] for name, values in ends.items()}
    for name, values in ends.items():
        for value in values:
            try:
                with_setting(search.config, first | {name: value})
            except UserError as error:
                raise UserError(f"--field {name}={value}: {error}") from error
    if search.method != "grid":
        require_optuna()
        return
    size = num_settings(fields)
    for field in fields:
        if isinstance(field, Range) and not field.whole:
            raise UserError(
                f"--method grid tries every value, and {field.field} has a range; list its values, such as "
                f"{field.field}={field.text(field.low)},{field.text(field.high)}"
            )
    if size > _MOST_LISTED:
        raise UserError(f"--method grid has {pluralize(int(size), 'setting')}; list fewer values, or search with bayes")


def require_optuna() -> None:
    """Checks that Optuna is installed."""
    try:
        import optuna  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"lit-het tune needs optuna ({error}): pip install 'lit-het[tune]'; --method grid needs none"
        ) from error


def num_settings(fields: Sequence[Field]) -> int | float:
    """Returns the number of settings of fields; infinite with a range that is not one of integers."""
    counts = (
        len(field.values) if isinstance(field, Axis) else field.high - field.low + 1 if field.whole else math.inf
        for field in fields
    )
    return math.prod(counts)


def next_setting(search: Search, trials: Sequence[Trial]) -> dict[str, str] | None:
    """Returns the setting of the next trial; None if all were tried, or no other is found.

    It depends on nothing but the arguments, so that a search that was interrupted goes on as if it had not been. With
    ``bayes`` it is that of a tree-structured Parzen estimator (Bergstra et al. 2011), whose first trials are random.

    Args:
        search: what is searched.
        trials: so far, by number.
    """
    fields, seed = search.fields, search.seed
    tried = {_key(trial.setting) for trial in trials}
    if len(tried) >= (size := num_settings(fields)):
        return None
    if search.method == "grid":
        return _untried(fields, tried, seed)
    for draw in range(_DRAWS):
        setting = _drawn(search, trials, search.method, _seed(seed, len(trials), draw))
        if _key(setting) not in tried:
            return setting
    # Few settings are left, or the estimator insists on one.
    if size <= _MOST_LISTED:
        return _untried(fields, tried, _seed(seed, len(trials), _DRAWS))
    for draw in range(_DRAWS, _DRAWS + _RANDOM_DRAWS):
        setting = _drawn(search, (), "random", _seed(seed, len(trials), draw))  # earlier trials do not matter to it
        if _key(setting) not in tried:
            return setting
    return None


def _key(setting: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(setting.items()))


def _seed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def _untried(fields: Sequence[Field], tried: set[tuple[tuple[str, str], ...]], seed: int) -> dict[str, str] | None:
    """Returns the first setting that was not tried, in an order that depends on the seed."""
    values = (
        field.values if isinstance(field, Axis) else map(str, range(int(field.low), int(field.high) + 1))
        for field in fields
    )
    settings = [
        dict(zip((field.field for field in fields), chosen, strict=True)) for chosen in itertools.product(*values)
    ]
    order = np.random.default_rng(seed).permutation(len(settings))
    return next((settings[place] for place in order if _key(settings[place]) not in tried), None)


def _drawn(search: Search, trials: Sequence[Trial], method: Method, seed: int) -> dict[str, str]:
    from optuna.samplers import RandomSampler, TPESampler

    sampler = RandomSampler(seed) if method == "random" else TPESampler(seed=seed, n_startup_trials=_RANDOM_TRIALS)
    params = _study(search, trials, sampler).ask(_distributions(search.fields)).params
    return {
        field.field: params[field.field] if isinstance(field, Axis) else field.text(params[field.field])
        for field in search.fields
    }


def _distributions(fields: Sequence[Field]) -> dict[str, "BaseDistribution"]:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    found: dict[str, BaseDistribution] = {}
    for field in fields:
        if isinstance(field, Axis):
            found[field.field] = CategoricalDistribution(field.values)
        elif field.whole:
            found[field.field] = IntDistribution(int(field.low), int(field.high), log=field.logarithmic)
        else:
            found[field.field] = FloatDistribution(field.low, field.high, log=field.logarithmic)
    return found


def _study(search: Search, trials: Sequence[Trial], sampler: "BaseSampler | None" = None) -> "Study":
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)  # it tells of every study
    study = optuna.create_study(direction="minimize" if search.minimizes else "maximize", sampler=sampler)
    distributions = _distributions(search.fields)
    study.add_trials([_frozen(search.fields, trial, distributions) for trial in trials])
    return study


def _frozen(fields: Sequence[Field], trial: Trial, distributions: dict[str, "BaseDistribution"]) -> "FrozenTrial":
    from optuna.trial import TrialState, create_trial

    # The sampler does not learn from failed trials. Pruned ones without any value are the worst to it.
    states = {"running": TrialState.RUNNING, "finished": TrialState.COMPLETE}
    params: dict[str, Any] = {}
    for field in fields:
        value = trial.setting[field.field]
        params[field.field] = value if isinstance(field, Axis) else int(value) if field.whole else float(value)
    return create_trial(
        state=states.get(trial.state, TrialState.PRUNED),
        value=trial.value if trial.state == "finished" else None,
        params=params,
        distributions=distributions,
        intermediate_values=dict(trial.history) if trial.state != "failed" else {},
    )


def should_prune(search: Search, trials: Sequence[Trial], number: int) -> bool:
    """Returns whether the best value of a trial so far is worse than the median of five or more finished ones.

    Args:
        search: what is searched.
        trials: by number, with the history of the metric; that of the others is taken at the last step of the trial.
        number: of the trial in question.
    """
    from optuna.pruners import MedianPruner

    study = _study(search, trials)
    return bool(MedianPruner(n_startup_trials=5).prune(study, study.trials[number]))
