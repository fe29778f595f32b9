"""``lit-het import`` and ``lit-het export``: conversion of runs from and to the formats of other libraries."""

import contextlib
import dataclasses
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from lit_het import parameters
from lit_het.checkpoints import rename, weights
from lit_het.checkpoints.big_vision.exporting import write_npz
from lit_het.checkpoints.huggingface.classifiers import write_classifier
from lit_het.checkpoints.huggingface.exporting import write_image_text
from lit_het.checkpoints.huggingface.tokenizer import read_settings
from lit_het.checkpoints.imported import Imported
from lit_het.checkpoints.native import checksums
from lit_het.checkpoints.native.saving import save_imported
from lit_het.configs.experiment import ExperimentConfig
from lit_het.console import Bar, message
from lit_het.data_pipelines import storage
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.labels import CaptionWords
from lit_het.data_pipelines.tokenizers import (
    HuggingFaceTokenizer,
    HuggingFaceTokenizerConfig,
    SentencePieceConfig,
    SentencePieceTokenizer,
    TensorFlowTextConfig,
    TokenizerConfig,
)
from lit_het.data_pipelines.transforms import Preprocessing
from lit_het.durations import Duration
from lit_het.errors import UserError
from lit_het.files import write_atomically
from lit_het.heads.contrastive import DeterministicContrastiveConfig
from lit_het.heads.deterministic import DeterministicConfig
from lit_het.losses.classification import SigmoidCrossEntropy
from lit_het.losses.contrastive import SigmoidLoss, SoftmaxLoss
from lit_het.runs import directory, image_processors, portable
from lit_het.runs.checks import unseen_pixels
from lit_het.runs.directory import checkpoint_dir, config_path, load_config
from lit_het.runs.model_card import write_card
from lit_het.runs.opening import Run, open_run
from lit_het.runs.publishing import push
from lit_het.runs.saved_calibration import copy_calibration
from lit_het.tasks.classification import ClassificationConfig, ClassificationTask
from lit_het.tasks.contrastive import ContrastiveConfig, ContrastiveTask
from lit_het.tasks.features import ImageTowerConfig
from lit_het.towers.resnet import ResNetConfig
from lit_het.towers.vit import ViTConfig
from lit_het.types import Params


@dataclasses.dataclass(frozen=True)
class ImportOptions:
    """Settings that override the source, or that it does not store; None takes the source's value.

    Attributes:
        image_size, patch_size: in pixels.
        image_pooling: of an image tower in a big_vision or V-MoE file, without class token and attention pooling.
        text_length: in tokens.
        text_pooling: pooling of a text tower in a big_vision file.
        num_selected, num_members: K and M of experts.
        tokenizer: file of the text tower's tokenizer: a SentencePiece model, a ``tokenizer.json``, or the ``vocab.txt``
            of a BERT in a big_vision file; None takes that beside the weights.
    """

    image_size: int | None = None
    patch_size: int | None = None
    image_pooling: weights.ImagePooling | None = None
    text_length: int | None = None
    text_pooling: weights.TextPooling | None = None
    num_selected: int | None = None
    num_members: int | None = None
    tokenizer: Path | None = None


def import_weights(source: str, run_dir: Path, options: ImportOptions) -> None:
    """Writes a run directory with the model of another library, to evaluate, fine-tune or lock it.

    Raises:
        UserError: the source cannot be read or has no image tower, or the directory holds a run already.
    """
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        what = "already holds a run" if config_path(run_dir).exists() else "is not an empty folder"
        raise UserError(f"{run_dir} {what}; choose another --to")
    if (folder := portable.find(source)) is not None:
        return _import_portable(folder, run_dir, options)
    config, params = _read(source, run_dir, options)
    with _partial(run_dir) as partial:
        info = {"locked_checksum": checksums.digest({}), "source": source}
        with Bar(f"writing {run_dir}", sum(array.nbytes for array in jax.tree.leaves(params)), "bytes") as bar:
            save_imported(checkpoint_dir(partial), params, info, bar.advance)
        directory.write(partial, config, config.tokenizer and config.tokenizer.model.read_bytes())
    message(f"{parameters.count(params):,} parameters of {source} in {run_dir}")


def open_imported(source: str, options: ImportOptions | None = None) -> Run:
    """Returns a model of another library, or of ``lit-het export``, as a run; its directory is the source.

    Raises:
        UserError: as `import_weights`.
    """
    if (folder := portable.find(source)) is not None:
        return open_run(folder)
    config, params = _read(source, Path(source), options or ImportOptions())
    tokenizer = config.tokenizer.build() if config.tokenizer else None
    return Run(Path(source), config, config.task.build(), params, tokenizer, step=0)


def _read(source: str, run_dir: Path, options: ImportOptions) -> tuple[ExperimentConfig, Params]:
    """Returns the configuration and the parameters of a model of another library."""
    experts = {name: getattr(options, name) for name in ("num_selected", "num_members")}
    experts = {name: value for name, value in experts.items() if value is not None}
    with _Download(source) as download:
        found = weights.open_weights(
            source,
            image_size=options.image_size,
            patch_size=options.patch_size,
            image_pooling=options.image_pooling,
            text_length=options.text_length,
            text_pooling=options.text_pooling,
            experts=experts,
            advance=download,
        )
    if options.text_pooling is not None and ".npz" not in source:
        raise UserError(f"{source} stores its text pooling (only big_vision files do not); leave out --text-pooling")
    pooling = found.image_tower and found.image_tower.pooling
    if options.image_pooling not in (None, pooling):
        raise UserError(f"{source} stores its pooling, {pooling!r}; leave out --image-pooling {options.image_pooling}")
    if pooling == "mean" and options.image_pooling is None:
        message(f"{source} does not store its pooling: 'mean' (gap); --image-pooling first reads pool type '0'")
    if experts and (found.image_tower is None or found.image_tower.encoder.experts is None):
        raise UserError(f"{source} holds no experts; leave out --{next(iter(experts)).replace('_', '-')}")
    task = _task_of(found, source)
    tokenizer = options.tokenizer or found.tokenizer
    image_size = task.image_tower.image_size
    preprocessing = _preprocessing(found, source, image_size, was_chosen=options.image_size is not None)
    config = ExperimentConfig(
        run_dir=run_dir,
        task=task,
        data=LoaderConfig((), image_size, preprocessing=preprocessing),
        length=Duration(1),
        tokenizer=_tokenizer(task, tokenizer) if tokenizer else None,
        calibration=None,
    )
    if isinstance(task, ContrastiveConfig) and not tokenizer:
        message(
            f"{source} has no tokenizer that lit-het reads: captions need one, import it again with --tokenizer FILE"
        )
    if remark := unseen_pixels(task.image_tower):
        message(remark)
    shapes = task.build().shapes
    if isinstance(task, ClassificationConfig) and found.num_classes is None:
        shapes = {"image_tower": shapes["image_tower"]}
    with Bar(f"reading {source}", parameters.count(shapes), "parameters") as bar:
        params = rename.load(found.arrays, found.parameter_sources, shapes, advance=bar.advance)
    return config, params


def _import_portable(folder: Path, run_dir: Path, options: ImportOptions) -> None:
    given = [name for name, value in dataclasses.asdict(options).items() if value is not None]
    if given:
        raise UserError(f"{folder} stores all of its settings; leave out --{given[0].replace('_', '-')}")
    run = open_run(folder)
    with _partial(run_dir) as partial:
        info = {"locked_checksum": checksums.digest({}), "source": str(folder)}
        save_imported(checkpoint_dir(partial), run.params, info)
        config = dataclasses.replace(run.config, run_dir=run_dir)
        directory.write(partial, config, None if run.tokenizer is None else run.tokenizer.model_bytes)
        copy_calibration(folder, partial, step=0)
    message(f"{parameters.count(run.params):,} parameters of {folder} in {run_dir}")


@contextlib.contextmanager
def _partial(run_dir: Path) -> Iterator[Path]:
    """Yields a temporary folder that is renamed to ``run_dir`` at the end, and removed after an error."""
    partial = run_dir.with_name(f"{run_dir.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        yield partial
        partial.replace(run_dir)
    except OSError as error:
        raise UserError(f"{run_dir} cannot be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """Settings of an export.

    Attributes:
        pretrained: current path of the run or file with the locked parameters, if it was moved.
        calibrated: whether to fold in the temperature of ``lit-het calibrate``, if there is one.
        push: repository ``owner/name`` of the Hugging Face Hub to upload a folder to; None uploads nothing.
        licence: an identifier for the model card, such as ``apache-2.0``; None for no licence.
    """

    pretrained: Path | None = None
    calibrated: bool = True
    push: str | None = None
    licence: str | None = None


def export(run_dir: Path, to: str, output: Path, options: ExportOptions = ExportOptions()) -> None:
    """Writes a run as a folder of this program or of Hugging Face, or as a big_vision file.

    The latter two have no noise: a HET-XL image-text model is exported without it. The temperature of a softmax loss is
    multiplied by that of ``lit-het calibrate``, if there is one and ``options.calibrated``.

    Raises:
        UserError: the run cannot be opened, has something that the format cannot express, or cannot be uploaded.
    """
    if to == "npz" and output.is_dir():
        raise UserError(f"{output} is a folder; name a file with --output, such as {output / 'model.npz'}")
    if to != "npz" and (output.is_file() or (output.is_dir() and any(output.iterdir()))):
        raise UserError(f"{output} is not an empty folder; choose another --output")
    is_classifier = isinstance(load_config(run_dir).task, ClassificationConfig)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        run = open_run(run_dir, options.pretrained)
        if to == "lit-het":
            portable.write(output, run.config, run.params, run.step, run_dir)
        else:
            write = _export_classifier if is_classifier else _export_contrastive
            write(run, to, output, calibrated=options.calibrated)
        if to != "npz":
            library = "lit-het" if to == "lit-het" else "transformers"
            card = write_card(run, options.push or output.name, licence=options.licence, library=library)
            write_atomically(output / "README.md", card)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error}") from error
    message(f"{run_dir} as {to} in {output}")
    if options.push is not None:
        push(output, options.push)


def _export_classifier(run: Run, to: str, output: Path, *, calibrated: bool) -> None:
    assert isinstance(run.task, ClassificationTask)
    tower, is_sigmoid = _vit(run.config.task.image_tower), isinstance(run.task.config.loss, SigmoidCrossEntropy)
    fitted = run.calibration.noiseless if calibrated and run.calibration is not None else None
    if fitted and (to == "npz" or is_sigmoid):
        message(f"the logits are exported as trained: the softmax of a classifier is calibrated by T = {fitted}")
    if to == "npz":
        write_npz(output, tower, None, run.params)
        return
    if "head" not in run.params:
        raise UserError("an imported image tower has no classes; export with --to npz or --to lit-het")
    temperature = float(run.task.temperature(run.params))
    if fitted and not is_sigmoid:
        temperature *= fitted.temperature
        message(f"the temperature is multiplied by {fitted} of lit-het calibrate; --uncalibrated leaves it as trained")
    processor = image_processors.write(run.config.data.preprocessing, tower.image_size)
    names = _class_names(run.config, run.task.config.num_classes)
    write_classifier(output, tower, run.params, temperature, names, processor, is_sigmoid=is_sigmoid)


def _class_names(config: ExperimentConfig, num_classes: int) -> tuple[str, ...]:
    """Returns the names of the classes, in order; none if their file is no longer where training read it."""
    labels, name = config.data.labels, "words.txt" if isinstance(config.data.labels, CaptionWords) else "classnames.txt"
    given = getattr(labels, "names", None) or getattr(labels, "vocabulary", None)
    beside = [folder / name for shard in config.data.shards for folder in (Path(shard), Path(shard).parent)]
    path = next((path for path in ([Path(given)] if given else beside) if path.is_file()), None)
    names = () if path is None else tuple(storage.read_lines(str(path)))
    if len(names) == num_classes:
        return names
    message(
        f"the classes are exported as LABEL_0, LABEL_1, ...: no {name} with their names is beside the training data"
    )
    return ()


def _export_contrastive(run: Run, to: str, output: Path, *, calibrated: bool) -> None:
    assert isinstance(run.task, ContrastiveTask)
    image, text = _vit(run.task.config.image_tower), run.task.config.text_tower
    params = {**run.params, "head": _exported_head(run, run.task, calibrated=calibrated)}
    if to == "npz":
        write_npz(output, image, text, params)
        return
    tokenizer = run.tokenizer
    if not isinstance(tokenizer, SentencePieceTokenizer | HuggingFaceTokenizer | None):
        raise UserError("transformers has no tokenizer with the ids of TensorFlow Text; export with --to lit-het")
    processor = image_processors.write(run.config.data.preprocessing, image.image_size)
    is_sigmoid = run.task.has_pair_probabilities
    for remark in write_image_text(output, image, text, params, tokenizer, processor, is_sigmoid=is_sigmoid):
        message(remark)


def _exported_head(run: Run, task: ContrastiveTask, *, calibrated: bool) -> Params:
    """Returns log τ and the bias, without the noise; τ is multiplied by the fitted temperature, with a message."""
    trained = run.params.get("head", {})  # a head without noise and with a fixed τ has no parameters
    learned = trained.get("temperature", {}).get("log_temperature")
    # The formats store log τ alone: one that is fixed or bounded is exported by its value.
    head = {"temperature": {"log_temperature": jnp.log(task.temperature(run.params)) if learned is None else learned}}
    head |= {name: value for name, value in trained.items() if name == "bias"}
    if not calibrated or run.calibration is None:
        return head
    fitted = run.calibration.noiseless
    if "bias" in head:
        # The sigmoid of a pair would need another bias with another temperature; T is of a softmax over candidates.
        message(f"exported as trained, without the fitted factor {fitted}: it is not that of a sigmoid with a bias")
        return head
    message(f"the temperature is multiplied by {fitted} of lit-het calibrate; --uncalibrated leaves it as trained")
    return {"temperature": {"log_temperature": head["temperature"]["log_temperature"] + math.log(fitted.temperature)}}


def _vit(tower: ImageTowerConfig) -> ViTConfig:
    if isinstance(tower, ResNetConfig):
        raise UserError("a ResNet cannot be exported; only a ViT can")
    return tower


def _task_of(found: Imported, source: str) -> ContrastiveConfig | ClassificationConfig:
    if found.image_tower is None:
        raise UserError(
            f"{source} holds only a text tower; name it as `weights` of a text tower in a configuration file"
        )
    if found.text_tower is None:
        head: Any = {} if found.num_classes is None else {"num_classes": found.num_classes}
        tower = dataclasses.replace(found.image_tower, members="apart")
        return ClassificationConfig(image_tower=tower, head=DeterministicConfig(), **head)
    return ContrastiveConfig(
        image_tower=found.image_tower,
        text_tower=found.text_tower,
        head=DeterministicContrastiveConfig(initial_bias=0.0 if found.has_bias else None),
        loss=SigmoidLoss() if found.has_bias else SoftmaxLoss(),
        locked=(),
    )


def _tokenizer(task: ContrastiveConfig | ClassificationConfig, model: Path) -> TokenizerConfig | None:
    """Returns the configuration of a text tower's tokenizer.

    Raises:
        UserError: the file is not a tokenizer, or its vocabulary is larger than the tower's.
    """
    if isinstance(task, ClassificationConfig):
        return None
    config = tokenizer_config(model, task.text_tower.length)
    size, most = config.build().vocabulary_size, task.text_tower.vocabulary_size
    if size > most:
        raise UserError(f"{model} has {size} tokens, the text tower {most}; give the tokenizer of this model")
    return config


def tokenizer_config(model: Path, length: int) -> TokenizerConfig:
    """Returns the tokenizer configuration for a file, by its suffix.

    Raises:
        UserError: the file should be a SentencePiece model and is not.
    """
    if model.suffix == ".json":
        return HuggingFaceTokenizerConfig(model, length)
    if model.suffix == ".txt":
        # Image-text models with a BERT are LiT's, which were trained without [SEP].
        return TensorFlowTextConfig(model, length, end_token=False)
    # Building checks the file before its settings are read.
    SentencePieceConfig(model, length).build()
    return SentencePieceConfig(model, length, **read_settings(model)._asdict())


def _preprocessing(found: Imported, source: str, image_size: int, *, was_chosen: bool) -> Preprocessing:
    """Returns the preprocessing of a source; differences from the source are printed to stderr."""
    if found.image_processor is None:
        return Preprocessing()
    reading = image_processors.read(found.image_processor, image_size)
    remarks = reading.remarks
    if reading.image_size != image_size and not was_chosen:
        remarks += (
            f"size: the processor makes {reading.image_size} pixels, the tower takes {image_size}; see --image-size",
        )
    for remark in remarks:
        message(f"preprocessing of {source}: {remark}")
    return reading.preprocessing


class _Download:
    """A progress bar that appears when the download starts."""

    def __init__(self, source: str):
        self.source = source
        self.bar: Bar | None = None

    def __enter__(self) -> "_Download":
        return self

    def __exit__(self, *error: Any) -> None:
        if self.bar:
            self.bar.__exit__(*error)

    def __call__(self, count: int, total: int) -> None:
        if self.bar is None:
            self.bar = Bar(f"downloading {self.source}", total, "bytes").__enter__()
        self.bar.advance(count)
