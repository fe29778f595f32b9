"""Chooses the members of an ensemble among many models, such as the runs of a sweep (hyper-ensembles).

Greedy forward selection of Caruana et al., "Ensemble selection from libraries of models", ICML 2004, with which Wenzel
et al., "Hyperparameter ensembles for robustness and uncertainty quantification", NeurIPS 2020, build hyper-ensembles.
"""

import collections
import dataclasses

import numpy as np
from jaxtyping import Float

from lit_het.errors import UserError

LEAST_FALL = 1e-5
"""Nats by which one more pick must lower the NLL: with replacement, picks approach the best weights in ever smaller
steps, and at the end these change no figure that is printed."""


@dataclasses.dataclass(frozen=True)
class Selection:
    """The models of an ensemble.

    Attributes:
        picks: numbers of the models, in the order in which they were chosen; a model may be chosen several times.
        nll: loss of the mean prediction after each pick, in nats.
    """

    picks: tuple[int, ...]
    nll: tuple[float, ...]

    @property
    def weights(self) -> dict[int, int]:
        """How often each model was chosen, in the order of its first pick."""
        return dict(collections.Counter(self.picks))


def select_members(label_log_probabilities: Float[np.ndarray, "m n"], size: int) -> Selection:
    """Chooses models one by one, with replacement, so that each lowers the NLL of the mean prediction the most.

    It ends with ``size`` different models, or where no model lowers the loss by `LEAST_FALL`. The loss of a mean
    prediction needs no more of each model than the probability of the true class.

    Args:
        label_log_probabilities: of the true class, of every model and image of a validation set, in nats.
        size: the largest number of different models.
    """
    num_models, num_images = label_log_probabilities.shape
    if not num_images or np.isnan(label_log_probabilities).any():
        raise UserError("the models have no probabilities to select by; give images of another split")
    summed, picks, losses = np.full(num_images, -np.inf), [], []
    while len(set(picks)) < min(size, num_models):
        # The log of the sum of probabilities, with each model in turn as one more.
        candidates = np.logaddexp(summed, label_log_probabilities.astype(np.float64))
        nll = np.log(len(picks) + 1) - candidates.mean(axis=1)
        best = int(nll.argmin())
        if picks and not nll[best] < losses[-1] - LEAST_FALL:
            break
        summed = candidates[best]
        picks.append(best)
        losses.append(float(nll[best]))
    return Selection(tuple(picks), tuple(losses))
