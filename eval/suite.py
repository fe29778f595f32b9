"""The configuration of every evaluation, and all evaluations by the name of their command.

A configuration file may name any of them, and training runs few, so each evaluator is imported in `build`.
"""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from lit_het.data_pipelines.texts.captions_config import SET_PROMPTS
from lit_het.errors import FieldError, UserError, require_at_least
from lit_het.eval.decoder_suite import AnswerQuestionsConfig, WriteCaptionsConfig
from lit_het.eval.fits import FewShotOptions, LinearProbeOptions
from lit_het.eval.options import EvaluationOptions
from lit_het.eval.sets import ImageSet, require_one_label, require_other_split

if TYPE_CHECKING:
    from lit_het.eval.evaluators.among_captions import AmongCaptions
    from lit_het.eval.evaluators.ensemble import Ensemble
    from lit_het.eval.evaluators.frozen import FewShot, Probe
    from lit_het.eval.evaluators.out_of_distribution import OutOfDistribution
    from lit_het.eval.evaluators.panoptic import Panoptic
    from lit_het.eval.evaluators.retrieval import Retrieval
    from lit_het.eval.evaluators.shift import Shift
    from lit_het.eval.evaluators.zero_shot import ZeroShot
    from lit_het.eval.sets.open_sets import OpenSet, Sets
    from lit_het.eval.sets.recognition import Recognition


@dataclasses.dataclass(frozen=True)
class ClassNamesConfig:
    """Candidate class names and prompts.

    Attributes:
        prompts: templates around each name: ``set`` uses the set's own templates, or bare names where it has none; a
            family of `lit_het.data_pipelines.texts.prompts.FAMILIES`; or a file of templates, one per line, with
            ``{c}`` for the name.
        candidates: a file of candidate names, one per line, or ``imagenet`` for OpenAI's names of its 1,000 classes;
            None uses the set's class names. For a classifier, they are the names of its classes.
        classes: a JSON file that maps each class name of the set to the candidate, or the list of candidates, that
            count as this class, by name or by number (from 0). Other candidates are then excluded. None matches
            candidates by name. Without ``candidates`` and ``classes``, the set's own files ``candidates.txt`` and
            ``classes.json`` say how classifiers of more classes are evaluated, such as ImageNet's on ImageNet-R.
        certain_prompts: of each name only so many prompts of the least variance are kept (ProLIP); None for all. For
            Gaussian embeddings.
    """

    prompts: str = SET_PROMPTS
    candidates: Path | None = None
    classes: Path | None = None
    certain_prompts: int | None = None

    def __post_init__(self) -> None:
        if self.certain_prompts is not None:
            require_at_least(1, self, "certain_prompts")

    def require_fit(self, data: ImageSet) -> None:
        """Checks that candidates suit the labels of a set."""
        if data.has_several_labels and self.candidates and not self.classes:
            raise UserError(
                "with several labels per image, --candidates need --classes FILE; leave both out to predict among the "
                "set's own class names"
            )

    def build(self, opened: "OpenSet") -> "Recognition":
        """Reads the class names and the templates."""
        from lit_het.data_pipelines.texts.openai_clip import imagenet_names
        from lit_het.data_pipelines.texts.prompts import BARE_TEMPLATE, check_templates, read_candidates, read_prompts
        from lit_het.eval.sets.recognition import Recognition, read_classes, read_larger

        templates = opened.templates or BARE_TEMPLATE if self.prompts == SET_PROMPTS else read_prompts(self.prompts)
        check_templates(templates, f"set {opened.config.name}")
        labels = opened.class_names
        names = labels if self.candidates is None else read_candidates(self.candidates)
        groups = None if self.classes is None else read_classes(str(self.classes), labels, names)
        larger = read_larger(opened.config.directory, labels) if self.candidates is None and groups is None else None
        if groups is None and names is imagenet_names() and len(labels) == len(names):
            labels = names  # the same classes by other names, in the usual order
        return Recognition(names, templates, labels, groups, self.certain_prompts, larger)


@dataclasses.dataclass(frozen=True)
class ZeroShotConfig(EvaluationOptions):
    """Zero-shot classification of a set in clip_benchmark's layout.

    A classifier is evaluated in the same way, on the classes that it was trained on.

    Attributes:
        data: the set.
        names: candidate class names.
        samples: S, the number of noise samples per image. Probabilities averaged over them are reported in addition to
            the prediction without noise, which the paper uses for image-text models (HET-XL App. A.2, M); for
            classifiers it uses S = 1000.
        relabels: a JSON list with the acceptable classes of each image, in the order of the samples' keys, such as
            ImageNet's ReaL labels, ``real.json``.
        captions: the member with the captions of images, as in `RetrievalConfig`, whose distinct captions are then the
            classes, of several the first, as for ``lit-het calibrate``; the set needs no class names.
    """

    data: ImageSet
    names: ClassNamesConfig = ClassNamesConfig()
    samples: int = 0
    relabels: Path | None = None
    captions: str | None = None

    main_figure = "top1"

    @property
    def classes_are_captions(self) -> bool:
        """Whether the captions of the images are the candidate classes."""
        return self.captions is not None

    def __post_init__(self) -> None:
        require_at_least(0, self, "samples")
        if self.data.has_several_labels and self.relabels:
            raise UserError(
                "--relabels is for images with one label; leave it out, or --multi-label or --caption-words"
            )
        self.names.require_fit(self.data)
        if self.captions and (self.names != ClassNamesConfig() or self.relabels or self.data.has_several_labels):
            raise UserError("--captions are the classes and the labels; leave out the flags of class names and labels")

    def build(self, sets: "Sets") -> "ZeroShot | AmongCaptions":
        """Opens the set, and reads class names and templates, or captions."""
        from lit_het.eval.evaluators.zero_shot import ZeroShot, read_relabels

        if self.captions is not None:
            from lit_het.eval.evaluators.among_captions import AmongCaptions
            from lit_het.eval.evaluators.retrieval import read_captions

            opened = sets.open(dataclasses.replace(self.data, labelled=False), self.captions)
            return AmongCaptions(opened, read_captions(opened, self.captions), self.samples)
        opened = sets.open(self.data)
        relabels = None if self.relabels is None else read_relabels(self.relabels, opened)
        recognition = self.names.build(opened)
        recognition.check_labels(opened)
        soft_labels = None if self.data.multi_label else opened.soft_labels()
        if soft_labels is not None:
            soft_labels = recognition.matched_soft_labels(soft_labels)
        return ZeroShot(opened, recognition, self.samples, relabels, soft_labels)


@dataclasses.dataclass(frozen=True)
class RetrievalConfig(EvaluationOptions):
    """Retrieval in both directions.

    Attributes:
        data: the set; class names are not needed.
        captions: the member with the captions of an image: text with one caption per line, or ``json/FIELD`` with a
            list of captions.
    """

    data: ImageSet
    captions: str = "txt"

    main_figure = "image_to_text_recall1"

    def build(self, sets: "Sets") -> "Retrieval":
        """Opens the set and reads all captions."""
        from lit_het.eval.evaluators.retrieval import Retrieval, read_captions

        opened = sets.open(dataclasses.replace(self.data, labelled=False), self.captions)
        return Retrieval(opened, read_captions(opened, self.captions))


@dataclasses.dataclass(frozen=True)
class PanopticConfig(EvaluationOptions):
    """Panoptic segmentation, scored as by COCO (Kirillov et al. 2019; SoViT Sec. 5.4).

    Attributes:
        data: the set; class names are not needed, but masks and their categories.
        shown: images on the page of a report, evenly spread over the set.
    """

    data: ImageSet
    shown: int = 24

    main_figure = "pq"

    def __post_init__(self) -> None:
        require_at_least(1, self, "shown")

    def build(self, sets: "Sets") -> "Panoptic":
        """Opens the set and reads the categories."""
        from lit_het.data_pipelines.masks import read_categories_beside
        from lit_het.eval.evaluators.panoptic import Panoptic

        if sets.preprocessing.fit != "squash" or sets.preprocessing.patches is not None:
            raise UserError("masks are predicted of whole images: train with --data.preprocessing.fit squash")
        opened = sets.open(dataclasses.replace(self.data, labelled=False))
        addresses = [summary.address for summary in opened.loader.index.summaries]
        return Panoptic(opened, read_categories_beside(addresses), self.shown)


@dataclasses.dataclass(frozen=True)
class FewShotConfig(EvaluationOptions):
    """Few-shot classification of a set by ridge regression on frozen features (e3 App. A.5, HET-XL App. O).

    Attributes:
        data: the set to classify.
        train_split: the folder of shards with the training images.
        fit: options of the fits.
    """

    data: ImageSet
    train_split: str = "train"
    fit: FewShotOptions = FewShotOptions()

    has_means = True

    def build(self, sets: "Sets") -> "FewShot":
        """Opens both splits; raises as `OpenSet`."""
        from lit_het.eval.evaluators.frozen import FewShot, open_splits

        return FewShot(*open_splits(self.data, self.train_split, sets), self.fit)


@dataclasses.dataclass(frozen=True)
class LinearProbeConfig(EvaluationOptions):
    """A linear classifier trained on the frozen features of a whole split (SoViT App. E.2, Tables 2 and 9).

    Attributes:
        data: the set to classify.
        train_split: the folder of shards to train on.
        fit: the grid of settings.
        relabels: the acceptable classes of each image, as in `ZeroShotConfig`.
        others: further test sets of the same classes or of some of them, such as ImageNet-v2, -R and -A and ObjectNet,
            ``NAME=FOLDER`` or ``FOLDER``.
    """

    data: ImageSet
    train_split: str = "train"
    fit: LinearProbeOptions = LinearProbeOptions()
    relabels: Path | None = None
    others: tuple[str, ...] = ()

    def build(self, sets: "Sets") -> "Probe":
        """Opens all splits; raises as `OpenSet`."""
        from lit_het.eval.evaluators.frozen import Probe, open_others, open_splits
        from lit_het.eval.evaluators.zero_shot import read_relabels

        train, test = open_splits(self.data, self.train_split, sets)
        relabels = None if self.relabels is None else read_relabels(self.relabels, test)
        return Probe(train, test, self.fit, relabels, open_others(self.others, train, test, sets))


@dataclasses.dataclass(frozen=True)
class ShiftConfig(EvaluationOptions):
    """Classification of a set and of its corrupted copies (Hendrycks & Dietterich 2019; e3 Sec. 5).

    Attributes:
        data: the clean set.
        corrupted: a folder written by ``lit-het data corrupt``, or any folder with shards in folders
            ``<corruption>/<severity>``; a path or a URL. None means the folder ``corrupted`` beside the clean split.
        names: candidate class names.
        samples: S, the number of noise samples per image; 0 disables the noise.
    """

    data: ImageSet
    corrupted: str | None = None
    names: ClassNamesConfig = ClassNamesConfig()
    samples: int = 0

    def __post_init__(self) -> None:
        require_at_least(0, self, "samples")

    def build(self, sets: "Sets") -> "Shift":
        """Opens the clean set and all corrupted ones."""
        from lit_het.eval.evaluators.shift import Shift, open_copies

        require_one_label(self.data)
        folder = self.corrupted or f"{self.data.directory}/corrupted"
        clean = sets.open(self.data)
        copies = open_copies(folder, clean, sets)
        recognition = self.names.build(clean)
        recognition.check_labels(clean)
        return Shift(clean, copies, recognition, self.samples)


@dataclasses.dataclass(frozen=True)
class OutOfDistributionConfig(EvaluationOptions):
    """Detection of images without a class of the set (e3 Sec. 5, App. L.5).

    Attributes:
        data: the in-distribution set.
        near: out-of-distribution sets of similar images, ``NAME=FOLDER`` or ``FOLDER`` with shards.
        far: out-of-distribution sets of dissimilar images.
        train_split: the folder of shards to fit Mahalanobis distances to; None leaves these scores out.
        names: candidate class names.
        samples: S, the number of noise samples per image, whose mutual information is a score; 0 disables the noise.
    """

    data: ImageSet
    near: tuple[str, ...] = ()
    far: tuple[str, ...] = ()
    train_split: str | None = None
    names: ClassNamesConfig = ClassNamesConfig()
    samples: int = 0

    def __post_init__(self) -> None:
        require_at_least(0, self, "samples")

    def build(self, sets: "Sets") -> "OutOfDistribution":
        """Opens all sets."""
        from lit_het.eval.evaluators.out_of_distribution import OutOfDistribution, open_outside

        require_one_label(self.data)
        if not self.near + self.far:
            raise UserError("give out-of-distribution sets with --near NAME=DIR or --far NAME=DIR")
        outside = open_outside({"near": self.near, "far": self.far}, self.data, sets)
        inside = sets.open(self.data)
        train = None
        if self.train_split is not None:
            require_other_split(self.data, self.train_split)
            train = sets.open(
                dataclasses.replace(self.data, name=f"{self.data.name} ({self.train_split})", split=self.train_split)
            )
        return OutOfDistribution(inside, outside, train, self.names.build(inside), self.samples)


@dataclasses.dataclass(frozen=True)
class EnsembleConfig(EvaluationOptions):
    """Joint and individual metrics of an ensemble, and the diversity of its members (e3 Sec. 2.2, App. I).

    Attributes:
        data: the set.
        names: candidate class names.
        samples: S, the number of noise samples per image; each sample is a member. 0 disables the noise: members are
            then e3 members or models.
        weights: of the models in the joint prediction, in their order, such as those of `select_members`; without any,
            each model has the weight of its number of members.
    """

    data: ImageSet
    names: ClassNamesConfig = ClassNamesConfig()
    samples: int = 0
    weights: tuple[int, ...] = ()

    takes_several_models = True

    def __post_init__(self) -> None:
        require_at_least(0, self, "samples")
        self.names.require_fit(self.data)
        if any(weight < 1 for weight in self.weights):
            raise FieldError(self, "weights", f"{self.weights} must be whole numbers of at least 1")
        if self.weights and self.data.has_several_labels:
            raise FieldError(self, "weights", "are for images with one label; leave them out")

    def build(self, sets: "Sets") -> "Ensemble":
        """Opens the set."""
        from lit_het.eval.evaluators.ensemble import Ensemble

        opened = sets.open(self.data)
        recognition = self.names.build(opened)
        recognition.check_labels(opened)
        return Ensemble(opened, recognition, self.samples, self.weights)


EvaluationConfig: TypeAlias = (
    ZeroShotConfig
    | RetrievalConfig
    | PanopticConfig
    | FewShotConfig
    | LinearProbeConfig
    | ShiftConfig
    | OutOfDistributionConfig
    | EnsembleConfig
    | WriteCaptionsConfig
    | AnswerQuestionsConfig
)

EVALUATIONS: dict[str, type[EvaluationConfig]] = {
    "zero-shot": ZeroShotConfig,
    "retrieval": RetrievalConfig,
    "few-shot": FewShotConfig,
    "linear-probe": LinearProbeConfig,
    "shift": ShiftConfig,
    "out-of-distribution": OutOfDistributionConfig,
    "ensemble": EnsembleConfig,
    "panoptic": PanopticConfig,
    "captioning": WriteCaptionsConfig,
    "question-answering": AnswerQuestionsConfig,
}

UNLABELLED = ("retrieval", "panoptic", "captioning", "question-answering")
"""Those of images without classes."""
