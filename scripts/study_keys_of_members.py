"""Compares what LiT makes of a locked e3 image tower, on the glyph data, over seeds (docs/ensembles.md).

    python -m scripts.study_keys_of_members --output runs/ensembles --seeds 0 1 2 3 4

A V-MoE and an e3 are trained upstream on the words of names, then locked and embedded once. A text tower learns to
match them, with the members of the e3 averaged, concatenated, or each a key of the image. Concatenated members have a
text tower and covariances of twice the size, and two keys M S instead of S noise samples. The V-MoE is that of
`scripts.study_ensembles`, which may share the folder; finished runs are skipped.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

from lit_het.apps.embed.images import EmbedOptions, embed
from lit_het.configs import quickstart_lit_deterministic, quickstart_lit_het_xl
from lit_het.configs.experiment import ExperimentConfig, PretrainedConfig
from lit_het.data_pipelines.shards.storage import read_lines
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ClassNamesConfig, RetrievalConfig, ZeroShotConfig
from lit_het.files import write_atomically
from lit_het.search import grid
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.towers.image_config import ViTConfig
from lit_het.training.durations import Duration
from lit_het.training.train import train_unless_done
from scripts.ensembles.methods import METHODS, upstream
from scripts.noise.paired import cells_of
from scripts.study import last_figures, run_seeds, study_parser

FIGURES = {
    "NLL": "zero_shot/held_out_typeface/nll",
    "fitted NLL": "zero_shot/held_out_typeface/calibrated/nll",
    "top-1": "zero_shot/held_out_typeface/top1",
    "ECE": "zero_shot/held_out_typeface/ece",
    "top-1, new characters": "zero_shot/held_out_characters/top1",
    "R@1 of texts, mean of keys": "retrieval/held_out_typeface/image_to_text_recall1",
    "R@1 of images, mean of keys": "retrieval/held_out_typeface/text_to_image_recall1",
}
HEADS = {"deterministic": quickstart_lit_deterministic, "HET-XL": quickstart_lit_het_xl}


@dataclasses.dataclass(frozen=True)
class Form:
    """How the members of a tower meet texts.

    Attributes:
        title: its name in tables.
        tower: the method of `scripts.study_ensembles` that has the same image tower.
        members: the field of that tower.
    """

    title: str
    tower: str
    members: Literal["mean", "concatenated", "apart"]

    @property
    def source(self) -> str:
        """The name of the upstream run."""
        return "upstream_vmoe" if self.tower == "vmoe_2" else f"upstream_{self.tower}"

    @property
    def image_tower(self) -> ViTConfig:
        """The image tower."""
        return dataclasses.replace(METHODS[self.tower].tower, members=self.members)


FORMS = (
    Form("V-MoE, K = 2", "vmoe_2", "mean"),
    Form("e3, averaged", "e3_1_2", "mean"),
    Form("e3, concatenated", "e3_1_2", "concatenated"),
    Form("e3, 2 keys", "e3_1_2", "apart"),
)


def configuration(form: Form, head: str, root: Path, data: Path, seed: int, steps: int) -> ExperimentConfig:
    """Returns the run of a form with a head, on stored embeddings."""
    base, tower = HEADS[head].get_config(root), form.image_tower
    assert isinstance(base.task, ContrastiveConfig)
    text_tower = dataclasses.replace(base.task.text_tower, embedding_size=tower.embedding_size)
    embeddings, sets = str(root / f"{form.source}_embeddings"), {}
    for name in ("held_out_typeface", "held_out_characters"):
        sets[name] = ImageSet(name, str(data / name), split=".", embeddings=embeddings)
    names = ClassNamesConfig(candidates=data / "names.txt")
    typeface = dataclasses.replace(sets["held_out_typeface"], labelled=False)
    assert base.tokenizer is not None
    return dataclasses.replace(
        base,
        run_dir=root / "lit" / f"{form.tower}_{form.members}_{head}",
        task=dataclasses.replace(base.task, image_tower=tower, text_tower=text_tower),
        data=dataclasses.replace(base.data, shards=(str(data / "train"),), embeddings=embeddings, seed=seed),
        tokenizer=dataclasses.replace(base.tokenizer, model=data / "tokenizer.model"),
        pretrained=PretrainedConfig(root / form.source),
        length=Duration(steps),
        seed=seed,
        cadence=dataclasses.replace(base.cadence, log_steps=100, save_steps=10_000),
        evaluations=(*(ZeroShotConfig(images, names) for images in sets.values()), RetrievalConfig(typeface)),
    )


def train(root: Path, data: Path, seed: int, steps: int) -> None:
    """Trains and embeds with the towers of a seed, and trains the text towers, unless they are finished."""
    num_words = len(read_lines(str(data / "words.txt")))
    for form in FORMS:
        config = upstream("vmoe", data, root / form.source, seed, num_words)
        tower = dataclasses.replace(form.image_tower, members="apart")
        config = dataclasses.replace(config, task=dataclasses.replace(config.task, image_tower=tower))
        train_unless_done(config)
        shards = tuple(str(data / name) for name in ("train", "held_out_typeface", "held_out_characters"))
        embed(config.run_dir, config, str(root / f"{form.source}_embeddings"), EmbedOptions(shards))
        for head in HEADS:
            train_unless_done(configuration(form, head, root, data, seed, steps))


def conclude(output: Path, data: Path, seeds: Sequence[int], steps: int) -> None:
    """Writes the table; differences are from the V-MoE with the same head, seed by seed."""
    lines = [f"| {len(seeds)} seeds | {' | '.join(FIGURES)} |", f"| --- |{' --- |' * len(FIGURES)}"]
    for head in HEADS:
        found = {
            form.title: {seed: _figures(form, head, output, data, seed, steps) for seed in seeds} for form in FORMS
        }
        columns = {
            name: cells_of({title: {seed: of[key] for seed, of in by_seed.items()} for title, by_seed in found.items()})
            for name, key in FIGURES.items()
        }
        for row, title in enumerate(found):
            lines.append(f"| {title}, {head} | {' | '.join(cells[row] for cells in columns.values())} |")
    write_atomically(output / "keys_of_members.md", "\n".join(lines) + "\n")
    print(f"table: {output / 'keys_of_members.md'}")


def _figures(form: Form, head: str, output: Path, data: Path, seed: int, steps: int) -> Mapping[str, float]:
    """Returns the figures of the last evaluation of a finished run."""
    return last_figures(configuration(form, head, output / f"seed{seed}", data, seed, steps).run_dir)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study; user errors are printed as one line, with exit code 1."""
    options = study_parser(__doc__, steps=800).parse_args(arguments)
    return grid.run_main("study_keys_of_members", lambda: run_seeds(options, train, conclude))


if __name__ == "__main__":
    sys.exit(main())
