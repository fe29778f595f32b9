"""Retrieval between images and texts: at which rank the first right item stands, with any number of captions an image.

Image → text counts a hit where any caption of the image is among the best K, text → image where the image is. An image
without captions is no query, but texts may find it.

The rank of the best right item follows from how many others score strictly higher. These are counted block by block, in
both directions at once, so that memory holds both sets of embeddings and one block of scores. The rows of a block are
split over the devices of this process. Ties are counted fairly, as the expectation over a random order of the items
that tie. `lit_het.eval.predictions.highest` names the best items of a few queries.
"""

import dataclasses
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from lit_het.errors import UserError
from lit_het.eval.significance import standard_error
from lit_het.sharding import MeshConfig, batch_sharding, num_batch_shares, tree_shardings

RECALL_AT = (1, 5, 10)

_BLOCK_IMAGES = 1024
_BLOCK_TEXTS = 8192
_NOBODY = -1  # the number of what pads a block


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Where the best right item of each query stands.

    Attributes:
        num_above: other items that score strictly higher.
        num_tied: other items with exactly its score.
        num_best: right items with that score, at least one.
        num_right: right items.
        num_items: of which the queries choose.
        image: that each query is, or belongs to.
    """

    num_above: Int[np.ndarray, " q"]
    num_tied: Int[np.ndarray, " q"]
    num_best: Int[np.ndarray, " q"]
    num_right: Int[np.ndarray, " q"]
    num_items: int
    image: Int[np.ndarray, " q"]

    def hits(self, count: int) -> Float[np.ndarray, " q"]:
        """Probability that a right item is among the best ``count``, over random orders of tied items."""
        return _any_drawn(self.num_best, self.num_tied + self.num_best, count - self.num_above)

    def chance(self, count: int) -> float:
        """The mean of `hits` where all scores are equal."""
        return float(_any_drawn(self.num_right, np.full_like(self.num_right, self.num_items), count).mean())

    @property
    def rank(self) -> Float[np.ndarray, " q"]:
        """Rank of the best right item from 1 on, the expectation over random orders of tied items."""
        return self.num_above + (self.num_tied + self.num_best + 1) / (self.num_best + 1)

    def metrics(self) -> dict[str, float]:
        """``recall1``, ``recall5``, ``recall10``, ``chance_recall*`` and ``median_rank``."""
        recalls = {f"recall{count}": float(self.hits(count).mean()) for count in RECALL_AT}
        chances = {f"chance_recall{count}": self.chance(count) for count in RECALL_AT}
        return {**recalls, "median_rank": float(np.median(self.rank)), **chances}

    def standard_errors(self) -> dict[str, float]:
        """Standard errors of the recalls over images with all their captions, among the items that there are."""
        return {f"recall{count}": standard_error(self.hits(count), self.image) for count in RECALL_AT}


@dataclasses.dataclass(frozen=True)
class RetrievalResult:
    """Ranks in both directions.

    Attributes:
        image_to_text: of the images that have captions, in order.
        text_to_image: of the texts, in order.
    """

    image_to_text: Ranks
    text_to_image: Ranks

    def metrics(self) -> dict[str, float]:
        """The figures of `Ranks.metrics`, named ``image_to_text_*`` and ``text_to_image_*``."""
        return self._named(Ranks.metrics)

    def standard_errors(self) -> dict[str, float]:
        """Those of `Ranks.standard_errors`, under the names of `metrics`."""
        return self._named(Ranks.standard_errors)

    def _named(self, of_ranks: Callable[[Ranks], dict[str, float]]) -> dict[str, float]:
        directions = {"image_to_text": self.image_to_text, "text_to_image": self.text_to_image}
        return {f"{name}_{key}": value for name, ranks in directions.items() for key, value in of_ranks(ranks).items()}


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
        owner: the image of each caption, several captions of one in any places.
        advance: called with the images that were just finished, ``n`` in all.

    Raises:
        UserError: no captions, a caption of no image, or embeddings that are not finite.
    """
    _check(images, texts, owner)
    order = np.argsort(owner, kind="stable")
    blocks = _Blocks(images, texts[order], owner[order])
    right = blocks.right_scores()
    best = np.full(len(images), -np.inf, np.float32)
    np.maximum.at(best, owner[order], right)
    above, tied, above_of_text, tied_of_text = blocks.count(best, right, advance)
    num_best = np.bincount(owner[order], weights=right == best[owner[order]], minlength=len(images)).astype(np.int64)
    num_right = np.bincount(owner, minlength=len(images))
    asked, place = num_right > 0, np.argsort(order)
    one = np.ones(len(texts), np.int64)
    return RetrievalResult(
        Ranks(above[asked], tied[asked], num_best[asked], num_right[asked], len(texts), np.flatnonzero(asked)),
        Ranks(above_of_text[place], tied_of_text[place], one, one, len(images), owner),
    )


def _check(images: np.ndarray, texts: np.ndarray, owner: np.ndarray) -> None:
    if not len(owner):
        raise UserError("retrieval: there are no captions; check that the split holds images with captions")
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
    """Scores of images and texts block by block; texts are sorted by their owner."""

    def __init__(self, images: np.ndarray, texts: np.ndarray, owner: np.ndarray):
        self._images, self._owner = images, owner
        self._mesh = MeshConfig().build(jax.local_devices())
        self._rows, shares = batch_sharding(self._mesh), num_batch_shares(self._mesh)
        self._size = -(-min(_BLOCK_IMAGES, len(images)) // shares) * shares
        self._width = min(_BLOCK_TEXTS, len(texts))
        self._texts = self._in_blocks(texts.astype(np.float32), 0.0)

    def right_scores(self) -> Float[np.ndarray, " t"]:
        """The score of every text with its image.

        They come out of the products that `count` compares them with, not out of shorter ones: equal embeddings then
        have equal scores to the last bit.
        """
        right = np.empty(len(self._owner), np.float32)
        for rows, images in self._image_blocks():
            start, stop = np.searchsorted(self._owner, [rows.start, rows.stop])
            for number in range(start // self._width, -(-stop // self._width)):
                columns = slice(max(start, number * self._width), min(stop, (number + 1) * self._width))
                scores = np.asarray(_scores(images, self._texts[number]))
                of_rows, of_columns = self._owner[columns] - rows.start, np.arange(columns.start, columns.stop)
                right[columns] = scores[of_rows, of_columns - number * self._width]
        return right

    def count(
        self, best: Float[np.ndarray, " n"], right: Float[np.ndarray, " t"], advance: Callable[[int], object]
    ) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"], Int[np.ndarray, " t"], Int[np.ndarray, " t"]]:
        """Others above and tied with the best caption of each image, then with the image of each text."""
        right_blocks = self._in_blocks(right, np.inf)
        owners = self._in_blocks(self._owner.astype(np.int32), _NOBODY)
        of_images: list[np.ndarray] = []
        of_texts = np.zeros((2, len(right)), np.int64)
        for rows, images in self._image_blocks():
            numbers = np.full(self._size, _NOBODY, np.int32)
            numbers[: len(rows)] = rows
            padded = np.full(self._size, np.inf, np.float32)
            padded[: len(rows)] = best[rows.start : rows.stop]
            of_rows, of_columns = _count(
                images, *jax.device_put((numbers, padded), self._rows), self._texts, owners, right_blocks
            )
            of_images.append(np.asarray(of_rows)[:, : len(rows)])
            of_texts += np.asarray(of_columns).reshape(2, -1)[:, : len(right)]
            advance(len(rows))
        above, tied = np.concatenate(of_images, axis=1)
        return above, tied, of_texts[0], of_texts[1]

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
        return jax.device_put(blocks, tree_shardings(blocks, self._mesh))  # whole on every device


@jax.jit
def _scores(images: Float[Array, "b d"], texts: Float[Array, "w d"]) -> Float[Array, "b w"]:
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
    """Counts others above and tied, for rows over all blocks of texts and for columns over this block of images."""

    def of_block(
        of_rows: Int[Array, "two b"], block: tuple[Array, Array, Array]
    ) -> tuple[Int[Array, "two b"], Int[Array, "two w"]]:
        texts, owners, right = block
        scores = _scores(images, texts)
        is_other = owners[None] != numbers[:, None]
        is_other &= (owners[None] != _NOBODY) & (numbers[:, None] != _NOBODY)

        def compared(bounds: Float[Array, "..."], axis: int) -> Int[Array, "two _"]:
            above = jnp.sum(is_other & (scores > bounds), axis=axis, dtype=jnp.int32)
            return jnp.stack([above, jnp.sum(is_other & (scores == bounds), axis=axis, dtype=jnp.int32)])

        return of_rows + compared(best[:, None], 1), compared(right[None], 0)

    zeros = jnp.zeros((2, images.shape[0]), jnp.int32)
    of_rows, of_columns = jax.lax.scan(of_block, zeros, (texts, owners, right))
    return of_rows, of_columns.swapaxes(0, 1)


def _any_drawn(
    num_right: Int[np.ndarray, " q"], num_items: Int[np.ndarray, " q"], num_drawn: Int[np.ndarray, " q"] | int
) -> Float[np.ndarray, " q"]:
    """Probability that ``num_drawn`` of some items, drawn without replacement, hold a right one."""
    drawn = np.clip(num_drawn, 0, num_items)
    none = np.ones(len(num_items))
    for number in range(int(drawn.max(initial=0))):
        left = num_items - number
        none *= np.where(number < drawn, np.maximum(left - num_right, 0) / np.maximum(left, 1), 1.0)
    return 1 - none
