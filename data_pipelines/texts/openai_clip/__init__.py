"""OpenAI's names of ImageNet's classes and CLIP's prompt templates, from openai/CLIP under the MIT licence beside them.

Copied from ``notebooks/Prompt_Engineering_for_ImageNet.ipynb`` at commit d05afc4, with ``{c}`` in place of ``{}``.
"""

import functools
from pathlib import Path

from lit_het.data_pipelines.shards.storage import read_lines

_FOLDER = Path(__file__).parent


@functools.cache
def imagenet_names() -> tuple[str, ...]:
    """Returns the 1,000 class names that OpenAI edited, in the usual order of labels (of the WNIDs)."""
    return read_lines(str(_FOLDER / "imagenet_names.txt"))


@functools.cache
def imagenet_templates() -> tuple[str, ...]:
    """Returns the 80 prompt templates of CLIP (Radford et al. 2021, Sec. 3.1.4), with ``{c}`` for the class name."""
    return read_lines(str(_FOLDER / "imagenet_templates.txt"))


@functools.cache
def best_imagenet_templates() -> tuple[str, ...]:
    """Returns the 7 of the 80 templates that forward selection chose, in the order of its choices."""
    return read_lines(str(_FOLDER / "imagenet_best_templates.txt"))
