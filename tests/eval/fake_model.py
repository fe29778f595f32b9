"""A model with given logits and embeddings, computed with NumPy."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy import special

from lit_het.calibrations import Calibration
from lit_het.heads.sampling import in_pairs
from lit_het.tasks import quantities
from lit_het.tasks.quantities import Quantity
from lit_het.texts import TextWriter
from lit_het.types import ImageFeatures, TextEncoder


@dataclasses.dataclass(frozen=True)
class FakeModel:
    """See `lit_het.types.EvaluatedModel`.

    Attributes:
        logits: features ``[b f]``, S and class embeddings to logits of every member ``[b m k]``.
        embeddings: features to embeddings ``[b d]``.
        noise_norm: features to noise norms.
        masks: features to the masks of images.
        alignment: features to the cosines of HET heads.
        text_members: M; samples are those of the members in turn.
    """

    features: ImageFeatures
    logits: Callable[[np.ndarray, int, np.ndarray | None], np.ndarray]
    embeddings: Callable[[np.ndarray], np.ndarray] = lambda features: features
    noise_norm: Callable[[np.ndarray], np.ndarray] = lambda features: np.zeros(len(features), np.float32)
    alignment: Callable[[np.ndarray], np.ndarray] = lambda features: np.zeros((len(features), 0))
    masks: Callable[[np.ndarray], np.ndarray] = lambda features: np.zeros((len(features), 1, 1, 2))
    text: TextEncoder | None = None
    num_classes: int | None = None
    mask_classes: int | None = None
    has_noise: bool = False
    has_class_probabilities: bool = False
    calibration: Calibration | None = None
    antithetic: bool | None = None
    writer: TextWriter | None = None
    text_members: int = 1

    @property
    def num_predictions(self) -> int:
        return self.features.num_members if self.text is None else self.text_members

    def check_samples(self, num_samples: int) -> None:
        in_pairs(self.antithetic, num_samples)

    def __call__(
        self,
        quantity: Quantity,
        blocks: np.ndarray,
        *,
        seeds: np.ndarray | None = None,
        num_samples: int = 0,
        classes: np.ndarray | None = None,
    ) -> np.ndarray:
        assert len(blocks) in (1, self.features.num_shards)
        assert seeds is None or len(seeds) == len(blocks)
        features, num_samples = np.concatenate(blocks), num_samples * self.text_members
        match quantity:
            case quantities.embeddings:
                found = self.embeddings(features)
            case quantities.masks:
                found = self.masks(features)
            case quantities.noise_norm:
                found = self.noise_norm(features)
            case quantities.noise_spectrum:
                found = np.zeros((len(features), 0))
            case quantities.kernel_alignment:
                found = self.alignment(features)
            case quantities.scores | quantities.log_normalizer:
                found = self.logits(features, 0, classes)[:, 0]
                found = special.logsumexp(found, axis=1) if quantity is quantities.log_normalizer else found
            case quantities.member_class_log_probabilities | quantities.class_log_probabilities:
                logits = self.logits(features, num_samples, classes).astype(np.float64)
                found = np.stack([special.log_expit(logits), special.log_expit(-logits)], axis=2)
                if quantity is quantities.class_log_probabilities:
                    found = special.logsumexp(found, axis=1) - np.log(found.shape[1])
            case _:
                found = special.log_softmax(self.logits(features, num_samples, classes).astype(np.float64), axis=2)
                if quantity is quantities.log_probabilities:
                    found = special.logsumexp(found, axis=1) - np.log(found.shape[1])
        return np.asarray(found, np.float32)


def with_text(model: FakeModel, **changes: Any) -> FakeModel:
    """Returns the model with another way to embed texts."""
    assert model.text is not None
    return dataclasses.replace(model, text=dataclasses.replace(model.text, **changes))
