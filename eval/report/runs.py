"""Report sections on the runs: facts, training curves, configurations, comparison, and the verdict."""

import datetime
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lit_het.errors import counted
from lit_het.eval.evaluation import FIGURES_OF_TRAINING, Record, evaluations_folder
from lit_het.eval.report import figures
from lit_het.eval.report.naming import STYLES, split, style_of, title_of_kind
from lit_het.eval.report.page import Html, Section, configuration, facts, folded
from lit_het.eval.report.sections import keys_of, measured_by
from lit_het.eval.report.tables import NO_FIGURE, Cell, Row, Table, best_of
from lit_het.eval.report.welch import shown_p, welch_tables
from lit_het.eval.run_comparison import RunComparison
from lit_het.eval.saved_runs import SavedRun, differing_fields
from lit_het.eval.significance import WelchTest

# The figures that a verdict reports; earlier entries take precedence.
_HEADLINES = (
    ("zero_shot", ("top1", "mean_average_precision")),
    ("supervised", ("top1", "mean_average_precision")),
    ("retrieval", ("image_to_text_recall1",)),
    ("captioning", ("cider",)),
    ("question_answering", ("vqa_accuracy", "exact_match", "anls")),
    ("linear_probe", ("top1",)),
    ("few_shot", ("25_shot", "10_shot", "5_shot", "1_shot")),
    ("shift", ("corrupted/top1",)),
    ("ensemble", ("joint_top1",)),
)


def header(runs: Sequence[SavedRun]) -> Html:
    """Returns the facts of a single run, or a summary of several runs; see also `runs_section`."""
    if len(runs) > 1:
        return facts({"runs": len(runs), "evaluated": _date(runs)})
    (run,) = runs
    return facts({"run": run.directory, **_facts(run), "evaluated": _date(runs), **_images(run)})


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


def verdict(runs: Sequence[SavedRun], comparison: RunComparison | None) -> str:
    """Returns the main results in a few sentences."""
    keys = keys_of(runs)
    if not keys:
        return "No evaluations yet: run lit-het zero-shot or lit-het evaluate."
    sentences = [_test_summary(comparison)] if comparison is not None else []
    for kind, figures_of_kind in _HEADLINES:
        for key in (key for key in keys if key[0] == kind):
            measured = measured_by(runs, key)
            figure = next(
                (f for f in figures_of_kind if all(f in record.figures for record in measured.values())), None
            )
            if figure is not None:
                path = "/".join((*key, figure))
                test = None if comparison is None else comparison.figures.get(path)
                sentences.append(
                    _headline(key, figure, measured)
                    if comparison is None or test is None
                    else _headline_of_groups(key, figure, comparison.titles, test)
                )
                break
        if len(sentences) > bool(comparison):
            break
    if len(runs) == 1:
        sentences += _overconfidence(runs[0])
    return " ".join(sentences) or f"{counted(len(keys), 'evaluation')}."


def _test_summary(comparison: RunComparison) -> str:
    one, other = comparison.titles
    return f"{one} against {other}, {comparison.verdict}"


def _headline(key: tuple[str, str], path: str, measured: Mapping[str, Record]) -> str:
    kind, name = key
    style = style_of(split(path)[1])
    values = [record.figures[path] for record in measured.values()]
    errors = [record.errors.get(path, float("nan")) for record in measured.values()]
    subject = f"{title_of_kind(kind)} on {name}, {style.label}"
    names = list(measured)
    first = max(range(len(values)), key=lambda number: values[number])
    if len(values) == 1:
        chance = next((record.chance[path] for record in measured.values() if path in record.chance), None)
        beside = "" if chance is None else f" (chance {style.shown(chance)})"
        return f"{subject}: {style.shown(values[0], errors[0])}{beside}."
    second = max((number for number in range(len(values)) if number != first), key=lambda number: values[number])
    beside = f"{names[second]} with {style.shown(values[second], errors[second])}"
    if math.isnan(errors[first] + errors[second]):
        apart = "without standard errors it is unknown whether they differ"
    else:
        is_clear = best_of([values[first], values[second]], [errors[first], errors[second]], style) is not None
        apart = f"a difference of {'more' if is_clear else 'no more'} than the standard errors"
    return (
        f"{subject}: highest with {names[first]}, {style.shown(values[first], errors[first])}; next is {beside}, "
        f"{apart}."
    )


def _headline_of_groups(key: tuple[str, str], path: str, titles: tuple[str, str], found: WelchTest) -> str:
    style = style_of(split(path)[1])
    one, other = (style.shown(estimate.mean, estimate.error) for estimate in (found.one, found.other))
    test = found.untested or f"p = {shown_p(found.p_value)}"
    return f"{title_of_kind(key[0])} on {key[1]}, {style.label}: {titles[0]} {one}, {titles[1]} {other} ({test})."


def _overconfidence(run: SavedRun) -> list[str]:
    for record in run.records.values():
        if "confidence" in record.drawing.arrays and "top1" in record.figures:
            confidence, accuracy = float(record.drawing.arrays["confidence"].mean()), record.figures["top1"]
            error = STYLES["ece"].shown(record.figures.get("ece", abs(confidence - accuracy)))
            direction = "underconfident" if confidence < accuracy else "overconfident"
            return [f"Its mean confidence is {confidence:.1%}: it is {direction} (calibration error {error})."]
    return []
