"""Evaluates a run on all sets of a suite below a folder, and continues where it was interrupted."""

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from lit_het.apps.benchmark import page
from lit_het.apps.benchmark.results import Result, read_results, write_results
from lit_het.configs import experiment
from lit_het.console import Bar, message
from lit_het.data_pipelines.texts.captions_config import SET_PROMPTS
from lit_het.data_pipelines.texts.prompts import read_prompts
from lit_het.errors import DataError, UserError, pluralize
from lit_het.eval.evaluation import line, write_record
from lit_het.eval.report.page import render_page
from lit_het.eval.report.writing import write_benchmark
from lit_het.eval.sets.benchmarks import SUITES, check_complete, find_sets
from lit_het.eval.suite import ClassNamesConfig, EvaluationConfig, FewShotConfig
from lit_het.models.experts import with_experts
from lit_het.models.opening import Run, open_run
from lit_het.training.preemption import Preempted
from lit_het.types import EvaluatedModel
from lit_het.weights.native import checksums


def benchmark(
    run_dir: Path,
    suite: str,
    data: str,
    output: Path,
    *,
    prompts: str = "set",
    samples: int = 0,
    pretrained: Path | None = None,
    experts: Sequence[str] = (),
) -> dict[str, Result]:
    """Evaluates all sets of a suite that lie below a folder, prints tables, and writes a page.

    Every evaluation is saved in the run's folder, unless its experts are used in another way than in training. The
    figures stand beside the page as ``.md`` and as ``.json``, which is written after each set: with the same output,
    sets whose model, settings and data are the same are not evaluated again.

    Args:
        run_dir: the run.
        suite: a name of `lit_het.eval.sets.benchmarks.SUITES`.
        data: a folder with the folders of sets; a path or a URL.
        output: path of the page.
        prompts: templates, see `ClassNamesConfig`.
        samples: S, the number of noise samples per image, for figures over noise samples in the saved evaluations.
        pretrained: current path of the run with the locked parameters, if it was moved.
        experts: fields of the image tower's experts with other values, see `lit_het.models.experts.with_experts`.

    Returns:
        The results by set.
    """
    chosen = SUITES[suite]
    templates = () if prompts == SET_PROMPTS else read_prompts(prompts)
    found, missing = sets_in(data, suite)
    run = with_experts(open_run(run_dir, pretrained), experts)
    # Read before anything is measured: another file of this name would be overwritten.
    saved, results, failures = read_results(output.with_suffix(".json")), {}, {}
    measuring = _Measuring(run, run.model(calibrated=not experts), _identity(run, templates), is_saved=not experts)
    about = {"suite": suite, "run": str(run_dir), "step": run.step}
    with Bar("benchmark", len(found), "sets") as bar:
        for name, directory in found.items():
            config = chosen.evaluation(name, directory, ClassNamesConfig(prompts), samples)
            with bar.paused():
                try:
                    results[name] = measuring.result(config, saved.get(name))
                except Preempted:
                    raise
                except UserError as error:
                    # Without the way out of data errors: a benchmark has no flag for it.
                    failures[name] = error.problem if isinstance(error, DataError) else str(error)
                    message(f"{name}: {failures[name]}")
                write_results(output.with_suffix(".json"), saved | results, about)
            bar.advance(1)
    shown = page.Page(chosen, run_dir.name, results, failures, beside=page.times(results))
    content = {**about, "missing": missing, "failed": failures, "means": shown.means}
    write_results(output.with_suffix(".json"), results, content)
    write_page(shown, output)
    check_failures(failures)
    return results


def sets_in(data: str, suite: str) -> tuple[dict[str, str], list[str]]:
    """Returns the folders of a suite's sets below a folder, and the sets that are missing; says which these are."""
    sets = SUITES[suite].sets
    found, others = find_sets(data, SUITES[suite])
    missing = [name for name in sets if name not in found]
    if not found:
        raise UserError(f"{data} has no folder of a set of the suite {suite}, such as {', '.join(missing[:4])}")
    message(f"{len(found)} of {len(sets)} sets" + (f"; missing: {', '.join(missing)}" if missing else ""))
    if others:
        message(f"not in the suite {suite}: {', '.join(others)}")
    return found, missing


def check_failures(failures: Mapping[str, str]) -> None:
    """Raises a `UserError` if a set could not be evaluated, see `page.Page`."""
    if failures:
        raise UserError(
            f"{pluralize(len(failures), 'set')} could not be evaluated: {', '.join(failures)}; the same command "
            "evaluates these again"
        )


@dataclasses.dataclass(frozen=True)
class _Measuring:
    """Evaluates one model on one set after another."""

    run: Run
    model: EvaluatedModel
    identity: str
    is_saved: bool

    def result(self, config: EvaluationConfig, saved: Result | None) -> Result:
        """Returns the result of an evaluation, the saved one if it is of the same model, settings and data."""
        for split in (config.train_split, config.data.split) if isinstance(config, FewShotConfig) else ("test",):
            check_complete(dataclasses.replace(config.data, split=split))
        sets = self.run.sets()  # of this set alone, so that its features are freed before the next
        evaluator = config.build(sets)
        evaluator.check(self.model)
        settings = experiment.to_dict(config)
        content = json.dumps([self.identity, settings, sets.digest], sort_keys=True)
        key = hashlib.sha256(content.encode()).hexdigest()
        if saved is not None and saved.key == key:
            message(f"{config.data.name}: evaluated before")
            return saved
        began = time.monotonic()
        evaluation = evaluator(self.model)
        seconds = time.monotonic() - began
        if self.is_saved:
            write_record(evaluation, self.run.run_dir, self.run.step, settings)
        spent = sets.spent
        errors = {name: error for name, error in evaluation.errors.items() if math.isfinite(error)}
        found = Result(key, dict(evaluation.figures), errors, spent.num_images, seconds, spent.decoding, spent.tower)
        message(f"{line(evaluation)}; {found.num_images / seconds:.1f} images a second, most time for {found.bound}")
        return found


def _identity(run: Run, templates: Sequence[str]) -> str:
    """Identifies everything but the sets that figures depend on."""
    fields = experiment.to_dict(run.config)
    tokenizer = b"" if run.tokenizer is None else run.tokenizer.model_bytes
    digests = hashlib.sha256(tokenizer).hexdigest(), checksums.digest(run.params)
    read_by = fields["tokenizer"], fields["data"]["preprocessing"], fields["data"]["image_size"]
    return json.dumps([fields["task"], *read_by, *digests, str(run.calibration), templates])


def write_page(shown: page.Page, output: Path) -> None:
    """Writes the page of a benchmark and its tables as Markdown, and prints the tables."""
    whole = render_page(f"Benchmark of {shown.name}", shown.sections())
    write_benchmark(output, whole, shown.tables(), shown.sources())
