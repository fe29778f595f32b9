"""The benchmark of the search for near-duplicates runs, on few embeddings."""

import re

from lit_het.apps.dedup import search
from scripts.bench.bench_dedup import main


def test_the_search_is_set_against_bare_products(capsys, monkeypatch):
    monkeypatch.setattr(search, "COLUMNS", 64)
    monkeypatch.setattr(search, "TILES", {"cpu": 16})
    main(["--samples", "300", "--rows", "40", "--width", "16", "--rounds", "2"])
    text = capsys.readouterr().out
    assert "40 rows x 300 samples, width 16" in text
    assert re.search(r"search / bare products │ \d\.\d\d \(", text)
    assert "a billion" in text
