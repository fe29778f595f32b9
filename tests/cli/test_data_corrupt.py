"""`lit-het data corrupt`: from a set to its corrupted forms."""

from pathlib import Path

from lit_het.cli.main import main
from lit_het.data_pipelines.index import ShardIndex
from lit_het.data_pipelines.shards import IMAGE, expand
from lit_het.data_pipelines.storage import content_or_raise

CIFAR = Path(__file__).parents[1] / "golden" / "data" / "cifar-10-python.tar.gz"


def labels(folder: Path) -> dict[str, bytes]:
    index = ShardIndex(expand(folder), [IMAGE, "cls"])
    return {index.key(number): content_or_raise(index.read([number], ["cls"])[0][0]) for number in range(len(index))}


def test_every_corruption_and_severity_becomes_a_split_with_the_labels_of_the_clean_one(tmp_path, capsys):
    assert main(["data", "prepare", "cifar10", str(CIFAR), f"{tmp_path}/cifar", "--split", "test"]) == 0
    command = ["data", "corrupt", f"{tmp_path}/cifar/test", f"{tmp_path}/out", "--corruptions", "fog", "pixelate"]
    command += ["--severities", "1", "4", "--samples-per-shard", "8"]
    assert main(command) == 0
    assert labels(tmp_path / "out" / "fog" / "4") == labels(tmp_path / "cifar" / "test")
    assert (tmp_path / "out/fog/classnames.txt").read_text() == (tmp_path / "cifar/classnames.txt").read_text()
    assert sorted(path.name for path in (tmp_path / "out" / "pixelate").glob("[0-9]")) == ["1", "4"]
    assert "20 images in 4 sets" in capsys.readouterr().err
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*/*/*.tar")}
    assert len(written) == 4 * 3
    assert main(command) == 0
    assert {path: path.stat().st_mtime_ns for path in written} == written


def test_an_unknown_corruption_ends_in_one_line_before_anything_is_written(tmp_path, capsys):
    assert main(["data", "prepare", "cifar10", str(CIFAR), f"{tmp_path}/cifar", "--split", "test"]) == 0
    assert main(["data", "corrupt", f"{tmp_path}/cifar/test", f"{tmp_path}/out", "--corruptions", "fog", "rain"]) == 1
    assert "lit-het: --corruptions rain is none of gaussian_noise" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()
