"""The webdataset tars that img2dataset writes: images with captions and metadata."""

import collections
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from lit_het.data_pipelines.prepare.dataset import DataSet, Sample, Split, fingerprint, one_line
from lit_het.data_pipelines.shards.index import ShardIndex
from lit_het.data_pipelines.shards.storage import Unreadable, content_or_raise
from lit_het.data_pipelines.shards.writing import IMAGE, expand
from lit_het.errors import UserError


def read_img2dataset(source: Path, split: str | None = None) -> DataSet:
    """Opens the tars of a folder or a pattern; excludes samples without image or caption, whose download failed.

    Args:
        source: a folder of tars, a tar, or a pattern.
        split: the name of the split; None means ``train``.
    """
    addresses = expand(source)
    index = ShardIndex(addresses, [IMAGE, "txt"], ["json"])
    faults = [fault for summary in index.summaries for fault in summary.faults]
    if damaged := [fault for fault in faults if not fault.is_missing_member]:
        raise UserError(damaged[0].example)
    sizes = {kind: index.sizes(kind) for kind in (IMAGE, "txt", "json")}
    numbers = np.flatnonzero((sizes[IMAGE] > 0) & (sizes["txt"] > 0))
    left_out = collections.Counter({"empty image or caption": len(index) - len(numbers)})
    for fault in faults:
        left_out[fault.cause] += fault.count
    if not len(numbers):
        first = f"; {faults[0].example}" if faults else ""
        raise UserError(f"{source}: none of {left_out.total()} samples has both image and caption (.txt){first}")

    def read(chosen: Sequence[int]) -> Iterator[Sample]:
        for number in numbers[np.asarray(chosen)].tolist():
            kinds = ["txt", "json"] if sizes["json"][number] >= 0 else ["txt"]
            origin = f"{index.shard(number)}: key {index.key(number)}"
            try:
                image, *others = map(content_or_raise, index.read([number], [IMAGE, *kinds])[0])
            except Unreadable as error:
                raise UserError(f"{origin}: {error}; remove it from the shard, or write the shard again") from error
            members = dict(zip(kinds, others, strict=True))
            yield Sample(image, origin, {**members, "txt": one_line(members["txt"])})

    part = Split(
        num_samples=len(numbers),
        read=read,
        fingerprint=fingerprint([index.digest, numbers.tobytes()]),
        left_out=dict(left_out),
    )
    return DataSet({split or "train": part})
