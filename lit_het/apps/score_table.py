"""Tables with a row per sample, named by its shard and its key: what ``lit-het data score`` and ``select`` write."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lit_het.cells import cell_of
from lit_het.errors import UserError
from lit_het.files import completed


def write_table(output: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Writes columns of equal length to a .parquet file or, by any other ending, as CSV.

    Raises:
        UserError: pyarrow is missing, or the file cannot be written.
    """
    with completed(output) as partial:
        if output.suffix == ".parquet":
            try:
                import pyarrow as pa
                import pyarrow.parquet as pq
            except ImportError as error:
                raise UserError(f"--output {output} needs pyarrow: pip install 'lit-het[parquet]'") from error
            pq.write_table(pa.table(dict(columns)), partial)
        else:
            with partial.open("w", newline="", encoding="utf-8") as file:
                writer = csv.writer(file)
                writer.writerow(columns)
                writer.writerows(map(cell_of, row) for row in zip(*columns.values(), strict=True))
