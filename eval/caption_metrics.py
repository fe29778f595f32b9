"""CIDEr, BLEU and ROUGE-L of captions, as the COCO caption evaluation (pycocoevalcap) computes them, and its tokenizer.

Texts are compared token by token; pass captions and references through `tokenize` first, as that evaluation does.
Functions return a figure for each image where the figure has one, so that standard errors can be given.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from lit_het.errors import UserError

LONGEST = 4
"""Words of the longest n-grams that are compared."""

_Vector = dict[tuple[str, ...], float]

_MARK = "\u0300-\u036f\u064b-\u065e\u093c-\u094e\u0e31-\u0e3a\u0e47-\u0e4e"
# Neither superscripts nor fractions are letters, as `\w` has them; combining marks are.
_LETTER = rf"(?:[^\W\d_²³¹¼-¾⁰-₎⅐-ↈ①-⓿]|[{_MARK}])"
_LETTERS = rf"(?:[^\W_²³¹¼-¾⁰-₎⅐-ↈ①-⓿]|[{_MARK}\xad])"  # and digits
_APOSTROPHE = "['’\x92]"
_WORD = rf"{_LETTER}{_LETTERS}*(?:[.!?]{_LETTER}{_LETTERS}*)*"
_PREFIX = rf"(?:[dlo]{_APOSTROPHE}(?={_LETTERS}{{2}}))?"
_HYPHENATED = rf"{_PREFIX}{_LETTERS}+(?:[-_‐‑]{_PREFIX}{_LETTERS}+)*"
_VERB = rf"{_APOSTROPHE}(?:s|m|d|ll|re|ve)(?!{_LETTER})"
_SLASHED = r"[a-z0-9]+(?:-[a-z]+){0,2}"
_PHONE = r"(?:\(\d{2,3}\) ?|\+{0,2}(?:\d{2,4}[- ])?\d{2,4}[- ])\d{3,4}[- ]?\d{3,5}"
_PHONE_WITH_PERIODS = r"(?:\+{0,2}\d{2,4}\.)?\d{2,4}\.\d{3,4}\.\d{3,5}"
_URL_PATH = r"[^\s\"<>|()]+[^\s\"<>|.!?(){},-]"
_ATTRIBUTE = r" +[a-z][\w:.-]*(?: *= *(?:\"[^\"]*\"|'[^']*'))?"
# Abbreviations that keep their period: always, with a capital, and before a number.
_ABBREVIATIONS = (
    r"ph\.d|ed\.d|al|cf|co|ct|dr|ft|ga|jr|ky|lt|md|mo|mr|ms|mt|ph|rd|rt|sq|sr|st|va|vs|vt|wm|adj|adm|adv|ala|apr|aug|"
    "ave|bhd|cie|col|cos|cpl|dak|dec|det|drs|ens|esq|est|etc|ext|feb|fla|fri|gen|gov|hon|inc|ind|jan|jos|jul|jun|kan|"
    "ltd|maj|mar|mfg|mme|mon|mrs|mtg|neb|nev|nov|oct|pfc|plc|pte|pty|pvt|rep|rev|sen|sep|seq|sfc|sgt|spc|ste|sys|tel|"
    "thu|tue|wed|wis|wyo|alex|ariz|assn|assoc|asst|atty|bldg|blvd|brig|bros|calif|capt|cmdr|colo|conn|corp|dept|elec|"
    "govs|insp|intl|invt|kans|mich|minn|mlle|mont|msgr|natl|okla|penn|ppte|ppty|pres|prof|ptes|ptys|reps|sens|sept|"
    "supt|tenn|thurs|tues|univ|wisc"
)
_CAPITAL = "Az|La|Pa|Ark|Del|Ill|Ore|Tex|Mass|Miss|Wash"
_NUMBERED = "ca|no|op|pp|art|fig|nos|figs|prop"
_EXTENSIONS = (
    "bat|bmp|c|cgi|class|cpp|dll|docx?|exe|gif|gz|h|html?|jar|java|jpe?g|mov|mp3|pdf|php|pl|png|ppt|ps|py|sql|tar|"
    "txt|wav|x|xml|zip"
)
# Before these words the period after a single letter ends a sentence.
_STARTERS = (
    "A|About|According|Additionally|After|An|As|At|But|Earlier|He|Her|Here|However|If|In|It|Last|Many|More|Now|Once|"
    "One|Other|Our|She|Since|So|Some|Such|That|The|Their|Then|There|These|They|This|We|What|When|While|Yet|You"
)
# Written to agree with what Java returned, not from its source. The longest match of any rule wins, and of equal ones
# the first; only the group is the token, but what a rule needs to follow counts as matched.
_RULES = tuple(
    re.compile(rule, re.IGNORECASE)
    for rule in (
        "(can)not",
        "(gim|lem)me",
        "(gon|wan)na",
        "(got)ta",
        "('t)(?:is|was)",
        "(more)'n",
        rf"({_LETTER}+?)n{_APOSTROPHE}t",
        rf"({_WORD}){_VERB}",
        rf"({_VERB}|n{_APOSTROPHE}t(?!{_LETTER}))",
        rf"({_WORD})",
        rf"({_HYPHENATED})",
        rf"((?-i:[A-HJ-XZn]){_APOSTROPHE}{_LETTER}{{2,}})",  # N'Sync
        rf"([a-z]+[aeiouy]{_APOSTROPHE}(?-i:[aeiouA-Z])[a-z]*)",  # ma'am
        rf"(somethin'|dunkin'|ol'|c'mon|c'est|e'er|li'l|cap'n|s'mores)(?!{_LETTER})",
        rf"([dlj]{_APOSTROPHE}|{_APOSTROPHE}(?:till?|cause|em|n{_APOSTROPHE}|n(?=\s|$)))",
        rf"(y{_APOSTROPHE}){_LETTER}",
        rf"({_APOSTROPHE}\d0s)",  # '90s
        rf"({_APOSTROPHE}\d\d)(?=\s|$)",
        r"([-+]?(?:\d*(?:[.:,]\d+)+|\d+))",
        r"((?:\d{1,4}[- ])?\d{1,4}\\?/\d{1,4})",
        r"(\d\d?[-/]\d\d?[-/]\d{2,4})",
        "([¼½¾⅓⅔]|[⁺⁻]?[⁰¹²³⁴-⁹]+|[₊₋]?[₀-₉]+)",
        rf"({_PHONE}|{_PHONE_WITH_PERIODS})",
        rf"({_SLASHED}(?:\\?/{_SLASHED}){{1,2}})",  # black/white
        r"((?-i:[A-Z]*)\$)",
        r"((?-i:[A-Z]+(?:(?:[+&]|&amp;)[A-Z]+)+))",  # AT&T
        r"(c\+\+|[cf]#)",
        rf"((?:{_ABBREVIATIONS}|(?-i:{_CAPITAL}|{_CAPITAL.upper()}))\.)",
        rf"((?:{_NUMBERED})\.)\s*\d",
        r"([a-z](?:\.[a-z])*\.)",
        rf"([a-z])\. +(?:(?-i:{_STARTERS})(?:\s|$)|<[/a-z])",
        r"([a-z0-9][a-z0-9.,]*(?:-(?:[a-z](?:\.[a-z])+\.|[a-z0-9]+))+)",  # 5.5-inch, U.S.-made
        rf"((?:{_WORD}|{_HYPHENATED})\.)[,;:]",
        rf"(https?://{_URL_PATH})",
        rf"((?:www\.(?:[\w-]+\.)+[a-z]{{2,4}}|(?:[a-z0-9]+\.)+(?:com|net|org|edu))(?:/{_URL_PATH})?)(?!{_LETTERS})",
        rf"([a-z0-9]+(?:\.[a-z0-9]+)*\.(?:{_EXTENSIONS}))(?!{_LETTERS})",
        r"(<?[a-z0-9][^\s\"<>|()]*@(?:[^\s\"<>|().]+\.)*[^\s\"<>|().]+>?)",
        rf"(@[a-z_]\w*|\#{_LETTER}+)",
        r"([<>]?[:;=][-o*']?(?-i:[()DPdpO])|[<>]?[:;=][-o*']?[\\{@|\[\]])(?![a-z0-9])",
        r"([-^=~<>']_[-^=~<>'])",
        rf"(</?[a-z][\w:.-]*(?:{_ATTRIBUTE})* */?>|<[!?][a-z-][^>]*>)",
        r"(&(?:amp|lt|gt|quot|apos|nbsp|mdash|ndash|\#\d+);)",
        "(-[lr][rcs]b-)",
        r"(pro-|anti-|-+|_+|\*+|\#+|@+|[?!]+|<<|>>|\\\*|''|``|\.{3,5}|\.(?: \.){2,4})",
        r"([!-/:-@\[-`{-~¡¢-¥¦-©«-´¶-¹»¿×÷\x80\x91-\x94\x96\x97\xad–—―‘-‟‖‗†-•…‰-‸‹-※⁂⁄₠₤€℀-⅏⅕-⅞←-⯿、。〒・！-／：-＠［-･])",
    )
)
_SPELLED = {
    **{"(": "-lrb-", ")": "-rrb-", "[": "-lsb-", "]": "-rsb-", "{": "-lcb-", "}": "-rcb-"},
    **{"£": "#", "€": "$", "¤": "$", "₠": "$", "\x80": "$", "¢": "cents", "&amp;": "&", "&lt;": "<", "&gt;": ">"},
    **{"¼": "1/4", "½": "1/2", "¾": "3/4", "⅓": "1/3", "⅔": "2/3"},
}
_REMOVED = re.compile(
    "[.?!,:;…\xad]|\\.[. ]+|-{1,4}|[–—―\x96\x97]|''|``|['\"`«»‘-‛“”‹›\x91-\x94]|&(?:quot|apos|nbsp|.dash);",
    re.IGNORECASE,
)


def tokenize(caption: str) -> str:
    """Returns the tokens of a caption in lower case and without punctuation, with a space between each two.

    They are those that the COCO caption evaluation compares, of Stanford's ``PTBTokenizer`` (CoreNLP 3.4.1), without
    Java: so brackets stay, as ``-lrb-``, "can't" becomes ``ca n't``, and "1 1/2" is one token with a no-break space.
    Rare texts differ: an abbreviation with a word attached ("Inc.a"), faces in brackets ("(^_^)"), and references to
    letters ("&eacute;"). And Java reads all captions as one text, in which a caption that ends in "plan B." has the
    token ``b.`` or ``b``, depending on the caption after it; here it is ``b.``.
    """
    # Java sees a character above U+FFFF, such as an emoji, as two that it does not know, and leaves them out.
    text = re.sub("[^\0-\uffff]|\n", lambda found: " " if found[0] == "\n" else "\0", caption)
    tokens, place = [], 0
    while place < len(text):
        found = None if text[place] == " " else _longest_match(text, place)
        if found is None:
            place += 1
            continue
        place = found.end(1)
        if not _REMOVED.fullmatch(found[1]):
            tokens.append(_spelled(found[1]))
    return " ".join(tokens)


def _longest_match(text: str, place: int) -> re.Match[str] | None:
    best = None
    for rule in _RULES:
        found = rule.match(text, place)
        if found and (best is None or found.end() > best.end()):
            best = found
    return best


def _spelled(token: str) -> str:
    """Returns a token as the evaluation writes it."""
    token = _SPELLED.get(token.lower(), token).replace("&amp;", "&").replace("\xad", "").replace(" ", "\xa0")
    if re.fullmatch(f"(?:{_VERB}|n{_APOSTROPHE}t)", token, re.IGNORECASE):
        token = token.replace("’", "'")
    return token.replace("(", "-lrb-").replace(")", "-rrb-").lower()


def cider_d(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]], sigma: float = 6.0
) -> Float[np.ndarray, " n"]:
    """Returns CIDEr-D of each image, from 0 to 10 (Vedantam et al., CVPR 2015, the variant of the evaluation server).

    Figures that papers call CIDEr are the mean of these times 100, since this is what ``Cider`` of pycocoevalcap
    computes: CIDEr-D without stemming, where the difference in length counts pairs of words. Document frequencies come
    from these references, so that a single image has the score 0.

    Args:
        hypotheses: tokens of a caption for each image.
        references: tokens of its references.
        sigma: scale of the penalty for a difference in length.

    Raises:
        UserError: no images, other than one list of references for each caption, or an image without a reference.
    """
    _require_references(hypotheses, references)
    rarity = _Rarity.of(references)
    scores = []
    for hypothesis, texts in zip(hypotheses, references, strict=True):
        vectors, count = rarity.vectors(hypothesis), max(len(hypothesis.split()) - 1, 0)
        total = 0.0
        for text in texts:
            difference = count - max(len(text.split()) - 1, 0)
            similarity = sum(map(_clipped_cosine, vectors, rarity.vectors(text))) / LONGEST
            total += similarity * math.exp(-(difference**2) / (2 * sigma**2))
        scores.append(10 * total / len(texts))
    return np.array(scores)


def cider(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Float[np.ndarray, " n"]:
    """Returns CIDEr of each image, from 0 to 1, without stemming (Vedantam et al., CVPR 2015, Sec. 4).

    The mean over references and n-gram lengths of the cosine between TF-IDF vectors. An n-gram that no reference holds
    counts as if one image had it. Neither figures of papers nor pycocoevalcap's are this one: see `cider_d`.

    Raises:
        UserError: as `cider_d`.
    """
    _require_references(hypotheses, references)
    rarity = _Rarity.of(references)
    scores = []
    for hypothesis, texts in zip(hypotheses, references, strict=True):
        vectors = rarity.vectors(hypothesis)
        cosines = [_cosine(*pair) for text in texts for pair in zip(vectors, rarity.vectors(text), strict=True)]
        scores.append(sum(cosines) / len(cosines))
    return np.array(scores)


def bleu(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> Float[np.ndarray, "4"]:
    """Returns BLEU-1 to BLEU-4 of all captions together, from 0 to 1 (Papineni et al., ACL 2002).

    Matches, n-grams and lengths are summed over images; the reference that is closest in length counts, and the
    shorter of two. BLEU has no standard error over images.

    Raises:
        UserError: as `cider_d`.
    """
    _require_references(hypotheses, references)
    matched, possible, length, closest = np.zeros(LONGEST), np.zeros(LONGEST), 0, 0
    for hypothesis, texts in zip(hypotheses, references, strict=True):
        own, most = _ngrams(hypothesis), Counter()
        for text in texts:
            most |= _ngrams(text)
        for gram, count in own.items():
            possible[len(gram) - 1] += count
            matched[len(gram) - 1] += min(count, most[gram])
        words = len(hypothesis.split())
        length += words
        closest += min((abs(size - words), size) for size in (len(text.split()) for text in texts))[1]
    # The small numbers are those of the COCO evaluation: without a match the figure is tiny, but not zero.
    precisions = np.cumprod((matched + 1e-15) / (possible + 1e-9)) ** (1 / np.arange(1, LONGEST + 1))
    return precisions * math.exp(min(0.0, 1 - (closest + 1e-9) / (length + 1e-15)))


def rouge_l(
    hypotheses: Sequence[str], references: Sequence[Sequence[str]], beta: float = 1.2
) -> Float[np.ndarray, " n"]:
    """Returns ROUGE-L of each image, from 0 to 1 (Lin, "ROUGE", 2004).

    ``(1 + β²) P R / (R + β² P)``, where P and R are the longest common subsequence divided by the lengths of hypothesis
    and reference. As in the COCO evaluation, P and R are each the largest of any reference.

    Raises:
        UserError: as `cider_d`.
    """
    _require_references(hypotheses, references)
    scores = []
    for hypothesis, texts in zip(hypotheses, references, strict=True):
        # Unlike the other figures, this one is of tokens between single spaces: an empty text has one, the empty one.
        own, others = hypothesis.split(" "), [text.split(" ") for text in texts]
        common = [_longest_common(own, other) for other in others]
        precision = max(common) / len(own)
        recall = max(count / len(other) for count, other in zip(common, others, strict=True))
        scores.append((1 + beta**2) * precision * recall / (recall + beta**2 * precision) if precision else 0.0)
    return np.array(scores)


@dataclasses.dataclass(frozen=True)
class _Rarity:
    """Inverse document frequencies: log(images / images with this n-gram in a reference)."""

    known: _Vector
    unknown: float

    @classmethod
    def of(cls, references: Sequence[Sequence[str]]) -> "_Rarity":
        frequencies = Counter(gram for texts in references for gram in set().union(*map(_ngrams, texts)))
        images = len(references)
        return cls({gram: math.log(images / count) for gram, count in frequencies.items()}, math.log(images))

    def vectors(self, text: str) -> list[_Vector]:
        """Returns the weights of the n-grams of a text, of each length."""
        found: list[_Vector] = [{} for _ in range(LONGEST)]
        for gram, count in _ngrams(text).items():
            found[len(gram) - 1][gram] = count * self.known.get(gram, self.unknown)
        return found


def _ngrams(text: str) -> Counter[tuple[str, ...]]:
    words = text.split()
    return Counter(tuple(words[i : i + n]) for n in range(1, LONGEST + 1) for i in range(len(words) - n + 1))


def _clipped_cosine(hypothesis: _Vector, reference: _Vector) -> float:
    """Returns the cosine of CIDEr-D: a word that a caption repeats counts no more often than in the reference."""
    clipped = {gram: min(weight, reference.get(gram, 0.0)) for gram, weight in hypothesis.items()}
    return _divided(_product(clipped, reference), hypothesis, reference)


def _cosine(one: _Vector, other: _Vector) -> float:
    return _divided(_product(one, other), one, other)


def _divided(product: float, one: _Vector, other: _Vector) -> float:
    norms = math.sqrt(_product(one, one)) * math.sqrt(_product(other, other))
    return product / norms if norms else 0.0


def _product(one: _Vector, other: _Vector) -> float:
    return sum((weight * other.get(gram, 0.0) for gram, weight in one.items()), start=0.0)


def _longest_common(one: Sequence[str], other: Sequence[str]) -> int:
    """Returns the length of the longest common subsequence."""
    row = [0] * (len(other) + 1)
    for token in one:
        above = row
        row = [0]
        for place, match in enumerate(other):
            row.append(above[place] + 1 if token == match else max(row[-1], above[place + 1]))
    return row[-1]


def _require_references(hypotheses: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    if not hypotheses:
        raise UserError("no captions to score; give at least one")
    if len(hypotheses) != len(references):
        raise UserError(
            f"{len(hypotheses)} captions and references of {len(references)} images; give a list of references for "
            "each caption"
        )
    for place, texts in enumerate(references):
        if isinstance(texts, str):
            raise UserError(f"the references of image {place} are a single text; put it into a list")
        if not texts:
            raise UserError(f"image {place} has no reference; give one, or leave the image out")
