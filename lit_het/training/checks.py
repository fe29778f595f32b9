"""Checks of a configuration, its data and its run directory before training starts."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from lit_het.configs import experiment
from lit_het.configs.experiment import ExperimentConfig
from lit_het.console import message
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.errors import UserError
from lit_het.eval.sets.folders import overlaps
from lit_het.heads.contrastive_config import BayesVLMContrastiveConfig
from lit_het.objectives.base import Setup
from lit_het.tasks.captioning import CaptioningConfig
from lit_het.tasks.classification import ClassificationConfig
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.tasks.translation import TranslationConfig
from lit_het.towers.image_config import ImageTowerConfig, ViTConfig
from lit_het.training.directory import config_path, load_config

if TYPE_CHECKING:
    from lit_het.data_pipelines.shards.stream import Stream
    from lit_het.data_pipelines.texts.tokenizers import Tokenizer
    from lit_het.tasks.every_task import AnyTask

# Fields that a resumed run may change. Apart from rounding and the grouping of tokens for experts, they change neither
# the model nor the sequence of batches.
CHANGEABLE_FIELDS = (
    "run_dir",
    "mesh",
    "cadence",
    "on_nonfinite",
    "evaluations",
    "log",
    "data.threads",
    "data.prefetch_batches",
    "data.max_bad_fraction",
    "data.slow_read_seconds",
    "data.stuck_read_seconds",
    "data.embeddings",
    "data.text_embeddings",
    "pretrained.run",
    "task.image_tower.weights",
    "task.text_tower.weights",
    "task.decoder.encoder.remat",
    "task.decoder.encoder.unrolled",
    "task.image_tower.encoder.remat",
    "task.image_tower.encoder.unrolled",
    "task.text_tower.encoder.remat",
    "task.text_tower.encoder.unrolled",
    "task.loss.form",
    "task.loss.block_size",
    "task.microbatches",
)


def check_run_dir(config: ExperimentConfig, resume: bool, flag: str = "--run-dir") -> None:
    """Checks that training does not overwrite a run, and that a resumed run has the same configuration.

    Args:
        config: of the run.
        resume: whether it is continued.
        flag: that names its directory.

    Raises:
        UserError: the directory is a file, holds no run or another one.
    """
    path = config_path(config.run_dir)
    if config.run_dir.exists() and not config.run_dir.is_dir():
        raise UserError(f"{config.run_dir} is a file; choose another {flag}")
    if not path.exists():
        if resume:
            raise UserError(f"{config.run_dir} contains no run to resume; leave out --resume to start one")
        return
    if not resume:
        raise UserError(f"{config.run_dir} already holds a run; continue it with --resume or choose another {flag}")
    changed = {
        field: values
        for field, values in experiment.differences(load_config(config.run_dir), config).items()
        if not field.startswith(CHANGEABLE_FIELDS)
    }
    if changed:
        field, (before, now) = next(iter(changed.items()))
        more = f" (and {', '.join(list(changed)[1:])})" if len(changed) > 1 else ""
        raise UserError(
            f"cannot resume {config.run_dir}: {field} was {before} and is now {now}{more}; "
            f"use the same values or another {flag}"
        )


def with_saved_rule(config: ExperimentConfig) -> ExperimentConfig:
    """Returns the configuration of a resumed run with the rule by which the run holds samples out.

    The default of earlier versions was another one, and a run must not train on what it held out.
    """
    if not config_path(config.run_dir).is_file():
        return config
    return dataclasses.replace(config, calibration_by=load_config(config.run_dir).calibration_by)


def check_is_trained(config: ExperimentConfig) -> None:
    """Checks that the head learns by gradients.

    Raises:
        UserError: it is a posterior, which is fitted to a finished model.
    """
    if isinstance(config.task, ContrastiveConfig) and isinstance(config.task.head, BayesVLMContrastiveConfig):
        raise UserError(
            "--task.head bayes_vlm has nothing to train: train with --task.head deterministic, then fit the posterior "
            "with lit-het add-noise --model RUN --task.head bayes_vlm"
        )


def check_source(config: ExperimentConfig) -> None:
    """Checks that there are texts to translate where the model translates.

    Raises:
        UserError: there are none, or a model of images has some.
    """
    translates = isinstance(config.task, TranslationConfig)
    if translates and config.data.source is None:
        raise UserError("a translation model needs texts to translate: set --data.source, such as json/FIELD")
    if not translates and config.data.source is not None:
        raise UserError("--data.source is the text that a translation model reads; leave it out")


def check_data(config: ExperimentConfig, loader: "Loader | Stream", tokenizer: "Tokenizer | None") -> None:
    """Checks, before anything is compiled, that the data fits the model."""
    task = config.task
    if isinstance(task, TranslationConfig):
        _check_translation(task, config, tokenizer)
        return
    if config.data.image_size != task.image_tower.image_size:
        raise UserError(
            f"--data.image-size {config.data.image_size} differs from --task.image-tower.image-size "
            f"{task.image_tower.image_size}; make them equal"
        )
    match task:
        case ClassificationConfig():
            if loader.num_classes != task.num_classes:
                raise UserError(
                    f"the data has {loader.num_classes or 'no'} classes, the task has {task.num_classes}; "
                    "set --task.num-classes, or `data.labels` in the configuration file"
                )
        case ContrastiveConfig(text_tower=text, objectives=objectives):
            if tokenizer is None:
                raise UserError("a contrastive task needs captions; name a `tokenizer` in the configuration file")
            if tokenizer.length != text.length or tokenizer.vocabulary_size > text.vocabulary_size:
                raise UserError(
                    f"the tokenizer has length {tokenizer.length} and {tokenizer.vocabulary_size} tokens, the text "
                    f"tower has length {text.length} and {text.vocabulary_size} tokens; set --tokenizer.length and "
                    "--task.text-tower.length, or --task.text-tower.vocabulary-size"
                )
            if config.data.prompt is not None and not any(one.reads_targets for one in objectives.values()):
                raise UserError("data.prompt is for decoders; leave it out for an image-text model without captioner")
            for objective in objectives.values():
                objective.check(Setup(task, run=config, tokenizer=tokenizer))
        case CaptioningConfig(decoder=decoder):
            decoder.check_tokenizer(tokenizer, config.data.prompt, "--task.decoder")


def _check_translation(task: TranslationConfig, config: ExperimentConfig, tokenizer: "Tokenizer | None") -> None:
    """Checks that encoder and decoder have the same tokenizer."""
    task.decoder.check_tokenizer(tokenizer, config.data.prompt, "--task.decoder")
    assert tokenizer is not None, "checked with the decoder"
    tower = task.text_tower
    if tokenizer.length != tower.length or tokenizer.vocabulary_size > tower.vocabulary_size:
        raise UserError(
            f"the tokenizer has length {tokenizer.length} and {tokenizer.vocabulary_size} tokens, the encoder has "
            f"length {tower.length} and {tower.vocabulary_size} tokens; set --tokenizer.length and "
            "--task.text-tower.length, or --task.text-tower.vocabulary-size"
        )
    if tower.padding_token != tokenizer.padding_id:
        raise UserError(
            f"--task.text-tower.padding-token {tower.padding_token} is not the padding of the tokenizer, "
            f"{tokenizer.padding_id}; make it equal, or set --tokenizer.padding-id"
        )
    if tokenizer.padding_id in (tokenizer.end_id, tokenizer.unknown_id):
        raise UserError(
            f"the padding of the tokenizer, {tokenizer.padding_id}, is also its end token or unknown characters, which "
            "the decoder would not see; set --tokenizer.padding-id and --task.text-tower.padding-token to another token"
        )


def report_copies(config: ExperimentConfig, num_samples: int) -> None:
    """Says so if a batch of image-text pairs is larger than the training data.

    Raises:
        UserError: it has one pair only, without a negative.
    """
    size, task = config.data.batch_size, config.task
    if not isinstance(task, ContrastiveConfig) or 1 < size <= num_samples:
        return
    if min(size, num_samples) == 1:
        raise UserError(
            "a batch of 1 image-text pair has no negatives, and its contrastive loss teaches nothing; raise "
            "--data.batch-size, and train on more than one sample"
        )
    if task.loss.duplicates == "positives":
        consequence = "they count as positives, and only other samples as negatives"
    else:
        consequence = "they count as negatives of each other, see --task.loss.duplicates"
    message(
        f"a batch of {size:,} holds copies of the {num_samples:,} samples: {consequence}; --data.batch-size "
        f"{num_samples} or less has none"
    )


def report_reused(config: ExperimentConfig) -> None:
    """Says so if images by which τ is trained are evaluated, too."""
    for one in config.data.mixture:
        for evaluation in config.evaluations if one.held_out else ():
            if overlaps(evaluation.data, one.shards, one.portion):
                message(
                    f"{evaluation.data.name} has images that are held out to train τ ({one.shards[0]}): its figures "
                    "are no test; evaluate other images for one"
                )


def unseen_pixels(tower: ImageTowerConfig) -> str | None:
    """Returns what a ViT does with images that its patches do not divide, and what to choose; None if they do."""
    if not isinstance(tower, ViTConfig) or not (rest := tower.image_size % tower.patch_size):
        return None
    below = tower.image_size - rest
    return (
        f"patches of {tower.patch_size} pixels do not divide images of {tower.image_size}: the last {rest} rows and "
        f"columns are not seen; choose an image size of {below} or {below + tower.patch_size} to use all pixels"
    )


def check_embeddings(
    loader: "Loader | Stream",
    task: "AnyTask",
    tower: Callable[[], str],
    text_tower: Callable[[], str],
) -> None:
    """Checks that stored embeddings are those of the locked towers, given by their fingerprints."""
    if not isinstance(loader, Loader):
        return
    sides = (
        ("image", "images", "embeddings", loader.stored, tower),
        ("text", "captions", "text-embeddings", loader.stored_texts, text_tower),
    )
    for side, inputs, flag, stored, fingerprint in sides:
        if stored is None:
            continue
        if side == "text" and isinstance(task.config, ClassificationConfig | CaptioningConfig):
            raise UserError(f"the model is trained on {inputs}; leave out --data.{flag}")
        if f"{side}_tower" in task.trained:
            raise UserError(f"a trainable {side} tower needs {inputs}; lock it, or leave out --data.{flag}")
        if isinstance(task.config, ClassificationConfig) and (task.config.mixup or task.config.mimo):
            raise UserError(
                "--task.mixup and --task.mimo put the pixels of images together; leave them out, or --data.embeddings"
            )
        if isinstance(task.config, CaptioningConfig) and not stored.recipe.num_tokens:
            raise UserError(
                f"a decoder reads tokens, and {stored.address} holds pooled embeddings, or is of an earlier version; "
                "embed again with --tokens into another folder"
            )
        stored.check_tower(fingerprint())
