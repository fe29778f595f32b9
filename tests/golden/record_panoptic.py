"""Records panoptic qualities of COCO's evaluation: ``python tests/golden/record_panoptic.py``.

Needs panopticapi-lite 0.2.0, a package of the reference (panopticapi's ``evaluation.py``), which is read from files.
"""

# pyright: reportMissingImports=false

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

PATH = Path(__file__).with_name("panoptic.npz")
SIDE, NUM_CLASSES, NUM_THINGS, NUM_IMAGES, MOST_SEGMENTS = 40, 7, 3, 40, 14


def random_truth(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns the place of each pixel's segment, and class and crowd of each; some are hidden, and have no row."""
    places, rows = np.zeros((SIDE, SIDE), np.int64), [(0, 0)]
    stuff = random.permutation(np.arange(NUM_THINGS + 1, NUM_CLASSES))  # the last class occurs nowhere
    for label in (*stuff[:2], *random.integers(1, NUM_THINGS + 1, random.integers(2, 10))):
        rows.append((int(label), int(label <= NUM_THINGS and random.random() < 0.4)))
        top, left = random.integers(0, SIDE - 6, 2)
        height, width = random.integers(4, 26, 2)
        places[top : top + height, left : left + width] = len(rows) - 1
    kept = [0, *(place for place in np.unique(places) if place)]
    again = np.zeros(len(rows), np.int64)
    again[kept] = np.arange(len(kept))
    table = np.zeros((MOST_SEGMENTS, 2), np.int64)
    table[: len(kept)] = np.array(rows)[kept]
    return again[places], table


def random_prediction(random: np.random.Generator, places: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Returns the truth moved, with other classes, split and invented segments; many overlap by about half."""
    labels, instances = table[places, 0], np.where(table[places, 0] <= NUM_THINGS, places, 0)
    found = np.stack([labels, instances], axis=-1)
    found = np.roll(found, random.integers(-3, 4, 2), (0, 1))
    for place in range(1, places.max() + 1):
        choice, is_inside = random.random(), found[..., 1] == place
        if choice < 0.1:
            found[is_inside, 0] = random.integers(1, NUM_THINGS + 1)
        elif choice < 0.2:
            found[is_inside] = 0
        elif choice < 0.3:
            found[is_inside & (np.arange(SIDE) % 2 == 0)] = (random.integers(1, NUM_THINGS + 1), 50 + place)
    for number in range(random.integers(0, 4)):
        top, left = random.integers(0, SIDE - 6, 2)
        label = random.integers(1, NUM_CLASSES)
        instance = 100 + number if label <= NUM_THINGS else 0
        found[top : top + random.integers(3, 16), left : left + random.integers(3, 16)] = (label, instance)
    return found


def as_coco(folder: Path, name: str, ids: np.ndarray, segments: list[dict[str, Any]]) -> dict[str, Any]:
    """Writes the PNG of an image, and returns its annotation."""
    colours = np.stack([ids & 255, ids >> 8 & 255, ids >> 16], axis=-1).astype(np.uint8)
    Image.fromarray(colours).save(folder / f"{name}.png")
    return {"image_id": name, "file_name": f"{name}.png", "segments_info": segments}


def predicted_ids(predicted: np.ndarray) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Returns ids of the distinct pairs of class and instance, and the segments."""
    pairs, places = np.unique(predicted.reshape(-1, 2), axis=0, return_inverse=True)
    ids = np.where(pairs[:, 0] > 0, 1000 + 70_001 * np.arange(len(pairs)), 0)
    segments = [
        {"id": int(one), "category_id": int(label)} for one, (label, _) in zip(ids, pairs, strict=True) if label
    ]
    return ids[places].reshape(predicted.shape[:2]), segments


def true_segments(places: np.ndarray, table: np.ndarray) -> list[dict[str, Any]]:
    """Returns COCO's description of the segments of an image; their ids are their places times 300."""
    areas = np.bincount(places.ravel(), minlength=len(table))
    return [
        {"id": 300 * place, "category_id": int(label), "iscrowd": int(is_crowd), "area": int(areas[place])}
        for place, (label, is_crowd) in enumerate(table)
        if label
    ]


def main() -> None:
    """Writes the file."""
    from panopticapi.evaluation import pq_compute_single_core

    random = np.random.default_rng(0)
    truths = [random_truth(random) for _ in range(NUM_IMAGES)]
    predictions = [random_prediction(random, *truth) for truth in truths]
    categories = {k: {"id": k, "isthing": int(k <= NUM_THINGS)} for k in range(1, NUM_CLASSES + 1)}
    counts, total = [], None
    with tempfile.TemporaryDirectory() as folder:
        true, found = Path(folder) / "true", Path(folder) / "found"
        true.mkdir()
        found.mkdir()
        for number, ((places, table), predicted) in enumerate(zip(truths, predictions, strict=True)):
            pair = (
                as_coco(true, str(number), 300 * places, true_segments(places, table)),
                as_coco(found, str(number), *predicted_ids(predicted)),
            )
            one = pq_compute_single_core(0, [json.loads(json.dumps(pair))], str(true), str(found), categories)
            counts.append([[getattr(one[k], name) for name in ("iou", "tp", "fp", "fn")] for k in categories])
            total = one if total is None else total.__iadd__(one)
    assert total is not None
    results = {}
    for name, is_thing in (("all", None), ("things", True), ("stuff", False)):
        mean, of_classes = total.pq_average(categories, is_thing)
        results[name] = [mean[key] for key in ("pq", "sq", "rq", "n")]
        if name == "all":
            results["classes"] = [[of_classes[k][key] for key in ("pq", "sq", "rq")] for k in categories]
    np.savez_compressed(
        PATH,
        places=np.array([places for places, _ in truths], np.uint8),
        segments=np.array([table for _, table in truths], np.uint8),
        predicted=np.array(predictions, np.uint8),
        counts=np.array(counts, np.float64),
        all=np.array(results["all"]),
        things=np.array(results["things"]),
        stuff=np.array(results["stuff"]),
        classes=np.array(results["classes"]),
    )


if __name__ == "__main__":
    main()
