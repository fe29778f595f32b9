r"""Compares the heads of HET-XL on one classifier, each with τ = 1 and with a learned τ (as HET-XL App. B, Table 8).

    python -m scripts.studies.compare_heads --held-out runs/quickstart/data/held_out_typeface \
        --seeds 0 1 2 --output runs/heads

Runs, results and the table are saved as by scripts/studies/sweep_temperature.py.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_het.configs import glyph_classifier
from lit_het.errors import UserError
from lit_het.heads.classification_config import DeterministicConfig, HetConfig, HetHConfig, HetXLConfig
from lit_het.search import grid, temperatures

# The heads by the names of the paper, in the order of the table.
SAME = {"covariance": glyph_classifier.HEAD.covariance, "sampling": glyph_classifier.HEAD.sampling}
HEADS: Mapping[str, Any] = {
    "DET": DeterministicConfig(),
    "HET": HetConfig(**SAME),
    "HET-H": HetHConfig(
        num_buckets=256, **SAME
    ),  # as many buckets as features: as many parameters as HET-XL (Sec. 6.1)
    "HET-XL": HetXLConfig(**SAME),
    "HET-XL-unshared": HetXLConfig(unshared_size=256, **SAME),
}
TAU = 1.0  # where τ is not learned


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison; user errors are printed as one line, with exit code 1."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--config",
        type=Path,
        default=Path("configs/glyph_classifier.py"),
        metavar="FILE",
        help="a classifier with softmax loss, whose head is replaced; default: %(default)s",
    )
    parser.add_argument("--heads", nargs="+", default=list(HEADS), metavar="HEAD", help=f"of {', '.join(HEADS)}")
    temperatures.add_arguments(parser, output=Path("runs/heads"))
    return grid.run_main("compare_heads", lambda: _compare(parser.parse_args(arguments)))


def select_heads(names: Sequence[str]) -> dict[str, Any]:
    """Returns the heads of these names."""
    unknown = [name for name in names if name not in HEADS]
    if unknown:
        raise UserError(f"--heads {unknown[0]} is unknown; choose from {', '.join(HEADS)}")
    return {name: HEADS[name] for name in names}


def _compare(options: argparse.Namespace) -> None:
    heads = select_heads(options.heads)
    config = temperatures.load_classifier(options)
    planned = temperatures.plan(config, heads, [TAU], tuple(options.learned), options.seeds, options.output)
    temperatures.compare(config, planned, list(HEADS), options.output)
    print(f"table: {options.output / 'table.md'}")


if __name__ == "__main__":
    sys.exit(main())
