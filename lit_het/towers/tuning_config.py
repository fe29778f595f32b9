"""Which parameters of a pretrained tower are trained: some of its own, or low-rank changes of its dense layers."""

import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lit_het import parameters
from lit_het.errors import FieldError, UserError, require_at_least
from lit_het.towers.encoder_config import LOWER
from lit_het.training.durations import Duration
from lit_het.types import Params

if TYPE_CHECKING:
    from flax import nnx


@dataclasses.dataclass(frozen=True)
class LoRA:
    """Low-rank changes of the kernels W ``[i o]`` of dense layers: ``W + scale A B`` (Hu et al. 2022, Sec. 4.1).

    Attributes:
        rank: r, of A ``[i r]`` and B ``[r o]``.
        scale: α / r, the factor of the change.
        pattern: regular expression that matches the paths of the layers within the tower, such as "encoder/.*" for all
            of its blocks; those of experts stay as they are. The default is Sec. 4.2's: more layers keep their inputs
            for the backward pass.
        dora: whether the norm of each column of the kernel is a parameter of its own (DoRA, Liu et al. 2024, Eq. 5).
    """

    rank: int = 8
    scale: float = 2.0
    pattern: str = "encoder/.*attention/(query|value)"
    dora: bool = False

    def __post_init__(self) -> None:
        require_at_least(1, self, "rank")
        if not self.scale > 0:
            raise FieldError(self, "scale", f"{self.scale} must be more than 0")
        parameters.check_pattern(self.pattern)


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What of a tower is trained; where nothing is chosen, all of it.

    Attributes:
        last_blocks: the last blocks, with all layers behind them; 0 for these layers alone, None for neither.
        embeddings: what comes before the first block: patches or tokens, positions and class tokens.
        norms: scales and biases of all LayerNorms.
        biases: of all layers (BitFit, Ben Zaken et al. 2022).
        lora: low-rank changes of dense layers; None for none.
        start: when the training of the tower begins; until then its parameters stay as they are, and it already drops
            and routes by chance.
    """

    last_blocks: int | None = None
    embeddings: bool = False
    norms: bool = False
    biases: bool = False
    lora: LoRA | None = None
    start: Duration = Duration(0)

    def __post_init__(self) -> None:
        if self.last_blocks is not None:
            require_at_least(0, self, "last_blocks")

    def apply(self, tower: "nnx.Module", rngs: "nnx.Rngs") -> None:
        """Gives a tower the parameters of low-rank changes, and its locked blocks a stack of their own."""
        from lit_het.towers import tuning

        if self.lora is not None:
            tuning.add_lora(tower, self.lora, rngs)
        if self.last_blocks is not None:
            tuning.divide_blocks(tower, self.last_blocks)

    def locked(self, first_parameters: Sequence[str]) -> tuple[str, ...]:
        """Returns patterns of the paths, within the tower, of the parameters that are not trained.

        Args:
            first_parameters: names of the parameters before the first block.
        """
        first = "|".join(first_parameters)
        chosen = {
            rf"(?!(?:{first})(?:/|$)|encoder/{LOWER}).*": self.last_blocks is not None,
            rf"(?:{first})(?:/.*)?": self.embeddings,
            r"(?:.*/)?(?:\w+_)?norm/\w+": self.norms,
            r"(?:.*/)?bias": self.biases,
            r".*/lora/.*": self.lora is not None,
        }
        patterns = "|".join(pattern for pattern, is_chosen in chosen.items() if is_chosen)
        return (rf"(?!(?:{patterns})$).*",) if patterns else ()

    def plain(self, params: Params) -> Params:
        """Returns the parameters of the tower without this tuning, with low-rank changes added to the kernels."""
        from lit_het.towers import tuning

        flat = parameters.flatten(params)
        if self.lora is not None:
            flat = tuning.with_changes(flat, self.lora)
        return parameters.unflatten(tuning.joined(flat))


def plain_path(path: str) -> str:
    """Returns where a parameter of a tuned tower lies in the tower without tuning."""
    return path.replace(f"/{LOWER}", "/", 1)


def check_not_locked(part: str, trained: Any, locked: Sequence[str]) -> None:
    """Raises a `UserError` if patterns lock what the tuning of a tower trains.

    Args:
        part: name of the tower.
        trained: paths of the parameters that its tuning trains.
        locked: the patterns of the task.
    """
    for pattern in locked:
        if found := next((path for path in trained if re.fullmatch(pattern, path)), None):
            raise UserError(
                f"task.locked has {pattern!r}, which locks {found}, but task.{part}.tuning trains it: leave the "
                "pattern out (--task.locked without a value has none)"
            )
