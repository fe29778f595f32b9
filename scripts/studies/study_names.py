"""Compares ways to calibrate predictions among names that training has seen and names that it has not, over seeds.

    python -m scripts.studies.study_names --output runs/names --seeds 0 1 2
    python -m scripts.studies.study_names --data icons --fonts DIR --steps 500 --output runs/names_icons
    python -m scripts.studies.study_names --data emoji --fonts DIR --steps 500 --output runs/names_emoji
    python -m scripts.studies.study_names --noise cyrillic --level 0.4 --members 3 --output runs/names_noisy

One in ten training names is left out of training. Ways are fitted on images of the validation style of the names that
stay, and on images of those that are left out, both with the same weight; all names are candidates. They are compared
on the held-out style of the names that stay, and on held-out names. With ``--members`` a head is also measured as the
mean of runs from other initial parameters, as ``task.text_members`` trains them in one.
"""

import argparse
import dataclasses
import functools
import itertools
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float, Int
from scipy import optimize, special

from lit_het.console import Bar
from lit_het.eval.metrics.scores import figures as figures_of
from lit_het.eval.predictions import Predictions
from lit_het.eval.report.tables import markdown_table
from lit_het.heads.temperature_config import LogTemperature
from lit_het.tasks.two_towers import ContrastiveTask
from scripts.studies import harness, study_noise
from scripts.studies.noise import pairs as noise
from scripts.studies.noise.pairs import PairSet
from scripts.studies.noise.sources import Data
from scripts.studies.noise.training import Trained, train

HEADS = ("DET", "smoothing 0.1", "S16", "S16 smoothing 0.1", "pairwise_probit")
OTHERS = ("PCME++", "sigmoid Gaussian", "sigmoid DET", "probit smoothing 0.1", "S16 smoothing 0.2", "smoothing 0.2")
# What the summary shows: for known names what serves them, for new ones what serves those.
SUMMARY = (
    *("T of images/known/top1", "T of images/known/nll", "T of images/known/ece"),
    *("T of names/new/top1", "T of names/new/nll", "T of names/new/ece", "best T/new/nll"),
    *("raw/harmonic", "offset/harmonic", "offset/known/ece", "offset/new/ece", "ausuc", "seconds"),
)
MOST = 1000  # images of each set that ways are fitted on


@dataclasses.dataclass(frozen=True)
class Names:
    """What is known of the candidates.

    Attributes:
        seen: whether training had the name.
        nearest: the highest cosine of its embedding and that of another name of training.
        density: the mean of the ten highest cosines.
        grams: share of its runs of two words that names of training have.
        noise: logarithm of the norm of its noise, less the mean over names; zeros without noise of texts.
        spread: how far members of the text tower are apart, ``1 - |mean of their unit embeddings|``, less the mean over
            names; zeros for one.
    """

    seen: Bool[np.ndarray, " k"]
    nearest: Float[np.ndarray, " k"]
    density: Float[np.ndarray, " k"]
    grams: Float[np.ndarray, " k"]
    noise: Float[np.ndarray, " k"]
    spread: Float[np.ndarray, " k"]


# Logits z [n k], what is known of names, and the numbers of a way, to scaled logits.
Form = Callable[[Float[np.ndarray, "n k"], Names, Sequence[float]], Float[np.ndarray, "n k"]]


def _scaled(z: np.ndarray, names: Names, numbers: Sequence[float]) -> np.ndarray:
    return z / np.exp(numbers[0])


def _by_prediction(z: np.ndarray, names: Names, numbers: Sequence[float]) -> np.ndarray:
    """No ranking changes: an image has the temperature of what is most probable."""
    return z / np.exp(np.where(names.seen[z.argmax(axis=1)], *numbers))[:, None]


def _by_mass(z: np.ndarray, names: Names, numbers: Sequence[float]) -> np.ndarray:
    """No ranking changes: log T is linear in the probability that the model gives to seen names."""
    mass = special.softmax(z, axis=1)[:, names.seen].sum(axis=1)
    return z / np.exp(numbers[0] + numbers[1] * mass)[:, None]


def _by_confidence(z: np.ndarray, names: Names, numbers: Sequence[float]) -> np.ndarray:
    """No ranking changes: log T is linear in the log of the highest probability, for each kind of prediction."""
    highest = special.log_softmax(z, axis=1).max(axis=1)
    of_kind = np.where(names.seen[z.argmax(axis=1)], *numbers[:2])
    return z / np.exp(of_kind + numbers[2] * highest)[:, None]


def _offset(z: np.ndarray, names: Names, numbers: Sequence[float]) -> np.ndarray:
    return z / np.exp(numbers[0]) + numbers[1] * names.seen


def _two_scales(z: np.ndarray, names: Names, numbers: Sequence[float]) -> np.ndarray:
    highest = z.max(axis=1, keepdims=True)
    return (z - highest) / np.exp(np.where(names.seen, *numbers[:2])) + numbers[2] * names.seen


def _nearest(z: np.ndarray, names: Names, numbers: Sequence[float]) -> np.ndarray:
    return _offset(z, names, numbers) + numbers[2] * np.where(names.seen, 0.0, names.nearest)


def _density(z: np.ndarray, names: Names, numbers: Sequence[float]) -> np.ndarray:
    return _offset(z, names, numbers) + numbers[2] * np.where(names.seen, 0.0, names.density)


def _noise(z: np.ndarray, names: Names, numbers: Sequence[float]) -> np.ndarray:
    return _offset(z, names, numbers) + numbers[2] * names.noise


def _spread(z: np.ndarray, names: Names, numbers: Sequence[float]) -> np.ndarray:
    return _offset(z, names, numbers) + numbers[2] * names.spread


def _grams(z: np.ndarray, names: Names, numbers: Sequence[float]) -> np.ndarray:
    return _offset(z, names, numbers) + numbers[2] * np.where(names.seen, 0.0, names.grams)


@dataclasses.dataclass(frozen=True)
class Way:
    """A way to calibrate.

    Attributes:
        form: of the logits.
        start: its numbers before they are fitted; none for predictions as they are.
        known, new: weights of the images of seen and of left-out names in the fit.
    """

    form: Form
    start: tuple[float, ...]
    known: float = 1.0
    new: float = 1.0


WAYS: Mapping[str, Way] = {
    "raw": Way(lambda z, names, numbers: z, ()),
    "T of images": Way(_scaled, (0.0,), new=0.0),
    "T of names": Way(_scaled, (0.0,), known=0.0),
    "T of both": Way(_scaled, (0.0,)),
    "T by prediction": Way(_by_prediction, (0.0, 0.0)),
    "T by mass": Way(_by_mass, (0.0, 0.0)),
    "T by prediction and confidence": Way(_by_confidence, (0.0, 0.0, 0.0)),
    "offset": Way(_offset, (0.0, 0.0)),
    "offset, two T": Way(_two_scales, (0.0, 0.0, 0.0)),
    "offset, nearest": Way(_nearest, (0.0, 0.0, 0.0)),
    "offset, density": Way(_density, (0.0, 0.0, 0.0)),
    "offset, noise of texts": Way(_noise, (0.0, 0.0, 0.0)),
    "offset, spread of members": Way(_spread, (0.0, 0.0, 0.0)),
    "offset, pairs of words": Way(_grams, (0.0, 0.0, 0.0)),
}


def fit(way: Way, known: Predictions, new: Predictions, names: Names) -> list[float]:
    """Returns the numbers of a way with the lowest weighted NLL."""

    def loss(numbers: Sequence[float]) -> float:
        parts = ((way.known, known), (way.new, new))
        return sum(weight * nll(scores(way, one, names, numbers), one.labels) for weight, one in parts if weight)

    if not way.start:
        return []
    options = {"xatol": 1e-3, "fatol": 1e-5, "maxiter": 400}
    found = optimize.minimize(loss, way.start, method="Nelder-Mead", options=options)
    return [float(value) for value in found.x]


def scores(way: Way, predictions: Predictions, names: Names, numbers: Sequence[float]) -> Float[np.ndarray, "n k"]:
    """Returns log-probabilities of a way."""
    return special.log_softmax(way.form(predictions.log_probabilities, names, numbers), axis=1)


def nll(log_p: Float[np.ndarray, "n k"], labels: Int[np.ndarray, " n"]) -> float:
    """Returns the mean negative log-likelihood of the labels."""
    return -float(log_p[np.arange(len(labels)), labels].mean())


def figures(predictions: Predictions, log_p: Float[np.ndarray, "n k"]) -> dict[str, float]:
    """Returns top-1, NLL and ECE of other log-probabilities."""
    values, _ = figures_of(dataclasses.replace(predictions, log_probabilities=log_p))
    return {name: values[name] for name in ("top1", "nll", "ece")}


def seen_against_new(known: Predictions, new: Predictions, names: Names) -> float:
    """Returns the area under the curve of both top-1 as the offset moves (AUSUC, Chao et al. 2016)."""
    points = []
    for one in (known, new):
        z = one.log_probabilities.astype(np.float64)
        of_seen, of_new = (np.where(mask, z, -np.inf) for mask in (names.seen, ~names.seen))
        is_seen = names.seen[one.labels]
        right = np.where(is_seen, of_seen.argmax(axis=1), of_new.argmax(axis=1)) == one.labels
        # The offset at which the prediction goes from a new to a seen name.
        turns = of_new.max(axis=1) - of_seen.max(axis=1)
        points.append((turns, right))
    offsets = np.unique(np.concatenate([[-np.inf], *(turns for turns, _ in points), [np.inf]]))
    top_known = [(points[0][1] & (points[0][0] < b)).mean() for b in offsets]
    top_new = [(points[1][1] & (points[1][0] >= b)).mean() for b in offsets]
    return float(abs(np.trapezoid(top_new, top_known)))


def measure(
    members: Sequence[Trained], data: Data, seen: Bool[np.ndarray, " k"], left_out: np.ndarray, ways: Sequence[str]
) -> dict[str, float]:
    """Returns the figures of ways: ``<way>/<set>/<figure>``; members predict together, with their mean probability."""
    names = known_of(members, data, seen)
    candidates = np.arange(len(seen))
    random = np.random.default_rng(0)

    def predicted(pairs: PairSet, most: int | None = None) -> Predictions:
        if most is not None and len(pairs.captions) > most:
            pairs = pairs.take(random.permutation(len(pairs.captions))[:most])
        found = [one.predict(pairs, candidates) for one in members]
        of_members = np.stack([one.log_probabilities for one in found])
        mean = special.logsumexp(of_members, axis=0) - np.log(len(members))
        return dataclasses.replace(found[0], log_probabilities=mean)

    known, new = (
        predicted(pairs, MOST)
        for pairs in (
            data.validation.take(seen[data.validation.captions]),
            data.train.take(np.isin(data.train.captions, left_out)),
        )
    )
    sets = {"known": predicted(data.held_out.take(seen[data.held_out.captions])), "new": predicted(data.unseen)}
    found = {"ausuc": seen_against_new(sets["known"], sets["new"], names)}
    for name in ways:
        way = WAYS[name]
        numbers = fit(way, known, new, names)
        found |= {f"{name}/numbers/{place}": value for place, value in enumerate(numbers)}
        of_sets = {key: figures(one, scores(way, one, names, numbers)) for key, one in sets.items()}
        found |= {f"{name}/{key}/{figure}": value for key, of in of_sets.items() for figure, value in of.items()}
        one, other = of_sets["known"]["top1"], of_sets["new"]["top1"]
        found[f"{name}/harmonic"] = 2 * one * other / (one + other) if one + other else 0.0
    best = fit(Way(_scaled, (0.0,), known=0.0), known, sets["new"], names)
    found["best T/new/nll"] = nll(scores(WAYS["T of names"], sets["new"], names, best), sets["new"].labels)
    return found


def known_of(members: Sequence[Trained], data: Data, seen: Bool[np.ndarray, " k"]) -> Names:
    """Returns what is known of the names; of several members mostly by the first."""
    embeddings = np.asarray(members[0].names)
    cosines = embeddings @ embeddings[seen].T
    cosines[np.flatnonzero(seen), np.arange(seen.sum())] = -1.0  # of itself
    words = [name.split() for name in data.train.names]
    pairs = [set(itertools.pairwise(one)) for one in words]
    of_training = set().union(*(pairs[index] for index in np.flatnonzero(seen)))
    share = np.array([len(one & of_training) / max(1, len(one)) for one in pairs])
    highest = np.sort(cosines, axis=1)[:, -10:]
    of_members = [np.asarray(one.names) for one in members]
    apart = 1 - np.linalg.norm(np.mean(of_members, axis=0), axis=1) if len(members) > 1 else np.zeros(len(seen))
    noise = noise_of_names(members[0])
    return Names(seen, highest[:, -1], highest.mean(axis=1), share, noise, apart - apart.mean())


def noise_of_names(trained: Trained) -> Float[np.ndarray, " k"]:
    """Returns the logarithm of the norm of the noise of every name, less its mean; zeros where there is none."""
    assert isinstance(trained.task, ContrastiveTask)
    assert trained.names is not None
    # Members have several norms, and Gaussian embeddings hold their own variances.
    if trained.task.num_members > 1 or trained.task.config.head.text_variances is not None:
        return np.zeros(len(trained.tokens))
    head = trained.task.model(trained.params).head
    noise = head.text_noise(trained.names)
    if noise is None:
        return np.zeros(len(trained.tokens))
    log_norm = np.log(np.asarray(noise.trace())) / 2
    return log_norm - log_norm.mean()


def left_out(data: Data, seed: int) -> tuple[Bool[np.ndarray, " k"], np.ndarray]:
    """Returns which names are in training, and the tenth that is left out of it."""
    names = np.random.default_rng(seed).permutation(data.known)[: len(data.known) // 10]
    return np.isin(np.arange(len(data.train.names)), np.setdiff1d(data.known, names)), names


class Runs:
    """Trains the heads of a study; what the last head needed is kept."""

    def __init__(self, options: argparse.Namespace):
        self._options = options
        self._data = functools.lru_cache(maxsize=1)(functools.partial(study_noise.prepare, options))
        # A head alone is the first of its members.
        self._trained = functools.lru_cache(maxsize=options.members)(self._train)

    def figures(self, head: str, seed: int, members: int) -> dict[str, float]:
        """Returns the figures of a head, or of its members together."""
        began = time.monotonic()
        trained = [self._trained(head, seed, member) for member in range(members)]
        data = self._data(seed)
        found = measure(trained, data, *left_out(data, seed), self._options.ways)
        return {**found, "seconds": time.monotonic() - began}

    def _train(self, head: str, seed: int, member: int) -> Trained:
        options, data = self._options, self._data(seed)
        seen, without = left_out(data, seed)
        pairs = data.train.take(~np.isin(data.train.captions, without))
        if options.noise:
            pairs, _ = noise.inject(pairs, options.noise, options.level, np.flatnonzero(seen), seed)
        config = study_noise.configuration(data, head, options)
        with Bar(f"{head}, seed {seed}.{member}", options.steps, "steps") as bar:
            return train(config, data.locked, pairs, data.tokenizer, seed + 1000 * member, bar.advance, order=seed)


def study(options: argparse.Namespace) -> None:
    """Trains and measures what is not finished, and writes a table for each head and one of all."""
    study_noise.check_data(options)
    runs = Runs(options)
    settings = {name: getattr(options, name) for name in ("data", "steps", "temperature", "temperature_factor")}
    settings |= {name: getattr(options, name) for name in ("noise", "level", "ways")}
    # Clean and noisy captions share an output folder, with the image towers.
    captions = f", {options.noise}" if options.noise else ""
    cells: dict[str, tuple[str, int]] = {}
    for head in options.heads:
        cells[f"{head}{captions}"] = (head, 1)
        if options.members > 1:
            cells[f"{head} x{options.members}{captions}"] = (head, options.members)
    found = harness.run_cells(
        {name: {**settings, "configuration": repr(study_noise.HEADS[head])} for name, (head, _) in cells.items()},
        lambda name, seed: runs.figures(cells[name][0], seed, cells[name][1]),
        options,
    )
    found = {name: found[name] for name in cells if name in found}
    summary = markdown_table(("head", *SUMMARY), harness.rows_of(found, SUMMARY))
    harness.write_tables(options.output / "table.md", *(table(head, of) for head, of in found.items()), summary)


def table(head: str, by_seed: Mapping[int, harness.Figures]) -> str:
    """Returns a row for each way."""
    columns = [f"{key}/{figure}" for key in ("known", "new") for figure in ("top1", "nll", "ece")] + ["harmonic"]
    found: harness.Found = {
        way: {seed: {column: of[f"{way}/{column}"] for column in columns} for seed, of in by_seed.items()}
        for way in WAYS
        if all(f"{way}/harmonic" in of for of in by_seed.values())
    }
    means = {name: np.mean([of[name] for of in by_seed.values()]) for name in ("ausuc", "best T/new/nll")}
    title = f"{head}, {len(by_seed)} seeds, AUSUC {means['ausuc']:.3f}, NLL of new names with the best T "
    return markdown_table((f"{title}{means['best T/new/nll']:.3f}", *columns), harness.rows_of(found, columns))


def names_parser(description: str | None, output: str, seeds: Sequence[int] = (0, 1, 2, 3, 4)) -> ArgumentParser:
    """Returns a parser with the flags of studies of known and new names, see `harness.study_parser`."""
    parser = harness.study_parser(description, output, steps=1500, seeds=seeds)
    parser.add_argument("--data", choices=("characters", "icons", "emoji"), default="characters")
    parser.add_argument("--fonts", type=Path, metavar="DIR", help="icons, emoji: unpacked packages")
    parser.set_defaults(run=None, shards=[], evaluation_shards=[], noise_column="")
    return parser


def parsed(parser: ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Returns the options of a `names_parser`, checked."""
    options = parser.parse_args(arguments)
    if options.data != "characters" and not options.fonts:
        parser.error(f"--data {options.data} needs --fonts")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study."""
    parser = names_parser(__doc__, "runs/names")
    parser.add_argument("--heads", nargs="+", choices=(*HEADS, *OTHERS), default=list(HEADS), metavar="HEAD")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help="to calibrate")
    parser.add_argument("--members", type=int, default=1, help="also measure so many runs of each head together")
    parser.add_argument("--noise", choices=list(noise.NOISES), help="whose captions are wrong in training")
    parser.add_argument("--level", type=float, default=0.4, help="of --noise: the share that is replaced")
    learned = LogTemperature()
    parser.add_argument("--temperature", type=float, default=learned.initial, help="the initial τ")
    parser.add_argument("--temperature-factor", type=float, default=learned.learning_rate_factor)
    return harness.run_study("study_names", study, parsed(parser, arguments))


if __name__ == "__main__":
    sys.exit(main())
