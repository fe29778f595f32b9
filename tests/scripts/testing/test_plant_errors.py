"""The deliberate errors fit the tree: each names a line that its file has once, and tests that exist."""

from scripts.testing.plant_errors import ROOT, read_errors


def test_every_deliberate_error_can_be_planted():
    errors = read_errors()
    assert len(errors) > 40
    assert not [path for error in errors.values() for path in error.tests if not (ROOT / path).exists()]
