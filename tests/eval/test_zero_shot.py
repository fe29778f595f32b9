import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import special
from sklearn.metrics import log_loss, top_k_accuracy_score

from eval.calibration import expected_calibration_error
from eval.ranking import EmbeddedImages, chance, metrics, nearest, score
from eval.zero_shot import (
    ZeroShotClassification,
    ZeroShotConfig,
    classify,
    embed_images,
    embed_names,
    positions_of_names,
)
from lit_het.errors import UserError
from lit_het.types import Batch, Encoder, Evaluator

NAMES = ("tench", "kit fox", "crane", "lantern", "plate", "cup", "fork")


@pytest.fixture
def perfect(make_encoder) -> Encoder:
    """Seven pictures, one of each class, on the axes; captions are the bare names."""
    return make_encoder(np.eye(7), dict(zip(NAMES, np.eye(7), strict=True)), temperature=0.01)


def test_a_perfect_model_scores_one_with_no_calibration_error(perfect: Encoder, make_batches):
    figures = metrics(classify(perfect, make_batches(range(7))(), NAMES))
    assert figures["top1"] == figures["top5"] == figures["mean_reciprocal_rank"] == 1
    assert figures["nll"] == pytest.approx(0, abs=1e-12)
    assert figures["ece"] == pytest.approx(0, abs=1e-12)


def test_a_model_that_confuses_two_classes_loses_exactly_those(perfect: Encoder, make_batches):
    result = classify(perfect, make_batches([1, 0, 2, 3, 4, 5, 6])(), NAMES)
    assert metrics(result)["top1"] == pytest.approx(5 / 7)
    assert result.predictions.tolist() == list(range(7))


def test_a_collapsed_model_scores_exactly_chance():
    same = np.tile(np.array([[0.6, 0.8]], np.float32), (9, 1))
    figures = metrics(score(EmbeddedImages(same, np.arange(9)), same, temperature=0.1))
    for name, value in chance(9).items():
        assert figures[name] == pytest.approx(value), name
        assert figures[f"chance_{name}"] == value


def test_random_embeddings_score_near_chance(unit_vectors):
    labels = np.random.default_rng(1).integers(50, size=4000)
    images = EmbeddedImages(unit_vectors(4000, 32), labels)
    figures = metrics(score(images, unit_vectors(50, 32, seed=2), temperature=1.0))
    assert figures["top1"] == pytest.approx(1 / 50, abs=0.01)
    assert figures["top5"] == pytest.approx(5 / 50, abs=0.02)
    assert figures["mean_reciprocal_rank"] == pytest.approx(chance(50)["mean_reciprocal_rank"], abs=0.01)
    assert figures["nll"] == pytest.approx(np.log(50), abs=0.1)


def test_chance_over_four_names_is_computed_by_hand():
    assert chance(4) == {
        "top1": 0.25,
        "top5": 1.0,
        "mean_reciprocal_rank": pytest.approx((1 + 1 / 2 + 1 / 3 + 1 / 4) / 4),
        "nll": pytest.approx(np.log(4)),
        "ece": 0.0,
    }


def test_a_tie_between_the_true_name_and_two_others_counts_as_a_draw_among_three():
    classes = np.array([[1, 0], [0, 1], [0, 1], [0, 1]], np.float32)
    result = score(EmbeddedImages(np.array([[0.8, 0.6]], np.float32), np.array([2])), classes, temperature=1.0)
    # One name above, three tied: the true rank is 2, 3 or 4, each with probability 1/3.
    assert (result.num_above[0], result.num_tied[0]) == (1, 3)
    assert [result.hits(count)[0] for count in (1, 2, 3, 4)] == pytest.approx([0, 1 / 3, 2 / 3, 1])
    assert metrics(result)["mean_reciprocal_rank"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 70))
def test_figures_agree_with_scikit_learn_whatever_the_block_size(seed: int, block_size: int):
    generator = np.random.default_rng(seed)
    images, classes = (
        generator.normal(size=(60, 8)).astype(np.float32),
        generator.normal(size=(9, 8)).astype(np.float32),
    )
    labels = generator.integers(9, size=60)
    figures = metrics(score(EmbeddedImages(images, labels), classes, temperature=2.0, block_size=block_size))
    logits = (images @ classes.T).astype(np.float64) / 2.0
    probabilities = special.softmax(logits, axis=1)
    for count, name in ((1, "top1"), (5, "top5")):
        expected = top_k_accuracy_score(labels, logits, k=count, labels=range(9))
        assert figures[name] == pytest.approx(expected)
    assert figures["nll"] == pytest.approx(log_loss(labels, probabilities, labels=range(9)), rel=1e-5)
    assert figures["ece"] == pytest.approx(expected_calibration_error(probabilities, labels), abs=1e-5)
    ranks = 1 + (logits > logits[np.arange(60), labels][:, None]).sum(axis=1)
    assert figures["mean_reciprocal_rank"] == pytest.approx((1 / ranks).mean())


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_order_of_images_and_names_changes_nothing(seed: int):
    generator = np.random.default_rng(seed)
    images, classes = (
        generator.normal(size=(30, 4)).astype(np.float32),
        generator.normal(size=(6, 4)).astype(np.float32),
    )
    labels, image_order, class_order = (
        generator.integers(6, size=30),
        generator.permutation(30),
        generator.permutation(6),
    )
    moved = EmbeddedImages(images[image_order], np.argsort(class_order)[labels[image_order]])
    before = metrics(score(EmbeddedImages(images, labels), classes, temperature=1.0))
    assert metrics(score(moved, classes[class_order], temperature=1.0)) == pytest.approx(before, abs=1e-6)


def test_the_best_names_fall_and_carry_softmax_probabilities(unit_vectors):
    images, classes = unit_vectors(12, 4), unit_vectors(20, 4, seed=1)
    result = score(EmbeddedImages(images, np.zeros(12, int)), classes, temperature=0.2)
    probabilities = special.softmax((images @ classes.T).astype(np.float64) / 0.2, axis=1)
    order = np.argsort(-probabilities, axis=1)[:, :5]
    np.testing.assert_array_equal(result.top_classes, order)
    np.testing.assert_allclose(result.top_probabilities, np.take_along_axis(probabilities, order, axis=1), rtol=1e-5)


def test_nearest_pictures_of_a_name_come_in_falling_order_and_never_exceed_the_set(unit_vectors):
    images = unit_vectors(3, 4)
    queries = images[[2]]
    assert nearest(queries, images)[0].tolist() == np.argsort(-(queries @ images.T)[0]).tolist()


def test_memory_is_bounded_by_the_block_and_not_by_the_number_of_images(unit_vectors):
    images, classes = EmbeddedImages(unit_vectors(3000, 4), np.zeros(3000, int)), unit_vectors(2000, 4, seed=1)
    tracemalloc.start()
    score(images, classes, temperature=1.0, block_size=50)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # All scores at once would take 3000 x 2000 x 8 bytes = 48 MB.
    assert peak < 12e6


def test_templates_are_averaged_on_the_sphere(make_encoder):
    captions = {"a tench": np.array([1.0, 0.0]), "tench!": np.array([0.0, 1.0])}
    encoder = make_encoder(np.eye(2), captions)
    embedding = embed_names(encoder, ["tench"], ["a {c}", "{c}!"])
    np.testing.assert_allclose(embedding, [[np.sqrt(0.5), np.sqrt(0.5)]], rtol=1e-6)


@pytest.mark.parametrize("batch_size", [1, 3, 4, 100])
def test_names_are_embedded_in_batches_of_one_shape_and_all_are_counted(unit_vectors, make_encoder, batch_size: int):
    vectors = unit_vectors(14, 3)
    captions = [f"{article} {name}" for name in NAMES for article in ("a", "the")]
    encoder = make_encoder(np.eye(3), dict(zip(captions, vectors, strict=True)))
    shapes, done = set(), []

    def text(tokens: np.ndarray) -> np.ndarray:
        shapes.add(tokens.shape)
        return encoder.text(tokens)

    embeddings = embed_names(replace(encoder, text=text), NAMES, ["a {c}", "the {c}"], batch_size, done.append)
    means = vectors.reshape(7, 2, 3).mean(axis=1)
    np.testing.assert_allclose(embeddings, means / np.linalg.norm(means, axis=1, keepdims=True), rtol=1e-5)
    assert shapes == {(batch_size, 1)}
    assert sum(done) == 14


def test_rows_that_pad_are_left_out_whatever_their_label(perfect: Encoder, make_batches):
    for padding_label in (-1, 0, 10_000):
        images = embed_images(perfect, make_batches([0, 1, 2, 3, 4], batch_size=4, padding_label=padding_label)())
        assert images.labels.tolist() == [0, 1, 2, 3, 4]
        np.testing.assert_array_equal(images.embeddings, np.eye(7)[:5])


def test_progress_counts_captions_and_valid_images(perfect: Encoder, make_batches):
    done = []
    classify(perfect, make_batches([0, 1, 2, 3, 4])(), NAMES, name_batch_size=4, advance=done.append)
    assert done == [4, 3, 4, 1]


def test_noise_samples_average_probabilities_and_not_embeddings(unit_vectors, make_encoder, make_batches):
    """1/S Σ_s softmax((α + ε_s) · β / τ), by a loop over images and samples (HET-XL App. M)."""
    images, names, labels = unit_vectors(9, 4), unit_vectors(5, 4, seed=1), np.arange(9) % 5
    noise = np.random.default_rng(2).normal(size=(9, 6, 4))
    encoder = make_encoder(images, dict(zip(NAMES, names, strict=False)), temperature=0.3, noise=noise)
    result = classify(encoder, make_batches(labels)(), NAMES[:5], num_samples=6)
    expected = np.zeros((9, 5))
    for n in range(9):
        for s in range(6):
            expected[n] += special.softmax((images[n] + noise[n, s]) @ names.T / 0.3) / 6
    of_label = expected[np.arange(9), labels]
    np.testing.assert_allclose(np.exp(result.label_log_probability), of_label, rtol=1e-5)
    np.testing.assert_array_equal(result.num_above, (expected > of_label[:, None]).sum(axis=1))
    np.testing.assert_allclose(result.top_probabilities, np.sort(expected, axis=1)[:, ::-1], rtol=1e-5)
    quiet = classify(encoder, make_batches(labels)(), NAMES[:5])
    assert not np.allclose(quiet.label_log_probability, result.label_log_probability, atol=0.05)
    np.testing.assert_array_equal(result.image_embeddings, quiet.image_embeddings)


def test_a_negative_number_of_noise_samples_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"ZeroShotConfig: num_samples = -1 must be at least 0"):
        ZeroShotConfig("pets", tmp_path, num_samples=-1)


def test_labels_find_their_names_in_a_larger_list_of_candidates(perfect: Encoder, make_batches):
    # Pictures 0 and 1 show tench and kit fox; the shard set numbers them the other way round.
    result = classify(perfect, make_batches([1, 0])(), NAMES, label_names=("kit fox", "tench", "unused"))
    assert result.labels.tolist() == [0, 1]
    assert metrics(result)["top1"] == 1


def test_two_classes_with_one_name_share_the_credit(make_encoder, make_batches):
    encoder = make_encoder(np.eye(3), {"crane": np.eye(3)[0], "cup": np.eye(3)[1]})
    result = classify(encoder, make_batches([0, 1])(), ("crane", "cup", "crane"))
    assert result.hits(1).tolist() == [0.5, 1.0]


@pytest.mark.parametrize("label", [-1, 7])
def test_a_label_outside_the_names_is_an_error(perfect: Encoder, make_batches, label: int):
    with pytest.raises(UserError, match=f"label {label} lies outside the 7 classes"):
        classify(perfect, make_batches([0, label])(), NAMES)


def test_a_class_missing_or_doubled_among_the_candidates_is_named():
    with pytest.raises(UserError, match="'wolf' has images but is not among the 7 candidate names"):
        positions_of_names(np.array([1]), ("tench", "wolf"), NAMES)
    with pytest.raises(UserError, match="'crane' stands twice"):
        positions_of_names(np.array([0]), ("crane",), ("crane", "cup", "crane"))
    assert positions_of_names(np.array([0]), ("tench", "wolf"), NAMES).tolist() == [0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": None}, "neither images nor"),
        ({"label": None}, "no class indices"),
        ({"label": np.zeros((4, 7), np.float32)}, "no class indices"),
        ({"valid": np.zeros(4, bool)}, "no valid image"),
    ],
)
def test_a_batch_that_cannot_be_scored_says_why(perfect: Encoder, make_batches, change: dict, message: str):
    batches: list[Batch] = [replace(batch, **change) for batch in make_batches([0, 1, 2, 3])()]
    with pytest.raises(UserError, match=message):
        embed_images(perfect, batches)


def test_an_empty_set_of_images_or_names_is_an_error(perfect: Encoder):
    with pytest.raises(UserError, match="no valid image"):
        embed_images(perfect, [])
    with pytest.raises(UserError, match="no class names"):
        embed_names(perfect, [])


def test_a_diverged_model_is_an_error_and_not_a_score():
    broken = EmbeddedImages(np.full((1, 2), np.nan, np.float32), np.array([0]))
    with pytest.raises(UserError, match="not finite"):
        score(broken, np.eye(2, dtype=np.float32), temperature=0.1)


def test_the_evaluator_names_its_figures_after_the_set_and_starts_a_new_pass_each_time(perfect, make_batches):
    evaluator: Evaluator = ZeroShotClassification("glyphs", make_batches(range(7)), NAMES)
    first = evaluator(perfect)
    assert first["zero_shot/glyphs/top1"] == 1
    assert first["zero_shot/glyphs/chance_top1"] == pytest.approx(1 / 7)
    assert evaluator(perfect) == first


def test_a_config_reads_a_folder_in_the_layout_of_clip_benchmark(tmp_path: Path, make_encoder, make_batches):
    (tmp_path / "classnames.txt").write_text("kit fox\ntench\n")
    (tmp_path / "zeroshot_classification_templates.txt").write_text("a {c}.\n")
    (tmp_path / "all.txt").write_text("tench\ncup\nkit fox\n")
    captions = {"a tench.": np.eye(3)[0], "a cup.": np.eye(3)[1], "a kit fox.": np.eye(3)[2]}
    batches: Callable = make_batches([1, 1, 0])
    encoder = make_encoder(np.eye(3)[[0, 0, 2]], captions)
    own = ZeroShotConfig("tiny", tmp_path).over(batches)
    assert own.class_names == ("kit fox", "tench")
    assert own(encoder)["zero_shot/tiny/top1"] == 1
    larger = ZeroShotConfig("tiny", tmp_path, candidates=tmp_path / "all.txt").over(batches)
    assert larger(encoder)["zero_shot/tiny/top1"] == 1
    assert larger(encoder)["zero_shot/tiny/chance_top1"] == pytest.approx(1 / 3)
    with pytest.raises(UserError, match="zero-shot set tiny: template 'x' lacks"):
        ZeroShotConfig("tiny", tmp_path, templates=("x",)).over(batches)
