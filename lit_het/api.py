"""The names of ``import lit_het``, which loads this module when one of them is used."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lit_het import arguments
from lit_het.configs.experiment import ExperimentConfig
from lit_het.configs.parsing import parse_config, parse_tower
from lit_het.data_pipelines.embeddings import Precision
from lit_het.errors import UserError
from lit_het.eval.evaluation import Evaluation
from lit_het.eval.metrics.names import calibrated_by
from lit_het.eval.suite import EVALUATIONS, EvaluationConfig
from lit_het.models.model import Model, load
from lit_het.models.results import Classification, Classifications
from lit_het.paths import locate_config, locate_training, runs_in
from lit_het.weights.importing import ImportOptions

__all__ = ["Classification", "Classifications", "ImportOptions", "Model", "embed", "evaluate", "load", "train"]

__path__: list[str] = []  # of a package, which it was: its modules are found elsewhere (lit_het/moved.py)

# What only one of them needs is imported where it runs: `lit_het.load` needs none of it.


def train(
    config: ExperimentConfig | str | Path,
    *,
    resume: bool = False,
    allow_commands: bool = False,
    pipeline: Iterable[Any] | None = None,
) -> Path:
    """Trains a run to its end, calibrates it, and returns its directory, for `lit_het.load`.

    Args:
        config: a configuration, a Python file with ``get_config()``, the name of a shipped one such as
            ``quickstart_upstream``, or a run's ``config.json``. To change fields, take the configuration from its
            module, as in ``lit_het.configs.quickstart_upstream.get_config()``, and use ``dataclasses.replace``.
        resume: whether to continue from the newest checkpoint.
        allow_commands: whether a ``config.json`` or a list of shards may contain shell commands.
        pipeline: a ``webdataset.WebDataset`` or other iterable of its samples, read in place of ``data.shards``, which
            name what it reads; with ``data.stream``. Each process gives its own, which `split_by_node` splits.

    Raises:
        UserError: the configuration, the data or the run directory cannot be used.
    """
    for name, value in {"resume": resume, "allow_commands": allow_commands}.items():
        arguments.flag(value, name)
    if not isinstance(config, ExperimentConfig):
        config = parse_config(
            locate_training(Path(arguments.path(config, "config"))), (), allow_commands=allow_commands
        )
    from lit_het.training import train as training

    training.train(config, resume=resume, allow_commands=allow_commands, pipeline=pipeline)
    return config.run_dir


def evaluate(
    run: str | Path | Sequence[str | Path],
    evaluations: Sequence[EvaluationConfig] | str | Path | None = None,
    *,
    pretrained: str | Path | None = None,
    output: str | Path | None = None,
    calibrated: bool = True,
    prior: str | float | None = None,
) -> list[Evaluation]:
    """Evaluates a run, prints tables, saves the results in the run's folder for reports, and returns them.

    Args:
        run: directory of a run, of the members of an ensemble, or of each of them.
        evaluations: configurations of `lit_het.eval.suite`, such as ``ZeroShotConfig``; a Python file with
            ``get_evaluations()``, or the name of a shipped one; None for those of the run's own configuration.
        pretrained: current path of the run or file with the locked parameters, if it was moved.
        output: JSON file for the metrics.
        calibrated: whether to apply the temperatures of ``lit-het calibrate``, if there are any.
        prior: what right answers are expected to be, as of `load`.

    Returns:
        An `Evaluation` for each configuration, and for the mean over several few-shot sets, with ``figures``, their
        standard ``errors`` and ``chance`` levels by name.

    Raises:
        UserError: the run or a set cannot be read, or an evaluation does not fit the run.
    """
    is_list = isinstance(run, Sequence) and not isinstance(run, str | bytes)
    given = arguments.paths(run, "run", least=1) if is_list else [arguments.path(run, "run")]
    runs = [member for one in given for member in runs_in(Path(one))]
    places = {"pretrained": pretrained, "output": output}
    weights, file = (None if place is None else Path(arguments.path(place, name)) for name, place in places.items())
    how: Any = {"pretrained": weights, "output": file, "calibrated": calibrated_by(calibrated, prior)}
    path = locate_config(Path(evaluations), "get_evaluations") if isinstance(evaluations, str | Path) else None
    from lit_het.models import evaluation

    if evaluations is None or path is not None:
        return evaluation.evaluate_suite(runs, path, **how)
    configs = arguments.listed(evaluations, "evaluations", "configurations")
    for number, one in enumerate(configs):
        kinds = tuple(EVALUATIONS.values())
        arguments.instance(one, f"evaluations[{number}]", kinds, "a configuration of lit_het.eval.suite")
    return evaluation.evaluate(runs, configs, **how)


def embed(
    tower: ExperimentConfig | str | Path,
    output: str | Path,
    *,
    data: Sequence[str] = (),
    dtype: Precision = "float16",
    crops: int = 0,
    part: tuple[int, int] = (0, 1),
    texts: bool = False,
    tokens: bool = False,
    logits: bool = False,
) -> None:
    """Stores the embeddings of a locked tower, to train on them; finished shards are skipped.

    Args:
        tower: directory of a run; or the configuration of a run to be trained, a Python file with it, or the name of a
            shipped one; or ``transformers:FOLDER`` or ``transformers:hf://owner/model``, by PyTorch.
        output: the folder or address to write to.
        data: shards; empty for those of the configuration.
        dtype: type of the stored embeddings: ``float16``, ``bfloat16`` or ``float32``.
        crops: K, random views of each image by the configuration's ``crop`` and ``augmentations``; 0 for one view,
            preprocessed as in evaluation.
        part: (I, N): shards I, I + N, ..., where N hosts share the work.
        texts: whether to embed the captions with the text tower, and not the images.
        tokens: whether to store all tokens of the image tower, before pooling, for a decoder.
        logits: whether to store the logits of a classifier, without noise and not calibrated, for distillation.

    Raises:
        UserError: the tower, the shards or the output cannot be used.
    """
    output, shards = arguments.path(output, "output"), tuple(arguments.paths(data, "data"))
    crops = arguments.whole(crops, "crops")
    if len(numbers := arguments.listed(part, "part", "two numbers")) != 2:
        raise UserError(f"part = {part!r:.100} must be two numbers, (I, N)")
    first, count = (arguments.whole(number, "part") for number in numbers)
    for name, value in {"texts": texts, "tokens": tokens, "logits": logits}.items():
        arguments.flag(value, name)
    from lit_het.apps.embed import TRANSFORMERS, captions, images

    options = images.EmbedOptions(shards, dtype, crops, (first, count), tokens, logits)
    source = None
    if isinstance(tower, ExperimentConfig):
        config = tower
    elif str(tower).startswith(TRANSFORMERS):
        from lit_het.apps.embed.torch_tower import embed_by_torch

        embed_by_torch(str(tower), (), output, options, texts=texts)
        return
    else:
        source = Path(arguments.path(tower, "tower"))
        if not source.is_dir():
            source = locate_config(source)
        config = parse_tower(source)
    work = captions.embed_captions if texts else images.embed
    work(source, config, output, options)
