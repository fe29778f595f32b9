"""Prints mean and standard error of the quickstart over several seeds, as a Markdown table.

python -m scripts.studies.quickstart_seeds runs/seed0 runs/seed1 runs/seed2
"""

import argparse
import itertools
import json
from pathlib import Path

import numpy as np

from lit_het.apps.quickstart.answers import AS_TRAINED, BOTH, CALIBRATED, KNOWN, NEW
from lit_het.eval.metrics.significance import estimate
from lit_het.eval.report.tables import markdown_table

SETS = ("held_out_typeface", "held_out_characters", "held_out_characters_among_held_out")
FIGURES = ("top1", "top5", "nll", "ece", "calibrated/nll", "calibrated/ece", "errors_among_homoglyphs")
ANSWERS = tuple(f"answers/{how}/{names}" for how in (AS_TRAINED, CALIBRATED) for names in (KNOWN, NEW, BOTH))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="directories of finished quickstarts")
    results = [json.loads((run / "results.json").read_text()) for run in parser.parse_args().runs]
    rows = []
    figures = [
        *itertools.product(SETS, FIGURES),
        *itertools.product(ANSWERS, ("right", "right_of_known", "right_of_new", "sure", "right_if_sure", "nll", "ece")),
    ]
    for condition, (name, figure) in itertools.product(("clean", "noisy"), figures):
        one, other = (
            np.array([result[condition][model].get(f"{name}/{figure}", np.nan) for result in results])
            for model in ("deterministic", "het_xl")
        )
        if np.isfinite([one, other]).all():
            cells = (estimate(values.tolist()).shown(3) for values in (one, other, other - one))
            rows.append((condition, name, figure, *cells))
    print(markdown_table(("captions", "set", "figure", "deterministic", "HET-XL", "difference"), rows))
    areas = [result["noisy"]["het_xl"]["noisy_caption_auroc"] for result in results]
    print(f"wrong captions by noise norm: AUROC {estimate(areas).shown(3)}")
    for kind in results[0]["noise_of_homoglyphs"]:
        areas = [result["noise_of_homoglyphs"][kind]["auc"] for result in results]
        values = [result["noise_of_homoglyphs"][kind]["p_value"] for result in results]
        print(
            f"noise of homoglyphs, {kind}: AUC {estimate(areas).shown(3)}; p = {', '.join(f'{p:.2g}' for p in values)}"
        )
    print("seconds:", ", ".join(f"{result['seconds']:.0f}" for result in results))
    print("peak memory, GB:", ", ".join(f"{result['peak_memory_bytes'] / 1e9:.2f}" for result in results))


if __name__ == "__main__":
    main()
