"""The rules by which samples are left out, each of what is known of a sample."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

from lit_het.apps.filter.options import OF_CAPTIONS, OF_IMAGES, OF_SCORES, FilterOptions, Limited, Limits
from lit_het.data_pipelines.texts.captions import Caption
from lit_het.errors import UserError

Value: TypeAlias = str | float


class Sample(NamedTuple):
    """What is known of a sample.

    Attributes:
        captions: all of them; none where they were not read.
        sides: of the image, in pixels; None where it was not read.
        scores: by name; a sample without a row in the table has none.
        problems: what cannot be read, by what it is, "caption" or "image".
    """

    captions: Sequence[Caption]
    sides: tuple[int, int] | None
    scores: Mapping[str, float]
    problems: Mapping[str, str]


class Rule(NamedTuple):
    """A rule.

    Attributes:
        name: in the column ``reason`` of the table.
        text: what it asks for.
        broken_by: the value by which a sample breaks it; None where it does not.
    """

    name: str
    text: str
    broken_by: Callable[[Sample], Value | None]


class Broken(NamedTuple):
    """A sample that breaks rules.

    Attributes:
        number: of the sample in the index.
        caption: its first, empty if it has none that was read.
        values: by which it breaks each rule, by the rules' names.
    """

    number: int
    caption: str
    values: dict[str, Value]


def rules_of(options: FilterOptions) -> list[Rule]:
    """Returns the rules, those of what cannot be read last."""
    found = [_limited(name, limits) for name, limits in options.limits.items()]
    if options.forbidden is not None:
        found.append(_without(options.forbidden))
    if options.language is not None:
        found.append(_in_languages(options.language.only))
    if judges_captions(options):
        found.append(_readable("caption", "a caption that can be read"))
    if any(name in options.limits for name in OF_IMAGES):
        found.append(_readable("image", "an image whose header can be read"))
    return found


def judges_captions(options: FilterOptions) -> bool:
    """Returns whether there is a rule of captions."""
    is_limited = any(name in options.limits for name in OF_CAPTIONS)
    return is_limited or options.forbidden is not None or options.language is not None


def _readable(what: str, text: str) -> Rule:
    return Rule(what, text, lambda sample: sample.problems.get(what))


def _limited(name: Limited, limits: Limits) -> Rule:
    def values(sample: Sample) -> Iterator[float]:
        if name == "characters":
            yield from (len(caption.text) for caption in sample.captions)
        elif name == "words":
            yield from (len(caption.text.split()) for caption in sample.captions)
        elif name in OF_SCORES:
            yield from (sample.scores[one] for one in sample.scores if one == name)
        elif sample.sides is not None:
            shorter, longer = sorted(sample.sides)
            yield longer / shorter if name == "aspect" else shorter

    def broken_by(sample: Sample) -> Value | None:
        return next((value for value in values(sample) if value not in limits), None)

    return Rule(name, f"{_WORDS[name]} {limits}", broken_by)


_WORDS: Mapping[Limited, str] = {
    "characters": "characters of each caption",
    "words": "words of each caption",
    "aspect": "longer side divided by the shorter",
    "side": "pixels of the shorter side",
    "similarity": "cosine similarity of image and caption",
    "loss": "loss of the caption",
    "noise": "noise norm of the image",
}


def _without(path: Path) -> Rule:
    """Returns the rule that no caption has a word or phrase of a file, in any case and as whole words."""
    try:
        lines = path.read_text("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--without-words {path} cannot be read ({error}); name a text file") from error
    words = sorted({" ".join(line.split()) for line in lines} - {""}, key=len, reverse=True)
    if not words:
        raise UserError(f"--without-words {path} has no words; write one a line")
    # Not \b, which needs a letter at both ends: "c++" is a word too.
    any_of = "|".join(r"\s+".join(map(re.escape, word.split())) for word in words)
    pattern = re.compile(rf"(?<!\w)(?:{any_of})(?!\w)", re.IGNORECASE)

    def broken_by(sample: Sample) -> Value | None:
        found = (pattern.search(caption.text) for caption in sample.captions)
        return next((match[0] for match in found if match), None)

    return Rule("forbidden", f"none of the words in {path.name}", broken_by)


def _in_languages(only: Sequence[str]) -> Rule:
    """Returns the rule that a caption is in one of some languages, as training takes samples (`Language.only`)."""

    def broken_by(sample: Sample) -> Value | None:
        languages = dict.fromkeys(caption.language or "unknown" for caption in sample.captions)
        return None if not languages or set(only) & languages.keys() else " ".join(languages)

    return Rule("language", f"a caption in {' or '.join(only)}", broken_by)
