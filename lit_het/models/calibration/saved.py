"""Writes and reads ``RUN/calibration.json``: the fitted temperatures of a checkpoint."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, cast

from lit_het import untrusted
from lit_het.calibrations import Calibration, FittedNames, FittedTemperature, NameCalibration
from lit_het.console import message
from lit_het.data_pipelines.texts.familiarity import rules
from lit_het.errors import UserError
from lit_het.eval.metrics.calibration import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE
from lit_het.eval.metrics.conformal import ConformalThresholds
from lit_het.files import write_atomically


def calibration_path(run_dir: Path) -> Path:
    """Returns the path of a run's fitted temperatures."""
    return run_dir / "calibration.json"


def write_calibration(
    run_dir: Path, step: int, calibration: Calibration, conformal: ConformalThresholds | None = None
) -> None:
    """Writes the temperatures of the checkpoint of a step, and the thresholds of its prediction sets if it has them."""
    path = calibration_path(run_dir)
    try:
        content = {"step": step, **dataclasses.asdict(calibration)}
        del content["prior"]  # of whom predicts
        if conformal is not None:
            content["conformal"] = conformal.to_json()
        write_atomically(path, json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from error


def copy_calibration(source: Path, run_dir: Path, step: int) -> None:
    """Copies the fitted temperatures of a checkpoint, if there are any, as those of one of another ``step``.

    Of the data that they were fitted to, only the names are copied.
    """
    if calibration_path(source).is_file():
        content = untrusted.read_json(calibration_path(source))
        content["data"] = [Path(path).name for path in content["data"]]
        write_atomically(calibration_path(run_dir), json.dumps({**content, "step": step}, indent=1) + "\n")


def read_calibration(run_dir: Path, step: int) -> Calibration | None:
    """Returns the temperatures of the checkpoint of a step; None if there are none.

    Those of another checkpoint are not used, and a message says so.
    """
    path = calibration_path(run_dir)
    try:
        content = untrusted.read_json_object(path)
        fitted_at = int(content.pop("step"))
        content.pop("conformal", None)  # only `classify --coverage` needs them
        calibration = _parsed(content)
    except (FileNotFoundError, NotADirectoryError):  # the model may be one file
        return None
    except (OSError, untrusted.Malformed, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{path} is not a valid calibration ({reason}); delete it, and calibrate again") from error
    if fitted_at != step:
        message(f"{path} was fitted at step {fitted_at}, the run is at {step}: ignored; run lit-het calibrate again")
        return None
    return calibration


def _parsed(content: dict[str, Any]) -> Calibration:
    """Returns a calibration from JSON values."""
    noiseless, monte_carlo = _fitted(content.pop("noiseless")), content.pop("monte_carlo")
    data = tuple(map(str, content.pop("data")))
    for field in ("num_images", "num_candidates", "num_samples"):
        if type(content[field]) is not int:
            raise TypeError(f"{field} is not an integer")
    if not isinstance(content["portion"], str) or not isinstance(content["digest"], str):
        raise TypeError("portion or digest is not a string")
    names = content.pop("names", None)  # calibrations of earlier versions have none
    return Calibration(
        data=data,
        noiseless=noiseless,
        monte_carlo=None if monte_carlo is None else _fitted(monte_carlo),
        names=None if names is None else _by_names(names),
        **content,
    )


def _by_names(content: dict[str, Any]) -> NameCalibration:
    if content["rule"] not in rules() or not all(type(content[name]) is int for name in ("num_seen", "num_new")):
        raise ValueError("names have another rule, or counts that are no integers")
    noiseless, monte_carlo = _fitted_names(content.pop("noiseless")), content.pop("monte_carlo")
    noisy = None if monte_carlo is None else _fitted_names(monte_carlo)
    return NameCalibration(noiseless=noiseless, monte_carlo=noisy, **content)


def _fitted_names(content: dict[str, Any]) -> FittedNames:
    alone, errors = _fitted(content.pop("alone")), tuple(map(float, content.pop("errors")))
    numbers = {name: float(value) for name, value in content.items()}
    fitted = FittedNames(errors=cast(Any, errors), alone=alone, **numbers)
    is_finite = len(errors) == 2 and all(map(math.isfinite, (fitted.offset, *errors))) and fitted.new_per_seen > 0
    if not is_finite or not LOWEST_TEMPERATURE <= fitted.temperature <= HIGHEST_TEMPERATURE:
        raise ValueError(f"a temperature and offset of names of {fitted}")
    return fitted


def _fitted(content: dict[str, Any]) -> FittedTemperature:
    fitted = FittedTemperature(**{name: float(value) for name, value in content.items()})
    is_finite = all(map(math.isfinite, dataclasses.astuple(fitted)))
    if not is_finite or not LOWEST_TEMPERATURE <= fitted.temperature <= HIGHEST_TEMPERATURE:
        raise ValueError(f"a temperature of {fitted}")
    return fitted
