"""``lit-het quickstart``: data, upstream tower, two LiT runs, evaluation and a report in minutes."""

import dataclasses
import json
import resource
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from lit_het.apps.quickstart_evaluation import figures, noise_tests, read_homoglyphs, read_json
from lit_het.apps.quickstart_report import compare_models, findings, homoglyphs_section, results_section
from lit_het.apps.report import report
from lit_het.configs import (
    quickstart_evaluations,
    quickstart_lit_deterministic,
    quickstart_lit_het_xl,
    quickstart_upstream,
)
from lit_het.configs.experiment import ExperimentConfig
from lit_het.console import Bar
from lit_het.data_pipelines.glyphs import TYPEFACES, GlyphConfig, write_glyph_shards
from lit_het.data_pipelines.storage import read_lines
from lit_het.data_pipelines.tokenizers import train_sentencepiece
from lit_het.errors import UserError
from lit_het.eval.report.comparison import print_table
from lit_het.eval.saved_runs import read_runs
from lit_het.files import write_atomically
from lit_het.runs.evaluation import evaluate
from lit_het.runs.training import train_unless_done


def quickstart(run_dir: Path, seed: int) -> None:
    """Runs every unfinished stage, then evaluates and reports.

    Raises:
        UserError: ``run_dir`` holds a finished quickstart, or one with another seed.
    """
    if (run_dir / "results.json").exists():
        raise UserError(f"{run_dir} holds a finished quickstart; open {run_dir}/report.html or give another --run-dir")
    clock = Clock(run_dir, seed)
    with clock.stage("data"):
        write_data(run_dir / "data", quickstart_upstream.glyphs(seed))
    upstream = quickstart_upstream.get_config(run_dir)
    num_words = len(read_lines(str(run_dir / "data" / "words.txt")))
    upstream = dataclasses.replace(upstream, task=dataclasses.replace(upstream.task, num_classes=num_words))
    deterministic = quickstart_lit_deterministic.get_config(run_dir)
    het_xl = quickstart_lit_het_xl.get_config(run_dir)
    for config in (upstream, deterministic, het_xl):
        with clock.stage(config.run_dir.name):
            train_unless_done(_with_seed(config, seed))
    with clock.stage("evaluation"):
        for config in (deterministic, het_xl):
            evaluate([config.run_dir], quickstart_evaluations.get_evaluations(run_dir))
    one, other = read_runs([deterministic.run_dir, het_xl.run_dir])
    homoglyphs = read_homoglyphs(run_dir / "data")
    noise = noise_tests(other, homoglyphs)
    seconds = clock.seconds()
    results = {
        "deterministic": figures(one, homoglyphs),
        "het_xl": figures(other, homoglyphs),
        "noise_of_homoglyphs": {kind: dataclasses.asdict(test) for kind, test in noise.items()},
        "seconds": seconds,
        "seconds_by_stage": clock.stages,
        "peak_memory_bytes": peak_memory_bytes(),
        "num_names": len(homoglyphs.groups),
        "seed": seed,
    }
    comparison = compare_models(one, other)
    sentences = findings(one, other, homoglyphs, noise)
    sections = [results_section(comparison, sentences, results), homoglyphs_section(other, homoglyphs)]
    report([one.directory, other.directory], run_dir / "report.html", sections)
    write_atomically(run_dir / "results.json", json.dumps(results, indent=2) + "\n")
    console = Console()
    console.print(print_table(comparison, "Zero-shot classification of characters by name"))
    for sentence in sentences:
        console.print(sentence, highlight=False)
    console.print(f"{seconds:.0f} s, {results['peak_memory_bytes'] / 1e9:.2f} GB at most", highlight=False)


class Clock:
    """Sums the seconds of all stages over interruptions in ``stages.json``, which also stores the seed."""

    def __init__(self, run_dir: Path, seed: int):
        self._path = run_dir / "stages.json"
        self._seed = seed
        self.stages: dict[str, float] = {}
        # The first stage includes the time of imports: from the start of the process until now.
        self._uncounted = time.monotonic() - _process_start()
        run_dir.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            before = read_json(self._path)
            if before.get("seed") != seed:
                raise UserError(
                    f"{run_dir} was started with seed {before.get('seed')}; give this --seed or another --run-dir"
                )
            stages = before.get("stages")
            if not isinstance(stages, dict) or not all(isinstance(value, int | float) for value in stages.values()):
                raise UserError(f"{self._path} contains no times of stages; delete it")
            self.stages = stages

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time inside the context to stage ``name``."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.stages[name] = self.stages.get(name, 0.0) + time.monotonic() - began + self._uncounted
            self._uncounted = 0.0
            write_atomically(self._path, json.dumps({"seed": self._seed, "stages": self.stages}) + "\n")

    def seconds(self) -> float:
        """Returns the total seconds of all stages."""
        return sum(self.stages.values())


def peak_memory_bytes() -> int:
    """Returns the peak resident size of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _process_start() -> float:
    """Returns the start time of this process on the monotonic clock."""
    import psutil

    return time.monotonic() - (time.time() - psutil.Process().create_time())


def write_data(directory: Path, glyphs: GlyphConfig) -> None:
    """Writes shards and tokenizer unless they exist.

    The folder is written under a temporary name and renamed when it is complete.

    Raises:
        UserError: the folder contains characters of another seed.
    """
    if directory.exists():
        config = read_json(directory / "glyphs.json").get("config")
        drawn_with = config.get("seed") if isinstance(config, dict) else None
        if drawn_with != glyphs.seed:
            raise UserError(
                f"{directory} was drawn with seed {drawn_with}; give --seed {drawn_with} or another --run-dir"
            )
        return
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with Bar("drawing characters", len(TYPEFACES) + 3, "steps") as bar:
        write_glyph_shards(glyphs, partial, bar.advance)
    names = read_lines(str(partial / "train" / "classnames.txt"))
    size = quickstart_lit_deterministic.VOCABULARY_SIZE
    (partial / "tokenizer.model").write_bytes(train_sentencepiece(names, vocabulary_size=size, model_type="bpe"))
    partial.rename(directory)


def _with_seed(config: ExperimentConfig, seed: int) -> ExperimentConfig:
    return dataclasses.replace(config, seed=seed, data=dataclasses.replace(config.data, seed=seed))
