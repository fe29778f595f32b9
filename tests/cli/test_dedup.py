"""`lit-het data dedup`: planted near-duplicates, parts, thresholds, the page, and runs that leave samples out."""

import csv
import dataclasses
import io
import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from PIL import Image

from lit_het.apps.dedup import deduplication, search
from lit_het.apps.dedup.deduplication import dedup
from lit_het.apps.dedup.options import DedupOptions
from lit_het.data_pipelines.embeddings import EmbeddingFolder, Recipe, describe
from lit_het.data_pipelines.glyphs import GlyphConfig, draw_typeface
from lit_het.data_pipelines.images.transforms import Preprocessing, Training
from lit_het.data_pipelines.shards.index import ShardIndex, index_shard
from lit_het.data_pipelines.shards.storage import content_or_raise
from lit_het.data_pipelines.shards.writing import IMAGE, expand, write_shards
from lit_het.errors import UserError
from lit_het.training.train import train
from tests import tiny
from tests.cli.conftest import refusal, run_command
from tests.refusals import assert_refused

SIDE, NUM_GLYPHS = 96, 120
PREPROCESSING = Preprocessing()
DESCRIPTION = describe(Training(PREPROCESSING), 16, random=False)
RECIPE = Recipe("pixels", DESCRIPTION, 256, 0, "float32", 0)


def encoded(image: Image.Image, **options) -> bytes:
    stream = io.BytesIO()
    image.save(stream, "JPEG", **{"quality": 95, **options})
    return stream.getvalue()


def rescaled(image):
    return encoded(image.resize((61, 61), Image.Resampling.BICUBIC))


def recompressed(image):
    return encoded(image, quality=20)


def cropped(image):
    return encoded(image.crop((2, 2, SIDE - 1, SIDE - 1)))


def copied(image):
    return encoded(image)


CHANGES = (rescaled, recompressed, cropped)
COPIED = (0, 9, 30, 80, 90, 99)


def glyphs():
    """Images of characters that no other of these resembles."""
    size = GlyphConfig(image_size=SIDE, font_size=60, baseline=68, scripts=("cyrillic", "greek"))
    found, known = list[Image.Image](), np.empty((0, 256))
    for glyph in draw_typeface("DejaVuSerif", size):
        image = Image.fromarray(glyph.bitmap).convert("RGB")
        if (known @ (new := embedded(encoded(image))) < 0.8).all():
            found.append(image)
            known = np.concatenate([known, new[None]])
        if len(found) == NUM_GLYPHS:
            break
    return found


def embedded(content: bytes) -> np.ndarray:
    """A simple embedding of an image: its 16 x 16 pixels, less their mean, of length 1."""
    pixels = PREPROCESSING.apply(content, 16).mean(axis=-1).ravel()
    pixels = pixels - pixels.mean()
    return pixels / np.linalg.norm(pixels)


def embed(folder: Path, *shards: Path, recipe: Recipe = RECIPE) -> Path:
    output = EmbeddingFolder(str(folder), recipe)
    for address in expand(map(str, shards)):
        index = ShardIndex([address], [IMAGE])
        rows = [embedded(content_or_raise(content)) for (content,) in index.read(range(len(index)), [IMAGE])]
        output.write(index_shard(address), np.array(rows, np.float32)[:, None])
    return folder


@pytest.fixture(scope="module")
def planted(once):
    """A set with planted near-duplicates of itself and of an evaluation set, and the embeddings of both."""

    def write(folder):
        images = glyphs()
        train = [(f"o{number}", encoded(image)) for number, image in enumerate(images[:80])]
        # Of the first 60 glyphs one change each, and two more of the first ten.
        for number in range(60):
            for change in CHANGES if number < 10 else (CHANGES[number % 3],):
                train.append((f"{change.__name__}{number}", change(images[number])))
        train += [(f"test{number}", CHANGES[number % 3](images[number])) for number in range(80, 100)]
        # Beside near copies, exact ones: of samples to train on and, in one block with them, of evaluation sets.
        train += [(f"copied{number}", copied(images[number])) for number in COPIED]
        test = [(f"e{number}", encoded(image)) for number, image in enumerate(images) if number >= 80]
        for name, samples in (("train", train), ("test", test)):
            write_shards(folder / name, ({"__key__": key, "jpg": jpg} for key, jpg in samples), samples_per_shard=50)
        embed(folder / "embeddings", folder / "train", folder / "test")

    return once("planted", write)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(deduplication, "_LEAST_ROWS", 16)
    monkeypatch.setattr(search, "COLUMNS", 64)
    monkeypatch.setattr(search, "TILES", {"cpu": 16})


def searched(planted, output, threshold=0.9, *flags):
    where = ("--embeddings", planted / "embeddings", "--against", planted / "test", "--output", output)
    run_command("data", "dedup", planted / "train", *where, "--threshold", threshold, "--floor", 0.8, *flags)
    return rows_of(output)


def rows_of(output):
    with (output / "exclude.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_planted_duplicates_are_found_and_no_others(planted, tmp_path, capsys):
    rows = searched(planted, tmp_path / "out")
    expected = {f"{change.__name__}{n}" for n in range(60) for change in (CHANGES if n < 10 else (CHANGES[n % 3],))}
    found = {reason: {row["key"] for row in rows if row["reason"] == reason} for reason in ("duplicate", "test")}
    of_test = {f"test{number}" for number in range(80, 100)} | {f"copied{number}" for number in COPIED[3:]}
    assert found == {"duplicate": expected | {f"copied{number}" for number in COPIED[:3]}, "test": of_test}
    for row in rows:
        number = int(row["key"].lstrip("abcdefghijklmnopqrstuvwxyz"))
        assert int(row["twin_key"].lstrip("abcdefghijklmnopqrstuvwxyz")) == number
        assert Path(row["twin_shard"]).parent == planted / ("test" if row["reason"] == "test" else "train")
        assert float(row["similarity"]) >= 0.9
    assert "106 samples of 186 in" in capsys.readouterr().err


def test_parts_joined_are_the_whole_and_another_threshold_searches_nothing(planted, tmp_path, capsys):
    searched(planted, tmp_path / "whole")
    for number in (2, 0, 1):
        where = ("--embeddings", planted / "embeddings", "--against", planted / "test", "--floor", 0.8)
        run_command("data", "dedup", planted / "train", *where, "--output", tmp_path / "parts", "--part", f"{number}/3")
        assert not (tmp_path / "parts" / "exclude.csv").exists()
    assert "part 1/3 is searched (4 of 12 blocks); after all parts the same command" in capsys.readouterr().err
    with mock.patch.object(deduplication, "BlockSearch", side_effect=AssertionError("searches again")):
        searched(planted, tmp_path / "parts")
        assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")
        for file in (tmp_path / "whole").rglob("*.*"):
            assert (tmp_path / "parts" / file.relative_to(tmp_path / "whole")).read_bytes() == file.read_bytes()
        fewer = {row["key"] for row in searched(planted, tmp_path / "parts", 0.99)}
        assert 0 < len(fewer) < 106
        with pytest.raises(AssertionError, match="searches again"):
            searched(planted, tmp_path / "parts", 0.9, "--floor", 0.85)


def test_an_interrupted_search_goes_on_with_what_is_missing(planted, tmp_path, monkeypatch):
    monkeypatch.setattr(deduplication, "write_page", lambda *_: None)
    searched(planted, tmp_path / "whole")
    rows = rows_of(tmp_path / "whole")
    blocks = sorted((tmp_path / "whole").glob("pairs-*/*"))
    assert len(blocks) == 12  # of 15 samples
    kept = blocks[0].stat().st_mtime_ns
    blocks[3].unlink()
    (tmp_path / "whole" / "exclude.csv").unlink()
    assert searched(planted, tmp_path / "whole") == rows
    assert blocks[0].stat().st_mtime_ns == kept
    blocks[3].write_bytes(blocks[3].read_bytes()[:40])
    how = DedupOptions(str(planted / "embeddings"), (str(planted / "test"),), 0.9, 0.8)
    assert_refused(
        "00003-of-00012.safetensors cannot be read", dedup, [str(planted / "train")], tmp_path / "whole", how
    )


def test_the_page_shows_pairs_at_several_similarities(planted, tmp_path):
    rows = searched(planted, tmp_path / "out")
    page = (tmp_path / "out" / "duplicates.html").read_text("utf-8")
    assert "At 0.9, 106 samples of 186 (57.0%) are near-duplicates" in page
    assert "0.900 (chosen)" in page
    assert "0.867 to 0.900" not in page, "no pair is less similar"
    assert page.count('<article class="card pair">') > 10
    assert page.count("data:image/") >= 2 * page.count('<article class="card pair">')
    shown = [row for row in rows if f": {row['key']}<" in page and f": {row['twin_key']}<" in page]
    assert {row["reason"] for row in shown} == {"duplicate", "test"}


def test_a_set_without_duplicates_has_an_empty_table_that_training_takes(planted, tmp_path):
    where = ("--embeddings", planted / "embeddings", "--output", tmp_path / "out")
    run_command("data", "dedup", planted / "test", *where)
    assert (tmp_path / "out" / "exclude.csv").read_text().split() == ["shard,key,reason,similarity,twin_shard,twin_key"]
    assert "0 samples of 40" in (tmp_path / "out" / "duplicates.html").read_text("utf-8")


def test_what_cannot_be_searched_is_one_line(planted, tmp_path, capsys):
    def refused(*flags, shards=planted / "train", folder=planted / "embeddings"):
        return refusal(capsys, "data", "dedup", shards, "--embeddings", folder, "--output", tmp_path / "out", *flags)

    assert "--floor 0.9 and --threshold 0.8 must be above 0, at most 1, and the fl" in refused("--threshold", 0.8)
    assert "--floor 0 and" in refused("--floor", 0)
    assert "--part 3/3 is invalid" in refused("--part", "3/3")
    assert "--part x is not of the form I/N" in refused("--part", "x")
    assert "shard-000000.tar is also a shard of --against" in refused("--against", planted / "train")
    other = tmp_path / "other"
    write_shards(other, [{"__key__": "a", "jpg": encoded(Image.new("RGB", (9, 9)))}])
    assert "has no embeddings in" in refused("--against", other)
    assert "embeddings.json cannot be read" in refused(folder=tmp_path)
    for number, change in enumerate(({"num_crops": 2}, {"num_tokens": 4}, {"logits": True})):
        folder = tmp_path / f"e{number}"
        EmbeddingFolder(str(folder), dataclasses.replace(RECIPE, **change))
        assert "similarities need one embedding of each image: lit-het embed without" in refused(folder=folder)
    EmbeddingFolder(str(tmp_path / "e"), dataclasses.replace(RECIPE, inputs={"captions": "txt"}))
    assert "holds embeddings of captions, and those of images are read here" in refused(folder=tmp_path / "e")
    (tmp_path / "out").write_text("")
    assert "cannot be made" in refused()


def test_a_run_leaves_duplicates_out_and_resumes_with_its_own_tables_only(trained_lit, tmp_path, capsys):
    (shards,) = trained_lit.data.shards
    index = ShardIndex(expand(shards), [IMAGE])
    table = tmp_path / "exclude.csv"
    rows = [f"{index.shard(number)},{index.key(number)}\n" for number in (3, 21)]
    table.write_text("shard,key\n" + "".join(rows))
    data = dataclasses.replace(trained_lit.data, exclude=(table,))
    config = dataclasses.replace(trained_lit, run_dir=tmp_path / "run", data=data)
    tiny.finish_untrained(config)
    assert "2 of 40 samples are left out by" in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "config.json").read_text())["data"]["exclude"] == [str(table)]
    table.write_text("shard,key\n" + rows[0])
    with pytest.raises(UserError, match=r"others are left out; restore them and the tables of .* data\.exclude"):
        train(config, resume=True)
    table.write_text(
        "key,shard,reason\n" + "".join(",".join([*reversed(row.strip().split(",")), "x\n"]) for row in rows)
    )
    assert int(train(config, resume=True).step) == config.length.amount
