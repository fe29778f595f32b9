"""``lit-het quickstart``: data, upstream tower, LiT runs, evaluation and a report in minutes."""

import dataclasses
import json
import resource
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_het.apps.embed.images import EmbedOptions, embed
from lit_het.apps.quickstart.answers import answers_of, read_held_out
from lit_het.apps.quickstart.clock import Clock
from lit_het.apps.quickstart.evaluation import (
    EMBEDDINGS,
    Models,
    Suspects,
    evaluations,
    noise_tests,
    read_homoglyphs,
    read_json,
    read_suspects,
    zero_shot_of,
)
from lit_het.apps.quickstart.report import (
    TITLES_OF_CONDITIONS,
    answers_section,
    comparison_section,
    findings,
    homoglyphs_section,
    opening,
    summary_section,
)
from lit_het.apps.report import report
from lit_het.configs import (
    quickstart_lit_deterministic,
    quickstart_lit_het_xl,
    quickstart_upstream,
)
from lit_het.configs.experiment import ExperimentConfig
from lit_het.configs.quickstart_evaluations import CHARACTERS, TYPEFACE
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
from lit_het.training.durations import Duration
from lit_het.training.train import train_unless_done

HELD_OUT = (TYPEFACE, CHARACTERS)
# The captions of the training set: as they are, and with wrong ones of one script.
CONDITIONS = {"clean": "txt", "noisy": "json/noisy_caption"}


@dataclasses.dataclass(frozen=True)
class Size:
    """How much a quickstart does.

    Attributes:
        conditions: captions by condition.
        seconds: of data, upstream tower and embedding, of both trainings, evaluation and calibration of a condition,
            and of scoring and the report; on the machine of docs/quickstart.md.
        scripts: whose characters are drawn, if not those of the configuration.
        steps: of the upstream tower and of each model, if not those of their configurations.
    """

    conditions: Mapping[str, str]
    seconds: tuple[tuple[float, ...], tuple[float, ...], float]
    scripts: tuple[str, ...] | None = None
    steps: tuple[int, int] | None = None

    @property
    def expected(self) -> list[float]:
        """Seconds of each stage, in their order."""
        before, of_condition, after = self.seconds
        return [*before, *(of_condition * len(self.conditions)), after]

    def shortened(self, config: ExperimentConfig) -> ExperimentConfig:
        """Returns the configuration of the upstream tower, or of a model, with its number of steps."""
        if self.steps is None:
            return config
        return dataclasses.replace(config, length=Duration(self.steps[config.task.text_tower is not None]))


FULL = Size(CONDITIONS, ((17, 74, 7), (25, 40, 21, 14), 9))
FAST = Size(
    {"noisy": CONDITIONS["noisy"]}, ((8, 24, 4), (12, 20, 13, 5), 4), ("greek", "cyrillic", "digit"), (150, 150)
)


def quickstart(run_dir: Path, seed: int, *, fast: bool = False) -> None:
    """Runs every unfinished stage, then evaluates and reports.

    Args:
        run_dir: folder of the quickstart.
        seed: of data order, initialisation and noise.
        fast: whether to draw fewer characters, train less, and leave out clean captions.
    """
    if (run_dir / "results.json").exists():
        raise UserError(f"{run_dir} holds a finished quickstart; open {run_dir}/report.html or give another --run-dir")
    size = FAST if fast else FULL
    clock = Clock(run_dir, seed, fast, size.expected)
    with clock.stage("data"):
        glyphs = quickstart_upstream.glyphs(seed)
        write_data(run_dir / "data", dataclasses.replace(glyphs, scripts=size.scripts or glyphs.scripts))
    upstream = quickstart_upstream.get_config(run_dir)
    num_words = len(read_lines(str(run_dir / "data" / "words.txt")))
    upstream = dataclasses.replace(upstream, task=dataclasses.replace(upstream.task, num_classes=num_words))
    with clock.stage("upstream"):
        train_unless_done(_with_seed(size.shortened(upstream), seed))
    with clock.stage("embedding"):
        # All models have the same tower, which thus sees no image twice.
        folders = (str(run_dir / "data" / name) for name in ("train", *HELD_OUT))
        embed(upstream.run_dir, upstream, str(run_dir / EMBEDDINGS), EmbedOptions(tuple(folders)))
    models: dict[str, Models] = {}
    for condition, captions in size.conditions.items():
        configs = [
            _on(size.shortened(config.get_config(run_dir)), run_dir, condition, captions)
            for config in (quickstart_lit_deterministic, quickstart_lit_het_xl)
        ]
        for config in configs:
            with clock.stage(f"{condition} {config.run_dir.name}"):
                train_unless_done(_with_seed(config, seed))
        with clock.stage("evaluation"):
            for config in configs:
                # As trained, also where an interrupted quickstart has calibrated already.
                evaluate([config.run_dir], evaluations(run_dir), calibrated=False)
            held_out = (read_held_out(config.run_dir, *zero_shot_of(run_dir, *HELD_OUT)) for config in configs)
            plain_answers, answers = map(answers_of, held_out)
            runs = read_runs([config.run_dir for config in configs])
            models[condition] = Models(*runs, plain_answers=plain_answers, answers=answers)
        # For those who use the models.
        with clock.stage("calibration"):
            for config in configs:
                if not calibration_path(config.run_dir).exists():
                    shards = tuple(str(run_dir / "data" / name) for name in HELD_OUT)
                    calibrate(config.run_dir, CalibrateOptions(shards, embeddings=str(run_dir / EMBEDDINGS)))
    with clock.stage("scoring captions"):
        suspects = read_suspects(models["noisy"].het_xl.directory, run_dir / "data" / "train", CONDITIONS["noisy"])
    _conclude(run_dir, models, suspects, clock)


def _conclude(run_dir: Path, models: Mapping[str, Models], suspects: Suspects, clock: Clock) -> None:
    """Writes the report and the results, and prints what they show."""
    homoglyphs = read_homoglyphs(run_dir / "data")
    first = next(iter(models.values())).het_xl
    noise = noise_tests(first, homoglyphs)
    results = {
        **{condition: both.figures(homoglyphs) for condition, both in models.items()},
        "noise_of_homoglyphs": {kind: dataclasses.asdict(test) for kind, test in noise.items()},
        "seconds": clock.seconds(),
        "seconds_by_stage": clock.stages,
        "compile_seconds": clock.compile_seconds,
        "peak_memory_bytes": peak_memory_bytes(),
        "num_names": len(homoglyphs.groups),
        "seed": clock.seed,
    }
    results["noisy"]["het_xl"]["noisy_caption_auroc"] = suspects.auroc("noise_norm")
    *compared, found_by = sentences = findings(models, suspects)
    sections = [
        answers_section(models),
        summary_section(models, suspects, found_by, results),
        *(comparison_section(both, condition) for condition, both in models.items()),
        homoglyphs_section(first, homoglyphs, noise),
    ]
    runs = [run.directory for both in models.values() for run in (both.deterministic, both.het_xl)]
    report(runs, run_dir / "report.html", sections, opening(models, compared))
    write_atomically(run_dir / "results.json", json.dumps(results, indent=2) + "\n")
    tables = (
        comparison_table(both.compared(), f"Zero-shot classification, {TITLES_OF_CONDITIONS[condition]}")
        for condition, both in models.items()
    )
    spent = (
        f"{results['seconds']:.0f} s, of which {clock.compile_seconds:.0f} s compiling, "
        f"{results['peak_memory_bytes'] / 1e9:.2f} GB at most"
    )
    print_results(*tables, *sentences, spent)


def _on(config: ExperimentConfig, run_dir: Path, condition: str, captions: str) -> ExperimentConfig:
    """Returns a configuration on the embeddings of the images, with some captions."""
    # The runs on clean captions keep the folders of their configurations.
    folder = config.run_dir if condition == "clean" else run_dir / condition / config.run_dir.name
    data = dataclasses.replace(config.data, captions=captions, embeddings=str(run_dir / EMBEDDINGS))
    return dataclasses.replace(config, run_dir=folder, data=data)


def peak_memory_bytes() -> int:
    """Returns the peak resident size of this process."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


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
