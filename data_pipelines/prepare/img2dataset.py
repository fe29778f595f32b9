"""The webdataset tars that img2dataset writes: pictures with captions, and what was known of them."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from data_pipelines.prepare.dataset import DataSet, Sample, Split, fingerprint
from data_pipelines.shards import IMAGE, ShardIndex, expand
from lit_het.errors import UserError


def read_img2dataset(source: Path, split: str | None = None) -> DataSet:
    """Opens the tars of a folder or a pattern; samples without picture or caption, whose download failed, stay out.

    Args:
        source: a folder of tars, a tar, or a pattern.
        split: what to call them; None means ``train``.

    Raises:
        UserError: a tar is truncated or repeats a key, or no sample is whole.
    """
    paths = expand(source)
    index = ShardIndex(paths)
    has_picture, has_caption = index.sizes(IMAGE) > 0, index.sizes("txt") > 0
    numbers = np.flatnonzero(has_picture & has_caption)
    if not len(numbers):
        raise UserError(f"{source}: none of {len(index)} samples has both picture and caption (.txt)")
    has_metadata = index.sizes("json") > 0

    def read(chosen: Sequence[int]) -> Iterator[Sample]:
        for number in numbers[np.asarray(chosen)].tolist():
            members = {"txt": index.read(number, "txt")}
            if has_metadata[number]:
                members["json"] = index.read(number, "json")
            origin = f"{index.shard(number)}: key {index.key(number)}"
            yield Sample(index.read(number, IMAGE), origin, members)

    part = Split(
        num_samples=len(numbers),
        read=read,
        fingerprint=fingerprint([*(f"{path.name}:{path.stat().st_size}" for path in paths), numbers.tobytes()]),
        left_out={
            "without picture": int((~has_picture).sum()),
            "without caption": int((has_picture & ~has_caption).sum()),
        },
    )
    return DataSet({split or "train": part})
