"""Groups of similar samples at every threshold, from few of their pairs.

Samples are of one group where a chain of pairs that reach the threshold joins them (single linkage). A maximum spanning
forest of the pairs has the same groups at every threshold (Gower and Ross 1969, "Minimum spanning trees and single
linkage cluster analysis"), the greatest similarity of every sample, and fewer pairs than samples. The forest of some
forests is that of all their pairs, so that it is made part by part.
"""

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, connected_components, minimum_spanning_tree

from lit_het.apps.dedup.search import Pairs
from lit_het.errors import UserError
from lit_het.files import write_safetensors

# So many pairs, and as many as the forest has, are collected before the next one is made.
_PAIRS = 2**22


class Found(NamedTuple):
    """What a search found.

    Attributes:
        forest: pairs of samples to train on, a maximum spanning forest of all that reach the floor.
        test: of each sample that has one, the pair with the most similar sample of the evaluation sets.
    """

    forest: Pairs
    test: Pairs

    @staticmethod
    def of(parts: Iterable[Pairs], num_train: int) -> "Found":
        """Returns what was found, from pairs of samples, of which the first ``num_train`` are those to train on."""
        waiting, size, found = list[Pairs](), 0, Found(Pairs.joined([]), Pairs.joined([]))
        for part in parts:
            waiting.append(part)
            size += len(part.first)
            if size > max(_PAIRS, len(found.forest.first)):
                found, waiting, size = found.and_pairs(Pairs.joined(waiting), num_train), [], 0
        return found.and_pairs(Pairs.joined(waiting), num_train)

    def and_pairs(self, pairs: Pairs, num_train: int) -> "Found":
        """Returns what was found here and among other pairs."""
        is_test = pairs.second >= num_train
        within = Pairs.joined([self.forest, pairs.where(~is_test)])
        return Found(_forest(within), _nearest(Pairs.joined([self.test, pairs.where(is_test)])))

    def save(self, path: Path) -> None:
        """Writes the pairs."""
        arrays = {
            f"{name}/{field}": array
            for name, pairs in self._asdict().items()
            for field, array in pairs._asdict().items()
        }
        write_safetensors(path, arrays, {})

    @staticmethod
    def load(path: Path) -> "Found":
        """Reads the pairs."""
        import safetensors.numpy

        try:
            arrays = safetensors.numpy.load_file(path)
            return Found(*(Pairs(*(arrays[f"{name}/{field}"] for field in Pairs._fields)) for name in Found._fields))
        except (OSError, KeyError, ValueError, safetensors.SafetensorError) as error:
            raise UserError(f"{path} cannot be read ({error}); remove it and run the same command again") from error

    @staticmethod
    def joined(parts: Iterable["Found"], num_train: int) -> "Found":
        """Returns what all parts found, read one after the other."""
        return Found.of(itertools.chain.from_iterable(parts), num_train)

    def nearest(self) -> Float[np.ndarray, " n"]:
        """Returns the greatest similarity of each sample that reaches the floor, to another one to train on."""
        # The most similar pair of a sample is in every maximum spanning forest.
        pairs, numbers, places = _numbered(self.forest)
        greatest = np.zeros(len(numbers), np.float32)
        for place in places:
            np.maximum.at(greatest, place, pairs.similarity)
        return greatest


class LeftOut(NamedTuple):
    """Samples to leave out of training.

    Attributes:
        sample: their numbers, ascending.
        twin: the similar sample by which each is left out: for a duplicate, the next one on the way to the sample that
            is kept in its place.
        similarity: to the twin.
        is_test: whether the twin is of an evaluation set.
        largest: number of samples in the largest group.
    """

    sample: Int[np.ndarray, " n"]
    twin: Int[np.ndarray, " n"]
    similarity: Float[np.ndarray, " n"]
    is_test: Bool[np.ndarray, " n"]
    largest: int


def left_out(found: Found, threshold: float) -> LeftOut:
    """Returns the samples that are similar to one of an evaluation set, and of each group all others but the first."""
    test = found.test.where(found.test.similarity >= threshold)
    forest, numbers, (first, second) = _numbered(found.forest.where(found.forest.similarity >= threshold))
    count = len(numbers)
    group = connected_components(csr_array((forest.similarity, (first, second)), shape=(count, count)), directed=False)[
        1
    ]
    is_test = np.isin(numbers, test.first)
    others = np.flatnonzero(~is_test)
    kept = others[np.unique(group[others], return_index=True)[1]]
    # From one more node before all that are kept, the predecessors lead to these.
    ends = np.concatenate([first, np.full(len(kept), count)]), np.concatenate([second, kept])
    weights = np.concatenate([forest.similarity, np.ones(len(kept), np.float32)])
    graph = csr_array((weights, ends), shape=(count + 1, count + 1))
    graph = (graph + graph.T).tocsr()
    before = breadth_first_order(graph, count, directed=False)[1]
    copies = np.setdiff1d(others[np.isin(group[others], group[kept])], kept)
    twins = before[copies]
    parts = (
        (test.first, numbers[copies]),
        (test.second, numbers[twins]),
        (test.similarity, np.asarray(graph[copies, twins]).ravel()),
        (np.ones(len(test.first), bool), np.zeros(len(copies), bool)),
    )
    columns = [np.concatenate(part) for part in parts]
    order = np.argsort(columns[0])
    return LeftOut(*(column[order] for column in columns), largest=int(np.bincount(group).max(initial=0)))


def _forest(pairs: Pairs) -> Pairs:
    """Returns a maximum spanning forest."""
    pairs, numbers, places = _numbered(pairs)
    # SciPy finds the least, and takes zeros for no edge. In float64 the difference is exact.
    distances = csr_array((2 - pairs.similarity.astype(np.float64), places), shape=(len(numbers), len(numbers)))
    tree = minimum_spanning_tree(distances).tocoo()
    first, second = np.sort(numbers[np.stack(tree.coords)], axis=0)
    found = Pairs(first, second, (2 - tree.data).astype(np.float32))
    return found.where(np.lexsort((found.second, found.first)))


def _nearest(pairs: Pairs) -> Pairs:
    """Returns of each first sample the most similar pair; of equal ones that with the smallest second number."""
    pairs = pairs.where(np.lexsort((pairs.second, -pairs.similarity, pairs.first)))
    return pairs.where(np.unique(pairs.first, return_index=True)[1])


def _numbered(pairs: Pairs) -> tuple[Pairs, Int[np.ndarray, " n"], Int[np.ndarray, "2 p"]]:
    """Returns the pairs, the numbers of their samples, and the places of firsts and seconds among these."""
    numbers, places = np.unique(np.stack([pairs.first, pairs.second]), return_inverse=True)
    return pairs, numbers, places.reshape(2, -1)
