"""``lit-het add-noise``: a head with noise for a finished image-text model, whose towers stay as they are."""

import dataclasses
import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from lit_het.apps.embed import captions as caption_embedding
from lit_het.apps.embed import images
from lit_het.apps.embed.images import EmbedOptions
from lit_het.configs.experiment import ExperimentConfig, PretrainedConfig
from lit_het.configs.flags import with_flags
from lit_het.console import Bar, message
from lit_het.data_pipelines.labels import text_of
from lit_het.data_pipelines.shards.index import ShardIndex
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.portions import ALL, Portion
from lit_het.data_pipelines.shards.storage import Unreadable, content_or_raise
from lit_het.data_pipelines.shards.urls import absolute
from lit_het.data_pipelines.shards.writing import IMAGE, expand
from lit_het.data_pipelines.texts.captions import captions_in
from lit_het.data_pipelines.texts.captions_config import member_of
from lit_het.errors import UserError
from lit_het.files import write_atomically
from lit_het.heads.contrastive_config import ContrastiveHeadConfig, HetXLContrastiveConfig
from lit_het.heads.temperature_config import LogTemperature
from lit_het.models.calibration.fitting import check_fitted, fit_unless_done
from lit_het.models.calibration.seen_images import seen
from lit_het.models.calibration.split import LEAST_IMAGES, split_samples
from lit_het.models.opening import open_run
from lit_het.tasks.contrastive import ContrastiveConfig
from lit_het.training.cadence import Cadence
from lit_het.training.checks import check_run_dir, with_saved_rule
from lit_het.training.directory import checkpoint_dir, config_path, load_config, tokenizer_path
from lit_het.training.durations import Duration
from lit_het.training.optimizers_config import AdamW, Optimizer
from lit_het.training.schedules import Schedule
from lit_het.training.train import train_unless_done
from lit_het.weights.importing import ImportOptions, import_weights, require_no_options

LEAST_PAIRS = 1000
"""Of fewer pairs no noise is learned."""

# The towers of the model, which are locked.
_TOWERS = "(image|text)_tower/.*"
# A minute for embeddings of 256 numbers on two cores; not tuned. The head has the defaults that docs/noise.md chose.
_STEPS, _BATCH_SIZE, _LEARNING_RATE = 1000, 256, 3e-3
# Captions that are read before anything is embedded.
_SOME_CAPTIONS = 100
# Fields that mean nothing where nothing is trained.
_OF_TRAINING = ("length", "optimizer", "schedule", "average_decay", "cadence", "on_nonfinite", "log", "seed")


def add_noise(
    model: str,
    shards: str,
    output: Path,
    flags: Sequence[str] = (),
    *,
    captions: str = "txt",
    options: ImportOptions | None = None,
) -> None:
    """Trains a head with noise on the embeddings of a model, which are computed once, or fits one.

    The same call continues an interrupted one.

    Args:
        model: a run, or an address as of ``lit-het import``; its towers are locked.
        shards: a folder, pattern or list of image-text pairs.
        output: directory of the new run; weights that are imported, and the embeddings, are stored in it.
        flags: fields of the configuration, as those of ``lit-het train``.
        captions: the member with the captions.
        options: what weights of other libraries do not record; None where they record everything.
    """
    if ":/" in str(output):
        raise UserError(f"{output} is an address; give --output a local or mounted folder")
    count = _count(shards, captions)
    source = _model(model, output, options or ImportOptions())
    if source == output.resolve():
        raise UserError(f"{output} is the model itself; choose another --output")
    command = f"lit-het add-noise --model {source} --data {shards} --output {output}"
    config = with_flags(_config(source, shards, captions, output, count), flags, command)
    if config.run_dir != output:
        raise UserError(f"--run-dir {config.run_dir}: the run is written to --output; leave the flag out")
    if not isinstance(config.task, ContrastiveConfig):
        raise UserError("--task: the model is an image-text model; leave the flag out")
    head = config.task.head
    if not head.has_noise:
        raise UserError("--task.head deterministic has no noise; choose another head, or leave the flag out")
    # Before anything is embedded.
    if head.is_fitted:
        _check_untrained(flags)
        check_fitted(config)
        config = dataclasses.replace(config, length=Duration(0))
    config = _as_read_by(head, config)
    pairs = _opened(config)
    _check_captions(pairs)
    config = _calibrated_if_unseen(source, with_saved_rule(config), pairs)
    if config_path(output).exists():
        check_run_dir(config, resume=True, flag="--output")
    model_config = dataclasses.replace(load_config(source), data=config.data, tokenizer=config.tokenizer)
    towers = _as_read_by(head, model_config)
    if config.data.embeddings is not None:
        images.embed(source, towers, config.data.embeddings, EmbedOptions())
    if config.data.text_embeddings is not None:
        caption_embedding.embed_captions(source, towers, config.data.text_embeddings, EmbedOptions())
    if head.is_fitted:
        fit_unless_done(config)
    else:
        train_unless_done(config)
    message(f"next: lit-het classify IMAGE --checkpoint {output} --labels ...; lit-het report {output}")


def _as_read_by(head: ContrastiveHeadConfig, config: ExperimentConfig) -> ExperimentConfig:
    """Returns a configuration whose towers return what the head reads."""
    task: Any = config.task
    image, text = head.tower_of(task.image_tower), head.tower_of(task.text_tower)
    task = dataclasses.replace(task, head=head, image_tower=image, text_tower=text)
    return dataclasses.replace(config, task=task)


def _check_untrained(flags: Sequence[str]) -> None:
    for flag in flags:
        if flag.startswith("--") and re.split("[.=]", flag[2:])[0].replace("-", "_") in _OF_TRAINING:
            raise UserError(f"{flag.partition('=')[0]}: this --task.head trains nothing; leave the flag out")


def _count(shards: str, captions: str) -> int:
    """Returns the number of image-text pairs."""
    addresses, member = expand(shards), member_of(captions)
    with Bar("indexing", len(addresses), "shards") as bar:
        index = ShardIndex(addresses, [IMAGE, member], advance=bar.advance)
    faults = (fault for summary in index.summaries for fault in summary.faults)
    # A damaged shard rather than samples that lack a member.
    fault = min(faults, key=lambda fault: fault.is_missing_member, default=None)
    found = f" ({fault.example})" if fault else ""
    if not len(index):
        way_out = "name the member with --captions" if fault and fault.is_missing_member else "give shards of pairs"
        raise UserError(f"{shards}: no sample has an image and a .{member}{found}; {way_out}")
    if len(index) < LEAST_PAIRS:
        raise UserError(
            f"{shards} has {len(index):,} pairs of an image and a .{member}{found}, too few to learn noise from; "
            f"give {LEAST_PAIRS:,} or more, or calibrate the model with lit-het calibrate"
        )
    return len(index)


def _opened(config: ExperimentConfig) -> Loader:
    """Returns the loader of the pairs, as yet without embeddings."""
    assert config.tokenizer is not None, "checked"
    data = dataclasses.replace(config.data.without_embeddings(), suspects=None, exclude=())
    return Loader(data, config.tokenizer.build())


def _check_captions(loader: Loader) -> None:
    """Checks that one of some captions, evenly spread, can be read: a wrong --captions has none."""
    data, pairs, problem = loader.config, loader.index, ""
    numbers = range(0, len(pairs), -(-len(pairs) // _SOME_CAPTIONS))
    for number, (content,) in zip(numbers, pairs.read(numbers, [member_of(data.captions)]), strict=True):
        try:
            captions_in(text_of(content_or_raise(content)), data.captions, data.caption_unit)
            return
        except Unreadable as error:
            problem = problem or f"{pairs.shard(number)}: key {pairs.key(number)}: {error}"
    raise UserError(f"none of {len(numbers)} captions can be read: {problem}; name their place with --captions")


def _calibrated_if_unseen(source: Path, config: ExperimentConfig, loader: Loader) -> ExperimentConfig:
    """Returns the configuration, with no calibration if the model was trained on the pairs that are held out for it."""
    held_out = split_samples(config, loader)[1].calibration
    found = None if held_out is None else seen(source, loader.with_portion(held_out))
    if found is None:
        return config
    message(
        f"not calibrated, as {found.model} was trained on pairs of {found.shard}; give others afterwards: lit-het "
        f"calibrate {config.run_dir} --data OTHERS"
    )
    return dataclasses.replace(config, calibration=None)


def _model(model: str, output: Path, options: ImportOptions) -> Path:
    """Returns the run of the model; weights of other libraries are imported into the output folder."""
    if checkpoint_dir(Path(model)).is_dir():
        require_no_options(Path(model), options)
        return Path(model).resolve()
    imported, record = output / "model", output / "model.json"
    asked = {"model": model, **dataclasses.asdict(options)}
    asked = json.loads(json.dumps(asked, default=str))
    if not imported.exists():
        output.mkdir(parents=True, exist_ok=True)
        write_atomically(record, json.dumps(asked, indent=1) + "\n")  # first: an import may be killed
        import_weights(model, imported, options)
        try:
            _check_model(load_config(imported), model)
        except UserError:
            shutil.rmtree(imported)  # so that the same command with other flags imports it again
            raise
    elif not record.is_file() or json.loads(record.read_text("utf-8")) != asked:
        raise UserError(f"{imported} was imported from another --model, or otherwise; choose another --output")
    return imported.resolve()


def _check_model(model: ExperimentConfig, name: str) -> None:
    if not model.task.embeds_texts:
        raise UserError(
            f"{name} has no text tower; noise is added to image-text models, see lit_het.sklearn for others"
        )
    if model.task.text_members > 1:
        raise UserError(f"{name} has {model.task.text_members} text towers; noise is added to models with one")
    if model.task.head.has_noise:
        raise UserError(f"{name} has noise already; give a model with a deterministic head")
    if model.tokenizer is None:
        raise UserError(f"{name} has no tokenizer; import it with --tokenizer FILE")


def _config(source: Path, shards: str, captions: str, output: Path, count: int) -> ExperimentConfig:
    """Returns the configuration of the new run."""
    model = load_config(source)
    _check_model(model, str(source))
    assert model.tokenizer is not None, "checked"
    run = open_run(source)
    # τ and the bias start where the model's training left them.
    bias = run.params.get("head", {}).get("bias")
    head = HetXLContrastiveConfig(
        temperature=LogTemperature(initial=float(run.task.temperature(run.params))),
        initial_bias=None if bias is None else float(bias),
    )
    data = dataclasses.replace(
        model.data,
        shards=(absolute(shards),),
        mixture=(),
        labels=None,
        portion=ALL,
        suspects=None,
        exclude=(),
        stream=None,
        crop=None,
        augmentations=(),
        captions=captions,
        prompt=None,
        batch_size=max(1, min(_BATCH_SIZE, count // 4) // jax.device_count()) * jax.device_count(),
        embeddings=str((output / "embeddings" / "images").resolve()),
        text_embeddings=str((output / "embeddings" / "texts").resolve()),
    )
    task = dataclasses.replace(model.task.bare(), head=head, locked=(_TOWERS,), microbatches=1)
    return ExperimentConfig(
        run_dir=output,
        task=task,
        data=data,
        length=Duration(_STEPS),
        tokenizer=dataclasses.replace(model.tokenizer, model=tokenizer_path(source)),
        pretrained=PretrainedConfig(run=source, pattern=_TOWERS),
        optimizer=Optimizer(AdamW(second_decay=0.95), weight_decay=2e-6),
        schedule=Schedule(learning_rate=_LEARNING_RATE, warmup=Duration(5, "percent")),
        mesh=model.mesh,
        cadence=Cadence(log_steps=20, save_steps=500),
        # 2 %, or where these are few 13 %: of the least pairs, as many as a hash needs.
        calibration="auto" if count * 2 // 100 >= LEAST_IMAGES else Portion(87, by=model.calibration_by),
        calibration_by=model.calibration_by,  # pairs that the model held out are held out again
    )
