"""The HET-XL classifier in the form of scikit-learn."""

from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.preprocessing import StandardScaler
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from lit_het import arguments
from lit_het.errors import UserError
from lit_het.eval.metrics.calibration import fit_temperature, scaled
from lit_het.heads import CovarianceConfig, DeterministicConfig, HetXLConfig, SamplingConfig
from lit_het.sklearn.training import HeadTraining, Table

# A temperature that is fitted to fewer rows says more about them than about the model.
LEAST_HELD_OUT = 20


class HetXLClassifier(ClassifierMixin, BaseEstimator):
    """A classifier of features, such as frozen embeddings, whose noise depends on the features (HET-XL Eq. 5).

    It standardises features, trains a head with the library's optimizer until the loss on held-out rows no longer
    falls, and scales its probabilities by a temperature that is fitted to the same rows.

    Args:
        head: "het_xl", or "deterministic": a linear classifier without noise.
        num_factors: r, the rank of the covariance.
        num_samples: S, noise samples of a row in training; even numbers are drawn in pairs with noise ε and -ε.
        num_eval_samples: S of predictions; 0 predicts without noise, also if it is set after training.
        learning_rate: of the logits; covariance and temperature have factors of their own.
        weight_decay: fraction of the kernels that a step at the peak of the learning rate removes.
        batch_size: rows per step.
        max_iter: passes through the rows, at most.
        n_iter_no_change: passes without a lower loss on held-out rows after which training ends.
        validation_fraction: rows of each class that are held out; with 0, or if they are fewer than `LEAST_HELD_OUT`,
            all rows are trained on, for ``max_iter`` passes, and the temperature is 1.
        random_state: seed of the held-out rows, the initial parameters, the order and the noise.

    Attributes:
        classes_: the classes, sorted.
        n_features_in_: number of features.
        n_iter_: passes through the rows.
        temperature_: fitted temperature of predictions with noise.
        noiseless_temperature_: fitted temperature of predictions without noise.
    """

    def __init__(
        self,
        *,
        # Without annotations: an estimator accepts anything here, and checks it in `fit`.
        head="het_xl",
        num_factors=15,
        num_samples=16,
        num_eval_samples=64,
        learning_rate=1e-2,
        weight_decay=1e-3,
        batch_size=128,
        max_iter=100,
        n_iter_no_change=20,
        validation_fraction=0.1,
        random_state=None,
    ):
        self.head = head
        self.num_factors = num_factors
        self.num_samples = num_samples
        self.num_eval_samples = num_eval_samples
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.batch_size = batch_size
        self.max_iter = max_iter
        self.n_iter_no_change = n_iter_no_change
        self.validation_fraction = validation_fraction
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> "HetXLClassifier":
        """Trains on features ``[n d]`` and labels ``[n]``; rows of weight 0 are left out.

        Raises:
            ValueError: the table is not what scikit-learn accepts.
            UserError: a parameter is out of range, or training diverged.
        """
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        weight = _check_sample_weight(sample_weight, X, ensure_non_negative=True)
        X, labels, weight = (column[weight > 0] for column in (X, labels, weight))
        if not len(labels):
            raise ValueError("every sample_weight is 0")
        random = check_random_state(self.random_state)
        seed = int(random.randint(np.iinfo(np.int32).max))
        self._eval_samples()  # before training
        is_held_out = _held_out(labels, self._fraction(), np.random.default_rng(seed))
        self._scaler = StandardScaler().fit(X, sample_weight=weight)
        table = Table(self._standardised(X), labels.astype(np.int32), (weight / weight.mean()).astype(np.float32))
        held_out = table.take(is_held_out)
        self._trained, self.n_iter_ = self._training(X.shape[1]).fit(table.take(~is_held_out), held_out, seed)
        self.noiseless_temperature_ = self._temperature(held_out, 0)
        self.temperature_ = self._temperature(held_out, self._eval_samples())
        return self

    def predict_proba(self, X: Any) -> Float[np.ndarray, "n k"]:
        """Returns the probabilities of ``classes_``: the mean over noise samples, scaled by the temperature."""
        X = self._checked(X)
        samples = self._eval_samples()
        temperature = self.temperature_ if samples else self.noiseless_temperature_
        log_p = scaled(self._trained.log_probabilities(X, samples), temperature)
        probabilities = np.exp(log_p.astype(np.float64))
        return probabilities / probabilities.sum(axis=1, keepdims=True)

    def predict(self, X: Any) -> np.ndarray:
        """Returns the most probable class of each row."""
        probabilities = self.predict_proba(X)
        return self.classes_[probabilities.argmax(axis=1)]

    def noise_norm(self, X: Any) -> Float[np.ndarray, " n"]:
        """Returns ``sqrt(tr Σ(x))``, in standardised features: how ambiguous the model takes each row to be."""
        return self._trained.noise_norm(self._checked(X))

    def _checked(self, X: Any) -> Float[np.ndarray, "n d"]:
        check_is_fitted(self)
        return self._standardised(np.asarray(validate_data(self, X, dtype=np.float64, reset=False)))

    def _standardised(self, X: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
        return np.asarray(self._scaler.transform(X), np.float32)

    def _training(self, feature_size: int) -> HeadTraining:
        match self.head:
            case "het_xl":
                covariance = CovarianceConfig(
                    arguments.whole(self.num_factors, "num_factors", 0, arguments.MAX_SAMPLES), form="efficient"
                )
                # The number of samples of predictions may change after training, and is not part of the head.
                sampling = SamplingConfig(arguments.whole(self.num_samples, "num_samples", 1, arguments.MAX_SAMPLES))
                head = HetXLConfig(covariance, sampling=sampling, zero_kernel=True)
            case "deterministic":
                head = DeterministicConfig(zero_kernel=True)
            case _:
                raise UserError(f"head = {self.head!r} is neither 'het_xl' nor 'deterministic'")
        return HeadTraining(
            head=head,
            feature_size=feature_size,
            num_classes=len(self.classes_),
            learning_rate=arguments.real(self.learning_rate, "learning_rate"),
            weight_decay=arguments.real(self.weight_decay, "weight_decay"),
            batch_size=arguments.whole(self.batch_size, "batch_size", 1),
            max_epochs=arguments.whole(self.max_iter, "max_iter", 1),
            patience=arguments.whole(self.n_iter_no_change, "n_iter_no_change", 1),
        )

    def _eval_samples(self) -> int:
        return arguments.whole(self.num_eval_samples, "num_eval_samples", 0, arguments.MAX_SAMPLES)

    def _fraction(self) -> float:
        fraction = arguments.real(self.validation_fraction, "validation_fraction")
        if not 0 <= fraction < 1:
            raise UserError(f"validation_fraction = {fraction} must be at least 0 and less than 1")
        return fraction

    def _temperature(self, held_out: Table, num_samples: int) -> float:
        if not len(held_out.labels):
            return 1.0
        log_p = self._trained.log_probabilities(held_out.features, num_samples)
        if (log_p.argmax(axis=1) == held_out.labels).all():
            # The likelihood has no maximum: it would make every prediction certain.
            return 1.0
        return fit_temperature(log_p, held_out.labels, held_out.weight)


def _held_out(labels: Int[np.ndarray, " n"], fraction: float, random: np.random.Generator) -> Bool[np.ndarray, " n"]:
    """Returns which rows are held out: the fraction of each class, rounded down, so that no class loses all its rows.

    None are if they were fewer than `LEAST_HELD_OUT`.
    """
    order = random.permutation(len(labels))
    is_held_out = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        rows = order[labels[order] == label]
        is_held_out[rows[: int(fraction * len(rows))]] = True
    return is_held_out if is_held_out.sum() >= LEAST_HELD_OUT else np.zeros(len(labels), bool)
