"""Candidate class names of a prediction, and how predictions are matched with the labels of a set."""

import collections
import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from lit_het import untrusted
from lit_het.console import Bar, message
from lit_het.data_pipelines.shards import storage, urls
from lit_het.data_pipelines.shards.storage import read_lines
from lit_het.data_pipelines.texts.prompts import (
    BARE_TEMPLATE,
    CANDIDATES_FILE,
    CLASSES_FILE,
    check_templates,
    fill_template,
)
from lit_het.errors import UserError, pluralize
from lit_het.eval.features import Features
from lit_het.eval.metrics.calibration import check_labels
from lit_het.eval.predictions import Predictions, Predictor, predict, samples_of
from lit_het.eval.sets.open_sets import OpenSet
from lit_het.files import cache_folder, cached_array, completed
from lit_het.types import EvaluatedModel, TextEncoder

# Per device: each device runs the same computation, so the number of devices changes no result.
_MAX_CAPTIONS_PER_DEVICE = 64


@dataclasses.dataclass(frozen=True)
class LargerClassifier:
    """Classifiers of more classes than a set has, such as ImageNet's 1,000, of which ImageNet-A has 200.

    Attributes:
        num_classes: of the classifiers.
        groups: for each class of the set, the classes of the classifiers that count as this class.
    """

    num_classes: int
    groups: tuple[tuple[int, ...], ...]


@dataclasses.dataclass(frozen=True)
class Recognition:
    """Classification over candidate class names; built by `ClassNamesConfig`.

    Attributes:
        candidates: the candidate names.
        templates: prompts with the placeholder ``{c}``.
        label_names: the class names that the labels of the set index.
        groups: for each label name, the candidates that count as this class; None to match by name.
        certain_prompts: how many prompts of each name are kept, those of the least variance; None for all.
        larger: classifiers of more classes that can be evaluated, too; None if there are none.
    """

    candidates: tuple[str, ...]
    templates: tuple[str, ...]
    label_names: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...] | None = None
    certain_prompts: int | None = None
    larger: LargerClassifier | None = None

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the predicted classes."""
        return self.candidates if self.groups is None else self.label_names

    @property
    def _labels_are_classes(self) -> bool:
        # With the set's own class names, labels are used as they are: two classes may share a name.
        return self.groups is not None or self.candidates is self.label_names

    def check(self, model: EvaluatedModel, samples: int = 0) -> None:
        """Checks that a model can classify over the candidates with S noise samples."""
        model.check_samples(samples)
        if self.certain_prompts is not None and (model.text is None or model.text.variances is None):
            raise UserError("--certain-prompts needs the variances of texts, which the Gaussian head has; leave it out")
        if model.text is not None:
            model.text.tokenize([fill_template(self.templates[0], self.candidates[0])])
            return
        require_head(model)
        if model.num_classes != len(self.candidates) and self._groups_of(model) is self.groups:
            several = ", or take the words of captions as labels with --caption-words"
            raise UserError(
                f"the classifier has {model.num_classes} classes and there are {len(self.candidates)} candidates; "
                "give the names of its classes with --candidates FILE" + several * model.has_class_probabilities
            )

    def has_class_probabilities(self, model: EvaluatedModel) -> bool:
        """Returns whether every predicted class has a probability of its own, which does not depend on the others."""
        # Those of a class's several candidates cannot be added: they do not exclude one another.
        return model.has_class_probabilities and self.groups is None

    def require_class_probabilities(self, model: EvaluatedModel, what: str) -> None:
        """Checks `has_class_probabilities`."""
        if not self.has_class_probabilities(model):
            raise UserError(
                f"several labels per image: {what} needs a probability of every class of its own, from a model with a "
                "sigmoid loss and without --classes; zero-shot without --samples measures mean average precision"
            )

    def check_labels(self, opened: OpenSet) -> None:
        """Checks that every class with images is among the candidates.

        Labels are read only if a class name is missing or repeated among the candidates.
        """
        times = collections.Counter(self.candidates)
        if not self._labels_are_classes and any(times[name] != 1 for name in self.label_names):
            class_indices(opened.labels(), self.label_names, self.candidates)

    def predictor(self, model: EvaluatedModel, samples: int = 0) -> Predictor:
        """Returns a predictor over the candidates, averaged over S noise samples; 0 disables the noise."""
        return self.predictors(model, samples)[0]

    def predictors(self, model: EvaluatedModel, *samples: int) -> list[Predictor]:
        """Returns a `predictor` for each number of noise samples; the class names are embedded once."""
        self.check(model)
        samples = tuple(samples_of(model, count) for count in samples)
        embeddings = None
        if model.text is not None:
            embeddings = embed_class_names(model, self.candidates, self.templates, self.certain_prompts)
        groups, seen = self._groups_of(model), seen_names(model, self.candidates, self.templates)
        if seen is not None and groups is not None:  # a class is seen if one of its candidates is
            seen = np.array([seen[list(group)].any() for group in groups])
        return [Predictor(model, len(self.class_names), embeddings, count, groups, seen) for count in samples]

    def _groups_of(self, model: EvaluatedModel) -> tuple[tuple[int, ...], ...] | None:
        """Returns the classes of a model that count as each class; None if they are the candidates."""
        larger = self.larger
        if larger is not None and model.text is None and model.num_classes == larger.num_classes:
            return larger.groups
        return self.groups

    def matched_soft_labels(self, soft_labels: Float[np.ndarray, "n k"]) -> Float[np.ndarray, "n c"]:
        """Returns distributions over ``label_names`` as distributions over ``class_names``."""
        if self._labels_are_classes:
            return soft_labels
        found = np.zeros((len(soft_labels), len(self.candidates)), soft_labels.dtype)
        found[:, class_indices(np.arange(len(self.label_names)), self.label_names, self.candidates)] = soft_labels
        return found

    def predict(self, predictor: Predictor, features: Features) -> Predictions:
        """Returns predictions over ``class_names`` for a set whose labels index ``label_names``."""
        return predict(predictor, self.matched(features))

    def matched(self, features: Features) -> Features:
        """Returns features with labels that index ``class_names``."""
        if self._labels_are_classes:
            return features
        labels = class_indices(features.labels, self.label_names, self.candidates)
        return dataclasses.replace(features, labels=labels)


def require_head(model: EvaluatedModel) -> None:
    """Raises a `UserError` for an image tower that was imported alone, a decoder or a model of masks."""
    if model.mask_classes is not None:
        raise UserError("the model predicts masks, and no classes of images: evaluate it with lit-het panoptic")
    if model.text is None and not model.num_classes:
        raise UserError(
            "an image tower that was imported alone has no head, and a decoder has no classes: evaluate "
            "features of images with few-shot or linear-probe, and texts with captioning"
        )


def seen_names(model: EvaluatedModel, names: Sequence[str], templates: Sequence[str]) -> Bool[np.ndarray, " k"] | None:
    """Returns which names training captions had; None of a classifier, or where that is unknown."""
    return None if model.text is None or model.text.knows is None else model.text.knows(names, templates)


def embed_class_names(
    model: EvaluatedModel,
    names: Sequence[str],
    templates: Sequence[str] = BARE_TEMPLATE,
    certain_prompts: int | None = None,
) -> Float[np.ndarray, "k d"]:
    """Returns the embedding of each class name: the normalised mean over its prompts (CLIP Sec. 3.1.4).

    With a number of certain prompts, over those of the least variance. Embeddings of a trained text tower are cached in
    the user's cache folder.
    """
    if not names:
        raise UserError("no class names; give at least one")
    check_templates(templates)
    text = _text_encoder(model)
    report_equal("label", zip(names, text.tokenize([fill_template(templates[0], name) for name in names]), strict=True))
    if not text.tower:
        return _embed_names(model, names, templates, certain_prompts)
    content = json.dumps([text.tower, list(names), list(templates), *filter(None, [certain_prompts])])
    path = cache_folder("names") / f"{hashlib.sha256(content.encode()).hexdigest()[:32]}.npy"
    cached = cached_array(path)
    # A file with another shape or type was cut short or written by another program: it is replaced.
    if cached is not None and cached.ndim == 2 and len(cached) == len(names) and cached.dtype == np.float32:
        return np.array(cached)
    embeddings = _embed_names(model, names, templates, certain_prompts)
    # Without a writable cache, the embeddings are computed every time.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with completed(path) as partial, partial.open("wb") as file:
            np.save(file, embeddings)
    return embeddings


def report_equal(what: str, names: Iterable[tuple[str, Int[np.ndarray, " l"]]]) -> None:
    """Warns if names become the same tokens: they differ only in case, or after the text length.

    Args:
        what: a name is, such as a label.
        names: each with the tokens of its text.
    """
    first: dict[bytes, str] = {}
    equal = [(name, first.setdefault(row.tobytes(), name), len(row)) for name, row in names]
    # Names that are equal as they stand are not a surprise.
    others = [found for found in equal if found[0] != found[1]]
    if others:
        name, known, length = others[0]
        message(
            f"{pluralize(len(others), what)} cannot be told from others, such as {name:.60} from {known:.60}: their "
            f"texts are the same {length} tokens (case may be ignored, and the rest is cut), so that they "
            "share a probability"
        )


def distinct_captions(tokens: Int[np.ndarray, "n l"], name: str) -> tuple[Int[np.ndarray, " k"], Int[np.ndarray, " n"]]:
    """Takes the captions of images as classes: those of equal tokens are one, as the model does not distinguish them.

    Args:
        tokens: of the caption of each image.
        name: of the images, for messages.

    Returns:
        The first image of each class, and the class of each image.
    """
    _, first, labels = np.unique(tokens, axis=0, return_index=True, return_inverse=True)
    if len(first) < 2:
        raise UserError(f"all captions of {name} are equal; take images with others")
    return first, labels.ravel()


def _embed_names(
    model: EvaluatedModel, names: Sequence[str], templates: Sequence[str], certain_prompts: int | None
) -> Float[np.ndarray, "k d"]:
    captions = [fill_template(template, name) for name in names for template in templates]
    if len(captions) <= _MAX_CAPTIONS_PER_DEVICE:  # of one batch no progress can be shown
        embeddings = embed_texts(model, captions)
    else:
        with Bar("embedding class names", len(captions), "captions") as bar:
            embeddings = embed_texts(model, captions, bar.advance)
    text, prompts = _text_encoder(model), embeddings.reshape(len(names), len(templates), -1)
    if certain_prompts is not None:
        assert text.variances is not None, "these embeddings have no variances"
        prompts = most_certain(prompts, text.variances(prompts), certain_prompts)
    return text.join(prompts)


def most_certain(
    prompts: Float[np.ndarray, "k t d"], variances: Float[np.ndarray, "k t"], count: int
) -> Float[np.ndarray, "k _ d"]:
    """Returns the prompts of each name with the least variances, as many as asked for or all (ProLIP)."""
    chosen = np.sort(np.argsort(variances, axis=1, kind="stable")[:, :count], axis=1)
    return np.take_along_axis(prompts, chosen[:, :, None], axis=1)


def embed_texts(
    model: EvaluatedModel,
    texts: Sequence[str] | Int[np.ndarray, "n l"],
    advance: Callable[[int], object] = lambda count: None,
) -> Float[np.ndarray, "n d"]:
    """Returns the unit embedding of each text or row of token ids; ``advance`` is called with the number just finished.

    All batches have the same shape, so that JAX compiles once. The batch size per device is at most 64. For fewer texts
    it is a power of two, so that calls with similar numbers of texts share a compiled function.
    """
    per_device = min(_MAX_CAPTIONS_PER_DEVICE, 1 << (len(texts) - 1).bit_length())
    text, size = _text_encoder(model), per_device * model.features.num_shards
    parts = []
    for start in range(0, len(texts), size):
        chunk = list(texts[start : start + size])
        padded = chunk + chunk[-1:] * (size - len(chunk))
        tokens = text.tokenize(padded) if isinstance(padded[0], str) else np.stack(padded)
        parts.append(text.embed(tokens)[: len(chunk)])
        advance(len(chunk))
    return np.concatenate(parts)


def _text_encoder(model: EvaluatedModel) -> TextEncoder:
    assert model.text is not None, "a classifier does not embed text"
    return model.text


def class_indices(
    labels: Int[np.ndarray, " n"], label_names: Sequence[str], class_names: Sequence[str]
) -> Int[np.ndarray, " n"]:
    """Maps labels from indices into ``label_names`` to indices into ``class_names``, matched by name."""
    check_labels(labels, len(label_names))
    position = {name: index for index, name in enumerate(class_names)}
    repeated = {name for index, name in enumerate(class_names) if position[name] != index}
    table = np.full(len(label_names), -1)
    for label in map(int, np.unique(labels)):
        name = label_names[label]
        if name not in position:
            raise UserError(
                f"class {name!r} has images but is not among the {len(class_names)} candidates; add it to "
                "--candidates, or list the candidates that count as this class with --classes FILE"
            )
        if name in repeated:
            raise UserError(f"class {name!r} is repeated among the candidates; keep one")
        table[label] = position[name]
    return table[labels]


def read_larger(directory: str, labels: Sequence[str]) -> LargerClassifier | None:
    """Reads ``candidates.txt`` and ``classes.json`` beside the class names of a set; None if it has none."""
    candidates, classes = f"{directory}/{CANDIDATES_FILE}", f"{directory}/{CLASSES_FILE}"
    if not storage.exists(candidates):
        return None
    names = read_lines(candidates)
    return LargerClassifier(len(names), read_classes(classes, labels, names))


def read_classes(address: str, labels: Sequence[str], candidates: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Reads the candidates that count as each class of a set, from a JSON object of names or numbers (from 0)."""
    content = read_json(address)
    if not isinstance(content, dict):
        raise UserError(f"{address}: not a JSON object that maps class names to candidates")
    position = {name: index for index, name in enumerate(candidates)}
    repeated = {name for index, name in enumerate(candidates) if position[name] != index}
    groups, used = [], set[int]()
    for label in labels:
        found = content.get(label)
        chosen: list[Any] = found if isinstance(found, list) else [found]
        if not chosen or not all(type(one) in (str, int) for one in chosen):
            raise UserError(f"{address}: class {label!r} has no candidates; give one or a list")
        group = []
        for one in chosen:
            number = position.get(one, -1) if isinstance(one, str) else one
            which = f"{address}: {one!r:.200} (of class {label!r:.200})"
            if not 0 <= number < len(candidates):
                raise UserError(f"{which} is not among the {len(candidates)} candidates")
            if one in repeated:
                raise UserError(f"{which} is the name of several candidates; give the number of one, from 0")
            if number in used:
                raise UserError(f"{which} is listed twice; it can count in one class only")
            used.add(number)
            group.append(number)
        groups.append(tuple(group))
    return tuple(groups)


def read_json(address: str) -> object:
    """Reads a JSON file, local or at an address such as ``gs://bucket/file``."""
    try:
        if urls.is_remote(address):
            return untrusted.parse_json(storage.read_whole(address, untrusted.MAX_JSON_BYTES))
        return untrusted.read_json(Path(address))
    except (OSError, untrusted.Malformed) as error:
        raise UserError(f"{address}: cannot be read as JSON: {' '.join(str(error).split())}") from error
