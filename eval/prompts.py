"""Class names and prompt templates in the layout of clip_benchmark's webdataset folders."""

from collections.abc import Sequence
from pathlib import Path

from data_pipelines.storage import read_lines
from lit_het.errors import UserError

CLASS_NAMES_FILE = "classnames.txt"
TEMPLATES_FILE = "zeroshot_classification_templates.txt"
PLACEHOLDER = "{c}"
BARE_TEMPLATE = (PLACEHOLDER,)


def read_classnames(directory: str | Path) -> tuple[str, ...]:
    """Class names of a data set, one a line of ``classnames.txt``; the line number is the label.

    Raises:
        UserError: the file is missing, empty, not UTF-8, or has an empty line (labels would shift).
    """
    return read_lines(f"{directory}/{CLASS_NAMES_FILE}")


def read_templates(directory: str | Path) -> tuple[str, ...]:
    """Prompt templates of a data set, one a line of ``zeroshot_classification_templates.txt``.

    Raises:
        UserError: the file is missing, empty, not UTF-8, or a line lacks the placeholder ``{c}``.
    """
    path = f"{directory}/{TEMPLATES_FILE}"
    templates = read_lines(path)
    check_templates(templates, path)
    return templates


def check_templates(templates: Sequence[str], source: str = "templates") -> None:
    """Demand at least one template, and the placeholder ``{c}`` in each.

    Raises:
        UserError: with the source and the template at fault.
    """
    if not templates:
        raise UserError(f"{source}: no prompt template; give at least {PLACEHOLDER!r}")
    for template in templates:
        if PLACEHOLDER not in template:
            raise UserError(f"{source}: template {template!r} lacks the placeholder {PLACEHOLDER} for the class name")


def fill_template(template: str, name: str) -> str:
    """The caption of a class: the template with the class name in place of ``{c}``."""
    # Not str.format: names such as "set {a, b}" and templates with other braces are legitimate.
    return template.replace(PLACEHOLDER, name)
