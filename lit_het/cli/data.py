"""The arguments of ``lit-het data`` and its actions."""

import argparse
import os
from pathlib import Path
from typing import Any

from lit_het.cli import prepare, scenes
from lit_het.cli.classify import add_checkpoint
from lit_het.cli.embed import parse_part
from lit_het.cli.prepare import SHARDS_STAY, positive
from lit_het.errors import TooManyBadSamples, UserError
from lit_het.paths import require_run, require_shards

# NumPy and the other heavy packages are imported only when an action runs, so that --help is fast.

_ONLY_GOOD_SAMPLES = {TooManyBadSamples: "fix them, or leave them out of the shards"}


def add_to(commands: Any) -> None:
    """Adds the command to those of ``lit-het``."""
    data = commands.add_parser("data", allow_abbrev=False)
    actions = data.add_subparsers(required=True, metavar="ACTION")
    index = actions.add_parser(
        "index",
        allow_abbrev=False,
        help="index shards, so that training starts at once",
        description="Reads the headers of new and changed shards and saves an index beside each shard, or in the "
        "user's cache if the folder is read-only. Can be interrupted and run again.",
    )
    check = actions.add_parser(
        "check",
        allow_abbrev=False,
        help="read every sample as training does and list the broken ones",
        description="Decodes every image and caption and counts unusable samples by shard and cause. The exit code is "
        "1 if there are any.",
    )
    for parser in (index, check):
        parser.add_argument(
            "shards", nargs="+", metavar="SHARDS", help="tar files, folders, globs, patterns {000..099}.tar, lists .txt"
        )
        parser.add_argument(
            "--workers", type=positive, default=os.cpu_count() or 1, metavar="N", help="default: %(default)s"
        )
        parser.add_argument(
            "--checksum",
            action="store_true",
            help="also hash every shard: index writes SHARD.sha256, check compares with it",
        )
    check.add_argument(
        "--captions",
        metavar="MEMBER",
        help="member with one or more captions that every sample must have, such as txt or json/caption; default: none",
    )
    pixels_or_text = check.add_mutually_exclusive_group()
    pixels_or_text.add_argument(
        "--source",
        metavar="MEMBER",
        help="check texts to translate in place of images: the member that holds them, such as txt or json/en",
    )
    pixels_or_text.add_argument(
        "--masks", action="store_true", help="every sample must have masks of panoptic segmentation that fit its image"
    )
    check.add_argument(
        "--labels",
        type=Path,
        nargs="?",
        const=Path(),
        metavar="FILE",
        help="every sample must have a .cls that indexes the names in FILE; default: classnames.txt beside the shards",
    )
    check.add_argument("--output", type=Path, metavar="FILE", help="also write the table as JSON")
    index.set_defaults(command=_index, name="data index", if_stopped=SHARDS_STAY)
    check.set_defaults(command=_check, name="data check")
    _add_corrupt(actions)
    _add_score(actions)
    _add_select(actions)
    _add_dedup(actions)
    _add_filter(actions)
    scenes.add_to(actions)
    prepare.add_to(actions)


def _add_score(actions: Any) -> None:
    parser = actions.add_parser(
        "score",
        allow_abbrev=False,
        help="rank samples by how badly their caption fits their image",
        description="Scores every sample of SHARDS by a trained image-text model: the loss and the margin of its "
        "caption against the other captions of the set, their cosine similarity (the CLIP score) and the noise norm of "
        "the image. Writes a table, the most suspect sample first, and beside it a page with the worst ones.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="directory of the run of an image-text model")
    parser.add_argument("shards", metavar="SHARDS", help="folder, glob, pattern {000..099}.tar or list .txt")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="ends in .csv or .parquet")
    parser.add_argument(
        "--by",
        choices=("loss", "margin", "similarity", "noise_norm"),
        default="loss",
        help="the column that ranks samples; default: %(default)s",
    )
    parser.add_argument(
        "--captions",
        default="txt",
        metavar="MEMBER",
        help="such as txt or json/caption; the first of several captions is scored; default: %(default)s",
    )
    parser.add_argument(
        "--candidates",
        type=positive,
        default=10_000,
        metavar="K",
        help="at most so many captions of the set compete with a sample's own; default: %(default)s",
    )
    parser.add_argument(
        "--worst", type=positive, default=50, metavar="N", help="samples on the page; default: %(default)s"
    )
    parser.add_argument(
        "--pretrained", type=Path, metavar="PATH", help="current path of the locked tower's run or file"
    )
    parser.set_defaults(command=_score, name="data score", hints=_ONLY_GOOD_SAMPLES)


def _add_select(actions: Any) -> None:
    parser = actions.add_parser(
        "select",
        allow_abbrev=False,
        help="choose the images of a pool whose labels would tell a model most",
        description="Ranks the unlabelled images of a pool by a trained model and writes the shards and keys of the "
        "first N: by EPIG (what their labels tell about target images), BALD (what they tell about the weights), the "
        "entropy of the prediction, or at random. With --to their samples are written as shards too.",
    )
    add_checkpoint(parser)
    parser.add_argument("--pool", required=True, metavar="SHARDS", help="folder, glob, pattern or list to choose from")
    parser.add_argument("--target", metavar="SHARDS", help="images whose predictions are to improve; for EPIG")
    parser.add_argument(
        "--labels",
        required=True,
        metavar="LABELS|FILE",
        help='class names, such as "a cat,a dog", or a file with one per line',
    )
    parser.add_argument(
        "--prompts",
        metavar="NAME|FILE",
        help="templates around each label: bare (default), photo, photos, clip80, ... or a file",
    )
    parser.add_argument("--count", type=positive, required=True, metavar="N", help="images to choose")
    parser.add_argument("--method", choices=("bald", "epig", "entropy", "random"), default="bald", help="default: bald")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="ends in .csv or .parquet")
    parser.add_argument(
        "--to",
        type=Path,
        metavar="FOLDER",
        help="also copy the chosen samples, with all members, to shards in a new folder, best first",
    )
    parser.add_argument("--samples", type=positive, default=64, metavar="S", help="noise samples; default: %(default)s")
    parser.add_argument(
        "--targets", type=positive, default=500, metavar="N", help="at most so many target images; default: %(default)s"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the samples; default: %(default)s")
    parser.set_defaults(command=_select, name="data select", hints=_ONLY_GOOD_SAMPLES)


def _add_dedup(actions: Any) -> None:
    parser = actions.add_parser(
        "dedup",
        allow_abbrev=False,
        help="find near-duplicates within shards and of evaluation sets, to leave them out of training",
        description="Compares the stored embeddings of all images with one another (lit-het embed writes them) and "
        "writes OUTPUT/exclude.csv: the samples that are similar to one of an evaluation set, and of each group of "
        "similar samples all but the first. 'lit-het train --data.exclude OUTPUT/exclude.csv' leaves them out. "
        "OUTPUT/duplicates.html shows pairs at several similarities, by which to choose the threshold: the same "
        "command with another one searches nothing again. It also continues an interrupted one.",
    )
    parser.add_argument("shards", nargs="+", metavar="SHARDS", help="to train on; of each group the first is kept")
    parser.add_argument(
        "--embeddings", required=True, metavar="DIR", help="folder of lit-het embed, with the embeddings of all shards"
    )
    parser.add_argument("--against", nargs="+", default=(), metavar="SHARDS", help="shards of evaluation sets")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="of the table and the page")
    parser.add_argument(
        "--threshold",
        type=float,
        default=0.95,
        metavar="T",
        help="the least cosine similarity of near-duplicates, which depends on the tower; default: %(default)s",
    )
    parser.add_argument(
        "--floor",
        type=float,
        default=0.9,
        metavar="F",
        help="the least similarity that is searched, for the page and other thresholds; default: %(default)s",
    )
    parser.add_argument(
        "--part", metavar="I/N", help="only search a part, where N hosts run the command; without it, join all parts"
    )
    parser.set_defaults(command=_dedup, name="data dedup", if_stopped="the same command continues")


def _add_filter(actions: Any) -> None:
    parser = actions.add_parser(
        "filter",
        allow_abbrev=False,
        help="list the samples that break rules for captions, images and scores, to leave them out of training",
        description="Writes a table with a row for each sample and rule that it breaks, and beside it a page with some "
        "samples of each rule: 'lit-het train --data.exclude TABLE' leaves them out. Prints how many samples each rule "
        "leaves out, and how many no other does. Images are not decoded: their headers tell their sizes.",
    )
    parser.add_argument("shards", nargs="+", metavar="SHARDS", help="folders, globs, patterns {000..099}.tar, lists")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="ends in .csv or .parquet")
    parser.add_argument(
        "--captions", default="txt", metavar="PLACE", help="such as txt or json/caption,json/alt; default: %(default)s"
    )
    for name, text in _OF_EACH.items():
        for end in ("min", "max"):
            parser.add_argument(f"--{end}-{name}", type=float, metavar="N", help=text)
    parser.add_argument("--without-words", type=Path, metavar="FILE", help="words and phrases, one a line")
    parser.add_argument("--languages", nargs="+", metavar="L", help="such as en de; one of the captions must be in one")
    parser.add_argument(
        "--language-place", default="json/language", metavar="PLACE", help="of the language; default: %(default)s"
    )
    parser.add_argument("--max-aspect", type=float, metavar="R", help="longer side divided by the shorter")
    parser.add_argument("--min-side", type=float, metavar="P", help="pixels of the shorter side")
    parser.add_argument(
        "--min-similarity", type=float, metavar="S", help="cosine of image and first caption (CLIP score)"
    )
    parser.add_argument("--max-loss", type=float, metavar="L", help="of the first caption, by --scores")
    parser.add_argument("--max-noise", type=float, metavar="N", help="noise norm of the image, by --scores")
    parser.add_argument("--scores", type=Path, metavar="TABLE", help="of lit-het data score for these shards")
    parser.add_argument("--embeddings", metavar="DIR", help="of lit-het embed, for --min-similarity without --scores")
    parser.add_argument("--text-embeddings", metavar="DIR", help="of lit-het embed --texts with the same model")
    parser.add_argument(
        "--shown", type=positive, default=24, metavar="N", help="samples of each rule on the page; default: %(default)s"
    )
    parser.set_defaults(command=_filter, name="data filter")


_OF_EACH = {"characters": "characters of each caption", "words": "words of each caption"}


def _add_corrupt(actions: Any) -> None:
    corrupt = actions.add_parser(
        "corrupt",
        allow_abbrev=False,
        help="write a data set with common corruptions, from noise to fog, in five severities",
        description="Writes OUTPUT/CORRUPTION/SEVERITY/0.tar and so on with the keys and labels of SHARDS, class names "
        "and prompts beside them: lit-het zero-shot --data OUTPUT/fog/3 reads them. The same command "
        "continues an interrupted one.",
    )
    corrupt.add_argument("shards", metavar="SHARDS", help="folder, glob, pattern {000..099}.tar or list .txt")
    corrupt.add_argument("output", type=Path, metavar="OUTPUT", help="the folder to write")
    corrupt.add_argument(
        "--corruptions", nargs="+", default=(), metavar="NAME", help="such as fog and gaussian_noise; all by default"
    )
    corrupt.add_argument(
        "--severities",
        nargs="+",
        type=int,
        choices=range(1, 6),
        default=range(1, 6),
        metavar="1-5",
        help="default: all",
    )
    corrupt.add_argument("--seed", type=int, default=0, help="seed of the random corruptions; default: %(default)s")
    corrupt.add_argument(
        "--samples-per-shard", type=positive, default=1_000, metavar="N", help="at most; default: %(default)s"
    )
    corrupt.add_argument(
        "--workers", type=positive, default=min(os.cpu_count() or 1, 8), metavar="N", help="default: %(default)s"
    )
    corrupt.set_defaults(command=_corrupt, name="data corrupt", if_stopped=SHARDS_STAY)


def _index(options: argparse.Namespace, _: list[str]) -> None:
    for pattern in options.shards:
        require_shards(pattern)
    from lit_het.apps.data import index

    index(options.shards, options.workers, checksum=options.checksum)


def _check(options: argparse.Namespace, _: list[str]) -> None:
    for pattern in options.shards:
        require_shards(pattern)
    from lit_het.apps.data import check
    from lit_het.data_pipelines.labels_config import ClassIndex

    check(
        options.shards,
        options.workers,
        options.captions,
        labels=None if options.labels is None else ClassIndex(str(options.labels) if options.labels.name else None),
        source=options.source,
        masks=options.masks,
        checksum=options.checksum,
        output=options.output,
    )


def _corrupt(options: argparse.Namespace, _: list[str]) -> None:
    require_shards(options.shards)
    from lit_het.apps.data import corrupt
    from lit_het.data_pipelines.prepare.writer import WriteOptions

    of_writer = WriteOptions(options.samples_per_shard, options.workers)
    corrupt(options.shards, options.output, options.corruptions, options.severities, options.seed, of_writer)


def _select(options: argparse.Namespace, _: list[str]) -> None:
    _require_table(options.output)
    require_run(options.checkpoint)
    for shards in filter(None, (options.pool, options.target)):
        require_shards(shards)
    from lit_het.apps.selection import SelectOptions, select
    from lit_het.models.classify import read_labels

    how = SelectOptions(
        labels=read_labels(options.labels),
        method=options.method,
        count=options.count,
        target=options.target,
        prompts=options.prompts,
        samples=options.samples,
        targets=options.targets,
        seed=options.seed,
        to=options.to,
    )
    select(options.checkpoint, options.pool, options.output, how, options.pretrained)


def _dedup(options: argparse.Namespace, _: list[str]) -> None:
    for pattern in (*options.shards, *options.against):
        require_shards(pattern)
    part = None if options.part is None else parse_part(options.part)
    from lit_het.apps.dedup.deduplication import dedup
    from lit_het.apps.dedup.options import DedupOptions

    how = DedupOptions(options.embeddings, tuple(options.against), options.threshold, options.floor, part)
    dedup(options.shards, options.output, how)


def _filter(options: argparse.Namespace, _: list[str]) -> None:
    _require_table(options.output)
    for pattern in options.shards:
        require_shards(pattern)
    from lit_het.apps.filter.filtering import filter_samples
    from lit_het.apps.filter.options import FilterOptions, limits_of
    from lit_het.data_pipelines.texts.captions_config import Language

    language = Language(options.language_place, tuple(options.languages)) if options.languages else None
    how = FilterOptions(
        limits=limits_of(vars(options)),
        captions=options.captions,
        forbidden=options.without_words,
        language=language,
        scores=options.scores,
        embeddings=options.embeddings,
        text_embeddings=options.text_embeddings,
        shown=options.shown,
    )
    filter_samples(options.shards, options.output, how)


def _require_table(output: Path) -> None:
    if output.suffix not in (".csv", ".parquet") or not output.resolve().parent.is_dir():
        raise UserError(f"--output {output} must end in .csv or .parquet and lie in an existing folder")


def _score(options: argparse.Namespace, _: list[str]) -> None:
    output = options.output
    _require_table(output)
    require_run(options.run)
    require_shards(options.shards)
    from lit_het.apps.scoring import ScoreOptions, score

    how = ScoreOptions(options.captions, options.by, options.candidates, options.worst)
    score(options.run, options.shards, output, how, options.pretrained)
