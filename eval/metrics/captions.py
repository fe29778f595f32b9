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

# Java's letters are those of Unicode 6, without fractions and numbers that Python counts among them; later ones and the
# marks of other scripts are left out, and split words.
_NO_LETTERS = (
    r"\xb2\xb3\xb9\xbc-\xbe\u037f\u0528-\u052f\u0560\u0588\u05ef\u0860-\u088e\u08a1\u08ad-\u08c9\u0978\u0980"
    r"\u09f4-\u09fc\u0af9\u0b72-\u0b77\u0bf0-\u0bf2\u0c34\u0c5a-\u0c5d\u0c78-\u0c80\u0cdd\u0d04\u0d54-\u0d5f"
    r"\u0d70-\u0d78\u0de6-\u0def\u0e86\u0e89\u0e8c\u0e8e-\u0e93\u0e98\u0ea0\u0ea8\u0ea9\u0eac\u0f2a-\u0f33"
    r"\u1369-\u137c\u13f5-\u13fd\u16ee-\u16f8\u170d\u171f\u17f0-\u17f9\u1878\u191d\u191e\u19b0-\u19c0\u19c8\u19c9"
    r"\u19da\u1b4c\u1c80-\u1cbf\u1cf2\u1cf3\u1cfa\u2070\u2074-\u2079\u2080-\u2089\u2150-\u2182\u2185-\u2793\u2c2f"
    r"\u2c5f\u2cfd\u3007-\u3029\u3038-\u303a\u312e\u312f\u3192-\u3195\u31bb-\u31bf\u3220-\u32bf\u4db6-\u4dbf"
    r"\u9fcd-\u9fff\ua698-\ua69d\ua6e6-\ua6ef\ua78f\ua794-\ua79f\ua7ab-\ua7f7\ua830-\ua835\ua8fd\ua8fe\ua9e0-\ua9fe"
    r"\uaa7e\uaa7f\uab30-\uabbf"
)
# Marks of these scripts, and a few signs, are as good as letters within words, but not beside hyphens and digits.
_MARKS = (
    r"\u02c2-\u0379\u0384\u0385\u03f6\u0483-\u0487\u055a-\u055f\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7"
    r"\u0615-\u061a\u064b-\u065e\u0670\u06d6-\u06ed\u06fd\u06fe\u070f-\u07b0\u07eb-\u07f3\u0900-\u0903\u093c-\u094e"
    r"\u0951-\u0955\u0962\u0963\u0981-\u0983\u09bc-\u09c4\u09c7\u09c8\u09cb-\u09cd\u09d7\u09e2\u09e3\u0a01-\u0a03"
    r"\u0a3c\u0a3e-\u0a4f\u0a81-\u0a83\u0abc-\u0acf\u0b82\u0bbe-\u0bc2\u0bc6-\u0bc8\u0bca-\u0bcd\u0c01-\u0c03"
    r"\u0c3e-\u0c56\u0d3e-\u0d44\u0d46-\u0d48\u0e31-\u0e3a\u0e47-\u0e4e\u0eb1-\u0ebc\u0ec8-\u0ecd"
)
# Signs of other scripts, such as the danda.
_SIGNS = (
    r"\u037e\u0387\u0589\u05be\u05c0\u05c3\u05c6\u05f3\u05f4\u0600-\u0603\u0606-\u060c\u0614\u061b\u061e\u061f\u066a"
    r"\u066d\u06d4\u0700-\u070d\u07f6-\u07f8\u0964\u0965\u0e3f\u0e4f\u1fbd\u2023\u203e-\u2041\u207a-\u207e\u208a-\u208e"
    r"\uffe0\uffe1\uffe5\uffe6"
)
_LETTER = rf"(?-i:[^\W\d_{_NO_LETTERS}]|[{_MARKS}\u1885\u1886])"
_PLAIN = rf"(?-i:[^\W_{_NO_LETTERS}]|[\xad\u1885\u1886])"  # and digits
_LETTERS = rf"(?:{_PLAIN}|[{_MARKS}])"
_DIGIT = rf"[^\D{_NO_LETTERS}]"
_APOSTROPHE = "['’\x92]"
_WORD = rf"{_LETTER}{_LETTERS}*(?:[.!?]{_LETTER}{_LETTERS}*)*"
_PREFIX = rf"(?:[dlo]{_APOSTROPHE}(?={_LETTERS}{{2}}))?"
_HYPHENATED = rf"{_PREFIX}{_PLAIN}+(?:[-_֊‐‑]{_PREFIX}{_PLAIN}+)*"
_VERB = rf"{_APOSTROPHE}(?:s|m|d|ll|re|ve)(?![a-z])"
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
        rf"([a-z]+?)n{_APOSTROPHE}t",
        rf"({_WORD}){_VERB}",
        rf"({_VERB}|n{_APOSTROPHE}t(?![a-z]))",
        rf"({_WORD})",
        rf"({_HYPHENATED})",
        rf"((?-i:[A-HJ-XZn]){_APOSTROPHE}(?:(?!\d){_PLAIN}){{2,}})",  # N'Sync
        rf"([a-z]+[aeiouy]{_APOSTROPHE}(?-i:[aeiouA-Z])[a-z]*)",  # ma'am
        rf"(somethin'|dunkin'|ol'|c'mon|c'est|e'er|li'l|cap'n|s'mores)(?!{_LETTER})",
        rf"([dlj]{_APOSTROPHE}|{_APOSTROPHE}(?:till?|cause|em|n{_APOSTROPHE}|n(?=\s|$)))",
        rf"(y{_APOSTROPHE}){_LETTER}",
        rf"({_APOSTROPHE}[0-9]0s)",  # '90s
        rf"({_APOSTROPHE}[0-9]{{2}})(?=\s|$)",
        rf"([-+]?(?:{_DIGIT}*(?:[.:,٫٬]{_DIGIT}+)+|{_DIGIT}+))",
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
        rf"(@[a-z_][a-z_0-9]*|\#{_LETTER}+)",
        r"([<>]?[:;=][-o*']?(?-i:[()DPdpO])|[<>]?[:;=][-o*']?[\\{@|\[\]])(?![a-z0-9])",
        r"([-^=~<>']_[-^=~<>'])",
        rf"(</?[a-z][\w:.-]*(?:{_ATTRIBUTE})* */?>|<[!?][a-z-][^>]*>)",
        r"(&(?:amp|lt|gt|quot|apos|nbsp|mdash|ndash|\#\d+);)",
        "(-[lr][rcs]b-)",
        r"(pro-|anti-|-+|_+|\*+|\#+|@+|[?!]+|<<|>>|\\\*|''|``|\.{3,5}|\.(?: \.){2,4})",
        "([‚„‟]+)",
        rf"([{_SIGNS}!-/:-@\[-`{{-~¡¢-¥¦-©«-´¶-¹»¿×÷\x80\x91-\x94\x96\x97\xad–—―‘-‟‖‗†-•…‰-‸‹-※⁂⁄₠₤€℀-⅏⅕-⅞←-⯿、。〒・！-／：-＠［-･])",
    )
)
_SPELLED = {
    **{"(": "-lrb-", ")": "-rrb-", "[": "-lsb-", "]": "-rsb-", "{": "-lcb-", "}": "-rcb-"},
    **{"£": "#", "€": "$", "¤": "$", "₠": "$", "\x80": "$", "¢": "cents", "&amp;": "&", "&lt;": "<", "&gt;": ">"},
    **{"¼": "1/4", "½": "1/2", "¾": "3/4", "⅓": "1/3", "⅔": "2/3"},
}
_REMOVED = re.compile(
    "[.?!,:;…\xad]|\\.[. ]+|-{1,4}|[–—―\x96\x97]|''|``|['\"`«»‘’‛“”‹›\x91-\x94]|&(?:quot|apos|nbsp|.dash);",
    re.IGNORECASE,
)


def tokenize(caption: str) -> str:
    """Returns the tokens of a caption in lower case and without punctuation, with a space between each two.

    They are those that the COCO caption evaluation compares, of Stanford's ``PTBTokenizer`` (CoreNLP 3.4.1), without
    Java: so brackets stay, as ``-lrb-``, "can't" becomes ``ca n't``, and "1 1/2" is one token with a no-break space.
    Rare texts differ: an abbreviation with a word attached ("Inc.a"), faces in brackets ("(^_^)"), references to
    letters ("&eacute;"), and quotation marks side by side ("««"). And Java reads all captions as
    one text, in which a caption that ends in "plan B." has the token ``b.`` or ``b``, depending on the caption after
    it; here it is ``b.``.
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
        token = "" if _REMOVED.fullmatch(found[1]) else _spelled(found[1])
        if token:  # not of soft hyphens alone
            tokens.append(token)
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
