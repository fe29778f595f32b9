"""Pictures of results show every model of their tables, with the numbers that stand there."""

import pytest

from scripts.draw_results import DOCS, DRAWINGS, Estimate, Table

COLUMNS = ["captions", "head", "NLL", "NLL, difference", "NLL, standard error of the difference", "top-1, difference"]
TABLE = Table(
    {
        "columns": COLUMNS,
        "rows": [
            ["clean", "HET-XL", "1.248 (-.187 ± .016 * W)", -0.187, 0.016, "+.5 ± .1"],
            ["clean", "deterministic", "1.43 ± .07", None, None, ""],
            ["noisy", "deterministic", ".731", 0.5, None, "+.000 ± .000"],
        ],
    }
)


@pytest.mark.parametrize(
    ("column", "names", "estimate"),
    [
        ("NLL", ("clean", "HET-XL"), Estimate(-0.187, 0.016, True)),
        ("NLL, difference", ("clean", "HET-XL"), Estimate(-0.187, 0.016, True)),
        ("top-1, difference", ("clean", "HET-XL"), Estimate(0.5, 0.1, True)),
        ("NLL", ("clean", "deterministic"), Estimate(1.43, 0.07, False)),
        ("NLL", ("noisy",), Estimate(0.731, 0.0, False)),
        ("NLL, difference", ("noisy",), Estimate(0.5, 0.0, True)),
        ("NLL, difference", ("clean", "deterministic"), None),
        ("NLL", ("clean", "Gaussian"), None),
    ],
)
def test_cells_are_read_as_means_with_standard_errors(column: str, names: tuple[str, ...], estimate: Estimate | None):
    assert TABLE.estimate(column, *names) == estimate


@pytest.mark.parametrize("name", DRAWINGS)
def test_committed_pictures_show_every_model_and_condition_of_the_results(name: str):
    picture = (DOCS / "images" / f"{name}.svg").read_text("utf-8")
    panels = DRAWINGS[name]()
    assert all(of for series in panels.values() for of in series.values()), "a condition without any figure"
    for title, series in panels.items():
        assert title in picture
        for condition, of in series.items():
            assert condition in picture
            assert all(model.replace("`", "") in picture for model in of)
