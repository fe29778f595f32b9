"""The losses of classifiers, as configurations name them; `lit_het.losses.classification` computes them."""

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Literal, TypeAlias

import jax
from jaxtyping import Array, Bool, Float, Int

from lit_het.errors import UserError, require_choice, require_share
from lit_het.mixtures import LabelMixture
from lit_het.types import LogitSamples

if TYPE_CHECKING:
    from lit_het.losses.classification import LossAndTop1


@dataclasses.dataclass(frozen=True)
class SoftmaxCrossEntropy:
    """``-log 1/S Σ_s softmax(u_s)[y]`` (HET-XL Eq. 2); each example has one class.

    Attributes:
        label_smoothing: share of the uniform distribution over all classes in the target (Szegedy et al. 2016, Sec. 7).
        likelihood: "samples" takes the mean over the head's noise samples; the others approximate the expectation from
            the covariance, see `lit_het.losses.gaussian`, and need a head with ``sampling.num_samples = 0``.
        has_class_probabilities: whether each class has a probability of its own.

    Raises:
        UserError: a share outside [0, 1), an unknown likelihood, or smoothing by one of single labels.
    """

    label_smoothing: float = 0.0
    likelihood: Literal["samples", "delta", "mean_field", "pairwise_probit", "unscented", "tilted"] = "samples"

    has_class_probabilities: ClassVar[bool] = False

    def __post_init__(self) -> None:
        require_share(self, "label_smoothing")
        require_choice(self, "likelihood")
        if self.label_smoothing and self.likelihood == "pairwise_probit":
            raise UserError(
                "SoftmaxCrossEntropy: likelihood = 'pairwise_probit' is of single classes, and label_smoothing needs "
                "all; set label_smoothing to 0, or take 'delta'"
            )

    def __call__(
        self,
        samples: LogitSamples,
        label: Int[Array, "b *m"] | LabelMixture,
        valid: Bool[Array, " b"] | None = None,
        weight: Float[Array, " b"] | None = None,
        *,
        joint: bool = False,
    ) -> "LossAndTop1":
        """Returns ``-Σ_c w_c log (1/S Σ_s softmax(u_s)[y_c])``, averaged; ``w = 1`` for the one class of a label.

        With label smoothing α the weights are ``(1 - α) w_c + α / k``, of all k classes.

        Args:
            samples: what the head returns.
            label: of each example, or of each member's prediction of it.
            valid: which examples count; None for all.
            weight: of each example in the mean (`lit_het.losses.base.weights`); None for equal weights.
            joint: whether the loss of several members is that of their mean prediction, instead of their mean loss.
        """
        from lit_het.losses.classification import softmax_cross_entropy

        return softmax_cross_entropy(self, samples, label, (valid, weight), joint)

    def label_shapes(self, num_classes: int) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of an example's labels, the usual one first: a class index."""
        return ((),)

    def targets(self, label: Int[Array, " b"], num_classes: int) -> Int[Array, " b"]:
        """Returns the labels unchanged."""
        return label

    def log_probabilities(self, logits: Float[Array, "*rows k"]) -> Float[Array, "*rows k"]:
        """Returns the log-softmax."""
        return jax.nn.log_softmax(logits)

    def scores(self, logits: Float[Array, "*rows k"]) -> Float[Array, "*rows k"]:
        """Returns a score of each class that does not depend on other classes: the logit."""
        return logits

    def mean_scores(self, scores: Float[Array, "b m k"]) -> Float[Array, "b k"]:
        """Returns the mean of the members' scores."""
        return scores.mean(axis=1)


@dataclasses.dataclass(frozen=True)
class SigmoidCrossEntropy:
    """Binary cross-entropy of ``1/S Σ_s σ(u_s)``, summed over classes (HET-XL Sec. 2.1); any number of classes.

    Attributes:
        likelihood: as in `SoftmaxCrossEntropy`.

    Raises:
        UserError: an unknown likelihood.
    """

    likelihood: Literal["samples", "probit", "unscented"] = "samples"

    has_class_probabilities: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_choice(self, "likelihood")

    def __call__(
        self,
        samples: LogitSamples,
        target: Float[Array, "b *m k"],
        valid: Bool[Array, " b"] | None = None,
        weight: Float[Array, " b"] | None = None,
        *,
        joint: bool = False,
    ) -> "LossAndTop1":
        """Returns the binary cross-entropy of the mean probabilities, summed over classes, averaged over examples.

        Args:
            samples: what the head returns.
            target: 0, 1, or a number between them for each class, of each example or of each member's prediction of it.
            valid: which examples count; None for all.
            weight: of each example in the mean (`lit_het.losses.base.weights`); None for equal weights.
            joint: whether the loss of several members is that of their mean prediction, instead of their mean loss.
        """
        from lit_het.losses.classification import sigmoid_cross_entropy

        return sigmoid_cross_entropy(self, samples, target, (valid, weight), joint)

    def label_shapes(self, num_classes: int) -> tuple[tuple[int, ...], ...]:
        """Returns the shapes of an example's labels, the usual one first: a target per class, or a class index."""
        return (num_classes,), ()

    def targets(self, label: Int[Array, " b"] | Float[Array, "b k"], num_classes: int) -> Float[Array, "b k"]:
        """Returns one target per class; class indices become one-hot vectors."""
        return jax.nn.one_hot(label, num_classes) if label.ndim == 1 else label

    def log_probabilities(self, logits: Float[Array, "*rows k"]) -> Float[Array, "*rows k"]:
        """Returns ``log σ(u)``, divided by the sum over classes: the loss trains every class independently."""
        return jax.nn.log_softmax(jax.nn.log_sigmoid(logits))

    def scores(self, logits: Float[Array, "*rows k"]) -> Float[Array, "*rows k"]:
        """Returns a score of each class that does not depend on other classes: ``log σ(u)``."""
        return jax.nn.log_sigmoid(logits)

    def mean_scores(self, scores: Float[Array, "b m k"]) -> Float[Array, "b k"]:
        """Returns the log of the mean probability of the members."""
        return jax.nn.logmeanexp(scores, axis=1)


ClassificationLoss: TypeAlias = SoftmaxCrossEntropy | SigmoidCrossEntropy
