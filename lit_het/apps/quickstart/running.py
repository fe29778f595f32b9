"""``lit-het quickstart``: data, upstream tower, four LiT runs, evaluation and a report in minutes."""

import dataclasses
import json
import resource
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lit_het.apps.embed.images import EmbedOptions, embed
from lit_het.apps.quickstart.evaluation import Models, Suspects, noise_tests, read_homoglyphs, read_json, read_suspects
from lit_het.apps.quickstart.report import (
    TITLES_OF_CONDITIONS,
    comparison_section,
    findings,
    homoglyphs_section,
    opening,
    summary_section,
)
from lit_het.apps.report import report
from lit_het.configs import (
    quickstart_evaluations,
    quickstart_lit_deterministic,
    quickstart_lit_het_xl,
    quickstart_upstream,
)
from lit_het.configs.experiment import ExperimentConfig
from lit_het.configs.quickstart_evaluations import TYPEFACE
from lit_het.console import Bar
from lit_het.data_pipelines.glyphs import TYPEFACES, GlyphConfig, write_glyph_shards
from lit_het.data_pipelines.shards.storage import read_lines
from lit_het.data_pipelines.texts.tokenizers import train_sentencepiece
from lit_het.errors import UserError
from lit_het.eval.report.comparison import comparison_table
from lit_het.eval.report.writing import print_results
from lit_het.eval.saved_runs import read_runs
from lit_het.files import write_atomically
from lit_het.models.calibration.images import CalibrateOptions, calibrate
from lit_het.models.calibration.saved import calibration_path
from lit_het.models.evaluation import evaluate
from lit_het.training.train import train_unless_done

# The training sets: with the captions as they are, and with wrong captions of one script.
CONDITIONS = {"clean": "train", "noisy": "train_noisy"}


def quickstart(run_dir: Path, seed: int) -> None:
    """Runs every unfinished stage, then evaluates and reports."""
    if (run_dir / "results.json").exists():
        raise UserError(f"{run_dir} holds a finished quickstart; open {run_dir}/report.html or give another --run-dir")
    clock = Clock(run_dir, seed)
    with clock.stage("data"):
        write_data(run_dir / "data", quickstart_upstream.glyphs(seed))
    upstream = quickstart_upstream.get_config(run_dir)
    num_words = len(read_lines(str(run_dir / "data" / "words.txt")))
    upstream = dataclasses.replace(upstream, task=dataclasses.replace(upstream.task, num_classes=num_words))
    with clock.stage("upstream"):
        train_unless_done(_with_seed(upstream, seed))
    with clock.stage("embedding"):
        shards = tuple(str(run_dir / "data" / name) for name in CONDITIONS.values())
        embed(upstream.run_dir, upstream, str(run_dir / "embeddings"), EmbedOptions(shards))
    models: dict[str, Models] = {}
    for condition, name in CONDITIONS.items():
        configs = [
            _on(config.get_config(run_dir), run_dir, condition, name)
            for config in (quickstart_lit_deterministic, quickstart_lit_het_xl)
        ]
        for config in configs:
            with clock.stage(f"{condition} {config.run_dir.name}"):
                train_unless_done(_with_seed(config, seed))
        with clock.stage("evaluation"):
            for config in configs:
                # As trained, also where an interrupted quickstart has calibrated already.
                evaluate([config.run_dir], quickstart_evaluations.get_evaluations(run_dir), calibrated=False)
            models[condition] = Models(*read_runs([config.run_dir for config in configs]))
        # For those who use the models.
        with clock.stage("calibration"):
            for config in configs:
                if not calibration_path(config.run_dir).exists():
                    calibrate(config.run_dir, CalibrateOptions((str(run_dir / "data" / TYPEFACE),)))
    with clock.stage("scoring captions"):
        suspects = read_suspects(models["noisy"].het_xl.directory, run_dir / "data" / CONDITIONS["noisy"])
    _conclude(run_dir, models, suspects, clock)


def _conclude(run_dir: Path, models: Mapping[str, Models], suspects: Suspects, clock: "Clock") -> None:
    """Writes the report and the results, and prints what they show."""
    homoglyphs = read_homoglyphs(run_dir / "data")
    noise = noise_tests(models["clean"].het_xl, homoglyphs)
    results = {
        **{condition: both.figures(homoglyphs) for condition, both in models.items()},
        "noise_of_homoglyphs": {kind: dataclasses.asdict(test) for kind, test in noise.items()},
        "seconds": clock.seconds(),
        "seconds_by_stage": clock.stages,
        "peak_memory_bytes": peak_memory_bytes(),
        "num_names": len(homoglyphs.groups),
        "seed": clock.seed,
    }
    results["noisy"]["het_xl"]["noisy_caption_auroc"] = suspects.auroc("noise_norm")
    *compared, found_by = sentences = findings(models, suspects)
    sections = [
        summary_section(models, suspects, found_by, results),
        *(comparison_section(both, condition) for condition, both in models.items()),
        homoglyphs_section(models["clean"].het_xl, homoglyphs, noise),
    ]
    runs = [run.directory for both in models.values() for run in (both.deterministic, both.het_xl)]
    report(runs, run_dir / "report.html", sections, opening(models, compared))
    write_atomically(run_dir / "results.json", json.dumps(results, indent=2) + "\n")
    tables = (
        comparison_table(both.compared(), f"Zero-shot classification, {TITLES_OF_CONDITIONS[condition]}")
        for condition, both in models.items()
    )
    spent = f"{results['seconds']:.0f} s, {results['peak_memory_bytes'] / 1e9:.2f} GB at most"
    print_results(*tables, *sentences, spent)


def _on(config: ExperimentConfig, run_dir: Path, condition: str, name: str) -> ExperimentConfig:
    """Returns a configuration on the embeddings of a training set."""
    # The runs on clean captions keep the folders of their configurations.
    folder = config.run_dir if condition == "clean" else run_dir / condition / config.run_dir.name
    data = dataclasses.replace(
        config.data, shards=(str(run_dir / "data" / name),), embeddings=str(run_dir / "embeddings")
    )
    return dataclasses.replace(config, run_dir=folder, data=data)


class Clock:
    """Sums the seconds of all stages over interruptions in ``stages.json``, which also stores the seed.

    Attributes:
        seed: of the quickstart.
        stages: seconds by stage.
    """

    def __init__(self, run_dir: Path, seed: int):
        self._path = run_dir / "stages.json"
        self.seed = seed
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
            write_atomically(self._path, json.dumps({"seed": self.seed, "stages": self.stages}) + "\n")

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
    """
    if directory.exists():
        found = read_json(directory / "glyphs.json").get("config")
        # Fields that an earlier version did not have are as they are by default.
        drawn_with = {**_as_json(GlyphConfig()), **(found if isinstance(found, dict) else {})}
        for field, value in _as_json(glyphs).items():
            if drawn_with[field] != value:
                raise UserError(
                    f"{directory} was drawn with {field} = {drawn_with[field]}, not {value}; give another --run-dir"
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


def _as_json(config: GlyphConfig) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(config)))


def _with_seed(config: ExperimentConfig, seed: int) -> ExperimentConfig:
    return dataclasses.replace(config, seed=seed, data=dataclasses.replace(config.data, seed=seed))
