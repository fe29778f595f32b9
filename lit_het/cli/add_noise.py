"""The arguments of ``lit-het add-noise``."""

import argparse
from pathlib import Path
from typing import Any

from lit_het.cli.new import add_pairs
from lit_het.cli.train import ALLOW_BAD_SAMPLES
from lit_het.errors import OtherEmbeddings, UserError
from lit_het.paths import require_file, require_run, require_shards, require_weights

# JAX and the other heavy packages are imported only when the command runs, so that --help is fast.


def add_to(commands: Any) -> None:
    """Adds the command to those of ``lit-het``."""
    noise = commands.add_parser(
        "add-noise",
        allow_abbrev=False,
        usage="lit-het add-noise --model ADDRESS --data SHARDS --output RUN [--captions MEMBER] "
        "[--any.field.of-the-configuration VALUE ...]",
        description="Locks both towers of a model, stores their embeddings of one's own image-text pairs, and trains "
        "only the covariances and the temperature of a HET-XL head on them. Other heads are --task.head prob_vlm, "
        "mc_dropout and gaussian; with --task.head bayes_vlm it trains nothing and fits a posterior. "
        "The embeddings, and so the predictions without noise up to the temperature, "
        "stay those of the model (but with --task.head gaussian, whose variances enter predictions). The result is a "
        "run like any other. The same command continues an interrupted one. "
        "Further flags are fields of the configuration, as of lit-het train.",
        add_help=False,
    )
    noise.add_argument(
        "--model",
        metavar="ADDRESS",
        help="a run, or weights as for lit-het import: a Hugging Face folder, hf://owner/model, a big_vision file",
    )
    add_pairs(noise, required=False)
    noise.add_argument("--output", type=Path, metavar="RUN", help="directory of the new run")
    noise.add_argument(
        "--tokenizer", metavar="FILE|FOLDER", help="of the text tower; only where it is not beside the weights"
    )
    noise.add_argument(
        "-h",
        "--help",
        action="store_true",
        help="show this text; where --model is a run, with --data and --output also every field",
    )
    noise.set_defaults(
        command=_add_noise,
        name="add-noise",
        parser=noise,
        takes_fields=True,
        hints={
            **ALLOW_BAD_SAMPLES,
            OtherEmbeddings: "choose another --output, or other --data.embeddings and --data.text-embeddings",
        },
        if_stopped="finished shards and checkpoints are saved; the same command continues",
    )


def _add_noise(options: argparse.Namespace, flags: list[str]) -> None:
    is_complete = None not in (options.model, options.data, options.output)
    if options.help:
        options.parser.print_help()
        if not is_complete:
            return
        require_run(Path(options.model))  # a look at the fields imports no weights
        flags = [*flags, "--help"]
    elif not is_complete:
        raise UserError("add-noise needs --model ADDRESS, --data SHARDS and --output RUN, see lit-het add-noise --help")
    require_weights(options.model)
    require_shards(options.data)
    if options.tokenizer is not None:
        require_file(options.tokenizer)
    from lit_het.apps.add_noise import add_noise
    from lit_het.weights.importing import ImportOptions

    how = ImportOptions(image_size=options.image_size, tokenizer=options.tokenizer)
    add_noise(options.model, options.data, options.output, flags, captions=options.captions, options=how)
