"""The results of a benchmark in a file, from which an interrupted one continues."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_het import untrusted
from lit_het.errors import UserError
from lit_het.eval.report.writing import write_files
from lit_het.untrusted import Malformed

DECODING, TOWER, REST = "reading and decoding", "image tower", "head and scoring"


@dataclasses.dataclass(frozen=True)
class Result:
    """The evaluation of one set.

    Attributes:
        key: identifies the model, the settings and the data: with equal keys the figures are the same.
        figures, errors: as in `lit_het.eval.evaluation.Evaluation`.
        num_images: images whose features were computed.
        seconds: of the whole evaluation.
        decoding: seconds of these that were spent waiting for images to be read and decoded.
        tower: seconds of these that were spent waiting for the image tower, and on its compilation.
    """

    key: str
    figures: Mapping[str, float]
    errors: Mapping[str, float]
    num_images: int
    seconds: float
    decoding: float
    tower: float

    @property
    def shares(self) -> dict[str, float]:
        """The share of each part in the time of the evaluation, by its name."""
        rest = max(0.0, self.seconds - self.decoding - self.tower)
        total = max(self.decoding + self.tower + rest, 1e-9)
        return {DECODING: self.decoding / total, TOWER: self.tower / total, REST: rest / total}

    @property
    def bound(self) -> str:
        """The part that takes most of the time."""
        return max(self.shares, key=self.shares.__getitem__)


def read_results(path: Path) -> dict[str, Result]:
    """Returns saved results by set; none if there is no file."""
    if not path.exists():
        return {}
    try:
        content = untrusted.read_json_object(path)
        return {name: _result(fields) for name, fields in content["sets"].items()}
    except (OSError, Malformed, AttributeError, KeyError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{path} holds no results of a benchmark ({reason}); delete it, or give another --output"
        ) from error


def write_results(path: Path, results: Mapping[str, Result], others: Mapping[str, Any]) -> None:
    """Writes results, and other fields beside them."""
    content = {**others, "sets": {name: dataclasses.asdict(result) for name, result in results.items()}}
    write_files({path: json.dumps(content, indent=1, ensure_ascii=False) + "\n"})


def _result(fields: Mapping[str, Any]) -> Result:
    def numbers(name: str) -> dict[str, float]:
        return {figure: float(value) for figure, value in fields[name].items()}

    times = {name: float(fields[name]) for name in ("seconds", "decoding", "tower")}
    return Result(
        str(fields["key"]), numbers("figures"), numbers("errors"), num_images=int(fields["num_images"]), **times
    )
