"""``lit-het ensemble --select``: chooses the members of an ensemble among the runs of a sweep, and evaluates it."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from lit_het import distributed
from lit_het.calibrations import Calibrated
from lit_het.console import Bar
from lit_het.data_pipelines.shards.portions import ALL, Portion
from lit_het.errors import DataError, UserError, pluralize
from lit_het.eval.evaluation import Evaluation
from lit_het.eval.evaluators.ensemble import Ensemble
from lit_het.eval.hyper_ensembles import Selection, select_members
from lit_het.eval.report.tables import plain_table
from lit_het.eval.report.writing import print_results
from lit_het.eval.sets import have_same_shards, require_one_label
from lit_het.eval.sets.open_sets import Sets
from lit_het.eval.suite import EnsembleConfig
from lit_het.models.evaluation import check_members, check_output, evaluate
from lit_het.models.opening import open_run
from lit_het.training.directory import load_config


@dataclasses.dataclass(frozen=True)
class SelectOptions:
    """The split by which members are selected, and how many there are.

    Attributes:
        size: the largest number of different members, M.
        split: the folder of shards to choose by, as in `ImageSet.split`.
        portion: the part of its images to use.
    """

    size: int
    split: str
    portion: Portion = ALL


def evaluate_selection(
    checkpoints: Sequence[Path],
    config: EnsembleConfig,
    options: SelectOptions,
    *,
    pretrained: Path | None = None,
    output: Path | None = None,
    calibrated: Calibrated = True,
) -> list[Evaluation]:
    """Chooses the members of an ensemble by one split, prints them with their weights, and evaluates it on another.

    Args:
        checkpoints: directories of the runs to choose from.
        config: the evaluation of the ensemble.
        options: by what members are chosen.
        pretrained: current path of the run with the locked parameters, if it was moved.
        output: JSON file for the metrics.
        calibrated: whether to apply the fitted temperatures of ``lit-het calibrate``, if there are any; or a prior.
    """
    validation = _validation(len(checkpoints), config, options)
    check_members(checkpoints)
    check_output(output)
    data = load_config(checkpoints[0]).data
    # Runs are read one at a time, so that a sweep need not fit into memory; a tower that they share is computed once.
    ensemble = validation.build(Sets(data.image_size, data.preprocessing, lambda: "no embeddings are read"))
    found = []
    with Bar(f"choosing by {validation.data.name}", len(checkpoints), "runs") as bar:
        for checkpoint in checkpoints:
            with bar.paused():
                found.append(_label_log_probabilities(checkpoint, ensemble, pretrained, calibrated))
            bar.advance(1)
    selection = select_members(np.stack(found), options.size)
    _print(selection, checkpoints, validation.data.name)
    chosen, weights = zip(*selection.weights.items(), strict=True)
    if len(chosen) == 1:
        raise UserError(
            f"no other run lowers the NLL of {checkpoints[chosen[0]]} on {validation.data.name}; evaluate it alone, "
            "with lit-het zero-shot"
        )
    weighted = dataclasses.replace(config, weights=weights)
    how = {"pretrained": pretrained, "output": output, "calibrated": calibrated}
    return evaluate([checkpoints[number] for number in chosen], [weighted], **how)


def _validation(num_runs: int, config: EnsembleConfig, options: SelectOptions) -> EnsembleConfig:
    """Returns the evaluation of the images to choose by, once the options are checked."""
    if not 2 <= options.size <= num_runs:
        raise UserError(f"--select {options.size} must be from 2 to the number of checkpoints, which is {num_runs}")
    require_one_label(config.data)
    if config.weights:
        raise UserError("--select finds the weights of the members; leave out --weights")
    name = f"{config.data.name} ({options.split})"
    data = dataclasses.replace(config.data, name=name, split=options.split, portion=options.portion, embeddings=None)
    if have_same_shards(config.data, data) and config.data.portion.overlaps(options.portion):
        raise UserError(
            f"{config.data.name}: members that are chosen by {options.split} cannot be reported on the same images; "
            "give another --select-split, or --portion and --select-portion that do not overlap"
        )
    return dataclasses.replace(config, data=data)


def _label_log_probabilities(
    checkpoint: Path, ensemble: Ensemble, pretrained: Path | None, calibrated: Calibrated
) -> Float[np.ndarray, " n"]:
    """Returns the log-probability that a run gives to the true class of every image, in nats."""
    recognition = ensemble.recognition
    model = open_run(checkpoint, pretrained).model(calibrated=calibrated)
    try:
        predictor = recognition.predictor(model, ensemble.samples)
        return recognition.predict(predictor, ensemble.opened.features(model.features)).label_log_p
    except DataError:
        raise  # of the images, not of the run
    except UserError as error:
        raise UserError(f"{checkpoint}: {error}") from error


def _print(selection: Selection, checkpoints: Sequence[Path], name: str) -> None:
    if not distributed.is_main_process():
        return
    total = len(selection.picks)
    title = (
        f"{pluralize(total, 'pick')} among {pluralize(len(checkpoints), 'run')} by {name}: NLL {selection.nll[-1]:.4f}"
    )
    rows = []
    for number, weight in selection.weights.items():
        nll = selection.nll[selection.picks.index(number)]
        rows.append((str(checkpoints[number]), f"{weight}/{total}", f"{nll:.4f}"))
    print_results(plain_table(title, ("weight", "NLL after its first pick"), rows))
