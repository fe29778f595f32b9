"""Compares what a small decoder and a contrastive model make of a locked image tower, on the glyph data, over seeds.

    python -m scripts.studies.study_decoder --output runs/decoder --seeds 0 1 2

The tower of the quickstart is locked and embedded once. Decoders with and without noise in the features before the
logits learn to name characters and to answer questions about them, and a text tower to match names (docs/decoder.md).
All are evaluated on the characters of training in another typeface, and on characters that training never saw; finished
runs are skipped.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from lit_het.apps.embed.images import EmbedOptions, embed
from lit_het.apps.quickstart.running import write_data
from lit_het.configs import quickstart_decoder, quickstart_lit_deterministic, quickstart_upstream
from lit_het.configs.experiment import ExperimentConfig
from lit_het.configs.quickstart_evaluations import CHARACTERS, TYPEFACE
from lit_het.eval.decoder_suite import AnswerQuestionsConfig, WriteCaptionsConfig
from lit_het.eval.report.tables import markdown_table
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ClassNamesConfig, ZeroShotConfig
from lit_het.heads.classification_config import HetXLConfig
from lit_het.heads.noise_config import CovarianceConfig, SamplingConfig
from lit_het.tasks.captioning import CaptioningConfig
from scripts.studies import harness

SETS = (TYPEFACE, CHARACTERS)
DETERMINISTIC, NOISY, CONTRASTIVE = "decoder", "decoder_het_xl", "contrastive"
# The covariance of the quickstart's HET-XL head.
NOISE = HetXLConfig(
    CovarianceConfig(num_factors=4, form="full", initial_noise_norm=0.1),
    sampling=SamplingConfig(num_samples=4, num_eval_samples=32),
    zero_kernel=False,
)
ROWS = {
    "decoder": (DETERMINISTIC, ""),
    "decoder, HET-XL, no noise": (NOISY, ""),
    "decoder, HET-XL, 32 samples": (NOISY, "noisy/"),
    "contrastive, ranking all names": (CONTRASTIVE, ""),
}
CAPTIONS = {
    "exact match": "exact_match",
    "CIDEr-D": "cider",
    "log-perplexity": "log_perplexity",
    "ECE of tokens": "token_ece",
    "ECE of names": "ece",
    "AURC": "aurc",
}
CONTRASTIVE_FIGURES = {"exact match": "top1", "ECE of names": "ece", "AURC": "aurc"}
FIGURES = (*CAPTIONS, "questions")


def configuration(name: str, root: Path, data: Path, seed: int, steps: int) -> ExperimentConfig:
    """Returns the run of a decoder or of the contrastive model, on stored embeddings."""
    is_decoder = name != CONTRASTIVE
    base = (quickstart_decoder if is_decoder else quickstart_lit_deterministic).get_config(root)
    embeddings = str(root / ("tokens" if is_decoder else "embeddings"))
    sets = [ImageSet(one, str(data / one), split=".", embeddings=embeddings, labelled=not is_decoder) for one in SETS]
    if is_decoder:
        assert isinstance(base.task, CaptioningConfig)
        if name == NOISY:
            base = dataclasses.replace(base, task=dataclasses.replace(base.task, head=NOISE))
        samples = 32 if name == NOISY else 0
        evaluations = (
            *(WriteCaptionsConfig(images, prompt="", samples=samples) for images in sets),
            *(AnswerQuestionsConfig(images, figure="exact_match", samples=samples) for images in sets),
        )
    else:
        evaluations = tuple(ZeroShotConfig(images, ClassNamesConfig(candidates=data / "names.txt")) for images in sets)
    mixture = tuple(dataclasses.replace(one, shards=(str(data / "train"),)) for one in base.data.mixture)
    loader = dataclasses.replace(base.data, mixture=mixture)
    stored = {"tower": root / "upstream", "embeddings": embeddings, "loader": loader}
    length = steps if is_decoder else _at_most(steps, base)
    return harness.lit_run_of(base, root / name, data, seed, steps=length, evaluations=evaluations, **stored)


def _at_most(steps: int, config: ExperimentConfig) -> int:
    """Returns the steps of a run beside those of decoders, which no flag makes longer."""
    return min(int(config.length.amount), steps)


def prepare(root: Path, data: Path, seed: int, steps: int) -> None:
    """Trains the tower of a seed and embeds with it, unless that is done."""
    write_data(data, quickstart_upstream.glyphs())
    tower = harness.upstream(root, data, seed)
    tower = harness.run_of(tower, tower.run_dir, data, seed, steps=_at_most(steps, tower))
    harness.trained(tower)
    folders = EmbedOptions(tuple(str(data / name) for name in ("train", *SETS)))
    embed(tower.run_dir, tower, str(root / "embeddings"), folders)
    decoder = configuration(DETERMINISTIC, root, data, seed, steps)
    images = dataclasses.replace(decoder, data=dataclasses.replace(decoder.data, embeddings=None))
    embed(None, images, str(root / "tokens"), dataclasses.replace(folders, tokens=True))


def study(options: argparse.Namespace) -> None:
    """Trains what is not finished, and writes a table for each set; differences are from the decoder, seed by seed."""

    def measure(name: str, seed: int) -> harness.Figures:
        settings = (options.output / f"seed{seed}", options.data, seed, options.steps)
        prepare(*settings)
        return harness.trained(configuration(name, *settings))

    runs = (DETERMINISTIC, NOISY, CONTRASTIVE)
    found = harness.run_cells({name: {"steps": options.steps} for name in runs}, measure, options)
    tables = []
    for images in SETS:
        by_row = {
            title: {seed: _figures(images, name, part, of) for seed, of in found.get(name, {}).items()}
            for title, (name, part) in ROWS.items()
        }
        tables.append(
            markdown_table((f"{images}, {len(options.seeds)} seeds", *FIGURES), harness.rows_of(by_row, FIGURES))
        )
    harness.write_tables(options.output / "decoder.md", *tables)


def _figures(images: str, name: str, part: str, logged: harness.Figures) -> harness.Figures:
    """Returns the figures of a row of the table."""
    if name == CONTRASTIVE:
        paths = {title: f"zero_shot/{images}/{one}" for title, one in CONTRASTIVE_FIGURES.items()}
    else:
        paths = {title: f"captioning/{images}/{part}{one}" for title, one in CAPTIONS.items()}
        paths["questions"] = f"question_answering/{images}/{part}exact_match"
    return {title: logged[path] for title, path in paths.items() if path in logged}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study."""
    parser = harness.study_parser(__doc__, "runs/ensembles", data=True, steps=1500)
    return harness.run_study("study_decoder", study, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
