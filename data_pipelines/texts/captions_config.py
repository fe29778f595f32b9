"""Where the texts of samples are, see `lit_het.data_pipelines.texts.captions`."""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from lit_het.errors import FieldError, UserError

if TYPE_CHECKING:
    from lit_het.data_pipelines.shards.storage import Unreadable
    from lit_het.data_pipelines.texts.captions import Text

CaptionUnit = Literal["line", "text"]

QUESTION = "{question}"
"""Stands for the question in a prompt."""

LANGUAGE = "{language}"
"""Stands for the language in a tag."""


SET_PROMPTS = "set"
"""Selects the templates in the folder of a data set."""

_MEMBER = re.compile(r"[\w.-]+(/|$)")

_CLASS = "cls"  # the member with the number of a class


def member_of(place: str) -> str:
    """Returns the member that holds captions: ``json`` of the place ``json/caption``."""
    if len(weights_of(place)) > 1:
        raise UserError(f"{place} are several places of captions, and one is read here; name one, such as json/caption")
    return place.partition("/")[0]


def classes_of(place: str) -> tuple[str, str] | None:
    """Returns the folder of the class names that are captions, and their prompts; None of captions that are stored.

    ``cls/data/imagenet:clip80`` is the name of a sample's class in ``data/imagenet/classnames.txt``, in each template
    of a family of `lit_het.data_pipelines.texts.prompts` or of a file; without ``:clip80``, those in the folder.
    """
    member, _, found = place.partition("/")
    if member != _CLASS:
        return None
    if not found:
        raise UserError(f"captions = {place!r}: {_CLASS} are numbers; add the folder of their names, as cls/data/pets")
    folder, _, prompts = found.rpartition(":")
    # The colon of a URL is not ours.
    return (found, SET_PROMPTS) if not folder or prompts.startswith("//") else (folder, prompts)


@functools.cache
def weights_of(places: str) -> Mapping[str, float]:
    """Returns the weights of places of captions: of ``json/caption=0.7,json/alt_text=0.3``, or 1 of a place alone."""
    found = dict[str, float]()
    for part in places.split(","):
        place, _, number = part.partition("=")
        try:
            weight = float(number or 1)
        except ValueError:
            weight = math.nan
        # A member is the end of a file's name: `txt*3` is a weight in another notation.
        if not _MEMBER.match(place) or place in found or not 0 < weight < math.inf:
            raise UserError(
                f"captions = {places!r} must be a place, or several with weights above 0, such as "
                "'json/caption=0.7,json/alt_text=0.3'"
            )
        if number and part == places:
            # What reads one place takes it as it is written.
            raise UserError(f"captions = {places!r}: a place alone has no weight; name it as {place!r}")
        found[place] = weight
    return found


@dataclasses.dataclass(frozen=True)
class Language:
    """The languages of captions.

    Attributes:
        place: of the language: a text for all captions of the sample, or a JSON list with one for each.
        only: languages of the captions that are read, such as "en"; empty reads all, and those without a language. A
            sample with captions in other languages alone is left out.
        tag: what training puts before a caption that has a language, with ``{language}`` for it, such as
            "<{language}> "; empty for nothing.
    """

    place: str = "json/language"
    only: tuple[str, ...] = ()
    tag: str = ""

    def __post_init__(self) -> None:
        member_of(self.place)
        if self.tag and LANGUAGE not in self.tag:
            raise FieldError(self, "tag", f"{self.tag!r} has no {LANGUAGE}, which stands for the language")


@dataclasses.dataclass(frozen=True)
class TextPlace:
    """Where the texts of a data set are, and what a decoder is given before them.

    Attributes:
        place: the member, or a field in it, as in `captions_in`; a decoder also reads ``questions`` of a JSON object.
            Several have weights, see `weights_of`; class names are captions too, see `classes_of`.
        unit: see `captions_in`.
        prompt: see `lit_het.data_pipelines.data_config.LoaderConfig`.
        language: of captions; None where it is not read.
    """

    place: str = "txt"
    unit: CaptionUnit = "line"
    prompt: str | None = None
    language: Language | None = None

    def __post_init__(self) -> None:
        for one in self.weights:
            classes_of(one)
        if len(self.weights) > 1 and any(one.endswith("/questions") for one in self.weights):
            raise UserError(f"captions = {self.place!r}: questions are read alone; name one place")
        if self.language is not None and self.has_questions:
            raise UserError("data.language is of captions, not of questions; leave it out")

    @property
    def weights(self) -> Mapping[str, float]:
        """The places of captions and their weights."""
        return weights_of(self.place)

    @property
    def member(self) -> str | None:
        """The member that holds the texts, which every sample needs; None where they are in several."""
        found = {member_of(place) for place in self.weights}
        return found.pop() if len(found) == 1 else None

    def only_member(self) -> str:
        """Returns the member that holds everything, as stored embeddings need."""
        member, *others = self.members
        if others:
            raise UserError(
                f"stored embeddings are of captions in one member, not in {' and '.join(self.members)}; name one, or "
                "read captions themselves"
            )
        return member

    @property
    def members(self) -> tuple[str, ...]:
        """The members that are read."""
        language = [] if self.language is None else [self.language.place]
        return tuple(dict.fromkeys(member_of(place) for place in (*self.weights, *language)))

    @property
    def has_questions(self) -> bool:
        """Whether the texts are answers to questions, for a decoder."""
        return self.place.endswith("/questions")

    def read(self, members: "Mapping[str, bytes | Unreadable]") -> "list[Text]":
        """Returns the texts in the members of a sample: its captions, or the answers to each of its questions.

        Raises:
            Unreadable: as `captions_in` of all places, or no question has an answer.
        """
        from lit_het.data_pipelines.texts.captions import texts_in

        return texts_in(self, members)
