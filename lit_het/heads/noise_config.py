"""The configurations of noise: the form of Σ(x), and how the expectation over the noise is estimated."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Literal

from lit_het.errors import FieldError, UserError, require_at_least, require_choice

if TYPE_CHECKING:
    from flax import nnx

    from lit_het.heads.covariance import Covariance


def check_noise_norm(initial: float) -> None:
    """Checks the ``initial_noise_norm`` of a head."""
    if not 0 < initial < math.inf:
        raise UserError(f"initial_noise_norm = {initial} must be positive and finite")


@dataclasses.dataclass(frozen=True)
class CovarianceConfig:
    """The form of Σ(x), and its initial size.

    Attributes:
        num_factors: r, the rank of the low-rank part; with 0 Σ is diagonal, whatever ``second_term`` is.
        form: "full" gives every example its own ``V(x) = reshape(C φ(x))``, O(d q r) parameters; "efficient"
            scales a shared ``J`` per coordinate, ``V(x) = J ∘ v(x)``, O(d q + q r) parameters.
        second_term: beside the low-rank part, "rank_one" has one random number for all coordinates (the paper's),
            "diagonal" one for each.
        initial_noise_norm: root mean square norm of the initial noise, half of its square from each term; None
            initializes ordinary dense layers, whose noise has a norm near 0.7 √q on unit features.
        learning_rate_factor: multiplies the learning rate of the parameters of Σ; None for `scaled_learning_rate`.

    Raises:
        UserError: a negative rank or factor, an unknown form or second term, or a norm that is not finite and positive.
    """

    num_factors: int = 15
    form: Literal["full", "efficient"] = "full"
    second_term: Literal["rank_one", "diagonal"] = "rank_one"
    initial_noise_norm: float | None = None
    learning_rate_factor: float | None = None

    def __post_init__(self) -> None:
        require_at_least(0, self, "num_factors")
        if self.learning_rate_factor is not None:
            require_at_least(0, self, "learning_rate_factor")
        require_choice(self, "form", "second_term")
        if self.initial_noise_norm is not None:
            check_noise_norm(self.initial_noise_norm)

    @property
    def is_diagonal(self) -> bool:
        """Whether η has one standard normal per coordinate."""
        return self.second_term == "diagonal" or self.num_factors == 0

    def scaled_learning_rate(self, noise_size: int, feature_norm: float) -> float:
        """Returns the factor of the learning rate with which the noise grows alike for every rank and size.

        Adam changes every entry of a kernel by about the learning rate η in a step, whatever the gradient's size. The
        norm of the noise is that of a vector with as many entries as V has columns, n = q r (q in the efficient form),
        each a product of a kernel's row with φ. In a random walk it moves in proportion to η √n |φ|, and the factor
        10 / (√n |φ|), at most 1, makes this independent of r, q and the scale of features. The 10 gives about the 0.3
        that was best at r = 4 and q = 256 (docs/noise.md). With another rule than Adam's it is a smaller learning rate,
        and no more.
        """
        if self.learning_rate_factor is not None:
            return self.learning_rate_factor
        return min(1.0, 10 / math.sqrt(self.num_columns(noise_size)) / feature_norm)

    def num_columns(self, noise_size: int) -> int:
        """Returns the number of columns of the kernel of V, or without factors of that of d."""
        return noise_size * (max(self.num_factors, 1) if self.form == "full" else 1)

    def build(self, feature_size: int, noise_size: int, feature_norm: float, rngs: "nnx.Rngs") -> "Covariance":
        """Returns the module.

        Args:
            feature_size: d, size of φ(x).
            noise_size: q, size of ε.
            feature_norm: typical norm of φ(x), from which the initial scales are derived.
            rngs: random keys of the parameters.
        """
        from lit_het.heads.covariance import Covariance

        return Covariance(self, feature_size, noise_size, feature_norm, rngs)


Order = Literal["cheaper", "direct", "factored"]


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How the expectation over the noise is estimated (HET-XL Sec. 2.1); the paper uses S = 1000 (App. N.1).

    Attributes:
        num_samples: S in training; 0 for a loss whose likelihood needs no samples, but Σ(x).
        num_eval_samples: S of evaluations that take no number of their own (sweeps).
        block_size: vectors of k numbers in memory at a time on a device; an example has one per sample, and in the
            factored order one per factor. Larger blocks are faster and need more memory.
        order: order of products; "cheaper" chooses the one with fewer operations.
        antithetic: whether samples come in pairs with noise ε and -ε; None for pairs wherever S is even.

    Raises:
        UserError: a negative number, another below 1, an unknown order, or pairs of an odd number of samples.
    """

    num_samples: int = 16
    num_eval_samples: int = 16
    block_size: int = 1024
    order: Order = "cheaper"
    antithetic: bool | None = None

    def __post_init__(self) -> None:
        require_at_least(0, self, "num_samples")
        require_at_least(1, self, "num_eval_samples", "block_size")
        require_choice(self, "order")
        for field in ("num_samples", "num_eval_samples"):
            check_antithetic(self, field)


def check_antithetic(config: Any, field: str) -> None:
    """Checks that the number of samples in a field of a configuration is even if pairs are asked for.

    Raises:
        UserError: it is odd.
    """
    if config.antithetic and getattr(config, field) % 2:
        raise FieldError(config, field, f"{getattr(config, field)} is odd, but antithetic samples come in pairs")


def check_low_rank(is_diagonal: bool) -> None:
    """Checks that noise of which no samples are drawn has a mean and a few factors.

    Raises:
        UserError: it has a standard normal for each coordinate.
    """
    if is_diagonal:
        raise UserError(
            "task.head.sampling.num_samples = 0 needs noise of low rank; set covariance.second_term to 'rank_one' and "
            "covariance.num_factors to at least 1"
        )


def check_sampling(sampling: SamplingConfig, covariance: CovarianceConfig) -> None:
    """Checks that the covariance supports the order of products, and losses without samples if it is for them.

    Raises:
        UserError: the factored order, or no samples, of a diagonal covariance.
    """
    check_order(sampling.order, covariance)
    if sampling.num_samples == 0:
        check_low_rank(covariance.is_diagonal)


def check_order(order: Order, covariance: CovarianceConfig) -> None:
    """Checks that the covariance supports the order.

    Raises:
        UserError: the factored order of a diagonal covariance.
    """
    if order == "factored" and covariance.is_diagonal:
        second_term = f"second_term = {covariance.second_term!r} with num_factors = {covariance.num_factors}"
        raise UserError(
            f"order = 'factored' needs covariance.second_term = 'rank_one' and factors, not {second_term}; "
            "use the order 'cheaper'"
        )


def logits_at_once(sampling: SamplingConfig | None, rows: int, num_classes: int) -> int:
    """Returns how many numbers a block of logits holds on a device.

    Args:
        sampling: of the head; None without noise.
        rows: examples on the device.
        num_classes: k.
    """
    # Without samples an example has a vector for every factor.
    vectors = rows if sampling is None else min(sampling.block_size, rows * sampling.num_samples or sampling.block_size)
    return vectors * num_classes
