"""Texts of a decoder in batches, translations, and quantities of images, for `lit_het.models.model`."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Real

from lit_het import arguments
from lit_het.console import Bar
from lit_het.data_pipelines.texts.tokenizers import SentencePieceTokenizer
from lit_het.errors import UserError
from lit_het.eval.answers import BATCH_SIZE, features_of
from lit_het.eval.predictions import BLOCK_SIZE, image_quantity, samples_of
from lit_het.models.images import Images
from lit_het.models.opening import Run
from lit_het.tasks import quantities
from lit_het.tasks.quantities import Quantity
from lit_het.texts import GenerationConfig, TextWriter, Written
from lit_het.types import EvaluatedModel


def write_in_batches(
    writer: TextWriter,
    rows: Iterator[Real[np.ndarray, " f"]],
    count: int,
    prompt: str,
    how: GenerationConfig,
    *,
    samples: int,
    seed: int,
) -> list[list[Written]]:
    """Returns the texts of each image, or of each text to translate, the best first.

    Args:
        writer: the decoder.
        rows: features of the images.
        count: their number.
        prompt: what all texts follow.
        how: how texts are written.
        samples: S, the number of noise samples.
        seed: of the noise and of sampling.
    """
    found: list[list[Written]] = []
    while some := list(itertools.islice(rows, BATCH_SIZE)):
        # All batches have the same shape, so that JAX compiles once.
        padded = np.stack(some + some[-1:] * (min(BATCH_SIZE, count) - len(some)))
        prompts, numbers = [prompt] * len(padded), range(len(found), len(found) + len(padded))
        found += writer.write(padded, prompts, how, samples=samples, seed=seed, numbers=numbers)[: len(some)]
    return found


def translations(
    run: Run,
    writer: TextWriter,
    texts: Sequence[str],
    prompt: str | None,
    generation: Mapping[str, Any],
    *,
    samples: int | None,
    seed: int,
) -> list[list[Written]]:
    """Returns the translations of each text, see `lit_het.models.model.Model.translate`."""
    if run.config.task.reads != "text":
        raise UserError(f"{run.run_dir} does not translate; train a translation model, see docs/decoder.md")
    assert isinstance(run.tokenizer, SentencePieceTokenizer), "checked in training"
    ids = run.tokenizer.whole(list(texts))
    prompt = writer.caption_prompt if prompt is None else arguments.text(prompt, "prompt")
    most = generation.get("num_tokens")
    most = writer.max_new_tokens(prompt) if most is None else most
    num_texts = 1 if generation.get("temperature") else 4
    how = GenerationConfig(**{"num_texts": num_texts, **generation, "num_tokens": most})
    rows = shown(features_of(writer.features, ids, len(ids)), len(ids), "texts")
    return write_in_batches(writer, rows, len(ids), prompt, how, samples=samples_of(writer, samples), seed=seed)


def shown(rows: Iterable[Real[np.ndarray, " f"]], count: int, what: str = "images") -> Iterator[Real[np.ndarray, " f"]]:
    """Yields the features of images or texts, with a progress bar if they are more than a batch."""
    if count <= BATCH_SIZE:
        yield from rows
        return
    with Bar(f"encoding {what}", count, what) as bar:
        for row in rows:
            yield row
            bar.advance(1)


def quantity_of(model: EvaluatedModel, quantity: Quantity | None, images: Images) -> np.ndarray:
    """Returns a quantity of each image in blocks, or of the one; None for the features of the tower.

    Raises:
        UserError: only some models have it.
    """
    if quantity is quantities.masks and model.mask_classes is None:
        raise UserError("the model predicts no masks; take a run of panoptic segmentation (SegmentationConfig)")
    if quantity is not quantities.masks and model.mask_classes is not None:
        raise UserError("the model predicts masks, and has neither embeddings nor noise; use segment")
    found = np.stack(list(shown(features_of(model.features, images, len(images)), len(images))))
    if quantity is not None:
        # A power of two, so that calls with similar numbers of images share a compiled function.
        block_size = min(BLOCK_SIZE, 1 << (len(found) - 1).bit_length())
        found = image_quantity(model, quantity, found, block_size)
    return found.reshape(found.shape[1:]) if images.is_single else found
