"""``lit-het tokenizer train``: a SentencePiece model of the captions of one's own shards."""

import collections
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lit_het.console import Bar, message
from lit_het.data_pipelines.labels import text_of
from lit_het.data_pipelines.shards.index import ShardIndex
from lit_het.data_pipelines.shards.portions import Portion
from lit_het.data_pipelines.shards.storage import Unreadable, content_or_raise
from lit_het.data_pipelines.shards.writing import expand
from lit_het.data_pipelines.texts.captions import captions_in, questions_in
from lit_het.data_pipelines.texts.captions_config import TextPlace, member_of, weights_of
from lit_het.data_pipelines.texts.tokenizers import SentencePieceTokenizer, train_sentencepiece
from lit_het.errors import UserError, pluralize
from lit_het.files import completed

MOST_SAMPLES = 1_000_000
"""At most this many evenly spaced samples are read: further captions would change few tokens."""

MOST_TOKENS = 64
"""The longest text length that is proposed, that of SigLIP."""

LEAST_SEEN = 5
"""A token of fewer distinct captions is rare: it is hardly trained, and those of none are not."""

# The largest share of rare tokens in new captions, and the distinct captions that are enough for any vocabulary.
_MOST_RARE, _MANY = 0.05, 100_000
_SAMPLES_PER_READ = 1024
# So many captions tell the length of all.
_MEASURED = 10_000


class Trained(NamedTuple):
    """A trained tokenizer.

    Attributes:
        pieces: size of its vocabulary.
        length: tokens of a caption that cut one in a hundred at most, a multiple of 8 and at most `MOST_TOKENS`.
        cut: share of the captions that are longer.
    """

    pieces: int
    length: int
    cut: float


def train_tokenizer(
    shards: Sequence[str],
    captions: Sequence[str],
    size: int,
    output: Path,
    *,
    lowercase: bool = True,
    seen_often: bool = False,
) -> Trained:
    """Trains a model of the captions and writes it.

    Args:
        shards: tar files, folders, patterns or lists.
        captions: the members with the captions or questions, see `lit_het.data_pipelines.texts.captions`.
        size: of the vocabulary, in pieces; it is smaller if the captions yield fewer.
        output: the file to write; it is replaced when the model is complete.
        lowercase: whether the captions are put into lower case.
        seen_often: whether the vocabulary is made smaller where new captions would have rare pieces, see `LEAST_SEEN`.
    """
    texts = read_captions(shards, list(dict.fromkeys(captions)))
    size = size_seen_often(texts, size, lowercase) if seen_often else size
    message(f"training up to {size:,} pieces on {pluralize(len(texts), 'caption')}")
    # Not a unigram model: of captions that repeat few words its training leaves little more than single letters.
    model = train_sentencepiece(texts, vocabulary_size=size, model_type="bpe", lowercase=lowercase)
    try:
        with completed(output) as partial:
            partial.write_bytes(model)
    except OSError as error:
        raise UserError(f"{output} cannot be written ({error.strerror}); choose another --output") from error
    tokenizer = SentencePieceTokenizer(model, length=MOST_TOKENS + 1, lowercase=lowercase)
    some = texts[:: max(1, len(texts) // _MEASURED)]
    tokens = np.sum(tokenizer(some) != tokenizer.padding_id, axis=1)
    length = min(8 * int(np.ceil(np.quantile(tokens, 0.99) / 8)), MOST_TOKENS)
    return Trained(tokenizer.vocabulary_size, length, float(np.mean(tokens > length)))


def size_seen_often(texts: Sequence[str], size: int, lowercase: bool) -> int:
    """Returns a size, or the largest half, quarter and so on of it with few rare tokens in captions held out."""
    distinct = list(dict.fromkeys(text.lower() if lowercase else text for text in texts))
    if len(distinct) >= _MANY:
        return size
    is_new = Portion(90, by="key").marks([text.encode() for text in distinct])
    known, new = ([text for text, one in zip(distinct, is_new, strict=True) if one == side] for side in (False, True))
    # Single characters are not a choice: the model covers them all.
    least, fewer, shares = 2 * len({*"".join(distinct)}), size, {size: _rare(known, new, size, lowercase)}
    while shares[fewer] > _MOST_RARE and (fewer := fewer // 2) >= least:
        shares[fewer] = _rare(known, new, fewer, lowercase)
    chosen = min(shares, key=shares.__getitem__)  # of equal ones the first, which is the largest
    if chosen < size:
        message(
            f"{shares[size]:.0%} of the tokens of new captions would be rare (in fewer than {LEAST_SEEN} others); of a "
            f"smaller vocabulary {shares[chosen]:.0%} are"
        )
    return chosen


def _rare(known: Sequence[str], new: Sequence[str], size: int, lowercase: bool) -> float:
    """Returns the share of the tokens of new captions that fewer than `LEAST_SEEN` of the known ones have."""
    if not known or not new:
        return 1.0
    model = train_sentencepiece(known, vocabulary_size=size, model_type="bpe", lowercase=lowercase)
    tokenizer = SentencePieceTokenizer(model, length=1, lowercase=lowercase)
    seen = collections.Counter(piece for text in known for piece in {*tokenizer.pieces(text)})
    return float(np.mean([seen[piece] < LEAST_SEEN for text in new for piece in tokenizer.pieces(text)]))


def read_captions(shards: Sequence[str], places: Sequence[str]) -> list[str]:
    """Returns all captions of the shards, or of `MOST_SAMPLES` samples; messages count samples without any."""
    places = list(dict.fromkeys(one for several in places for one in weights_of(several)))
    addresses, members = expand(shards), list(dict.fromkeys(map(member_of, places)))
    with Bar("indexing", len(addresses), "shards") as bar:
        index = ShardIndex(addresses, optional=members, advance=bar.advance)
    count = min(len(index), MOST_SAMPLES)
    found, left_out = list[str](), collections.Counter[str]()
    with Bar("reading captions", count, "samples") as bar:
        for start in range(0, count, _SAMPLES_PER_READ):
            numbers = range(start, min(start + _SAMPLES_PER_READ, count))
            for contents in index.read([i * len(index) // count for i in numbers], members):
                for place in places:
                    try:
                        found += _texts(text_of(content_or_raise(contents[members.index(member_of(place))])), place)
                    except Unreadable:
                        left_out[place] += 1
            bar.advance(len(numbers))
    for place, number in left_out.items():
        if number == count:
            raise UserError(f"{' '.join(shards)}: no sample has a caption in .{place}; name the member with --captions")
        message(f"{number:,} of {count:,} samples have no caption in .{place} and are left out")
    return found


def _texts(content: str, place: str) -> list[str]:
    """Returns the captions in a member, or its questions and their answers."""
    if not TextPlace(place).has_questions:
        return captions_in(content, place)
    return [text for question, answers, _ in questions_in(content, place) for text in (question, *answers)]
