"""Writes docs/api.md from the docstrings of the public names, for the site that docs/conf.py builds."""

import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lit_het
from lit_het.heads import (
    bayes_vlm,
    contrastive,
    covariance,
    deterministic,
    gaussian,
    het,
    het_h,
    het_xl,
    mc_dropout,
    prob_vlm,
    temperature,
)
from lit_het.losses.classification_config import SigmoidCrossEntropy, SoftmaxCrossEntropy
from lit_het.losses.contrastive import SigmoidLoss, SoftmaxLoss

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
WIDTH = 120
INTRODUCTION = """\
# Python API

`import lit_het` loads no JAX: each name is imported when it is used. [using.md](using.md#in-python) has examples. Every
mistake that a user can fix is a `lit_het.UserError`, whose message is one line. `b`, `d`, `k` and the other letters of
shapes are explained in `lit_het/types.py`. This page is written from the docstrings.
"""
SECTIONS: dict[str, tuple[Any, ...]] = {
    "Models": (lit_het.load, lit_het.ImportOptions, lit_het.Model),
    "Predictions": (lit_het.Classification, lit_het.Classifications),
    "Commands": (lit_het.train, lit_het.evaluate, lit_het.embed),
    "Heads": (
        deterministic.DeterministicConfig,
        het.HetConfig,
        het_h.HetHConfig,
        het_xl.HetXLConfig,
        het_xl.HetXLClassifier,
        contrastive.DeterministicContrastiveConfig,
        contrastive.HetXLContrastiveConfig,
        contrastive.HetXLContrastive,
        gaussian.GaussianContrastiveConfig,
        prob_vlm.ProbVLMContrastiveConfig,
        bayes_vlm.BayesVLMContrastiveConfig,
        mc_dropout.McDropoutContrastiveConfig,
        covariance.CovarianceConfig,
        temperature.FixedTemperature,
        temperature.LogTemperature,
        temperature.BoundedTemperature,
    ),
    "Losses": (SoftmaxCrossEntropy, SigmoidCrossEntropy, SoftmaxLoss, SigmoidLoss),
}
_PART = re.compile(r"^(Args|Attributes|Returns|Raises):\n", re.MULTILINE)
# Parts whose entries are names.
_NAMED = ("Args", "Attributes", "Raises")


def page() -> str:
    """Returns the text of docs/api.md."""
    blocks = [INTRODUCTION.rstrip()]
    for title, documented in SECTIONS.items():
        blocks.append(f"## {title}")
        for one in documented:
            blocks += _class(one) if inspect.isclass(one) else _function(one, _name(one), "###")
    return "\n\n".join(blocks) + "\n"


def _name(one: Any) -> str:
    return f"lit_het.{one.__name__}" if one.__name__ in lit_het.__all__ else f"{one.__module__}.{one.__name__}"


def _class(one: type) -> Iterator[str]:
    yield f"### `{_name(one)}`"
    yield from _described(one)
    for name, member in vars(one).items():
        if name.startswith("_"):
            continue
        if inspect.isfunction(member):
            yield from _function(member, f"{one.__name__}.{name}", "####")
        elif isinstance(member, property):
            yield f"#### `{one.__name__}.{name}`"
            yield from _described(member)


def _function(function: Any, name: str, level: str) -> Iterator[str]:
    """Yields the heading with the arguments, which are described below: annotations are left out."""
    bare = inspect.Signature(
        [
            parameter.replace(annotation=inspect.Parameter.empty)
            for parameter in inspect.signature(function).parameters.values()
            if parameter.name != "self"
        ]
    )
    yield f"{level} `{name}{bare}`"
    yield from _described(function)


def _described(one: Any) -> Iterator[str]:
    """Yields the paragraphs of a docstring, and its parts as lists."""
    text, *parts = _PART.split(inspect.getdoc(one) or "")
    yield from map(_wrapped, text.strip().split("\n\n"))
    for title, content in zip(parts[::2], parts[1::2], strict=True):
        content, *rest = textwrap.dedent(content).strip().split("\n\n")
        if title in _NAMED:
            entries = (_entry(entry) for entry in re.split(r"\n(?=\S)", content))
            yield f"**{title}**\n\n" + "\n".join(entries)
        else:
            yield _wrapped(f"**{title}** {content}")
        yield from map(_wrapped, rest)


def _entry(text: str) -> str:
    name, _, meaning = text.partition(":")
    return _wrapped(f"- `{name}`: {meaning}", "  ")


def _wrapped(text: str, indent: str = "") -> str:
    joined = " ".join(text.split())
    return textwrap.fill(joined, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def write_page() -> None:
    """Writes the page."""
    PAGE.write_text(page(), "utf-8")
