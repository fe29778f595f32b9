"""What documents, new projects and shipped configurations import, and so the files that users have made from them."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from lit_het.apps.new import project
from lit_het.paths import locate_config, shipped_configs
from tests.frozen import files

Imports: TypeAlias = dict[str, list[str]]
"""Names by module; none where the module itself is imported."""

_ROOT = Path(__file__).parents[2]
_NAMES = re.compile(r"\bfrom (lit_het(?:\.\w+)*) import (\([^)]*\)|[\w ,]+)")
_MODULE = re.compile(r"\bimport (lit_het(?:\.\w+)*)")
# The page of the Python API has a heading for each name.
_HEADING = re.compile(r"^### `(lit_het(?:\.\w+)*)\.(\w+)", re.MULTILINE)


def recorded() -> dict[str, Imports]:
    """Returns what is imported now, and what was when it was recorded: files of users do not change."""
    documents = [_ROOT / "README.md", *(_ROOT / "docs").rglob("*.md"), *(_ROOT / "docs").rglob("*.ipynb")]
    written = (f"from lit_het.{module} import {names}" for module, names in project._IMPORTS.items())
    shipped = [
        *(locate_config(Path(name)) for name in shipped_configs()),
        *(locate_config(Path(name), "get_evaluations") for name in shipped_configs("get_evaluations")),
    ]
    now = {
        "documents": _imports(path.read_text() for path in documents),
        "new projects": _imports(written),
        "configurations": _imports(path.read_text() for path in shipped),
    }
    before = files.read("imports") if files.exists("imports") else {}
    return {source: _joined(before.get(source, {}), imports) for source, imports in now.items()}


def _imports(texts: Iterable[str]) -> Imports:
    found: Imports = {}
    for text in texts:
        for module in _MODULE.findall(text):
            found.setdefault(module, [])
        for module, names in [*_NAMES.findall(text), *_HEADING.findall(text)]:
            given = (name.split(" as ")[0].strip() for name in names.strip("()").split(","))
            found[module] = sorted({*found.get(module, []), *filter(None, given)})
    return found


def _joined(before: Imports, now: Imports) -> Imports:
    return {
        module: sorted({*before.get(module, []), *now.get(module, [])}) for module in sorted(before.keys() | now.keys())
    }
