"""Compares what a small decoder and a contrastive model make of a locked image tower, on the glyph data, over seeds.

    python -m scripts.study_decoder --output runs/decoder --seeds 0 1 2

The tower of the quickstart is locked and embedded once. Decoders with and without noise in the features before the
logits learn to name characters and to answer questions about them, and a text tower to match names (docs/decoder.md).
All are evaluated on the characters of training in another typeface, and on characters that training never saw; finished
runs are skipped.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lit_het.apps.embed.images import EmbedOptions, embed
from lit_het.configs import quickstart_decoder, quickstart_lit_deterministic, quickstart_upstream
from lit_het.configs.experiment import ExperimentConfig, PretrainedConfig
from lit_het.configs.quickstart_evaluations import CHARACTERS, TYPEFACE
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.shards.storage import read_lines
from lit_het.eval.decoder_suite import AnswerQuestionsConfig, WriteCaptionsConfig
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ClassNamesConfig, ZeroShotConfig
from lit_het.files import write_atomically
from lit_het.heads.classification_config import HetXLConfig
from lit_het.heads.noise_config import CovarianceConfig, SamplingConfig
from lit_het.search import grid
from lit_het.tasks.captioning import CaptioningConfig
from lit_het.training.durations import Duration
from lit_het.training.train import train_unless_done
from scripts.noise.paired import cells_of
from scripts.study import last_figures, run_seeds, study_parser

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
FIGURES = (*CAPTIONS, "questions")


def configuration(name: str, root: Path, data: Path, seed: int, steps: int) -> ExperimentConfig:
    """Returns the run of a decoder or of the contrastive model, on stored embeddings."""
    base = quickstart_lit_deterministic.get_config(root)
    if name == CONTRASTIVE:
        sets = [ImageSet(one, str(data / one), split=".", embeddings=str(root / "embeddings")) for one in SETS]
        names = ClassNamesConfig(candidates=data / "names.txt")
        evaluations = tuple(ZeroShotConfig(images, names) for images in sets)
    else:
        base = quickstart_decoder.get_config(root)
        assert isinstance(base.task, CaptioningConfig)
        if name == NOISY:
            base = dataclasses.replace(base, task=dataclasses.replace(base.task, head=NOISE))
        base = dataclasses.replace(base, length=Duration(steps))
        sets = [
            ImageSet(one, str(data / one), split=".", embeddings=str(root / "tokens"), labelled=False) for one in SETS
        ]
        samples = 32 if name == NOISY else 0
        evaluations = (
            *(WriteCaptionsConfig(images, prompt="", samples=samples) for images in sets),
            *(AnswerQuestionsConfig(images, figure="exact_match", samples=samples) for images in sets),
        )
    embeddings = str(root / ("embeddings" if name == CONTRASTIVE else "tokens"))
    assert base.tokenizer is not None
    return dataclasses.replace(
        base,
        run_dir=root / name,
        data=_on(base.data, data, embeddings, seed),
        tokenizer=dataclasses.replace(base.tokenizer, model=data / "tokenizer.model"),
        pretrained=PretrainedConfig(root / "upstream"),
        seed=seed,
        cadence=dataclasses.replace(base.cadence, log_steps=100, save_steps=10_000),
        evaluations=evaluations,
    )


def _on(config: LoaderConfig, data: Path, embeddings: str | None, seed: int) -> LoaderConfig:
    shards = (str(data / "train"),)
    mixture = tuple(dataclasses.replace(one, shards=shards) for one in config.mixture)
    return dataclasses.replace(config, shards=shards, mixture=mixture, embeddings=embeddings, seed=seed)


def train(root: Path, data: Path, seed: int, steps: int) -> None:
    """Trains and embeds with the tower of a seed, and trains what is compared, unless it is finished."""
    upstream = quickstart_upstream.get_config(root)
    task = dataclasses.replace(upstream.task, num_classes=len(read_lines(str(data / "words.txt"))))
    shards = dataclasses.replace(upstream.data, shards=(str(data / "train"),), seed=seed)
    upstream = dataclasses.replace(upstream, task=task, data=shards, seed=seed)
    train_unless_done(upstream)
    folders = EmbedOptions(tuple(str(data / name) for name in ("train", *SETS)))
    embed(upstream.run_dir, upstream, str(root / "embeddings"), folders)
    decoder = configuration(DETERMINISTIC, root, data, seed, steps)
    images = dataclasses.replace(decoder, data=_on(decoder.data, data, None, seed))
    embed(None, images, str(root / "tokens"), dataclasses.replace(folders, tokens=True))
    for name in (DETERMINISTIC, NOISY, CONTRASTIVE):
        train_unless_done(configuration(name, root, data, seed, steps))


def conclude(output: Path, data: Path, seeds: Sequence[int], steps: int) -> None:
    """Writes a table for each set; differences are from the decoder, seed by seed."""
    lines = []
    for images in SETS:
        found = {
            title: {seed: _figures(images, *row, output / f"seed{seed}", data, seed, steps) for seed in seeds}
            for title, row in ROWS.items()
        }
        columns = [
            cells_of(
                {
                    title: {seed: of[figure] for seed, of in by_seed.items() if figure in of}
                    for title, by_seed in found.items()
                }
            )
            for figure in FIGURES
        ]
        lines += [f"| {images}, {len(seeds)} seeds | {' | '.join(FIGURES)} |", f"| --- |{' --- |' * len(FIGURES)}"]
        for row, title in enumerate(ROWS):
            lines.append(f"| {title} | {' | '.join(cells[row] for cells in columns)} |")
        lines.append("")
    write_atomically(output / "decoder.md", "\n".join(lines))
    print(f"table: {output / 'decoder.md'}")


def _figures(images: str, name: str, part: str, root: Path, data: Path, seed: int, steps: int) -> Mapping[str, float]:
    """Returns the figures of the last evaluation of a finished run."""
    logged = last_figures(configuration(name, root, data, seed, steps).run_dir)
    if name == CONTRASTIVE:
        names = {"exact match": "top1", "ECE of names": "ece", "AURC": "aurc"}
        return {title: logged[f"zero_shot/{images}/{figure}"] for title, figure in names.items()}
    found = {title: logged[f"captioning/{images}/{part}{figure}"] for title, figure in CAPTIONS.items()}
    return found | {"questions": logged[f"question_answering/{images}/{part}exact_match"]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study; user errors are printed as one line, with exit code 1."""
    options = study_parser(__doc__, steps=1500).parse_args(arguments)
    return grid.run_main("study_decoder", lambda: run_seeds(options, train, conclude))


if __name__ == "__main__":
    sys.exit(main())
