"""What the quickstart adds to the evaluations of its models: wrong captions, homoglyphs, and comparisons.

Homoglyphs are characters with the same shape.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from lit_het import untrusted
from lit_het.apps.quickstart.answers import FoundAnswers, figures_of_answers
from lit_het.apps.scoring import Column, Scored, ScoreOptions, score_captions
from lit_het.configs.quickstart_evaluations import AMONG, CHARACTERS, TYPEFACE, get_evaluations
from lit_het.data_pipelines.glyphs import name_of
from lit_het.data_pipelines.shards.storage import read_lines
from lit_het.errors import UserError
from lit_het.eval.evaluation import Record
from lit_het.eval.evaluators.retrieval import read_captions
from lit_het.eval.metrics import ambiguity
from lit_het.eval.metrics.ambiguity import GroupErrors, RankTest
from lit_het.eval.metrics.out_of_distribution import detection_figures
from lit_het.eval.report.comparison import Comparison, compare
from lit_het.eval.saved_runs import SavedRun
from lit_het.eval.suite import EvaluationConfig, ZeroShotConfig

HET_XL = "HET-XL, smoothed labels"
"""The model that is compared with the deterministic one: both differ in the noise and in label smoothing."""

EMBEDDINGS = "embeddings"
"""The folder, below that of a quickstart, with the embeddings of all images by the locked tower."""

TITLES = {
    TYPEFACE: "held-out typeface, all names",
    CHARACTERS: "held-out characters, all names",
    AMONG: "held-out characters, held-out names",
}


@dataclasses.dataclass(frozen=True)
class Homoglyphs:
    """Which names have characters of the same shape.

    Attributes:
        groups: group of homoglyphs of every name, -1 for none.
        training_groups: the same for training names only, as held-out names make no training label ambiguous.
        shapes: index of every name's shape; homoglyphs have the same shape.
        marked: whether every name is of a character with marks.
    """

    groups: Int[np.ndarray, " k"]
    training_groups: Int[np.ndarray, " k"]
    shapes: Int[np.ndarray, " k"]
    marked: Bool[np.ndarray, " k"]


def read_json(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file of an earlier start."""
    try:
        return untrusted.read_json_object(path)
    except (OSError, untrusted.Malformed) as error:
        raise UserError(f"{path} cannot be read ({error}); delete {path.parent} to start again") from error


def read_homoglyphs(directory: Path) -> Homoglyphs:
    """Reads the shapes of all names from the folder of the data."""
    names = read_lines(str(directory / "names.txt"))
    first_of_shape = read_json(directory / "homoglyphs.json")
    if missing := [name for name in names if not isinstance(first_of_shape.get(name), str)]:
        raise UserError(f"{directory}/homoglyphs.json does not contain {missing[0]!r:.100}; delete {directory}")
    shapes = [first_of_shape[name] for name in names]
    held_out = set(read_lines(str(directory / CHARACTERS / "classnames.txt")))
    return Homoglyphs(
        groups=ambiguity.groups_of(shapes),
        training_groups=ambiguity.groups_of(
            [(name,) if name in held_out else shape for name, shape in zip(names, shapes, strict=True)]
        ),
        shapes=np.unique(shapes, return_inverse=True)[1],
        marked=np.array([" with " in name for name in names]),
    )


def evaluations(run_dir: Path) -> list[EvaluationConfig]:
    """Returns the evaluations of all models, on stored embeddings."""
    embeddings = str(run_dir / EMBEDDINGS)
    return [
        dataclasses.replace(one, data=dataclasses.replace(one.data, embeddings=embeddings))
        for one in get_evaluations(run_dir)
    ]


def zero_shot_of(run_dir: Path, *names: str) -> Iterator[EvaluationConfig]:
    """Yields the zero-shot evaluations of some sets."""
    found = {one.data.name: one for one in evaluations(run_dir) if isinstance(one, ZeroShotConfig)}
    yield from (found[name] for name in names)


def zero_shot(run: SavedRun, name: str) -> Record:
    """Returns the saved zero-shot evaluation of a set."""
    return run.records["zero_shot", name]


@dataclasses.dataclass(frozen=True)
class Models:
    """The evaluated models of one training set.

    Attributes:
        deterministic, het_xl: their runs; HET-XL has smoothed labels, as `lit-het new` writes it.
        plain_answers, answers: of either run to the held-out images.
    """

    deterministic: SavedRun
    het_xl: SavedRun
    plain_answers: FoundAnswers
    answers: FoundAnswers

    def figures(self, homoglyphs: Homoglyphs) -> dict[str, dict[str, float]]:
        """Returns ``<set>/<figure>`` of every set, for both models."""
        of_plain, of_het_xl = (figures(run, homoglyphs) for run in (self.deterministic, self.het_xl))
        return {
            "deterministic": of_plain | figures_of_answers(self.plain_answers),
            "het_xl": of_het_xl | figures_of_answers(self.answers),
        }

    def compared(self) -> Comparison:
        """Returns the comparison of both heads on every set."""
        pairs = {
            title: (zero_shot(self.deterministic, name), zero_shot(self.het_xl, name)) for name, title in TITLES.items()
        }
        return compare("deterministic", HET_XL, pairs)


@dataclasses.dataclass(frozen=True)
class Suspects:
    """Training captions, some of which are wrong, with the scores of `lit-het data score`.

    Attributes:
        scored: the captions and their scores.
        wrong: which captions are wrong.
        characters: what the images show.
    """

    scored: Scored
    wrong: Bool[np.ndarray, " n"]
    characters: tuple[str, ...]

    def auroc(self, by: Column) -> float:
        """Returns the probability that a wrong caption is more suspect than a right one."""
        suspicion = self.scored.suspicion(by)
        return detection_figures(suspicion[~self.wrong], suspicion[self.wrong])["auroc"]


def read_suspects(run_dir: Path, shards: Path, captions: str) -> Suspects:
    """Scores captions with a model that was trained on them."""
    scored = score_captions(run_dir, str(shards), ScoreOptions(captions))
    shown = read_captions(scored.opened, "json/character")
    characters = tuple(shown[position][0] for position in scored.positions.tolist())
    wrong = [name_of(one) != caption for one, caption in zip(characters, scored.captions, strict=True)]
    return Suspects(scored, np.array(wrong), characters)


def figures(run: SavedRun, homoglyphs: Homoglyphs) -> dict[str, float]:
    """Returns ``<set>/<figure>`` of every set, and the shares of errors among homoglyphs."""
    found = {f"{name}/{figure}": value for name in TITLES for figure, value in zero_shot(run, name).figures.items()}
    shares = {name: group_errors(run, name, homoglyphs).share for name in (TYPEFACE, CHARACTERS)}
    return found | {f"{name}/errors_among_homoglyphs": share for name, share in shares.items()}


def group_errors(run: SavedRun, name: str, homoglyphs: Homoglyphs) -> GroupErrors:
    """Counts the errors on a set, with all names as candidates, that are confusions of homoglyphs."""
    arrays = zero_shot(run, name).drawing.arrays
    return ambiguity.errors_within_groups(arrays["predicted_class"], arrays["true_class"], homoglyphs.groups)


def noise_tests(run: SavedRun, homoglyphs: Homoglyphs) -> dict[str, RankTest]:
    """Tests whether images of homoglyphs (among training names) have more noise than others, on the held-out typeface.

    Homoglyphs are mostly plain letters, so a head that only distinguishes plain letters from marked ones would pass the
    test over all characters. The test is therefore repeated for plain and for marked characters.
    """
    marked = homoglyphs.marked
    kinds = {"all characters": np.ones_like(marked), "plain characters": ~marked, "characters with marks": marked}
    return {kind: ambiguity.rank_test(*noise_by_ambiguity(run, homoglyphs, names)) for kind, names in kinds.items()}


def noise_by_ambiguity(
    run: SavedRun, homoglyphs: Homoglyphs, names: Bool[np.ndarray, " k"]
) -> tuple[Float[np.ndarray, " a"], Float[np.ndarray, " u"]]:
    """Returns mean noise norms of (homoglyph, unique) shapes of some names, on images of the held-out typeface."""
    arrays = zero_shot(run, TYPEFACE).drawing.arrays
    members = names[arrays["true_class"]]
    labels = arrays["true_class"][members]
    ambiguous = homoglyphs.training_groups[labels] != ambiguity.NO_GROUP
    return ambiguity.split_by_ambiguity(arrays["noise_norm"][members], ambiguous, homoglyphs.shapes[labels])
