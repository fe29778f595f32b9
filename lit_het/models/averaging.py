"""The means that follow the few-shot evaluations of several sets, and the saved run that is their reference."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lit_het.configs import experiment
from lit_het.errors import UserError
from lit_het.eval.evaluation import Drawing, Evaluation, Record, read_records
from lit_het.eval.metrics.few_shot_means import MEAN, WEIGHTED_MEAN, Accuracies, by_shots, evaluated_means
from lit_het.eval.run_comparison import check_same_settings
from lit_het.eval.suite import EvaluationConfig, FewShotConfig


def means_over(
    configs: Sequence[EvaluationConfig], reference: Path | None
) -> Callable[[Sequence[Evaluation]], list[tuple[Evaluation, dict[str, Any]]]]:
    """Returns the function from evaluations to the means over those that are few-shot, each with its settings.

    There are means if there are several few-shot evaluations, all with the same fit.

    Args:
        configs: of the evaluations.
        reference: directory of a run whose saved few-shot accuracies are the reference of the weighted mean.
    """
    few_shot: list[Any] = [config for config in configs if config.has_means]
    if len(few_shot) < 2 or any(config.fit != few_shot[0].fit for config in few_shot):
        if reference is not None:
            raise UserError(f"--reference {reference} is for the mean over sets; give several with --data")
        return lambda found: []
    names = [config.data.name for config in few_shot]
    for name in {MEAN, WEIGHTED_MEAN} & {*names}:
        raise UserError(f"the set {name} has the name of a mean over sets; give another with --data NAME=FOLDER")
    of_reference = None if reference is None else _accuracies(reference, few_shot)
    settings = {"sets": names, "fit": experiment.to_dict(few_shot[0].fit)}

    def means(found: Sequence[Evaluation]) -> list[tuple[Evaluation, dict[str, Any]]]:
        of_sets = [one for config, one in zip(configs, found, strict=True) if config.has_means]
        return [
            (mean, settings | ({"reference": str(reference)} if mean.name == WEIGHTED_MEAN else {}))
            for mean in evaluated_means(of_sets, of_reference)
        ]

    return means


def _accuracies(reference: Path, configs: Sequence[FewShotConfig]) -> Accuracies:
    """Returns the saved accuracies of a run on the same sets, evaluated with the same settings."""
    saved = {record.name: record for record in read_records(reference) if record.kind == "few_shot"}
    for config in configs:
        name = config.data.name
        if name not in saved:
            raise UserError(
                f"--reference {reference} has no few-shot evaluation of {name}; run lit-het few-shot --checkpoint "
                f"{reference} first"
            )
        ours = Record("few_shot", name, {}, {}, {}, 0, experiment.to_dict(config), Drawing())
        check_same_settings({"this command": ours, str(reference): saved[name]})
    return {config.data.name: by_shots(saved[config.data.name].figures) for config in configs}
