"""Evaluates retrieval between the images and captions of a set, such as COCO or Flickr30k."""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

from lit_het.console import Bar
from lit_het.data_pipelines.texts.captions import captions_in
from lit_het.data_pipelines.texts.captions_config import CaptionUnit, member_of
from lit_het.errors import UserError
from lit_het.eval.drawings import thumbnails
from lit_het.eval.evaluation import Drawing, Evaluation
from lit_het.eval.features import Features
from lit_het.eval.metrics.retrieval import retrieve
from lit_het.eval.predictions import highest, image_quantity
from lit_het.eval.sets.open_sets import OpenSet
from lit_het.eval.sets.recognition import embed_texts
from lit_het.tasks import quantities
from lit_het.types import EvaluatedModel

_NUM_EXAMPLES = 12
_NUM_TOP = 5


@dataclasses.dataclass(frozen=True)
class Retrieval:
    """The evaluator of a `RetrievalConfig`; ``captions`` are those of each image."""

    opened: OpenSet
    captions: tuple[tuple[str, ...], ...]

    def check(self, model: EvaluatedModel) -> None:
        """Checks that the model can embed captions."""
        if model.text is None:
            raise UserError("retrieval needs an image-text model; classifiers and decoders have no text embeddings")
        for captions in itertools.islice(filter(None, self.captions), 1):
            model.text.tokenize(list(captions))

    def __call__(self, model: EvaluatedModel) -> Evaluation:
        """Returns the metrics of `lit_het.eval.metrics.retrieval.RetrievalResult`; raises as `check`."""
        self.check(model)
        features = with_captions(self.opened.features(model.features), self.captions)
        images = image_quantity(model, quantities.embeddings, features.values)
        # Captions of unreadable images are left out.
        texts = [caption for position in features.positions for caption in self.captions[position]]
        owner = np.repeat(np.arange(len(images)), [len(self.captions[position]) for position in features.positions])
        with Bar("embedding captions", len(texts), "captions") as bar:
            embeddings = embed_texts(model, texts, bar.advance)
        with Bar("ranking", len(images), "images") as bar:
            ranks = retrieve(images, embeddings, owner, bar.advance)
        found = ranks.metrics()
        figures = {name: value for name, value in found.items() if "chance_" not in name}
        return Evaluation(
            kind="retrieval",
            name=self.opened.config.name,
            figures=figures,
            errors=ranks.standard_errors(),
            chance={name.replace("chance_", ""): value for name, value in found.items() if "chance_" in name},
            draw=lambda: self._draw(images, embeddings, texts, owner, features.positions),
        )

    def _draw(
        self, images: np.ndarray, embeddings: np.ndarray, texts: list[str], owner: np.ndarray, positions: np.ndarray
    ) -> Drawing:
        """Returns examples: some images with their top captions, and some captions with their top images."""
        examples = np.unique(np.linspace(0, len(images) - 1, _NUM_EXAMPLES).astype(int))
        top_texts = highest(images[examples] @ embeddings.T, _NUM_TOP)
        queries = np.unique(np.linspace(0, len(texts) - 1, _NUM_EXAMPLES).astype(int))
        top_images = highest(embeddings[queries] @ images.T, _NUM_TOP)
        shown, place = np.unique(np.concatenate([examples, top_images.ravel()]), return_inverse=True)
        return Drawing(
            {
                "image": thumbnails(self.opened, positions[shown]),
                "query_rows": place[: len(examples)],
                "caption_is_right": owner[top_texts] == examples[:, None],
                "found": place[len(examples) :].reshape(top_images.shape),
                "image_is_right": top_images == owner[queries][:, None],
            },
            {
                "best_captions": [texts[text] for text in top_texts.ravel()],
                "queries": [texts[query] for query in queries],
            },
        )


def read_captions(opened: OpenSet, source: str, unit: CaptionUnit = "line") -> tuple[tuple[str, ...], ...]:
    """Returns the captions of each image of a set.

    Args:
        opened: the set.
        source: the member with the captions, see `lit_het.eval.suite.RetrievalConfig`.
        unit: see `lit_het.data_pipelines.texts.captions.captions_in`.

    Returns:
        No captions for an image that has none, or unreadable ones; `with_captions` leaves it out.
    """
    found = opened.texts(member_of(source), lambda text: tuple(captions_in(text, source, unit)))
    return tuple(captions or () for captions in found)


def with_captions(features: Features, captions: Sequence[Sequence[str]]) -> Features:
    """Returns the features of the images that have captions."""
    return features.take(np.array([bool(captions[position]) for position in features.positions], bool))
