"""Experiments small enough for tests, cut from the real configurations, and the data that they read."""

import contextlib
import dataclasses
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from lit_het import parameters
from lit_het.configs import experiment
from lit_het.configs.experiment import ExperimentConfig, PretrainedConfig
from lit_het.data_pipelines.images.decoding import encode_jpeg
from lit_het.data_pipelines.labels import CaptionWords, ClassIndex
from lit_het.data_pipelines.shards.writing import write_shards
from lit_het.data_pipelines.texts.tokenizers import SentencePieceConfig, train_sentencepiece
from lit_het.losses.classification import SigmoidCrossEntropy
from lit_het.sharding import MeshConfig
from lit_het.tasks.captioning import CaptioningConfig
from lit_het.tasks.classification import ClassificationConfig
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.tasks.features import ImageTowerConfig
from lit_het.towers.transformer import EncoderConfig
from lit_het.towers.vit import ViTConfig
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration
from lit_het.training.schedules import Schedule
from lit_het.training.step import TrainState
from lit_het.training.train import train
from lit_het.types import Params

COLOURS = ("red", "green", "blue", "grey")
SHAPES = ("square", "bar")
NUM_SAMPLES = 40


def write_data(
    directory: Path,
    *,
    image_size: int = 32,
    num_samples: int = NUM_SAMPLES,
    seed: int = 0,
    every_wrong: int | None = None,
) -> Path:
    """Writes two shards of coloured shapes with captions such as "red bar", and a tokenizer.

    With ``every_wrong`` one caption and class in so many is that of another shape.
    """
    random = np.random.default_rng(seed)
    names = [f"{colour} {shape}" for colour in COLOURS for shape in SHAPES]

    def samples():
        for number in range(num_samples):
            label = number % len(names)
            image = random.integers(0, 60, (image_size, image_size, 3), dtype=np.uint8)
            colour = np.array([(255, 0, 0), (0, 255, 0), (0, 0, 255), (128, 128, 128)][label // 2], np.uint8)
            image[8:24, slice(8, 24) if label % 2 == 0 else slice(14, 18)] = colour
            if every_wrong and number % every_wrong == 0:
                label = (label + 1) % len(names)
            yield {"__key__": f"{number:04d}", "jpg": encode_jpeg(image), "txt": names[label], "cls": label}

    write_shards(directory / "train", samples(), samples_per_shard=num_samples // 2)
    for name in ("classnames.txt", "words.txt"):
        lines = names if name == "classnames.txt" else [*COLOURS, *SHAPES]
        (directory / "train" / name).write_text("".join(f"{line}\n" for line in lines))
    (directory / "tokenizer.model").write_bytes(train_sentencepiece(names, vocabulary_size=40))
    return directory


def edit_config(run_dir: Path, config: ExperimentConfig) -> None:
    """Gives a run another configuration, as a user does by hand: who deletes the manifest accepts the change."""
    experiment.save(config, run_dir / "config.json")
    (run_dir / "manifest.json").unlink(missing_ok=True)


def environment(devices: int = 1) -> dict[str, str]:
    """Returns the environment of a process with so many devices, which compiles as the tests do."""
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", f"device_count={devices}")
    return {**os.environ, "XLA_FLAGS": flags}


def free_port() -> int:
    """Returns a port of this machine on which nothing listens."""
    with socket.socket() as server:
        server.bind(("localhost", 0))
        return server.getsockname()[1]


def assert_same_training(params: Params, others: Params) -> None:
    """Compares parameters that were trained in the same way on differently many devices."""
    ours, theirs = parameters.flatten(params), parameters.flatten(others)
    assert ours.keys() == theirs.keys()
    for path, array in ours.items():
        # A key's bias has no gradient but rounding, of which Adam makes whole steps.
        if not path.endswith("key/bias"):
            np.testing.assert_allclose(array, theirs[path], atol=1e-4, err_msg=path)


def shrink(config: ExperimentConfig, data: Path, run_dir: Path, pretrained: Path | None = None) -> ExperimentConfig:
    """Cuts towers, data, steps and evaluations; head, loss, optimizer, labels and locked patterns stay as they are."""
    task = config.task
    tower = _shrink_tower(task.require_image_tower())
    match task:
        case ContrastiveConfig():
            text = dataclasses.replace(
                task.text_tower,
                vocabulary_size=64,
                length=6,
                embedding_size=tower.embedding_size,
                encoder=_shrink_encoder(task.text_tower.encoder),
            )
            task = dataclasses.replace(task, image_tower=tower, text_tower=text)
        case CaptioningConfig():
            blocks = _shrink_encoder(task.decoder.encoder)
            decoder = dataclasses.replace(task.decoder, vocabulary_size=64, length=6, encoder=blocks)
            task = dataclasses.replace(task, image_tower=tower, decoder=decoder)
        case ClassificationConfig():
            names, words = len(COLOURS) * len(SHAPES), len(COLOURS) + len(SHAPES)
            num_classes = names if isinstance(config.data.labels, ClassIndex) else words
            task = dataclasses.replace(task, image_tower=tower, num_classes=num_classes)
    return dataclasses.replace(
        config,
        run_dir=run_dir,
        task=task,
        data=dataclasses.replace(
            config.data,
            shards=(str(data / "train"),),
            mixture=(),
            image_size=tower.image_size,
            batch_size=16,
            threads=1,
        ),
        tokenizer=SentencePieceConfig(data / "tokenizer.model", length=6) if config.tokenizer else None,
        pretrained=PretrainedConfig(pretrained) if pretrained else None,
        length=Duration(4),
        schedule=Schedule(learning_rate=1e-3, warmup=Duration(1)),
        cadence=Cadence(log_steps=1, save_steps=2),
        evaluations=(),
    )


def classifier(config: ExperimentConfig, data: Path, run_dir: Path) -> ExperimentConfig:
    """Returns a classifier with the (shrunk) image tower of ``config``: a source of locked weights."""
    task = ClassificationConfig(
        image_tower=_shrink_tower(config.task.require_image_tower()),
        num_classes=len(COLOURS) + len(SHAPES),
        loss=SigmoidCrossEntropy(),
    )
    plain = dataclasses.replace(config, task=task, tokenizer=None, pretrained=None, mesh=MeshConfig())
    labelled = dataclasses.replace(plain, data=dataclasses.replace(plain.data, labels=CaptionWords()))
    return dataclasses.replace(shrink(labelled, data, run_dir), length=Duration(2))


def finish(_step: Any, state: TrainState, *_: Any, num_steps: int, saver: Any, **__: Any) -> TrainState:
    """Stands for the loop of a training: saves the state after as many steps, of which none is computed."""
    state = dataclasses.replace(state, step=state.step + num_steps)
    saver.save(state)
    saver.finish()
    return state


@contextlib.contextmanager
def untrained() -> Iterator[None]:
    """Runs are finished with their initial parameters: a step that trains them would take seconds to compile."""
    with mock.patch("lit_het.training.train.loop.train", finish):
        yield


def finish_untrained(config: ExperimentConfig) -> None:
    """Writes a finished run of the initial parameters."""
    with untrained():
        train(config)


def _shrink_tower(tower: ImageTowerConfig) -> ViTConfig:
    assert isinstance(tower, ViTConfig)
    encoder = _shrink_encoder(tower.encoder)
    return dataclasses.replace(tower, image_size=2 * tower.patch_size, encoder=encoder, weights=None)


def _shrink_encoder(encoder: EncoderConfig) -> EncoderConfig:
    if encoder.experts is not None:
        experts = dataclasses.replace(encoder.experts, num_experts=8, num_blocks=1)
        return dataclasses.replace(
            _shrink_encoder(dataclasses.replace(encoder, experts=None)), depth=2, experts=experts
        )
    # float32: XLA's CPU backend takes three times as long to compile bfloat16.
    return dataclasses.replace(encoder, width=64, depth=1, mlp_width=64, num_heads=2, compute_type="float32")
