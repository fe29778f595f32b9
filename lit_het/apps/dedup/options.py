"""What ``lit-het data dedup`` searches."""

import dataclasses

from lit_het.errors import UserError


@dataclasses.dataclass(frozen=True)
class DedupOptions:
    """What is searched.

    Attributes:
        embeddings: the folder with the embeddings of all shards.
        against: shards of evaluation sets.
        threshold: the least cosine of near-duplicates.
        floor: the least cosine of pairs that are searched, for the page and for other thresholds.
        part: (I, N): search a part of N, without table and page; None takes what is missing of all.
    """

    embeddings: str
    against: tuple[str, ...] = ()
    threshold: float = 0.95
    floor: float = 0.9
    part: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.floor <= self.threshold <= 1:
            raise UserError(
                f"--floor {self.floor:g} and --threshold {self.threshold:g} must be above 0, at most 1, and the floor "
                "not above the threshold"
            )
