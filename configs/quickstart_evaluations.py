"""Quickstart, last stage: the evaluations of both LiT runs."""

import dataclasses
from pathlib import Path

from lit_het.configs.quickstart_upstream import ROOT
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ClassNamesConfig, EvaluationConfig, RetrievalConfig, ZeroShotConfig

TYPEFACE, CHARACTERS, AMONG = "held_out_typeface", "held_out_characters", "held_out_characters_among_held_out"


def get_evaluations(root: Path = ROOT) -> tuple[EvaluationConfig, ...]:
    """Returns the evaluations; ``root / "data"`` contains the data that ``lit-het quickstart`` writes."""
    typeface, characters = (ImageSet(name, str(root / "data" / name), split=".") for name in (TYPEFACE, CHARACTERS))
    all_names = ClassNamesConfig(candidates=root / "data" / "names.txt")
    return (
        ZeroShotConfig(typeface, all_names),
        ZeroShotConfig(characters, all_names),
        # Held-out characters with held-out names as the only candidates.
        ZeroShotConfig(dataclasses.replace(characters, name=AMONG)),
        RetrievalConfig(dataclasses.replace(typeface, labelled=False)),
    )
