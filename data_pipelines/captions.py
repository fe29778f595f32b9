"""Captions of a sample: the lines of a text, or the texts of a JSON member."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from lit_het.data_pipelines import storage
from lit_het.data_pipelines.labels import text_of
from lit_het.data_pipelines.storage import Unreadable
from lit_het.untrusted import parse_json

Tokenizer = Callable[[list[str]], np.ndarray]
CaptionUnit = Literal["line", "text"]


def member_of(place: str) -> str:
    """Returns the member that holds captions: ``json`` of the place ``json/caption``."""
    return place.partition("/")[0]


def captions_in(text: str, place: str, unit: CaptionUnit = "line") -> list[str]:
    """Returns the captions in the text of a member, at least one, none of them blank.

    Args:
        text: the content of the member.
        place: the member; ``json/caption`` is the field ``caption`` of the JSON object that it holds.
        unit: "line" takes each line of a text, or each text of a JSON list, for a caption, and leaves out blank ones;
            "text" takes the whole text for one.

    Raises:
        Unreadable: there is no caption, or it is not text.
    """
    found: Any = _json_field(text, place) if "/" in place else text.split("\n") if unit == "line" else text
    written: list[str] = []
    for caption in found if isinstance(found, list) and unit == "line" else [found]:
        if not isinstance(caption, str):
            raise Unreadable("empty caption", f"it is not text, but of type {type(caption).__name__}")
        if caption.strip():
            written.append(caption.strip() if unit == "line" else caption)
    if not written:
        raise Unreadable("empty caption", repr(text[:100]))
    return written


def _json_field(text: str, place: str) -> Any:
    try:
        found = parse_json(text)[place.partition("/")[2]]
        for caption in found if isinstance(found, list) else [found]:
            if isinstance(caption, str):
                caption.encode()  # JSON may contain lone surrogates, which tokenizers reject
    except (ValueError, KeyError, TypeError) as error:
        raise Unreadable(f"no caption in .{place}", f"{type(error).__name__}: {storage.reason(error)}") from error
    return found


class Captions:
    """Token ids ``[b l]``.

    Args:
        place: the member that holds captions; ``json/caption`` is the field ``caption`` of a JSON object.
        unit: see `captions_in`.
        tokenizer: captions to ids.
    """

    def __init__(self, place: str, unit: CaptionUnit, tokenizer: Tokenizer):
        self.member = member_of(place)
        self._place, self._tokenizer = place, tokenizer
        self._unit: CaptionUnit = unit

    def read(self, content: bytes) -> list[str]:
        """Returns the captions in a member; raises as `captions_in` and `text_of`."""
        return captions_in(text_of(content), self._place, self._unit)

    def tokenize(self, captions: list[str], valid: np.ndarray) -> np.ndarray:
        """Returns token ids, zeros in invalid rows."""
        text = self._tokenizer(captions)
        # The tokenizer makes an end token of the empty captions of invalid rows.
        text[~valid] = 0
        return text
