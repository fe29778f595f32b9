"""The page of near-duplicates: what each threshold would leave out, and pairs of images at several similarities."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from lit_het.apps.dedup.options import DedupOptions
from lit_het.apps.dedup.pairs import Found, left_out
from lit_het.apps.dedup.search import Pairs
from lit_het.data_pipelines.images.decoding import decode_whole
from lit_het.data_pipelines.shards.index import ShardIndex
from lit_het.data_pipelines.shards.storage import Unreadable, content_or_raise
from lit_het.data_pipelines.shards.writing import IMAGE
from lit_het.errors import pluralize
from lit_het.eval.report import figures
from lit_het.eval.report.grids import pair_card
from lit_het.eval.report.page import Html, Section, facts, heading, joined, render_page
from lit_het.eval.report.tables import plain_table
from lit_het.files import write_atomically

# Levels of similarity below and above the threshold, and pairs that are shown of each.
_BELOW, _ABOVE, _SHOWN = 3, 4, 6


def write_page(path: Path, index: ShardIndex, num_train: int, found: Found, options: DedupOptions) -> None:
    """Writes the page.

    Args:
        path: of the page.
        index: of the samples to train on, and then those of the evaluation sets.
        num_train: how many are to be trained on.
        found: by the search.
        options: of the search.
    """
    levels = _levels(options.floor, options.threshold)
    chosen = left_out(found, options.threshold)
    share = f"{pluralize(len(chosen.sample), 'sample')} of {num_train:,} ({len(chosen.sample) / num_train:.1%})"
    sections = [_thresholds(found, num_train, levels, options.threshold)]
    for title, pairs in (("Pairs within the shards", found.forest), ("Pairs with evaluation sets", found.test)):
        if len(pairs.first):
            sections.append(_pairs(title, index, pairs, levels, options.threshold))
    shown = {
        "threshold": f"{options.threshold:g}",
        "searched from": f"{options.floor:g}",
        "samples": f"{num_train:,}",
        "of evaluation sets": f"{len(index) - num_train:,}",
        "embeddings": options.embeddings,
    }
    verdict = f"At {options.threshold:g}, {share} are near-duplicates"
    write_atomically(path, render_page("Near-duplicates", sections, verdict, facts(shown)))


def _levels(floor: float, threshold: float) -> list[float]:
    """Returns the limits of levels of similarity, from the floor over the threshold to above all similarities."""
    levels = [*np.linspace(floor, threshold, _BELOW + 1), *np.linspace(threshold, 1, _ABOVE + 1)[:-1], threshold]
    return [*sorted({float(level) for level in levels}), 1.01]


def _thresholds(found: Found, num_train: int, levels: Sequence[float], threshold: float) -> Section:
    rows = []
    for level in levels[:-1]:
        chosen = left_out(found, level)
        tests, count = int(chosen.is_test.sum()), len(chosen.sample)
        mark = " (chosen)" if level == threshold else ""
        figures_of_level = (count - tests, tests, chosen.largest)
        rows.append((f"{level:.3f}{mark}", *(f"{figure:,}" for figure in figures_of_level), f"{count / num_train:.2%}"))
    columns = ("left out as duplicates", "left out as test", "samples in the largest group", "share left out")
    values = {"within the shards": found.nearest(), "with evaluation sets": found.test.similarity}
    values = {name: some for name, some in values.items() if len(some)}
    body = [plain_table("", columns, rows).html()]
    if values:
        caption = f"Samples whose nearest neighbour is less similar than {levels[0]:g} are not shown."
        body.append(figures.distribution("Nearest neighbours", values, "cosine similarity", caption))
    note = (
        "What each threshold leaves out. Samples are of one group where a chain of similar pairs joins them: a largest "
        "group that grows suddenly says that the threshold is too low."
    )
    return Section("Thresholds", tuple(body), note)


def _pairs(title: str, index: ShardIndex, pairs: Pairs, levels: Sequence[float], threshold: float) -> Section:
    body, order = list[Html](), np.argsort(pairs.similarity, kind="stable")
    similarity = pairs.similarity[order]
    for low, high in zip(levels[::-1][1:], levels[::-1], strict=False):
        level = order[slice(*np.searchsorted(similarity, [low, high]))]
        if not len(level):
            continue
        what = "left out" if low >= threshold else "kept"
        body.append(heading(f"{low:.3f} to {min(high, 1):.3f}: {pluralize(len(level), 'pair')}, {what}"))
        places = level[np.unique(np.linspace(0, len(level) - 1, _SHOWN).round().astype(int))]
        cards = (_card(index, *(field[place].item() for field in pairs)) for place in places)
        body.append(Html(f'<div class="cards">{joined(cards)}</div>'))
    note = (
        f"Up to {_SHOWN} pairs of each level, evenly spread from the least similar on. The right threshold is where "
        "pairs begin to show one picture."
    )
    return Section(title, tuple(body), note)


def _card(index: ShardIndex, first: int, second: int, similarity: float) -> Html:
    names = [f"{index.shard(number).rpartition('/')[2]}: {index.key(number)}" for number in (first, second)]
    return pair_card([_image(index, first), _image(index, second)], f"{similarity:.4f}", names)


def _image(index: ShardIndex, number: int) -> UInt8[np.ndarray, "h w 3"]:
    ((content,),) = index.read([number], [IMAGE])
    try:
        return decode_whole(content_or_raise(content))
    except Unreadable:
        return np.full((8, 8, 3), 255, np.uint8)  # it could be read when it was embedded
