"""Impossible heads are refused in one line that names the field."""

import pytest
from flax import nnx

from lit_het.errors import UserError
from lit_het.heads.contrastive import HetXLContrastiveConfig
from lit_het.heads.covariance import CovarianceConfig
from lit_het.heads.het_h import HetHConfig
from lit_het.heads.het_xl import HetXLConfig
from lit_het.heads.sampling import SamplingConfig, in_pairs
from lit_het.heads.temperature import BoundedTemperature, FixedTemperature, LogTemperature

FACTORED = SamplingConfig(order="factored")
DIAGONAL = CovarianceConfig(2, second_term="diagonal")
NOT_LOW_RANK = (
    "order = 'factored' needs covariance.second_term = 'rank_one' and factors, not second_term = '{}' with "
    "num_factors = {}"
)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: CovarianceConfig(-1), "CovarianceConfig: num_factors = -1 must be at least 0"),
        (lambda: SamplingConfig(num_samples=-1), "SamplingConfig: num_samples = -1 must be at least 0"),
        (lambda: SamplingConfig(num_eval_samples=-2), "SamplingConfig: num_eval_samples = -2 must be at least 1"),
        (lambda: SamplingConfig(block_size=0), "SamplingConfig: block_size = 0 must be at least 1"),
        (lambda: HetXLConfig(unshared_size=0), "HetXLConfig: unshared_size = 0 must be at least 1"),
        (lambda: HetHConfig(0), "HetHConfig: num_buckets = 0 must be at least 1"),
        (
            lambda: HetHConfig(6).build(4, 5, nnx.Rngs(0)),
            "HetHConfig: num_buckets = 6 is more than the 5 classes; set --task.head.num-buckets to at most 5",
        ),
        *(
            (
                lambda low=low, high=high: BoundedTemperature(low, high),
                f"temperature bounds must be 0 < minimum < maximum, not {low} and {high}",
            )
            for low, high in ((0.0, 5.0), (0.0, 1.0), (-1.0, 1.0), (2.0, 1.0), (1.0, 1.0))
        ),
        (
            lambda: BoundedTemperature(0.05, 5.0, 5.0),
            "temperature.initial = 5.0 must lie between minimum = 0.05 and maximum = 5.0",
        ),
        (
            lambda: BoundedTemperature(0.05, 5.0, 0.01),
            "temperature.initial = 0.01 must lie between minimum = 0.05 and maximum = 5.0",
        ),
        (lambda: LogTemperature(-1.0), "temperature.initial = -1.0 must be positive"),
        (lambda: LogTemperature(0.0), "temperature.initial = 0.0 must be positive"),
        (lambda: FixedTemperature(0.0), "temperature.value = 0.0 must be positive and finite"),
        (lambda: CovarianceConfig(initial_noise_norm=float("nan")), "initial_noise_norm = nan must be positive"),
        (lambda: HetXLConfig(DIAGONAL, sampling=FACTORED), NOT_LOW_RANK.format("diagonal", 2)),
        (lambda: HetXLContrastiveConfig(DIAGONAL, order="factored"), NOT_LOW_RANK.format("diagonal", 2)),
        (
            lambda: HetHConfig(3, covariance=CovarianceConfig(0), sampling=FACTORED),
            NOT_LOW_RANK.format("rank_one", 0),
        ),
    ],
)
def test_impossible_settings_are_refused_in_one_line_that_names_the_field(build, message):
    with pytest.raises(UserError) as error:
        build()
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("antithetic", "num_samples", "pairs"), [(None, 3, False), (None, 4, True), (True, 4, True)])
def test_samples_come_in_pairs_where_they_are_asked_for_or_even(antithetic, num_samples, pairs):
    assert in_pairs(antithetic, num_samples) == pairs
    assert not in_pairs(False, num_samples)
    with pytest.raises(UserError, match=r"^5 noise samples are odd, .* give an even number with --samples$"):
        in_pairs(True, 5)


def test_the_least_settings_that_are_possible_are_accepted():
    sampling = SamplingConfig(num_samples=1, num_eval_samples=1, block_size=1, order="factored")
    HetXLConfig(CovarianceConfig(1), unshared_size=1, sampling=sampling).build(2, 2, nnx.Rngs(0))
    HetHConfig(5, covariance=CovarianceConfig(0)).build(4, 5, nnx.Rngs(0))
    HetXLConfig(DIAGONAL, sampling=SamplingConfig(order="cheaper"))
    HetXLConfig(DIAGONAL, sampling=SamplingConfig(order="direct"))
