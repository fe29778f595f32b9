"""The study of sequence lengths: its towers cost the same, its runs can be built, its table follows from figures."""

import pytest

from scripts.studies import harness
from scripts.studies import study_sequence_length as study


@pytest.mark.parametrize("shape", study.SHAPES)
@pytest.mark.parametrize("kind", study.KINDS)
def test_every_run_can_be_built(tmp_path, shape, kind):
    (tmp_path / "data" / "train").mkdir(parents=True)
    (tmp_path / "data" / "train" / "classnames.txt").write_text("a\nb\n")
    config = study.configuration(shape, kind, tmp_path, tmp_path / "data", 3, 10)
    assert config.task.build().num_classes == 2
    assert config.seed == config.data.seed == 3


@pytest.mark.parametrize("size", study.PATCH_SIZES)
def test_both_shapes_have_about_the_same_operations(size):
    plain, other = (study.gflop(shape, size) for shape in study.SHAPES)
    assert 0.85 < other / plain < 1.1


def test_the_table_has_means_over_seeds(tmp_path):
    for seed in (0, 1):
        figures = {str(size): 0.5 + 0.02 * seed for size in study.PATCH_SIZES}
        for name in ("plain_one_size", "plain_flexified", "SoViT_one_size", "SoViT_flexified"):
            content = {"settings": {"steps": 10}, "figures": figures}
            harness.write_json(tmp_path / "results" / f"{name}_seed{seed}.json", content)
    assert study.main(["--output", str(tmp_path), "--steps", "10", "--table"]) == 0
    table = (tmp_path / "sequence_length.md").read_text()
    assert "| 12 | 16 | " in table
    assert table.count("51.0 ± 1.0") == 4 * len(study.PATCH_SIZES)
    assert (tmp_path / "sequence_length.png").stat().st_size > 1000
