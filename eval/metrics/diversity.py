"""How much the members of an ensemble differ, image by image, and what the entropy of their mean consists of."""

import dataclasses

import numpy as np
import scipy
from jaxtyping import Float, Int

from lit_het.eval.metrics.significance import ratio_of_means, standard_error


@dataclasses.dataclass(frozen=True)
class Diversity:
    """Measures of the members' predictions for each image.

    Attributes:
        kl: KL divergence between the predictions of two members, in nats, averaged over all ordered pairs.
        disagreement: fraction of pairs whose most probable classes differ; in a tie, the first class.
        cosine_similarity: cosine of the angle between the probabilities of two members, averaged over all pairs.
        mean_entropy: entropy of a member's prediction, averaged over members, in nats.
        mutual_information: of the class and the member, in nats: the mean over members of ``KL(p_i || p̄)``.
    """

    kl: Float[np.ndarray, " n"]
    disagreement: Float[np.ndarray, " n"]
    cosine_similarity: Float[np.ndarray, " n"]
    mean_entropy: Float[np.ndarray, " n"]
    mutual_information: Float[np.ndarray, " n"]

    @property
    def total_entropy(self) -> Float[np.ndarray, " n"]:
        """Entropy of the members' mean prediction, in nats: the sum of both parts (Depeweg et al. 2018)."""
        return self.mean_entropy + self.mutual_information

    def figures(self, wrong: Float[np.ndarray, " n"]) -> tuple[dict[str, float], dict[str, float]]:
        """Returns the means over images of all measures and of the total entropy, and their standard errors.

        ``normalized_disagreement`` is the mean disagreement divided by the error rate of the ensemble, as in e3,
        Table 15; it is left out if that rate is zero.

        Args:
            wrong: probability that the ensemble's prediction is wrong: 0 or 1, or a fraction where classes tie.
        """
        names = [*(field.name for field in dataclasses.fields(self)), "total_entropy"]
        found = {name: float(getattr(self, name).mean()) for name in names}
        errors = {name: standard_error(getattr(self, name)) for name in names}
        if wrong.any():
            name = "normalized_disagreement"
            found[name], errors[name] = ratio_of_means(self.disagreement, wrong)
        return found, errors


@dataclasses.dataclass(frozen=True)
class Members:
    """Predictions of the members of an ensemble for a block of images.

    Attributes:
        log_probabilities: in float64.
        probabilities: their exponentials.
        entropies: of each prediction, in nats.
    """

    log_probabilities: Float[np.ndarray, "b m k"]
    probabilities: Float[np.ndarray, "b m k"]
    entropies: Float[np.ndarray, "b m"]

    @classmethod
    def of(cls, log_probabilities: Float[np.ndarray, "b m k"]) -> "Members":
        """Returns the predictions with these log-probabilities, in float64."""
        probabilities = np.exp(log_probabilities)
        return cls(log_probabilities, probabilities, scipy.special.entr(probabilities).sum(axis=2))

    def diversity(self) -> Diversity:
        """Returns the measures of e3, Table 15 and Sec. 2.2, over pairs of different members, and both entropies.

        Time and memory are linear in the number of members.
        """
        m = self.entropies.shape[1]
        pairs = m * (m - 1)
        return Diversity(
            kl=self._sum_of_divergences() / pairs,
            disagreement=1 - self._agreeing_pairs() / pairs,
            cosine_similarity=self._sum_of_cosines() / pairs,
            mean_entropy=self.entropies.mean(axis=1),
            mutual_information=mutual_information(self.probabilities.mean(axis=1), self.entropies),
        )

    def _sum_of_divergences(self) -> Float[np.ndarray, " b"]:
        """Returns the sum of KL(p_i || p_j) over ordered pairs."""
        # KL(p_i || p_i) is zero, so the sum runs over all m² pairs. With sums over classes,
        # Σ_ij Σ p_i (log p_i - log p_j) = m Σ_i Σ p_i log p_i - Σ (Σ_i p_i) (Σ_j log p_j).
        mass, logs = self.probabilities.sum(axis=1), self.log_probabilities.sum(axis=1)
        # A class of probability zero in every member adds nothing; 0 * -inf would be NaN.
        logs[mass == 0] = 0.0
        entropies = self.entropies.sum(axis=1)
        return (-self.entropies.shape[1] * entropies - (mass * logs).sum(axis=1)).clip(min=0)

    def _agreeing_pairs(self) -> Int[np.ndarray, " b"]:
        """Returns the number of ordered pairs of different members that predict the same class."""
        num_images, _, num_classes = self.probabilities.shape
        places = self.log_probabilities.argmax(axis=2) + num_classes * np.arange(num_images)[:, None]
        votes = np.bincount(places.ravel(), minlength=num_images * num_classes).reshape(num_images, num_classes)
        return (votes * (votes - 1)).sum(axis=1)

    def _sum_of_cosines(self) -> Float[np.ndarray, " b"]:
        """Returns the sum of cosines over ordered pairs of different members."""
        # For unit vectors u_i, Σ_ij u_i u_j = |Σ_i u_i|², where the m pairs of a member with itself have the cosine 1.
        lengths = np.sqrt(np.einsum("bmk,bmk->bm", self.probabilities, self.probabilities))
        total = np.einsum("bmk,bm->bk", self.probabilities, 1 / lengths)
        return (total**2).sum(axis=1) - lengths.shape[1]


def information_of_members(log_probabilities: Float[np.ndarray, "n sm k"], num_members: int) -> Float[np.ndarray, " n"]:
    """Returns the mutual information of the class and the member, in nats, where a member is the mean of its samples.

    It is the epistemic part of the entropy (Houlsby et al. 2011, Depeweg et al. 2018): what members do not agree on,
    beside the noise that each of them has.

    Args:
        log_probabilities: of the first sample of each member, then of their second one, and so on.
        num_members: M.
    """
    n, _, k = log_probabilities.shape
    members = np.exp(log_probabilities.astype(np.float64)).reshape(n, -1, num_members, k).mean(axis=1)
    return mutual_information(members.mean(axis=1), scipy.special.entr(members).sum(axis=2))


def mutual_information(mean: Float[np.ndarray, "b k"], entropies: Float[np.ndarray, "b m"]) -> Float[np.ndarray, " b"]:
    """Returns `Diversity.mutual_information`, from the mean probabilities in float64 and the entropies of members."""
    # In float64 the difference of two entropies is exact enough.
    return (scipy.special.entr(mean).sum(axis=1) - entropies.mean(axis=1)).clip(min=0)
