"""The configurations of ``get_logits``, from embeddings to logits: HET-XL takes any, as its noise is in the embedding.

HET-XL Sec. 3.1 and Table 1 name this plug-in compatibility with the layers of extreme classification.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from lit_het.errors import FieldError, UserError, require_at_least, require_choice

if TYPE_CHECKING:
    from flax import nnx

    from lit_het.types import LogitSamples

# (size of embeddings, number of classes, random keys of parameters) to a function of embeddings.
Builder: TypeAlias = Callable[[int, int, "nnx.Rngs"], Callable[[Any], Any]]

# By the names in configurations. Only a program adds to it: a configuration of others cannot name other code.
_GIVEN: dict[str, Builder] = {}


class LogitsOptions:
    """What a configuration of ``get_logits`` says of it; here, of a dense layer.

    Attributes:
        is_linear: whether noise can be mapped to logits apart from the embedding.
        needs_labels: whether the loss of training reads the logits of fewer classes, chosen by the labels.
    """

    is_linear = True
    needs_labels = False

    def num_outcomes(self, num_classes: int) -> int:
        """Returns how many logits training computes of each example."""
        return num_classes

    def check(self, head: Any) -> None:
        """Checks that the layer fits a head.

        Raises:
            UserError: it does not.
        """
        if not self.is_linear and (head.initial_bias or head.zero_kernel):
            raise UserError(
                f"{type(self).__name__} has parameters of its own; leave out task.head.initial_bias and zero_kernel"
            )

    def over_temperature(self, layer: Any, features: Any, temperature: Any) -> Any:
        """Returns the logits ``[n k]`` of features ``[n d]``, divided by τ."""
        return layer(features) / temperature

    def of_labels(self, embeddings: Any, layer: Any, temperature: Any, key: Any, label: Any) -> "LogitSamples":
        """Returns samples of the logits that training computes, where it needs labels.

        Args:
            embeddings: samples of the noisy embeddings, in the place of logits.
            layer: what `build` returned.
            temperature: τ.
            key: random key of the step.
            label: class of each row.
        """
        raise NotImplementedError

    def build(
        self, feature_size: int, num_classes: int, rngs: "nnx.Rngs", *, zero_kernel: bool, initial_bias: float
    ) -> Any:
        """Returns the layer, a function of embeddings ``[n d]`` to logits ``[n k]``."""
        from lit_het.heads.logits import logits_layer

        return logits_layer(feature_size, num_classes, rngs, zero_kernel=zero_kernel, initial_bias=initial_bias)


@dataclasses.dataclass(frozen=True)
class DenseLogits(LogitsOptions):
    """All classes by one product, Wᵀφ + b."""


@dataclasses.dataclass(frozen=True)
class SampledSoftmax(LogitsOptions):
    """In training a softmax of the label and of a few classes that are drawn at each step, see `heads.candidates`.

    The parameters are those of `DenseLogits`, and so are predictions, which are of all classes.

    Attributes:
        num_candidates: draws of a step, which all its examples share; classes that are drawn again count once.
        distribution: "uniform", or "log_uniform": ``log((c + 2) / (c + 1)) / log(k + 1)`` of class c, for classes in
            descending order of frequency.

    Raises:
        UserError: no candidates, or an unknown distribution.
    """

    num_candidates: int = 8192
    distribution: Literal["uniform", "log_uniform"] = "uniform"

    needs_labels = True

    def __post_init__(self) -> None:
        require_at_least(1, self, "num_candidates")
        require_choice(self, "distribution")

    def num_outcomes(self, num_classes: int) -> int:
        """Returns the number of candidates and the label."""
        return 1 + self.num_candidates

    def of_labels(self, embeddings: Any, layer: Any, temperature: Any, key: Any, label: Any) -> "LogitSamples":
        """Returns samples of the corrected logits of the labels and of the candidates, see `LogitsOptions`."""
        from lit_het.heads.candidates import of_labels

        return of_labels(embeddings, layer, temperature, self, key, label)


@dataclasses.dataclass(frozen=True)
class HierarchicalSoftmax(LogitsOptions):
    """A softmax of about √k clusters, and one of the about √k classes of each, see `heads.hierarchy`.

    Training computes 2 √k logits. Classes of a cluster are adjacent: their order is part of the model.
    """

    is_linear = False
    needs_labels = True

    def num_outcomes(self, num_classes: int) -> int:
        """Returns the number of clusters, of classes in one, and the label."""
        from lit_het.heads.hierarchy import cluster_sizes

        return 1 + sum(cluster_sizes(num_classes))

    def over_temperature(self, layer: Any, features: Any, temperature: Any) -> Any:
        """Returns log-probabilities: it is logits of both levels that τ divides, see `LogitsOptions`."""
        return layer(features, temperature)

    def check(self, head: Any) -> None:
        """Accepts every head with dense logits: it has their parameters, see `LogitsOptions`."""

    def of_labels(self, embeddings: Any, layer: Any, temperature: Any, key: Any, label: Any) -> "LogitSamples":
        """Returns samples of log-probabilities of labels, and of what is beside them, see `LogitsOptions`."""
        from lit_het.heads.hierarchy import of_labels

        return of_labels(embeddings, layer, temperature, label)

    def build(
        self, feature_size: int, num_classes: int, rngs: "nnx.Rngs", *, zero_kernel: bool, initial_bias: float
    ) -> Any:
        """Returns the layer."""
        from lit_het.heads.hierarchy import HierarchicalLogits

        return HierarchicalLogits(feature_size, num_classes, rngs, zero_kernel=zero_kernel, initial_bias=initial_bias)


@dataclasses.dataclass(frozen=True)
class GivenLogits(LogitsOptions):
    """A function of your own, which the decorator `get_logits` makes known.

    Attributes:
        name: ``module:function``, of a function that this process has decorated; no module is imported by it.
    """

    name: str

    is_linear = False

    def __post_init__(self) -> None:
        if self.name not in _GIVEN:
            raise FieldError(
                self,
                "name",
                f"{self.name!r} is a function that this process does not have; import the module that decorates it "
                "with lit_het.heads.get_logits first (docs/heads.md)",
            )

    def build(
        self, feature_size: int, num_classes: int, rngs: "nnx.Rngs", *, zero_kernel: bool, initial_bias: float
    ) -> Any:
        """Returns what the function returns, whose logits are checked.

        Raises:
            UserError: it returns no function, or one of logits of another shape.
        """
        from lit_het.heads.logits import CheckedLogits

        return CheckedLogits(_GIVEN[self.name](feature_size, num_classes, rngs), self.name, feature_size, num_classes)


def get_logits(builder: Builder) -> GivenLogits:
    """Makes a function known, as a decorator, and returns the configuration that names it.

    Args:
        builder: (size of embeddings, number of classes, random keys) to an `nnx.Module` or a function, of embeddings
            ``[n d]`` to logits ``[n k]``.
    """
    name = f"{builder.__module__}:{builder.__qualname__}"
    _GIVEN[name] = builder
    return GivenLogits(name)


LogitsConfig: TypeAlias = DenseLogits | SampledSoftmax | HierarchicalSoftmax | GivenLogits
