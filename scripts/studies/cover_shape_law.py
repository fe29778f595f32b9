"""Measures how often the intervals of scaling exponents contain the true ones, on simulated star sweeps.

    python -m scripts.studies.cover_shape_law --draws 200 --resamples 0

Runs have the sizes and lengths of SoViT App. B.2, and a metric by Eq. 2 with the published scaling exponents and
relative noise. The other parameters are not published: `law` chooses them such that optima lie within the sizes.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence

import numpy as np

from lit_het.search.grid import run_main
from lit_het.search.law import fitting, uncertainty
from lit_het.search.law.law import Curve, Law
from lit_het.search.law.observations import Observation, Star, star

CENTRE = {"width": 1968.0, "depth": 40.0, "mlp": 6144.0}
SPOKES = {
    "width": (608.0, 768.0, 928.0, 1088.0, 1328.0, 1648.0),
    "depth": (8.0, 10.0, 12.0, 16.0, 20.0, 24.0),
    "mlp": (1088.0, 1360.0, 1728.0, 2160.0, 2592.0, 3072.0),
}
STEPS = (500_000, 1_000_000, 2_000_000)
_BATCH_SIZE, _TOKENS = 128, 256
C = 0.65
S = {"width": 0.22, "depth": 0.45, "mlp": 0.6}
# Of each dimension: the optimal size at the compute below, and a.
_CHOSEN = {"width": (1000.0, 1.2), "depth": (14.0, 0.6), "mlp": (1800.0, 0.5)}
_COMPUTE = 1.5e11


def law() -> Law:
    """Returns a law with the published c and s."""
    curves = {}
    for name, (size, a) in _CHOSEN.items():
        b, log_alpha, log_t = C / S[name] - a, math.log(0.12) + a * math.log(size), C * math.log(_COMPUTE)
        log_beta = log_alpha + math.log(a / b) + log_t - (a + b) * math.log(size)
        curves[name] = Curve(log_alpha, a, log_beta, b, log_xi=math.log(0.05) + log_t, epsilon=0.15)
    return Law(C, curves)


def simulate(true: Law, noise: float, seed: int) -> Star:
    """Returns a star sweep of a law with relative noise of the metric."""
    generator, observations = np.random.default_rng(seed), []
    for name, values in SPOKES.items():
        for shape in ({**CENTRE, name: value} for value in values):
            for steps in STEPS:
                t = _gflop(**shape) * _BATCH_SIZE * steps
                f = float(true.value(name, shape[name], t)) * (1 + noise * generator.standard_normal())
                observations.append(Observation(shape, t, f))
    return star(observations, CENTRE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the simulation; user errors are printed as one line, with exit code 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--draws", type=int, default=200, help="simulated sweeps; default: %(default)s")
    parser.add_argument("--noise", type=float, default=0.01, help="relative noise of the metric; default: %(default)s")
    parser.add_argument("--level", type=float, default=0.9, help="of the intervals; default: %(default)s")
    parser.add_argument("--resamples", type=int, default=0, help="of the bootstrap; default: none")
    parser.add_argument("--first-seed", type=int, default=0, help="seed of the first sweep; default: %(default)s")
    return run_main("cover_shape_law", lambda: _cover(parser.parse_args(arguments)))


def _cover(options: argparse.Namespace) -> None:
    true, began = law(), time.monotonic()
    truth = {("c",): C, **{("s", name): value for name, value in S.items()}}
    profile, bootstrap, identified = (dict.fromkeys(truth, 0) for _ in range(3))
    for seed in range(options.first_seed, options.first_seed + options.draws):
        fit = fitting.fit(simulate(true, options.noise, seed))
        found = uncertainty.exponents(fit, options.level, options.resamples, seed)
        for path, value in truth.items():
            one = found.c if path == ("c",) else found.s[path[1]]
            profile[path] += one.covers(value)
            identified[path] += one.is_identified
            low, high = one.bootstrap or (np.inf, -np.inf)
            bootstrap[path] += low <= value <= high
    for path in truth:
        shares = [counts[path] / options.draws for counts in (profile, bootstrap, identified)]
        resampled = f", bootstrap {shares[1]:.1%}" if options.resamples else ""
        print(f"{' '.join(path)}: profile {shares[0]:.1%}{resampled}; identified in {shares[2]:.1%}")
    print(f"{options.draws} sweeps, {time.monotonic() - began:.0f} s")


def _gflop(width: float, depth: float, mlp: float) -> float:
    """Returns about the operations of training on one image: the blocks' matrix products, forward and backward."""
    per_token = 4 * width**2 + 2 * width * mlp + 2 * _TOKENS * width
    return 3 * 2 * _TOKENS * depth * per_token / 1e9


if __name__ == "__main__":
    sys.exit(main())
