"""The study of planted near-duplicates: what is planted, and what is measured."""

import io

from PIL import Image

from scripts.studies.study_duplicates import measured, planted


def test_every_second_original_has_a_changed_copy(data):
    samples = {sample["__key__"]: sample["jpg"] for sample in planted(str(data / "train"), 9)}
    originals = [f"original-{number}" for number in range(9)]
    assert [*samples] == [*originals, "rescaled-0", "recompressed-2", "cropped-4", "rescaled-6", "recompressed-8"]
    sizes = {key: Image.open(io.BytesIO(content)).size for key, content in samples.items()}
    assert sizes["rescaled-0"] == (16, 16)
    assert sizes["cropped-4"] == (30, 30)
    assert sizes["recompressed-2"] == sizes["original-2"] == (32, 32)
    assert len(samples["recompressed-2"]) < len(samples["original-2"])


def test_recall_is_of_copies_and_precision_of_twins():
    found = {
        "rescaled-0": "original-0",
        "cropped-4": "original-3",
        "original-7": "original-1",
        "rescaled-6": "rescaled-0",
    }
    rows = [{"key": key, "twin_key": twin} for key, twin in found.items()]
    assert measured(rows, (2, 3, 4)) == ["1.000", "0.000", "0.250", "0.250", "4"]
