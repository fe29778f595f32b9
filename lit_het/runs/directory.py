"""What a run says of itself in its directory: configuration, tokenizer, and the run that its parameters came from."""

from pathlib import Path

from lit_het.checkpoints import manifest
from lit_het.configs import experiment
from lit_het.configs.experiment import ExperimentConfig
from lit_het.errors import UserError


def config_path(run_dir: Path) -> Path:
    """Returns where a run keeps its configuration."""
    return run_dir / "config.json"


def tokenizer_path(run_dir: Path) -> Path:
    """Returns where a run keeps the model of its tokenizer."""
    return run_dir / "tokenizer.model"


def checkpoint_dir(run_dir: Path) -> Path:
    """Returns where a run keeps its checkpoints."""
    return run_dir / "checkpoints"


def write(run_dir: Path, config: ExperimentConfig, tokenizer: bytes | None) -> None:
    """Writes a run's configuration, the file of its tokenizer if there is one, and their manifest."""
    files = {config_path(run_dir).name: experiment.to_json(config).encode()}
    if tokenizer is not None:
        files[tokenizer_path(run_dir).name] = tokenizer
    manifest.write(run_dir, files)


def load_config(run_dir: Path) -> ExperimentConfig:
    """Returns the configuration of a run, after a look whether it and the tokenizer are what the run wrote.

    Raises:
        UserError: they are not, or there is no run.
    """
    if config_path(run_dir).is_file():
        manifest.check(run_dir)
    return experiment.load(config_path(run_dir))


def find_pretrained(recorded: Path, run_dir: Path) -> Path:
    """Returns the run with the locked parameters: where it was, or beside this run if both have moved."""
    beside = run_dir.resolve().parent / recorded.name
    for place in (recorded, beside):
        if config_path(place).is_file() and (place is recorded or place != run_dir.resolve()):
            return place
    raise UserError(f"the locked parameters were in {recorded}, which is gone; say where it is with --pretrained DIR")


def check_chain(run_dir: Path) -> None:
    """Refuses a run whose parameters come, from run to run, out of one that has been passed.

    Raises:
        UserError: with the run that takes them from itself.
    """
    place, passed = run_dir, []
    while config_path(place).is_file():
        if place.resolve() in passed:
            raise UserError(
                f"the pretrained run of {run_dir} leads back to {place}, which takes its parameters from itself; name "
                "the run that trained them with --pretrained.run"
            )
        passed.append(place.resolve())
        try:
            pretrained = experiment.load(config_path(place)).pretrained
            if pretrained is None:
                return
            place = find_pretrained(pretrained.run, place)
        except UserError:
            return  # one that may not be needed
