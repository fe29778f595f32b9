"""Names and formats of figures, their parts, and evaluations."""

import dataclasses
import math
import re
from collections.abc import Mapping

from lit_het.eval.metrics.significance import Estimate

SIGNIFICANTLY = "by more than two standard errors of the difference"
"""What `FigureStyle.compared` calls better, in words."""


@dataclasses.dataclass(frozen=True)
class FigureStyle:
    """The name and format of a figure.

    Attributes:
        label: name in reports.
        format: of its values.
        higher_is_better: False if lower is better; None if neither is.
    """

    label: str
    format: str
    higher_is_better: bool | None

    def shown(self, value: float, error: float = math.nan) -> str:
        """Returns the formatted value, with its standard error unless that is NaN."""
        text = self.format.format(value)
        return text if math.isnan(error) else f"{text} ± {self.format.format(error).removesuffix('%')}"

    def compared(self, one: Estimate, other: Estimate) -> int:
        """Returns 1 if one value is significantly better than another one, -1 if it is worse, and otherwise 0.

        Significant: their difference has more than two standard errors, and they print differently. A value without
        standard error (NaN), and one that is neither better high nor low, is never better.
        """
        difference = one.mean - other.mean
        # Comparisons with NaN are false.
        is_significant = abs(difference) > 2 * math.hypot(one.error, other.error)
        if self.higher_is_better is None or not is_significant or self.shown(one.mean) == self.shown(other.mean):
            return 0
        return 1 if (difference > 0) == self.higher_is_better else -1


# In the order of tables.
STYLES: Mapping[str, FigureStyle] = {
    "top1": FigureStyle("top-1 accuracy", "{:.1%}", higher_is_better=True),
    "top5": FigureStyle("top-5 accuracy", "{:.1%}", higher_is_better=True),
    "raw_top1": FigureStyle("top-1 accuracy as trained", "{:.1%}", higher_is_better=True),
    "seen_top1": FigureStyle("top-1 accuracy, names of training", "{:.1%}", higher_is_better=True),
    "new_top1": FigureStyle("top-1 accuracy, new names", "{:.1%}", higher_is_better=True),
    "harmonic_top1": FigureStyle("harmonic mean of these two", "{:.1%}", higher_is_better=True),
    "ausuc": FigureStyle("area of names of training against new ones", "{:.3f}", higher_is_better=True),
    "relabelled_top1": FigureStyle("top-1 accuracy, reassessed labels", "{:.1%}", higher_is_better=True),
    "mean_reciprocal_rank": FigureStyle("mean reciprocal rank", "{:.3f}", higher_is_better=True),
    "mean_class_recall": FigureStyle("mean recall of classes", "{:.1%}", higher_is_better=True),
    "mean_average_precision": FigureStyle("mean average precision", "{:.1%}", higher_is_better=True),
    "precision_at_1": FigureStyle("images whose top class is a label (Prec@1)", "{:.1%}", higher_is_better=True),
    "pq": FigureStyle("panoptic quality (PQ)", "{:.1%}", higher_is_better=True),
    "sq": FigureStyle("segmentation quality (SQ)", "{:.1%}", higher_is_better=True),
    "rq": FigureStyle("recognition quality (RQ)", "{:.1%}", higher_is_better=True),
    "num_classes": FigureStyle("classes of the truth or predicted", "{:.0f}", higher_is_better=None),
    "exact_match": FigureStyle("exact match", "{:.1%}", higher_is_better=True),
    "cider": FigureStyle("CIDEr-D", "{:.1f}", higher_is_better=True),
    "bleu4": FigureStyle("BLEU-4", "{:.3f}", higher_is_better=True),
    "rouge_l": FigureStyle("ROUGE-L", "{:.3f}", higher_is_better=True),
    "vqa_accuracy": FigureStyle("VQA accuracy", "{:.1%}", higher_is_better=True),
    "anls": FigureStyle("ANLS", "{:.3f}", higher_is_better=True),
    "log_perplexity": FigureStyle("log-perplexity, nats per token", "{:.3f}", higher_is_better=False),
    "perplexity": FigureStyle("perplexity", "{:.3f}", higher_is_better=False),
    "token_top1": FigureStyle("top-1 accuracy of tokens", "{:.1%}", higher_is_better=True),
    "token_ece": FigureStyle("calibration error of tokens", "{:.1%}", higher_is_better=False),
    "nll": FigureStyle("negative log-likelihood, nats", "{:.3f}", higher_is_better=False),
    "soft_nll": FigureStyle("NLL of human label distributions, nats", "{:.3f}", higher_is_better=False),
    "brier": FigureStyle("Brier score", "{:.3f}", higher_is_better=False),
    "ece": FigureStyle("calibration error (ECE)", "{:.1%}", higher_is_better=False),
    "ece_equal_mass": FigureStyle("calibration error, bins of equal mass", "{:.1%}", higher_is_better=False),
    "binary_nll": FigureStyle("NLL of a class, nats", "{:.4f}", higher_is_better=False),
    "sigmoid_nll": FigureStyle("sigmoid loss, summed over classes, nats", "{:.3f}", higher_is_better=False),
    "binary_brier": FigureStyle("Brier score of a class", "{:.4f}", higher_is_better=False),
    "classwise_ece": FigureStyle("calibration error of a class", "{:.2%}", higher_is_better=False),
    "aurc": FigureStyle("area under risk-coverage curve (AURC)", "{:.3f}", higher_is_better=False),
    "excess_aurc": FigureStyle("AURC above the best order's", "{:.3f}", higher_is_better=False),
    "coverage90": FigureStyle("coverage of 90 % prediction sets", "{:.1%}", higher_is_better=None),
    "set_size90": FigureStyle("classes in a 90 % prediction set", "{:.2f}", higher_is_better=False),
    "calibrated_nll": FigureStyle("NLL, clean set's temperature", "{:.3f}", higher_is_better=False),
    "calibrated_ece": FigureStyle("ECE, clean set's temperature", "{:.1%}", higher_is_better=False),
    "temperature_factor": FigureStyle("fitted temperature / the model's", "{:.3f}", higher_is_better=None),
    "recall1": FigureStyle("recall@1", "{:.1%}", higher_is_better=True),
    "recall5": FigureStyle("recall@5", "{:.1%}", higher_is_better=True),
    "recall10": FigureStyle("recall@10", "{:.1%}", higher_is_better=True),
    "median_rank": FigureStyle("median rank", "{:.1f}", higher_is_better=False),
    "auroc": FigureStyle("AUROC", "{:.3f}", higher_is_better=True),
    "aupr_out": FigureStyle("AUPR, out-of-distribution as positives", "{:.3f}", higher_is_better=True),
    "aupr_in": FigureStyle("AUPR, in-distribution as positives", "{:.3f}", higher_is_better=True),
    "fpr95": FigureStyle("FPR at 95 % TPR", "{:.1%}", higher_is_better=False),
    "kl": FigureStyle("divergence between members (KL), nats", "{:.3f}", higher_is_better=None),
    "disagreement": FigureStyle("disagreement of two members", "{:.1%}", higher_is_better=None),
    "normalized_disagreement": FigureStyle("disagreement / error rate", "{:.3f}", higher_is_better=None),
    "cosine_similarity": FigureStyle("cosine similarity of members", "{:.3f}", higher_is_better=None),
    "total_entropy": FigureStyle("entropy of the mean prediction, nats", "{:.3f}", higher_is_better=None),
    "mean_entropy": FigureStyle("mean entropy (aleatoric), nats", "{:.3f}", higher_is_better=None),
    "kernel_alignment": FigureStyle(
        "cosine of the angle between noise and kernel (HET)", "{:.3f}", higher_is_better=None
    ),
    "mutual_information": FigureStyle("mutual information (epistemic), nats", "{:.3f}", higher_is_better=None),
    "mutual_information_of_members": FigureStyle(
        "the same of members without their noise", "{:.3f}", higher_is_better=None
    ),
}

# In the order of a report.
KINDS: Mapping[str, str] = {
    "zero_shot": "Zero-shot",
    "supervised": "Classification",
    "retrieval": "Retrieval",
    "panoptic": "Panoptic segmentation",
    "captioning": "Captioning",
    "question_answering": "Question answering",
    "few_shot": "Few-shot",
    "linear_probe": "Linear probe",
    "shift": "Corrupted images",
    "out_of_distribution": "Out of distribution",
    "ensemble": "Ensemble",
    "deep_ensemble": "Deep ensemble",
}

# The parts without a name: predictions as trained, or with the temperature of `lit-het calibrate`.
PLAIN, PLAIN_CALIBRATED = "as trained", "calibrated beforehand"

# Of kinds whose parts are of some of the classes.
WHOLES = {"panoptic": "all classes"}

_PARTS = {
    "calibrated": "calibrated",
    "noisy": "mean over noise samples",
    "image_to_text": "image → text",
    "text_to_image": "text → image",
    "joint": "ensemble",
    "individual": "members, mean",
    "corrupted": "all corrupted, mean",
}
_OF_MEMBERS = (
    *("kl", "disagreement", "normalized_disagreement", "cosine_similarity"),
    *("total_entropy", "mean_entropy", "mutual_information", "mutual_information_of_members"),
)
_OF_RANKS = ("top1", "top5", "mean_reciprocal_rank", "mean_class_recall")
_PREFIXED = re.compile(r"(image_to_text|text_to_image|joint|individual)_(\w+)")


def split(path: str) -> tuple[str, str]:
    """Splits the path of a figure into part (or an empty string) and figure."""
    if path in _OF_MEMBERS:
        return "individual", path
    prefixed = _PREFIXED.fullmatch(path)
    if prefixed:
        return prefixed[1], prefixed[2]
    part, _, figure = path.rpartition("/")
    return part, figure


def is_setting(path: str) -> bool:
    """Returns whether a path is a selected setting, such as the learning rate of a linear probe, and not a figure."""
    return path.startswith("best/")


def is_of_member(path: str) -> bool:
    """Returns whether a figure is of one ensemble member; members of different runs do not correspond."""
    return path.startswith("member_")


def is_rank_of_calibrated(path: str) -> bool:
    """Returns whether a figure is a rank of calibrated predictions, which a temperature does not change."""
    part, figure = split(path)
    return part == "calibrated" and figure in _OF_RANKS


def is_reserved(part: str) -> bool:
    """Returns whether a part has a meaning of its own, so that no set among the parts can have its name."""
    return part in ("best", *_PARTS) or part.startswith(("member_", "severity_"))


def place_of_kind(kind: str) -> int:
    """Returns the index of a kind in the order of reports; unknown kinds come last."""
    return list(KINDS).index(kind) if kind in KINDS else len(KINDS)


def style_of(figure: str) -> FigureStyle:
    """Returns the style of a figure; unknown figures have four digits, and no better direction."""
    if figure in STYLES:
        return STYLES[figure]
    shots = re.fullmatch(r"(\d+)_shot", figure)
    if shots:
        noun = "image" if shots[1] == "1" else "images"
        return FigureStyle(f"{shots[1]} {noun} per class", "{:.1%}", higher_is_better=True)
    return FigureStyle(_spaced(figure), "{:.4g}", higher_is_better=None)


def title_of_kind(kind: str) -> str:
    """Returns the heading of a kind of evaluation."""
    return KINDS.get(kind, _spaced(kind).capitalize())


def title_of_part(part: str, plain: str = PLAIN) -> str:
    """Returns the heading of a part of an evaluation; ``plain`` is the heading of figures without part."""
    if not part:
        return plain
    if part in _PARTS:
        return _PARTS[part]
    severity = re.fullmatch(r"severity_(.+)", part)
    if severity:
        return f"severity {severity[1]}, mean"
    outside = re.fullmatch(r"(near|far)/(.+)/(\w+)", part)
    return f"{outside[2]} ({outside[1]}): {title_of_score(outside[3])}" if outside else _spaced(part)


def title_of_score(score: str) -> str:
    """Returns the name of an out-of-distribution score."""
    return "maximum probability" if score == "max_probability" else _spaced(score)


def _spaced(name: str) -> str:
    return name.replace("_", " ")
