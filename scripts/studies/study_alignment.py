"""Measures how the noise of HET lies to the row space of W (HET-XL App. I.1, Table 17), on characters and over seeds.

    python -m scripts.studies.study_alignment --output runs/alignment --seeds 0 1 2

The glyph classifier with HET is trained, and the cosines of the smallest angles are computed from its parameters for
images of another typeface: of all noise, and without what moves all logits alike, the mean of each row of Q.
"""

import argparse
import io
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import scipy.linalg
from jaxtyping import Float
from PIL import Image

import lit_het
from lit_het import parameters
from lit_het.apps.quickstart.running import write_data
from lit_het.configs import glyph_classifier, quickstart_upstream
from lit_het.configs.experiment import ExperimentConfig
from lit_het.configs.quickstart_evaluations import TYPEFACE
from lit_het.data_pipelines.shards.writing import expand
from lit_het.eval.evaluators.zero_shot import SPECTRUM_IMAGES
from lit_het.eval.metrics.significance import estimate
from lit_het.eval.report.tables import markdown_table
from lit_het.heads.classification_config import HetConfig
from lit_het.heads.covariance import MINIMUM_SCALE
from lit_het.heads.temperature_config import BoundedTemperature
from scripts.studies import harness
from scripts.studies.noise.pairs import samples_of

_HET_XL = glyph_classifier.HEAD
HEAD = HetConfig(_HET_XL.covariance, BoundedTemperature(initial=1.0), _HET_XL.sampling)
KERNELS = ("learned", "random")
COLUMNS = ("all noise", "rows less their mean", "constant vector")


def configuration(root: Path, data: Path, seed: int, steps: int) -> ExperimentConfig:
    """Returns the run of a seed."""
    return harness.run_of(glyph_classifier.get_config(root, HEAD), root / "het", data, seed, steps=steps)


def cosines(params: Mapping[str, np.ndarray], inputs: Float[np.ndarray, "n d"]) -> dict[str, Float[np.ndarray, "n 3"]]:
    """Returns the cosines of `COLUMNS` for each image, of the "learned" W and of a "random" one.

    Args:
        params: of a classifier whose head is `HEAD`, by path.
        inputs: of the head.
    """
    scale, shared = "head/covariance/scale_of_factors", params["head/covariance/shared_factors"]
    factors = shared * (inputs @ params[f"{scale}/kernel"] + params[f"{scale}/bias"])[:, None]  # V(x) = J ∘ v(x)
    diagonal = inputs @ params["head/covariance/diagonal/kernel"] + params["head/covariance/diagonal/bias"]
    rows = np.concatenate([factors, (np.logaddexp(diagonal, 0) + MINIMUM_SCALE)[:, None]], axis=1)  # Q(x)
    without_mean = rows - rows.mean(axis=2, keepdims=True)
    learned = params["head/logits/kernel"]
    found = {}
    for name, kernel in zip(KERNELS, (learned, np.random.default_rng(0).normal(size=learned.shape)), strict=True):
        basis = np.linalg.qr(kernel.T)[0]
        constant = np.linalg.norm(basis.sum(axis=0)) / np.sqrt(len(basis))
        columns = [[_cosine(basis, one) for one in part] for part in (rows, without_mean)]
        found[name] = np.stack([*columns, np.full(len(inputs), constant)], axis=1)
    return found


def _cosine(basis: Float[np.ndarray, "k d"], rows: Float[np.ndarray, "r k"]) -> float:
    """Returns the largest singular value of the product of two orthonormal bases (Björck and Golub 1973)."""
    # A d(x) that is equal for all classes leaves nothing of its row but rounding, which has no direction.
    return float(np.linalg.norm(basis.T @ scipy.linalg.orth(rows.T, rcond=1e-6), 2))


def measure(config: ExperimentConfig, data: Path) -> dict[str, float]:
    """Trains a run, and returns the means over images of its cosines, such as ``learned/all noise``."""
    harness.trained(config)
    samples = itertools.chain.from_iterable(map(samples_of, expand(data / TYPEFACE)))
    first = itertools.islice(samples, SPECTRUM_IMAGES)
    images = [np.asarray(Image.open(io.BytesIO(sample["image"])).convert("RGB")) for sample in first]
    model = lit_het.load(config.run_dir)
    inputs = np.asarray(model.encode_images(images), np.float64)
    params = {path: np.asarray(x, np.float64) for path, x in parameters.flatten(model.run.params).items()}
    return {
        f"{kernel}/{column}": float(mean)
        for kernel, found in cosines(params, inputs).items()
        for column, mean in zip(COLUMNS, found.mean(axis=0), strict=True)
    }


def study(options: argparse.Namespace) -> None:
    """Trains and measures what is not finished, and writes the table."""

    def measure_seed(_: str, seed: int) -> dict[str, float]:
        write_data(options.data, quickstart_upstream.glyphs())
        config = configuration(options.output / f"seed{seed}", options.data, seed, options.steps)
        return measure(config, options.data)

    [found] = harness.run_cells({"HET": {"steps": options.steps}}, measure_seed, options).values()
    rows = [
        (kernel, *(estimate([of[f"{kernel}/{column}"] for of in found.values()]).shown(3) for column in COLUMNS))
        for kernel in KERNELS
    ]
    harness.write_tables(options.output / "alignment.md", markdown_table(("W", *COLUMNS), rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study."""
    parser = harness.study_parser(__doc__, "runs/alignment", data=True, steps=3000, seeds=(0, 1, 2))
    return harness.run_study("study_alignment", study, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
