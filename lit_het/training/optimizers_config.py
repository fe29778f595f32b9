"""The configurations of optimizers with decoupled weight decay.

``weight_decay`` is the fraction of a decayed parameter that one step at the peak of the schedule removes (the
convention of LiT and big_vision). PyTorch's and optax's AdamW multiply theirs by the learning rate: divide
ours by the peak learning rate to get theirs.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from lit_het.errors import FieldError, require_at_least, require_choice
from lit_het.training.durations import RunLength
from lit_het.training.schedules import Schedule
from lit_het.types import Params

if TYPE_CHECKING:
    import optax

    from lit_het.training.optimizers import Rule


def _require_decays(config: Any, *fields: str) -> None:
    for field in fields:
        if not 0 <= (value := getattr(config, field)) < 1:
            raise FieldError(config, field, f"{value} must be at least 0 and less than 1")


def _require_limit(config: Any, field: str) -> None:
    value = getattr(config, field)
    if value is not None and not value > 0:
        raise FieldError(config, field, f"{value} must be more than 0; None does not clip")


@dataclasses.dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay, like all rules here.

    Attributes:
        first_decay, second_decay: β1 and β2 of the moments.
        epsilon: added to the root of the second moment.
    """

    first_decay: float = 0.9
    second_decay: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        _require_decays(self, "first_decay", "second_decay")
        if not self.epsilon > 0:
            raise FieldError(self, "epsilon", f"{self.epsilon} must be more than 0")

    def build(self) -> "Rule":
        """Returns the update rule."""
        from lit_het.training.optimizers import adamw

        return adamw(self)


@dataclasses.dataclass(frozen=True)
class Adafactor:
    """Adafactor as LiT uses it: factored second moment, capped β2, bfloat16 momentum, no relative step.

    Attributes:
        momentum: decay of the first moment.
        second_decay_cap: largest β2; β2 at step t is min(cap, 1 - t^-0.8).
        momentum_type: of the stored first moment; V-MoE's is "float32".
        clip_rms: d of ``U / max(1, RMS(U) / d)`` for each update U before momentum, of each block of a stack alone
            (Shazeer & Stern 2018, Alg. 4, where d = 1); None does not clip.
    """

    momentum: float = 0.9
    second_decay_cap: float = 0.999
    momentum_type: Literal["bfloat16", "float32"] = "bfloat16"
    clip_rms: float | None = None

    def __post_init__(self) -> None:
        _require_decays(self, "momentum", "second_decay_cap")
        require_choice(self, "momentum_type")
        _require_limit(self, "clip_rms")

    def build(self) -> "Rule":
        """Returns the update rule."""
        from lit_het.training.optimizers import adafactor

        return adafactor(self)


@dataclasses.dataclass(frozen=True)
class SGD:
    """Stochastic gradient descent with momentum in half precision, as ViT and V-MoE are fine-tuned.

    Attributes:
        momentum: decay of the sum of gradients, stored in bfloat16.
    """

    momentum: float = 0.9

    def __post_init__(self) -> None:
        _require_decays(self, "momentum")

    def build(self) -> "Rule":
        """Returns the update rule."""
        from lit_het.training.optimizers import sgd

        return sgd(self)


@dataclasses.dataclass(frozen=True)
class Optax:
    """A transformation of optax.

    Muon is that of kernels; other parameters are updated by Adam, as in ``optax.contrib.muon``. With
    ``consistent_rms=0.2`` its updates are as large as Adam's, so that one learning rate fits both (Liu et al. 2025,
    arXiv:2502.16982); without, an update has the size ``√max(1, fan_out / fan_in)``.

    Attributes:
        name: of the transformation, such as ``scale_by_lion``, see `lit_het.training.optax_table.TABLE`.
        arguments: such as ``b1=0.95``; others have optax's defaults.
    """

    name: str
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        from lit_het.training import optax_table

        optax_table.options(self)

    def build(self) -> "Rule":
        """Returns the update rule."""
        from lit_het.training.optimizers import of_optax

        return of_optax(self)


@dataclasses.dataclass(frozen=True)
class ParameterGroup:
    """Parameters with their own learning rate and weight decay.

    Attributes:
        pattern: regular expression that matches the whole path of a parameter.
        learning_rate_factor: multiplies the schedule's learning rate, but not weight decay.
        weight_decay_factor: multiplies the optimizer's weight decay.
    """

    pattern: str
    learning_rate_factor: float = 1.0
    weight_decay_factor: float = 1.0

    def __post_init__(self) -> None:
        require_at_least(0, self, "learning_rate_factor", "weight_decay_factor")
        try:
            re.compile(self.pattern)
        except re.error as error:
            raise FieldError(self, "pattern", f"{self.pattern!r} is not a regular expression: {error}") from error


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """Gradient clipping, then an update rule, then weight decay and learning rates.

    Attributes:
        rule: gradients to updates.
        weight_decay: see the module's docstring.
        clip_norm: maximum global norm of the gradient of all parameters; None does not clip.
        groups: a parameter belongs to the first group whose pattern matches; without a group its factors are those of
            its module, such as ``head.covariance.learning_rate_factor``, or 1.
        layer_decay: factor of the learning rate from a layer to the one below it; the head has the factor 1.
    """

    rule: AdamW | Adafactor | SGD | Optax = AdamW()
    weight_decay: float = 1e-4
    clip_norm: float | None = 1.0
    groups: tuple[ParameterGroup, ...] = ()
    layer_decay: float = 1.0

    def __post_init__(self) -> None:
        require_at_least(0, self, "weight_decay", "layer_decay")
        _require_limit(self, "clip_norm")

    def build(
        self,
        schedule: Schedule,
        run: RunLength,
        layers_above: Callable[[Params], Params] | None = None,
        learning_rates: tuple[ParameterGroup, ...] = (),
        late: Mapping[str, int] | None = None,
    ) -> "optax.GradientTransformationExtraArgs":
        """Returns the optimizer for a run; its updates take the number of the step as ``train_step``.

        Args:
            schedule: the learning rate.
            run: the length of the run.
            layers_above: trainable parameters to the number of layers between each and the output, see
                `lit_het.tasks.base.Task`; needed for ``layer_decay``.
            learning_rates: groups of the task, for parameters that belong to none of this optimizer.
            late: parts of the parameters, by the first names of their paths, with the step from which they are trained.
        """
        from lit_het.training import optimizers

        return optimizers.build(self, schedule, run, layers_above, learning_rates, late or {})
