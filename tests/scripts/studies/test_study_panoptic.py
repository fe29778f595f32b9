"""The study of panoptic segmentation: regions of classes, masks of known images, and its table."""

import numpy as np

from lit_het.tasks import quantities
from scripts.studies import harness, study_panoptic
from scripts.studies.study_panoptic import CLASSIFIER, FIGURES, ORACLE, UVIM, Predicted, regions


def test_each_connected_region_of_a_thing_is_an_instance():
    labels = np.array([[1, 1, 0, 1], [3, 3, 3, 3], [2, 0, 3, 1]])
    found = regions(labels, (True, True, False))
    np.testing.assert_array_equal(found[..., 0], labels)
    of_things = found[..., 1][labels % 3 > 0]
    assert (found[..., 1] > 0).sum() == len(of_things) == 5
    assert found[0, 0, 1] == found[0, 1, 1]
    assert len(np.unique(of_things)) == 4


def test_masks_of_known_images_are_found_by_their_pixels():
    random = np.random.default_rng(0)
    images, masks = random.integers(0, 256, (3, 4, 4, 3), dtype=np.uint8), random.integers(0, 9, (3, 4, 4, 2))
    model = Predicted({image.tobytes(): one for image, one in zip(images, masks, strict=True)}, 8)
    features = model.features.extract(np.concatenate([images[[2, 0]], 0 * images[:1]]))
    found = model(quantities.masks, np.asarray(features)[None])
    np.testing.assert_array_equal(found, np.stack([masks[2], masks[0], 0 * masks[0]]))


def test_the_table_has_a_row_of_each_method_and_a_column_of_each_figure(tmp_path):
    for name, value in ((CLASSIFIER, 0.25), (ORACLE, 0.75), (UVIM, 0.5)):
        content = {"settings": {"steps": 10_000}, "figures": dict.fromkeys(FIGURES, value)}
        harness.write_json(tmp_path / "results" / f"{name.replace(' ', '_')}_seed0.json", content)
    assert study_panoptic.main(["--output", str(tmp_path), "--seeds", "0", "--table"]) == 0
    table = (tmp_path / "panoptic.md").read_text()
    assert "| UViM | 0.500 |" in table
    header, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.strip().splitlines())
    assert [row[0] for row in rows] == [CLASSIFIER, ORACLE, UVIM]
    assert header[1:] == list(FIGURES)
