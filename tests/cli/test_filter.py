"""`lit-het data filter`: rules for captions, images and scores, their table, counts and page."""

import csv
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import lit_het
from lit_het.apps.filter.options import FilterOptions, Limits
from lit_het.apps.filter.rules import Sample, rules_of
from lit_het.cli.main import main
from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.images.decoding import BrokenImage, encode_jpeg, sides_of
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.writing import write_shards
from lit_het.data_pipelines.texts.captions import Caption
from lit_het.data_pipelines.texts.captions_config import Language
from lit_het.files import write_columns
from tests.cli.conftest import last_line, refusal


def jpeg(height=32, width=32):
    return encode_jpeg(np.full((height, width, 3), 99, np.uint8))


SAMPLES = {
    "good": {"jpg": jpeg(), "txt": "a photo of a cat", "json": {"language": "en"}},
    "wide": {"jpg": jpeg(16, 64), "txt": "a wide photo", "json": {"language": "en"}},
    "small": {"jpg": jpeg(8, 8), "txt": "a small photo", "json": {"language": "en"}},
    "short": {"jpg": jpeg(), "txt": "cat", "json": {"language": "en"}},
    "german": {"jpg": jpeg(), "txt": "eine alte Katze", "json": {"language": "de"}},
    "untagged": {"jpg": jpeg(), "txt": "a photo without language", "json": {}},
    "advert": {"jpg": jpeg(8, 40), "txt": "BUY  now, today\nthe second caption", "json": {"language": "en"}},
    "second": {"jpg": jpeg(), "txt": "a photo of a dog\nclick here now", "json": {"language": "en"}},
    "blank": {"jpg": jpeg(), "txt": "\n", "json": {"language": "en"}},
    "broken": {"jpg": b"\xff\xd8damaged", "txt": "a photo of a tree", "json": {"language": "en"}},
}
RULES = ("--min-words", 2, "--max-aspect", 3, "--min-side", 16, "--languages", "en", "fr")


@pytest.fixture
def shards(tmp_path):
    write_shards(tmp_path / "d", [{"__key__": key, **sample} for key, sample in SAMPLES.items()], samples_per_shard=4)
    return tmp_path / "d"


@pytest.fixture
def words(tmp_path):
    (tmp_path / "words.txt").write_text("buy now\n\nclick here\n", "utf-8")
    return tmp_path / "words.txt"


def filtered(*arguments):
    assert main(["data", "filter", *map(str, arguments)]) == 0


def rows_of(output: Path):
    with output.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def reasons(output: Path):
    return {(row["key"], row["reason"]): row["value"] for row in rows_of(output)}


def test_every_rule_lists_the_samples_that_break_it_with_their_values(shards, words, tmp_path):
    output = tmp_path / "out.csv"
    filtered(shards, "--output", output, *RULES, "--without-words", words)
    assert reasons(output) == {
        ("wide", "aspect"): "4.0",
        ("small", "side"): "8",
        ("short", "words"): "1",
        ("german", "language"): "de",
        ("untagged", "language"): "unknown",
        ("advert", "aspect"): "5.0",
        ("advert", "side"): "8",
        ("advert", "forbidden"): "BUY  now",
        ("second", "forbidden"): "click here",
        ("blank", "caption"): "empty caption",
        ("broken", "image"): "damaged JPEG",
    }
    [row] = [row for row in rows_of(output) if row["key"] == "second"]
    assert row["caption"] == "a photo of a dog"
    assert Path(row["shard"]).is_absolute()


def test_training_leaves_them_out(shards, words, tmp_path):
    output = tmp_path / "out.csv"
    filtered(shards, "--output", output, *RULES, "--without-words", words)
    data = LoaderConfig((str(shards),), captions="txt", exclude=(output,), threads=0)
    loader = Loader(data, lambda texts: np.zeros((len(texts), 1), np.int32))
    assert [loader.index.key(number) for number in loader.numbers] == ["good"]


def test_counts_are_of_each_rule_and_of_it_alone_and_the_page_shows_some_of_each(
    shards, words, tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "160")  # one line a rule
    output = tmp_path / "out.csv"
    filtered(shards, "--output", output, *RULES, "--without-words", words, "--shown", 1)
    printed = capsys.readouterr().out
    lines = {line.split("  ")[0].strip(): line.split() for line in printed.splitlines()}
    assert lines["longer side divided by the shorter at most 3"][-3:] == ["2", "1", "20.00%"]
    assert lines["pixels of the shorter side at least 16"][-3:] == ["2", "1", "20.00%"]
    assert lines["none of the words in words.txt"][-3:] == ["2", "1", "20.00%"]
    assert lines["a caption in en or fr"][-3:] == ["2", "2", "20.00%"]
    assert lines["all rules"][-3:] == ["9", "8", "90.00%"]
    page = output.with_suffix(".html").read_text("utf-8")
    assert page.count('<article class="card">') == 7  # one of each rule, of a caption and of an image
    assert "9 of 10 samples are left out" in page
    assert "forbidden (none of the words in words.txt): 1 of 2 samples" in page


def test_several_places_of_captions_are_judged_together_and_parquet_holds_the_same(shards, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    output = tmp_path / "out.parquet"
    filtered(shards, "--output", output, "--captions", "txt,json/language", "--max-characters", 15)
    found = pq.read_table(output).to_pydict()
    assert {*zip(found["key"], found["value"], strict=True)} >= {("good", "16"), ("untagged", "24")}
    assert "blank" not in found["key"]  # it has a text in the second place
    assert "short" not in found["key"]


def write_scores(path, shards, **values):
    addresses = {key: str(shards / f"shard-{i // 4:06}.tar") for i, key in enumerate(SAMPLES)}
    rows = [(addresses[key], key, f"caption of {key}", *values[key]) for key in values]
    names = ("shard", "key", "caption", "loss", "similarity", "noise_norm")
    write_columns(path, dict(zip(names, zip(*rows, strict=True), strict=True)))
    return path


def test_scores_of_a_table_are_limits_and_samples_without_one_are_kept(shards, tmp_path, capsys):
    scores = {"good": (0.1, 0.4, 0.2), "wide": (9.0, -0.1, 0.2), "small": (0.2, 0.25, 0.7)}
    table, output = write_scores(tmp_path / "scores.csv", shards, **scores), tmp_path / "out.csv"
    limits = ("--min-similarity", 0.25, "--max-loss", 5, "--max-noise", 0.5)
    filtered(shards, "--output", output, "--scores", table, *limits)
    assert reasons(output) == {
        ("wide", "similarity"): "-0.1",
        ("wide", "loss"): "9.0",
        ("small", "noise"): "0.7",
    }
    assert "7 of 10 samples have no score, and are not judged by it" in capsys.readouterr().err


@pytest.mark.slow
def test_the_similarity_of_stored_embeddings_is_that_of_the_scores(trained_lit, data, tmp_path, capsys):
    shards, scores = data / "train", tmp_path / "scores.csv"
    assert main(["data", "score", str(trained_lit.run_dir), str(shards), "--output", str(scores)]) == 0
    similarity = {row["key"]: float(row["similarity"]) for row in rows_of(scores)}
    limit = float(np.median([*similarity.values()]))
    lit_het.embed(trained_lit.run_dir, tmp_path / "images", data=(str(shards),), dtype="float32")
    lit_het.embed(trained_lit.run_dir, tmp_path / "texts", data=(str(shards),), dtype="float32", texts=True)
    found = []
    stored = ("--embeddings", tmp_path / "images", "--text-embeddings", tmp_path / "texts")
    for number, source in enumerate((("--scores", scores), stored)):
        output = tmp_path / f"out{number}.csv"
        filtered(shards, "--output", output, "--min-similarity", limit + 1e-5, *source)
        found.append({key: float(value) for (key, _), value in reasons(output).items()})
    assert 0 < len(found[0]) < len(similarity)
    assert found[0].keys() == found[1].keys()
    for key, value in found[0].items():
        assert found[1][key] == pytest.approx(value, abs=1e-4) == pytest.approx(similarity[key], abs=1e-4)
    # The same folder twice, or each in the place of the other.
    for images, texts, held in (("texts", "texts", "captions"), ("images", "images", "images")):
        flags = ("--embeddings", tmp_path / images, "--text-embeddings", tmp_path / texts)
        refused = refusal(
            capsys, "data", "filter", shards, "--output", tmp_path / "o.csv", "--min-similarity", 0, *flags
        )
        assert f"{tmp_path / images} holds embeddings of {held}" in refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "no rule is given"),
        (("--min-words", 5, "--max-words", 2), "--min-words 5 is above --max-words 2"),
        (
            ("--min-similarity", 0.2),
            "the similarity is not known: name a table of lit-het data score with --scores, or",
        ),
        (("--max-noise", 0.2), "the noise is not known: name a table of lit-het data score with --scores"),
        (("--min-similarity", 0.2, "--embeddings", "e"), "--embeddings and --text-embeddings belong together"),
        (("--max-loss", 1, "--embeddings", "e", "--text-embeddings", "t"), "embeddings give the similarity alone"),
        (("--min-words", 2, "--scores", "s.csv"), "--scores is read for no rule"),
        (("--without-words", "missing.txt"), "missing.txt cannot be read"),
        (("--min-words", 2, "--captions", "txt,"), "must be a place, or several"),
    ],
)
def test_what_makes_no_sense_is_refused(shards, tmp_path, capsys, arguments, message):
    assert message in refusal(capsys, "data", "filter", shards, "--output", tmp_path / "out.csv", *arguments)
    assert not (tmp_path / "out.csv").exists()


def test_places_that_no_sample_has_are_refused_rather_than_leave_out_all(shards, tmp_path, capsys):
    command, output = ("data", "filter", shards, "--output"), tmp_path / "out.csv"
    found = last_line(capsys, *command, output, "--min-words", 2, "--captions", "json/nothing")
    assert "no sample has a caption in .json/nothing; name the place with --captions" in found
    found = last_line(capsys, *command, output, "--languages", "en", "--language-place", "json/nothing")
    assert "no caption has a language in .json/nothing; name the place with --language-place" in found
    assert not output.exists()


def test_tables_without_these_samples_or_columns_are_refused(shards, tmp_path, capsys):
    output, limit = ("--output", tmp_path / "out.csv"), ("--min-similarity", 0.2)
    elsewhere = write_scores(tmp_path / "else.csv", tmp_path / "other", good=(1.0, 1.0, 1.0))
    assert "has no sample of" in refusal(capsys, "data", "filter", shards, *output, *limit, "--scores", elsewhere)
    write_columns(tmp_path / "no.csv", {"shard": ["a"], "key": ["b"]})
    found = refusal(capsys, "data", "filter", shards, *output, *limit, "--scores", tmp_path / "no.csv")
    assert "has no column 'similarity'; take a table of lit-het data score" in found


def test_the_limits_are_kept_and_every_caption_counts():
    def broken(limits, *texts, sides=None):
        captions = [Caption(text, "txt", None) for text in texts]
        [rule] = [rule for rule in rules_of(FilterOptions(limits)) if rule.name in limits]
        return rule.broken_by(Sample(captions, sides, {}, {}))

    assert broken({"words": Limits(2, 3)}, "two words", "three short words") is None
    assert broken({"words": Limits(2, 3)}, "two words", "far too many words") == 4
    assert broken({"words": Limits(2, 3)}, "two words", "one") == 1
    assert broken({"characters": Limits(least=3)}, "äöü") is None
    assert broken({"aspect": Limits(most=2)}, sides=(10, 20)) is None
    assert broken({"aspect": Limits(most=2)}, sides=(21, 10)) == 2.1
    assert broken({"side": Limits(least=10)}, sides=(9, 100)) == 9


def test_a_word_is_whole_and_in_any_case_and_may_have_signs(tmp_path):
    path = tmp_path / "words.txt"
    path.write_text("cat\nc++\nfor sale\n", "utf-8")
    [rule, _] = rules_of(FilterOptions({}, forbidden=path))
    texts = ("concatenate", "a CAT!", "I like C++.", "for\tSALE", "for salesmen", "Cäcilie")
    found = [rule.broken_by(Sample([Caption(text, "txt", None)], None, {}, {})) for text in texts]
    assert found == [None, "CAT", "C++", "for\tSALE", None, None]


def test_one_caption_in_a_language_is_enough():
    rule = rules_of(FilterOptions({}, language=Language(only=("en",))))[0]
    captions = [Caption("a", "txt", "de"), Caption("b", "txt", "en")]
    assert rule.broken_by(Sample(captions, None, {}, {})) is None
    assert rule.broken_by(Sample(captions[:1], None, {}, {})) == "de"


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"])
def test_sides_are_those_of_the_header(format):
    buffer = io.BytesIO()
    Image.new("RGB", (50, 20)).save(buffer, format)
    assert sides_of(buffer.getvalue()) == (20, 50)
    with pytest.raises(BrokenImage):
        sides_of(buffer.getvalue()[:8])
