"""Image-text pairs in memory: features of a locked tower with captions, and the noise that is injected into these."""

import dataclasses
import itertools
import json
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Int

from lit_het.console import Bar
from lit_het.data_pipelines.images.transforms import Preprocessing
from lit_het.data_pipelines.shards import writing
from lit_het.errors import UserError
from lit_het.eval.answers import features_of
from lit_het.types import ImageFeatures

_BLOCK = 1024


@dataclasses.dataclass(frozen=True)
class PairSet:
    """Pairs of images and captions.

    Attributes:
        features: of the image tower.
        captions: indices of the captions in ``names``.
        names: all different captions.
        columns: further values of every pair, such as the typeface of a character.
    """

    features: Float[np.ndarray, "n f"]
    captions: Int[np.ndarray, " n"]
    names: tuple[str, ...]
    columns: Mapping[str, tuple[str, ...]]

    def take(self, rows: np.ndarray) -> "PairSet":
        """Returns the pairs of some rows."""
        index = np.flatnonzero(rows) if rows.dtype == bool else rows
        columns = {name: tuple(values[i] for i in index) for name, values in self.columns.items()}
        return PairSet(self.features[index], self.captions[index], self.names, columns)

    def column(self, name: str) -> np.ndarray:
        """Returns a column as an array of strings."""
        if name not in self.columns:
            raise UserError(f"the shards have no column {name!r}; their JSON has {', '.join(self.columns) or 'none'}")
        return np.array(self.columns[name])


def read_pairs(
    patterns: Sequence[str], tower: ImageFeatures, preprocessing: Preprocessing, image_size: int, cache: Path
) -> PairSet:
    """Reads all pairs of shards and computes the features of their images; they are cached in a file.

    Args:
        patterns: folders or patterns of tar files with images, captions (``txt``) and optional columns (``json``).
        tower: the image tower.
        preprocessing: of the images.
        image_size: pixels along each side.
        cache: the ``.npz`` file.
    """
    if not cache.exists():
        found: tuple[list[np.ndarray], list[str], list[dict[str, str]]] = ([], [], [])
        addresses = writing.expand(patterns)
        with Bar(f"embedding for {cache.name}", len(addresses), "shards") as bar:
            for address in addresses:
                samples = list(samples_of(address))
                for start in range(0, len(samples), _BLOCK):
                    block = samples[start : start + _BLOCK]
                    images = [preprocessing.apply(sample["image"], image_size) for sample in block]
                    found[0].extend(features_of(tower, images, len(images)))
                if any("txt" not in sample or "image" not in sample for sample in samples):
                    raise UserError(f"{address}: a sample has no image or no caption in .txt; leave it out")
                found[1].extend(sample["txt"].decode().strip() for sample in samples)
                found[2].extend(json.loads(sample.get("json", b"{}")) for sample in samples)
                bar.advance(1)
        cache.parent.mkdir(parents=True, exist_ok=True)
        partial = cache.with_suffix(".partial.npz")
        np.savez(partial, features=np.stack(found[0]), captions=found[1], columns=json.dumps(found[2]))
        partial.rename(cache)
    with np.load(cache) as stored:
        names, captions = np.unique(stored["captions"], return_inverse=True)
        rows = json.loads(str(stored["columns"]))
        # Only fields that all samples have are columns.
        shared = set.intersection(*map(set, rows)) if rows else set()
        columns = {name: tuple(str(row[name]) for row in rows) for name in sorted(shared)}
        return PairSet(stored["features"], captions, tuple(names.tolist()), columns)


def samples_of(address: str) -> Iterator[dict[str, bytes]]:
    """Yields the members of every sample of a shard by extension; the image is under "image"."""
    with tarfile.open(address) as file:
        named = ((parts, member) for member in file if (parts := writing.key_and_extension(member.name)))
        for _, members in itertools.groupby(named, key=lambda one: one[0][0]):
            yield {
                "image" if extension in writing.IMAGE_EXTENSIONS else extension: content.read()
                for (_, extension), member in members
                if (content := file.extractfile(member))
            }


def with_names(pairs: PairSet, names: tuple[str, ...]) -> PairSet:
    """Returns the pairs with indices into other names, which contain all of theirs."""
    place = {name: index for index, name in enumerate(names)}
    index = np.array([place[name] for name in pairs.names])
    return dataclasses.replace(pairs, captions=index[pairs.captions], names=names)


# (pairs, names to draw from, generator) to which pairs may be replaced, and the replacement of every pair.
Noise = Callable[[PairSet, Int[np.ndarray, " k"], np.random.Generator], tuple[np.ndarray, np.ndarray]]


def script(word: str) -> Noise:
    """Replaces names of one script, of which ``word`` is the first word, by random ones."""

    def noise(pairs: PairSet, names: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        in_script = np.array([name.partition(" ")[0] == word for name in pairs.names])
        return in_script[pairs.captions], random.choice(names, len(pairs.captions))

    return noise


def typeface(name: str) -> Noise:
    """Replaces names of one typeface by random ones."""

    def noise(pairs: PairSet, names: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        return pairs.column("typeface") == name, random.choice(names, len(pairs.captions))

    return noise


def uniform(pairs: PairSet, names: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Replaces any name by a random one."""
    return np.ones(len(pairs.captions), bool), random.choice(names, len(pairs.captions))


def confusable(pairs: PairSet, names: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Replaces a name by another with the same words before "with", i.e. the same letter with other marks."""
    stem = np.array([name.partition(" with ")[0] for name in pairs.names])
    members = {one: names[stem[names] == one] for one in np.unique(stem)}
    drawn = np.array([random.choice(members[stem[c]]) if len(members[stem[c]]) else c for c in pairs.captions])
    has_others = np.array([len(members[stem[c]]) > 1 for c in pairs.captions])
    return has_others, drawn


NOISES: Mapping[str, Noise] = {
    "cyrillic": script("cyrillic"),
    "greek": script("greek"),
    "confusable": confusable,
    "typeface": typeface("DejaVuSansMono-Bold"),
    "uniform": uniform,
    "fill": typeface("fill"),
}


def affected(pairs: PairSet, kind: str, names: Int[np.ndarray, " k"]) -> Bool[np.ndarray, " n"]:
    """Returns the pairs whose captions a kind of noise may replace."""
    return NOISES[kind](pairs, names, np.random.default_rng(0))[0]


def inject(
    pairs: PairSet, kind: str, level: float, names: Int[np.ndarray, " k"], seed: int
) -> tuple[PairSet, Bool[np.ndarray, " n"]]:
    """Returns the pairs with replaced captions, and which captions are now wrong; the same for the same seed.

    Args:
        pairs: the pairs.
        kind: a key of `NOISES`.
        level: the fraction of the affected pairs whose caption is replaced.
        names: indices of the names to draw from.
        seed: of the draws.
    """
    random = np.random.default_rng([seed, list(NOISES).index(kind)])
    affected, drawn = NOISES[kind](pairs, names, random)
    if level and not affected.any():
        raise UserError(f"--noise {kind} affects none of the pairs; choose another kind")
    is_replaced = affected & (random.random(len(pairs.captions)) < level)
    captions = np.where(is_replaced, drawn, pairs.captions)
    return dataclasses.replace(pairs, captions=captions), captions != pairs.captions


def wrong_by_column(pairs: PairSet, name: str) -> Bool[np.ndarray, " n"]:
    """Returns which captions a column of the shards calls wrong."""
    found = np.char.lower(pairs.column(name).astype(str))
    known = {"0": False, "1": True, "false": False, "true": True}
    if unknown := sorted(set(found.tolist()) - set(known)):
        raise UserError(f"column {name!r} of the shards contains {unknown[0]!r}; it must be 0 or 1 in every sample")
    wrong = np.array([known[value] for value in found.tolist()])
    if wrong.all() or not wrong.any():
        raise UserError(f"column {name!r} of the shards is {found[0]} everywhere; 1 must mark the wrong captions")
    return wrong
