"""``lit-het import``: runs from the weights of other libraries."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from lit_het import parameters
from lit_het.configs.experiment import ExperimentConfig
from lit_het.console import Bar, message
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.images.transforms import Preprocessing
from lit_het.data_pipelines.texts import auto_tokenizer
from lit_het.data_pipelines.texts.tokenizers import Tokenizer
from lit_het.data_pipelines.texts.tokenizers_config import (
    HuggingFaceTokenizerConfig,
    SentencePieceConfig,
    TensorFlowTextConfig,
    TokenizerConfig,
    TransformersTokenizerConfig,
)
from lit_het.errors import UserError
from lit_het.files import completed_folder
from lit_het.heads.classification_config import DeterministicConfig
from lit_het.heads.contrastive_config import DeterministicContrastiveConfig, GaussianContrastiveConfig
from lit_het.losses.classification_config import SigmoidCrossEntropy
from lit_het.losses.contrastive import SigmoidLoss, SoftmaxLoss
from lit_het.models.calibration.saved import copy_calibration
from lit_het.models.calibration.seen_names import copy_familiarity
from lit_het.models.opening import Run, open_run
from lit_het.tasks.classification import ClassificationConfig
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.tasks.options import check_padding
from lit_het.towers.image_config import ImageTowerConfig
from lit_het.training import directory
from lit_het.training.directory import checkpoint_dir, config_path
from lit_het.training.durations import Duration
from lit_het.types import Params
from lit_het.weights import formats, portable, rename
from lit_het.weights.huggingface import image_processors
from lit_het.weights.huggingface.tokenizer import (
    SENTENCEPIECE_FILES,
    TOKENIZER_JSON,
    folds_case,
    padding_token,
    read_settings,
)
from lit_het.weights.imported import Imported
from lit_het.weights.native import checksums
from lit_het.weights.native.saving import save_imported
from lit_het.weights.sources import fetch


@dataclasses.dataclass(frozen=True)
class ImportOptions:
    """Settings that override the source, or that it does not store; None takes the source's value.

    Attributes:
        image_size, patch_size: in pixels.
        image_pooling: of an image tower in a big_vision or V-MoE file, without class token and attention pooling.
        text_length: in tokens.
        text_pooling: pooling of a text tower in a big_vision file, or of a BERT.
        num_selected, num_members: K and M of experts.
        tokenizer: file of the text tower's tokenizer: a SentencePiece model, a ``tokenizer.json``, or the ``vocab.txt``
            of a BERT in a big_vision file; or a folder of transformers, also ``hf://owner/model``; None takes that
            beside the weights.
    """

    image_size: int | None = None
    patch_size: int | None = None
    image_pooling: formats.ImagePooling | None = None
    text_length: int | None = None
    text_pooling: formats.TextPooling | None = None
    num_selected: int | None = None
    num_members: int | None = None
    tokenizer: Path | str | None = None


def import_weights(source: str, run_dir: Path, options: ImportOptions) -> None:
    """Writes a run directory with the model of another library, to evaluate, fine-tune or lock it."""
    check_free(run_dir, "--to")
    if (folder := portable.find(source)) is not None:
        return _import_portable(folder, run_dir, options)
    config, params = _read(source, run_dir, options)
    write_run(run_dir, config, params, config.tokenizer and config.tokenizer.build(), source)
    message(f"{parameters.count(params):,} parameters of {source} in {run_dir}")


def check_free(run_dir: Path, flag: str = "--output") -> None:
    """Raises a `UserError` if a run cannot be written into a folder because something is there."""
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        what = "already holds a run" if config_path(run_dir).exists() else "is not an empty folder"
        raise UserError(f"{run_dir} {what}; choose another {flag}")


def write_run(
    run_dir: Path,
    config: ExperimentConfig,
    params: Params,
    tokenizer: Tokenizer | None,
    source: str,
    origin: str | None = None,
    merged: Sequence[Path] = (),
) -> None:
    """Writes a run that holds all of its parameters and was not trained here.

    Args:
        run_dir: its folder.
        config: its configuration.
        params: of all parts.
        tokenizer: of captions; None without.
        source: where the parameters come from.
        origin: the digest of the towers that they started from; None of a model that is a start itself.
        merged: the runs whose mean the parameters are, in whose training images `lit_het.models.origins` looks.
    """
    with _partial(run_dir) as partial:
        info = {"locked_checksum": checksums.digest({}), "source": source, "origin": origin}
        if merged:
            info["merged"] = [str(one.resolve()) for one in merged]
        with Bar(f"writing {run_dir}", sum(array.nbytes for array in jax.tree.leaves(params)), "bytes") as bar:
            save_imported(checkpoint_dir(partial), params, info, bar.advance)
        directory.write(partial, config, None if tokenizer is None else tokenizer.model_bytes)


def open_imported(source: str, options: ImportOptions | None = None) -> Run:
    """Returns a model of another library, or of ``lit-het export``, as a run; its directory is the source."""
    if (folder := portable.find(source)) is not None:
        require_no_options(folder, options or ImportOptions())
        return open_run(folder)
    config, params = _read(source, Path(source), options or ImportOptions())
    tokenizer = config.tokenizer.build() if config.tokenizer else None
    return Run(Path(source), config, config.task.build(), params, tokenizer, step=0)


def _read(source: str, run_dir: Path, options: ImportOptions) -> tuple[ExperimentConfig, Params]:
    """Returns the configuration and the parameters of a model of another library."""
    names = ("num_selected", "num_members")
    experts = {name: value for name in names if (value := getattr(options, name)) is not None}
    with _Download(source) as download:
        found = formats.open_weights(
            source,
            image_size=options.image_size,
            patch_size=options.patch_size,
            image_pooling=options.image_pooling,
            text_length=options.text_length,
            text_pooling=options.text_pooling,
            experts=experts,
            advance=download,
        )
    if options.text_length is not None and found.text_tower is None:
        raise UserError(f"{source} holds no text tower; leave out --text-length {options.text_length}")
    if options.text_pooling not in (None, found.text_tower and found.text_tower.pooling):
        raise UserError(f"{source} stores its text pooling; leave out --text-pooling {options.text_pooling}")
    pooling = found.image_tower and found.image_tower.pooling
    if options.image_pooling not in (None, pooling):
        raise UserError(f"{source} stores its pooling, {pooling!r}; leave out --image-pooling {options.image_pooling}")
    if pooling == "mean" and options.image_pooling is None:
        message(f"{source} does not store its pooling: 'mean' (gap); --image-pooling first reads pool type '0'")
    if experts and not any(tower and tower.experts for tower in (found.image_tower, found.text_tower)):
        raise UserError(f"{source} holds no experts; leave out --{next(iter(experts)).replace('_', '-')}")
    task = _task_of(found, source)
    tokenizer = _tokenizer_path(str(options.tokenizer)) if options.tokenizer else found.tokenizer
    image_size, patches = task.image_tower.image_size, task.image_tower.patches
    if patches is not None and options.image_size is not None:
        raise UserError(f"{source} takes {patches}, of images of any shape; leave out --image-size")
    preprocessing = _preprocessing(found, source, task.image_tower, was_chosen=options.image_size is not None)
    config = ExperimentConfig(
        run_dir=run_dir,
        task=task,
        data=LoaderConfig((), image_size, preprocessing=preprocessing),
        length=Duration(0),
        tokenizer=_tokenizer(task, tokenizer, found.tokenizer_fields) if tokenizer else None,
        calibration=None,
    )
    if task.embeds_texts and not tokenizer:
        message(
            f"{source} has no tokenizer that lit-het reads: captions need one, import it again with --tokenizer FILE"
        )
    if remark := task.image_tower.unseen_pixels():
        message(remark)
    shapes = task.build().shapes
    if not task.embeds_texts and found.num_classes is None:
        shapes = {"image_tower": shapes["image_tower"]}
    with Bar(f"reading {source}", parameters.count(shapes), "parameters") as bar:
        params = rename.load(found.arrays, found.parameter_sources, shapes, advance=bar.advance)
    return config, params


def _import_portable(folder: Path, run_dir: Path, options: ImportOptions) -> None:
    require_no_options(folder, options)
    run = open_run(folder)
    with _partial(run_dir) as partial:
        info = {"locked_checksum": checksums.digest({}), "source": str(folder), "origin": portable.origin(folder)}
        save_imported(checkpoint_dir(partial), run.params, info)
        config = dataclasses.replace(run.config, run_dir=run_dir)
        directory.write(partial, config, None if run.tokenizer is None else run.tokenizer.model_bytes)
        copy_calibration(folder, partial, step=0)
        copy_familiarity(folder, partial, None)
    message(f"{parameters.count(run.params):,} parameters of {folder} in {run_dir}")


def require_no_options(folder: Path, options: ImportOptions) -> None:
    """Raises a `UserError` if an option is set for a model that records all of its settings."""
    given = [name for name, value in dataclasses.asdict(options).items() if value is not None]
    if given:
        raise UserError(f"{folder} stores all of its settings; leave out --{given[0].replace('_', '-')}")


@contextlib.contextmanager
def _partial(run_dir: Path) -> Iterator[Path]:
    """Yields a temporary folder that becomes ``run_dir`` at the end."""
    try:
        with completed_folder(run_dir) as partial:
            yield partial
    except OSError as error:
        raise UserError(f"{run_dir} cannot be written: {error}") from error


def _task_of(found: Imported, source: str) -> ContrastiveConfig | ClassificationConfig:
    if found.image_tower is None:
        raise UserError(
            f"{source} holds only a text tower; name it as `weights` of a text tower in a configuration file"
        )
    if found.text_tower is None:
        head: Any = {} if found.num_classes is None else {"num_classes": found.num_classes}
        if found.has_several_labels:
            head["loss"] = SigmoidCrossEntropy()
        tower = found.image_tower
        if tower.num_members > 1:
            tower = dataclasses.replace(tower, members="apart")
        return ClassificationConfig(image_tower=tower, head=DeterministicConfig(), **head)
    bias = 0.0 if found.has_bias else None
    is_gaussian = found.text_tower.has_variances
    return ContrastiveConfig(
        image_tower=found.image_tower,
        text_tower=found.text_tower,
        head=GaussianContrastiveConfig(initial_bias=bias, variances="towers")
        if is_gaussian
        else DeterministicContrastiveConfig(initial_bias=bias),
        loss=SigmoidLoss() if found.has_bias else SoftmaxLoss(),
        locked=(),
    )


def _tokenizer(
    task: ContrastiveConfig | ClassificationConfig, model: Path, fields: Mapping[str, Any]
) -> TokenizerConfig | None:
    """Returns the configuration of a text tower's tokenizer, with fields that its file does not record."""
    if (tower := task.text_tower) is None:
        return None
    config = tokenizer_config(model, tower.length)
    if missing := [name for name in fields if not hasattr(config, name)]:
        raise UserError(f"{model} has no {missing[0]}, which the model needs; give its SentencePiece model")
    config = dataclasses.replace(config, **fields)
    built = config.build()
    size, most = built.vocabulary_size, tower.vocabulary_size
    if size > most:
        raise UserError(f"{model} has {size} tokens, the text tower {most}; give the tokenizer of this model")
    check_padding(tower, built)
    return config


def _tokenizer_path(address: str) -> Path:
    """Returns the file of a tokenizer, or its folder where it has none of the files that are read without transformers.

    Args:
        address: of a file, or of a folder of transformers; local, or of fsspec such as ``hf://owner/model``.
    """
    if "://" not in address:
        place = Path(address)
    else:
        place = fetch(address, () if Path(address).name in auto_tokenizer.FILES else auto_tokenizer.FILES)
    known = (TOKENIZER_JSON, *SENTENCEPIECE_FILES)
    return next((place / name for name in known if (place / name).is_file()), place)


def tokenizer_config(model: Path, length: int) -> TokenizerConfig:
    """Returns the tokenizer configuration for a file, by its suffix, or for a folder of transformers."""
    if model.is_dir():
        return TransformersTokenizerConfig(model, length)
    if model.suffix == ".json":
        config = HuggingFaceTokenizerConfig(model, length, fold_case=folds_case(model))
        padding = padding_token(model)
        return config if padding is None else dataclasses.replace(config, padding_id=config.build().id_of(padding))
    if model.suffix == ".txt":
        # Image-text models with a BERT are LiT's, which were trained without [SEP].
        return TensorFlowTextConfig(model, length, end_token=False)
    # Building checks the file before its settings are read.
    SentencePieceConfig(model, length).build()
    return SentencePieceConfig(model, length, **read_settings(model)._asdict())


def _preprocessing(found: Imported, source: str, tower: ImageTowerConfig, *, was_chosen: bool) -> Preprocessing:
    """Returns the preprocessing of a source; differences from the source are printed to stderr."""
    if found.image_processor is None:
        return Preprocessing(transparency="dropped", patches=tower.patches)  # TensorFlow decodes three channels
    image_size = tower.image_size
    reading = image_processors.read(found.image_processor, image_size, tower.patches)
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
