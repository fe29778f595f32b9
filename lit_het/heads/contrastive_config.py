"""The configurations of contrastive heads."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from jaxtyping import Float

from lit_het.errors import FieldError, UserError, require_at_least, require_choice
from lit_het.heads.noise_config import CovarianceConfig, Order, check_antithetic, check_noise_norm, check_order
from lit_het.heads.options import ContrastiveOptions
from lit_het.heads.temperature_config import LogTemperature, TemperatureConfig

if TYPE_CHECKING:
    from flax import nnx

    from lit_het.heads.bayes_vlm import BayesVLMContrastive
    from lit_het.heads.contrastive import HetXLContrastive
    from lit_het.heads.gaussian import GaussianContrastive
    from lit_het.heads.mc_dropout import McDropoutContrastive
    from lit_het.heads.prob_vlm import ProbVLMContrastive


@dataclasses.dataclass(frozen=True)
class DeterministicContrastiveConfig(ContrastiveOptions):
    """Unit-normalised embeddings without noise.

    Attributes:
        temperature: τ.
        initial_bias: initial value of a learned bias of the logits, for the sigmoid loss; None for no bias.
    """

    temperature: TemperatureConfig = LogTemperature()
    initial_bias: float | None = None

    takes_members = True


@dataclasses.dataclass(frozen=True)
class HetXLContrastiveConfig(ContrastiveOptions):
    """Noisy queries, noiseless keys (HET-XL App. A.2).

    The paper's own settings (App. N.2) are those of ``configs/lit_gigantic14_het_xl.py``.

    Attributes:
        covariance: Σ of images and of texts; both have their own parameters.
        temperature: τ.
        num_samples: S, noise samples per example in training; evaluators have their own number. With the paper's S = 1
            noise can only raise the loss; with more it pays where labels are noisy (docs/noise.md). 0 for losses that
            need no samples.
        antithetic: whether samples come in pairs with noise ε and -ε; None for pairs wherever S is even.
        order: order of products for S > 1, see `lit_het.heads.sampling`.
        normalize_before_noise, normalize_after_noise: when embeddings are scaled to norm 1 (HET-XL Table 7); keys have
            the same settings.
        noisy: whose queries have noise.
        initial_bias: initial value of a learned bias of the logits, for the sigmoid loss; None for no bias.
    """

    covariance: CovarianceConfig = CovarianceConfig(num_factors=15, form="full", initial_noise_norm=0.1)
    temperature: TemperatureConfig = LogTemperature()
    num_samples: int = 16
    antithetic: bool | None = None
    order: Order = "cheaper"
    normalize_before_noise: bool = True
    normalize_after_noise: bool = False
    noisy: Literal["both", "image", "text"] = "both"
    initial_bias: float | None = None

    takes_members = has_noise = True

    def __post_init__(self) -> None:
        require_at_least(0, self, "num_samples")
        require_choice(self, "noisy", "order")
        check_antithetic(self, "num_samples")
        if self.num_samples == 0 and (self.normalize_after_noise or self.covariance.is_diagonal):
            raise UserError(
                "task.head.num_samples = 0 needs normally distributed queries of low rank; set normalize_after_noise = "
                "False and covariance.second_term to 'rank_one'"
            )
        check_order(self.order, self.covariance)

    @property
    def has_image_noise(self) -> bool:
        """Whether image queries have noise."""
        return self.noisy != "text"

    def build(self, embedding_size: int, rngs: "nnx.Rngs") -> "HetXLContrastive":
        """Returns the head for embeddings ``[b d]``."""
        from lit_het.heads.contrastive import HetXLContrastive

        return HetXLContrastive(self, embedding_size, rngs)


@dataclasses.dataclass(frozen=True)
class GaussianContrastiveConfig(ContrastiveOptions):
    """A diagonal Gaussian for each image and each text.

    PCME++ and ProLIP train it with `lit_het.losses.contrastive.SigmoidLoss`.

    Attributes:
        temperature: τ.
        initial_bias: initial value of a learned bias of the logits, for the sigmoid loss; None for no bias.
        initial_noise_norm: initial ``|σ|``; ProLIP's, with log σ² = -10 in 768 dimensions, is 0.19.
        variances: log σ² is a dense layer of the head on the unit embedding, or comes from the uncertainty tokens of
            the towers (ProLIP), whose embeddings are ``[mean, log σ²]`` and whose layers start at log σ² = -10.
        bottleneck: weight of the divergence from N(0, 1), the mean over dimensions; both papers use 1e-4.
        inclusion: weight of the loss that wants an image's Gaussian inside that of its text; ProLIP uses 1e-7.

    Raises:
        UserError: a negative weight, or a norm that is not finite and positive.
    """

    temperature: TemperatureConfig = LogTemperature()
    initial_bias: float | None = None
    initial_noise_norm: float = 0.1
    variances: Literal["head", "towers"] = "head"
    bottleneck: float = 1e-4
    inclusion: float = 1e-7

    has_noise = has_image_noise = True

    @staticmethod
    def text_variances(keys: Float[np.ndarray, "*n key"]) -> Float[np.ndarray, "*n"]:
        """Returns ``|ς|²`` of texts, from their keys."""
        return -2 * keys[..., -1]

    def check_tower(self, tower: Any, field: str) -> None:
        """Checks that the tower has log σ² where it is to come from there."""
        if self.variances == "head":
            super().check_tower(tower, field)
        elif not tower.has_variances:
            raise UserError(
                f"task.head.variances = 'towers' needs uncertainty tokens of both towers, and {field} has none; set "
                "--task.head.variances head to learn log σ² from the embedding"
            )

    def __post_init__(self) -> None:
        require_at_least(0, self, "bottleneck", "inclusion")
        require_choice(self, "variances")
        check_noise_norm(self.initial_noise_norm)

    def build(self, embedding_size: int, rngs: "nnx.Rngs") -> "GaussianContrastive":
        """Returns the head for embeddings ``[b d]``."""
        from lit_het.heads.gaussian import GaussianContrastive

        return GaussianContrastive(self, embedding_size, rngs)


@dataclasses.dataclass(frozen=True)
class ProbVLMContrastiveConfig(ContrastiveOptions):
    """An adapter for each tower; embeddings themselves, and so predictions without noise, stay as they are.

    Attributes:
        temperature: τ, which the loss of the task trains.
        initial_bias: initial value of a learned bias of the logits, for the sigmoid loss; None for no bias.
        initial_noise_norm: initial root mean square norm of z - ẑ; ẑ starts at zero, and z has norm 1.
        hidden_size: width of the adapter's hidden layers.
        dropout: probability with which a hidden unit is left out, in training and for the epistemic variance.
        cross_modal: λ.

    Raises:
        UserError: a negative size or weight, a probability of 1 or more, or a norm that is not finite and positive.
    """

    temperature: TemperatureConfig = LogTemperature()
    initial_bias: float | None = None
    initial_noise_norm: float = 1.0
    hidden_size: int = 256
    dropout: float = 0.1
    cross_modal: float = 1e-4

    has_noise = has_image_noise = True

    def __post_init__(self) -> None:
        require_at_least(1, self, "hidden_size")
        require_at_least(0, self, "dropout", "cross_modal")
        if self.dropout >= 1:
            raise FieldError(self, "dropout", f"{self.dropout} must be below 1")
        check_noise_norm(self.initial_noise_norm)

    def build(self, embedding_size: int, rngs: "nnx.Rngs") -> "ProbVLMContrastive":
        """Returns the head for embeddings ``[b d]``."""
        from lit_het.heads.prob_vlm import ProbVLMContrastive

        return ProbVLMContrastive(self, embedding_size, rngs)


@dataclasses.dataclass(frozen=True)
class BayesVLMContrastiveConfig(ContrastiveOptions):
    """A Laplace posterior over the last layer of a finished model; ``lit-het add-noise`` fits it.

    Attributes:
        temperature: τ, that of the model.
        initial_bias: the bias of the model's logits, of the sigmoid loss; None for none.
        prediction: with noise, the mean over ``"samples"`` of the weights, or ``"probit"``, the paper's closed form
            for this mean, which has no samples.
        num_negatives: most pairs of a batch of the Hessian, whose other side are the candidates.
        pseudo_data_count: how many times every pair counts; chosen on glyphs, the authors' zero-shot script has 10.

    Raises:
        UserError: an unknown prediction, fewer than two candidates, or a count that is not finite and positive.
    """

    temperature: TemperatureConfig = LogTemperature()
    initial_bias: float | None = None
    prediction: Literal["samples", "probit"] = "samples"
    num_negatives: int = 32768
    pseudo_data_count: float = 100.0

    has_noise = has_image_noise = extends_keys = is_fitted = True

    def __post_init__(self) -> None:
        require_choice(self, "prediction")
        require_at_least(2, self, "num_negatives")
        if not 0 < self.pseudo_data_count < math.inf:
            raise FieldError(self, "pseudo_data_count", f"{self.pseudo_data_count} must be positive and finite")

    @property
    def sampled(self) -> str:
        """All examples share the weights of a sample."""
        return "weights" if self.prediction == "samples" else "nothing"

    def tower_of(self, tower: Any) -> Any:
        """Returns the tower that tells the input of its last linear layer too, if it ends with one."""
        return tower.with_last_input()

    def check_tower(self, tower: Any, field: str) -> None:
        """Checks that nothing but this input follows the embedding."""
        if not tower.input_size:
            super().check_tower(tower, field)

    def build(
        self, embedding_size: int, rngs: "nnx.Rngs", *, image_input_size: int = 0, text_input_size: int = 0
    ) -> "BayesVLMContrastive":
        """Returns the head; its variances are zero until a posterior is set.

        Args:
            embedding_size: d.
            rngs: unused.
            image_input_size: p, the inputs of the last layer that follow the embedding of an image; 0 for none.
            text_input_size: those of a text.
        """
        from lit_het.heads.bayes_vlm import BayesVLMContrastive

        return BayesVLMContrastive(self, embedding_size, image_input_size, text_input_size)

    def build_on(self, image_tower: Any, text_tower: Any, rngs: "nnx.Rngs") -> "BayesVLMContrastive":
        """Returns the head for the embeddings of two towers, and the inputs of their last layers."""
        sizes = {"image_input_size": image_tower.input_size, "text_input_size": text_tower.input_size}
        return self.build(image_tower.embedding_size, rngs, **sizes)


@dataclasses.dataclass(frozen=True)
class McDropoutContrastiveConfig(ContrastiveOptions):
    """Entries of embeddings are dropped in training, and for noise samples of predictions.

    Attributes:
        temperature: τ.
        initial_bias: initial value of a learned bias of the logits, for the sigmoid loss; None for no bias.
        dropout: probability with which an entry is dropped.

    Raises:
        UserError: a probability that is negative, or 1 or more.
    """

    temperature: TemperatureConfig = LogTemperature()
    initial_bias: float | None = None
    dropout: float = 0.1

    has_noise = has_image_noise = True

    def __post_init__(self) -> None:
        require_at_least(0, self, "dropout")
        if self.dropout >= 1:
            raise FieldError(self, "dropout", f"{self.dropout} must be below 1")

    def build(self, embedding_size: int, rngs: "nnx.Rngs") -> "McDropoutContrastive":
        """Returns the head."""
        from lit_het.heads.mc_dropout import McDropoutContrastive

        return McDropoutContrastive(self)


ContrastiveHeadConfig: TypeAlias = (
    DeterministicContrastiveConfig
    | HetXLContrastiveConfig
    | GaussianContrastiveConfig
    | ProbVLMContrastiveConfig
    | BayesVLMContrastiveConfig
    | McDropoutContrastiveConfig
)
