"""Class names and prompt templates: from a set in clip_benchmark's layout, a built-in family, or a file."""

import string
from collections.abc import Mapping, Sequence
from pathlib import Path

from lit_het.data_pipelines.labels_config import CLASS_NAMES_FILE
from lit_het.data_pipelines.shards.storage import read_lines
from lit_het.data_pipelines.texts import openai_clip
from lit_het.data_pipelines.texts.captions_config import SET_PROMPTS
from lit_het.errors import UserError

TEMPLATES_FILE = "zeroshot_classification_templates.txt"
# Of a subset: the names of a larger classifier's classes, and which of them count as each class of the set.
CANDIDATES_FILE = "candidates.txt"
CLASSES_FILE = "classes.json"
PLACEHOLDER = "{c}"
# The name as `canonical_name` writes it.
CANONICAL_PLACEHOLDER = "{c:canonical}"
BARE_TEMPLATE = (PLACEHOLDER,)
IMAGENET = "imagenet"
"""The value of ``--candidates`` for OpenAI's names of ImageNet's classes."""

_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
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


def canonical(text: str, keep: str) -> str:
    """Returns text in lower case, with underscores as spaces, single spaces, and no ASCII punctuation but ``keep``.

    As big_vision's zero-shot evaluation writes names and templates (``prompt_engineering.py``, ``_canonicalize``).
    """
    parts = text.replace("_", " ").split(keep)
    return " ".join(keep.join(part.translate(_NO_PUNCTUATION) for part in parts).lower().split())


def canonical_name(name: str) -> str:
    """Returns a class name as big_vision's zero-shot evaluation writes it: `canonical`, up to the first comma."""
    return canonical(name, ",").partition(",")[0]


def _canonical_templates(templates: Sequence[str]) -> tuple[str, ...]:
    """Returns templates as big_vision's zero-shot evaluation has them; to each list of CLIP it adds the bare name."""
    written = (canonical(template, PLACEHOLDER) for template in (*templates, PLACEHOLDER))
    return tuple(template.replace(PLACEHOLDER, CANONICAL_PLACEHOLDER) for template in written)


FAMILIES: Mapping[str, tuple[str, ...]] = {
    "bare": BARE_TEMPLATE,
    "photo": _PHOTOS[:1],
    "photos": _PHOTOS,
    "pet": ("a photo of a {c}, a kind of pet.",),
    "clip80": openai_clip.imagenet_templates(),
    "clip7": openai_clip.best_imagenet_templates(),
    "clip_paper": _canonical_templates(openai_clip.imagenet_templates()),
    "clip_best": _canonical_templates(openai_clip.best_imagenet_templates()),
}


def read_classnames(directory: str | Path) -> tuple[str, ...]:
    """Reads the class names of a data set from ``classnames.txt``: one per line; the line number is the label."""
    return read_lines(f"{directory}/{CLASS_NAMES_FILE}")


def read_templates(directory: str | Path) -> tuple[str, ...]:
    """Reads the prompt templates of a data set from ``zeroshot_classification_templates.txt``: one per line."""
    path = f"{directory}/{TEMPLATES_FILE}"
    templates = read_lines(path)
    check_templates(templates, path)
    return templates


def read_prompts(prompts: str, source: str = "--prompts") -> tuple[str, ...]:
    """Returns the templates of a family in `FAMILIES`, or reads them from a file; ``source`` names it in errors."""
    if prompts in FAMILIES:
        return FAMILIES[prompts]
    if not Path(prompts).is_file():
        families = ", ".join((SET_PROMPTS, *FAMILIES))
        raise UserError(f"{source} {prompts} is neither a file nor one of {families}")
    templates = read_lines(prompts)
    check_templates(templates, prompts)
    return templates


def read_candidates(path: Path) -> tuple[str, ...]:
    """Reads candidate class names from a file, one per line; `IMAGENET` stands for OpenAI's names of its classes."""
    return openai_clip.imagenet_names() if _is_imagenet(path) else read_lines(str(path))


def _is_imagenet(path: Path) -> bool:
    return str(path) == IMAGENET and not path.is_file()


def check_templates(templates: Sequence[str], source: str = "templates") -> None:
    """Checks that there is at least one template and that each has the placeholder ``{c}``."""
    if not templates:
        raise UserError(f"{source}: no prompt template; give at least {PLACEHOLDER!r}")
    for template in templates:
        if PLACEHOLDER not in template and CANONICAL_PLACEHOLDER not in template:
            hint = "; write {c} instead of {}" if "{}" in template else ""
            raise UserError(
                f"{source}: template {template!r} lacks the placeholder {PLACEHOLDER} for the class name{hint}"
            )


def fill_template(template: str, name: str) -> str:
    """Returns the template with the class name for ``{c}``, and its `canonical_name` for ``{c:canonical}``."""
    # Not str.format: class names such as "set {a, b}" and templates with other braces are valid.
    if CANONICAL_PLACEHOLDER in template:
        template = template.replace(CANONICAL_PLACEHOLDER, canonical_name(name))
    return template.replace(PLACEHOLDER, name)
