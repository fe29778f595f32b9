"""Measures which planted near-duplicates `lit-het data dedup` finds with a tower at which threshold.

    python -m scripts.studies.study_duplicates RUN SHARDS --output runs/duplicates [--count 2000]

Evenly spread images of the shards are the originals, and every second one has a changed copy: at half its size, as a
JPEG of quality 30, or without a twentieth at each edge, in turn. All are embedded by the tower of the run and searched.
Recall is the share of the copies that are left out, precision that of what is left out whose twin is of the same
original. Shards that hold near-duplicates themselves have a lower precision than the search.
"""

import argparse
import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lit_het.apps.dedup.deduplication import TABLE, dedup
from lit_het.apps.dedup.options import DedupOptions
from lit_het.apps.embed.images import EmbedOptions, embed
from lit_het.configs.parsing import parse_tower
from lit_het.data_pipelines.images.decoding import decode_whole
from lit_het.data_pipelines.shards.index import ShardIndex
from lit_het.data_pipelines.shards.storage import content_or_raise
from lit_het.data_pipelines.shards.writing import IMAGE, expand, write_shards
from lit_het.eval.report.tables import markdown_table

THRESHOLDS = (0.8, 0.85, 0.9, 0.92, 0.94, 0.95, 0.96, 0.97, 0.98, 0.99)


def _encoded(image: Image.Image, quality: int = 95) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=quality)
    return stream.getvalue()


def _rescaled(image: Image.Image) -> bytes:
    return _encoded(image.resize((max(1, image.width // 2), max(1, image.height // 2)), Image.Resampling.BICUBIC))


def _recompressed(image: Image.Image) -> bytes:
    return _encoded(image, quality=30)


def _cropped(image: Image.Image) -> bytes:
    left, top = image.width // 20, image.height // 20
    return _encoded(image.crop((left, top, image.width - left, image.height - top)))


CHANGES: Mapping[str, Callable[[Image.Image], bytes]] = {
    "rescaled": _rescaled,
    "recompressed": _recompressed,
    "cropped": _cropped,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints recall and precision at every threshold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="whose image tower embeds")
    parser.add_argument("shards", metavar="SHARDS", help="of the originals")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--count", type=int, default=2000, help="of originals")
    options = parser.parse_args(arguments)
    shards, embeddings = str(options.output / "data"), str(options.output / "embeddings")
    if not Path(shards).exists():
        write_shards(Path(shards), planted(options.shards, options.count))
    embed(options.run, parse_tower(options.run), embeddings, EmbedOptions((shards,), "float32"))
    copies = -(-options.count // 2)
    counts = [len(range(number, copies, len(CHANGES))) for number in range(len(CHANGES))]
    rows = []
    for threshold in THRESHOLDS:
        how = DedupOptions(embeddings, (), threshold, THRESHOLDS[0])
        dedup([shards], options.output / "out", how)
        with (options.output / "out" / TABLE).open(newline="") as file:
            rows.append([f"{threshold:g}", *measured(list(csv.DictReader(file)), counts)])
    print(markdown_table(("threshold", *CHANGES, "precision", "left out"), rows, "---:"))


def planted(shards: str, count: int) -> Iterator[dict[str, Any]]:
    """Yields the originals, and then the changed copies, whose keys end in the number of their original."""
    index = ShardIndex(expand(shards), [IMAGE])
    chosen = np.linspace(0, len(index) - 1, count).round().astype(int).tolist()
    images = [
        Image.fromarray(decode_whole(content_or_raise(content)))
        for number in chosen
        for (content,) in index.read([number], [IMAGE])
    ]
    for number, image in enumerate(images):
        yield {"__key__": f"original-{number}", "jpg": _encoded(image)}
    for number, image in enumerate(images[::2]):
        name = [*CHANGES][number % len(CHANGES)]
        yield {"__key__": f"{name}-{2 * number}", "jpg": CHANGES[name](image)}


def measured(rows: Sequence[Mapping[str, str]], counts: Sequence[int]) -> list[str]:
    """Returns the recall of each change, by the rows of a table, the precision, and the number of rows."""
    keys = [row["key"].split("-") for row in rows]
    recalls = [sum(kind == name for kind, _ in keys) / count for name, count in zip(CHANGES, counts, strict=True)]
    right = sum(number == row["twin_key"].split("-")[1] for (_, number), row in zip(keys, rows, strict=True))
    return [*(f"{share:.3f}" for share in (*recalls, right / max(1, len(rows)))), f"{len(rows):,}"]


if __name__ == "__main__":
    main()
