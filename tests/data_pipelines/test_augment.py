import numpy as np
import pytest

from lit_het.data_pipelines.images.augment import RandomAffine, StreamRandom

STILL = RandomAffine(0.0, 1.0, 1.0, 0.0, 0.0)


def dot(row: int, column: int) -> np.ndarray:
    image = np.full((9, 9, 3), 255, np.uint8)
    image[row, column] = 0
    return image


def test_zero_amounts_change_nothing():
    image = np.random.default_rng(0).integers(0, 256, (9, 9, 3), np.uint8)
    np.testing.assert_array_equal(STILL.apply(image, np.random.default_rng(1)), image)


def test_uncovered_areas_are_white_or_the_replicated_edge():
    black = np.zeros((9, 9, 3), np.uint8)
    white = RandomAffine(2.0, 1.0, 1.0, 0.0, 0.0, border="white").apply(black, np.random.default_rng(0))
    edge = RandomAffine(2.0, 1.0, 1.0, 0.0, 0.0, border="edge").apply(black, np.random.default_rng(0))
    assert white.max() == 255
    assert white[4, 4].max() == 0
    assert edge.max() == 0


@pytest.mark.parametrize(
    "config",
    [
        RandomAffine(0.0, 0.5, 1.5, 0.0, 0.0),
        RandomAffine(0.0, 1.0, 1.0, 45.0, 0.0),
        RandomAffine(0.0, 1.0, 1.0, 0.0, 45.0),
    ],
)
def test_the_centre_is_a_fixed_point(config: RandomAffine):
    image = dot(4, 4)
    image[3:6, 3:6] = 0
    for seed in range(5):
        assert config.apply(image, np.random.default_rng(seed))[4, 4].max() < 40


def test_a_rotation_of_90_degrees_is_exact():
    config = RandomAffine(0.0, 1.0, 1.0, 90.0, 0.0)
    image = dot(1, 4)
    darkest = set()
    for seed in range(200):
        generator = np.random.default_rng(seed)
        angle = 90 * (2 * np.random.default_rng(seed).random(5)[0] - 1)
        turned = config.apply(image, generator)[..., 0].astype(float)
        row, column = np.unravel_index(turned.argmin(), turned.shape)
        expected = 4 - 3 * np.cos(np.radians(angle)), 4 + 3 * np.sin(np.radians(angle))
        assert abs(row - expected[0]) <= 1
        assert abs(column - expected[1]) <= 1
        darkest.add((int(row), int(column)))
    assert len(darkest) > 4


def test_the_numbers_of_a_position_do_not_depend_on_earlier_draws():
    random = StreamRandom(3)
    first = [random.at(position).random(5) for position in range(6)]
    random.at(2).random(1000)
    again = [random.at(position).random(5) for position in (5, 0, 3)]
    np.testing.assert_array_equal(again, [first[5], first[0], first[3]])
    assert len({tuple(values) for values in first}) == 6
    assert not np.array_equal(StreamRandom(4).at(0).random(5), first[0])
    # Half a draw (32 bits) left over from one position must not leak into the next.
    random.at(0).integers(0, 2**32, dtype=np.uint32)
    np.testing.assert_array_equal(random.at(1).random(5), first[1])


def test_amounts_are_spread_over_their_ranges():
    random = StreamRandom(0)
    config = RandomAffine(2.0, 1.0, 1.0, 0.0, 0.0)
    centres = []
    image = np.full((21, 21, 3), 255, np.uint8)
    image[9:12, 9:12] = 0
    for position in range(300):
        ink = 255.0 - config.apply(image, random.at(position))[..., 0]
        grid = np.indices(ink.shape)
        centres.append((grid * ink).sum((1, 2)) / ink.sum() - 10)
    low, high = np.min(centres, axis=0), np.max(centres, axis=0)
    assert ((low > -2.1) & (low < -1.8)).all()
    assert ((high > 1.8) & (high < 2.1)).all()
