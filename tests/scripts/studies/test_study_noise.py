"""The study of label noise: what is injected, what is trained, and what the tables say."""

import json
import shutil
import string

import numpy as np
import pytest

from lit_het.data_pipelines.glyphs import font_path
from lit_het.data_pipelines.shards.writing import expand
from lit_het.errors import UserError
from lit_het.heads.temperature import LogTemperature
from scripts.studies import harness, study_noise
from scripts.studies.noise import pairs as noise
from scripts.studies.noise.icons import draw_icons, write_icon_shards
from scripts.studies.noise.pairs import PairSet
from scripts.studies.noise.training import auroc
from tests.scripts.conftest import refusal

PARTS = ("train", "held_out_typeface", "held_out_characters")
NAMES = (
    "cyrillic small letter de",
    "cyrillic small letter te",
    "latin small letter a",
    "latin small letter a with acute",
    "latin small letter a with grave",
    "latin small letter b",
)


def pairs(count=6000):
    captions = np.arange(count) % len(NAMES)
    typefaces = tuple("DejaVuSansMono-Bold" if number % 5 == 0 else "STIXGeneral" for number in range(count))
    return PairSet(np.zeros((count, 2), np.float32), captions, NAMES, {"typeface": typefaces})


TAU = LogTemperature()
SETTINGS = {
    "data": "characters",
    "steps": 1500,
    "temperature": TAU.initial,
    "temperature_factor": TAU.learning_rate_factor,
}
KNOWN = np.arange(len(NAMES))


@pytest.mark.parametrize(
    ("kind", "affected"),
    [
        ("cyrillic", lambda p: p.captions < 2),
        ("typeface", lambda p: p.column("typeface") == "DejaVuSansMono-Bold"),
        ("confusable", lambda p: np.isin(p.captions, (2, 3, 4))),
        ("uniform", lambda p: np.ones(len(p.captions), bool)),
    ],
)
def test_a_fraction_of_the_affected_captions_is_replaced(kind, affected):
    clean, level = pairs(), 0.4
    noisy, wrong = noise.inject(clean, kind, level, KNOWN, seed=0)
    of_kind = affected(clean)
    assert not wrong[~of_kind].any()
    np.testing.assert_array_equal(wrong, noisy.captions != clean.captions)
    # A random replacement is right by chance: once in six, and among confusable names once in three.
    chance = 1 / 3 if kind == "confusable" else 1 / 6
    assert wrong[of_kind].mean() == pytest.approx(level * (1 - chance), abs=0.03)
    if kind == "confusable":
        assert set(noisy.captions[of_kind].tolist()) == {2, 3, 4}


def test_noise_is_a_function_of_its_seed():
    first, again, other = (noise.inject(pairs(), "uniform", 0.2, KNOWN, seed)[0].captions for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()


def test_names_of_another_list_keep_their_captions():
    wider = tuple(sorted({*NAMES, "digit one"}))
    found = noise.with_names(pairs(12), wider)
    assert [wider[caption] for caption in found.captions] == [NAMES[number % 6] for number in range(12)]


def test_noise_that_affects_nothing_is_one_line():
    only_latin = pairs().take(np.flatnonzero(pairs().captions > 1))
    with pytest.raises(UserError, match="--noise cyrillic affects none of the pairs"):
        noise.inject(only_latin, "cyrillic", 0.4, KNOWN, 0)


def test_a_column_marks_wrong_captions_with_one():
    def with_column(*values):
        columns = {"is_wrong": values}
        return PairSet(np.zeros((len(values), 2), np.float32), np.zeros(len(values), int), ("a",), columns)

    assert noise.wrong_by_column(with_column("0", "1", "False", "true"), "is_wrong").tolist() == [False, True] * 2
    with pytest.raises(UserError, match="column 'is_wrong' of the shards contains '2'; it must be 0 or 1"):
        noise.wrong_by_column(with_column("0", "2"), "is_wrong")
    with pytest.raises(UserError, match="column 'is_wrong' of the shards is 0 everywhere"):
        noise.wrong_by_column(with_column("0", "0"), "is_wrong")


def test_an_output_folder_is_of_one_data_set(tmp_path, capsys):
    flags = ("--output", tmp_path, "--seeds", 0, "--levels", 0, "--heads", "DET", "--table")
    assert "no finished runs" in refusal(capsys, study_noise.main, *flags)
    line = refusal(capsys, study_noise.main, *flags, "--data", "icons", "--fonts", tmp_path)
    assert "'data': 'characters'" in line
    assert "give another --output" in line


def test_samples_of_shards_are_compared_with_predictions_of_heads_without_noise():
    by_head = {
        "DET": {0: {"held_out/clean/mean/nll": 1.0}},
        "S16": {0: {"held_out/clean/mean/nll": 2.0, "held_out/clean/sampled/nll": 3.0}},
    }
    shown = ["held_out/clean/sampled/nll", "unseen/clean/mean/nll"]
    lines = study_noise.table("uniform", 0.2, by_head, shown).splitlines()
    assert lines[0] == "| uniform 20% | DET (1) | S16 (1) |"
    assert lines[2:] == ["| held_out/clean/sampled/nll | 1.000 | 3.000 |"]


def test_icons_are_named_by_their_font_and_a_style_and_names_are_held_out(tmp_path):
    # Any TrueType font will do: its letters are the icons.
    for style in ("thin", "bold", "fill"):
        (tmp_path / "fonts" / style).mkdir(parents=True)
        shutil.copy(font_path("DejaVuSans"), tmp_path / "fonts" / style / "icons.ttf")
        icons = [{"properties": {"name": f"letter-{c}-{style}, alias", "code": ord(c)}} for c in string.ascii_lowercase]
        (tmp_path / "fonts" / style / "selection.json").write_text(json.dumps({"icons": icons}))
    folders = [tmp_path / "fonts" / style for style in ("thin", "bold", "fill")]
    write_icon_shards(draw_icons, folders, tmp_path / "data", 0, "bold", lambda _: None)
    names = (tmp_path / "data" / "names.txt").read_text().splitlines()
    known = (tmp_path / "data" / "train" / "classnames.txt").read_text().splitlines()
    assert names == [f"letter {c}" for c in string.ascii_lowercase]
    assert len(set(names) - set(known)) == 3  # one in ten
    found = {part: list(noise.samples_of(expand(tmp_path / "data" / part)[0])) for part in PARTS}
    for part, samples in found.items():
        styles = {json.loads(sample["json"])["typeface"] for sample in samples}
        captions = {sample["txt"].decode() for sample in samples}
        assert styles == ({"bold"} if part == "held_out_typeface" else {"thin", "fill"})
        assert captions == (set(names) - set(known) if part == "held_out_characters" else set(known))
    assert len({sample["image"] for sample in found["train"]}) == len(known)  # every letter is drawn, alike in both


def test_an_unknown_column_is_one_line():
    with pytest.raises(UserError, match="the shards have no column 'style'; their JSON has typeface"):
        pairs(3).column("style")


def test_auroc_counts_ties_as_half():
    assert auroc(np.array([0.1, 0.4, 0.4, 0.9]), np.array([False, False, True, True])) == pytest.approx(3.5 / 4)
    assert np.isnan(auroc(np.ones(2), np.ones(2, bool)))


def test_tables_join_seeds_and_mark_what_differs(tmp_path, capsys):
    for head, values in (("DET", (1.0, 1.1, 1.05)), ("S16", (0.8, 0.82, 0.81)), ("S4", (1.04, 1.1, 1.0))):
        for seed, value in enumerate(values):
            content = {
                "settings": {**SETTINGS, "configuration": repr(study_noise.HEADS[head])},
                "figures": {"held_out/clean/mean/nll": value},
            }
            harness.write_json(tmp_path / "results" / f"cyrillic_0.4_{head}_seed{seed}.json", content)
    flags = ["--output", str(tmp_path), "--table", "--noise", "cyrillic", "--levels", "0.4"]
    assert study_noise.main([*flags, "--heads", "DET", "S16", "S4", "--show", "held_out/clean/mean/nll"]) == 0
    text = (tmp_path / "table.md").read_text()
    assert text.splitlines() == [
        "| cyrillic 40% | DET (3) | S16 (3) | S4 (3) |",
        "| --- | --- | --- | --- |",
        "| held_out/clean/mean/nll | 1.050 ± 0.029 | 0.810 ± 0.006 (-0.240 ± 0.023 * W) "
        "| 1.047 ± 0.029 (-0.003 ± 0.026) |",
    ]
    assert text in capsys.readouterr().out


def test_seeds_are_compared_with_themselves():
    first = {0: 1.0, 1: 2.0, 2: 3.0}
    other = {seed: value - 0.1 - 0.001 * seed for seed, value in first.items()}
    # Means that differ by a tenth of their spread: only the paired test sees it.
    assert harness.cells_of({"DET": first, "S16": other})[1].endswith("(-0.101 ± 0.001 *)")


def test_results_of_other_settings_are_refused(tmp_path, capsys):
    path = tmp_path / "results" / "cyrillic_0.4_DET_seed0.json"
    harness.write_json(path, {"settings": {"steps": 3}, "figures": {}})
    flags = ("--output", tmp_path, "--seeds", 0, "--noise", "cyrillic", "--levels", 0.4, "--heads", "DET")
    line = refusal(capsys, study_noise.main, *flags)
    assert "was measured with {'steps': 3}" in line
    assert "give another --output" in line
    assert json.loads(path.read_text())["settings"] == {"steps": 3}
