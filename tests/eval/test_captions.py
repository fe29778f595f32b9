"""Captions nearest to an image."""

import numpy as np
import pytest

from lit_het.eval import captions as module
from lit_het.eval.captions import CaptionIndex, index_captions
from lit_het.eval.metrics import rows
from tests.eval.fake_model import with_text
from tests.refusals import assert_refused


@pytest.mark.parametrize("values_per_block", [1, 12, 10**6])
def test_the_nearest_are_those_of_a_full_search_whatever_the_blocks(monkeypatch, unit_vectors, values_per_block: int):
    monkeypatch.setattr(rows, "VALUES_PER_BLOCK", values_per_block)
    embeddings, query = unit_vectors(50, 4), unit_vectors(1, 4, seed=1)[0]
    names = [f"caption {number}" for number in range(50)]
    found = CaptionIndex(names, embeddings).nearest(query, 7)
    scores = embeddings @ query
    best = np.argsort(-scores)[:7]
    assert [caption for caption, _ in found] == [names[place] for place in best]
    np.testing.assert_allclose([score for _, score in found], scores[best], rtol=1e-5)
    assert len(CaptionIndex(["a", "b"], embeddings[:2]).nearest(query, 7)) == 2, "fewer than requested are all"


def test_each_caption_is_embedded_once_and_cached(monkeypatch, tmp_path, make_encoder, unit_vectors):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "_BLOCK_CAPTIONS", 8)
    names, vectors = [f"caption {number}" for number in range(20)], unit_vectors(20, 3)
    encoder = with_text(make_encoder(np.eye(3), dict(zip(names, vectors, strict=True))), tower="done")
    index = index_captions(encoder, [*names, "caption 3"])
    assert index.captions == tuple(names)
    np.testing.assert_array_equal(index.embeddings, vectors)

    def fail(tokens: np.ndarray) -> np.ndarray:
        raise AssertionError("the captions were embedded before")

    np.testing.assert_array_equal(index_captions(with_text(encoder, embed=fail), names).embeddings, vectors)
    with pytest.raises(AssertionError):
        index_captions(with_text(encoder, embed=fail, tower="another"), names)
    assert len(list((tmp_path / "lit-het" / "captions").iterdir())) == 1  # nothing half written


@pytest.mark.parametrize("left", [0, 60, 140])
def test_a_truncated_index_is_recomputed(monkeypatch, tmp_path, make_encoder, left: int):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    encoder = with_text(make_encoder(np.eye(2), ("a", "b")), tower="done")
    first = np.array(index_captions(encoder, ["a", "b"]).embeddings)
    [cached] = (tmp_path / "lit-het" / "captions").iterdir()
    whole = cached.read_bytes()
    cached.write_bytes(whole[:left])
    np.testing.assert_array_equal(index_captions(encoder, ["a", "b"]).embeddings, first)
    assert cached.read_bytes() == whole


def test_no_captions_and_an_unwritable_cache_are_one_line_errors(monkeypatch, tmp_path, make_encoder):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    encoder = with_text(make_encoder(np.eye(2), {"a": np.eye(2)[0]}), tower="done")
    assert_refused("no captions", index_captions, encoder, [])
    assert_refused("set XDG_CACHE_HOME", index_captions, encoder, ["a"])
