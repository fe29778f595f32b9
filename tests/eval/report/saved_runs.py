"""Writes folders of runs as training and evaluators write them, without model or data."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lit_het.eval.evaluation import Drawing, Evaluation, write_record

# Names that would break a page that does not escape them.
NAMES = ('a <b>cat</b> & "dog"', "it's | a\\ [trap](x)", "plain", "other")
NUM_IMAGES = 30


def config(seed: int = 0, **changes: Any) -> dict[str, Any]:
    return {
        "run_dir": f"runs/seed{seed}/model",
        "task": {"type": "ContrastiveConfig", "text_tower": {"width": 8}, "head": {"type": "HetXLContrastiveConfig"}},
        "data": {"shards": [f"runs/seed{seed}/data"], "seed": seed},
        "seed": seed,
        **changes,
    }


def predictions(seed: int = 0) -> Drawing:
    generator = np.random.default_rng(seed)
    confidence = np.sort(generator.uniform(0.3, 1.0, NUM_IMAGES))
    edges, centres = np.arange(15) / 15, (np.arange(15) + 0.5) / 15
    curve = np.stack([edges, centres, centres * 0.9, np.full(15, NUM_IMAGES / 15)])
    curve[1:3, 2] = np.nan
    curve[3, 2] = 0
    coverages = np.array([0.5, 0.7, 0.9])
    sets = np.stack([coverages, coverages + 0.01, 1 + coverages, np.full(3, 0.1)])
    risk = np.stack([np.linspace(0.1, 1.0, 10), np.linspace(0.0, 0.5, 10)])
    label = np.arange(NUM_IMAGES) % 4
    top_classes = np.stack([(label + np.arange(NUM_IMAGES) % 3) % 4, (label + 3) % 4], axis=1)
    return Drawing(
        {
            **{f"reliability/{part}": curve for part in ("plain", "calibrated", "noisy")},
            **{f"sets/{part}": sets for part in ("plain", "calibrated", "noisy")},
            **{f"risk/{part}": risk for part in ("plain", "calibrated", "noisy", "noise_norm")},
            "confidence": confidence,
            "noise_norm": generator.uniform(0.1, 0.5, NUM_IMAGES),
            "correct": (top_classes[:, 0] == label).astype(np.float64),
            "worst": np.array([(0, 1, 2, 8), (0, 2, 3, 8), (1, 2, 3, 8)]),
            "row": np.arange(NUM_IMAGES),
            "label": label,
            "top_classes": top_classes,
            "top_probabilities": np.stack([confidence, 1 - confidence], axis=1),
            "image": generator.integers(0, 256, (NUM_IMAGES, 8, 8, 3), np.uint8),
            "spectrum": -np.sort(-generator.uniform(0.0, 1.0, (NUM_IMAGES, 5)), axis=1),
            "kernel_alignment": generator.uniform(0.2, 0.9, (NUM_IMAGES, 2)),
        },
        {"class_names": NAMES},
    )


def zero_shot(seed: int = 0, **changes: float) -> Evaluation:
    figures = {"top1": 0.5 + 0.01 * seed, "nll": 1.25 + 0.02 * seed, "ece": 0.125}
    figures |= {"calibrated/top1": 0.5, "calibrated/ece": 0.05, "noisy/top1": 0.48, "noisy/ece": 0.1}
    figures |= {"calibrated/temperature_factor": 0.75}
    chance = {"top1": 0.25, "nll": 1.386, "ece": 0.0}
    drawing = predictions(seed)
    return Evaluation("zero_shot", "pets", figures | changes, {"top1": 0.02}, chance, lambda: drawing)


def all_kinds(seed: int = 0) -> list[Evaluation]:
    generator = np.random.default_rng(seed)
    parts = ("clean", "fog/1", "fog/2", "snow/1", "snow/2", "severity_1", "severity_2", "corrupted")
    figures = ("top1", "nll", "brier", "ece")
    shift = {f"{part}/{name}": 0.5 - 0.05 * number for number, part in enumerate(parts) for name in figures}
    groups, kinds = ("inside", "near/birds", "far/noise"), ("max_probability", "energy")
    scores = {f"{group}/{kind}": generator.normal(size=40) for group in groups for kind in kinds}
    outside = [name for name in scores if not name.startswith("inside")]
    detection = {f"{name}/{figure}": 0.75 for name in outside for figure in ("auroc", "fpr95")}
    retrieval = Drawing(
        {
            "image": generator.integers(0, 256, (3, 100, 80, 3), np.uint8),
            "query_rows": np.array([0, 1]),
            "caption_is_right": np.array([[True, False], [False, False]]),
            "found": np.array([[0, 1], [2, 1]]),
            "image_is_right": np.array([[True, False], [False, True]]),
        },
        {"best_captions": (*NAMES[:2], "three", "four"), "queries": ("a <i>query</i>", "another")},
    )
    recalls = {f"{way}_recall1": 0.4 for way in ("image_to_text", "text_to_image")}
    shots = {"1_shot": 0.3, "5_shot": 0.5, "10_shot": 0.6}
    joint = {f"{who}_{figure}": 0.5 for who in ("joint", "individual") for figure in ("top1", "nll")}
    joint |= {"kl": 0.1, "member_1/top1": 0.4, "member_2/top1": 0.6}
    drawn = [f"size/{figure}" for figure in ("nll", "top1", "ece", "mutual_information")]
    smaller = {name: np.array([0.5, 0.4]) for name in drawn}
    smaller |= {f"{name}/error": np.array([0.01, 0.02]) for name in drawn}
    return [
        zero_shot(seed),
        Evaluation("retrieval", "coco", recalls, chance=recalls, draw=lambda: retrieval),
        Evaluation("few_shot", "pets", shots, dict.fromkeys(shots, 0.01)),
        Evaluation("linear_probe", "pets", {"top1": 0.7, "best/learning_rate": 0.001, "best/epochs": 3.0}),
        Evaluation("shift", "pets", shift),
        Evaluation("out_of_distribution", "pets", detection, draw=lambda: Drawing(scores)),
        Evaluation("ensemble", "pets", joint, draw=lambda: Drawing({"size": np.array([1.0, 2.0]), **smaller})),
    ]


def history(seed: int = 0) -> list[dict[str, Any]]:
    return [
        {"step": step, "train/loss": 2 / step + seed, "train/temperature": 0.1, "train/image_noise_norm": 0.2}
        | ({"zero_shot/pets/top1": step / 100} if step % 20 == 0 else {})
        for step in range(10, 60, 10)
    ]


def write_run(
    folder: Path,
    evaluations: list[Evaluation],
    seed: int = 0,
    *,
    settings: Mapping[str, Any] | None = None,
    step: int = 50,
    **changes: Any,
) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config(seed, **changes)))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in history(seed)))
    for evaluation in evaluations:
        write_record(evaluation, folder, step, {"data": {"name": evaluation.name}} if settings is None else settings)
    return folder


DETERMINISTIC = {**config()["task"], "head": {"type": "DeterministicContrastiveConfig"}}
