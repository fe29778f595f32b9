"""The notebook of the documents runs, and finds what its text says."""

import ast
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests import tiny

pytestmark = pytest.mark.slow
NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebook.ipynb"


def displayed(cell: Any) -> dict[str, str]:
    """Returns what the last expression of a cell shows, by MIME type."""
    return next(output["data"] for output in cell["outputs"] if output["output_type"] == "execute_result")


def test_it_runs_in_a_fresh_kernel(monkeypatch: pytest.MonkeyPatch):
    # The kernel imports the library of this tree, and trains on one device, as on a laptop: eight take twice the time.
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOK.parents[1]))
    monkeypatch.setenv("XLA_FLAGS", tiny.environment(devices=1)["XLA_FLAGS"])
    # Steps and batches enough for what is asserted below.
    text = NOTEBOOK.read_text()
    batches = "data=dataclasses.replace(lit.data, batch_size=64)"
    for written, shorter in (
        ("Duration(200)", "Duration(140)"),
        ("Duration(100)", f"Duration(75), {batches}"),
        ("=20)", "=8)"),
    ):
        assert text.count(written) == 1
        text = text.replace(written, shorter)
    notebook = nbformat.reads(text, as_version=4)
    NotebookClient(notebook, timeout=300).execute()
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    (prediction,) = (cell for cell in code if cell["source"].endswith("coverage=0.9)"))
    shown = displayed(prediction)
    assert shown["text/html"].startswith("<table")
    assert "prediction set" in shown["text/plain"]
    figures = ast.literal_eval(displayed(code[-1])["text/plain"])
    assert figures["top1"] > 20 * figures["chance"]
    assert figures["nll"] < figures["nll_as_trained"]
    assert figures["mean_noise"] > 0
    assert figures["digits_accuracy"] > 0.85
    assert figures["digits_nll"] < 0.5
