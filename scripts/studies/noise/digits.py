"""Compares classifiers on scikit-learn's digits with wrong labels.

python -m scripts.studies.noise.digits --seeds 5
"""

import argparse
import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.preprocessing import scale

from lit_het.eval.metrics.significance import estimate
from lit_het.sklearn import HetXLClassifier

# Digits that resemble one another: 1 and 7, 3 and 8, 4 and 9, 5 and 6.
PARTNER = np.array([0, 7, 2, 8, 9, 6, 5, 1, 3, 4])


@dataclasses.dataclass(frozen=True)
class Digits:
    """Standardised digits; test labels are clean.

    Attributes:
        train, train_labels: to learn from; a part of the labels is wrong.
        test, test_labels: of the other images.
    """

    train: Float[np.ndarray, "n d"]
    train_labels: Int[np.ndarray, " n"]
    test: Float[np.ndarray, "m d"]
    test_labels: Int[np.ndarray, " m"]


def digits(seed: int, share: float) -> Digits:
    """Returns digits of which ``share`` of those in the training part have the label of the one that they resemble."""
    features, labels = load_digits(return_X_y=True)
    parts = train_test_split(scale(features), labels, test_size=0.3, random_state=seed, stratify=labels)
    train, test, train_labels, test_labels = map(np.asarray, parts)
    is_wrong = np.random.default_rng(seed).random(len(train)) < share
    return Digits(train, np.where(is_wrong, PARTNER[train_labels], train_labels), test, test_labels)


def models(seed: int) -> dict[str, Any]:
    """Returns the classifiers by their names."""
    return {
        "LogisticRegression": LogisticRegression(max_iter=2000),
        "LogisticRegression(C=best of 3)": GridSearchCV(
            LogisticRegression(max_iter=2000), {"C": (1e-2, 1e-1, 1.0)}, scoring="neg_log_loss"
        ),
        "HetXLClassifier(head='deterministic')": HetXLClassifier(head="deterministic", random_state=seed),
        "HetXLClassifier()": HetXLClassifier(random_state=seed),
    }


def main() -> None:
    """Prints the mean and the standard error over seeds of accuracy and negative log-likelihood."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    # Not 0: the defaults of the classifier were chosen on it.
    seeds = range(1, 1 + parser.parse_args().seeds)
    for share in (0.4, 0.0):
        found: dict[str, list[tuple[float, float]]] = {}
        for seed in seeds:
            data = digits(seed, share)
            for name, model in models(seed).items():
                probabilities = model.fit(data.train, data.train_labels).predict_proba(data.test)
                accuracy = float(np.mean(probabilities.argmax(axis=1) == data.test_labels))
                found.setdefault(name, []).append((accuracy, log_loss(data.test_labels, probabilities)))
        for name, figures in found.items():
            shown = ", ".join(estimate(values).shown(3) for values in zip(*figures, strict=True))
            print(f"{share:.0%} wrong, {name}: {shown}", flush=True)


if __name__ == "__main__":
    main()
