"""The site of these documents: `bash scripts/site.sh` builds it with Sphinx and checks every link.

The repository is the source directory, so that README is the home page and a link leads to the same file everywhere.
Links to files that are not pages download them.
"""

from pathlib import Path

from sphinx.application import Sphinx

import lit_het
from scripts import write_api_docs, write_papers_page

project = "lit-het"
version = release = lit_het.__version__
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/decisions/*.md", "docs/*.ipynb"]
# Folders that would take longer to look through than everything else.
exclude_patterns = [".*", "build", "lit_het", "runs", "tests"]
extensions = ["myst_nb"]
nb_execution_mode = "off"  # tests/test_notebook.py executes it
nb_merge_streams = True
nb_ipywidgets_js = {}  # they would be loaded from other machines
myst_heading_anchors = 4
highlight_language = "none"
html_theme = "furo"
html_title = project
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False

DECISIONS = tuple(f"decisions/{path.stem}" for path in sorted(Path(__file__).parent.glob("decisions/*.md")))
# Sphinx complains about a page that is in none of these.
NAVIGATION = {
    "Tutorials": ("tutorial", "notebook", "quickstart"),
    "How to": ("using", "data", "weights", "recipes", "decoder", "ensembles", "distributed", "surviving", "shape_law"),
    "Reference": ("api", "heads", "evaluation", "data_reference", "trust", "benchmarks", "/CHANGELOG"),
    "Explanation": (
        "noise",
        "rivals",
        "temperature",
        "paper_map",
        "papers",
        "architecture",
        *DECISIONS,
        "/CONTRIBUTING",
    ),
}


def add_navigation(app: Sphinx, page: str, text: list[str]) -> None:
    """Appends the table of contents to the home page; README itself has none, for it would be visible elsewhere."""
    if page == app.config.root_doc:
        for caption, pages in NAVIGATION.items():
            paths = "\n".join(path if path.startswith("/") else f"/docs/{path}" for path in pages)
            text[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{paths}\n```\n"


def add_index(app: Sphinx, error: Exception | None) -> None:
    """Sends who opens the folder to the home page."""
    if error is None:
        to = '<!doctype html><meta http-equiv="refresh" content="0; url=README.html">\n'
        (Path(app.outdir) / "index.html").write_text(to)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    for generated in (write_api_docs, write_papers_page):
        app.connect("builder-inited", lambda _, module=generated: module.write_page())
    app.connect("source-read", add_navigation)
    app.connect("build-finished", add_index)
