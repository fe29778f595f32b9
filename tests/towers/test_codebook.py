"""The codebook equals slow NumPy references of its equations: nearest words, gradients, moving sums and splits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lit_het.errors import UserError
from lit_het.towers import codebook, oracle
from lit_het.towers.codebook import PERTURBATION, Counted, counted, followed, quantized
from lit_het.towers.encoder_config import EncoderConfig
from lit_het.towers.oracle_config import CodebookConfig, OracleConfig

RANDOM = np.random.default_rng(0)
WORDS = RANDOM.normal(size=(5, 3)).astype(np.float32)
VECTORS = RANDOM.normal(size=(4, 6, 3)).astype(np.float32)
KEY = jax.random.key(0)


def nearest():
    """The number of the nearest word of each vector, one by one."""
    return np.array([[np.argmin([np.sum((x - e) ** 2) for e in WORDS]) for x in row] for row in VECTORS])


def test_a_vector_becomes_its_nearest_word():
    found, numbers = quantized(jnp.asarray(VECTORS), jnp.asarray(WORDS))
    np.testing.assert_array_equal(numbers, nearest())
    np.testing.assert_allclose(found, WORDS[nearest()], atol=1e-6)
    assert numbers.dtype == jnp.int32


def test_the_gradient_of_a_word_is_that_of_its_vector_and_words_have_none():
    def value(vectors, words):
        return jnp.sum(jnp.sin(quantized(vectors, words)[0]) * jnp.arange(3)[None, None])

    of_vectors, of_words = jax.grad(value, argnums=(0, 1))(jnp.asarray(VECTORS), jnp.asarray(WORDS))
    # As if e were x: the derivative at the word, handed to the vector.
    np.testing.assert_allclose(of_vectors, np.cos(WORDS[nearest()]) * np.arange(3), atol=1e-6)
    assert not of_words.any()


def test_words_are_unit_vectors_of_means_without_a_gradient():
    book = codebook.Codebook(CodebookConfig(5, 3), nnx.Rngs(0))
    book.sums[...], book.counts[...] = WORDS, jnp.arange(1.0, 6)
    means = WORDS / np.arange(1, 6)[:, None]
    np.testing.assert_allclose(book.words(), means / np.linalg.norm(means, axis=1, keepdims=True), rtol=1e-6)
    gradient = nnx.grad(lambda book: jnp.sum(book.words() * VECTORS[0, :5]))(book)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(nnx.to_pure_dict(gradient)))


def test_words_that_have_no_vectors_left_are_zeros_that_no_other_vector_is_lost_to():
    config = CodebookConfig(4, 3, momentum=0.0, least_count=10.0)  # no half would count as used
    before = Counted(jnp.ones(4), jnp.asarray(WORDS[:4]))
    batch = Counted(jnp.asarray([3.0, 0, 0, 2]), jnp.asarray(WORDS[:4]) * jnp.asarray([[3.0], [0], [0], [2]]))
    book = codebook.Codebook(config, nnx.Rngs(0))
    book.counts[...], book.sums[...] = followed(before, batch, config, KEY)
    words = book.words()
    np.testing.assert_allclose(np.linalg.norm(words, axis=1), [1, 0, 0, 1], rtol=1e-6)
    _, numbers = quantized(jnp.asarray(WORDS[None, [0, 3]]), words)
    np.testing.assert_array_equal(numbers, [[0, 3]])


def test_counts_and_sums_are_those_of_valid_rows():
    valid, numbers = np.array([True, False, True, True]), nearest()
    counts, sums = np.zeros(5), np.zeros((5, 3))
    for row in np.flatnonzero(valid):
        for x, number in zip(VECTORS[row], numbers[row], strict=True):
            counts[number] += 1
            sums[number] += x
    broken = np.where(valid[:, None, None], VECTORS, np.nan)
    found = counted(jnp.asarray(broken), jnp.asarray(numbers), jnp.asarray(valid), 5)
    np.testing.assert_array_equal(found.counts, counts)
    np.testing.assert_allclose(found.sums, sums, atol=1e-5)


def split_slowly(counts, sums, least):
    """Sums and counts without unused words, whose halves are not perturbed, and the words that were replaced."""
    counts, sums, replaced = counts.copy(), sums.copy(), []
    while counts.min() < least and counts.max() >= 2 * least:
        most, rarest = counts.argmax(), counts.argmin()
        counts[[most, rarest]] = counts[most] / 2
        sums[[most, rarest]] = sums[most] / 2
        replaced.append(rarest)
    return counts, sums, replaced


@pytest.mark.parametrize(
    ("counts", "number_of_splits"),
    [([3.0, 2.0, 4.0, 1.0, 6.0], 0), ([3.0, 0.0, 40.0, 0.1, 6.0], 2), ([0.0, 0.0, 9.0, 0.0, 0.0], 4)],
)
def test_sums_and_counts_move_and_the_rarest_word_becomes_half_of_the_most_frequent(counts, number_of_splits):
    config = CodebookConfig(5, 3, momentum=0.5, least_count=0.3)
    before, batch = (
        Counted(jnp.array(counts), jnp.asarray(WORDS)),
        Counted(jnp.array(counts) / 4, jnp.asarray(2 * WORDS)),
    )
    expected = split_slowly(0.75 * np.array(counts), 2.5 * WORDS, 0.3)
    found = followed(before, batch, config, KEY)
    np.testing.assert_allclose(found.counts, expected[0], rtol=1e-6)
    np.testing.assert_allclose(found.sums, expected[1], rtol=(1 + PERTURBATION) ** 4 - 1)
    assert len(expected[2]) == number_of_splits
    replaced = np.isin(np.arange(5), expected[2])
    assert (np.abs(found.sums / expected[1] - 1).max(axis=1) > 0)[replaced].all()


def test_batches_without_a_valid_row_leave_the_codebook_alone_for_ever():
    config = CodebookConfig(5, 3, momentum=0.0)
    found = followed(Counted(jnp.ones(5), jnp.asarray(WORDS)), Counted(jnp.zeros(5), jnp.zeros((5, 3))), config, KEY)
    assert not found.counts.any()


def dropped_words(kind):
    return np.asarray(oracle.dropped(jnp.ones((4000, 8, 2)), kind, KEY))[..., 0]


def test_a_code_keeps_each_number_of_words_with_equal_probability():
    kept = dropped_words("random").sum(axis=1)
    # The share is uniform: 0 to 8 words of 8 have the probability 1/9.
    np.testing.assert_allclose(np.bincount(kept.astype(int), minlength=9) / 4000, 1 / 9, atol=0.025)


def test_random_dropout_drops_any_words_and_ordered_dropout_the_last_ones():
    np.testing.assert_allclose(dropped_words("random").mean(axis=0), 0.5, atol=0.04)
    ordered = dropped_words("ordered")
    np.testing.assert_allclose(ordered.mean(axis=0), 1 - np.arange(1, 9) / 9, atol=0.04)
    assert (np.diff(ordered, axis=1) <= 0).all()
    assert dropped_words("none").all()


ENCODER = EncoderConfig(width=8, depth=1, mlp_width=12, num_heads=2)
ORACLE = OracleConfig(
    image_size=8,
    patch_size=2,
    num_classes=3,
    num_instances=2,
    code_length=4,
    codebook=CodebookConfig(6, 5),
    encoder=ENCODER,
    decoder=ENCODER,
)


def test_patches_of_masks_are_put_together_again():
    masks = jnp.asarray(RANDOM.integers(0, 3, (2, 8, 8, 2)))
    built = ORACLE.build(nnx.Rngs(0))
    patches = built.in_patches(masks)
    assert patches.shape == (2, 16, 4, 2)
    np.testing.assert_array_equal(patches[1, 5, :, 0].reshape(2, 2), masks[1, 2:4, 2:4, 0])
    np.testing.assert_array_equal(built.as_image(patches[..., 1]), masks[..., 1])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("image_size", 9, "is not a multiple of patch_size"),
        ("code_length", 5, "is not a square number"),
        ("encoder", EncoderConfig(causal=True), "see all patches"),
    ],
)
def test_shapes_that_cannot_be_are_refused(field, value, message):
    with pytest.raises(UserError, match=message):
        OracleConfig(**{field: value})
