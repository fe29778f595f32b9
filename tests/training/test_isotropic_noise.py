"""The warning when noise grows in all directions alike."""

import pytest

from lit_het.training import isotropic_noise
from lit_het.training.isotropic_noise import IsotropicNoise


def record(norm, alignment):
    return {"train/image_noise_norm": norm, "train/image_noise_alignment": alignment, "train/loss": 1.0}


@pytest.mark.parametrize(
    ("last", "warns"),
    [(record(0.3, 1.0), True), (record(0.3, 2.0), False), (record(0.15, 1.0), False), ({"train/loss": 1.0}, False)],
    ids=["grown alike", "grown along the keys", "hardly grown", "no noise"],
)
def test_growth_in_all_directions_is_reported_once(monkeypatch, last, warns):
    lines = []
    monkeypatch.setattr(isotropic_noise, "message", lines.append)
    watch = IsotropicNoise()
    for one in (record(0.1, 1.0), last, last):
        watch.check(one)
    assert len(lines) == warns
    if warns:
        assert "the noise of images has grown from 0.1 to 0.3 alike in all directions" in lines[0]
        assert "--task.head.num-samples" in lines[0]
