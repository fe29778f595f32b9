"""The arguments of ``lit-het import`` and ``lit-het export``."""

import argparse
import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import Any

from lit_het.cli.classify import add_prior, calibrated_of
from lit_het.errors import UserError
from lit_het.paths import require_file, require_run, require_weights

# JAX and the other heavy packages are imported only when the command runs, so that --help is fast.


def add_to(commands: Any) -> None:
    """Adds the command to those of ``lit-het``."""
    importing = commands.add_parser(
        "import",
        allow_abbrev=False,
        description="Reads big_vision files (x.npz, or x.npz:img for a part), V-MoE and e3 checkpoints (the path of "
        "x.index), Hugging Face folders (SigLIP, SigLIP 2, CLIP, ViT, DINOv2, DINOv3, dual encoders), OpenCLIP's and "
        "those of lit-het export --to lit-het, local or at an address such as hf://owner/model. "
        "Sizes are read from the weights.",
    )
    importing.add_argument("--from", dest="source", required=True, metavar="SOURCE", help="path or address")
    importing.add_argument("--to", type=Path, required=True, metavar="DIR", help="the run directory to write")
    for flag, text in (
        ("--image-size", "resample positions for images of this size"),
        ("--patch-size", "resample the first layer for patches of this size"),
        ("--text-length", "tokens per text: positions beyond the source's are interpolated"),
        ("--num-selected", "K, experts per token; not stored in the file (2)"),
        ("--num-members", "M, members, to turn a V-MoE into an efficient ensemble"),
    ):
        importing.add_argument(flag, type=int, metavar="N", help=text)
    importing.add_argument(
        "--image-pooling",
        choices=("mean", "first"),
        help="pooling of a ViT without class token and attention pooling in a big_vision or V-MoE file, which does not "
        "store it: mean is their 'gap', first their '0' (mean)",
    )
    importing.add_argument(
        "--text-pooling",
        choices=("last", "first", "mean", "max"),
        help="pooling of a text tower in a big_vision or V-MoE file, which does not store it (last), or of a BERT "
        "(first, mean)",
    )
    importing.add_argument(
        "--tokenizer",
        metavar="FILE|FOLDER",
        help="the text tower's, if not beside the weights: SentencePiece model, tokenizer.json, vocab.txt, or a folder "
        "of transformers, also hf://owner/model",
    )
    importing.set_defaults(command=_import, name="import")

    exporting = commands.add_parser(
        "export",
        allow_abbrev=False,
        description="Any model becomes a folder that lit-het opens again (--to lit-het). An image-text model becomes a "
        "folder for AutoModel and the zero-shot pipeline of Hugging Face transformers (huggingface), or a file with "
        "big_vision's names (npz): without the noise of a HET-XL head, and with the temperature of a calibrated run "
        "multiplied by the fitted one. A classifier without noise is exported by all three, and a decoder by the first "
        "two, for VisionEncoderDecoderModel. ONNX files (onnx), with a "
        "script that classifies without JAX, hold towers and noise of an image-text model, or a classifier; they need "
        "the extra: pip install 'lit-het[onnx]'.",
    )
    exporting.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="directory of a run")
    exporting.add_argument("--to", choices=("huggingface", "lit-het", "npz", "onnx"), required=True)
    exporting.add_argument("--output", type=Path, required=True, help="folder, or file, to write")
    exporting.add_argument(
        "--pretrained", type=Path, metavar="PATH", help="current path of the locked tower's run or file"
    )
    add_prior(exporting)
    exporting.add_argument(
        "--member",
        type=int,
        metavar="N",
        help="huggingface, npz: which one of task.text_members to write, counted from 0 (0)",
    )
    exporting.add_argument(
        "--push", metavar="OWNER/NAME", help="also upload the folder to this model repository of the Hugging Face Hub"
    )
    exporting.add_argument("--licence", metavar="ID", help="licence in the model card, such as apache-2.0")
    exporting.set_defaults(command=_export, name="export")


def _import(options: argparse.Namespace, _: list[str]) -> None:
    require_weights(options.source)
    if options.tokenizer is not None:
        require_file(options.tokenizer)
    from lit_het.weights.importing import ImportOptions, import_weights

    fields = (field.name for field in dataclasses.fields(ImportOptions))
    import_weights(options.source, options.to, ImportOptions(**{field: getattr(options, field) for field in fields}))


def _export(options: argparse.Namespace, _: list[str]) -> None:
    require_run(options.checkpoint)
    if options.push is not None and (options.to == "npz" or not re.fullmatch(r"[\w.-]+/[\w.-]+", options.push)):
        raise UserError(f"--push {options.push} needs OWNER/NAME and a folder: --to huggingface, lit-het or onnx")
    if options.to == "onnx" and importlib.util.find_spec("onnx") is None:
        raise UserError("--to onnx needs onnx: pip install 'lit-het[onnx]'")
    from lit_het.weights.exporting import ExportOptions, export

    calibrated = calibrated_of(options)
    how = ExportOptions(options.pretrained, calibrated, options.push, options.licence, options.member)
    export(options.checkpoint, options.to, options.output, how)
