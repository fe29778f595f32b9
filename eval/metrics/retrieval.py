"""Retrieval between images and texts: the rank of the best correct item, with any number of captions per image.

Image → text counts a hit if any caption of the image is in the top K, text → image if the image is. An image without
captions is not a query, but texts can retrieve it.

The rank of the best correct item follows from the number of other items with a strictly higher score. These are counted
block by block, in both directions at once, so that memory holds both sets of embeddings and one block of scores. The
rows of a block are split over the devices of this process. Ties count as the expectation over random orders of the tied
items. For the top items of a few queries see `lit_het.eval.predictions.highest`.
"""

import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lit_het.errors import UserError
from lit_het.eval.metrics.significance import standard_error
from lit_het.sharding import MeshConfig, batch_sharding, num_batch_shards, tree_shardings

RECALL_AT = (1, 5, 10)

_BLOCK_IMAGES = 1024
_BLOCK_TEXTS = 8192
# The owner of padding rows and columns.
_PADDING = -1


@dataclasses.dataclass(frozen=True)
class Ranks:
    """The rank of the best correct item of each query.

    Attributes:
        num_above: other items that score strictly higher.
        num_tied: other items with exactly its score.
        num_best: correct items with that score, at least one.
        num_correct: correct items.
        num_items: items that are ranked.
        image: the image of each query: the query itself, or the image that the caption belongs to.
    """

    num_above: Int[np.ndarray, " q"]
    num_tied: Int[np.ndarray, " q"]
    num_best: Int[np.ndarray, " q"]
    num_correct: Int[np.ndarray, " q"]
    num_items: int
    image: Int[np.ndarray, " q"]

    def hits(self, count: int) -> Float[np.ndarray, " q"]:
        """Returns the probability that a correct item is in the top ``count``, over random orders of tied items."""
        return _any_drawn(self.num_best, self.num_tied + self.num_best, count - self.num_above)

    def chance(self, count: int) -> float:
        """Returns the mean of `hits` if all scores were equal."""
        return float(_any_drawn(self.num_correct, np.full_like(self.num_correct, self.num_items), count).mean())

    @property
    def rank(self) -> Float[np.ndarray, " q"]:
        """Rank of the best correct item, from 1: the expectation over random orders of tied items."""
        return self.num_above + (self.num_tied + self.num_best + 1) / (self.num_best + 1)

    def metrics(self) -> dict[str, float]:
        """Returns ``recall1``, ``recall5``, ``recall10``, ``chance_recall*`` and ``median_rank``."""
        recalls = {f"recall{count}": float(self.hits(count).mean()) for count in RECALL_AT}
        chances = {f"chance_recall{count}": self.chance(count) for count in RECALL_AT}
        return {**recalls, "median_rank": float(np.median(self.rank)), **chances}

    def standard_errors(self) -> dict[str, float]:
        """Returns standard errors of the recalls over images (each with all its captions); ranked items are fixed."""
        return {f"recall{count}": standard_error(self.hits(count), self.image) for count in RECALL_AT}


@dataclasses.dataclass(frozen=True)
class RetrievalResult:
    """Ranks in both directions.

    Attributes:
        image_to_text: of the images with captions, in order.
        text_to_image: of the texts, in order.
    """

    image_to_text: Ranks
    text_to_image: Ranks

    def metrics(self) -> dict[str, float]:
        """Returns `Ranks.metrics` of both directions, named ``image_to_text_*`` and ``text_to_image_*``."""
        return self._named(Ranks.metrics)

    def standard_errors(self) -> dict[str, float]:
        """Returns `Ranks.standard_errors` of both directions, under the names of `metrics`."""
        return self._named(Ranks.standard_errors)

    def _named(self, measure: Callable[[Ranks], dict[str, float]]) -> dict[str, float]:
        directions = {"image_to_text": self.image_to_text, "text_to_image": self.text_to_image}
        return {f"{name}_{key}": value for name, ranks in directions.items() for key, value in measure(ranks).items()}


def retrieve(
    images: Float[np.ndarray, "n d"],
    texts: Float[np.ndarray, "t d"],
    owner: Int[np.ndarray, " t"],
    advance: Callable[[int], object] = lambda count: None,
) -> RetrievalResult:
    """Ranks all texts for each image and all images for each text by inner product.

    Args:
        images: unit embeddings.
        texts: unit embeddings of the captions.
        owner: the image of each caption; captions of one image need not be adjacent.
        advance: called with the number of images just finished; the total is ``n``.
    """
    _check(images, texts, owner)
    # Sorted by owner, the captions of a block of images are adjacent, and a block of texts is compared with few images.
    order = np.argsort(owner, kind="stable")
    blocks = _Blocks(images, texts[order], owner[order])
    right = blocks.correct_scores()
    best = np.full(len(images), -np.inf, np.float32)
    # Unbuffered: an image with several captions occurs several times in the index.
    np.maximum.at(best, owner[order], right)
    above, tied, text_above, text_tied = blocks.count(best, right, advance)
    num_best = np.bincount(owner[order], weights=right == best[owner[order]], minlength=len(images)).astype(np.int64)
    num_correct = np.bincount(owner, minlength=len(images))
    is_query, place = num_correct > 0, np.argsort(order)
    one = np.ones(len(texts), np.int64)
    return RetrievalResult(
        Ranks(
            above[is_query],
            tied[is_query],
            num_best[is_query],
            num_correct[is_query],
            len(texts),
            np.flatnonzero(is_query),
        ),
        Ranks(text_above[place], text_tied[place], one, one, len(images), owner),
    )


def _check(images: np.ndarray, texts: np.ndarray, owner: np.ndarray) -> None:
    if not len(owner):
        raise UserError("retrieval: there are no captions; check that the split has images with captions")
    outside = np.flatnonzero((owner < 0) | (owner >= len(images)))
    if len(outside):
        text = outside[0]
        raise UserError(f"retrieval: caption {text} belongs to image {owner[text]} of {len(images)}; count from 0")
    for name, embeddings in (("image", images), ("text", texts)):
        if not np.isfinite(embeddings.sum(axis=1, dtype=np.float32)).all():
            raise UserError(
                f"retrieval: an embedding ({name}) is not finite; training diverged, use an earlier checkpoint"
            )


class _Blocks:
    """Computes scores of images and texts block by block; texts are sorted by their owner."""

    def __init__(self, images: np.ndarray, texts: np.ndarray, owner: np.ndarray):
        self._images, self._owner = images, owner
        self._mesh = MeshConfig().build(jax.local_devices())
        self._rows, shards = batch_sharding(self._mesh), num_batch_shards(self._mesh)
        # Every block has the same shape, a multiple of the devices: one compiled program serves all.
        self._size = -(-min(_BLOCK_IMAGES, len(images)) // shards) * shards
        self._width = min(_BLOCK_TEXTS, len(texts))
        self._texts = self._in_blocks(texts.astype(np.float32), 0.0)

    def correct_scores(self) -> Float[np.ndarray, " t"]:
        """Returns the score of every text with its image.

        The scores come from the same matrix products as in `count`, not from inner products of single vectors: equal
        embeddings then have bitwise equal scores, and ties are exact.
        """
        right = np.empty(len(self._owner), np.float32)
        for rows, images in self._image_blocks():
            start, stop = np.searchsorted(self._owner, [rows.start, rows.stop])
            for number in range(start // self._width, -(-stop // self._width)):
                columns = slice(max(start, number * self._width), min(stop, (number + 1) * self._width))
                scores = np.asarray(_scores(images, self._texts[number]))
                row, column = self._owner[columns] - rows.start, np.arange(columns.start, columns.stop)
                right[columns] = scores[row, column - number * self._width]
        return right

    def count(
        self, best: Float[np.ndarray, " n"], right: Float[np.ndarray, " t"], advance: Callable[[int], object]
    ) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"], Int[np.ndarray, " t"], Int[np.ndarray, " t"]]:
        """Counts other items above and tied with the best caption of each image, then with the image of each text."""
        right_blocks = self._in_blocks(right, np.inf)
        owners = self._in_blocks(self._owner.astype(np.int32), _PADDING)
        image_counts: list[np.ndarray] = []
        text_counts = np.zeros((2, len(right)), np.int64)
        for rows, images in self._image_blocks():
            numbers = np.full(self._size, _PADDING, np.int32)
            numbers[: len(rows)] = rows
            # Infinity for padding rows: no score is above it.
            padded = np.full(self._size, np.inf, np.float32)
            padded[: len(rows)] = best[rows.start : rows.stop]
            row_counts, column_counts = _count(
                images, *jax.device_put((numbers, padded), self._rows), self._texts, owners, right_blocks
            )
            image_counts.append(np.asarray(row_counts)[:, : len(rows)])
            text_counts += np.asarray(column_counts).reshape(2, -1)[:, : len(right)]
            advance(len(rows))
        above, tied = np.concatenate(image_counts, axis=1)
        return above, tied, text_counts[0], text_counts[1]

    def _image_blocks(self) -> Iterator[tuple[range, Array]]:
        for start in range(0, len(self._images), self._size):
            rows = range(start, min(start + self._size, len(self._images)))
            block = np.zeros((self._size, self._images.shape[1]), np.float32)
            block[: len(rows)] = self._images[rows.start : rows.stop]
            yield rows, jax.device_put(block, self._rows)

    def _in_blocks(self, values: Float[np.ndarray, "t *rest"] | Int[np.ndarray, " t"], padding: int | float) -> Array:
        missing = -len(values) % self._width
        padded = np.pad(values, [(0, missing)] + [(0, 0)] * (values.ndim - 1), constant_values=padding)
        blocks = padded.reshape(-1, self._width, *values.shape[1:])
        # Texts are replicated: every device ranks all texts for its own rows of images.
        return jax.device_put(blocks, tree_shardings(blocks, self._mesh))


@jax.jit
def _scores(images: Float[Array, "b d"], texts: Float[Array, "w d"]) -> Float[Array, "b w"]:
    # "highest": full float32 also on accelerators, whose default precision creates ties and swaps ranks.
    return jnp.dot(images, texts.T, precision="highest")


@jax.jit
def _count(
    images: Float[Array, "b d"],
    numbers: Int[Array, " b"],
    best: Float[Array, " b"],
    texts: Float[Array, "blocks w d"],
    owners: Int[Array, "blocks w"],
    right: Float[Array, "blocks w"],
) -> tuple[Int[Array, "two b"], Int[Array, "two blocks w"]]:
    """Counts other items above and tied: for rows over all blocks of texts, for columns over this block of images."""

    # The scan holds one block of scores at a time, so that memory does not grow with the number of texts.
    def count_block(
        row_counts: Int[Array, "two b"], block: tuple[Array, Array, Array]
    ) -> tuple[Int[Array, "two b"], Int[Array, "two w"]]:
        texts, owners, right = block
        scores = _scores(images, texts)
        is_other = owners[None] != numbers[:, None]
        is_other &= (owners[None] != _PADDING) & (numbers[:, None] != _PADDING)

        def compared(bounds: Float[Array, "..."], axis: int) -> Int[Array, "two _"]:
            above = jnp.sum(is_other & (scores > bounds), axis=axis, dtype=jnp.int32)
            return jnp.stack([above, jnp.sum(is_other & (scores == bounds), axis=axis, dtype=jnp.int32)])

        return row_counts + compared(best[:, None], 1), compared(right[None], 0)

    zeros = jnp.zeros((2, images.shape[0]), jnp.int32)
    row_counts, column_counts = jax.lax.scan(count_block, zeros, (texts, owners, right))
    return row_counts, column_counts.swapaxes(0, 1)


def _any_drawn(
    num_correct: Int[np.ndarray, " q"], num_items: Int[np.ndarray, " q"], num_drawn: Int[np.ndarray, " q"] | int
) -> Float[np.ndarray, " q"]:
    """Returns the probability that ``num_drawn`` items, drawn without replacement, include a correct item."""
    drawn = np.clip(num_drawn, 0, num_items)
    none = np.ones(len(num_items))
    for number in range(int(drawn.max(initial=0))):
        left = num_items - number
        # The hypergeometric probability of no correct item as a product over draws; binomials would overflow.
        none *= np.where(number < drawn, np.maximum(left - num_correct, 0) / np.maximum(left, 1), 1.0)
    return 1 - none
