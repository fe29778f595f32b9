"""Which values of a metric are better, as its name tells."""

from typing import Literal, TypeAlias

from lit_het.errors import UserError
from lit_het.eval.report.naming import split, style_of

Direction: TypeAlias = Literal["lower", "higher"]


def direction_of(metric: str) -> Direction:
    """Returns whether "lower" or "higher" values of a metric are better, such as of ``supervised/minival/nll``.

    Raises:
        UserError: its name does not tell.
    """
    figure = split(metric.split("/", 2)[-1])[1]
    higher = style_of(figure).higher_is_better
    # Reports show no losses of training, so these have no style.
    if higher is None and (figure == "loss" or figure.endswith("_loss")):
        higher = False
    if higher is None:
        raise UserError(f"--metric {metric}: add --direction lower or higher, for the values that are better")
    return "higher" if higher else "lower"
