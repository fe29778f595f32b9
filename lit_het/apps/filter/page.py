"""The page of samples that break rules: counts, and some samples of each rule."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from lit_het.apps.filter.rules import Broken, Rule
from lit_het.data_pipelines.images.decoding import decode_whole
from lit_het.data_pipelines.images.headers import BrokenImage
from lit_het.data_pipelines.shards.index import ShardIndex
from lit_het.data_pipelines.shards.storage import Unreadable, content_or_raise
from lit_het.data_pipelines.shards.writing import IMAGE
from lit_het.errors import pluralize
from lit_het.eval.report.grids import Mark, answer_card
from lit_het.eval.report.page import Html, Section, heading, joined, render_page
from lit_het.eval.report.tables import Table, plain_table
from lit_het.files import write_atomically


def counts_table(rules: Sequence[Rule], broken: Sequence[Broken], count: int) -> Table:
    """Returns how many of so many samples break each rule, how many of them no other, and all rules together."""
    each = Counter(name for one in broken for name in one.values)
    alone = Counter(name for one in broken if len(one.values) == 1 for name in one.values)
    numbers = [(rule.text, each[rule.name], alone[rule.name]) for rule in rules]
    numbers.append(("all rules", len(broken), alone.total()))
    rows = [(text, f"{some:,}", f"{only:,}", f"{some / count:.2%}") for text, some, only in numbers]
    return plain_table(f"{count:,} samples", ("left out", "by no other rule", "share left out"), rows)


def write_page(path: Path, index: ShardIndex, rules: Sequence[Rule], broken: Sequence[Broken], shown: int) -> None:
    """Writes the page.

    Args:
        path: of the page.
        index: of the samples.
        rules: all of them.
        broken: samples that break some, in order.
        shown: at most so many of each rule.
    """
    images = ShardIndex([summary.address for summary in index.summaries], optional=[IMAGE])
    body = list[Html]()
    for rule in rules:
        if some := [one for one in broken if rule.name in one.values]:
            body += _samples(images, rule, some, shown)
    note = f"Up to {shown} of each rule, evenly spread from the lowest to the highest value by which they break it."
    sections = [Section("Counts", (counts_table(rules, broken, len(index)).html(),))]
    sections += [Section("Samples", tuple(body), note)] if body else []
    verdict = f"{len(broken):,} of {pluralize(len(index), 'sample')} are left out"
    write_atomically(path, render_page("Filtered samples", sections, verdict))


def _samples(images: ShardIndex, rule: Rule, broken: Sequence[Broken], shown: int) -> list[Html]:
    # By value, so that those near the limit and far from it are both seen.
    order = sorted(broken, key=lambda one: _sortable(one.values[rule.name]))
    places = np.unique(np.linspace(0, len(order) - 1, shown).round().astype(int))
    cards = [_card(images, order[place]) for place in places.tolist()]
    title = f"{rule.name} ({rule.text}): {len(places)} of {pluralize(len(order), 'sample')}"
    return [heading(title), Html(f'<div class="cards">{joined(cards)}</div>')]


def _sortable(value: str | float) -> tuple[str, float]:
    return (value, 0.0) if isinstance(value, str) else ("", value)


def _card(images: ShardIndex, one: Broken) -> Html:
    lines = [
        f"{name} {value}" if isinstance(value, str) else f"{name} {value:.4g}" for name, value in one.values.items()
    ]
    return answer_card(_image(images, one.number), one.caption or "no caption", lines, [Mark.WRONG] * len(lines))


def _image(images: ShardIndex, number: int) -> UInt8[np.ndarray, "h w 3"]:
    ((content,),) = images.read([number], [IMAGE])
    try:
        return decode_whole(content_or_raise(content))
    except (BrokenImage, Unreadable):
        return np.full((8, 8, 3), 255, np.uint8)
