"""Texts of a sample: captions (lines of a text, a JSON field, or names of classes), answers, or translations."""

import collections
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from lit_het.data_pipelines.labels import ClassIndexLabels, text_of
from lit_het.data_pipelines.labels_config import CLASS_NAMES_FILE
from lit_het.data_pipelines.shards import storage
from lit_het.data_pipelines.shards.storage import TRANSIENT_CAUSES, Unreadable, content_or_raise
from lit_het.data_pipelines.texts import prompts
from lit_het.data_pipelines.texts.captions_config import (
    LANGUAGE,
    QUESTION,
    SET_PROMPTS,
    CaptionUnit,
    Language,
    TextPlace,
    classes_of,
    member_of,
)
from lit_het.errors import UserError
from lit_het.untrusted import parse_json

Tokenizer = Callable[[list[str]], np.ndarray]

OTHER_LANGUAGE = "other language"
"""The cause of a sample without a caption in one of the languages that are read."""


def captions_in(text: str, place: str, unit: CaptionUnit = "line") -> list[str]:
    """Returns the captions in the text of a member, at least one, none of them blank.

    Args:
        text: the content of the member.
        place: the member; ``json/caption`` is the field ``caption`` of the JSON object that it holds. Of the place of
            class names, see `classes_of`, each template gives a caption.
        unit: "line" takes each line of a text, or each text of a JSON list, for a caption, and leaves out blank ones;
            "text" takes the whole text for one.

    Raises:
        Unreadable: there is no caption, or it is not text.
    """
    if written := [caption for caption in _with_blanks(text, place, unit) if caption]:
        return written
    raise _blank(text)


def _blank(text: str) -> Unreadable:
    return Unreadable("empty caption", repr(text[:100]))


def _with_blanks(text: str, place: str, unit: CaptionUnit) -> list[str]:
    """Returns the captions in the text of a member, "" for each blank one, otherwise as `captions_in`."""
    found: Any
    if classes_of(place):
        found = list(_class_captions(place, _classes(place)[0].encode(text.encode())))
    else:
        found = _json_field(text, place) if "/" in place else text.strip().split("\n") if unit == "line" else text
    captions: list[str] = []
    for caption in found if isinstance(found, list) and unit == "line" else [found]:
        if not isinstance(caption, str):
            raise Unreadable("empty caption", f"it is not text, but of type {type(caption).__name__}")
        captions.append(caption if caption.strip() and unit == "text" else caption.strip())
    return captions


@functools.lru_cache(maxsize=2048)
def _class_captions(place: str, label: int) -> tuple[str, ...]:
    """Returns the name of a class in each template."""
    _, names, templates = _classes(place)
    return tuple(prompts.fill_template(template, names[label]) for template in templates)


@functools.lru_cache(maxsize=16)
def _classes(place: str) -> tuple[ClassIndexLabels, tuple[str, ...], tuple[str, ...]]:
    """Reads the class names and templates of a place of class names, once for all samples."""
    found = classes_of(place)
    assert found is not None
    folder, family = found
    names = prompts.read_classnames(folder)
    if family != SET_PROMPTS:
        templates = prompts.read_prompts(family, f"captions = {place!r}:")
    elif storage.exists(f"{folder}/{prompts.TEMPLATES_FILE}"):
        templates = prompts.read_templates(folder)
    else:
        raise UserError(f"{folder} has no {prompts.TEMPLATES_FILE}; name prompts, as captions = '{place}:photo'")
    return ClassIndexLabels(f"{folder}/{CLASS_NAMES_FILE}", len(names)), names, templates


def _json_field(text: str, place: str) -> Any:
    try:
        found = parse_json(text)[place.partition("/")[2]]
        for caption in found if isinstance(found, list) else [found]:
            if isinstance(caption, str):
                caption.encode()  # JSON may contain lone surrogates, which tokenizers reject
    except (ValueError, KeyError, TypeError) as error:
        raise Unreadable(f"nothing in .{place}", f"{type(error).__name__}: {storage.reason(error)}") from error
    return found


class Question(NamedTuple):
    """A question about an image, its answers, and the type by which a set reports accuracies."""

    question: str
    answers: tuple[str, ...]
    type: str | None


def questions_in(text: str, place: str) -> list[Question]:
    """Returns the questions in the text of a member, those without answers too.

    Args:
        text: the content of the member.
        place: the field of the JSON object that it holds, as in `captions_in`.

    Raises:
        Unreadable: a question has no text or list of answers.
    """
    found, entries = [], _json_field(text, place)
    for number, entry in enumerate(entries if isinstance(entries, list) else [entries]):
        question, answers, kind = (
            entry.get(name) if isinstance(entry, dict) else None for name in ("question", "answers", "type")
        )
        if not isinstance(question, str) or not isinstance(answers, list):
            raise Unreadable("not a question", f"questions[{number}] has no question and answers")
        written = tuple(answer.strip() for answer in answers if isinstance(answer, str))
        try:
            "".join([question, *written]).encode()
        except UnicodeEncodeError as error:  # JSON may contain lone surrogates, which tokenizers reject
            raise Unreadable("not a question", f"questions[{number}] is not valid text: {error.reason}") from error
        # A blank answer is one of the ten people's, but a question that has no other has none.
        written = written if any(written) else ()
        found.append(Question(question.strip(), written, kind if isinstance(kind, str) else None))
    return found


class Text(NamedTuple):
    """A text to learn, what a decoder is given before it, and its weight among those of the sample."""

    prompt: str
    text: str
    weight: float = 1.0


class Caption(NamedTuple):
    """A caption of a sample, its place, and its language if that is known."""

    text: str
    place: str
    language: str | None


def texts_in(place: TextPlace, members: Mapping[str, bytes | Unreadable]) -> list[Text]:
    """Returns what `TextPlace.read` does."""
    if place.prompt is None or not place.has_questions:
        found = captions_of_sample(place, members)
        # A place is as probable with one caption as with several, and the places that there are share the whole.
        counts, weights = collections.Counter(one.place for one in found), place.weights
        return [
            Text(place.prompt or "", tagged(one, place.language), weights[one.place] / counts[one.place])
            for one in found
        ]
    text, found = text_of(content_or_raise(members[member_of(place.place)])), []
    for question, answers, _ in questions_in(text, place.place):
        prompt = place.prompt.replace(QUESTION, question)
        found += [Text(prompt, answer) for answer in answers if answer]
    if not found:
        raise Unreadable("no answer", "none of its questions has one")
    return found


def captions_of_sample(place: TextPlace, members: Mapping[str, bytes | Unreadable]) -> list[Caption]:
    """Returns the captions of a sample in all places that it has, in the languages that are read.

    Raises:
        Unreadable: no place has a caption, none is in these languages, or a store failed.
    """
    found, problem = list[tuple[str | None, str]](), None
    for one in place.weights:
        texts: Sequence[str | None] = [None]  # where a sample lacks a place, there may still be a language for it
        try:
            content = text_of(content_or_raise(members[member_of(one)]))
            if not any(texts := _with_blanks(content, one, place.unit)):
                raise _blank(content)
        except Unreadable as error:
            if error.cause in TRANSIENT_CAUSES:
                raise
            problem = problem or error
        found += [(text, one) for text in texts]
    written = [(text, one) for text, one in found if text]
    if not written:
        assert problem is not None
        raise problem
    if place.language is None:
        return [Caption(text, one, None) for text, one in written]
    languages = _languages(place.language, members, [text for text, _ in found])
    captions = [Caption(*one, language) for one, language in zip(written, languages, strict=True)]
    if (only := place.language.only) and not (captions := [one for one in captions if one.language in only]):
        raise Unreadable(
            OTHER_LANGUAGE, f"{', '.join(map(str, dict.fromkeys(languages)))} instead of {', '.join(only)}"
        )
    return captions


def tagged(caption: Caption, language: Language | None) -> str:
    """Returns a caption with the tag of its language before it, if it has one."""
    if language is None or caption.language is None:
        return caption.text
    return language.tag.replace(LANGUAGE, caption.language) + caption.text


def _languages(
    language: Language, members: Mapping[str, bytes | Unreadable], texts: Sequence[str | None]
) -> list[str | None]:
    """Returns the language of each caption that is written; None where there is none.

    A list has a language for each of these, or blank captions have one too, or also places that the sample lacks.
    """
    written = [text for text in texts if text]
    try:
        content = text_of(content_or_raise(members[member_of(language.place)]))
        found: Any = _json_field(content, language.place) if "/" in language.place else content
    except Unreadable as error:
        if error.cause in TRANSIENT_CAUSES:
            raise
        return [None] * len(written)
    languages = found if isinstance(found, list) else [found] * len(written)
    ways = written, [text for text in texts if text is not None], texts
    of_each = next((some for some in ways if len(some) == len(languages)), None)
    if of_each is None or not all(one is None or isinstance(one, str) for one in languages):
        raise Unreadable("not the languages", f".{language.place} has {str(found)[:100]!r} for {len(written)} captions")
    return [(one or "").strip() or None for one in itertools.compress(languages, of_each)]


@runtime_checkable
class DecoderTokenizer(Protocol):
    """Turns prompts and texts into token ids, one after the other."""

    def prompted(self, prompts: list[str], texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns ids ``[n l]``, and which of them belong to the text or its end token ``[n l]``."""
        ...

    def fits(self, prompt: str) -> bool:
        """Returns whether a prompt leaves room for a token of text and the end token."""
        ...


@runtime_checkable
class SourceTokenizer(Protocol):
    """Turns texts to translate into token ids.

    Attributes:
        length: tokens of a row.
    """

    length: int

    def whole(self, texts: list[str]) -> np.ndarray:
        """Returns ids ``[n length]`` of whole texts."""
        ...


class Sources:
    """Token ids ``[b n]`` of texts to translate, in place of images.

    Args:
        place: of the text of a sample, see `captions_in`.
        tokenizer: of these texts; None to count samples only.

    Attributes:
        member, field: as of `lit_het.data_pipelines.batches.Input`.
    """

    field = "source"

    def __init__(self, place: str, tokenizer: Tokenizer | SourceTokenizer | None):
        self.member, self._place, self._tokenizer = member_of(place), place, tokenizer

    def zeros(self, count: int) -> np.ndarray:
        """Rows of padding."""
        return np.zeros((count, self._known_tokenizer.length), np.int32)

    def read(self, content: bytes, generator: np.random.Generator | None) -> np.ndarray:
        """Returns the ids of one text.

        Raises:
            Unreadable: there is no text, or it has too many tokens.
        """
        [text] = captions_in(text_of(content), self._place, "text")
        try:
            return self._known_tokenizer.whole([text.strip()])[0]
        except UserError as error:
            raise Unreadable("source too long", str(error)) from error

    @property
    def _known_tokenizer(self) -> SourceTokenizer:
        if not isinstance(self._tokenizer, SourceTokenizer):
            raise UserError("data.source is for decoders, whose tokenizer is a SentencePieceConfig; set `tokenizer`")
        return self._tokenizer


class Captions:
    """Token ids ``[b l]`` of texts.

    Args:
        places: of each data set, see `TextPlace`.
        tokenizer: texts to ids; where there are prompts, a `DecoderTokenizer`.
    """

    def __init__(self, places: Sequence[TextPlace], tokenizer: Tokenizer | DecoderTokenizer):
        self.places, self._tokenizer = tuple(places), tokenizer
        # Before training, rather than in a thread at the first sample, and as the files are now.
        _classes.cache_clear()
        _class_captions.cache_clear()
        for one in {one for place in self.places for one in place.weights if classes_of(one)}:
            _classes(one)
        self._is_prompted = self.places[0].prompt is not None
        if self._is_prompted and not isinstance(tokenizer, DecoderTokenizer):
            raise UserError("data.prompt is for decoders, whose tokenizer is a SentencePieceConfig; set `tokenizer`")

    def read(self, members: Mapping[str, bytes | Unreadable], data_set: int = 0) -> list[Text]:
        """Returns the texts in the members of a sample of a data set.

        Raises:
            Unreadable: as `TextPlace.read`, or a prompt leaves no room for its text.
        """
        found = self.places[data_set].read(members)
        if self._is_prompted:
            assert isinstance(self._tokenizer, DecoderTokenizer)
            for prompt in dict.fromkeys(text.prompt for text in found):
                if not self._tokenizer.fits(prompt):
                    raise Unreadable("prompt too long", f"no position is left after {prompt[:100]!r}")
        return found

    @staticmethod
    def draw(texts: Sequence[Text], generator: np.random.Generator) -> int:
        """Returns the number of one of several texts, by their weights."""
        weights = np.array([text.weight for text in texts])
        if np.all(weights == weights[0]):
            return int(generator.integers(len(texts)))
        return int(generator.choice(len(texts), p=weights / weights.sum()))

    def fields(self, texts: list[Text], valid: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the fields of a `Batch`, zeros in invalid rows."""
        prompts, captions = [text.prompt for text in texts], [text.text for text in texts]
        if isinstance(self._tokenizer, DecoderTokenizer) and self._is_prompted:
            ids, target = self._tokenizer.prompted(prompts, captions)
            found = {"text": ids, "text_target": target}
        else:
            assert callable(self._tokenizer)
            found = {"text": self._tokenizer(captions)}
        # The tokenizer makes an end token of the empty texts of invalid rows.
        for rows in found.values():
            rows[~valid] = 0
        return found
