"""What a report says of the runs themselves: facts, curves, configurations, how they compare, and a verdict."""

import datetime
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lit_het.eval.evaluation import Record, evaluations_folder
from lit_het.eval.kept_runs import KeptRun, differing_fields
from lit_het.eval.report import figures
from lit_het.eval.report.naming import STYLES, split, style_of, title_of_kind
from lit_het.eval.report.page import Html, Section, configuration, facts, folded
from lit_het.eval.report.sections import keys_of, measured_by
from lit_het.eval.report.tables import NO_FIGURE, Cell, Row, Table, best_of
from lit_het.eval.report.welch import shown_p, welch_tables
from lit_het.eval.run_comparison import RunComparison
from lit_het.eval.significance import WelchTest

# What a verdict looks at, the first first.
_HEADLINES = (
    ("zero_shot", ("top1", "mean_average_precision")),
    ("supervised", ("top1", "mean_average_precision")),
    ("retrieval", ("image_to_text_recall1",)),
    ("linear_probe", ("top1",)),
    ("few_shot", ("25_shot", "10_shot", "5_shot", "1_shot")),
    ("shift", ("corrupted/top1",)),
    ("ensemble", ("joint_top1",)),
)
# Of what is evaluated during training, the figures that curves show.
_CURVES = ("top1", "nll", "ece", "mean_average_precision", "image_to_text_recall1", "text_to_image_recall1", "10_shot")


def header(runs: Sequence[KeptRun]) -> Html:
    """Returns the facts of a single run; those of several are a section, `runs_section`."""
    if len(runs) > 1:
        return facts({"runs": len(runs), "evaluated": _date(runs)})
    (run,) = runs
    return facts({"run": run.directory, **_facts(run), "evaluated": _date(runs), **_images(run)})


def runs_section(runs: Sequence[KeptRun]) -> Section | None:
    """Returns the facts of several runs as a table."""
    if len(runs) < 2:
        return None
    of_runs = [_facts(run) for run in runs]
    names = list(dict.fromkeys(name for of_run in of_runs for name in of_run))
    rows = [
        Row(run.name, tuple(Cell(of_run.get(name, NO_FIGURE)) for name in names))
        for run, of_run in zip(runs, of_runs, strict=True)
    ]
    return Section("Runs", (Table("", tuple(names), tuple(rows)).html(),))


def _facts(run: KeptRun) -> dict[str, str]:
    task = run.config.get("task")
    found: dict[str, str] = {}
    if isinstance(task, Mapping):
        head = task.get("head")
        kind = str(head.get("type", ""))[:100] if isinstance(head, Mapping) else ""
        found["model"] = "image-text" if task.get("text_tower") else "image tower"
        found["head"] = kind.removesuffix("Config").removesuffix("Contrastive") or "none"
    if run.seed is not None:
        found["seed"] = str(run.seed)
    found["step"] = f"{run.last_step:,}"
    return found


def _images(run: KeptRun) -> dict[str, str]:
    counts = {
        name: len(record.drawing.arrays["confidence"])
        for (_, name), record in run.records.items()
        if "confidence" in record.drawing.arrays
    }
    return {"images": ", ".join(f"{count:,} of {name}" for name, count in counts.items())} if counts else {}


def _date(runs: Sequence[KeptRun]) -> str:
    times = [path.stat().st_mtime for run in runs for path in evaluations_folder(run.directory).glob("*.json")]
    return datetime.date.fromtimestamp(max(times)).isoformat() if times else "not yet"


def training_section(runs: Sequence[KeptRun]) -> Section | None:
    """Returns the curves of training, and of what was evaluated on the way."""
    histories = {run.name: run.history for run in runs if run.history}
    charts = [*figures.training_charts(histories), *_evaluation_charts(histories)]
    return Section("Training", (figures.curves(histories, charts),)) if charts else None


def _evaluation_charts(histories: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[figures.Chart]:
    counts: dict[str, int] = {}
    for history in histories.values():
        of_run: dict[str, int] = {}
        for metric in (metric for record in history for metric in record):
            of_run[metric] = of_run.get(metric, 0) + 1
        counts |= {metric: max(count, counts.get(metric, 0)) for metric, count in of_run.items()}
    charts = []
    for metric, count in counts.items():
        kind, _, rest = metric.partition("/")
        name, _, figure = rest.rpartition("/")
        # Parts, such as the calibrated one, would be many more.
        if kind == "train" or figure not in _CURVES or "/" in name or count < 2:
            continue
        charts.append(figures.Chart(metric, f"{title_of_kind(kind)} {name}: {style_of(split(figure)[1]).label}"))
    return charts


def configuration_section(runs: Sequence[KeptRun]) -> Section | None:
    """Returns the configurations, and the fields in which they differ."""
    with_config = [run for run in runs if run.config]
    if not with_config:
        return None
    body = [configuration(run.config, run.name) for run in with_config]
    fields = differing_fields(with_config) if len(with_config) > 1 else {}
    if not fields:
        return Section("Configuration", tuple(body))
    rows = [Row(field, tuple(Cell(_told(value)) for value in values)) for field, values in fields.items()]
    table = Table("", tuple(run.name for run in with_config), tuple(rows)).html()
    note = "The fields in which the runs differ; then all fields of each."
    return Section("Configuration", (table, *body), note)


def _told(value: Any) -> str:
    return NO_FIGURE if value is None else str(value)


def comparison_section(runs: Sequence[KeptRun], comparison: RunComparison) -> Section:
    """Returns Welch's test between two groups of runs, and the fields in which the groups differ."""
    members = (
        f"{title}: {', '.join(names)}"
        for title, names in zip(comparison.titles, (comparison.one, comparison.other), strict=True)
    )
    fields = [field for field in differing_fields(runs) if field != "seed"]
    note = (
        f"{'; '.join(members)}. Beside their seeds the groups differ in {_summed_up(fields)}. {comparison.verdict} "
        "Bold: significant after Holm's correction. " + " ".join(comparison.remarks)
    )
    tables = enumerate(welch_tables(comparison).items())
    body = tuple(folded(title, table.html(), unfolded=number == 0) for number, (title, table) in tables)
    return Section("Comparison", body, note)


def _summed_up(fields: Sequence[str]) -> str:
    """Returns the part of a configuration that holds all of the fields, or their names."""
    shared = [parts[0] for parts in zip(*(field.split(".") for field in fields), strict=False) if len(set(parts)) == 1]
    return ".".join(shared) or ", ".join(fields)


def verdict(runs: Sequence[KeptRun], comparison: RunComparison | None) -> str:
    """Returns what was found in a few plain sentences."""
    keys = keys_of(runs)
    if not keys:
        return "Nothing has been measured yet: lit-het zero-shot and its siblings do so, or lit-het evaluate."
    sentences = [_tested(comparison)] if comparison is not None else []
    for kind, figures_of_kind in _HEADLINES:
        for key in (key for key in keys if key[0] == kind):
            measured = measured_by(runs, key)
            figure = next(
                (f for f in figures_of_kind if all(f in record.figures for record in measured.values())), None
            )
            if figure is not None:
                path = "/".join((*key, figure))
                of_groups = None if comparison is None else comparison.figures.get(path)
                sentences.append(
                    _headline(key, figure, measured)
                    if comparison is None or of_groups is None
                    else _headline_of_groups(key, figure, comparison.titles, of_groups)
                )
                break
        if len(sentences) > bool(comparison):
            break
    if len(runs) == 1:
        sentences += _certainty(runs[0])
    return " ".join(sentences) or f"{len(keys)} evaluations."


def _tested(comparison: RunComparison) -> str:
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
        apart = "without standard errors nobody knows whether they differ"
    else:
        is_clear = best_of([values[first], values[second]], [errors[first], errors[second]], style) is not None
        apart = f"which is {'more' if is_clear else 'no more'} than the standard errors away"
    return (
        f"{subject}: highest with {names[first]}, {style.shown(values[first], errors[first])}; next is {beside}, "
        f"{apart}."
    )


def _headline_of_groups(key: tuple[str, str], path: str, titles: tuple[str, str], found: WelchTest) -> str:
    style = style_of(split(path)[1])
    one, other = (style.shown(estimate.mean, estimate.error) for estimate in (found.one, found.other))
    test = found.untested or f"p = {shown_p(found.p_value)}"
    return f"{title_of_kind(key[0])} on {key[1]}, {style.label}: {titles[0]} {one}, {titles[1]} {other} ({test})."


def _certainty(run: KeptRun) -> list[str]:
    for record in run.records.values():
        if "confidence" in record.drawing.arrays and "top1" in record.figures:
            sure, right = float(record.drawing.arrays["confidence"].mean()), record.figures["top1"]
            error = STYLES["ece"].shown(record.figures.get("ece", abs(sure - right)))
            way = "less sure than it should be" if sure < right else "surer than it should be"
            return [f"It gives its best name {sure:.1%} on average and is {way} (calibration error {error})."]
    return []
