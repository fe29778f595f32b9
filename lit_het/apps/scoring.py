"""``lit-het data score``: how well the caption of every sample fits its image, by a trained image-text model."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import Float, Int

from lit_het.console import Bar, message
from lit_het.errors import UserError, pluralize
from lit_het.eval.drawings import thumbnails
from lit_het.eval.evaluators.retrieval import read_captions
from lit_het.eval.features import Features
from lit_het.eval.predictions import Predictor, class_scores, image_quantity
from lit_het.eval.report.grids import Mark, answer_card
from lit_het.eval.report.page import Html, Section, joined, render_page
from lit_het.eval.sets.folders import unlabelled
from lit_het.eval.sets.open_sets import OpenSet
from lit_het.eval.sets.recognition import embed_texts
from lit_het.files import write_atomically, write_columns
from lit_het.models.opening import open_run
from lit_het.tasks import quantities
from lit_het.types import EvaluatedModel

Column = Literal["loss", "margin", "similarity", "noise_norm"]
# The order in which samples are suspect: the largest first, or the smallest.
_SIGNS: Mapping[Column, int] = {"loss": 1, "margin": -1, "similarity": -1, "noise_norm": 1}
_BLOCK = 1024


@dataclasses.dataclass(frozen=True)
class ScoreOptions:
    """What is scored, and how samples are ranked.

    Attributes:
        captions: the member that holds captions, of several the first is scored; ``json/caption`` is a field of a JSON
            object.
        by: the column that ranks suspect samples.
        candidates: at most so many captions of the set compete with a sample's own.
        worst: number of samples on the page.
    """

    captions: str = "txt"
    by: Column = "loss"
    candidates: int = 10_000
    worst: int = 50


@dataclasses.dataclass(frozen=True)
class Scored:
    """The samples of a set with their scores; unreadable images are left out.

    Attributes:
        opened: the set.
        positions: of the samples in the set.
        captions: of the samples.
        columns: scores of the samples.
    """

    opened: OpenSet
    positions: Int[np.ndarray, " n"]
    captions: tuple[str, ...]
    columns: Mapping[Column, Float[np.ndarray, " n"]]

    def suspicion(self, by: Column) -> Float[np.ndarray, " n"]:
        """Returns a value for each row, the larger the more suspect."""
        return _SIGNS[by] * self.columns[by]

    def order(self, by: Column) -> Int[np.ndarray, " n"]:
        """Returns the rows, the most suspect first."""
        return np.argsort(-self.suspicion(by), kind="stable")


def score(run_dir: Path, shards: str, output: Path, options: ScoreOptions, pretrained: Path | None = None) -> None:
    """Writes a table with a row per sample, the most suspect first, and a page with the worst of them.

    Args:
        run_dir: the run of an image-text model.
        shards: folder or pattern of the shards.
        output: file that ends in .csv or .parquet; the page lies beside it, with the ending .html.
        options: what and how.
        pretrained: current path of the run with the locked parameters, if it was moved.
    """
    scored = score_captions(run_dir, shards, options, pretrained)
    order = scored.order(options.by)
    _write_table(output, scored, order)
    page, worst = output.with_suffix(".html"), order[: options.worst]
    write_atomically(page, render_page(f"Suspect captions of {shards}", [_worst(scored, worst, options.by)]))
    message(f"{pluralize(len(order), 'sample')} in {output}; the worst {len(worst)} in {page}")


def score_captions(run_dir: Path, shards: str, options: ScoreOptions, pretrained: Path | None = None) -> Scored:
    """Scores the caption of every sample, see `caption_columns`; arguments as those of `score`."""
    run = open_run(run_dir, pretrained)
    model = run.model()
    if model.text is None:
        raise UserError(f"{run_dir} has no text tower; captions are scored by an image-text model")
    if options.by == "noise_norm" and not model.has_noise:
        raise UserError(f"--by noise_norm needs noise of images, and the head of {run_dir} has none; take loss")
    opened = run.sets().open(unlabelled(shards))
    captions = read_captions(opened, options.captions, run.config.data.caption_unit)
    if any(len(one) > 1 for one in captions):
        message("of several captions of an image the first is scored")
    features = opened.features(model.features)
    own = tuple(captions[position][0] for position in features.positions.tolist())
    return Scored(opened, features.positions, own, caption_columns(model, features.values, own, options.candidates))


def caption_columns(
    model: EvaluatedModel, features: Float[np.ndarray, "n f"], captions: Sequence[str], candidates: int
) -> dict[Column, Float[np.ndarray, " n"]]:
    """Returns the scores of every image with its own caption, without noise.

    With u the logits of the image and its own caption y among the candidates: ``loss`` is ``-log softmax(u)_y`` in
    nats, ``margin`` is ``u_y - max u`` over the others, ``similarity`` the inner product (the cosine, the CLIP score;
    less the variances of Gaussian embeddings), and ``noise_norm`` ``sqrt(tr Σ)`` of the image.

    Args:
        model: an image-text model.
        features: of the images.
        captions: of the images.
        candidates: at most so many different captions compete; they are drawn at random, the same at every call.
    """
    assert model.text is not None
    # Captions of equal tokens are one caption, and do not compete with each other.
    distinct, own = np.unique(model.text.tokenize(list(captions)), axis=0, return_inverse=True)
    own = own.ravel()
    if len(distinct) < 2:
        raise UserError("all captions are equal to this model; give shards with others")
    with Bar("embedding captions", len(distinct), "captions") as bar:
        embeddings = embed_texts(model, distinct, bar.advance)
    chosen = np.sort(np.random.default_rng(0).permutation(len(distinct))[:candidates])
    found: dict[Column, list[np.ndarray]] = {name: [] for name in _SIGNS}
    with Bar("scoring", len(captions), "samples") as bar:
        for start in range(0, len(captions), _BLOCK):
            rows, mine = features[start : start + _BLOCK], own[start : start + _BLOCK]
            # Padded to one size, so that JAX compiles once.
            padded = np.resize(embeddings[mine], (_BLOCK, embeddings.shape[1]))
            own_logit = np.diagonal(_logits(model, padded, rows)).astype(np.float64)
            logits = _logits(model, embeddings[chosen], rows).astype(np.float64)
            logits[chosen[None] == mine[:, None]] = -np.inf
            normalizer = np.logaddexp(np.logaddexp.reduce(logits, axis=1), own_logit)
            images = image_quantity(model, quantities.embeddings, rows)
            found["loss"].append(normalizer - own_logit)
            found["margin"].append(own_logit - logits.max(axis=1))
            found["similarity"].append(np.sum(images * embeddings[mine], axis=1))
            found["noise_norm"].append(image_quantity(model, quantities.noise_norm, rows))
            bar.advance(len(rows))
    return {name: np.concatenate(parts).astype(np.float32) for name, parts in found.items()}


def _logits(
    model: EvaluatedModel, classes: Float[np.ndarray, "k d"], rows: Float[np.ndarray, "n f"]
) -> Float[np.ndarray, "n k"]:
    nothing = np.zeros(len(rows), np.int32)
    return class_scores(Predictor(model, len(classes), classes), Features(rows, nothing, nothing))


def _write_table(output: Path, scored: Scored, order: Int[np.ndarray, " n"]) -> None:
    loader = scored.opened.loader
    numbers = [loader.numbers[position] for position in scored.positions[order].tolist()]
    table = {
        "shard": [loader.index.shard(number) for number in numbers],
        "key": [loader.index.key(number) for number in numbers],
        "caption": [scored.captions[row] for row in order],
        **{name: values[order].tolist() for name, values in scored.columns.items()},
    }
    write_columns(output, table)


def _worst(scored: Scored, rows: Int[np.ndarray, " n"], by: Column) -> Section:
    images = thumbnails(scored.opened, scored.positions[rows])
    cards = [
        answer_card(
            image,
            scored.captions[row],
            [f"{name} {values[row]:.3g}" for name, values in scored.columns.items()],
            [Mark.WRONG] * len(scored.columns),
        )
        for image, row in zip(images, rows, strict=True)
    ]
    note = f"The samples that are most suspect by {by}, each with its caption. A caption may be right and rare."
    return Section("Suspect captions", (Html(f'<div class="cards">{joined(cards)}</div>'),), note)
