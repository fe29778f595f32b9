"""The top of a report, and its sections on the runs: facts, training curves, configurations, comparison."""

import dataclasses
import datetime
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lit_het.errors import pluralize
from lit_het.eval.evaluation import FIGURES_OF_TRAINING, Record, evaluations_folder
from lit_het.eval.metrics.significance import Estimate, WelchTest, standard_error
from lit_het.eval.report import figures
from lit_het.eval.report.naming import STYLES, split, style_of, title_of_kind
from lit_het.eval.report.page import NOTHING, Html, Section, configuration, facts, folded, joined, paragraph
from lit_het.eval.report.predictions import curve_of
from lit_het.eval.report.sections import keys_of, measured_by
from lit_het.eval.report.tables import NO_FIGURE, Cell, Row, Table
from lit_het.eval.report.welch import shown_p, welch_tables
from lit_het.eval.run_comparison import WITHOUT_TITLES, RunComparison
from lit_het.eval.saved_runs import SavedRun, differing_fields

# A title names so many runs.
_MOST_NAMES = 4
# The figures of which one opens a page; earlier entries take precedence.
_HEADLINES = (
    ("zero_shot", ("top1", "mean_average_precision")),
    ("supervised", ("top1", "mean_average_precision")),
    ("retrieval", ("image_to_text_recall1",)),
    ("panoptic", ("pq",)),
    ("captioning", ("cider",)),
    ("question_answering", ("vqa_accuracy", "exact_match", "anls")),
    ("linear_probe", ("top1",)),
    ("few_shot", ("25_shot", "10_shot", "5_shot", "1_shot")),
    ("shift", ("corrupted/top1",)),
    ("ensemble", ("joint_top1",)),
)


@dataclasses.dataclass(frozen=True)
class Opening:
    """What stands above the sections of a page.

    Attributes:
        title: what the runs are.
        sentences: the first says what was found.
        plot: of what was found.
    """

    title: str
    sentences: Sequence[str]
    plot: Html = NOTHING


def header(runs: Sequence[SavedRun], opening: Opening) -> Html:
    """Returns what follows the first sentence: the plot, the other sentences, and the facts of the runs."""
    shown: dict[str, object] = {"runs": len(runs), "evaluated": _date(runs)}
    if len(runs) == 1:
        (run,) = runs
        shown = {"run": run.directory, **_facts(run), "evaluated": _date(runs), **_images(run)}
    return joined([opening.plot, *map(paragraph, opening.sentences[1:]), facts(shown)])


def runs_section(runs: Sequence[SavedRun]) -> Section | None:
    """Returns the facts of several runs as a table; None for a single run."""
    if len(runs) < 2:
        return None
    all_facts = [_facts(run) for run in runs]
    names = list(dict.fromkeys(name for run_facts in all_facts for name in run_facts))
    rows = [
        Row(run.name, tuple(Cell(run_facts.get(name, NO_FIGURE)) for name in names))
        for run, run_facts in zip(runs, all_facts, strict=True)
    ]
    return Section("Runs", (Table("", tuple(names), tuple(rows)).html(),))


def _facts(run: SavedRun) -> dict[str, str]:
    task = run.config.get("task")
    found: dict[str, str] = {}
    if isinstance(task, Mapping):
        head = task.get("head")
        kind = str(head.get("type", ""))[:100] if isinstance(head, Mapping) else ""
        found["model"] = _model(task)
        found["head"] = kind.removesuffix("Config").removesuffix("Contrastive") or "none"
    if run.seed is not None:
        found["seed"] = str(run.seed)
    found["step"] = f"{run.last_step:,}"
    return found


def _model(task: Mapping[str, Any]) -> str:
    if task.get("oracle"):
        return "panoptic segmentation"
    if task.get("decoder"):
        return "decoder"
    return "image-text" if task.get("text_tower") else "image tower"


def _images(run: SavedRun) -> dict[str, str]:
    counts = {
        name: len(record.drawing.arrays["confidence"])
        for (_, name), record in run.records.items()
        if "confidence" in record.drawing.arrays
    }
    return {"images": ", ".join(f"{count:,} of {name}" for name, count in counts.items())} if counts else {}


def _date(runs: Sequence[SavedRun]) -> str:
    times = [path.stat().st_mtime for run in runs for path in evaluations_folder(run.directory).glob("*.json")]
    return datetime.date.fromtimestamp(max(times)).isoformat() if times else "not yet"


def training_section(runs: Sequence[SavedRun]) -> Section | None:
    """Returns training curves, and curves of evaluations during training."""
    histories = {run.name: run.history for run in runs if run.history}
    charts = [*figures.training_charts(histories), *_evaluation_charts(histories)]
    return Section("Training", (figures.curves(histories, charts),)) if charts else None


def _evaluation_charts(histories: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[figures.Chart]:
    counts: dict[str, int] = {}
    for history in histories.values():
        run_counts: dict[str, int] = {}
        for metric in (metric for record in history for metric in record):
            run_counts[metric] = run_counts.get(metric, 0) + 1
        counts |= {metric: max(count, counts.get(metric, 0)) for metric, count in run_counts.items()}
    charts = []
    for metric, count in counts.items():
        kind, _, rest = metric.partition("/")
        name, _, figure = rest.partition("/")
        # Most figures of parts, such as calibrated predictions, are left out: they would be many charts.
        if kind == "train" or figure not in FIGURES_OF_TRAINING or count < 2:
            continue
        charts.append(figures.Chart(metric, f"{title_of_kind(kind)} {name}: {style_of(split(figure)[1]).label}"))
    return charts


def configuration_section(runs: Sequence[SavedRun]) -> Section | None:
    """Returns the configurations, and the fields in which they differ."""
    with_config = [run for run in runs if run.config]
    if not with_config:
        return None
    body = [configuration(run.config, run.name) for run in with_config]
    fields = differing_fields(with_config) if len(with_config) > 1 else {}
    if not fields:
        return Section("Configuration", tuple(body))
    rows = [Row(field, tuple(Cell(_shown(value)) for value in values)) for field, values in fields.items()]
    table = Table("", tuple(run.name for run in with_config), tuple(rows)).html()
    note = "The fields in which the runs differ, and the full configuration of each run."
    return Section("Configuration", (table, *body), note)


def _shown(value: Any) -> str:
    return NO_FIGURE if value is None else str(value)


def comparison_section(runs: Sequence[SavedRun], comparison: RunComparison) -> Section:
    """Returns Welch's tests between two groups of runs, and the fields in which the groups differ."""
    members = (
        f"{title}: {', '.join(names)}"
        for title, names in zip(comparison.titles, (comparison.one, comparison.other), strict=True)
    )
    fields = [field for field in differing_fields(runs) if field != "seed"]
    note = (
        f"{'; '.join(members)}. Besides their seeds, the groups differ in {_summarized(fields)}. {comparison.verdict} "
        "Bold: significant after Holm's correction. " + " ".join(comparison.remarks)
    )
    tables = enumerate(welch_tables(comparison).items())
    body = tuple(folded(title, table.html(), unfolded=number == 0) for number, (title, table) in tables)
    return Section("Comparison", body, note)


def _summarized(fields: Sequence[str]) -> str:
    """Returns the common prefix of the fields or, without one, their names."""
    shared = [parts[0] for parts in zip(*(field.split(".") for field in fields), strict=False) if len(set(parts)) == 1]
    return ".".join(shared) or ", ".join(fields)


def opening_of(runs: Sequence[SavedRun], comparison: RunComparison | None, remark: str = "") -> Opening:
    """Returns the top of a page: the main result, what is to know about it, and ``remark``."""
    found = _main_figure(runs)
    sentences: list[str] = []
    plot = NOTHING
    if found is not None:
        key, figure = found
        measured = measured_by(runs, key)
        test = None if comparison is None else comparison.figures.get("/".join((*key, figure)))
        if comparison is None or test is None:
            sentences = [_headline(key, figure, measured)]
            values = {name: record.estimate(figure) for name, record in measured.items()}
        else:
            sentences = [_headline_of_groups(key, figure, comparison.titles, test)]
            values = dict(zip(comparison.titles, (test.one, test.other), strict=True))
        plot = _plot(key, figure, measured, values)
    if comparison is not None:
        sentences.append(f"{' against '.join(comparison.titles)}, {comparison.verdict}")
    if len(runs) == 1:
        sentences += _overconfidence(runs[0])
    if not sentences:
        count = len(keys_of(runs))
        nothing = "No evaluations yet: run lit-het zero-shot or lit-het evaluate."
        sentences = [f"{pluralize(count, 'evaluation')}." if count else nothing]
    return Opening(_title(runs, comparison), [*sentences, *filter(None, [remark])], plot)


def _title(runs: Sequence[SavedRun], comparison: RunComparison | None) -> str:
    if comparison is not None and comparison.titles != WITHOUT_TITLES:
        return " against ".join(comparison.titles)
    names = [run.name for run in runs]
    if len(names) > _MOST_NAMES:
        names = [*names[: _MOST_NAMES - 1], f"{len(names) - _MOST_NAMES + 1} other runs"]
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _main_figure(runs: Sequence[SavedRun]) -> tuple[tuple[str, str], str] | None:
    """Returns the evaluation and the figure that stand first in `_HEADLINES`, of those that all its runs have."""
    keys = keys_of(runs)
    for kind, figures_of_kind in _HEADLINES:
        for key in (key for key in keys if key[0] == kind):
            records = measured_by(runs, key).values()
            for figure in figures_of_kind:
                if all(figure in record.figures for record in records):
                    return key, figure
    return None


def _plot(key: tuple[str, str], figure: str, measured: Mapping[str, Record], values: Mapping[str, Estimate]) -> Html:
    """Returns the calibration of a single run, if it was drawn, or else the values of the main figure."""
    first, *others = measured.values()
    if not others and "reliability/plain" in first.drawing.arrays:
        return figures.reliability_diagrams(
            {f"{title_of_kind(key[0])} on {key[1]}: calibration": curve_of(first.drawing.arrays["reliability/plain"])}
        )
    style = style_of(split(figure)[1])
    title = f"{title_of_kind(key[0])} on {key[1]}: {style.label}"
    finite = {name: value for name, value in values.items() if math.isfinite(value.mean)}
    return figures.dots(title, finite, chance=first.chance.get(figure), as_share="%" in style.format)


def _headline(key: tuple[str, str], path: str, measured: Mapping[str, Record]) -> str:
    kind, name = key
    style = style_of(split(path)[1])
    subject = f"{title_of_kind(kind)} on {name}, {style.label}"
    values = {run: record.estimate(path) for run, record in measured.items()}
    first, *others = sorted(values, key=lambda run: values[run].mean, reverse=True)
    shown = {run: style.shown(value.mean, value.error) for run, value in values.items()}
    if not others:
        chance = measured[first].chance.get(path)
        beside = "" if chance is None else f" (chance {style.shown(chance)})"
        return f"{subject}: {shown[first]}{beside}."
    one, other = values[first], values[others[0]]
    if math.isnan(one.error + other.error):
        apart = "without standard errors it is unknown whether they differ"
    else:
        apart = f"a difference of {'more' if style.compared(one, other) else 'no more'} than two standard errors"
    return f"{subject}: highest with {first}, {shown[first]}; next is {others[0]} with {shown[others[0]]}, {apart}."


def _headline_of_groups(key: tuple[str, str], path: str, titles: tuple[str, str], found: WelchTest) -> str:
    style = style_of(split(path)[1])
    one, other = (style.shown(estimate.mean, estimate.error) for estimate in (found.one, found.other))
    test = found.untested or f"p = {shown_p(found.p_value)}"
    return f"{title_of_kind(key[0])} on {key[1]}, {style.label}: {titles[0]} {one}, {titles[1]} {other} ({test})."


def _overconfidence(run: SavedRun) -> list[str]:
    for record in run.records.values():
        arrays = record.drawing.arrays
        if "confidence" in arrays and "correct" in arrays:
            excess = arrays["confidence"] - arrays["correct"]
            error = STYLES["ece"].shown(record.figures.get("ece", abs(float(excess.mean()))))
            direction = "overconfident" if excess.mean() > 0 else "underconfident"
            if abs(excess.mean()) <= 2 * standard_error(excess):
                direction = "neither over- nor underconfident"
            confidence = f"{arrays['confidence'].mean():.1%}"
            return [f"Its mean confidence is {confidence}: it is {direction} (calibration error {error})."]
    return []
