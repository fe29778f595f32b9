"""``lit-het export``: runs in the formats of other libraries, and as folders of this one."""

import dataclasses
import math
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from lit_het import arguments
from lit_het.calibrations import Calibrated, Calibration, FittedTemperature
from lit_het.console import message
from lit_het.data_pipelines.labels_config import CaptionWords
from lit_het.data_pipelines.shards import storage
from lit_het.data_pipelines.texts.tokenizers import HuggingFaceTokenizer, SentencePieceTokenizer
from lit_het.errors import UserError
from lit_het.files import write_atomically
from lit_het.losses.classification_config import SigmoidCrossEntropy
from lit_het.models import origins
from lit_het.models.opening import Run, open_run
from lit_het.models.writer import writable_tokens
from lit_het.towers.decoder_config import START_TOKEN
from lit_het.towers.image_config import ImageTowerConfig, ResNetConfig, ViTConfig
from lit_het.types import Params
from lit_het.weights import portable
from lit_het.weights.big_vision.exporting import write_npz
from lit_het.weights.cards import TRANSPARENT, WITHOUT_NOISE, write_card
from lit_het.weights.huggingface import image_processors
from lit_het.weights.publishing import push

_ALL_MEMBERS = ("lit-het", "onnx")
_MULTIPLIED = "the temperature is multiplied by {} of lit-het calibrate; --uncalibrated leaves it as trained"


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """Settings of an export.

    Attributes:
        pretrained: current path of the run or file with the locked parameters, if it was moved.
        calibrated: whether to fold in the temperature of ``lit-het calibrate``, if there is one.
        push: repository ``owner/name`` of the Hugging Face Hub to upload a folder to; None uploads nothing.
        licence: an identifier for the model card, such as ``apache-2.0``; None for no licence.
        member: number of the one to write, of several members of the text tower; None for all, or where a format holds
            one text tower, for the first.
    """

    pretrained: Path | None = None
    calibrated: Calibrated = True
    push: str | None = None
    licence: str | None = None
    member: int | None = None


def export(run_dir: Path, to: str, output: Path, options: ExportOptions = ExportOptions()) -> None:
    """Writes a run as a folder of this program, of ONNX files or of Hugging Face, or as a big_vision file.

    The latter two have no noise: a HET-XL image-text model or decoder is exported without it. The temperature of a
    softmax loss is multiplied by that of ``lit-het calibrate``, if there is one and ``options.calibrated``.
    """
    if to == "npz" and output.is_dir():
        raise UserError(f"{output} is a folder; name a file with --output, such as {output / 'model.npz'}")
    if to != "npz":
        require_empty(output)
    try:
        run = _of_member(open_run(run_dir, options.pretrained), to, options)
        task = run.config.task
        left_out = set(run.params) - {"image_tower", "text_tower", "head"}
        if task.embeds_texts and left_out and to != "lit-het":
            message(f"--to {to} leaves out {' and '.join(sorted(left_out))}; --to lit-het exports all")
        if to not in task.exports:
            what = task.summary[0].lower() + task.summary[1:]
            raise UserError(f"--to {to} does not write {what}; export with --to {' or --to '.join(task.exports)}")
        calibration = run.applied(options.calibrated)
        if to == "lit-het" and not isinstance(options.calibrated, bool):
            raise UserError("--to lit-het holds the temperatures of all names; give --prior where the folder is used")
        output.parent.mkdir(parents=True, exist_ok=True)
        name = options.push or output.name
        if to == "lit-het":
            write_portable(run, output, name, options.licence)
        elif to == "onnx":
            from lit_het.weights.onnx import folder as onnx_folder  # needs an extra

            names = () if task.embeds_texts else _class_names(run)
            onnx_folder.write(run, output, names, calibration)
        elif task.writes_text:
            _export_decoder(run, output, calibration)
        else:
            write = _export_contrastive if task.embeds_texts else _export_classifier
            write(run, to, output, calibration)
        if library := {"huggingface": "transformers", "onnx": "onnx"}.get(to):
            write_atomically(output / "README.md", write_card(run, name, licence=options.licence, library=library))
        if to == "huggingface" and run.config.data.preprocessing.transparency == "white":
            message(TRANSPARENT)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error}") from error
    message(f"{run_dir} as {to} in {output}")
    if options.push is not None:
        push(output, options.push, f"; the export is complete in {output}")


def _of_member(run: Run, to: str, options: ExportOptions) -> Run:
    """Returns the run, or one of its members where a format holds one text tower, with a message."""
    count = run.task.num_members
    if to in _ALL_MEMBERS or count == 1:
        if options.member is not None:
            where = f"--to {to} holds all members" if count > 1 else f"{run.run_dir} has no members of its text tower"
            raise UserError(f"--member {options.member}: {where}; leave it out")
        return run
    if not isinstance(options.calibrated, bool):
        raise UserError(f"--to {to} holds one member, and --prior is of all together; export with --to lit-het or onnx")
    alone = run.alone(options.member or 0)
    message(
        f"--to {to} holds one text tower: member {alone.member} of {count} (--member), as trained; the others and what "
        "was fitted to all together are left out"
    )
    return alone


def write_portable(run: Run, folder: Path, name: str, licence: str | None) -> None:
    """Writes a run to a folder that `lit_het.load` and ``lit-het import`` open, with noise and calibration.

    Args:
        run: the run.
        folder: empty, or not there yet.
        name: title of the model card.
        licence: for the card, such as ``apache-2.0``; None for none.
    """
    arguments.instance(licence, "licence", str | None, "a text or None")
    tokenizer = None if run.tokenizer is None else run.tokenizer.model_bytes
    portable.write(
        folder, run.config, run.params, run.step, run.run_dir, tokenizer, run.data_digest, origins.recorded(run.run_dir)
    )
    write_atomically(folder / "README.md", write_card(run, name, licence=licence, library="lit-het"))


def require_empty(folder: Path) -> None:
    """Checks that a folder to write is empty, or not there yet."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise UserError(f"{folder} is not an empty folder; choose another")


def _export_classifier(run: Run, to: str, output: Path, calibration: Calibration | None) -> None:
    tower, is_sigmoid = _vit(run.task.config.image_tower), isinstance(run.task.config.loss, SigmoidCrossEntropy)
    if run.task.config.num_heads > 1:
        raise UserError(f"--to {to} has classifiers with one head; export with --to lit-het")
    if not (get_logits := run.task.config.head.get_logits).is_linear:
        raise UserError(
            f"--to {to} has classifiers of one dense layer, not {type(get_logits).__name__}; export with --to lit-het"
        )
    fitted = None if calibration is None else calibration.noiseless
    if fitted and (to == "npz" or is_sigmoid):
        message(f"the logits are exported as trained: the softmax of a classifier is calibrated by T = {fitted}")
    if to == "npz":
        write_npz(output, tower, None, run.params)
        return
    if "head" not in run.params:
        raise UserError("an imported image tower has no classes; export with --to npz or --to lit-het")
    if run.task.config.head.has_noise:
        raise UserError("transformers has classifiers of one dense layer without noise only; export with --to lit-het")
    temperature = float(run.task.temperature(run.params))
    if fitted and not is_sigmoid:
        temperature *= fitted.temperature
        message(_MULTIPLIED.format(fitted))
    processor = image_processors.write(run.config.data.preprocessing, tower.image_size)
    names = _class_names(run)
    from lit_het.weights.huggingface.classifiers import write_classifier  # transformers takes a second to import

    write_classifier(output, tower, run.params, temperature, names, processor, is_sigmoid=is_sigmoid)


def _class_names(run: Run) -> tuple[str, ...]:
    """Returns the names of the classes, in order; none if their file is no longer where training read it."""
    config, labels = run.config, run.config.data.labels
    name = "words.txt" if isinstance(labels, CaptionWords) else "classnames.txt"
    given = getattr(labels, "names", None) or getattr(labels, "vocabulary", None)
    beside = [folder / name for shard in config.data.shards for folder in (Path(shard), Path(shard).parent)]
    path = next((path for path in ([Path(given)] if given else beside) if path.is_file()), None)
    names = () if path is None else tuple(storage.read_lines(str(path)))
    if len(names) == run.task.config.num_classes:
        return names
    message(f"the classes are exported without names: no {name} is beside the training data")
    return ()


def _export_contrastive(run: Run, to: str, output: Path, calibration: Calibration | None) -> None:
    if run.task.config.head.text_variances is not None:
        raise UserError(
            f"--to {to} has no variances, which Gaussian embeddings are compared by; export with --to lit-het"
        )
    image, text = _vit(run.task.config.image_tower), run.task.config.text_tower
    towers = {name: run.params[name] for name in ("image_tower", "text_tower")}
    params = {**towers, "head": _exported_head(run, calibration)}
    if to == "npz":
        write_npz(output, image, text, params)
        return
    tokenizer = run.tokenizer
    if not isinstance(tokenizer, SentencePieceTokenizer | HuggingFaceTokenizer | None):
        raise UserError("only SentencePiece and tokenizer.json are written for transformers; export with --to lit-het")
    processor = image_processors.write(run.config.data.preprocessing, image.image_size)
    is_sigmoid = run.config.task.loss.has_class_probabilities
    from lit_het.weights.huggingface.exporting import write_image_text  # transformers takes a second to import

    for remark in write_image_text(output, image, text, params, tokenizer, processor, is_sigmoid=is_sigmoid):
        message(remark)


def _export_decoder(run: Run, output: Path, calibration: Calibration | None) -> None:
    task, tokenizer = run.task, run.tokenizer
    tower, decoder = task.config.image_tower, task.config.decoder
    assert isinstance(tokenizer, SentencePieceTokenizer), "checked in training"
    unwritten = np.flatnonzero(~writable_tokens(decoder.vocabulary_size, tokenizer))
    processor = image_processors.write(run.config.data.preprocessing, tower.image_size)
    temperature = float(task.temperature(run.params))
    if calibration is not None:
        fitted = calibration.noiseless
        temperature *= fitted.temperature
        message(_MULTIPLIED.format(fitted))
    # transformers takes a second to import
    from lit_het.weights.huggingface.decoders import SpecialTokens, write_image_decoder

    special = SpecialTokens(START_TOKEN, tokenizer.end_id, tokenizer.padding_id, tuple(unwritten.tolist()))
    write_image_decoder(output, tower, decoder, run.params, temperature, tokenizer, special, processor)
    if task.config.head.has_noise:
        message(WITHOUT_NOISE)


def _exported_head(run: Run, calibration: Calibration | None) -> Params:
    """Returns log τ and the bias, without the noise; τ is multiplied by the fitted temperature, with a message."""
    trained = run.params.get("head", {})  # a head without noise and with a fixed τ has no parameters
    learned = trained.get("temperature", {}).get("log_temperature")
    # The formats store log τ alone: one that is fixed or bounded is exported by its value.
    log_temperature = jnp.log(run.task.temperature(run.params)) if learned is None else learned
    head = {"temperature": {"log_temperature": log_temperature}}
    head |= {name: value for name, value in trained.items() if name == "bias"}
    if calibration is None:
        return head
    fitted = _single_temperature(calibration)
    if "bias" in head:
        # The sigmoid of a pair would need another bias with another temperature; T is of a softmax over candidates.
        message(f"exported as trained, without the fitted factor {fitted}: it is not that of a sigmoid with a bias")
        return head
    message(_MULTIPLIED.format(fitted))
    return {"temperature": {"log_temperature": log_temperature + math.log(fitted.temperature)}}


def _single_temperature(calibration: Calibration) -> FittedTemperature:
    """Returns the temperature for formats that have one, and says what of a calibration by names is left out."""
    names = calibration.names
    if names is None:
        return calibration.noiseless
    if not isinstance(calibration.prior, str):
        raise UserError(
            "this format has no offset between names of training and new ones; export with --to lit-het or --to onnx, "
            "or with --prior seen or --prior new"
        )
    message(
        f"exported with one temperature, that of {calibration.prior} names: the other one and the offset between them "
        "are left out; --to lit-het and --to onnx hold all"
    )
    return names.noiseless.alone if calibration.prior == "new" else calibration.noiseless


def _vit(tower: ImageTowerConfig) -> ViTConfig:
    if not isinstance(tower, ViTConfig):
        what = "a ResNet" if isinstance(tower, ResNetConfig) else "a tower of which only embeddings are stored"
        raise UserError(f"{what} cannot be exported; only a ViT can")
    return tower


def push_portable(run: Run, repository: str, licence: str | None) -> None:
    """Uploads what `write_portable` writes to a model repository, see `lit_het.weights.publishing.push`."""
    with tempfile.TemporaryDirectory() as folder:
        write_portable(run, Path(folder), repository, licence)
        push(Path(folder), repository)
