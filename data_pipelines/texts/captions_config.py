"""Where the texts of samples are, see `lit_het.data_pipelines.texts.captions`."""

import dataclasses
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from lit_het.data_pipelines.texts.captions import Text

CaptionUnit = Literal["line", "text"]

QUESTION = "{question}"
"""Stands for the question in a prompt."""


def member_of(place: str) -> str:
    """Returns the member that holds captions: ``json`` of the place ``json/caption``."""
    return place.partition("/")[0]


@dataclasses.dataclass(frozen=True)
class TextPlace:
    """Where the texts of a data set are, and what a decoder is given before them.

    Attributes:
        place: the member, or a field in it, as in `captions_in`; a decoder also reads ``questions`` of a JSON object.
        unit: see `captions_in`.
        prompt: see `lit_het.data_pipelines.data_config.LoaderConfig`.
    """

    place: str = "txt"
    unit: CaptionUnit = "line"
    prompt: str | None = None

    @property
    def member(self) -> str:
        """The member that holds the texts."""
        return member_of(self.place)

    @property
    def has_questions(self) -> bool:
        """Whether the texts are answers to questions, for a decoder."""
        return self.place.endswith("/questions")

    def read(self, content: bytes) -> "list[Text]":
        """Returns the texts in a member: its captions, or the answers to each of its questions.

        Raises:
            Unreadable: as `captions_in`, or no question has an answer.
        """
        from lit_het.data_pipelines.texts.captions import texts_in

        return texts_in(self, content)
