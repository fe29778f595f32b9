"""The arguments of ``lit-het caption``, ``ask`` and ``translate``."""

import argparse
from typing import Any

from lit_het.cli.classify import add_checkpoint, add_uncalibrated, require_images
from lit_het.cli.prepare import positive
from lit_het.errors import UserError
from lit_het.paths import require_run

# JAX and the other heavy packages are imported only when the command runs, so that --help is fast.


def add_to(commands: Any) -> None:
    """Adds the commands to those of ``lit-het``."""
    caption = commands.add_parser(
        "caption",
        allow_abbrev=False,
        description="Writes texts about images with a trained decoder (docs/decoder.md): the most probable token at "
        "each step, the best of several beams (--num-texts), or samples (--temperature). Prints each text, its "
        "probability, and that of each token, with its 5-95 % band over noise samples of a HET-XL head.",
    )
    caption.add_argument("images", nargs="+", metavar="IMAGE", help="files, addresses, or - for standard input")
    caption.add_argument("--prompt", metavar="TEXT", help="what texts follow; default: that of training")
    _add_generation(caption)
    caption.set_defaults(command=_caption, name="caption", answers=None)
    ask = commands.add_parser(
        "ask",
        allow_abbrev=False,
        description="Answers a question about an image with a trained decoder (docs/decoder.md), freely or by the "
        "probability of given answers (--answers). The question is written as in training.",
    )
    ask.add_argument("images", nargs=1, metavar="IMAGE", help="a file, an address, or - for standard input")
    ask.add_argument("question", metavar="QUESTION", help='such as "how many cats?"')
    ask.add_argument(
        "--answers", metavar="ANSWERS|FILE", help='rank these: such as "yes,no", or a file with one answer per line'
    )
    _add_generation(ask)
    ask.set_defaults(command=_ask, name="ask")
    translate = commands.add_parser(
        "translate",
        allow_abbrev=False,
        description="Translates texts with a trained encoder and decoder (docs/decoder.md): the best of 4 beams "
        "(--num-texts), or a sample (--temperature). Prints one translation a line; --json prints all beams or samples "
        "with the probability of each token.",
    )
    translate.add_argument("texts", nargs="+", metavar="TEXT", help="texts, or - for the lines of standard input")
    translate.add_argument("--prompt", metavar="TEXT", help="what translations follow; default: that of training")
    _add_generation(translate, num_texts="4, or 1 sample", num_tokens="as many as fit")
    translate.set_defaults(command=_translate, name="translate")


def _add_generation(
    parser: argparse.ArgumentParser, num_texts: str = "1", num_tokens: str = "32, or as many as fit"
) -> None:
    add_checkpoint(parser)
    parser.add_argument(
        "--num-texts",
        type=positive,
        metavar="N",
        help=f"the best of N beams, or N samples with --temperature; default: {num_texts}",
    )
    parser.add_argument(
        "--num-tokens", type=positive, metavar="N", help=f"most tokens of a text; default: {num_tokens}"
    )
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="of sampling; default: 0, the most probable text"
    )
    parser.add_argument("--top-k", type=positive, metavar="K", help="sample among the K most probable tokens")
    parser.add_argument(
        "--top-p", type=float, metavar="P", help="sample among the most probable tokens of probability P"
    )
    parser.add_argument(
        "--length-penalty", type=float, metavar="A", help="of beams: 0 prefers short texts; default: 0.6"
    )
    parser.add_argument(
        "--samples",
        type=int,
        metavar="S",
        help="noise samples (as many as 'lit-het calibrate' took, else 32); 0 for no noise",
    )
    add_uncalibrated(parser)
    parser.add_argument("--seed", type=int, default=0, help="seed of the noise and of sampling")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _caption(options: argparse.Namespace, _: list[str]) -> None:
    _check(options)
    from lit_het.models.caption import caption

    caption(options.images, options.checkpoint, options.prompt, _generation(options), **_others(options))


def _ask(options: argparse.Namespace, _: list[str]) -> None:
    _check(options)
    if not options.question.strip():
        raise UserError("the question is empty; ask one")
    from lit_het.models.caption import ask

    image, how = options.images[0], {**_others(options), "answers": options.answers}
    ask(image, options.question, options.checkpoint, _generation(options), **how)


def _translate(options: argparse.Namespace, _: list[str]) -> None:
    _check_run(options)
    from lit_het.models.caption import translate

    translate(options.texts, options.checkpoint, options.prompt, _generation(options), **_others(options))


def _check(options: argparse.Namespace) -> None:
    require_images(options.images)
    _check_run(options)


def _check_run(options: argparse.Namespace) -> None:
    require_run(options.checkpoint)
    if options.samples is not None and options.samples < 0:
        raise UserError(f"--samples {options.samples}: must be at least 0")


def _generation(options: argparse.Namespace) -> dict[str, Any]:
    names = ("num_tokens", "num_texts", "temperature", "top_k", "top_p", "length_penalty")
    given = {name: getattr(options, name) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def _others(options: argparse.Namespace) -> dict[str, Any]:
    fields = {name: getattr(options, name) for name in ("samples", "seed", "pretrained")}
    return {**fields, "as_json": options.json, "calibrated": not options.uncalibrated}
