"""Measures how the noise of HET lies to the row space of W (HET-XL App. I.1, Table 17), on characters and over seeds.

    python -m scripts.study_alignment --output runs/alignment --seeds 0 1 2

The glyph classifier with HET is trained, and the cosines of the smallest angles are computed from its parameters for
images of another typeface: of all noise, and without what moves all logits alike, the mean of each row of Q.
"""

import dataclasses
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
from lit_het.configs import glyph_classifier
from lit_het.configs.experiment import ExperimentConfig
from lit_het.configs.quickstart_evaluations import TYPEFACE
from lit_het.data_pipelines.shards.writing import expand
from lit_het.eval.evaluators.zero_shot import SPECTRUM_IMAGES
from lit_het.eval.metrics.significance import estimate
from lit_het.files import write_atomically
from lit_het.heads.classification_config import HetConfig
from lit_het.heads.covariance import MINIMUM_SCALE
from lit_het.heads.temperature_config import BoundedTemperature
from lit_het.search import grid
from lit_het.training.durations import Duration
from lit_het.training.train import train_unless_done
from scripts.noise.pairs import samples_of
from scripts.study import run_seeds, study_parser

_HET_XL = glyph_classifier.HEAD
HEAD = HetConfig(_HET_XL.covariance, BoundedTemperature(initial=1.0), _HET_XL.sampling)
COLUMNS = ("all noise", "rows less their mean", "constant vector")


def configuration(root: Path, data: Path, seed: int, steps: int) -> ExperimentConfig:
    """Returns the run of a seed."""
    base = glyph_classifier.get_config(root, HEAD)
    shards = (str(data / "train"),)
    return dataclasses.replace(
        base,
        run_dir=root / "het",
        data=dataclasses.replace(base.data, shards=shards, seed=seed),
        seed=seed,
        length=Duration(steps),
    )


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
    kernels = {"learned": learned, "random": np.random.default_rng(0).normal(size=learned.shape)}
    found = {}
    for name, kernel in kernels.items():
        basis = np.linalg.qr(kernel.T)[0]
        constant = np.linalg.norm(basis.sum(axis=0)) / np.sqrt(len(basis))
        columns = [[_cosine(basis, one) for one in part] for part in (rows, without_mean)]
        found[name] = np.stack([*columns, np.full(len(inputs), constant)], axis=1)
    return found


def _cosine(basis: Float[np.ndarray, "k d"], rows: Float[np.ndarray, "r k"]) -> float:
    """Returns the largest singular value of the product of two orthonormal bases (Björck and Golub 1973)."""
    # A d(x) that is equal for all classes leaves nothing of its row but rounding, which has no direction.
    return float(np.linalg.norm(basis.T @ scipy.linalg.orth(rows.T, rcond=1e-6), 2))


def train(root: Path, data: Path, seed: int, steps: int) -> None:
    """Trains the run of a seed, unless it is done."""
    train_unless_done(configuration(root, data, seed, steps))


def conclude(output: Path, data: Path, seeds: Sequence[int], _: int) -> None:
    """Writes and prints the table."""
    samples = itertools.chain.from_iterable(map(samples_of, expand(data / TYPEFACE)))
    first = itertools.islice(samples, SPECTRUM_IMAGES)
    images = [np.asarray(Image.open(io.BytesIO(sample["image"])).convert("RGB")) for sample in first]
    means: dict[str, list[np.ndarray]] = {"learned": [], "random": []}
    for seed in seeds:
        model = lit_het.load(output / f"seed{seed}" / "het")
        inputs = np.asarray(model.encode_images(images), np.float64)
        params = {path: np.asarray(x, np.float64) for path, x in parameters.flatten(model.run.params).items()}
        for name, found in cosines(params, inputs).items():
            means[name].append(found.mean(axis=0))
    lines = [f"| W | {' | '.join(COLUMNS)} |", f"| --- |{' --- |' * len(COLUMNS)}"]
    for name, of_seeds in means.items():
        cells = (estimate(column.tolist()).shown(3) for column in np.transpose(of_seeds))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    text = "\n".join(lines) + "\n"
    write_atomically(output / "alignment.md", text)
    print(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study; user errors are printed as one line, with exit code 1."""
    parser = study_parser(__doc__, steps=3000)
    parser.set_defaults(output=Path("runs/alignment"), seeds=[0, 1, 2])
    options = parser.parse_args(arguments)
    return grid.run_main("study_alignment", lambda: run_seeds(options, train, conclude))


if __name__ == "__main__":
    sys.exit(main())
