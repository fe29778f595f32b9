"""The benchmark of the data pipeline runs, on few photographs, and its photographs are like photographs."""

import itertools

import numpy as np
import pytest
import simplejpeg

from scripts.bench.bench_data import FILTERS, main, photographs


@pytest.fixture(scope="module")
def few() -> list[np.ndarray]:
    return list(itertools.islice(photographs(6, seed=0), 6))


def test_photographs_take_as_many_bytes_as_photographs_do(few: list[np.ndarray]):
    sizes = [len(simplejpeg.encode_jpeg(pixels, 90, "RGB", "420")) for pixels in few]
    assert 40_000 < np.mean(sizes) < 110_000


def test_amplitudes_of_photographs_fall_with_frequency(few: list[np.ndarray]):
    light = np.stack([pixels.mean(-1) for pixels in few])
    power = (np.abs(np.fft.rfft(light - light.mean((1, 2), keepdims=True))) ** 2).mean((0, 1))
    frequency = np.arange(4, 200)
    slope = np.polyfit(np.log(frequency), np.log(power[frequency]), 1)[0]
    assert -2.6 < slope < -1.4  # Field 1987: about -2


@pytest.mark.slow
def test_every_variant_and_filter_has_its_row(capsys: pytest.CaptureFixture[str], tmp_path):
    main(["--images", "4", "--chunk", "2", "--compared", "1", "--directory", str(tmp_path)])
    text = capsys.readouterr().out
    rows = [line.split(" | ")[0].removeprefix("| ") for line in text.splitlines() if line.startswith("| ")]
    for row in ("bare simplejpeg decode", "raw tar read", "whole loader, training, fast", "Pillow + NumPy, evaluation"):
        assert row in rows
    assert f"| {' | '.join(FILTERS)} |" in text
    assert rows[-3:] == ["squash", "crop", "crop, 0.875"]
    assert sorted(path.name for path in tmp_path.glob("*.tar")) == ["shard-000000.tar"]
