"""Compares what LiT makes of a locked e3 image tower, on the glyph data, over seeds (docs/ensembles.md).

    python -m scripts.studies.study_keys_of_members --output runs/ensembles --seeds 0 1 2 3 4

A V-MoE and an e3 are trained upstream on the words of names, then locked and embedded once. A text tower learns to
match them, with the members of the e3 averaged, concatenated, or each a key of the image. Concatenated members have a
text tower and covariances of twice the size, and two keys M S instead of S noise samples. The V-MoE is that of
`scripts.studies.study_ensembles`, which may share the folder; finished runs are skipped.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from lit_het.apps.embed.images import EmbedOptions, embed
from lit_het.apps.quickstart.running import write_data
from lit_het.configs import quickstart_lit_deterministic, quickstart_lit_het_xl, quickstart_upstream
from lit_het.configs.experiment import ExperimentConfig
from lit_het.eval.report.tables import markdown_table
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ClassNamesConfig, RetrievalConfig, ZeroShotConfig
from lit_het.losses.contrastive import SoftmaxLoss
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.towers.image_config import ViTConfig
from scripts.studies import harness
from scripts.studies.ensembles.methods import METHODS, upstream

SETS = ("held_out_typeface", "held_out_characters")
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
        tower: the method of `scripts.studies.study_ensembles` that has the same image tower.
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
    embeddings = str(root / f"{form.source}_embeddings")
    typeface, characters = (ImageSet(name, str(data / name), split=".", embeddings=embeddings) for name in SETS)
    names = ClassNamesConfig(candidates=data / "names.txt")
    return harness.lit_run_of(
        base,
        root / "lit" / f"{form.tower}_{form.members}_{head}",
        data,
        seed,
        tower=root / form.source,
        embeddings=embeddings,
        steps=steps,
        # Both heads with the loss of the papers: the quickstart's HET-XL smooths labels.
        task=dataclasses.replace(
            base.task, image_tower=tower, text_tower=text_tower, loss=SoftmaxLoss(duplicates="negatives")
        ),
        evaluations=(
            ZeroShotConfig(typeface, names),
            ZeroShotConfig(characters, names),
            RetrievalConfig(dataclasses.replace(typeface, labelled=False)),
        ),
    )


def prepare(form: Form, root: Path, data: Path, seed: int) -> None:
    """Trains the tower of a form and embeds with it, unless that is done."""
    write_data(data, quickstart_upstream.glyphs())
    config = upstream("vmoe", data, root / form.source, seed)
    tower = dataclasses.replace(form.image_tower, members="apart")
    config = dataclasses.replace(config, task=dataclasses.replace(config.task, image_tower=tower))
    harness.trained(config)
    shards = tuple(str(data / name) for name in ("train", *SETS))
    embed(config.run_dir, config, str(root / f"{form.source}_embeddings"), EmbedOptions(shards))


def study(options: argparse.Namespace) -> None:
    """Trains what is not finished, and writes the table; differences are from the V-MoE with the same head."""
    runs = {f"{form.title}, {head}": (form, head) for head in HEADS for form in FORMS}

    def measure(title: str, seed: int) -> harness.Figures:
        (form, head), root = runs[title], options.output / f"seed{seed}"
        prepare(form, root, options.data, seed)
        return harness.trained(configuration(form, head, root, options.data, seed, options.steps))

    found = harness.run_cells({title: {"steps": options.steps} for title in runs}, measure, options)
    rows = []
    for head in HEADS:
        rows += harness.rows_of({title: of for title, of in found.items() if runs[title][1] == head}, FIGURES.values())
    titles = (f"{len(options.seeds)} seeds", *FIGURES)
    harness.write_tables(options.output / "keys_of_members.md", markdown_table(titles, rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study."""
    parser = harness.study_parser(__doc__, "runs/ensembles", data=True, steps=800)
    return harness.run_study("study_keys_of_members", study, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
