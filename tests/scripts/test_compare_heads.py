"""The comparison of heads shares everything but its settings with the sweep over τ."""

from lit_het.eval.sweeps import read_results
from lit_het.heads.temperature import BoundedTemperature, FixedTemperature
from scripts.compare_heads import HEADS, main, settings
from tests.scripts.conftest import refusal


def test_every_head_has_a_fixed_and_a_learned_temperature():
    variants = settings(list(HEADS), (0.05, 5.0))
    assert [variant.head.temperature for variant in variants] == [
        FixedTemperature(1.0),
        BoundedTemperature(0.05, 5.0),
    ] * len(HEADS)
    assert [type(variant.head) for variant in variants[::2]] == [type(head) for head in HEADS.values()]
    assert [variant.title for variant in variants[:2]] == ["DET, τ = 1", "DET, τ learned"]


def test_heads_are_compared_in_their_order(config_file, data, tmp_path):
    flags = ["--config", config_file, "--held-out", data / "train", "--output", tmp_path, "--length", 2]
    arguments = [str(flag) for flag in [*flags, "--seeds", 0, "--batch-size", 16, "--heads"]]
    assert main([*arguments, "HET-XL"]) == 0
    assert main([*arguments, "DET"]) == 0
    text = (tmp_path / "table.md").read_text()
    places = [text.index(f"| {name}, τ {kind} |") for name in ("DET", "HET-XL") for kind in ("= 1", "learned")]
    assert places == sorted(places), "the table holds all runs that were found, not only those of the last start"
    parameters = {result.setting: result.num_parameters for result in read_results(tmp_path / "results")}
    assert parameters["DET_learned"] < parameters["HET-XL_learned"]


def test_an_unknown_head_is_one_line(config_file, data, tmp_path, capsys):
    flags = ("--config", config_file, "--held-out", data / "train", "--output", tmp_path, "--heads", "HOT")
    assert "--heads HOT is unknown; choose from DET, HET, HET-H, HET-XL, HET-XL-unshared" in refusal(
        capsys, main, *flags
    )
