"""The transformations of optax that a configuration can name as its update rule; loaded where one does.

Those of the table scale each element by its own history, Muon each matrix: so a stack of blocks is updated as its
blocks would be alone. optax's optimizers under shorter names (``lion``, ``adamw``) bring a learning rate and a weight
decay of their own, where a run has those of its schedule and its `Optimizer`.
"""

import dataclasses
import difflib
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lit_het.errors import FieldError

if TYPE_CHECKING:
    from lit_het.training.optimizers_config import Optax


def _number(text: str) -> float:
    if not 0 <= (value := float(text)) < math.inf:
        raise ValueError(text)
    return value


def _positive(text: str) -> float:
    if (value := _number(text)) == 0:
        raise ValueError(text)
    return value


def _threshold(text: str) -> float:
    if (value := _number(text)) < 4:
        raise ValueError(text)
    return value


def _decay(text: str) -> float:
    if not 0 <= (value := float(text)) < 1:
        raise ValueError(text)
    return value


def _steps(text: str) -> int:
    if not 1 <= (value := int(text)) <= 100:
        raise ValueError(text)
    return value


@dataclasses.dataclass(frozen=True)
class _Kind:
    """What an argument may be: how it is read, which raises `ValueError` or `KeyError`, and in words."""

    read: Callable[[str], Any]
    words: str


def _one_of(**choices: Any) -> _Kind:
    return _Kind(lambda text: choices[text], "|".join(choices))


_DECAY, _NUMBER = _Kind(_decay, "at least 0 and less than 1"), _Kind(_number, "a number of 0 or more")
# Without it, what has no gradient becomes NaN.
_EPSILON = _Kind(_positive, "a number above 0")
# Of the length of the average, by whose distance from 4 the variance is corrected (Liu et al. 2020, RAdam, Eq. 5).
_THRESHOLD = _Kind(_threshold, "a number of 4 or more")
_SWITCH = _one_of(true=True, false=False)
_TYPE = _one_of(float32="float32", bfloat16="bfloat16")
_MODE = _one_of(hard="hard", smooth="smooth", refined="refined")
_PRECONDITIONING = _one_of(frobenius="frobenius", spectral="spectral", aol="aol", schatten="schatten")
_BETAS = {"b1": _DECAY, "b2": _DECAY}
_MOMENTS = {**_BETAS, "eps": _EPSILON}
_ADAM = {**_MOMENTS, "eps_root": _NUMBER}
_ROOTS = {"decay": _DECAY, "eps": _EPSILON, "initial_scale": _NUMBER}
_ROOTS |= {"eps_in_sqrt": _SWITCH, "bias_correction": _SWITCH}
_CORRECTED = {"bias_correction_mu": _SWITCH, "bias_correction_nu": _SWITCH}
_MUON = {"ns_steps": _Kind(_steps, "a whole number from 1 to 100"), "beta": _DECAY, "eps": _EPSILON, "mu_dtype": _TYPE}

TABLE: dict[str, dict[str, _Kind]] = {
    "scale_by_acprop": _ADAM,
    "scale_by_adadelta": {"rho": _DECAY, "eps": _EPSILON},
    "scale_by_adam": {**_ADAM, "mu_dtype": _TYPE, "nesterov": _SWITCH},
    "scale_by_adamax": _MOMENTS,
    "scale_by_adan": {**_ADAM, "b3": _DECAY},
    "scale_by_ademamix": {**_ADAM, "b3": _DECAY, "alpha": _NUMBER, "mu_dtype": _TYPE},
    "scale_by_adopt": {**_MOMENTS, "mu_dtype": _TYPE, "nesterov": _SWITCH, "use_clipping": _SWITCH},
    "scale_by_amsgrad": {**_ADAM, "mu_dtype": _TYPE, **_CORRECTED},
    "scale_by_belief": {**_ADAM, "nesterov": _SWITCH},
    "scale_by_lion": {**_BETAS, "mu_dtype": _TYPE, "mode": _MODE, "smooth_beta": _NUMBER},
    "scale_by_muon": {
        **_MUON,
        **{"nesterov": _SWITCH, "adaptive": _SWITCH, "preconditioning": _PRECONDITIONING, "consistent_rms": _NUMBER},
        **{"adam_b1": _DECAY, "adam_b2": _DECAY, "adam_eps_root": _NUMBER},
    },
    "scale_by_radam": {**_ADAM, "threshold": _THRESHOLD, "nesterov": _SWITCH},
    "scale_by_rms": _ROOTS,
    "scale_by_rss": {"initial_accumulator_value": _NUMBER, "eps": _EPSILON},
    "scale_by_sign": {},
    "scale_by_simplified_ademamix": {**_ADAM, "alpha": _NUMBER},
    "scale_by_stddev": _ROOTS,
    "scale_by_yogi": {**_ADAM, "initial_accumulator_value": _NUMBER},
}
"""The arguments of each transformation; what they are by default is optax's."""

_ADAM_W, _SGD, _ADAFACTOR = "the rule AdamW (--optimizer.rule adam_w)", "the rule SGD", "the rule Adafactor"
# optax's optimizers whose transformation has another name than theirs.
_INSTEAD = {
    **{"adamw": _ADAM_W, "sgd": _SGD, "noisy_sgd": _SGD, "trace": _SGD, "adafactor": _ADAFACTOR},
    **{"scale_by_factored_rms": _ADAFACTOR, "nadam": "scale_by_adam with nesterov=true"},
    **{"nadamw": "scale_by_adam with nesterov=true", "adamaxw": "scale_by_adamax", "adabelief": "scale_by_belief"},
    **{"rmsprop": "scale_by_rms", "adagrad": "scale_by_rss", "sign_sgd": "scale_by_sign"},
}
_NO_PART = "brings a learning rate of its own, and nothing of the table does its work"
_WHOLE_ARRAYS = "looks at whole arrays, which here are stacks of blocks"
_LEFT_OUT = {
    **dict.fromkeys(("cocob", "scale_by_cocob", "scale_by_distance_over_gradients", "dog", "dowg"), _NO_PART),
    **dict.fromkeys(("prodigy", "dadapt_adamw", "momo", "momo_adam", "mechanize", "polyak_sgd"), _NO_PART),
    **dict.fromkeys(("scale_by_polyak", "rprop", "scale_by_rprop", "madgrad", "scale_by_madgrad"), _NO_PART),
    **dict.fromkeys(("scale_by_learning_rate", "scale_by_schedule"), "is the work of --schedule"),
    **dict.fromkeys(("schedule_free", "schedule_free_adamw", "schedule_free_sgd"), "replaces the schedule"),
    **dict.fromkeys(("sophia", "lbfgs", "scale_by_lbfgs"), "needs the loss itself, beside its gradient"),
    **dict.fromkeys(("novograd", "scale_by_novograd", "sm3", "scale_by_sm3", "lamb", "lars"), _WHOLE_ARRAYS),
    **dict.fromkeys(("scale_by_trust_ratio", "galore", "scale_by_galore"), _WHOLE_ARRAYS),
}


def options(rule: "Optax") -> dict[str, Any]:
    """Returns the arguments of a transformation by name.

    Raises:
        FieldError: its name is not in the table, or an argument is unknown, given twice or of a wrong value.
    """
    if rule.name not in TABLE:
        raise FieldError(rule, "name", _on_unknown(rule.name))
    known, found = TABLE[rule.name], dict[str, Any]()
    for argument in rule.arguments:
        name, _, text = argument.partition("=")
        if name not in known:
            accepted = f"it takes {', '.join(known)}" if known else "it takes none"
            raise FieldError(rule, "arguments", f"{argument!r} is no argument of {rule.name}; {accepted}")
        if name in found:
            raise FieldError(rule, "arguments", f"{name} is given twice")
        try:
            found[name] = known[name].read(text.lower())
        except (ValueError, KeyError) as error:
            raise FieldError(rule, "arguments", f"{argument!r}: {name} must be {known[name].words}") from error
    return found


def _on_unknown(name: str) -> str:
    """Returns what is wrong with a name that the table does not have, and what to take instead."""
    choices = ", ".join(TABLE)
    if name in _LEFT_OUT:
        return f"{name!r} {_LEFT_OUT[name]}; choose from {choices}"
    instead = _INSTEAD.get(name, f"scale_by_{name}")
    if name in _INSTEAD or instead in TABLE:
        why = "is another rule here" if name.startswith(("scale_by_", "trace")) else "brings its own rate and decay"
        return f"{name!r} {why}; take {instead}"
    close = difflib.get_close_matches(name, TABLE, n=1)
    return f"{name!r} is not in the table of optax's transformations; " + (
        f"did you mean {close[0]}?" if close else f"choose from {choices}"
    )
