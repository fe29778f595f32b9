"""Compares members of the text tower that share parameters with members that share none, over seeds.

    python -m scripts.studies.study_members --data icons --fonts DIR --steps 500 --depth 3 --output runs/members

Members share embeddings, embeddings and the lower blocks, all but the projection, or all kernels but for a vector of
rank one on each side (BatchEnsemble, Wen, Tran and Ba, ICLR 2020). Their predictions are the mean probability. Ways to
calibrate, sets and fits are those of ``study_names``; costs are parameters beside the image tower, and the time of a
step where members are computed side by side but for what they share.
"""

import argparse
import dataclasses
import functools
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key

from lit_het import parameters
from lit_het.console import Bar
from lit_het.eval.report.tables import markdown_table
from lit_het.heads.temperature_config import LogTemperature
from lit_het.random import Keys
from lit_het.tasks.base import Progress
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.tasks.text_members import TextMembersTask
from lit_het.tasks.two_towers import ContrastiveTask
from lit_het.types import Batch, Metrics, Params
from scripts.studies import harness, study_names, study_noise
from scripts.studies.noise.sources import Data
from scripts.studies.noise.training import train

_TOWER = "text_tower/"
_INPUTS = ("tokens/", "positions")


@dataclasses.dataclass(frozen=True)
class Sharing:
    """What members of the text tower share.

    Attributes:
        parts: beginnings of paths below the tower of arrays that are shared.
        blocks: of the blocks, how many from below are.
        rank_one: whether all kernels of the tower are, but for one vector each of inputs and of outputs.
    """

    parts: tuple[str, ...] = ()
    blocks: int = 0
    rank_one: bool = False

    def of(self, path: str) -> bool:
        """Whether an array is shared as a whole."""
        below = path.removeprefix(_TOWER)
        if below == path:
            return False
        return below.startswith(self.parts) or (self.rank_one and below.endswith("kernel"))

    def divides(self, path: str) -> bool:
        """Whether the lower blocks of an array are shared."""
        return bool(self.blocks) and path.startswith(f"{_TOWER}encoder/blocks/")


class SharingTask(TextMembersTask):
    """Members that share parameters of the text tower, which are below ``shared`` and not stacked."""

    def __init__(self, config: "SharingConfig"):
        self._sharing = config.sharing
        super().__init__(config)

    def initialize(self, key: Key[Array, ""]) -> Params:
        """Returns fresh parameters; what is shared is that of the first member."""
        flat = parameters.flatten(super().initialize(key))
        own, shared, sharing = {}, {}, self._sharing
        for number, (path, array) in enumerate(flat.items()):
            if sharing.of(path):
                shared[f"shared/{path}"] = array[0]
                if sharing.rank_one and path.endswith("kernel"):
                    for side, size in (("in", array.shape[-2]), ("out", array.shape[-1])):
                        # Random signs, one row for each member, as in the paper.
                        drawn = jax.random.fold_in(key, 2 * number + (side == "in"))
                        signs = jax.random.rademacher(drawn, (*array.shape[:-2], size), jnp.float32)
                        own[f"vectors/{side}/{path}"] = signs
            elif sharing.divides(path):
                shared[f"shared/{path}"] = array[0, : sharing.blocks]
                own[path] = array[:, sharing.blocks :]
            else:
                own[path] = array
        return parameters.unflatten(own | shared)

    def member(self, params: Params, number: int) -> Params:
        """Returns the parameters of one member, as those of `one`."""
        flat = parameters.flatten(params)
        found = {}
        for path, array in flat.items():
            if path.startswith("image_tower/"):
                found[path] = array
            elif path.startswith("shared/"):
                name = path.removeprefix("shared/")
                if f"vectors/in/{name}" in flat:
                    r, s = (flat[f"vectors/{side}/{name}"][number] for side in ("in", "out"))
                    found[name] = r[..., :, None] * array * s[..., None, :]
                else:
                    found[name] = jnp.concatenate([array, flat[name][number]]) if name in flat else array
            elif not path.startswith("vectors/") and path not in found and f"shared/{path}" not in flat:
                found[path] = array[number]
        return parameters.unflatten(found)

    def loss(
        self, params: Params, batch: Batch, keys: Keys, progress: Progress | None = None
    ) -> tuple[Float[Array, ""], Metrics]:
        """Returns the mean of the members' losses, and mean metrics."""
        del progress
        each = [Keys(jax.random.fold_in(keys.base, number)) for number in range(self.num_members)]
        found = [self.one.loss(self.member(params, number), batch, own) for number, own in enumerate(each)]
        return jax.tree.map(lambda *values: jnp.mean(jnp.stack(values), axis=0), *found)


@dataclasses.dataclass(frozen=True)
class SharingConfig(ContrastiveConfig):
    """Members that share parameters.

    Attributes:
        sharing: which.
    """

    sharing: Sharing = Sharing()

    def build(self) -> ContrastiveTask:
        """Returns the task; each member alone has that of a single one."""
        return SharingTask(self) if self.text_members > 1 else ContrastiveTask(self)


def arms(depth: int) -> dict[str, Sharing | None]:
    """Returns what members share, of a tower of some blocks; None for a single tower."""
    found: dict[str, Sharing | None] = {"one": None, "nothing": Sharing(), "embeddings": Sharing(_INPUTS)}
    if depth > 1:
        found["embeddings and lower blocks"] = Sharing(_INPUTS, blocks=depth - 1)
    found["all but the projection"] = Sharing((*_INPUTS, "encoder/"))
    found["kernels (BatchEnsemble)"] = Sharing(_INPUTS, rank_one=True)
    return found


def train_and_measure(data: Data, sharing: Sharing | None, seed: int, options: argparse.Namespace) -> dict[str, float]:
    """Returns the figures of `scripts.studies.study_names.measure`, parameters and the seconds of training."""
    seen, left_out = study_names.left_out(data, seed)
    config = study_noise.configuration(data, options.head, options)
    task: Any = config.task
    encoder = dataclasses.replace(task.text_tower.encoder, depth=options.depth)
    task = dataclasses.replace(task, text_tower=dataclasses.replace(task.text_tower, encoder=encoder))
    if sharing is not None:
        fields = {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}
        task = SharingConfig(**fields | {"text_members": options.members, "sharing": sharing})
    config = dataclasses.replace(config, task=task)
    pairs = data.train.take(~np.isin(data.train.captions, left_out))
    began = time.monotonic()
    with Bar(f"seed {seed}", options.steps, "steps") as bar:
        trained = train(config, data.locked, pairs, data.tokenizer, seed, bar.advance)
    seconds = time.monotonic() - began
    own = {part: tree for part, tree in trained.params.items() if part != "image_tower"}
    found = study_names.measure([trained], data, seen, left_out, ("T of images", "T of names", "offset"))
    return {**found, "seconds": seconds, "parameters": sum(array.size for array in jax.tree.leaves(own))}


def study(options: argparse.Namespace) -> None:
    """Trains and measures what is not finished, and writes a table."""
    study_noise.check_data(options)
    data = functools.lru_cache(maxsize=1)(functools.partial(study_noise.prepare, options))
    settings = {name: getattr(options, name) for name in ("data", "steps", "depth", "members", "head")}
    cells = {f"depth {options.depth}, {name}": sharing for name, sharing in arms(options.depth).items()}
    found = harness.run_cells(
        {name: {**settings, "sharing": repr(sharing)} for name, sharing in cells.items()},
        lambda name, seed: train_and_measure(data(seed), cells[name], seed, options),
        options,
    )
    columns = (*study_names.SUMMARY, "parameters")
    rows = harness.rows_of({name: found[name] for name in cells if name in found}, columns)
    harness.write_tables(options.output / "table.md", markdown_table(("shared", *columns), rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study."""
    parser = study_names.names_parser(__doc__, "runs/members", seeds=(0, 1, 2))
    parser.add_argument("--depth", type=int, default=1, help="blocks of the text tower")
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--head", choices=study_names.HEADS, default="smoothing 0.1", metavar="HEAD")
    learned = LogTemperature()
    parser.set_defaults(temperature=learned.initial, temperature_factor=learned.learning_rate_factor)
    return harness.run_study("study_members", study, study_names.parsed(parser, arguments))


if __name__ == "__main__":
    sys.exit(main())
