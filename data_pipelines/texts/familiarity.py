"""Which names training captions had: a table of their words, kept beside a run.

A table holds how often runs of one to four words (n-grams) and whole captions occur, by 32 bits of a hash. It is exact
but for names that share a hash with others, one in ``2^32 / entries``; where the entries are too many, n-grams that
occur least often are left out, the longest first, and it says which.
"""

import dataclasses
import hashlib
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal, TypeAlias, get_args

import numpy as np
from jaxtyping import Bool, Int, UInt8, UInt32, UInt64

from lit_het.errors import UserError
from lit_het.files import completed
from lit_het.untrusted import Malformed, read_npz_array

MAX_BYTES = 2**26
"""The largest table, 64 MiB."""

MAX_ORDER = 4
"""The most words of an n-gram."""

Rule: TypeAlias = Literal["caption", "words"]
"""What makes a name familiar: a caption that is this name, or captions with its words."""

_ORDERS = range(MAX_ORDER + 1)  # 0 of whole captions
_MAX_ENTRIES = MAX_BYTES // 5 - 1024  # of 4 bytes for the hash and 1 for the count; the rest holds headers
_CAPTIONS_PER_BLOCK = 2**16
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # of Knuth's multiplicative hash, 2^64 / golden ratio


@dataclasses.dataclass(frozen=True)
class Familiarity:
    """How often captions have n-grams.

    Attributes:
        keys: of the entries, ascending.
        counts: logarithm of each entry's count to base 2, rounded down.
        least: the least count of the entries of each order: of whole captions, and of n-grams of 1 to 4 words.
        num_captions: that were read.
        is_sample: whether training had further ones.
        digest: of the training data.
    """

    keys: UInt32[np.ndarray, " e"]
    counts: UInt8[np.ndarray, " e"]
    least: Int[np.ndarray, " orders"]
    num_captions: int
    is_sample: bool
    digest: str

    @staticmethod
    def of(captions: Iterable[str], digest: str, *, is_sample: bool = False, most: int = _MAX_ENTRIES) -> "Familiarity":
        """Counts the n-grams of captions.

        Args:
            captions: of the training samples, or of some of them, evenly spread.
            digest: of the training data.
            is_sample: whether training had further captions.
            most: entries to keep.
        """
        by_order: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in _ORDERS]
        num_captions = 0
        for block in _blocks(captions):
            num_captions += len(block)
            for order, found in zip(by_order, _hashes(block), strict=True):
                order.append(np.unique(found, return_counts=True))
        merged = [_merged(order) for order in by_order]
        least = _least(merged, most)
        kept = [(keys[times >= low], times[times >= low]) for (keys, times), low in zip(merged, least, strict=True)]
        keys, times = _merged(kept)
        counts = np.log2(times).astype(np.uint8)
        return Familiarity(keys, counts, least, num_captions, is_sample, digest)

    def log_counts(self, names: Sequence[str], rule: Rule) -> Int[np.ndarray, " k"]:
        """Returns the logarithm of how often captions have each name, to base 2 and rounded down; -1 for never.

        Of a name of more than four words it is that of its rarest four words that follow one another.
        """
        found = np.full(len(names), -1)
        for place, name in enumerate(names):
            words = words_of(name)
            order = 0 if rule == "caption" else min(len(words), MAX_ORDER)
            if words:
                found[place] = self._found(_hashes([words])[order]).min()
        return found

    def knows(self, names: Sequence[str], rule: Rule = "words") -> Bool[np.ndarray, " k"]:
        """Returns which names captions have."""
        return self.log_counts(names, rule) >= 0

    def _found(self, keys: UInt32[np.ndarray, " n"]) -> Int[np.ndarray, " n"]:
        if not len(self.keys):
            return np.full(len(keys), -1)
        places = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[places] == keys, self.counts[places].astype(int), -1)

    def __str__(self) -> str:
        what = f"the words of {self.num_captions:,} training captions{' of more' * self.is_sample}"
        kinds = ["whole captions", *(f"runs of {order} words" for order in _ORDERS[1:])]
        rare = [f"{kind} in fewer than {low}" for kind, low in zip(kinds, self.least, strict=True) if low > 1]
        left_out = f", without {' and '.join(rare)}" if rare else ""
        return f"{what}{left_out}; of other names 1 in {2**32 // max(1, len(self.keys)):,} is taken for one of them"

    def save(self, path: Path) -> None:
        """Writes the table to a file; raises a `UserError` if that is not possible."""
        try:
            with completed(path) as partial, partial.open("wb") as file:
                np.savez(file, **dataclasses.asdict(self))
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror})") from error

    @staticmethod
    def load(path: Path) -> "Familiarity | None":
        """Reads a table; None if there is no file.

        Raises:
            UserError: the file is not a table.
        """
        try:
            if path.stat().st_size > MAX_BYTES:
                raise Malformed(f"it has more than {MAX_BYTES:,} bytes")
            fields = {field.name: read_npz_array(path, field.name) for field in dataclasses.fields(Familiarity)}
            return _checked(fields)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, Malformed, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:300]
            raise UserError(f"{path} is not a table of words ({reason}); delete it, and calibrate again") from error


def words_of(text: str) -> list[str]:
    """Returns the words of a text in lower case, without punctuation and without an article before them."""
    words = re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())
    return words[1:] if words[:1] in (["a"], ["an"], ["the"]) and len(words) > 1 else words


def rules() -> tuple[Rule, ...]:
    """Returns all rules."""
    return get_args(Rule)


def _blocks(captions: Iterable[str]) -> Iterator[list[list[str]]]:
    block: list[list[str]] = []
    for caption in captions:
        block.append(words_of(caption))
        if len(block) == _CAPTIONS_PER_BLOCK:
            yield block
            block = []
    if block:
        yield block


def _hashes(captions: Sequence[Sequence[str]]) -> list[UInt32[np.ndarray, " n"]]:
    """Returns the keys of whole captions, then of their n-grams by order, with repetitions."""
    vocabulary = {word: number for number, word in enumerate({word for words in captions for word in words})}
    of_words = np.array([_hash_of_word(word) for word in vocabulary], np.uint64)
    lengths = np.array([len(words) for words in captions], int)
    numbers = np.array([vocabulary[word] for words in captions for word in words], int)
    words = of_words[numbers] if len(numbers) else np.empty(0, np.uint64)
    # How many words of its caption are left from each word on, itself included.
    left = np.repeat(np.cumsum(lengths), lengths) - np.arange(len(numbers))
    found, grams = [], np.zeros_like(words)
    for order in range(1, MAX_ORDER + 1):
        grams = grams[: len(words) - order + 1] * _MULTIPLIER + words[order - 1 :]
        found.append(_key(grams[left[: len(grams)] >= order], order))
    return [_key(_whole(words, lengths), 0), *found]


def _whole(words: UInt64[np.ndarray, " w"], lengths: Int[np.ndarray, " c"]) -> UInt64[np.ndarray, " c"]:
    """Returns the hash of all words of each caption that has any."""
    lengths = lengths[lengths > 0]
    if not len(lengths):
        return np.empty(0, np.uint64)
    place = np.arange(len(words)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    # The words are weighted by their place, so that their order counts.
    weighted = words * (2 * place + 1).astype(np.uint64) ** np.uint64(3)
    return np.add.reduceat(weighted, np.cumsum(lengths) - lengths)


def _key(hashes: UInt64[np.ndarray, " n"], order: int) -> UInt32[np.ndarray, " n"]:
    """Returns 32 bits of hashes, other ones for each order."""
    mixed = (hashes ^ np.uint64(order)) * _MULTIPLIER
    mixed = (mixed ^ (mixed >> np.uint64(29))) * _MULTIPLIER
    return (mixed >> np.uint64(32)).astype(np.uint32)


def _hash_of_word(word: str) -> int:
    content = word.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _merged(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[UInt32[np.ndarray, " e"], Int[np.ndarray, " e"]]:
    """Returns keys without repetitions, ascending, and the sums of their counts."""
    keys = np.concatenate([np.empty(0, np.uint32), *(keys for keys, _ in parts)])
    times = np.concatenate([np.empty(0, int), *(times for _, times in parts)])
    unique, places = np.unique(keys, return_inverse=True)
    return unique, np.bincount(places, times, len(unique)).astype(int)


def _least(merged: Sequence[tuple[np.ndarray, np.ndarray]], most: int) -> Int[np.ndarray, " orders"]:
    """Returns the least count to keep of each order: raised for the longest n-grams until all fit.

    No count is raised far above twice that of shorter ones; whole captions, by which names are told apart, come last.
    """
    least = np.ones(len(merged), int)
    sizes = np.array([len(keys) for keys, _ in merged])
    while sizes.sum() > most:
        orders = [order for order in _ORDERS[:0:-1] if sizes[order] and least[order] <= 2 * least[1:].min()]
        order = orders[0] if orders else 0
        least[order] += 1
        sizes[order] = (merged[order][1] >= least[order]).sum()
    return least


def _checked(fields: dict[str, np.ndarray]) -> Familiarity:
    """Returns the table of a file's arrays."""
    keys, counts, least = fields["keys"], fields["counts"], fields["least"]
    if (keys.dtype, counts.dtype) != (np.uint32, np.uint8) or keys.ndim != 1 or keys.shape != counts.shape:
        raise Malformed("its keys and counts do not fit one another")
    if (keys[1:] <= keys[:-1]).any():
        raise Malformed("its keys are not in order")
    if least.shape != (len(_ORDERS),) or least.dtype.kind != "i":
        raise Malformed("its least counts have another form")
    num_captions, is_sample = int(fields["num_captions"]), bool(fields["is_sample"])
    return Familiarity(keys, counts, least, num_captions, is_sample, str(fields["digest"]))
