"""Evaluates the masks of panoptic segmentation that a model predicts, at the size of the true ones."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from lit_het.data_pipelines.images.headers import BrokenImage
from lit_het.data_pipelines.images.transforms import whole
from lit_het.data_pipelines.masks import PIXELS, SEGMENTS, Categories, ids_in, masks_of, nearest, places_of, segments_in
from lit_het.data_pipelines.shards.storage import Unreadable
from lit_het.errors import UserError
from lit_het.eval.drawings import thumbnails
from lit_het.eval.evaluation import Drawing, Evaluation
from lit_het.eval.metrics.panoptic import TrueSegments, class_errors, counts, figures, qualities
from lit_het.eval.predictions import image_quantity
from lit_het.eval.sets.open_sets import OpenSet
from lit_het.tasks import quantities
from lit_het.types import EvaluatedModel

_DRAWN_SIDE = 320
"""The longest side of drawn images and masks, in pixels."""


class _Drawn(NamedTuple):
    """True and predicted masks of an image, and what it adds to all classes together."""

    true: Int[np.ndarray, "h w 2"]
    predicted: Int[np.ndarray, "h w 2"]
    counts: Float[np.ndarray, " four"]


@dataclasses.dataclass(frozen=True)
class Panoptic:
    """The evaluator of a `PanopticConfig`."""

    opened: OpenSet
    categories: Categories
    shown: int

    def check(self, model: EvaluatedModel) -> None:
        """Checks that the model predicts masks of these classes."""
        name, found = self.opened.config.name, len(self.categories)
        if model.mask_classes is None:
            raise UserError("the model predicts no masks; take a run of panoptic segmentation (SegmentationConfig)")
        if model.mask_classes != found:
            raise UserError(
                f"{name}: has {found} categories, and the model predicts masks of {model.mask_classes}; take the set "
                "that it was trained on, or one with the same categories"
            )

    def __call__(self, model: EvaluatedModel) -> Evaluation:
        """Returns the figures of `lit_het.eval.metrics.panoptic`."""
        name, count = self.opened.config.name, self.opened.loader.num_samples
        wanted = {*np.linspace(0, count - 1, min(self.shown, count)).astype(int).tolist()}
        read, by_image, drawn = self.opened.contents([PIXELS, SEGMENTS]), list[np.ndarray](), dict[int, _Drawn]()
        for position, predicted in self._predicted(model):
            segments, true = self._truth(read(position), f"{name}: image {position}")
            by_image.append(counts(segments, _resized(predicted, true.shape), len(self.categories)))
            if position in wanted:
                drawn[position] = _Drawn(_resized(true, predicted.shape), predicted, by_image[-1].sum(axis=0))
        counted = np.stack(by_image)
        found, errors = figures(counted, np.array(self.categories.are_things))
        return Evaluation("panoptic", name, found, errors, draw=lambda: self._draw(counted, drawn))

    def _predicted(self, model: EvaluatedModel) -> Iterator[tuple[int, Int[np.ndarray, "h w 2"]]]:
        size, shards = self.opened.config.batch_size, model.features.num_shards
        for rows in self.opened.stream(model.features):
            masks = image_quantity(model, quantities.masks, rows.values, size, shards).astype(np.int32)
            # Stuff of an image is one segment, whatever instances a model gives it (as big_vision's evaluator).
            masks[..., 1] *= self.categories.is_thing[masks[..., 0]]
            yield from zip(rows.positions.tolist(), masks, strict=True)

    def _truth(self, members: Sequence[bytes], where: str) -> tuple[TrueSegments, Int[np.ndarray, "h w 2"]]:
        """Returns the true segments of an image, and its masks."""
        pixels, about = members
        try:
            ids, found = ids_in(pixels), segments_in(about, self.categories)
            labels, crowds = np.array([(one.label, one.is_crowd) for one in found], np.int64).reshape(-1, 2).T
            segments = TrueSegments(places_of(ids, found), labels, crowds.astype(bool))
            return segments, masks_of(ids, found, self.categories)
        except (BrokenImage, Unreadable) as error:
            raise UserError(f"{where}: {error}; prepare the set again") from error

    def _draw(self, counted: Float[np.ndarray, "n k four"], drawn: Mapping[int, _Drawn]) -> Drawing:
        """Returns what the page shows.

        The arrays: of each class ``quality`` ``[k 3]``, ``pq_error`` ``[k]``, ``counts`` ``[k 4]`` and ``is_thing``,
        see `lit_het.eval.metrics.panoptic`; of the images that are shown ``image`` ``[p h w 3]``, ``true`` and
        ``predicted`` ``[p h w 2]``, and ``found`` ``[p 3]``: the numbers of matched, wrong and missed segments.
        """
        images, loader = thumbnails(self.opened, np.array([*drawn]), _DRAWN_SIDE), self.opened.loader
        true, predicted, of_images = zip(*drawn.values(), strict=True)
        arrays = {
            "image": images,
            "true": np.stack([_resized(masks, images.shape[1:]) for masks in true]),
            "predicted": np.stack([_resized(masks, images.shape[1:]) for masks in predicted]),
            "found": np.stack(of_images)[:, 1:].astype(np.int64),
            "quality": qualities(counted.sum(axis=0)),
            "pq_error": class_errors(counted),
            "counts": counted.sum(axis=0),
            "is_thing": np.array(self.categories.are_things),
        }
        keys = [loader.index.key(loader.numbers[position]) for position in drawn]
        return Drawing(arrays, {"class_names": self.categories.names, "keys": keys})


def _resized(masks: Int[np.ndarray, "h w 2"], shape: tuple[int, ...]) -> Int[np.ndarray, "height width 2"]:
    """Returns masks with the sides at the start of another shape."""
    height, width, *_ = shape
    return nearest(masks, (height, width), whole(*masks.shape[:2]))
