"""Between which names a model chooses, and how its choice is compared with the labels of a set."""

import collections
import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from lit_het import untrusted
from lit_het.console import Bar
from lit_het.data_pipelines.storage import read_lines
from lit_het.errors import UserError
from lit_het.eval.calibration import check_labels
from lit_het.eval.classes import merge_candidates
from lit_het.eval.ensembles import mean_prediction
from lit_het.eval.predictions import Predictions, Predictor, SupervisedPredictor, ZeroShotPredictor, predict
from lit_het.eval.prompts import BARE_TEMPLATE, SET_PROMPTS, check_templates, fill_template, read_prompts
from lit_het.eval.sets import Features, OpenSet
from lit_het.files import cache_folder, completed, kept_array
from lit_het.types import Encoder, EvaluatedModel, HeadOutput

# By each device: the same computation, whatever their number.
_CAPTIONS_AT_A_TIME = 64


@dataclasses.dataclass(frozen=True)
class NamesConfig:
    """Between which names a model chooses.

    Attributes:
        prompts: around each name: ``set`` takes the set's own templates, or the bare names where it has none; a family
            of `lit_het.eval.prompts.FAMILIES`; or a file with templates, one a line, with ``{c}`` for the name.
        candidates: a file of names to choose from, one a line; None means the set's class names. For a classifier they
            are the names of its classes.
        classes: a JSON object from each class name of the set to the candidate, or the list of candidates, that count
            as that class: ImageNet-R's among ImageNet's, say. Other candidates cannot be chosen then. None matches by
            name.
    """

    prompts: str = SET_PROMPTS
    candidates: Path | None = None
    classes: Path | None = None

    def build(self, opened: OpenSet) -> "Recognition":
        """Reads the names and the templates.

        Raises:
            UserError: a file that is missing or malformed, or a template without ``{c}``.
        """
        templates = opened.templates or BARE_TEMPLATE if self.prompts == SET_PROMPTS else read_prompts(self.prompts)
        check_templates(templates, f"set {opened.config.name}")
        labels = opened.class_names
        names = labels if self.candidates is None else read_lines(str(self.candidates))
        groups = None if self.classes is None else read_classes(self.classes, labels, names)
        return Recognition(names, templates, labels, groups)


@dataclasses.dataclass(frozen=True)
class Recognition:
    """The choice of a `NamesConfig`.

    Attributes:
        candidates: the names to choose from.
        templates: prompts with the placeholder ``{c}``.
        label_names: the names that the labels of the set index.
        groups: for each of these the candidates that count as it, or None to match by name.
    """

    candidates: tuple[str, ...]
    templates: tuple[str, ...]
    label_names: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...] | None = None

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes that predictions are about."""
        return self.candidates if self.groups is None else self.label_names

    @property
    def _labels_are_classes(self) -> bool:
        # Without other candidates labels are used as they are: two classes may then share a name.
        return self.groups is not None or self.candidates is self.label_names

    def check(self, model: EvaluatedModel) -> None:
        """Refuses a model that cannot choose between the names.

        Raises:
            UserError: a classifier without head or of another number of classes, a text tower without tokenizer.
        """
        if isinstance(model, Encoder):
            model.tokenize([fill_template(self.templates[0], self.candidates[0])])
        elif not model.num_classes:
            raise UserError(
                "an image tower that was imported alone has no head: few-shot and linear-probe measure its features"
            )
        elif model.num_classes != len(self.candidates):
            raise UserError(
                f"the classifier has {model.num_classes} classes and there are {len(self.candidates)} names; give "
                "the names of its classes with --candidates FILE"
            )

    def check_labels(self, opened: OpenSet) -> None:
        """Refuses a set with a class that cannot be chosen; its labels are read only where there is such a class.

        Raises:
            UserError: as `matched`.
        """
        times = collections.Counter(self.candidates)
        if not self._labels_are_classes and any(times[name] != 1 for name in self.label_names):
            positions_of_names(opened.labels(), self.label_names, self.candidates)

    def predictor(self, model: EvaluatedModel, samples: int = 0) -> Predictor:
        """Returns what chooses between the names, averaged over S noise samples; 0 leaves the noise out.

        Raises:
            UserError: as `check`.
        """
        return self.predictors(model, samples)[0]

    def predictors(self, model: EvaluatedModel, *samples: int) -> list[Predictor]:
        """Returns a `predictor` for each number of noise samples; the names are embedded once."""
        self.check(model)
        if isinstance(model, Encoder):
            embeddings = embed_names(model, self.candidates, self.templates)
            choosers: list[Predictor] = [ZeroShotPredictor(model, embeddings, count) for count in samples]
        else:
            choosers = [SupervisedPredictor(model, count) for count in samples]
        return choosers if self.groups is None else [_Grouped(chooser, self.groups) for chooser in choosers]

    def predict(self, predictor: Predictor, features: Features) -> Predictions:
        """Returns the predictions for a set, whose labels index ``label_names``, about ``class_names``."""
        return predict(predictor, self.matched(features))

    def matched(self, features: Features) -> Features:
        """Returns features with labels that index ``class_names``.

        Raises:
            UserError: the name of a label is not among the candidates.
        """
        if self._labels_are_classes:
            return features
        labels = positions_of_names(features.labels, self.label_names, self.candidates)
        return dataclasses.replace(features, labels=labels)


@dataclasses.dataclass(frozen=True)
class _Grouped:
    """A predictor whose candidates are merged into classes."""

    predictor: Predictor
    groups: tuple[tuple[int, ...], ...]

    @property
    def num_classes(self) -> int:
        return len(self.groups)

    @property
    def num_shares(self) -> int:
        return self.predictor.num_shares

    def __call__(self, blocks: Float[np.ndarray, "n b f"], seeds: Int[np.ndarray, " n"]) -> HeadOutput:
        # Each prediction is renormalised among the candidates that can be chosen, before the mean over all.
        merged = mean_prediction(self.members(blocks, seeds))
        return dataclasses.replace(self.predictor(blocks, seeds), log_probabilities=merged)

    def members(
        self, blocks: Float[np.ndarray, "n b f"], seeds: Int[np.ndarray, " n"]
    ) -> Float[np.ndarray, "rows m k"]:
        return merge_candidates(self.predictor.members(blocks, seeds), self.groups)

    def alone(self, blocks: Float[np.ndarray, "n b f"]) -> Float[np.ndarray, "rows k"]:
        of_candidates = self.predictor.alone(blocks)
        return np.stack([np.logaddexp.reduce(of_candidates[:, list(group)], axis=1) for group in self.groups], axis=1)


def embed_names(
    encoder: Encoder, names: Sequence[str], templates: Sequence[str] = BARE_TEMPLATE
) -> Float[np.ndarray, "k d"]:
    """Unit embedding of each class name: the mean over its prompts, renormalised (CLIP Sec. 3.1.4).

    Those of a text tower that does not change any more are kept in the user's cache.

    Raises:
        UserError: no names, or a template without ``{c}``.
    """
    if not names:
        raise UserError("no class names to choose from: give at least one")
    check_templates(templates)
    if not encoder.text_tower:
        return _embed_names(encoder, names, templates)
    content = json.dumps([encoder.text_tower, list(names), list(templates)])
    path = cache_folder("names") / f"{hashlib.sha256(content.encode()).hexdigest()[:32]}.npy"
    kept = kept_array(path)
    if kept is not None and kept.ndim == 2 and len(kept) == len(names) and kept.dtype == np.float32:
        return np.array(kept)
    embeddings = _embed_names(encoder, names, templates)
    with contextlib.suppress(OSError):  # a cache that cannot be written is none
        path.parent.mkdir(parents=True, exist_ok=True)
        with completed(path) as partial, partial.open("wb") as file:
            np.save(file, embeddings)
    return embeddings


def _embed_names(encoder: Encoder, names: Sequence[str], templates: Sequence[str]) -> Float[np.ndarray, "k d"]:
    captions = [fill_template(template, name) for name in names for template in templates]
    owners = np.repeat(np.arange(len(names)), len(templates))
    with Bar("embedding names", len(captions), "captions") as bar:
        embeddings = embed_texts(encoder, captions, bar.advance)
    sums = np.zeros((len(names), embeddings.shape[1]), np.float32)
    np.add.at(sums, owners, embeddings)
    norms = np.linalg.norm(sums, axis=1, keepdims=True)
    return sums / np.maximum(norms, np.finfo(np.float32).tiny)


def embed_texts(
    encoder: Encoder, texts: Sequence[str], advance: Callable[[int], object] = lambda count: None
) -> Float[np.ndarray, "n d"]:
    """Unit embedding of each text; ``advance`` is called with the texts done.

    Every call of the encoder has the same shape, so that nothing is compiled twice; a few texts make a small one, whose
    size on each device is a power of two, so that other few texts mostly find it compiled.
    """
    of_device = min(_CAPTIONS_AT_A_TIME, 1 << (len(texts) - 1).bit_length())
    size = of_device * encoder.features.num_shares
    parts = []
    for start in range(0, len(texts), size):
        chunk = list(texts[start : start + size])
        padded = chunk + chunk[-1:] * (size - len(chunk))
        parts.append(np.asarray(encoder.text(encoder.tokenize(padded)))[: len(chunk)])
        advance(len(chunk))
    return np.concatenate(parts)


def positions_of_names(
    labels: Int[np.ndarray, " n"], label_names: Sequence[str], class_names: Sequence[str]
) -> Int[np.ndarray, " n"]:
    """Labels that index ``label_names`` as indices into ``class_names``, matched by the string.

    Raises:
        UserError: a label outside ``label_names``, or whose name is missing from ``class_names`` or
            stands there twice.
    """
    check_labels(labels, len(label_names))
    position = {name: index for index, name in enumerate(class_names)}
    repeated = {name for index, name in enumerate(class_names) if position[name] != index}
    table = np.full(len(label_names), -1)
    for label in map(int, np.unique(labels)):
        name = label_names[label]
        if name not in position:
            raise UserError(
                f"class {name!r} has images but is not among the {len(class_names)} candidate names; add it "
                "to --candidates, or say with --classes FILE which of them count as it"
            )
        if name in repeated:
            raise UserError(f"class {name!r} stands twice among the candidate names; keep one")
        table[label] = position[name]
    return table[labels]


def read_classes(path: Path, labels: Sequence[str], candidates: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Reads which candidates count as each class of a set, from a JSON object of names.

    Raises:
        UserError: the file is missing or malformed, lacks a class, or names a candidate that there is not.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise UserError(f"{path}: not a JSON object from class names to candidates")
    position = {name: index for index, name in enumerate(candidates)}
    groups, used = [], []
    for label in labels:
        found = content.get(label)
        chosen = [found] if isinstance(found, str) else found
        if not isinstance(chosen, list) or not chosen or not all(isinstance(name, str) for name in chosen):
            raise UserError(f"{path}: class {label!r} has no candidates; name one or a list")
        used += chosen
        twice = [name for name in chosen if used.count(name) > 1]
        if twice:
            raise UserError(f"{path}: {twice[0]!r} (of class {label!r}) is named twice; it can count in one class only")
        unknown = [name for name in chosen if name not in position]
        if unknown:
            raise UserError(
                f"{path}: {unknown[0]!r} (of class {label!r}) is not among the {len(candidates)} candidates"
            )
        groups.append(tuple(position[name] for name in chosen))
    return tuple(groups)


def read_json(path: Path) -> object:
    """Reads a JSON file.

    Raises:
        UserError: it is missing or malformed.
    """
    try:
        return untrusted.read_json(path)
    except (OSError, untrusted.Malformed) as error:
        raise UserError(f"{path}: cannot be read as JSON: {' '.join(str(error).split())}") from error
