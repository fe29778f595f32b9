"""Compares a small UViM on scenes of glyphs with its oracle and with a per-pixel classifier, over seeds.

    python -m scripts.studies.study_panoptic --output runs/panoptic --seeds 0 1 2

Scenes are drawn by ``lit-het data scenes``. Both stages are those of ``configs/scene_oracle.py`` and
``configs/scene_panoptic.py``; the oracle is given the true masks of the test scenes. The classifier has about as many
parameters and takes about as long as both stages: blocks of the same shape, whose outputs a linear layer maps to the
class of each pixel of a patch; its instances are the connected regions of a class. Finished runs are skipped.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cv2
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Int

from lit_het import parameters
from lit_het.configs import scene_oracle, scene_panoptic
from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines.masks import read_categories
from lit_het.data_pipelines.scenes import SceneConfig, write_scenes
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.eval.report.tables import markdown_table
from lit_het.eval.sets import ImageSet
from lit_het.eval.sets.open_sets import Sets
from lit_het.eval.suite import PanopticConfig
from lit_het.losses.base import weights
from lit_het.losses.masks import merged, pixel_loss
from lit_het.models.opening import open_run
from lit_het.tasks.quantities import Quantity
from lit_het.towers.layers import linear
from lit_het.towers.oracle import Oracle
from lit_het.training.durations import Duration, RunLength
from lit_het.types import ImageFeatures
from scripts.studies import harness

UVIM, ORACLE, CLASSIFIER = "UViM", "oracle of the true masks", "classifier of pixels"
# Minutes are those of a method's own training: of UViM those of stage II.
FIGURES = ("pq", "sq", "rq", "things/pq", "stuff/pq", "parameters (M)", "minutes")
# As many parameters as both stages, and about as long a training as both together.
DEPTH, STEPS = 12, 2500


class PixelClassifier(nnx.Module):
    """A ViT and a linear layer to the class of each pixel of a patch."""

    def __init__(self, config: ExperimentConfig, num_classes: int, rngs: nnx.Rngs):
        self.tower = config.task.require_image_tower().with_encoder(depth=DEPTH).build(rngs)
        self.size = self.tower.config.patch_size
        self.classes = linear(scene_oracle.BLOCKS.width, self.size**2 * (num_classes + 1), "float32", rngs)

    def __call__(self, image: Array) -> Array:
        """Returns the logits of each pixel ``[b h w k]``."""
        side = image.shape[1] // self.size
        logits = self.classes(self.tower(image).tokens)
        patches = logits.reshape(len(image), side, side, self.size, self.size, -1)
        return patches.transpose(0, 1, 3, 2, 4, 5).reshape(*image.shape[:3], -1)


@dataclasses.dataclass(frozen=True)
class Predicted:
    """Masks of known images, as `lit_het.types.EvaluatedModel` as far as they are evaluated."""

    masks: Mapping[bytes, Int[np.ndarray, "h w 2"]]
    mask_classes: int

    @property
    def features(self) -> ImageFeatures:
        """The masks of an image as its features."""
        return ImageFeatures(self._extract, num_members=1, num_shards=1, tower="")

    def _extract(self, view: np.ndarray) -> np.ndarray:
        # What fills the last batch is no image of the set.
        empty = np.zeros((*view.shape[1:3], 2), np.int32)
        return np.stack([self.masks.get(image.tobytes(), empty).ravel() for image in view]).astype(np.float32)

    def __call__(self, _: Quantity, blocks: np.ndarray) -> np.ndarray:
        """Returns the masks of features."""
        side = int(np.sqrt(blocks.shape[2] // 2))
        return blocks.reshape(-1, side, side, 2)


def regions(labels: Int[np.ndarray, "h w"], are_things: Sequence[bool]) -> Int[np.ndarray, "h w 2"]:
    """Returns the masks of the class of each pixel, where each connected region of a thing is an instance."""
    numbers, count = np.zeros(labels.shape, np.int32), 0
    for label, is_thing in enumerate(are_things, 1):
        if is_thing:
            more, found = cv2.connectedComponents((labels == label).astype(np.uint8))
            numbers[found > 0] = count + found[found > 0]
            count += more - 1
    return np.stack([labels, numbers], axis=-1)


def classified(config: ExperimentConfig, steps: int) -> tuple[Callable[[np.ndarray], np.ndarray], int]:
    """Trains a classifier of pixels; returns images to the class of each pixel, and its number of parameters."""
    loader = Loader(config.data)
    assert loader.num_classes is not None
    graph, state = nnx.split(PixelClassifier(config, loader.num_classes, nnx.Rngs(config.seed)))
    params = nnx.to_pure_dict(state)
    optimizer = config.optimizer.build(config.schedule, RunLength(steps, config.data.batch_size))

    def loss(params: Any, batch: Any) -> Array:
        logits = nnx.merge(graph, params)(batch.image)
        return pixel_loss(logits, batch.masks[..., 0], weights(batch.valid)).loss

    @jax.jit
    def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any]:
        updates, opt_state = optimizer.update(jax.grad(loss)(params, batch), opt_state, params, train_step=0)
        return jax.tree.map(jnp.add, params, updates), opt_state

    opt_state = optimizer.init(params)
    for _, batch in zip(range(steps), loader.batches(), strict=False):
        params, opt_state = step(params, opt_state, batch)
    predict = jax.jit(lambda params, image: jnp.argmax(nnx.merge(graph, params)(image), axis=-1))
    return lambda image: np.asarray(predict(params, image), np.int32), parameters.count(params)


def reconstructed(run_dir: Path) -> tuple[Callable[[np.ndarray, np.ndarray], np.ndarray], int]:
    """Returns images and their masks to the masks that an oracle makes of their codes; and its size."""
    run = open_run(run_dir)

    @jax.jit
    def masks(params: Any, image: Array, true: Array) -> Array:
        model: Any = run.config.task.build().model(params)
        oracle: Oracle = model.oracle
        logits = oracle.decode(oracle.encode(true, image).words, image)
        classes, instances = (x.reshape(len(x), -1, x.shape[-1]) for x in logits)
        found = merged(classes, instances).reshape(*logits.classes.shape[:3], 2)
        return jnp.stack([oracle.as_image(found[..., one]) for one in range(2)], axis=-1)

    return lambda image, true: np.asarray(masks(run.params, image, true)), parameters.count(run.params)


def evaluated(config: ExperimentConfig, data: Path, predict: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Any:
    """Returns the figures of the masks that a function makes of the images of the test scenes and their true masks."""
    loader = Loader(dataclasses.replace(config.data, shards=(str(data / "test"),)))
    found: dict[bytes, np.ndarray] = {}
    for batch in loader.epoch():
        assert batch.image is not None
        assert batch.masks is not None
        keys = [image.tobytes() for image in batch.image]
        found |= dict(zip(keys, predict(batch.image, batch.masks), strict=True))
    sets = Sets(config.data.image_size, config.data.preprocessing, lambda: "")
    model: Any = Predicted(found, loader.num_classes or 0)
    evaluator = PanopticConfig(ImageSet("scenes", str(data), batch_size=config.data.batch_size)).build(sets)
    evaluator.check(model)
    return evaluator(model).figures


def study(options: argparse.Namespace) -> None:
    """Trains what is not finished, and writes the table."""
    data = options.output / "data"

    def of_seed(config: ExperimentConfig, seed: int, run_dir: Path, **task: Any) -> ExperimentConfig:
        length = Duration(min(options.steps, int(config.length.amount)))
        loader = dataclasses.replace(config.data, shards=(str(data / "train"),), seed=seed)
        schedule = dataclasses.replace(config.schedule, warmup=Duration(min(50, options.steps // 2)))
        of_task = dataclasses.replace(config.task, **task)
        changed = {"length": length, "data": loader, "schedule": schedule, "task": of_task, "seed": seed}
        return dataclasses.replace(config, run_dir=run_dir, **changed)

    def measure(name: str, seed: int) -> harness.Figures:
        if not (data / "scenes.json").exists():
            write_scenes(SceneConfig(num_train=options.scenes), data)
        root, began = options.output / f"seed{seed}", time.monotonic()
        oracle = of_seed(scene_oracle.get_config(options.output), seed, root / "oracle")
        panoptic = of_seed(
            scene_panoptic.get_config(options.output), seed, root / "panoptic", oracle_run=oracle.run_dir
        )
        if name == UVIM:
            harness.trained(oracle)
            began = time.monotonic()
            found = {k.removeprefix("panoptic/scenes/"): v for k, v in harness.trained(panoptic).items()}
            size = parameters.count(open_run(panoptic.run_dir).params)
            minutes = (time.monotonic() - began) / 60
        elif name == CLASSIFIER:
            predict, size = classified(panoptic, min(options.steps, STEPS))
            are_things = read_categories(str(data / "categories.json")).are_things
            minutes = (time.monotonic() - began) / 60
            found = evaluated(
                panoptic, data, lambda image, _: np.stack([regions(one, are_things) for one in predict(image)])
            )
        else:
            harness.trained(oracle)
            minutes = (time.monotonic() - began) / 60
            predict, size = reconstructed(oracle.run_dir)
            found = evaluated(oracle, data, predict)
        return {"parameters (M)": size / 1e6, "minutes": minutes, **found}

    methods = {name: {"steps": options.steps} for name in (CLASSIFIER, ORACLE, UVIM)}
    found = harness.run_cells(methods, measure, options)
    titles, rows = (f"{len(options.seeds)} seeds", *FIGURES), harness.rows_of(found, FIGURES)
    harness.write_tables(options.output / "panoptic.md", markdown_table(titles, rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study."""
    parser = harness.study_parser(__doc__, "runs/panoptic", steps=10_000, seeds=(0, 1, 2))
    parser.add_argument("--scenes", type=int, default=20_000, help="images of training; default: %(default)s")
    return harness.run_study("study_panoptic", study, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
