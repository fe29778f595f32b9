"""The command ``lit-het``."""

import argparse
import contextlib
import dataclasses
import logging
import signal
import sys
import threading
import traceback
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

from lit_het.cli import (
    checkpoint_arguments,
    data_arguments,
    evaluation_arguments,
    image_arguments,
    plan_arguments,
    train_arguments,
)
from lit_het.errors import TRY_AGAIN, UserError

# Imports of JAX and its friends wait until a subcommand runs: `lit-het --help` answers at once.


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one subcommand; mistakes of the user end in one line and exit code 1."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax reports every file it writes
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and not getattr(options, "takes_fields", False):
        parser.error(f"unknown argument {rest[0]}; see lit-het {options.name} --help")
    if getattr(options, "distributed", None) is None:
        return _run(options, rest)
    from lit_het import distributed

    try:
        code = _run(options, rest)
    except BaseException as error:
        code = 1
        if lost := distributed.fault_of_machines(error):
            code = TRY_AGAIN  # whether that helps, the code of the other tells
            reason = " ".join(str(lost).split())[:200]
            print(
                f"lit-het: another process or a device is gone ({reason}); start all again{_left_by(options)}",
                file=sys.stderr,
            )
        else:
            traceback.print_exc()
    if code:
        distributed.leave(code)
    return code


def _run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    try:
        with _endings_unwind():
            if getattr(options, "distributed", None) is not None:
                from lit_het import distributed

                distributed.join(options.distributed)
            options.command(options, rest)
    except UserError as error:
        if getattr(options, "distributed", None) is not None:
            from lit_het import distributed

            if distributed.fault_of_machines(error):
                raise
        print(f"lit-het: {error}", file=sys.stderr)
        return error.code
    except MemoryError as error:
        print(f"lit-het: out of memory ({error}); use smaller sizes, or a machine with more", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"lit-het: interrupted{_left_by(options)}", file=sys.stderr)
        return 130
    except _Ended as error:
        with contextlib.suppress(OSError):  # the terminal may be what has gone
            print(f"lit-het: ended by {error.signal.name}{_left_by(options)}", file=sys.stderr)
        return 128 + error.signal
    return 0


def _left_by(options: argparse.Namespace) -> str:
    """Returns what a command leaves behind that is stopped, if anything."""
    return f"; {options.if_stopped}" if hasattr(options, "if_stopped") else ""


class _Ended(BaseException):
    """A signal asks for the end."""

    def __init__(self, number: int):
        self.signal = signal.Signals(number)


@contextlib.contextmanager
def _endings_unwind() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP raise `_Ended`, as Ctrl-C raises: commands that streams read end with this process."""
    # What is ignored (nohup) or handled by others stays so; handlers are for the main thread.
    is_main = threading.current_thread() is threading.main_thread()
    ours = [
        number for number in (signal.SIGTERM, signal.SIGHUP) if is_main and signal.getsignal(number) == signal.SIG_DFL
    ]

    def end(number: int, _: types.FrameType | None) -> None:
        for one in ours:
            signal.signal(one, signal.SIG_IGN)  # a second one must not interrupt the clearing up
        raise _Ended(number)

    for number in ours:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lit-het",
        allow_abbrev=False,
        description="Image-text models that know how sure they are: LiT with HET-XL heads, in JAX.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    quickstart = commands.add_parser(
        "quickstart",
        allow_abbrev=False,
        help="train LiT with and without HET-XL on images of characters, and write a report (about 5 minutes)",
        description="Renders characters in many faces, trains an image tower on them, locks it, trains text towers "
        "with a deterministic and with a HET-XL head, evaluates both zero-shot and writes a report. "
        "A quickstart that was stopped goes on where it was.",
    )
    quickstart.add_argument("--run-dir", type=Path, default=Path("runs/quickstart"), help="default: %(default)s")
    quickstart.add_argument("--seed", type=int, default=0, help="of everything: data order, initialisation, noise")
    quickstart.set_defaults(command=_quickstart, name="quickstart", if_stopped="the same command goes on")

    train_arguments.add_to(commands)
    plan_arguments.add_to(commands)
    embedding = commands.add_parser(
        "embed",
        allow_abbrev=False,
        help="compute the embeddings of a locked image tower once, to train on them",
        usage="lit-het embed --tower RUN|FILE --output DIR [--data SHARDS ...] [--dtype TYPE] [--crops K] [--part I/N] "
        "[--any.field.of-the-configuration VALUE ...]",
        description="Embeds every image of the shards, as the tower sees it in evaluation, into one file a shard. "
        "Then --data.embeddings DIR lets 'lit-het train' read them in place of images, and --embeddings DIR "
        "'lit-het zero-shot'. The same command goes on where it was stopped.",
        add_help=False,
    )
    embedding.add_argument(
        "--tower",
        type=Path,
        metavar="RUN|FILE",
        help="directory of a run, or the configuration file of the run to be trained, with its flags",
    )
    embedding.add_argument("--output", metavar="DIR", help="folder or address to write")
    embedding.add_argument("--data", nargs="+", default=(), metavar="SHARDS", help="default: those of the tower's run")
    embedding.add_argument(
        "--dtype", choices=("float16", "bfloat16", "float32"), default="float16", help="default: %(default)s"
    )
    embedding.add_argument(
        "--crops",
        type=int,
        default=0,
        metavar="K",
        help="store K random views of each image, by `crop` and `augmentations` of the configuration (none)",
    )
    embedding.add_argument(
        "--part", default="0/1", metavar="I/N", help="this host's part of the shards, where N hosts run the command"
    )
    embedding.add_argument(
        "-h", "--help", action="store_true", help="this text; with --tower and --output every field as well"
    )
    embedding.set_defaults(
        command=_embed,
        name="embed",
        parser=embedding,
        takes_fields=True,
        if_stopped="shards that are done stay, the same command goes on",
    )

    checkpoint_arguments.add_to(commands)

    evaluation_arguments.add_to(commands)
    image_arguments.add_to(commands)

    data_arguments.add_to(
        commands.add_parser("data", allow_abbrev=False, help="make shards, index them and check them")
    )

    importing = commands.add_parser(
        "import",
        allow_abbrev=False,
        help="make a run of weights that another program wrote",
        description="Reads big_vision files (x.npz, or x.npz:img for a part), V-MoE and e3 checkpoints (the path of "
        "x.index) and Hugging Face folders (SigLIP, SigLIP 2, ViT, DINOv2, CLIP's image tower), here or at an address "
        "such as hf://owner/model. Sizes are inferred.",
    )
    importing.add_argument("--from", dest="source", required=True, metavar="SOURCE", help="path or address")
    importing.add_argument("--to", type=Path, required=True, metavar="DIR", help="the run directory to write")
    for flag, text in (
        ("--image-size", "resample positions for images of this size"),
        ("--patch-size", "resample the first layer for patches of this size"),
        ("--text-length", "keep the positions of so many tokens"),
        ("--num-selected", "K, experts of a token, which no file says (2)"),
        ("--num-members", "M, to make an efficient ensemble of a V-MoE"),
    ):
        importing.add_argument(flag, type=int, metavar="N", help=text)
    importing.add_argument(
        "--text-pooling",
        choices=("last", "first", "mean", "max"),
        help="of a text tower in a big_vision file, which does not tell (last)",
    )
    importing.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="the text tower's, if none lies beside the weights: SentencePiece model, tokenizer.json or vocab.txt",
    )
    importing.set_defaults(command=_import, name="import")

    exporting = commands.add_parser(
        "export",
        allow_abbrev=False,
        help="write a trained model for other programs",
        description="A model with a ViT and a text Transformer becomes a SiglipModel folder of Hugging Face "
        "transformers, or a file with big_vision's names; a HET-XL head is left without its noise. A classifier with a "
        "deterministic head becomes a file with big_vision's names.",
    )
    exporting.add_argument("--checkpoint", type=Path, required=True, metavar="DIR", help="directory of a run")
    exporting.add_argument("--to", choices=("huggingface", "npz"), required=True)
    exporting.add_argument("--output", type=Path, required=True, help="folder, or file, to write")
    exporting.add_argument(
        "--pretrained", type=Path, metavar="PATH", help="where the locked tower's run or file is now"
    )
    exporting.set_defaults(command=_export, name="export")
    return parser


def _quickstart(options: argparse.Namespace, _: list[str]) -> None:
    from lit_het.cli.quickstart import quickstart

    quickstart(options.run_dir, options.seed)


def _embed(options: argparse.Namespace, flags: list[str]) -> None:
    if options.help:
        options.parser.print_help()
        flags = [*flags, "--help"]
    if options.tower is None or options.output is None:
        if options.help:
            return
        raise UserError("embed needs --tower RUN|FILE and --output DIR, see lit-het embed --help")
    from lit_het.cli.embed import EmbedOptions, embed

    try:
        number, count = map(int, options.part.split("/"))
    except ValueError as error:
        raise UserError(f"--part {options.part} is no part; two hosts take 0/2 and 1/2") from error
    how = EmbedOptions(tuple(options.data), options.dtype, options.crops, (number, count))
    embed(options.tower, options.output, how, flags)


def _import(options: argparse.Namespace, _: list[str]) -> None:
    from lit_het.cli.convert import ImportOptions, import_weights

    fields = (field.name for field in dataclasses.fields(ImportOptions))
    import_weights(options.source, options.to, ImportOptions(**{field: getattr(options, field) for field in fields}))


def _export(options: argparse.Namespace, _: list[str]) -> None:
    from lit_het.cli.convert import export

    export(options.checkpoint, options.to, options.output, options.pretrained)


if __name__ == "__main__":
    sys.exit(main())
