"""`lit-het data score`: suspect captions of shards, by a trained image-text model."""

import csv

import numpy as np
import pytest
from scipy.special import log_softmax

from lit_het.apps.scoring import caption_columns
from lit_het.cli.main import main
from lit_het.data_pipelines.images.decoding import encode_jpeg
from lit_het.data_pipelines.shards.writing import write_shards
from lit_het.eval.sets.recognition import embed_texts
from lit_het.models.opening import open_run
from lit_het.tasks import quantities
from tests.cli.conftest import refusal


def scored(*arguments):
    assert main(["data", "score", *map(str, arguments)]) == 0


def test_every_sample_has_a_row_and_the_worst_are_on_a_page(trained_lit, data, tmp_path):
    output = tmp_path / "scores.csv"
    scored(trained_lit.run_dir, data / "train", "--output", output, "--worst", 3)
    with output.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 40
    losses = [float(row["loss"]) for row in rows]
    assert losses == sorted(losses, reverse=True)
    assert len({(row["shard"], row["key"]) for row in rows}) == 40
    page = (tmp_path / "scores.html").read_text(encoding="utf-8")
    assert page.count('<article class="card">') == 3
    assert rows[0]["caption"] in page


def test_another_column_ranks_and_parquet_holds_the_same(trained_lit, data, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    output = tmp_path / "scores.parquet"
    scored(trained_lit.run_dir, data / "train", "--output", output, "--by", "noise_norm")
    table = pq.read_table(output).to_pydict()
    assert list(table) == ["shard", "key", "caption", "loss", "margin", "similarity", "noise_norm"]
    assert table["noise_norm"] == sorted(table["noise_norm"], reverse=True)
    assert table["noise_norm"][0] > 0


def test_columns_are_those_of_a_slow_computation(trained_lit):
    model = open_run(trained_lit.run_dir).model()
    captions = ["red bar", "blue square", "red bar", "green bar"]
    features = np.random.default_rng(0).normal(
        size=(4, model.features.extract(np.zeros((8, 28, 28, 3), np.uint8)).shape[1])
    )
    features = features.astype(np.float32)
    found = caption_columns(model, features, captions, candidates=10)
    distinct = ["red bar", "blue square", "green bar"]
    texts = embed_texts(model, distinct)
    images = model(quantities.embeddings, features[None])
    temperature = model(quantities.scores, features[None], classes=texts)[0, 0] / (images[0] @ texts[0])
    logits = images @ texts.T * temperature
    own = [0, 1, 0, 2]
    np.testing.assert_allclose(found["loss"], -log_softmax(logits, axis=1)[range(4), own], rtol=1e-3)
    best_other = [max(np.delete(row, mine)) for row, mine in zip(logits, own, strict=True)]
    np.testing.assert_allclose(found["margin"], logits[range(4), own] - best_other, rtol=1e-2, atol=1e-4)
    np.testing.assert_allclose(found["similarity"], np.sum(images * texts[own], axis=1), rtol=1e-4, atol=1e-6)
    # With fewer candidates a sample's own caption still competes.
    fewer = caption_columns(model, features, captions, candidates=1)["loss"]
    assert (fewer >= -1e-5).all()
    assert (fewer <= found["loss"] + 1e-4).all()


def test_of_several_captions_the_first_is_scored(capsys, trained_lit, tmp_path):
    image = encode_jpeg(np.zeros((8, 8, 3), np.uint8))
    texts = ("red bar\nblue square", "green bar")
    write_shards(tmp_path / "several", [{"__key__": str(i), "jpg": image, "txt": text} for i, text in enumerate(texts)])
    scored(trained_lit.run_dir, tmp_path / "several", "--output", tmp_path / "scores.csv")
    with (tmp_path / "scores.csv").open(encoding="utf-8") as file:
        assert {row["key"]: row["caption"] for row in csv.DictReader(file)} == {"0": "red bar", "1": "green bar"}
    assert "of several captions of an image the first is scored" in capsys.readouterr().err


def test_what_cannot_be_scored_is_one_line(capsys, trained_lit, upstream, data, tmp_path):
    shards, output = data / "train", tmp_path / "scores.csv"
    assert "has no text tower; captions are scored by an image-text model" in refusal(
        capsys, "data", "score", upstream, shards, "--output", output
    )
    for wrong in (tmp_path / "scores.txt", tmp_path / "nowhere" / "scores.csv"):
        line = refusal(capsys, "data", "score", trained_lit.run_dir, shards, "--output", wrong)
        assert "must end in .csv or .parquet and lie in an existing folder" in line
    bare = tmp_path / "bare"
    image = np.zeros((8, 8, 3), np.uint8)
    write_shards(bare, [{"__key__": "0", "jpg": encode_jpeg(image)}])
    assert "give the member with captions as --captions" in refusal(
        capsys, "data", "score", trained_lit.run_dir, bare, "--output", output
    )
