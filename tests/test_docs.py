"""Links between documents lead to files and headings that exist, and text is wrapped."""

import re
from pathlib import Path
from typing import Any

import pytest

import lit_het
from lit_het.configs import quickstart_upstream
from lit_het.configs.experiment import ExperimentConfig
from lit_het.training import directory
from scripts import write_api_docs, write_papers_page

ROOT = Path(__file__).parents[1]
GENERATED = {write_api_docs.PAGE, write_papers_page.PAGE}
DOCUMENTS = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")} - GENERATED)
_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")
_CODE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_CONFIGURATION = re.compile(r"^```python\n((?:(?!^```).)*?^def get_config.*?)^```", re.DOTALL | re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """Returns the anchors that GitHub gives to the headings of a document."""
    headings = re.findall(r"^#+ (.*)$", _CODE.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files_and_headings(document: Path):
    for path, anchor in _LINK.findall(_CODE.sub("", document.read_text())):
        target = (document.parent / path).resolve() if path else document
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_lines_are_wrapped(document: Path):
    text = [line for line in document.read_text().splitlines() if not line.startswith("|")]
    assert not [line for line in text if len(line) > 120]


def test_the_api_page_has_signatures_and_docstrings():
    page = write_api_docs.page()
    assert (
        "### `lit_het.load(address, *, pretrained=None, calibrated=True, prior=None, mesh=None, options=None)`" in page
    )
    assert "- `address`: " in page


def test_the_api_page_describes_every_public_name():
    documented = {one.__name__ for names in write_api_docs.SECTIONS.values() for one in names}
    assert set(lit_het.__all__) - {"UserError"} <= documented


def test_every_row_of_the_papers_names_code_and_tests_that_exist():
    found = write_papers_page.rows()
    assert [row.number for row in found] == list(range(1, 237))
    for row in found:
        assert row.state in write_papers_page.STATES
        for path in row.code.split(", "):
            assert (ROOT / path).exists() or (ROOT / "lit_het" / path).exists(), row
        tests = re.findall(r"tests/[\w/]+\.py", row.check)
        assert all((ROOT / path).exists() for path in tests), row
        assert tests if row.state == "tested" else row.check, row


def test_the_readme_lists_every_document():
    readme = (ROOT / "README.md").read_text()
    assert not [
        path.name
        for path in (ROOT / "docs").glob("*.md")
        if path not in GENERATED and f"docs/{path.name}" not in readme
    ]


@pytest.mark.parametrize("document", ["README.md", "docs/tutorial.md"])
def test_configurations_in_documents_are_valid(document: str, monkeypatch: pytest.MonkeyPatch):
    # The tutorial's tower is written by a command before.
    monkeypatch.setattr(directory, "load_config", lambda _: quickstart_upstream.get_config())
    codes = _CONFIGURATION.findall((ROOT / document).read_text())
    assert codes
    for code in codes:
        names: dict[str, Any] = {}
        exec(code, names)
        assert isinstance(names["get_config"](), ExperimentConfig)
