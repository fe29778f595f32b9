"""Where results go: pages and tables to files, and tables to the terminal."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lit_het.console import console_of_results, message
from lit_het.errors import UserError
from lit_het.eval.report.page import Html
from lit_het.eval.report.tables import Table
from lit_het.files import write_atomically


def write_files(files: Mapping[Path, str]) -> None:
    """Writes texts, and makes their folders."""
    for path, text in files.items():
        if path.is_dir():
            raise UserError(f"{path} is a folder; name a file with --output")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text)
        except OSError as error:
            raise UserError(f"{path}: cannot be written ({error.strerror})") from error


def write_benchmark(output: Path, page: Html, tables: Sequence[Table], sources: Iterable[str] = ()) -> None:
    """Writes the page of a benchmark, and its tables as Markdown beside it; prints the tables."""
    parts = [*(table.markdown() for table in tables), *(f"- {source}" for source in sources), ""]
    write_files({output: page, output.with_suffix(".md"): "\n".join(parts)})
    print_results(*tables, width_of_files=160)
    message(f"{output}, and its figures in {output.stem}.json and .md beside it")


def print_results(*parts: Table | str, width_of_files: int = 120) -> None:
    """Prints tables and sentences to standard output."""
    console = console_of_results(width_of_files)
    for part in parts:
        console.print(part.terminal() if isinstance(part, Table) else part, markup=False, highlight=False)
