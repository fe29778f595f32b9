"""The typefaces of the study: those of training, one to validate on and one to test on, as stored embeddings."""

import dataclasses
import json
import shutil
from pathlib import Path

from webdataset.compat import WebDataset

from lit_het.apps.embed.images import EmbedOptions, embed
from lit_het.apps.quickstart.running import write_data
from lit_het.configs import glyph_classifier, quickstart_upstream
from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.shards.writing import expand, write_shards
from lit_het.errors import UserError
from lit_het.heads.classification_config import DeterministicConfig
from lit_het.tasks.classification import ClassificationConfig
from lit_het.towers.encoder_config import EncoderConfig
from lit_het.training.train import train_unless_done

VALIDATION_TYPEFACE = "DejaVuSans-Oblique"
# Names of folders: 14 typefaces, the fifteenth, all fifteen, and the sixteenth.
FIT, VALIDATION, ALL, TEST = "fit", "validation", "train", "held_out_typeface"
# That of the glyph classifier is twice as wide: a head on it takes twice as long.
ENCODER = EncoderConfig(width=128, depth=1, mlp_width=512, num_heads=4, unrolled=True)


def tower_config(root: Path) -> ExperimentConfig:
    """Returns the classifier whose image tower all heads are trained on: that of the characters, without noise."""
    config = glyph_classifier.get_config(root, DeterministicConfig())
    assert isinstance(config.task, ClassificationConfig)
    tower = dataclasses.replace(config.task.image_tower, encoder=ENCODER)
    return dataclasses.replace(
        config,
        run_dir=root / "tower",
        task=dataclasses.replace(config.task, image_tower=tower),
        data=dataclasses.replace(config.data, shards=(str(root / "data" / FIT),)),
    )


def prepare(root: Path) -> dict[str, int]:
    """Draws the characters, trains the tower on 14 typefaces and embeds all, unless that is done.

    Returns:
        The number of images of each set.
    """
    data = root / "data"
    write_data(data, quickstart_upstream.glyphs())
    if not (data / VALIDATION).exists():
        _split(data)
    config = tower_config(root)
    train_unless_done(config)
    sets = (FIT, VALIDATION, ALL, TEST)
    embed(config.run_dir, config, str(root / "embeddings"), EmbedOptions(tuple(str(data / name) for name in sets)))
    return counts_of(root)


def counts_of(root: Path) -> dict[str, int]:
    """Returns the number of images of each set."""
    try:
        counts = json.loads((root / "data" / "counts.json").read_text())
        found = json.loads((root / "data" / "glyphs.json").read_text())
    except FileNotFoundError as error:
        raise UserError(f"no file {error.filename}; start once without --table") from error
    return {**counts, ALL: found["num_train_images"], TEST: found["num_held_out_typeface_images"]}


def _split(data: Path) -> None:
    """Writes the typeface of validation, and the other training typefaces, as sets of their own."""
    samples = list(WebDataset(expand(data / ALL), shardshuffle=False))
    is_validation = [json.loads(sample["json"])["typeface"] == VALIDATION_TYPEFACE for sample in samples]
    counts = {}
    for name, wanted in ((FIT, False), (VALIDATION, True)):
        partial = data / f"{name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        shutil.rmtree(data / name, ignore_errors=True)
        members = [sample for sample, is_one in zip(samples, is_validation, strict=True) if is_one == wanted]
        counts[name] = len(members)
        parts = [{key: value for key, value in sample.items() if key not in _OF_READER} for sample in members]
        if name == VALIDATION:  # written last: its presence shows that both are complete
            (data / "counts.json").write_text(json.dumps(counts))
        write_shards(partial, parts)
        shutil.copy(data / ALL / "classnames.txt", partial)
        partial.rename(data / name)


# What webdataset adds to a sample.
_OF_READER = ("__url__", "__local_path__")
