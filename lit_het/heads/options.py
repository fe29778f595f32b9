"""What configurations of heads say of them: whatever uses a head asks these questions, and not its class."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float

from lit_het.errors import UserError
from lit_het.heads.logits_config import DenseLogits

if TYPE_CHECKING:
    from flax import nnx

    from lit_het.heads.base import ClassificationHead, ContrastiveHead


TRAINING_FIELDS = (
    "initial",
    "initial_bias",
    "initial_noise_norm",
    "zero_kernel",
    "learning_rate_factor",
    "num_samples",
    "num_candidates",
    "distribution",
    "bottleneck",
    "inclusion",
    "cross_modal",
)
"""Last names of the fields of heads that change how they are trained, but not what a trained one predicts."""

LATER_FIELDS = {"get_logits.type": "DenseLogits", "likelihood": "samples"}
"""Fields that heads and their losses gained after runs had been trained, with the value that changes nothing."""


class HeadOptions:
    """What the configuration of any head says of it; here, of a head without noise.

    Attributes:
        temperature: τ.
        has_noise: whether it has noise.
        sampled: of what a noise sample of a prediction is: of "examples", each for itself, of "weights", which all
            examples share, or of "nothing", where the prediction is in closed form.
        is_fitted: whether it is fitted to a finished model (`ContrastiveHead.fitted`), and has nothing to train.
    """

    temperature: Any
    has_noise: Any = False
    sampled: Any = "examples"
    is_fitted: Any = False


class ClassificationOptions(HeadOptions):
    """What the configuration of a classification head says of it; here, of a head without noise.

    Attributes:
        initial_bias: initial value of the biases of the logits.
        zero_kernel: whether the kernel of the logits is initially zero, for fine-tuning, instead of random.
        sampling: number of noise samples, and how they are computed; None without noise.
        get_logits: from embeddings to logits.
    """

    initial_bias: Any = 0.0
    zero_kernel: Any = False
    sampling: Any = None
    get_logits: Any = DenseLogits()

    def check_loss(self, loss: Any, field: str) -> None:
        """Checks that the head returns what a loss reads: samples, or for S = 0 the covariance of the logits.

        A sampled softmax is of one label, and of no other class.

        Args:
            loss: of classes.
            field: of the configuration that has both.

        Raises:
            UserError: it does not.
        """
        if self.get_logits.needs_labels and (loss.has_class_probabilities or loss.label_smoothing):
            raise UserError(
                f"{field}.head.get_logits = {type(self.get_logits).__name__} trains the softmax of a label among few "
                f"classes; set {field}.loss to SoftmaxCrossEntropy without label_smoothing, or leave get_logits out"
            )
        if self.get_logits.needs_labels and loss.likelihood != "samples":
            raise UserError(
                f"{field}.loss.likelihood = {loss.likelihood!r} reads all classes, and {field}.head.get_logits = "
                f"{type(self.get_logits).__name__} trains with few; set likelihood to 'samples'"
            )
        if self.sampling is None:
            if loss.likelihood != "samples":
                raise UserError(
                    f"{field}.loss.likelihood = {loss.likelihood!r} needs a head with noise, and {type(self).__name__} "
                    "has none; set it to 'samples'"
                )
        elif (loss.likelihood != "samples") != (self.sampling.num_samples == 0):
            raise UserError(
                f"{field}.loss.likelihood = {loss.likelihood!r} does not fit {field}.head.sampling.num_samples = "
                f"{self.sampling.num_samples}: likelihoods without samples need num_samples = 0, and 'samples' at "
                "least 1"
            )

    def build(self, feature_size: int, num_classes: int, rngs: "nnx.Rngs") -> "ClassificationHead":
        """Returns the head for features ``[b d]`` and ``num_classes`` classes."""
        from lit_het.heads.base import ClassificationHead

        return ClassificationHead(self, feature_size, num_classes, rngs)


class ContrastiveOptions(HeadOptions):
    """What the configuration of a contrastive head says of it; here, of a head without noise.

    Attributes:
        initial_bias: initial value of a learned bias of the logits, for the sigmoid loss; None for no bias.
        num_samples: S, noise samples per example in training; 0 for losses that need none.
        antithetic: whether they come in pairs with noise ε and -ε; None for pairs wherever S is even.
        has_image_noise: whether image queries have noise.
        normalize_before_noise, normalize_after_noise: when queries with noise are scaled to norm 1.
        text_variances: keys of texts to their variances, which a key holds where embeddings are Gaussians; None where
            they are not.
        extends_keys: whether keys go on behind the unit embedding with what predictions without noise do not need.
        takes_members: whether an image may have several keys.
    """

    initial_bias: Any = None
    num_samples: Any = 1
    antithetic: Any = None
    has_image_noise: Any = False
    normalize_before_noise: Any = True
    normalize_after_noise: Any = False
    text_variances: Callable[[Float[np.ndarray, "*n key"]], Float[np.ndarray, "*n"]] | None = None
    extends_keys = False
    takes_members = False

    def tower_of(self, tower: Any) -> Any:
        """Returns the tower of a finished model, as this head reads it."""
        return tower

    def check_tower(self, tower: Any, field: str) -> None:
        """Checks that a tower returns what the head reads: here, plain embeddings.

        Raises:
            UserError: it does not, with the field of the tower.
        """
        if tower.appended:
            raise UserError(
                f"{field}.{tower.appended} does not fit task.head, which reads plain embeddings; set it to False"
            )

    def build(self, embedding_size: int, rngs: "nnx.Rngs") -> "ContrastiveHead":
        """Returns the head for embeddings ``[b d]``."""
        from lit_het.heads.base import ContrastiveHead

        return ContrastiveHead(self.temperature, self.initial_bias)

    def build_on(self, image_tower: Any, text_tower: Any, rngs: "nnx.Rngs") -> "ContrastiveHead":
        """Returns the head for the embeddings of two towers, given by their configurations."""
        return self.build(image_tower.embedding_size, rngs)
