"""Retrieval against a slow loop over all items, ties, degenerate sets, and any number of devices."""

import itertools
import math
from collections.abc import Callable

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lit_het.eval.metrics.retrieval import Ranks, retrieve
from tests.refusals import assert_refused


def hits_of_one(scores: np.ndarray, right: list[int], count: int) -> float:
    """Mean over all orders of equal scores of whether a right item is among the best ``count``."""
    total, orders = 0, list(itertools.permutations(range(len(scores))))
    for order in orders:
        ranked = sorted(order, key=lambda item: -scores[item])
        total += any(item in right for item in ranked[:count])
    return total / len(orders)


def ranks_by_sorting(scores: np.ndarray, right: list[np.ndarray]) -> list[int]:
    """Rank of the best right item of each row, where no scores tie."""
    return [
        min(int(np.flatnonzero(np.argsort(-row) == item)[0]) for item in items) + 1
        for row, items in zip(scores, right, strict=True)
    ]


@pytest.mark.parametrize("blocks", [(1024, 8192), (8, 5), (16, 64)])
def test_ranks_are_those_of_sorting_all_scores(unit_vectors: Callable, monkeypatch, blocks):
    monkeypatch.setattr("lit_het.eval.metrics.retrieval._BLOCK_IMAGES", blocks[0])
    monkeypatch.setattr("lit_het.eval.metrics.retrieval._BLOCK_TEXTS", blocks[1])
    images, texts = unit_vectors(30, 8), unit_vectors(100, 8, seed=1)
    owner = np.random.default_rng(2).integers(0, 30, 100)
    scores = images.astype(np.float64) @ texts.T
    captions = [np.flatnonzero(owner == image) for image in range(30)]
    steps = []
    result = retrieve(images, texts, owner, steps.append)
    assert sum(steps) == 30
    asked = [image for image in range(30) if len(captions[image])]
    expected = ranks_by_sorting(scores[asked], [captions[image] for image in asked])
    np.testing.assert_array_equal(result.image_to_text.rank, expected)
    expected = ranks_by_sorting(scores.T, [owner[[text]] for text in range(100)])
    np.testing.assert_array_equal(result.text_to_image.rank, expected)
    assert result.metrics()["text_to_image_recall5"] == np.mean(np.array(expected) <= 5)
    assert result.metrics()["text_to_image_median_rank"] == np.median(expected)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_ties_count_as_the_mean_over_all_orders(seed: int):
    random = np.random.default_rng(seed)
    images, texts = random.integers(-1, 2, (3, 2)), random.integers(-1, 2, (5, 2))
    owner, scores = random.integers(0, 3, 5), images @ texts.T
    result = retrieve(images.astype(np.float32), texts.astype(np.float32), owner)
    asked = [image for image in range(3) if (owner == image).any()]
    for count in (1, 2, 4):
        of_images = [hits_of_one(scores[image], np.flatnonzero(owner == image).tolist(), count) for image in asked]
        np.testing.assert_allclose(result.image_to_text.hits(count), of_images, atol=1e-12)
        of_texts = [hits_of_one(scores[:, text], [int(owner[text])], count) for text in range(5)]
        np.testing.assert_allclose(result.text_to_image.hits(count), of_texts, atol=1e-12)


def test_the_rank_of_tied_items_is_its_expectation():
    # Two of four tied items are right: the first of them stands at (4 + 1) / (2 + 1) on average.
    one = np.array([1])
    ranks = Ranks(num_above=3 * one, num_tied=2 * one, num_best=2 * one, num_correct=2 * one, num_items=9, image=one)
    assert ranks.rank[0] == 14 / 3


def test_standard_errors_of_recalls_treat_captions_of_an_image_as_a_group(unit_vectors: Callable):
    """Five captions of an image are found together or not at all, and carry no more information than one."""
    images, owner = unit_vectors(60, 4), np.repeat(np.arange(60), 5)
    texts = unit_vectors(60, 4, seed=1)[owner] + 2 * images[owner]
    result = retrieve(images, texts, owner)
    errors = result.standard_errors()
    assert set(errors) == {f"{way}_recall{k}" for way in ("image_to_text", "text_to_image") for k in (1, 5, 10)}
    assert set(errors) <= set(result.metrics())
    for way, ranks in (("image_to_text", result.image_to_text), ("text_to_image", result.text_to_image)):
        found = np.array([ranks.hits(1)[ranks.image == image].mean() for image in range(60)])
        assert 0.2 < found.mean() < 0.8
        assert errors[f"{way}_recall1"] == pytest.approx(found.std(ddof=1) / 60**0.5)


def test_images_without_captions_do_not_affect_the_standard_error(unit_vectors: Callable):
    images, texts = unit_vectors(40, 4), unit_vectors(20, 4, seed=1)
    result = retrieve(images, texts, np.arange(20) * 2)
    assert result.image_to_text.image.tolist() == result.text_to_image.image.tolist() == list(range(0, 40, 2))
    hits = result.image_to_text.hits(5)
    assert result.standard_errors()["image_to_text_recall5"] == pytest.approx(hits.std(ddof=1) / 20**0.5)


def test_a_perfect_model_finds_everything(unit_vectors: Callable):
    images = unit_vectors(40, 16)
    owner = np.repeat(np.arange(40), 5)
    metrics = retrieve(images, images[owner], owner).metrics()
    assert {metrics[f"{way}_recall1"] for way in ("image_to_text", "text_to_image")} == {1.0}
    # Five captions share the best score, and the first of them is the first of all.
    assert metrics["image_to_text_median_rank"] == metrics["text_to_image_median_rank"] == 1


def test_a_model_that_sees_nothing_scores_chance():
    equal = np.full((60, 4), 0.5, np.float32)
    owner = np.arange(60) % 12
    metrics = retrieve(equal[:12], equal, owner).metrics()
    for way in ("image_to_text", "text_to_image"):
        for count in (1, 5, 10):
            assert metrics[f"{way}_recall{count}"] == pytest.approx(metrics[f"{way}_chance_recall{count}"])
    assert metrics["text_to_image_chance_recall5"] == pytest.approx(5 / 12)
    assert metrics["image_to_text_chance_recall10"] == pytest.approx(1 - math.comb(55, 10) / math.comb(60, 10))
    assert metrics["text_to_image_median_rank"] == 6.5


def test_a_caption_that_two_images_share_is_found_by_half_and_one_of_a_single_image_always(unit_vectors: Callable):
    images = unit_vectors(300, 32)
    images[1] = images[0]
    result = retrieve(images, images, np.arange(300))
    np.testing.assert_array_equal(result.text_to_image.hits(1)[:3], [0.5, 0.5, 1])
    np.testing.assert_array_equal(result.image_to_text.hits(1)[:3], [0.5, 0.5, 1])
    one = np.ones((1, 3), np.float32)
    metrics = retrieve(one, -one, np.array([0])).metrics()
    assert metrics.pop("image_to_text_median_rank") == metrics.pop("text_to_image_median_rank") == 1
    assert set(metrics.values()) == {1.0}


def test_the_order_of_captions_does_not_matter(unit_vectors: Callable):
    images, texts, owner = unit_vectors(20, 4), unit_vectors(60, 4, seed=1), np.arange(60) // 3
    order = np.random.default_rng(0).permutation(60)
    sorted_, shuffled = retrieve(images, texts, owner), retrieve(images, texts[order], owner[order])
    np.testing.assert_array_equal(sorted_.image_to_text.rank, shuffled.image_to_text.rank)
    np.testing.assert_array_equal(sorted_.text_to_image.rank[order], shuffled.text_to_image.rank)


@pytest.mark.devices
def test_eight_devices_give_exactly_the_ranks_of_one(unit_vectors: Callable, monkeypatch):
    images, texts, owner = unit_vectors(1500, 16), unit_vectors(3000, 16, seed=1), np.arange(3000) // 2
    several = retrieve(images, texts, owner)
    assert jax.local_device_count() == 8
    one = jax.local_devices()[:1]
    monkeypatch.setattr("jax.local_devices", lambda: one)
    single = retrieve(images, texts, owner)
    for way in ("image_to_text", "text_to_image"):
        np.testing.assert_array_equal(getattr(several, way).rank, getattr(single, way).rank)


def test_invalid_embeddings_are_one_line_errors(unit_vectors: Callable):
    images, texts, owner = unit_vectors(4, 3), unit_vectors(4, 3), np.arange(4)
    assert_refused("caption 3 belongs to image 4 of 4", retrieve, images, texts, owner + 1)
    assert_refused("there are no captions", retrieve, images, texts[:0], owner[:0])
    assert_refused(r"embedding \(text\) is not finite", retrieve, images, np.full_like(texts, np.inf), owner)
