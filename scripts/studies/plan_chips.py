"""Plans the shipped configurations for TPU chips: ``python -m scripts.studies.plan_chips [--only TEXT]``.

Each row is one ``lit-het plan --topology``, whose page stays in ``--directory``. Rows that are not planned keep their
figures, with the commit that gave them. The table for docs/distributed.md is printed.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lit_het.eval.report.tables import markdown_table
from lit_het.files import write_atomically
from lit_het.planning import chips
from lit_het.planning.chips import GIB
from lit_het.towers.sizes import encoder_size

OUTPUT = Path("docs/results/chips.json")
COLUMNS = (
    *("configuration", "slices of chips", "batch on a chip", "GiB of a chip", "of HBM", "matrix products, ms"),
    *("HBM, ms", "ICI, ms", "DCN, ms", "bound of a step, ms", "MFU at the bound, %", "examples a second and chip"),
    *("bound of a deterministic head, ms", "ratio", "commit"),
)
_SMALL = "--task.text-tower.encoder.remat full --task.microbatches"
_150M = "--task.text-tower.embedding-size 880 " + " ".join(
    f"--task.image-tower.encoder.{name.replace('_', '-')} {getattr(encoder_size('So150m'), name)}"
    for name in ("width", "depth", "mlp_width", "num_heads")
)


class Row(NamedTuple):
    """A configuration with further flags and what they mean, and slices of chips."""

    config: str
    topology: str
    flags: str = ""
    meaning: str = ""
    slices: int = 1

    @property
    def name(self) -> str:
        """The configuration, and what its flags mean."""
        return f"{self.config}, {self.meaning}" if self.meaning else self.config

    @property
    def chips(self) -> str:
        """The slices."""
        return f"{self.slices} x {self.topology}" if self.slices > 1 else self.topology


ROWS = (
    Row("lit_so400m_het_xl", "v5e-256"),
    Row("lit_so400m_het_xl", "v6e-64"),
    Row("lit_so400m_het_xl", "v5p-128"),
    Row("lit_so400m_het_xl", "v5e-128", slices=2),
    Row("lit_so400m_het_xl", "v5e-256", "--task.head.num-samples 1", "1 sample"),
    Row("lit_so400m_het_xl", "v5e-64"),
    Row("lit_so400m_het_xl", "v5e-64", f"{_SMALL} 4", "remat full, 4 microbatches"),
    Row("lit_so400m_het_xl", "v5e-16"),
    Row("lit_so400m_het_xl", "v5e-16", f"{_SMALL} 16", "remat full, 16 microbatches"),
    Row("lit_so400m_het_xl", "v5e-256", _150M, "SoViT-150m"),
    Row("lit_so400m_sigmoid", "v5e-128"),
    Row("lit_e3_b32_het_xl", "v5e-32"),
    Row("lit_gigantic14_het_xl", "v5e-256"),
    Row("lit_decoder_so400m", "v5e-4"),
    Row("imagenet21k_het_xl", "v5e-64"),
    Row("imagenet21k_het_xl:tower=resnet152", "v5e-64"),
    Row("imagenet21k_het_xl:data_set=jft300m", "v5e-64"),
    Row("fine_tune_imagenet", "v5e-8"),
    Row("fine_tune_imagenet", "v5e-16"),
    Row("fine_tune_experts", "v5e-8"),
    Row("imagenet_experts", "v5e-8"),
    Row("linear_probe_imagenet", "v5e-1"),
    Row("translation_base", "v5e-4"),
    Row("prolip_b16", "v5e-256"),
    Row("siglip2_b16", "v5e-256", slices=8),
    Row("coca_large", "v4-4096"),
)


def main() -> None:
    """Plans rows, writes the table of all, and prints that of the documents."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--only", default="", help="plans rows whose configuration or chips contain this text")
    parser.add_argument("--directory", type=Path, default=Path("runs/chips"), help="default: %(default)s")
    arguments = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True, check=True)
    written = json.loads(OUTPUT.read_text())["chips"]["rows"] if OUTPUT.exists() else []
    rows = {(cells[0], cells[1]): cells for cells in written}
    chosen = [row for row in ROWS if arguments.only in row.name or arguments.only in row.chips]
    failed = []
    for row in chosen:
        try:
            content = _planned(row, arguments.directory)
        except FileNotFoundError:
            failed.append(f"{row.name} on {row.chips}")
            continue
        cells = list(_cells(row, content))
        # Without bounds there are no more figures.
        rows[row.name, row.chips] = [*cells, *[""] * (len(COLUMNS) - 1 - len(cells)), commit.stdout.strip()]
        # After each, as all of them take an hour.
        _write(_ordered(rows), content["versions"])
    print(markdown(_ordered(rows)))
    if failed:
        sys.exit(f"not planned: {'; '.join(failed)}")


def _ordered(rows: Mapping[tuple[str, str], Sequence[str]]) -> list[Sequence[str]]:
    return [rows[row.name, row.chips] for row in ROWS if (row.name, row.chips) in rows]


def _planned(row: Row, directory: Path) -> Mapping[str, Any]:
    """Plans a row and returns the figures; raises FileNotFoundError if there are none."""
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / f"{row.name}, {row.chips}.json".replace(" ", "_")
    file.unlink(missing_ok=True)
    command = f"-m lit_het plan --config {row.config} --topology {row.topology} --slices {row.slices} {row.flags}"
    # It fails, too, if the step does not fit, which is a figure.
    subprocess.run([sys.executable, *command.split(), "--output", file.with_suffix(".html")], check=False)
    return json.loads(file.read_text())


def _write(rows: Iterable[Sequence[str]], versions: Mapping[str, str]) -> None:
    content = {
        "what": "Bounds of a training step on TPU chips, from the compiled programs: nothing is measured.",
        "command": "python -m scripts.studies.plan_chips",
        "versions": versions,
        "columns": COLUMNS,
        "rows": list(rows),
    }
    write_atomically(OUTPUT, json.dumps({"chips": content}, indent=1, ensure_ascii=False) + "\n")


def _cells(row: Row, content: Mapping[str, Any]) -> Iterator[str]:
    step, *others = content["plans"]
    size, memory = sum(step["bytes"].values()), chips.parse(row.topology, row.slices).chip.memory
    yield from (row.name, row.chips, f"{step['batch_size'] / content['chips']:g}", f"{size / GIB:.2f}")
    yield f"{size / memory:.0%}" if step["fits"] else f"{size / memory:.0%}: does not fit"
    bounds = step["bounds"]
    if bounds is None:
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


def markdown(rows: Iterable[Sequence[str]]) -> str:
    """Returns the table of docs/distributed.md."""
    columns = ("configuration", "chips", "GiB (of HBM)", "products", "HBM", "ICI", "bound", "MFU", "ratio")

    def cells(row: Sequence[str]) -> Iterator[str]:
        of = dict(zip(COLUMNS, row, strict=True))
        yield from (of["configuration"], of["slices of chips"], f"{of['GiB of a chip']} ({of['of HBM']})")
        yield from (of[name] for name in ("matrix products, ms", "HBM, ms", "ICI, ms"))
        bound, mfu = of["bound of a step, ms"], of["MFU at the bound, %"]
        yield from (bound and f"**{bound}**", mfu and f"{mfu} %", of["ratio"])

    return markdown_table(columns, [tuple(cells(row)) for row in rows])


if __name__ == "__main__":
    main()
