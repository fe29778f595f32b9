"""The runs of the folder ``runs``: what they predict, how they go on, what evaluations find, and what exports hold.

Nothing here knows the code below the command line and ``lit_het.load``. All paths are those of the unpacked folder, in
which these functions are called.
"""

import contextlib
import dataclasses
import json
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from safetensors import safe_open

import lit_het
from lit_het.cli.main import main
from tests.conftest import one_device

RUNS = Path(__file__).parent / "runs"
# Others are finished: a calibrated run, weights that were imported, and a fitted posterior.
STOPPED = ("classifier", "deterministic", "het_xl", "gaussian", "captioner", "decoder", "experts", "translation")
NAMES = (*STOPPED, "calibrated", "imported", "posterior")
FORMATS = ("huggingface", "npz", "lit-het", "onnx")
# The runs whose towers others lock.
_TOWERS: Mapping[str, str] = {
    **dict.fromkeys(("deterministic", "het_xl", "calibrated", "captioner", "decoder"), "classifier"),
    "posterior": "imported",
}

# A key's bias has no gradient but rounding, of which Adam makes whole steps: their norm is that of the machine.
_NOT_COMPARED = ("train/steps_per_second", "train/update_norm")

_LABELS = tuple(f"{colour} {shape}" for colour in ("red", "green", "blue", "grey") for shape in ("square", "bar"))
_IMAGES = [np.full((16, 16, 3), colour, np.uint8) for colour in ((255, 0, 0), (40, 90, 200))]
_READINGS: Mapping[str, Callable[[Any], Any]] = {
    "classify": lambda model: [_columns(found) for found in model.classify(_IMAGES, _LABELS, samples=4)],
    "encode_images": lambda model: model.encode_images(_IMAGES),
    "encode_texts": lambda model: model.encode_texts(["red bar", "a blue square"]),
    "noise": lambda model: model.noise(_IMAGES),
    "prediction_sets": lambda model: model.classify(_IMAGES[0], _LABELS, coverage=0.9).to_dict()["prediction_set"],
    "caption": lambda model: model.caption(_IMAGES[0], samples=4, num_tokens=4),
    "ask": lambda model: model.ask(_IMAGES[0], "", _LABELS[:3], samples=4),
    "translate": lambda model: model.translate("red bar"),
}
_IMAGE_TEXT = ("classify", "encode_images", "encode_texts", "noise")
_READ = {
    "classifier": ("classify", "encode_images", "noise"),
    "experts": ("classify", "encode_images"),
    "calibrated": (*_IMAGE_TEXT, "prediction_sets"),
    "captioner": (*_IMAGE_TEXT, "caption", "ask"),
    "decoder": ("caption", "ask"),
    "translation": ("translate",),
}
_EVALUATIONS = {
    "decoder": ("captioning", "shapes=shapes/train", "--samples", "4"),
    "translation": ("captioning", "pairs=translations", "--captions", "json/de"),
}


def unpack(folder: Path, name: str) -> None:
    """Writes a run, and what it reads, into a folder."""
    for part in {name, _TOWERS.get(name, name), "shapes", "translations"}:
        with tarfile.open(RUNS / f"{part}.tar.xz") as archive:
            archive.extractall(folder, filter="data")


def predictions(name: str) -> Any:
    """Returns what an opened run says of images and texts."""
    model = lit_het.load(name)
    return {reading: _plain(_READINGS[reading](model)) for reading in _READ.get(name, _IMAGE_TEXT)}


def evaluated(name: str) -> Any:
    """Returns the metrics of an evaluation."""
    kind, data, *flags = _EVALUATIONS.get(name, ("zero-shot", "shapes=shapes/train", "--samples", "4"))
    _run(kind, "--checkpoint", name, "--data", data, "--split", ".", "--output", "metrics.json", *flags)
    return _plain(json.loads(Path("metrics.json").read_text()))


def exported(name: str, form: str) -> Any:
    """Returns the files of an export with the names and shapes of their arrays; None where a run has no such form."""
    output = Path("exported", f"{name}-{form}{'.npz' * (form == 'npz')}")
    output.parent.mkdir(exist_ok=True)
    if main(["export", "--checkpoint", name, "--to", form, "--output", str(output)]):
        return None
    found = sorted(path for path in output.rglob("*") if path.is_file()) or [output]
    return {str(path.relative_to(output.parent)): _arrays(path) for path in found}


def resumed(name: str) -> Any:
    """Returns the metrics of the steps that were left; the run is finished then."""
    moved = ("--pretrained.run", _TOWERS[name]) if name in _TOWERS else ()
    _run("train", "--config", f"{name}/config.json", "--resume", *moved)
    steps = [json.loads(line) for line in Path(name, "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    return [_plain({key: step[key] for key in step if key not in _NOT_COMPARED}) for step in steps[2:]]


def recorded() -> dict[str, Any]:
    """Returns all of it by run."""
    return {name: _recorded(name) for name in NAMES}


def _recorded(name: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), one_device():
        unpack(Path(folder), name)
        return {
            "predictions": predictions(name),
            "metrics": evaluated(name),
            "exports": {form: exported(name, form) for form in FORMATS},
            "steps": resumed(name) if name in STOPPED else [],
        }


def assert_close(recorded: Any, now: Any, place: str = "") -> None:
    """Compares two values of JSON: all keys and texts, and numbers to 1e-4."""
    if isinstance(recorded, dict) and isinstance(now, dict):
        assert now.keys() == recorded.keys(), place
        for key in recorded:
            assert_close(recorded[key], now[key], f"{place}/{key}")
    elif isinstance(recorded, list) and isinstance(now, list):
        assert len(now) == len(recorded), place
        for number, (one, other) in enumerate(zip(recorded, now, strict=True)):
            assert_close(one, other, f"{place}/{number}")
    else:
        same = pytest.approx(recorded, rel=1e-4, abs=1e-6) if isinstance(recorded, float) else recorded
        assert now == same, place


def _run(*command: str) -> None:
    assert main(list(command)) == 0, command


def _columns(found: Any) -> dict[str, Any]:
    """Returns what ``lit-het classify --json`` prints of an image, with a list of the labels' values for each name."""
    image = found.to_dict()
    labels = image.pop("labels")
    return image | {name: [label[name] for label in labels] for name in labels[0]}


def _plain(value: Any) -> Any:
    """Returns a value as JSON holds it, with numbers of 7 digits."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _plain(dataclasses.asdict(value))
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _arrays(path: Path) -> dict[str, str]:
    """Returns type and shape of what a file of weights or an ONNX graph takes and gives; other files have nothing."""
    match path.suffix:
        case ".safetensors":
            with safe_open(path, "numpy") as file:
                slices = {key: file.get_slice(key) for key in file.keys()}  # noqa: SIM118
                return {key: f"{one.get_dtype()} {one.get_shape()}" for key, one in sorted(slices.items())}
        case ".npz":
            with np.load(path) as file:
                return {key: f"{file[key].dtype} {list(file[key].shape)}" for key in sorted(file)}
        case ".onnx":
            session = onnxruntime.InferenceSession(path)
            sides = {"in": session.get_inputs(), "out": session.get_outputs()}
            return {f"{side} {one.name}": f"{one.type} {one.shape}" for side, found in sides.items() for one in found}
        case _:
            return {}
