"""What ``lit-het data filter`` is asked for."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from lit_het.data_pipelines.texts.captions_config import Language, TextPlace
from lit_het.errors import UserError

Limited = Literal["characters", "words", "aspect", "side", "similarity", "loss", "noise"]

OF_CAPTIONS, OF_IMAGES, OF_SCORES = ("characters", "words"), ("aspect", "side"), ("similarity", "loss", "noise")


@dataclasses.dataclass(frozen=True)
class Limits:
    """The values that are kept, both ends included."""

    least: float = -math.inf
    most: float = math.inf

    def __contains__(self, value: float) -> bool:
        return self.least <= value <= self.most

    def __str__(self) -> str:
        ends = [f"at least {self.least:g}"] if math.isfinite(self.least) else []
        return " and ".join([*ends, *([f"at most {self.most:g}"] if math.isfinite(self.most) else [])])


def limits_of(values: Mapping[str, Any]) -> dict[Limited, Limits]:
    """Returns the limits that are given, by names such as ``min_words`` and ``max_words``."""
    found = dict[Limited, Limits]()
    for name in get_args(Limited):
        least, most = values.get(f"min_{name}"), values.get(f"max_{name}")
        if least is not None or most is not None:
            found[name] = Limits(-math.inf if least is None else least, math.inf if most is None else most)
    return found


@dataclasses.dataclass(frozen=True)
class FilterOptions:
    """Rules; a sample that breaks one of them is left out.

    Attributes:
        limits: of the characters and words of each caption; the longer side of the image divided by the shorter, and
            the shorter in pixels; the cosine similarity (CLIP score) and loss of the first caption, and the noise norm
            of the image.
        captions: the places of the captions, see `TextPlace`.
        forbidden: a file with words and phrases, one a line, that no caption may have.
        language: of the captions, which must be one of its ``only``; None for any.
        scores: a table of ``lit-het data score``; None for none.
        embeddings, text_embeddings: folders of ``lit-het embed``, by which the similarity is computed without a table.
        shown: samples of each rule on the page.
    """

    limits: dict[Limited, Limits]
    captions: str = "txt"
    forbidden: Path | None = None
    language: Language | None = None
    scores: Path | None = None
    embeddings: str | None = None
    text_embeddings: str | None = None
    shown: int = 24

    def __post_init__(self) -> None:
        if not self.limits and self.forbidden is None and self.language is None:
            raise UserError("no rule is given; name one, such as --min-words 2, see lit-het data filter --help")
        for name, limits in self.limits.items():
            if not limits.least <= limits.most:
                raise UserError(
                    f"--min-{name} {limits.least:g} is above --max-{name} {limits.most:g}; no sample is kept"
                )
        if (self.embeddings is None) != (self.text_embeddings is None):
            raise UserError("--embeddings and --text-embeddings belong together: the similarity is of both")
        has_both = self.embeddings is not None
        if has_both and self.scores is not None:
            raise UserError("--scores and --embeddings both give the similarity; leave out one of them")
        wanted = [name for name in OF_SCORES if name in self.limits]
        if has_both and wanted != ["similarity"]:
            raise UserError(
                "embeddings give the similarity alone: set --min-similarity, and take --scores for the rest"
            )
        if wanted and self.scores is None and not has_both:
            raise UserError(
                f"the {wanted[0]} is not known: name a table of lit-het data score with --scores"
                + (
                    ", or stored embeddings with --embeddings and --text-embeddings"
                    if wanted[0] == "similarity"
                    else ""
                )
            )
        if self.scores is not None and not wanted:
            raise UserError("--scores is read for no rule; set --min-similarity, --max-loss or --max-noise")

    @property
    def place(self) -> TextPlace:
        """Where captions are, and their languages."""
        # All languages are read, so that the rule can say which one a caption has.
        return TextPlace(self.captions, language=self.language and dataclasses.replace(self.language, only=()))
