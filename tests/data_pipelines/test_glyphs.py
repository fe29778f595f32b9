import dataclasses
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from lit_het.data_pipelines.data_config import LoaderConfig
from lit_het.data_pipelines.glyphs import (
    TYPEFACES,
    Glyph,
    GlyphConfig,
    GlyphDataset,
    characters_of,
    draw_typeface,
    homoglyph_classes,
    split_characters,
    write_glyph_shards,
)
from lit_het.data_pipelines.images.decoding import decode
from lit_het.data_pipelines.labels import CaptionWords, ClassIndex
from lit_het.data_pipelines.shards.index import ShardIndex
from lit_het.data_pipelines.shards.loader import Loader
from lit_het.data_pipelines.shards.storage import content_or_raise
from lit_het.data_pipelines.shards.writing import expand
from tests.refusals import assert_refused

SETS = ("train", "held_out_typeface", "held_out_characters")
SMALL = GlyphConfig(scripts=("digit", "greek"), min_typefaces=16, noisy_script="greek")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> GlyphDataset:
    return write_glyph_shards(SMALL, tmp_path_factory.mktemp("glyphs"))


@pytest.fixture(scope="module")
def samples(dataset: GlyphDataset) -> dict[str, list[dict]]:
    return {name: read(dataset.directory / name) for name in SETS}


def read(folder: Path) -> list[dict]:
    index = ShardIndex(expand(folder), kinds := ["json", "txt", "cls", "image"])
    samples = []
    for contents in index.read(range(len(index)), kinds):
        about, name, number, image = map(content_or_raise, contents)
        pixels = decode(image, SMALL.image_size)
        samples.append({**json.loads(about), "name": name.decode(), "class": int(number), "pixels": pixels})
    return samples


def lines(path: Path) -> list[str]:
    return path.read_text("utf-8").splitlines()


def square(level: int) -> np.ndarray:
    return np.full((2, 2), level, np.uint8)


def test_sixteen_typefaces_draw_the_small_letters_and_the_default_config_has_at_least_1500_names():
    for typeface in TYPEFACES:
        assert set("abcxyz") <= set(characters_of(typeface, ("latin",)))
    drawn = Counter(character for face in TYPEFACES for character in characters_of(face, GlyphConfig().scripts))
    held_out_typeface = set(characters_of(GlyphConfig().held_out_typeface, GlyphConfig().scripts))
    assert sum(n >= GlyphConfig().min_typefaces for c, n in drawn.items() if c in held_out_typeface) >= 1500


def test_one_typeface_and_some_characters_are_held_out(samples: dict[str, list[dict]]):
    characters = {name: {s["character"] for s in samples[name]} for name in SETS}
    typefaces = {name: {s["typeface"] for s in samples[name]} for name in SETS}
    assert not characters["train"] & characters["held_out_characters"]
    assert characters["held_out_typeface"] <= characters["train"]
    assert typefaces["held_out_typeface"] == {SMALL.held_out_typeface}
    assert SMALL.held_out_typeface not in typefaces["train"] | typefaces["held_out_characters"]
    total = len(characters["train"] | characters["held_out_characters"])
    assert len(characters["held_out_characters"]) == round(0.1 * total) > 0


def test_classes_names_and_counts_agree(dataset: GlyphDataset, samples: dict[str, list[dict]]):
    for name in SETS:
        classes = lines(dataset.directory / name / "classnames.txt")
        assert all(classes[s["class"]] == s["name"] for s in samples[name])
    found = (dataset.num_train_images, dataset.num_held_out_typeface_images, dataset.num_held_out_character_images)
    assert found == tuple(len(samples[name]) for name in SETS)
    assert dataset.num_clipped_images < 0.005 * sum(found)
    names = lines(dataset.directory / "names.txt")
    assert len(set(names)) == len(names) == dataset.num_names
    assert set(names) == {s["name"] for name in SETS for s in samples[name]}
    assert json.loads((dataset.directory / "glyphs.json").read_text())["config"]["font_size"] == SMALL.font_size


def test_samples_record_their_character(samples: dict[str, list[dict]]):
    omega = next(s for s in [*samples["train"], *samples["held_out_characters"]] if s["character"] == "Ω")
    assert (omega["name"], omega["code_point"]) == ("greek capital letter omega", "U+03A9")


@pytest.mark.slow
def test_the_loader_reads_every_set(dataset: GlyphDataset):
    train = Loader(LoaderConfig((str(dataset.directory / "train"),), labels=CaptionWords(), threads=0))
    assert train.num_classes == len(lines(dataset.directory / "words.txt"))
    for batch in train.epoch():
        assert np.asarray(batch.label)[batch.valid].sum(axis=1).min() >= 2
    for name in SETS:
        loader = Loader(LoaderConfig((str(dataset.directory / name),), labels=ClassIndex(), threads=0))
        assert sum(batch.valid.sum() for batch in loader.epoch()) == len(loader.index)


def test_images_are_black_on_white_and_case_stays_visible(samples: dict[str, list[dict]]):
    drawn = {sample["name"]: sample["pixels"] for sample in samples["train"] if sample["typeface"] == TYPEFACES[0]}
    small, capital = (drawn[f"greek {case} letter omicron"] for case in ("small", "capital"))
    for pixels in (small, capital):
        assert pixels[0, 0].min() > 240
        assert pixels.min() < 60
    height = [np.ptp(np.flatnonzero(pixels.min(axis=(1, 2)) < 128)) for pixels in (small, capital)]
    assert height[1] > 1.2 * height[0]


def test_letters_stand_on_the_baseline_and_marks_keep_their_height():
    config = GlyphConfig(scripts=("latin", "greek"))
    bottom = {
        glyph.character: int(np.flatnonzero((glyph.bitmap < 128).any(axis=1))[-1]) + 1
        for glyph in draw_typeface("DejaVuSans", config)
        if glyph.character in "xXzZÁp\N{GREEK TONOS}"
    }
    assert {bottom[character] for character in "xXzZÁ"} == {config.baseline}
    assert bottom["p"] > config.baseline > bottom["\N{GREEK TONOS}"] + 10


def test_a_tall_glyph_leaves_the_baseline_only_as_far_as_needed():
    config = GlyphConfig(scripts=("latin",), baseline=10)
    tall = next(glyph for glyph in draw_typeface("DejaVuSans", config) if glyph.character == "X")
    rows = np.flatnonzero((tall.bitmap < 255).any(axis=1))
    assert not tall.clipped
    assert rows[0] == 0


def test_a_glyph_larger_than_the_image_counts_as_clipped():
    assert all(glyph.clipped for glyph in draw_typeface("DejaVuSans", GlyphConfig(font_size=200, scripts=("digit",))))
    assert not any(glyph.clipped for glyph in draw_typeface("DejaVuSans", GlyphConfig(scripts=("digit",))))


def test_latin_greek_and_cyrillic_capital_a_look_the_same():
    config = GlyphConfig(scripts=("latin", "greek", "cyrillic"))
    wanted = "AΑАaаbЬ"
    glyphs = (glyph for typeface in TYPEFACES[:4] for glyph in draw_typeface(typeface, config))
    classes = homoglyph_classes(glyph for glyph in glyphs if glyph.character in wanted)
    assert {c: classes[c] for c in wanted} == dict(zip(wanted, "AAAaabЬ", strict=True))


def test_homoglyphs_agree_in_half_of_their_common_typefaces_and_chains_join():
    def glyphs(character: str, *levels: int) -> list[Glyph]:
        return [Glyph(character, TYPEFACES[i], square(level), False) for i, level in enumerate(levels) if level >= 0]

    classes = homoglyph_classes(
        [
            *glyphs("a", 1, 1, 1, 1),
            *glyphs("b", 1, 1, 2, 3),  # half of four typefaces
            *glyphs("c", 9, 9, 2, 3),  # like b in half, unlike a
            *glyphs("d", 1, 4, 4, -1),  # like a in one of three
            *glyphs("e", 5, 4, -1, -1),  # like d in one of two
        ]
    )
    assert classes == {"a": "a", "b": "a", "c": "a", "d": "d", "e": "d"}


def test_homoglyphs_are_written_by_name(dataset: GlyphDataset):
    classes = json.loads((dataset.directory / "homoglyphs.json").read_text("utf-8"))
    assert set(classes) == set(lines(dataset.directory / "names.txt"))
    assert all(classes[first] == first for first in classes.values())


def test_equal_configs_give_equal_bytes_and_progress_counts_typefaces_and_sets(tmp_path: Path):
    for name in ("one", "other"):
        steps: list[int] = []
        write_glyph_shards(GlyphConfig(scripts=("digit",)), tmp_path / name, steps.append)
        assert steps == [1] * (len(TYPEFACES) + 3)
    files = {path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file()}
    assert len(files) == 10
    assert all((tmp_path / "one" / file).read_bytes() == (tmp_path / "other" / file).read_bytes() for file in files)


def test_wrong_captions_are_a_fraction_of_one_script_and_nothing_else_changes(dataset: GlyphDataset, samples):
    captions, names = ([sample[field] for sample in samples["train"]] for field in ("noisy_caption", "name"))
    wrong = np.array([caption != name for caption, name in zip(captions, names, strict=True)])
    assert [sample["is_wrong"] for sample in samples["train"]] == wrong.tolist()
    is_greek = np.array([name.startswith("greek") for name in names])
    assert not wrong[~is_greek].any()
    # A random name is seldom the right one by chance: there are as many as training characters.
    assert wrong[is_greek].mean() == pytest.approx(0.4 * (1 - 1 / len(set(names))), abs=0.05)
    assert set(captions) <= set(names)
    for sample in samples["held_out_typeface"] + samples["held_out_characters"]:
        assert (sample["noisy_caption"], sample["is_wrong"]) == (sample["name"], 0)


def test_another_seed_holds_out_other_characters():
    glyphs = list(draw_typeface("DejaVuSerif", GlyphConfig(scripts=("latin",))))
    one, other = (split_characters(glyphs, GlyphConfig(seed=seed))[1] for seed in (0, 1))
    assert len(one) == len(other)
    assert one != other


def test_configs_without_characters_are_refused(tmp_path: Path):
    message = "held-out typeface 'Arial' is unknown; choose one of DejaVuSans"
    assert_refused(message, write_glyph_shards, GlyphConfig(held_out_typeface="Arial"), tmp_path)
    message = "no characters of klingon are drawn by 6 typefaces; lower min_typefaces or add"
    few = dataclasses.replace(SMALL, scripts=("klingon",), min_typefaces=6)
    assert_refused(message, write_glyph_shards, few, tmp_path)
