"""Trained models for evaluators: compiled once, with images sharded over the devices of a mesh."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from lit_het import distributed, sharding
from lit_het.data_pipelines.tokenizers import Tokenizer
from lit_het.errors import UserError
from lit_het.heads.deterministic import DeterministicConfig
from lit_het.tasks.classification import ClassificationTask
from lit_het.tasks.contrastive import ContrastiveTask
from lit_het.types import Classifier, Encoder, EvaluatedModel, HeadOutput, ImageFeatures, Params


class ModelMaker:
    """Builds models from parameters that change; compiled functions are shared by all of them.

    Args:
        task: task of the model.
        mesh: devices that hold the parameters.
        tokenizer: for captions; None for a classifier.
    """

    def __init__(self, task: ContrastiveTask | ClassificationTask, mesh: Mesh, tokenizer: Tokenizer | None):
        self._task, self._mesh, self._tokenizer = task, mesh, tokenizer
        self._compiled: dict[str, Callable[..., Any]] = {}

    def model(self, params: Params, tower: str, text_tower: str = "") -> EvaluatedModel:
        """Returns the model with these parameters.

        Args:
            params: parameters of all parts.
            tower: key of the image tower; equal for equal towers.
            text_tower: key of everything that embeds texts; empty during training.
        """
        if isinstance(self._task, ClassificationTask):
            return self._classifier(params, tower)
        return self._encoder(params, tower, text_tower)

    def _encoder(self, params: Params, tower: str, text_tower: str) -> Encoder:
        run, blocks = functools.partial(self._run, params), functools.partial(self._run_blocks, params)
        return Encoder(
            features=self._features(params, tower),
            image=lambda features: run("encode_image", features),
            choose=lambda features, seeds, count, names: HeadOutput(
                blocks("choose", (features, seeds), names, num_samples=count), *blocks("certainty", (features,), names)
            ),
            members=lambda features, seeds, count, names: blocks(
                "members", (features, seeds), names, num_samples=count
            ),
            alone=lambda features, names: blocks("alone", (features,), names),
            image_noise_norm=lambda features: run("image_noise_norm", features),
            image_spectrum=lambda features: run("image_spectrum", features),
            text=lambda tokens: run("encode_text", self._split(tokens)),
            tokenize=self._tokenizer or _no_tokenizer,
            temperature=float(run("temperature")),
            text_tower=text_tower,
        )

    def _classifier(self, params: Params, tower: str) -> Classifier:
        assert isinstance(self._task, ClassificationTask)
        if "head" not in params:
            run = blocks = _no_head
        else:
            run, blocks = functools.partial(self._run, params), functools.partial(self._run_blocks, params)
        head = self._task.config.head
        return Classifier(
            features=self._features(params, tower),
            choose=lambda features, seeds, count: HeadOutput(
                blocks("choose", (features, seeds), num_samples=count), *blocks("certainty", (features,))
            ),
            members=lambda features, seeds, count: blocks("members", (features, seeds), num_samples=count),
            alone=lambda features: blocks("alone", (features,)),
            image_spectrum=lambda features: run("image_spectrum", features),
            num_classes=self._task.config.num_classes if "head" in params else 0,
            num_samples=0 if isinstance(head, DeterministicConfig) else head.sampling.num_eval_samples,
        )

    def _features(self, params: Params, tower: str) -> ImageFeatures:
        def extract(view: np.ndarray) -> jax.Array:
            return self._call("features", self._task.features, params, distributed.split_rows(view, self._mesh))

        return ImageFeatures(extract, self._task.features.num_members, sharding.num_batch_shards(self._mesh), tower)

    def _split(self, rows: Any) -> Any:
        shares = sharding.num_batch_shards(self._mesh)
        is_even = not jax.tree.leaves(rows)[0].shape[0] % shares
        return jax.device_put(rows, sharding.batch_sharding(self._mesh) if is_even else sharding.replicated(self._mesh))

    def _run_blocks(self, params: Params, name: str, rows: tuple[np.ndarray, ...], *shared: Any, **static: Any) -> Any:
        """Runs a method on blocks of features, which are sharded over the devices, with a key for each block's seed.

        Each result is a method of its own, since programs with several results were observed to round differently on
        one device and on eight.
        """
        method = getattr(self._task, name)

        def all_blocks(params: Params, rows: tuple[jax.Array, ...], *shared: Any, **static: Any) -> Any:
            def one_block(rows: tuple[jax.Array, ...], shared: Any, _: tuple[str, ...]) -> Any:
                (block,), *seeds = rows
                keys = [jax.random.key(seed) for (seed,) in seeds]
                return method(shared[0], block, *keys, *shared[1:], **static)

            # Full precision: the division by τ would amplify rounding errors of the products.
            with jax.default_matmul_precision("highest"):
                return sharding.map_shards(one_block, rows, (params, *shared))

        shared = jax.device_put(shared, sharding.replicated(self._mesh))
        found = self._call(name, all_blocks, params, self._split(rows), *shared, **static)
        return jax.tree.map(lambda array: np.asarray(array).reshape(-1, *array.shape[2:]), found)

    def _run(self, params: Params, name: str, *arguments: Any, **static: Any) -> np.ndarray:
        return np.asarray(self._call(name, getattr(self._task, name), params, *arguments, **static))

    def _call(self, name: str, function: Callable[..., Any], params: Params, *arguments: Any, **static: Any) -> Any:
        """Runs a function that is compiled once per name; the result is replicated on all devices and processes."""
        if name not in self._compiled:
            self._compiled[name] = jax.jit(
                function,
                static_argnames=tuple(static),
                out_shardings=sharding.replicated(self._mesh),
            )
        with jax.set_mesh(self._mesh):
            return self._compiled[name](params, *arguments, **static)


def _no_tokenizer(captions: list[str]) -> np.ndarray:
    raise UserError("the run has no tokenizer; import it again with --tokenizer FILE")


def _no_head(*_: Any, **__: Any) -> np.ndarray:
    raise UserError("an imported image tower has no head; only its features can be evaluated")
