"""What `lit-het train` refuses before it begins."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lit_het.runs.directory import config_path, load_config
from lit_het.configs import experiment
from lit_het.configs.experiment import ExperimentConfig
from lit_het.data_pipelines import storage
from lit_het.data_pipelines.loader import Loader
from lit_het.data_pipelines.stream import Stream
from lit_het.data_pipelines.tokenizers import Tokenizer
from lit_het.errors import UserError
from lit_het.tasks.classification import ClassificationConfig, ClassificationTask
from lit_het.tasks.contrastive import ContrastiveConfig, ContrastiveTask

# Fields that a resumed run may change: they alter neither the model nor the sequence of batches, beyond rounding and
# how experts group what they see.
CHANGEABLE_FIELDS = (
    "run_dir",
    "mesh",
    "cadence",
    "on_nonfinite",
    "evaluations",
    "data.threads",
    "data.prefetch_batches",
    "data.max_bad_fraction",
    "data.slow_read_seconds",
    "data.stuck_read_seconds",
    "data.embeddings",
    "pretrained.run",
    "task.image_tower.weights",
    "task.text_tower.weights",
    "task.image_tower.encoder.remat",
    "task.image_tower.encoder.unrolled",
    "task.text_tower.encoder.remat",
    "task.text_tower.encoder.unrolled",
    "task.loss.form",
    "task.loss.block_size",
    "task.microbatches",
)


def check_commands(config: ExperimentConfig, path: Path, flags: Sequence[str]) -> None:
    """Refuses shell commands in a configuration that was read from JSON, which others may have written.

    Args:
        config: with the fields that flags have changed.
        path: of the JSON.
        flags: as the user typed them; what stands there is the user's own word.
    """
    typed = {*flags, *(flag.partition("=")[2] for flag in flags)}
    for field, text in _texts(experiment.to_dict(config), ""):
        if storage.is_pipe(text) and text not in typed:
            raise UserError(
                f"{path}: {field} is the shell command {storage.shortened(text)}; run it with --allow-commands if you "
                f"know who wrote it, or replace it with --{field.partition('[')[0].replace('_', '-')}"
            )


def _texts(value: Any, field: str) -> Iterator[tuple[str, str]]:
    """Yields each text inside a configuration of JSON values, and its field."""
    if isinstance(value, str):
        yield field, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts(inner, f"{field}.{name}" if field else str(name))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from _texts(inner, f"{field}[{number}]")


def check_run_dir(config: ExperimentConfig, resume: bool) -> None:
    """Refuses to write over another run, and to resume with a configuration that would train another one."""
    path = config_path(config.run_dir)
    if config.run_dir.exists() and not config.run_dir.is_dir():
        raise UserError(f"{config.run_dir} is a file; choose another --run-dir")
    if not path.exists():
        if resume:
            raise UserError(f"{config.run_dir} holds no run to resume; leave out --resume to start one")
        return
    if not resume:
        raise UserError(f"{config.run_dir} already holds a run; go on with --resume or choose another --run-dir")
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
            "use the same values or another --run-dir"
        )


def check_data(config: ExperimentConfig, loader: Loader | Stream, tokenizer: Tokenizer | None) -> None:
    """Refuses data that does not fit the model, before anything is compiled."""
    task = config.task
    if config.data.image_size != task.image_tower.image_size:
        raise UserError(
            f"--data.image-size {config.data.image_size} differs from --task.image-tower.image-size "
            f"{task.image_tower.image_size}; make them equal"
        )
    match task:
        case ClassificationConfig():
            if loader.num_classes != task.num_classes:
                raise UserError(
                    f"the data has {loader.num_classes or 'no'} classes and the task {task.num_classes}; "
                    "set --task.num-classes, or `data.labels` in the configuration file"
                )
        case ContrastiveConfig(text_tower=text):
            if tokenizer is None:
                raise UserError("a contrastive task needs captions; name a `tokenizer` in the configuration file")
            if tokenizer.length != text.length or tokenizer.vocabulary_size > text.vocabulary_size:
                raise UserError(
                    f"the tokenizer yields {tokenizer.length} tokens of {tokenizer.vocabulary_size} kinds, the text "
                    f"tower takes {text.length} of {text.vocabulary_size}; set --tokenizer.length and "
                    "--task.text-tower.length, or --task.text-tower.vocabulary-size"
                )


def check_embeddings(
    loader: Loader | Stream, task: ContrastiveTask | ClassificationTask, tower: Callable[[], str]
) -> None:
    """Refuses stored embeddings that are not what the image tower would make."""
    if isinstance(loader, Stream) or loader.stored is None:
        return
    if not isinstance(task, ContrastiveTask):
        raise UserError("a classifier is trained on images; leave out --data.embeddings")
    if "image_tower" in task.trained:
        raise UserError("an image tower that is trained needs images; lock it, or leave out --data.embeddings")
    loader.stored.check_tower(tower())
