"""Plans the shipped configurations for TPU chips: ``python -m scripts.studies.plan_chips [--only TEXT]``.

Each row is one ``lit-het plan --topology``, whose figures stay in ``--directory``: what is there is not compiled again.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from lit_het.files import write_atomically
from lit_het.planning import chips
from lit_het.planning.chips import GIB
from lit_het.towers.sizes import encoder_size

OUTPUT = Path("docs/results/chips.json")
COLUMNS = (
    *("configuration", "slices of chips", "batch on a chip", "GiB of a chip", "of HBM", "matrix products, ms"),
    *("HBM, ms", "ICI, ms", "DCN, ms", "bound of a step, ms", "MFU at the bound, %", "examples a second and chip"),
    *("bound of a deterministic head, ms", "ratio"),
)
_SMALL = "--task.text-tower.encoder.remat full --task.microbatches"
_150M = "--task.text-tower.embedding-size 880 " + " ".join(
    f"--task.image-tower.encoder.{name.replace('_', '-')} {getattr(encoder_size('So150m'), name)}"
    for name in ("width", "depth", "mlp_width", "num_heads")
)


class Row(NamedTuple):
    """A configuration with further flags, and slices of chips."""

    config: str
    topology: str
    flags: str = ""
    slices: int = 1

    @property
    def name(self) -> str:
        """The configuration with its flags."""
        return f"{self.config} {self.flags}".strip()

    @property
    def chips(self) -> str:
        """The slices."""
        return f"{self.slices} x {self.topology}" if self.slices > 1 else self.topology


ROWS = (
    Row("lit_so400m_het_xl", "v5e-256"),
    Row("lit_so400m_het_xl", "v6e-64"),
    Row("lit_so400m_het_xl", "v5p-128"),
    Row("lit_so400m_het_xl", "v5e-128", slices=2),
    Row("lit_so400m_het_xl", "v5e-64"),
    Row("lit_so400m_het_xl", "v5e-64", f"{_SMALL} 4"),
    Row("lit_so400m_het_xl", "v5e-16"),
    Row("lit_so400m_het_xl", "v5e-16", f"{_SMALL} 16"),
    Row("lit_so400m_het_xl", "v5e-256", _150M),
    Row("lit_so400m_sigmoid", "v5e-256"),
    Row("lit_e3_b32_het_xl", "v5e-64"),
    Row("lit_gigantic14_het_xl", "v5e-256"),
    Row("lit_decoder_so400m", "v5e-4"),
    Row("imagenet21k_het_xl", "v5e-64"),
    Row("imagenet21k_het_xl:tower=resnet152", "v5e-64"),
    Row("fine_tune_imagenet", "v5e-16"),
    Row("fine_tune_experts", "v5e-16"),
    Row("imagenet_experts", "v5e-16"),
    Row("linear_probe_imagenet", "v5e-4"),
    Row("translation_base", "v5e-4"),
    Row("prolip_b16", "v5e-256"),
    Row("siglip2_b16", "v5e-256", slices=8),
    Row("coca_large", "v4-4096"),
)


def main() -> None:
    """Plans the rows that are not there, and writes the table of all."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", default="", help="plans rows whose configuration or chips contain this text")
    parser.add_argument("--directory", type=Path, default=Path("runs/chips"), help="default: %(default)s")
    arguments = parser.parse_args()
    arguments.directory.mkdir(parents=True, exist_ok=True)
    found = []
    for row in ROWS:
        file = arguments.directory / f"{row.name}, {row.chips}.json".replace("--", "").replace(" ", "_")
        if not file.exists() and (arguments.only in row.name or arguments.only in row.chips):
            command = (
                f"-m lit_het plan --config {row.config} --topology {row.topology} --slices {row.slices} {row.flags}"
            )
            subprocess.run([sys.executable, *command.split(), "--output", file.with_suffix(".html")], check=False)
        if file.exists():
            found.append((row, json.loads(file.read_text())))
    write_atomically(OUTPUT, json.dumps({"chips": _table(found)}, indent=1, ensure_ascii=False) + "\n")


def _table(found: list[tuple[Row, Mapping[str, Any]]]) -> Mapping[str, Any]:
    versions = found[0][1]["versions"]
    return {
        "what": "Bounds of a training step on TPU chips, from the compiled programs: nothing is measured.",
        "command": "python -m scripts.studies.plan_chips",
        "versions": versions,
        "columns": COLUMNS,
        "rows": [list(_cells(row, content)) for row, content in found],
    }


def _cells(row: Row, content: Mapping[str, Any]) -> Iterator[str]:
    step, *others = content["plans"]
    size, memory = sum(step["bytes"].values()), chips.parse(row.topology, row.slices).chip.memory
    yield from (row.name, row.chips, f"{step['batch_size'] / content['chips']:g}", f"{size / GIB:.2f}")
    yield f"{size / memory:.0%}" if step["fits"] else f"{size / memory:.0%}: does not fit"
    bounds = step["bounds"]
    if bounds is None:
        yield from [""] * (len(COLUMNS) - 5)
        return
    limits = {limit["name"]: limit["seconds"] for limit in bounds["limits"]}
    yield from (
        f"{1e3 * limits[name]:.1f}" if name in limits else "" for name in ("matrix products", "HBM", "ICI", "DCN")
    )
    seconds = bounds["seconds"]
    yield from (f"{1e3 * seconds:.1f}", f"{100 * bounds['mfu']:.1f}")
    yield f"{step['batch_size'] / content['chips'] / seconds:,.0f}"
    plain = others[0]["bounds"] if others else None
    yield from (f"{1e3 * plain['seconds']:.1f}", f"{seconds / plain['seconds']:.3f}") if plain else ("", "")


if __name__ == "__main__":
    main()
