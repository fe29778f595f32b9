"""`ExperimentConfig`, the root of every configuration, and its JSON format."""

import dataclasses
import importlib.util
import inspect
import json
import traceback
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Union, get_args, get_origin, get_type_hints

import cattrs

from lit_het import parameters, untrusted
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.shards.portions import Portion, Rule
from lit_het.data_pipelines.texts.tokenizers_config import TokenizerConfig
from lit_het.errors import FieldError, UserError, require_at_least, require_choice
from lit_het.eval.suite import EVALUATIONS, EvaluationConfig
from lit_het.files import write_atomically
from lit_het.objectives.base import Setup, check_objectives
from lit_het.paths import locate_config
from lit_het.sharding import MeshConfig
from lit_het.tasks.held_out import group
from lit_het.tasks.temperature_gradient_config import held_out_fraction
from lit_het.tasks.union import TaskConfig
from lit_het.training.cadence import Cadence
from lit_het.training.durations import Duration, RunLength
from lit_het.training.optimizers_config import Optimizer
from lit_het.training.schedules import Schedule

if TYPE_CHECKING:
    from lit_het.tasks.base import Gradient

MAX_JSON_BYTES = 2**24
"""Larger configurations of runs are refused."""

LARGEST_NUMBER = 2**53
"""Larger numbers in them are refused: JSON does not hold them exactly."""

MAX_NAME_BYTES = 255
"""Strings with a longer part between slashes are refused: file systems do not allow such names."""

# Limits far beyond any model or machine. Larger values would exhaust memory or time before any check fails.
_LARGEST = {
    **{"depth": 1_000, "width": 2**17, "mlp_width": 2**20, "num_heads": 2**12, "projection_size": 2**17},
    **{"image_size": 2**13, "patch_size": 2**13, "vocabulary_size": 2**24, "num_classes": 2**26, "num_factors": 2**17},
    **{"batch_size": 2**24, "threads": 2**10, "prefetch_batches": 2**10, "num_samples": 2**20, "length": 2**16},
}


@dataclasses.dataclass(frozen=True)
class PretrainedConfig:
    """Parameters taken from another run.

    Attributes:
        run: directory of the run that trained them.
        pattern: regular expression of the paths of the parameters to take; the paths stay the same.
    """

    run: Path
    pattern: str = "image_tower/.*"


@dataclasses.dataclass(frozen=True)
class ExperimentConfig:
    """One training run.

    Attributes:
        run_dir: directory for everything that the run writes.
        task: towers, head and loss.
        data: training data.
        length: length of the training, in steps, examples or epochs; 0 where nothing is trained.
        tokenizer: tokenizer of captions; None without a text tower.
        pretrained: run to load parameters from; locked parameters need it, or `weights` of their tower.
        optimizer: the optimizer.
        average_decay: decay per step of the moving average of the parameters, which is evaluated and opened instead of
            the last parameters; None for no average.
        schedule: learning rate schedule.
        mesh: mesh of the devices.
        cadence: how often to log, save and evaluate.
        on_nonfinite: ``stop`` at a step whose loss or gradient is not finite, or ``skip`` its update.
        evaluations: evaluations during and after training.
        calibration: the samples of ``data.shards`` that are not trained on, and to which temperatures are fitted after
            training; ``auto`` is 2 %, at most 10,000, where `lit_het.models.calibration.split` can hold them out; None
            trains on all and fits none.
        calibration_by: which samples ``auto`` takes: by a hash of the name of their shard and their key, of their key
            alone, of their caption or of caption and sample ("name": all samples of some captions and some of the
            others), or the last in order. By default samples of one caption are split: so 2 % are 2 %
            where few captions have many images, no caption is lost to training, and none is read to choose.
        log: service that receives the metrics of ``metrics.jsonl`` too: ``wandb``, ``trackio`` or None.
        seed: seed of initialisation and noise; ``data.seed`` is that of the order of the data.
    """

    run_dir: Path
    task: TaskConfig
    data: LoaderConfig
    length: Duration
    tokenizer: TokenizerConfig | None = None
    pretrained: PretrainedConfig | None = None
    optimizer: Optimizer = Optimizer()
    average_decay: float | None = None
    schedule: Schedule = Schedule()
    mesh: MeshConfig = MeshConfig()
    cadence: Cadence = Cadence()
    on_nonfinite: Literal["stop", "skip"] = "stop"
    evaluations: tuple[EvaluationConfig, ...] = ()
    calibration: Portion | Literal["auto"] | None = "auto"
    calibration_by: Rule = "sample"
    log: Literal["wandb", "trackio"] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.length.unit == "percent":
            raise FieldError(self, "length", f"{self.length} must be a positive number of steps, examples or epochs")
        if self.average_decay is not None and not 0 <= self.average_decay < 1:
            raise FieldError(self, "average_decay", f"{self.average_decay} must be at least 0 and below 1")
        check_objectives(Setup(self.task, run=self))
        require_at_least(0, self, "seed")
        require_choice(self, "on_nonfinite")
        require_choice(self, "calibration_by")
        if self.held_out is not None:
            group(self.data.batch_size, self.held_out)

    @property
    def held_out(self) -> float | None:
        """The fraction of every batch that is held out for ``task.temperature_gradient``; None without it."""
        return held_out_fraction(self.task.temperature_gradient, self.data.held_out_share)

    def gradient_of(self, run: RunLength) -> "Gradient | None":
        """Returns the gradient of a step of a run; None for that of the loss."""
        found, fraction = self.task.temperature_gradient, self.held_out
        return None if found is None or fraction is None else found.build(fraction, self.schedule.build(run))


def load_module_config(path: Path) -> ExperimentConfig:
    """Returns ``get_config()`` of a Python file, or of a shipped configuration, given by its name.

    ``x.py:image_size=384,head=b`` gives it arguments: literals, integers, floats, booleans and strings without commas.
    """
    config = _call(path, "get_config", "quickstart_lit_het_xl.py")
    if not isinstance(config, ExperimentConfig):
        raise UserError(f"get_config() in {path} returns {type(config).__name__}, not ExperimentConfig")
    return config


def load_evaluations(path: Path) -> tuple[EvaluationConfig, ...]:
    """Returns ``get_evaluations()`` of a Python file."""
    found = _call(path, "get_evaluations", "glyph_evaluations.py")
    if (
        not isinstance(found, tuple | list)
        or not found
        or not all(isinstance(one, tuple(EVALUATIONS.values())) for one in found)
    ):
        raise UserError(f"get_evaluations() in {path} must return a list of configurations such as ZeroShotConfig(...)")
    return tuple(found)


def load_grid(path: Path) -> dict[str, tuple[Any, ...]]:
    """Returns ``get_grid()`` of a Python file, values by field, called with the arguments of the configuration."""
    found = _call(path, "get_grid", "fine_tune_experts.py")
    if not isinstance(found, dict) or not found or not all(isinstance(one, tuple | list) for one in found.values()):
        raise UserError(f"get_grid() in {path} must return lists of values by field, such as {{'seed': [0, 1]}}")
    return {name: tuple(values) for name, values in found.items()}


def _call(path: Path, function: str, example: str) -> Any:
    """Returns the result of a function in a Python file; an error in the file is reported with its line."""
    # From the right, at ".py:", as a path may contain colons.
    file, colon, arguments = str(locate_config(path, function)).rpartition(".py:")
    path = Path(f"{file}.py") if colon else Path(arguments)
    # By path, not by name: the file need not be importable, and its folder does not enter sys.path.
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is not a Python file; a configuration is a module with {function}()")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        if not hasattr(module, function):
            raise UserError(f"{path} has no {function}(); see the shipped {example} for an example")
        called = getattr(module, function)
        return called(**_arguments(called, arguments if colon else "", path))
    except UserError:
        raise
    except Exception as error:  # the user's code may raise anything
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == spec.origin]
        place = f"{path}, line {lines[-1]}" if lines else path  # syntax errors contain the line
        message = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{place}: {message}; fix the file") from error


# What an argument of ``get_config`` may be besides a literal: how it is read, and what it is called in messages.
_ARGUMENTS: dict[type[Any], tuple[Callable[[str], Any], str]] = {
    int: (int, "whole number"),
    float: (float, "number"),
    bool: (lambda text: {"true": True, "false": False}[text.lower()], "true|false"),
    str: (str, "text"),
}


def _arguments(function: Callable[..., Any], text: str, path: Path) -> dict[str, Any]:
    """Parses the arguments ``name=value,name=value`` of a function by its annotations."""
    parameters_of = inspect.signature(function).parameters.values()
    required = [one.name for one in parameters_of if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    if not text and not required:
        return {}
    known = {
        name: form
        for name, form in get_type_hints(function).items()
        if name != "return" and (form in _ARGUMENTS or get_origin(form) is Literal)
    }
    found = {}
    for argument in text.split(",") if text else ():
        name, equals, value = argument.partition("=")
        try:
            found[name] = _argument(known[name], value if equals else None)
        except (KeyError, ValueError) as error:
            accepted = ", ".join(f"{one}={_accepted(form)}" for one, form in known.items()) or "no arguments"
            raise UserError(f"{path} does not accept {argument!r}; it accepts {accepted}") from error
    for name in required:
        if name in known and name not in found:
            raise UserError(f"{path} needs the argument {name}; add :{name}={_accepted(known[name])} to its path")
    return found


def _argument(form: Any, value: str | None) -> Any:
    """Returns an argument of this type; raises `KeyError` or `ValueError` where it is none."""
    if value is None:
        raise ValueError("no value")
    if form in _ARGUMENTS:
        return _ARGUMENTS[form][0](value)
    return {str(choice): choice for choice in get_args(form)}[value]


def _accepted(form: Any) -> str:
    return _ARGUMENTS[form][1] if form in _ARGUMENTS else "|".join(map(str, get_args(form)))


def save(config: ExperimentConfig, path: Path) -> None:
    """Writes a configuration as JSON, read back by `load`; the file is replaced atomically."""
    write_atomically(path, to_json(config))


def to_json(config: ExperimentConfig) -> str:
    """Returns what `save` writes."""
    return json.dumps(to_dict(config), indent=2) + "\n"


def load(path: Path) -> ExperimentConfig:
    """Reads a configuration that `save` wrote."""
    if not path.is_file():
        raise UserError(f"{path} is missing; give the directory of a run of lit-het")
    try:
        content = untrusted.read_json_object(path, MAX_JSON_BYTES)
        _check_values(content)
        _update(content)
        config = _CONVERTER.structure(content, ExperimentConfig)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); check the file and its permissions") from error
    except Exception as error:  # with wrong types, cattrs and the checks of fields may raise anything
        is_of_fields = isinstance(error, cattrs.BaseValidationError)
        reasons = cattrs.transform_error(error, format_exception=_explained) if is_of_fields else [str(error)]
        reason = " ".join("; ".join(reasons).split())[:1000] or type(error).__name__
        raise UserError(f"{path} does not fit this version of lit-het: {reason}") from error
    groups = (group.pattern for group in config.optimizer.groups)
    origin = () if config.pretrained is None else (config.pretrained.pattern,)
    for pattern in (*config.task.locked, *origin, *groups):
        try:
            parameters.check_pattern(pattern)
        except UserError as error:
            raise UserError(f"{path}: {error}") from error
    return config


def _explained(error: BaseException, kind: type | None) -> str:
    if isinstance(error, UserError):
        return str(error)
    # Python's words for it, such as that a list has no keys, say nothing to who wrote the file.
    return "a value of a wrong type" if isinstance(error, AttributeError) else cattrs.v.format_exception(error, kind)


def _check_values(value: Any, field: str = "") -> None:
    """Checks for NaN, infinities, too large integers, and strings that cannot be paths; raises `ValueError`."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_values(inner, name)
    elif isinstance(value, list):
        for inner in value:
            _check_values(inner, field)
    elif isinstance(value, int) and abs(value) > _LARGEST.get(field, LARGEST_NUMBER):
        raise ValueError(f"{field} = {value!r:.50} is beyond {_LARGEST.get(field, LARGEST_NUMBER):,}")
    elif isinstance(value, float) and not isfinite(value):
        raise ValueError(f"{field} = {value}")
    # Encoding also raises ValueError, if the string is not valid Unicode.
    elif isinstance(value, str) and ("\0" in value or max(map(len, value.encode().split(b"/"))) > MAX_NAME_BYTES):
        raise ValueError(f"{field} = {value!r:.50} contains NUL or a name of more than {MAX_NAME_BYTES} bytes")


def _update(value: Any) -> None:
    """Gives what earlier versions wrote the form of this version; new fields get values that change nothing."""
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _update(inner)
    if not isinstance(value, dict):
        return
    if isinstance(loss := value.get("loss"), str) and loss in _EARLIER_LOSSES:
        value["loss"] = {"type": _EARLIER_LOSSES[loss]}
    if value.get("type") == "LogTemperature" or "num_factors" in value:
        value.setdefault("learning_rate_factor", 1.0)
    if value.get("type") == "HetXLContrastiveConfig" or "num_eval_samples" in value:
        value.setdefault("antithetic", False)
    if "run_dir" in value:
        value.setdefault("calibration", None)
        value.setdefault("calibration_by", "order")
    if value.get("type") in ("SoftmaxLoss", "SigmoidLoss"):
        value.setdefault("duplicates", "negatives")
    if {"shards", "captions", "image_size"} <= value.keys():
        value.setdefault("caption_unit", "text")


def to_dict(config: Any) -> dict[str, Any]:
    """Returns a configuration as nested dicts of JSON values; alternatives carry their class under ``type``."""
    return _CONVERTER.unstructure(config, unstructure_as=type(config))


def differences(first: Any, second: Any) -> dict[str, tuple[Any, Any]]:
    """Returns the dotted fields in which two configurations differ, with both values."""
    one, other = fields(first), fields(second)
    return {
        field: (one.get(field), other.get(field))
        for field in sorted(one.keys() | other.keys())
        if one.get(field) != other.get(field)
    }


def fields(config: Any) -> dict[str, Any]:
    """Returns the dotted fields of a configuration with their values."""
    return {path.replace("/", "."): value for path, value in parameters.flatten(to_dict(config)).items()}


_UnionForm: TypeAlias = Any  # the type of X | Y


def _is_union(form: _UnionForm) -> bool:
    return get_origin(form) in (Union, UnionType)


def _structure_union(value: Any, form: _UnionForm) -> Any:
    """Reads a value that may be None or one of several dataclasses, identified by ``type``."""
    options = [option for option in get_args(form) if option is not NoneType]
    if value is None and len(options) < len(get_args(form)):
        return None
    if isinstance(value, dict) and "type" in value:
        by_name = {option.__name__: option for option in options}
        if value["type"] not in by_name:
            raise ValueError(f"unknown type {value['type']!r}; the choices are {', '.join(by_name)}")
        return _CONVERTER.structure({k: v for k, v in value.items() if k != "type"}, by_name[value["type"]])
    if any(value in get_args(option) for option in options if get_origin(option) is Literal):
        return value
    return _CONVERTER.structure(value, options[0])


def _unstructure_union(value: Any) -> Any:
    plain = _CONVERTER.unstructure(value)
    return {"type": type(value).__name__, **plain} if isinstance(plain, dict) else plain


# Losses of classifiers were strings.
_EARLIER_LOSSES = {"softmax": "SoftmaxCrossEntropy", "sigmoid": "SigmoidCrossEntropy"}

# Unknown fields are an error: a misspelt field would otherwise silently have its default.
_CONVERTER = cattrs.Converter(forbid_extra_keys=True)
_CONVERTER.register_structure_hook(Path, lambda value, _: Path(value))
_CONVERTER.register_unstructure_hook(Path, str)
for _text_form in (Duration, Portion):
    _CONVERTER.register_structure_hook(_text_form, lambda value, form: form.parse(value))
    _CONVERTER.register_unstructure_hook(_text_form, str)
_CONVERTER.register_structure_hook_func(_is_union, _structure_union)
_CONVERTER.register_unstructure_hook_func(_is_union, _unstructure_union)
