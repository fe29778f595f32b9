"""Sweeps over shapes that are finished: a star by a known law, and a grid; fixtures of tests of ``lit-het shape``."""

import contextlib
import dataclasses
import io
import json
import math
from pathlib import Path

import pytest

from lit_het.cli.main import main
from lit_het.configs import glyph_classifier
from lit_het.search.grid_runs import Result
from lit_het.search.law.observations import Observation
from lit_het.search.shape import sweeps
from lit_het.search.shape.sweeps import Sweep, SweptRun
from scripts.studies.cover_shape_law import CENTRE, law, simulate
from tests import tiny
from tests.scripts.conftest import write_config_file

ERROR, ACCURACY = "few_shot/pets/5_shot", 1.0
CENTRE_AT = 1e12


@pytest.fixture(scope="module")
def classifier(data, tmp_path_factory) -> Path:
    """The glyph classifier, shrunk, as a configuration file."""
    folder = tmp_path_factory.mktemp("config")
    return write_config_file(tiny.shrink(glyph_classifier.get_config(), data, folder / "run"), folder / "tiny.py")


def write_sweep(folder: Path, kind: sweeps.Kind, observed: list[Observation], centre: dict[str, int]) -> Path:
    """Writes a finished sweep of 1e9 GFLOP a second, whose runs have the accuracy 1 - loss; those with NaN failed."""
    runs = []
    for number, one in enumerate(observed):
        shape = {name: int(value) for name, value in one.shape.items()}
        runs.append(SweptRun(f"run{number}", shape, "1 steps", one.compute, 1.0))
        figures = {} if math.isnan(one.loss) else {ERROR: ACCURACY - one.loss}
        result = Result({}, 0, figures, 1, one.compute / 1e9, "cpu", {})
        (folder / "results").mkdir(parents=True, exist_ok=True)
        (folder / "results" / f"run{number}.json").write_text(json.dumps(dataclasses.asdict(result)))
    sweeps.save(Sweep(kind, centre, tuple(runs)), folder)
    return folder


@pytest.fixture(scope="module")
def star(tmp_path_factory) -> Path:
    """The paper's star sweep by a known law, with a noise of 0.3 %, a failed run and the centre."""
    true = simulate(law(), 0.003, 1)
    rows = zip(true.dimension, true.x, true.t, true.f, strict=True)
    observed = [Observation({**CENTRE, true.dimensions[k]: float(x)}, float(t), float(f)) for k, x, t, f in rows]
    observed.append(Observation({**CENTRE, "width": 608.0}, 1e12, math.nan))
    observed.append(Observation(CENTRE, CENTRE_AT, 0.5))
    centre = {name: int(value) for name, value in CENTRE.items()}
    return write_sweep(tmp_path_factory.mktemp("sweeps") / "star", "star", observed, centre)


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A grid sweep whose best shape is (608, 10, 928)."""
    observed = []
    for width in (512.0, 608.0, 768.0):
        for depth in (8.0, 10.0, 12.0):
            for mlp in (768.0, 928.0, 1088.0):
                compute = width * depth * (width + mlp)
                gain = 0.7 if (width, depth, mlp) == (608, 10, 928) else 1.0
                shape = {"width": width, "depth": depth, "mlp": mlp}
                observed.append(Observation(shape, compute, gain * compute**-0.05))
    centre = {"width": 512, "depth": 8, "mlp": 768}
    return write_sweep(tmp_path_factory.mktemp("sweeps") / "grid", "grid", observed, centre)


@pytest.fixture(scope="module")
def fitted(star: Path, small: Path) -> tuple[Path, Path]:
    with contextlib.redirect_stdout(io.StringIO()) as told:
        assert main(["shape", "fit", str(star), "--metric", ERROR, "--resamples", "5", "--level", "0.99"]) == 0
    (star / "told.txt").write_text(told.getvalue())
    assert main(["shape", "fit", str(small), "--metric", ERROR]) == 0
    return star, small
