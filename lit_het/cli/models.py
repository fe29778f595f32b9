"""Trained models as evaluators see them: compiled once, pictures split over the devices of a mesh."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from data_pipelines.tokenizers import Tokenizer
from lit_het import distributed, sharding
from lit_het.errors import UserError
from lit_het.tasks.classification import ClassificationTask
from lit_het.tasks.contrastive import ContrastiveTask
from lit_het.types import Classifier, Encoder, EvaluatedModel, ImageFeatures, Params


class ModelMaker:
    """Makes models of parameters that change; what is compiled for the first serves the others.

    Args:
        task: of the model.
        mesh: the devices; parameters lie on them.
        tokenizer: for captions; None for a classifier.
    """

    def __init__(self, task: ContrastiveTask | ClassificationTask, mesh: Mesh, tokenizer: Tokenizer | None):
        self._task, self._mesh, self._tokenizer = task, mesh, tokenizer
        self._compiled: dict[str, Callable[..., Any]] = {}

    def model(self, params: Params, tower: str, text_tower: str = "") -> EvaluatedModel:
        """Returns the model of some parameters, on the devices.

        Args:
            params: of all parts.
            tower: equal for parameters of equal image towers.
            text_tower: equal for models that embed texts alike; empty for one that is trained.
        """
        if isinstance(self._task, ClassificationTask):
            return self._classifier(params, tower)
        return self._encoder(params, tower, text_tower)

    def _encoder(self, params: Params, tower: str, text_tower: str) -> Encoder:
        run = functools.partial(self._run, params)
        return Encoder(
            features=self._features(params, tower),
            image=lambda features: run("encode_image", features),
            image_samples=lambda features, count, seed: run(
                "sample_image", features, jax.random.key(seed), num_samples=count
            ),
            image_noise_norm=lambda features: run("image_noise_norm", features),
            image_spectrum=lambda features: run("image_spectrum", features),
            text=lambda tokens: run("encode_text", self._split(tokens)),
            text_noise_norm=lambda tokens: run("text_noise_norm", self._split(tokens)),
            tokenize=self._tokenizer or _refuse_texts,
            temperature=float(run("temperature")),
            text_tower=text_tower,
        )

    def _classifier(self, params: Params, tower: str) -> Classifier:
        assert isinstance(self._task, ClassificationTask)
        run = functools.partial(self._run, params) if "head" in params else _refuse
        return Classifier(
            features=self._features(params, tower),
            log_probabilities=lambda features, seed: run(
                "log_probabilities", features, None if seed is None else jax.random.key(seed)
            ),
            log_normalizer=lambda features: run("log_normalizer", features),
            noise_norm=lambda features: run("noise_norm", features),
            num_classes=self._task.config.num_classes if "head" in params else 0,
        )

    def _features(self, params: Params, tower: str) -> ImageFeatures:
        def extract(view: np.ndarray) -> jax.Array:
            return self._call("features", params, distributed.split_rows(view, self._mesh))

        return ImageFeatures(extract, self._task.features.num_members, sharding.num_batch_shares(self._mesh), tower)

    def _split(self, rows: np.ndarray) -> jax.Array:
        return jax.device_put(rows, sharding.batch_sharding(self._mesh))

    def _run(self, params: Params, name: str, *arguments: Any, **static: Any) -> np.ndarray:
        return np.asarray(self._call(name, params, *arguments, **static))

    def _call(self, name: str, params: Params, *arguments: Any, **static: Any) -> jax.Array:
        """Runs a method of the task; its result is whole on every device, and every process."""
        if name not in self._compiled:
            self._compiled[name] = jax.jit(
                getattr(self._task, name),
                static_argnames=tuple(static),
                out_shardings=sharding.whole(self._mesh),
            )
        with jax.set_mesh(self._mesh):
            return self._compiled[name](params, *arguments, **static)


def _refuse_texts(captions: list[str]) -> np.ndarray:
    raise UserError("the run has no tokenizer; import it again with --tokenizer FILE")


def _refuse(*_: Any) -> np.ndarray:
    raise UserError("an image tower that was imported alone has no head: only its features can be evaluated")
