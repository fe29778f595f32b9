"""Which images a search may choose settings by: none that runs are trained on, and none that another figure is of."""

from lit_het.configs.experiment import ExperimentConfig
from lit_het.errors import UserError
from lit_het.eval.sets.folders import overlaps
from lit_het.eval.suite import EVALUATIONS, EvaluationConfig
from lit_het.models.calibration.split import split

# Of a large data set, `split` holds out the fewest: the others are taken to be trained on.
_MANY_SAMPLES = 10**9


def check_sets(config: ExperimentConfig, metric: str) -> None:
    """Checks that the runs evaluate a metric, on images that they neither train on nor report under another name.

    Metrics of training (``train/...``) have no images of their own, and are not checked.

    Args:
        config: of the runs.
        metric: to improve.
    """
    if metric.startswith("train/"):
        return
    sets = [evaluation.data for evaluation in config.evaluations]
    named = [
        (f"{_kind(evaluation, config)}/{evaluation.data.name}", evaluation.data) for evaluation in config.evaluations
    ]
    validation = [data for name, data in named if metric.startswith(f"{name}/")]
    if not validation:
        names = (
            ", ".join(dict.fromkeys(name for name, _ in named)) or "nothing, as the configuration has no evaluations"
        )
        raise UserError(f"--metric {metric}: these runs have no such metric; they evaluate {names}")
    training = [(config.data.shards, split(config, _MANY_SAMPLES).training)]
    training += [(data_set.shards, data_set.portion) for data_set in config.data.mixture]
    for data in validation:
        for shards, portion in training:
            if overlaps(data, shards, portion):
                raise UserError(
                    f"--metric {metric}: {data.name} has images that the runs are trained on ({data.shards}); evaluate "
                    "other images, or hold some out with --data.portion"
                )
        for other in sets:
            if other.name != data.name and overlaps(data, (other.shards,), other.portion):
                raise UserError(
                    f"--metric {metric}: {data.name} and {other.name} are the same images ({data.shards}), and a set "
                    "that chooses settings is not a test; leave one out, or give it other images"
                )


def _kind(evaluation: EvaluationConfig, config: ExperimentConfig) -> str:
    """Returns the kind of an evaluation, as the names of its metrics begin."""
    [command] = [name for name, one in EVALUATIONS.items() if type(evaluation) is one]
    # Classifiers are evaluated on their own classes by the same command.
    if command == "zero-shot" and not config.task.embeds_texts:
        return "supervised"
    return command.replace("-", "_")
