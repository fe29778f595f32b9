"""Every evaluation on the quickstart's characters: ``lit-het evaluate --config configs/glyph_evaluations.py``.

Paths are those of a quickstart in ``runs/quickstart``. Copies of the held-out typeface are made by
``lit-het data corrupt runs/quickstart/data/held_out_typeface runs/quickstart/data/held_out_typeface/corrupted``.
"""

import dataclasses
from pathlib import Path

from lit_het.eval.fits import FewShotOptions, LinearProbeOptions
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import (
    ClassNamesConfig,
    EnsembleConfig,
    EvaluationConfig,
    FewShotConfig,
    LinearProbeConfig,
    OutOfDistributionConfig,
    RetrievalConfig,
    ShiftConfig,
    ZeroShotConfig,
)

DATA = Path("runs/quickstart/data")


def get_evaluations(data: Path = DATA) -> tuple[EvaluationConfig, ...]:
    """Returns the evaluations on the data of a quickstart."""
    typeface = ImageSet("held_out_typeface", str(data / "held_out_typeface"), split=".")
    characters = ImageSet("held_out_characters", str(data / "held_out_characters"), split=".")
    all_names = ClassNamesConfig(candidates=data / "names.txt")
    # Learning rates for features of norm 8 and 1,379 classes, found on minival.
    probe = LinearProbeOptions(learning_rates=(0.3, 0.1, 0.03), weight_decays=(0.0,), epochs=(3, 10))
    return (
        ZeroShotConfig(typeface, all_names, samples=16),
        ZeroShotConfig(characters, all_names, samples=16),
        RetrievalConfig(dataclasses.replace(typeface, labelled=False)),
        FewShotConfig(typeface, train_split="../train", fit=FewShotOptions(shots=(1, 5, 10))),
        LinearProbeConfig(typeface, train_split="../train", fit=probe),
        ShiftConfig(typeface),
        OutOfDistributionConfig(typeface, near=(str(data / "held_out_characters"),), train_split="../train"),
        EnsembleConfig(typeface, all_names, samples=16),
    )
