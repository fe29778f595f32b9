"""What `Model.classify` returns: the probabilities of an image or of several, with their spread over noise."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from jaxtyping import Float

from lit_het.calibrations import Calibration
from lit_het.errors import UserError, pluralize
from lit_het.eval.answers import Answer, NoiseRank, axis_end
from lit_het.models.candidates import Candidates
from lit_het.models.drawing import Drawing

if TYPE_CHECKING:
    import pandas

_NUM_IMAGES = 20  # in a table of several


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Classification(Mapping[str, float]):
    """The prediction for one image: a mapping from labels to probabilities, the most probable label first.

    Attributes:
        image: path or address of the image, or ``image N``, where N counts from 0.
        labels: the labels, in the order that was given.
        probability: of each label without noise, calibrated if the model is.
        raw_probability: the same as trained.
        pair_probability: the probability that each label fits the image, independent of the others, as trained with a
            sigmoid loss; None of other models.
        noisy_mean: mean probability of each label over noise samples, or in closed form; None without noise.
        band: 5 % and 95 % quantiles of each probability over noise samples; None without two samples.
        num_samples: S, the number of noise samples; 0 without noise, and for a closed form.
        noise_norm: ``sqrt(tr Σ(x))``; 0 for a deterministic head.
        mutual_information: of the label and the member of an ensemble, in nats, as trained: what the members do not
            agree on, beside their noise; None of a model with one member.
        noise_ranks: how many images of each set that the run was evaluated on have a smaller noise norm.
        prediction_set: labels of the prediction set, the most probable first; None without ``coverage``.
        coverage: the probability that the set has the right label; None where it is not promised, as the run was
            calibrated among other labels.
        calibration: how probabilities were calibrated; None as trained.
        new_labels: the labels that training captions did not have; None if that is unknown.
        remarks: what is to be said of the labels, in words.
    """

    image: str
    labels: tuple[str, ...]
    probability: Float[np.ndarray, " k"]
    raw_probability: Float[np.ndarray, " k"]
    pair_probability: Float[np.ndarray, " k"] | None
    noisy_mean: Float[np.ndarray, " k"] | None
    band: Float[np.ndarray, "2 k"] | None
    num_samples: int
    noise_norm: float
    mutual_information: float | None
    noise_ranks: tuple[NoiseRank, ...]
    prediction_set: tuple[str, ...] | None
    coverage: float | None
    calibration: Calibration | None
    new_labels: tuple[str, ...] | None = None
    remarks: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The most probable label."""
        return self.labels[self.order[0]]

    @property
    def order(self) -> list[int]:
        """The indices of the labels by descending probability."""
        return np.argsort(-self.probability, kind="stable").tolist()

    @property
    def _of_members(self) -> dict[str, float]:
        """The mutual information by its name, where there are members."""
        return {} if self.mutual_information is None else {"mutual_information": self.mutual_information}

    def __getitem__(self, label: str) -> float:
        if label not in self.labels:
            raise KeyError(label)
        return float(self.probability[self.labels.index(label)])

    def __iter__(self) -> Iterator[str]:
        return (self.labels[place] for place in self.order)

    def __len__(self) -> int:
        return len(self.labels)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for JSON, as ``lit-het classify --json`` prints them."""
        low, high = (None, None) if self.band is None else self.band

        def at(values: np.ndarray | None, place: int) -> float | None:
            return None if values is None else float(values[place])

        return {
            "image": self.image,
            "noise_norm": self.noise_norm,
            **self._of_members,
            "noise_above": {rank.name: rank.fraction_below for rank in self.noise_ranks},
            "samples": self.num_samples,
            "prediction_set": None if self.prediction_set is None else list(self.prediction_set),
            "coverage": self.coverage,
            "calibrated": self.calibration is not None,
            "labels": [
                {
                    "label": self.labels[place],
                    "in_training": None if self.new_labels is None else self.labels[place] not in self.new_labels,
                    "probability": at(self.probability, place),
                    "pair_probability": at(self.pair_probability, place),
                    "raw_probability": at(self.raw_probability, place),
                    "noisy_mean": at(self.noisy_mean, place),
                    "noisy_5_percent": at(low, place),
                    "noisy_95_percent": at(high, place),
                }
                for place in self.order
            ],
        }

    def to_numpy(self) -> Float[np.ndarray, " k"]:
        """Returns the probability of each label, in the order of ``labels``."""
        return self.probability

    def to_pandas(self) -> "pandas.DataFrame":
        """Returns a table with a row for each label, the most probable first.

        Its columns are image, label, probability, pair_probability, raw_probability, noisy_mean, noisy_5_percent,
        noisy_95_percent, noise_norm, with several members mutual_information, and in_prediction_set.

        Raises:
            UserError: pandas is not installed.
        """
        return _frame([self])

    def drawing(self, top: int = 10) -> Drawing:
        """Returns a table of the ``top`` most probable labels, and what is to be said about them."""
        order, band = self.order, np.zeros((2, len(self)), np.float32) if self.band is None else self.band
        bars = [(float(self.probability[i]), float(band[0, i]), float(band[1, i])) for i in order[:top]]
        rest = order[top:]
        others = [f"and {len(rest):,} other labels with {self.probability[rest].sum():.1%}"] if rest else []
        if self.pair_probability is not None:
            others.append("fits: the sigmoid of each label alone, as trained; the other columns compare the labels")
        sets = [] if self.prediction_set is None else [describe_set(self.prediction_set, self.coverage, top)]
        return Drawing(
            self.image,
            ("label", *_header(self)),
            [(self.labels[place], *_cells(self, place)) for place in order[:top]],
            (*others, str(self.calibration or "not calibrated"), *self.remarks, *sets, *self._noise()),
            bars,
            axis_end(max(map(max, bars))),
        )

    def _noise(self) -> Iterator[str]:
        """Yields what members do not agree on, the noise norm with its rank in evaluated sets, and what the band is."""
        if self.mutual_information is not None:
            yield describe_information(self.mutual_information)
        if not self.noise_norm:
            yield "no noise: the head is deterministic for images"
            return
        yield ", ".join((f"noise norm {self.noise_norm:.3f}", *map(str, self.noise_ranks)))
        if self.band is not None:
            yield f"▒ holds 90 % of {self.num_samples} noise samples"
        elif self.noisy_mean is not None and not self.num_samples:
            yield "the mean is a closed form: there are no noise samples, and no band"

    def __repr__(self) -> str:
        return self.drawing().text()

    def _repr_html_(self) -> str:
        return self.drawing().html()


class Classifications(Sequence[Classification]):
    """The predictions for several images, in their order: a sequence of `Classification`."""

    def __init__(self, found: Sequence[Classification]):
        self._found = tuple(found)

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels, in the order that was given."""
        return self._found[0].labels if self._found else ()

    @overload
    def __getitem__(self, index: int) -> Classification: ...

    @overload
    def __getitem__(self, index: slice) -> "Classifications": ...

    def __getitem__(self, index: int | slice) -> "Classification | Classifications":
        return Classifications(self._found[index]) if isinstance(index, slice) else self._found[index]

    def __len__(self) -> int:
        return len(self._found)

    def to_numpy(self) -> Float[np.ndarray, "n k"]:
        """Returns the probability of each label, in the order of ``labels``, in a row for each image."""
        return np.array([found.probability for found in self], np.float32).reshape(len(self), len(self.labels))

    def to_pandas(self) -> "pandas.DataFrame":
        """Returns the tables of all images, one below the other, see `Classification.to_pandas`.

        Raises:
            UserError: pandas is not installed.
        """
        return _frame(self)

    def drawing(self) -> Drawing:
        """Returns a table with the most probable label of each of the first images."""
        first, shown = self[0], self[:_NUM_IMAGES]
        others = [f"and {len(self) - len(shown):,} other images"] if len(self) > len(shown) else []
        return Drawing(
            f"{pluralize(len(self), 'image')}, {pluralize(len(self.labels), 'label')}",
            ("image", "label", *_header(first), "noise norm"),
            [(one.image, one.label, *_cells(one, one.order[0]), f"{one.noise_norm:.3f}") for one in shown],
            (*others, str(first.calibration or "not calibrated"), *first.remarks),
        )

    def __repr__(self) -> str:
        return self.drawing().text() if self else "no images"

    def _repr_html_(self) -> str:
        return self.drawing().html() if self else "no images"


def classification(
    image: str, answer: Answer, among: Candidates, ranks: Sequence[NoiseRank], calibration: Calibration | None
) -> Classification:
    """Returns the prediction for an image with all that belongs to it; the noise samples are reduced to their band."""
    inside = None if among.threshold is None else answer.prediction_set(among.threshold)
    return Classification(
        image=image,
        labels=among.labels,
        probability=answer.probability,
        raw_probability=answer.probability if answer.raw is None else answer.raw,
        pair_probability=answer.pair,
        noisy_mean=answer.noisy,
        band=answer.band,
        num_samples=0 if answer.samples is None else len(answer.samples),
        noise_norm=answer.noise_norm,
        mutual_information=answer.mutual_information,
        noise_ranks=tuple(ranks),
        prediction_set=None if inside is None else tuple(among.labels[place] for place in inside),
        coverage=among.coverage,
        calibration=calibration,
        new_labels=among.new,
        remarks=tuple(filter(None, [among.new_in_words])),
    )


def describe_information(information: float) -> str:
    """Returns the mutual information of the label and the member in one line."""
    return f"members disagree by {information:.4f} nats: the mutual information of label and member"


def describe_set(inside: Sequence[str], coverage: float | None, top: int) -> str:
    """Returns a prediction set in one line, with its ``top`` most probable labels."""
    rest = f" and {len(inside) - top:,} more" if len(inside) > top else ""
    shown = f"{', '.join(inside[:top])}{rest}"
    if coverage is None:
        return f"prediction set: {shown}. No coverage is promised: the run was calibrated among other labels"
    return f"prediction set of {100 * coverage:g} % coverage: {shown}"


def _header(found: Classification) -> tuple[str, ...]:
    alone = () if found.pair_probability is None else ("fits",)
    mean = () if found.noisy_mean is None else ("mean",)
    return (*alone, "no noise", *mean) if found.band is None else (*alone, "no noise", *mean, "5–95 %")


def _cells(found: Classification, place: int) -> tuple[str, ...]:
    alone = () if found.pair_probability is None else (f"{found.pair_probability[place]:.1%}",)
    mean = () if found.noisy_mean is None else (f"{found.noisy_mean[place]:.1%}",)
    cells = (*alone, f"{found.probability[place]:.1%}", *mean)
    if found.band is None:
        return cells
    low, high = found.band[:, place]
    return *cells, f"{low:.1%} – {high:.1%}"


def _frame(results: Sequence[Classification]) -> "pandas.DataFrame":
    try:
        import pandas
    except ImportError as error:
        raise UserError(
            "to_pandas() needs pandas, which is not installed: pip install pandas, or the extra `pandas`"
        ) from error
    rows = []
    for found in results:
        inside = found.prediction_set
        for row in found.to_dict()["labels"]:
            in_set = {"in_prediction_set": None if inside is None else row["label"] in inside}
            rows.append({"image": found.image, **row, "noise_norm": found.noise_norm, **found._of_members, **in_set})
    return pandas.DataFrame(rows)
