"""The data of the study: characters, icons, or shards of one's own."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lit_het import parameters
from lit_het.apps.quickstart.running import write_data
from lit_het.configs import quickstart_lit_deterministic
from lit_het.configs.experiment import ExperimentConfig
from lit_het.console import Bar
from lit_het.data_pipelines.glyphs import GlyphConfig
from lit_het.data_pipelines.shards.storage import read_lines
from lit_het.data_pipelines.texts.tokenizers import Tokenizer, train_sentencepiece
from lit_het.errors import UserError
from lit_het.models.opening import Run, open_run
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.types import Params
from scripts.studies.harness import trained, upstream
from scripts.studies.noise import pairs as noise
from scripts.studies.noise.icons import Draw, draw_emoji, draw_icons, write_icon_shards
from scripts.studies.noise.pairs import PairSet

ICON_STYLES = ("thin", "light", "regular", "bold", "fill")
EMOJI_STYLES = ("apple", "facebook", "google", "twitter")
# Held-out typefaces of characters; seeds take them in turn.
CHARACTER_STYLES = (
    *("DejaVuSerif-Italic", "DejaVuSansMono-Oblique", "STIXGeneralBol", "DejaVuSerif-Bold"),
    "DejaVuSans-Oblique",
)


@dataclasses.dataclass(frozen=True)
class Data:
    """The pairs of one seed, on one list of names.

    Attributes:
        config: of a run without noise: towers, optimizer, schedule and length.
        train, validation, held_out, unseen: training pairs, and pairs of the validation style, of the held-out style
            and of held-out names.
        known: indices of the names in training.
        candidates: indices of the names that predictions choose between.
        locked: parameters of the image tower.
        tokenizer: of the captions.
    """

    config: ExperimentConfig
    train: PairSet
    validation: PairSet
    held_out: PairSet
    unseen: PairSet
    known: np.ndarray
    candidates: np.ndarray
    locked: Params
    tokenizer: Tokenizer


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A data set that is drawn for every seed: names in several styles.

    Attributes:
        write: draws into a folder, for a seed and a held-out style.
        validation: settings are chosen on this style,
        held_out: and reported on one of these; seeds take them in turn.
    """

    write: Callable[[Path, int, str], None]
    validation: str
    held_out: tuple[str, ...]

    def prepare(self, root: Path, seed: int) -> Data:
        """Draws the names, trains the image tower and computes its features, unless that is done."""
        self.write(root / "data", seed, self.held_out[seed % len(self.held_out)])
        # The order of images is that of seed 0.
        tower = dataclasses.replace(upstream(root, root / "data", 0), seed=seed)
        trained(tower)
        run = open_run(tower.run_dir)
        found = _features(run, {name: (str(root / "data" / name),) for name in _PARTS}, root)
        is_validation = found["train"].column("typeface") == self.validation
        training, unseen = found["train"].take(~is_validation), found["held_out_characters"]
        known = np.unique(training.captions)
        validation, held_out = found["train"].take(is_validation), found["held_out_typeface"]
        config = quickstart_lit_deterministic.get_config(root)
        assert config.tokenizer is not None
        return Data(
            config=config,
            train=training,
            validation=validation.take(np.isin(validation.captions, known)),
            held_out=held_out.take(np.isin(held_out.captions, known)),
            unseen=unseen.take(unseen.column("typeface") != self.validation),
            known=known,
            candidates=np.arange(len(training.names)),
            locked=parameters.partition(run.params, ("image_tower/.*",))[0],
            tokenizer=config.tokenizer.build(),
        )


_PARTS = ("train", "held_out_typeface", "held_out_characters")


def characters() -> Drawn:
    """Characters with their Unicode names."""

    def write(directory: Path, seed: int, style: str) -> None:
        write_data(directory, GlyphConfig(held_out_typeface=style, seed=seed))

    return Drawn(write, "STIXGeneralItalic", CHARACTER_STYLES)


def icons(fonts: Path) -> Drawn:
    """Icons with their names, see `scripts.studies.noise.icons`; the filled style is always in training."""
    folders = [fonts / style for style in ICON_STYLES]
    return Drawn(_writing(draw_icons, folders), "light", ("bold", "thin", "regular"))


def emoji(folder: Path) -> Drawn:
    """Emoji with their names, see `scripts.studies.noise.icons`; two of four styles are in training."""
    folders = [folder / style for style in EMOJI_STYLES]
    return Drawn(_writing(draw_emoji, folders), "twitter", ("facebook", "google", "apple"))


def _writing(draw: Draw, folders: list[Path]) -> Callable[[Path, int, str], None]:
    """Returns what writes the shards of styles, and a tokenizer of their names, into a folder."""

    def write(directory: Path, seed: int, style: str) -> None:
        if directory.exists():
            return
        partial = directory.with_name(f"{directory.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        with Bar("drawing images", len(folders), "styles") as bar:
            write_icon_shards(draw, folders, partial, seed, style, bar.advance)
        names = read_lines(str(partial / "train" / "classnames.txt"))
        size = quickstart_lit_deterministic.VOCABULARY_SIZE
        (partial / "tokenizer.model").write_bytes(train_sentencepiece(names, vocabulary_size=size, model_type="bpe"))
        partial.rename(directory)

    return write


def shards(run_dir: Path, training: tuple[str, ...], evaluation: tuple[str, ...], root: Path, column: str) -> Data:
    """Returns shards of one's own: half of the evaluation pairs for validation, the others to be reported.

    Args:
        run_dir: an image-text run, whose towers, tokenizer, optimizer and schedule are taken.
        training: shards of pairs.
        evaluation: shards of other pairs, with correct captions.
        root: folder of the features.
        column: of the training samples' JSON, which captions are wrong; empty for noise that is injected.
    """
    run = open_run(run_dir)
    config = run.config
    if not isinstance(config.task, ContrastiveConfig) or config.tokenizer is None:
        raise UserError(f"{run_dir} has no text tower; --run must name an image-text run")
    found = _features(run, {"train": training, "evaluation": evaluation}, root)
    if column:
        noise.wrong_by_column(found["train"], column)
    known = np.unique(found["train"].captions)
    if not np.isin(found["evaluation"].captions, known).any():
        raise UserError("no caption of --evaluation-shards occurs in --shards; the study needs captions in both")
    is_known = np.isin(found["evaluation"].captions, known)
    halves = np.arange(len(is_known)) % 2 == 0
    return Data(
        config=config,
        train=found["train"],
        validation=found["evaluation"].take(is_known & halves),
        held_out=found["evaluation"].take(is_known & ~halves),
        unseen=found["evaluation"].take(~is_known & ~halves),
        known=known,
        candidates=np.unique(found["evaluation"].captions),
        locked=parameters.partition(run.params, ("image_tower/.*",))[0],
        tokenizer=config.tokenizer.build(),
    )


def _features(run: Run, patterns: dict[str, tuple[str, ...]], root: Path) -> dict[str, PairSet]:
    """Returns the features of all sets, on one list of names."""
    model, data = run.model(), run.config.data
    found = {
        name: noise.read_pairs(of_set, model.features, data.preprocessing, data.image_size, root / f"{name}.npz")
        for name, of_set in patterns.items()
    }
    names = tuple(sorted({name for one in found.values() for name in one.names}))
    return {name: noise.with_names(one, names) for name, one in found.items()}
