"""Class names and prompt templates: from a set in clip_benchmark's layout, a built-in family, or a file."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from lit_het.data_pipelines.storage import read_lines
from lit_het.errors import UserError

CLASS_NAMES_FILE = "classnames.txt"
TEMPLATES_FILE = "zeroshot_classification_templates.txt"
# Of a subset: the names of a larger classifier's classes, and which of them count as each class of the set.
CANDIDATES_FILE = "candidates.txt"
CLASSES_FILE = "classes.json"
PLACEHOLDER = "{c}"
BARE_TEMPLATE = (PLACEHOLDER,)
# Selects the templates in the folder of the set.
SET_PROMPTS = "set"
# Written for this project: captions as people write them below photographs, in varying light, distance and style.
_PHOTOS = (
    "a photo of a {c}.",
    "a snapshot of the {c}.",
    "this picture shows a {c}.",
    "a {c}, seen from close up.",
    "a {c} in the distance.",
    "a picture of one {c}.",
    "several of them: {c}.",
    "a {c} in bright sunlight.",
    "a {c} at night.",
    "a blurry picture of a {c}.",
    "a sharp, detailed photo of a {c}.",
    "a small picture of a {c}.",
    "a large {c} that fills the frame.",
    "half of a {c}, the rest is hidden.",
    "a black-and-white photo of a {c}.",
    "a colourful photo of the {c}.",
    "a drawing of a {c}.",
    "a painting of the {c}.",
    "a toy {c}.",
    "a {c} made of plastic.",
    "an odd-looking {c}.",
    "a beautiful {c}.",
    "my {c}.",
    "a {c} outdoors.",
    "a {c} in a room.",
    "the {c} on a plain background.",
    "a {c} among many other things.",
    "a photo taken of a {c} in passing.",
)
FAMILIES: Mapping[str, tuple[str, ...]] = {
    "bare": BARE_TEMPLATE,
    "photo": _PHOTOS[:1],
    "photos": _PHOTOS,
    "pet": ("a photo of a {c}, a kind of pet.",),
}


def read_classnames(directory: str | Path) -> tuple[str, ...]:
    """Reads the class names of a data set from ``classnames.txt``: one per line; the line number is the label.

    Raises:
        UserError: the file is missing, empty, not UTF-8, or has an empty line (labels would shift).
    """
    return read_lines(f"{directory}/{CLASS_NAMES_FILE}")


def read_templates(directory: str | Path) -> tuple[str, ...]:
    """Reads the prompt templates of a data set from ``zeroshot_classification_templates.txt``: one per line.

    Raises:
        UserError: the file is missing, empty, not UTF-8, or a line lacks the placeholder ``{c}``.
    """
    path = f"{directory}/{TEMPLATES_FILE}"
    templates = read_lines(path)
    check_templates(templates, path)
    return templates


def read_prompts(prompts: str) -> tuple[str, ...]:
    """Returns the templates of a family in `FAMILIES`, or reads them from a file with one per line.

    Raises:
        UserError: no such family or file, or a line lacks the placeholder ``{c}``.
    """
    if prompts in FAMILIES:
        return FAMILIES[prompts]
    if not Path(prompts).is_file():
        families = ", ".join((SET_PROMPTS, *FAMILIES))
        raise UserError(f"--prompts {prompts} is neither a file nor one of {families}")
    templates = read_lines(prompts)
    check_templates(templates, prompts)
    return templates


def check_templates(templates: Sequence[str], source: str = "templates") -> None:
    """Checks that there is at least one template and that each has the placeholder ``{c}``.

    Raises:
        UserError: with the source and the invalid template.
    """
    if not templates:
        raise UserError(f"{source}: no prompt template; give at least {PLACEHOLDER!r}")
    for template in templates:
        if PLACEHOLDER not in template:
            hint = "; write {c} instead of {}" if "{}" in template else ""
            raise UserError(
                f"{source}: template {template!r} lacks the placeholder {PLACEHOLDER} for the class name{hint}"
            )


def fill_template(template: str, name: str) -> str:
    """Returns the template with ``{c}`` replaced by the class name."""
    # Not str.format: class names such as "set {a, b}" and templates with other braces are valid.
    return template.replace(PLACEHOLDER, name)
