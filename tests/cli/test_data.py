"""`lit-het data`: from archives to what `lit-het zero-shot` reads; indexes, and what is wrong with shards."""

import gzip
import json
import os
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lit_het.cli.main import main
from lit_het.data_pipelines.images.transforms import Preprocessing
from lit_het.data_pipelines.shards import storage
from lit_het.data_pipelines.shards.checksums import save_checksum
from lit_het.data_pipelines.shards.index import ShardIndex
from lit_het.data_pipelines.shards.storage import content_or_raise
from lit_het.data_pipelines.shards.writing import IMAGE, expand
from lit_het.errors import UserError
from lit_het.eval.sets import ImageSet
from lit_het.eval.sets.folders import parse_set
from lit_het.eval.sets.open_sets import Sets
from tests.cli.conftest import break_first_image

GOLDEN = Path(__file__).parents[1] / "golden" / "data"
CIFAR = GOLDEN / "cifar-10-python.tar.gz"
TRUTH = json.loads((GOLDEN / "truth.json").read_text())


def prepare(*arguments: object) -> int:
    return main(["data", "prepare", *map(str, arguments)])


def labels(argument: str) -> list[int]:
    """What zero-shot evaluation reads of a set."""
    opened = Sets(8, Preprocessing(), lambda: "").open(parse_set(argument, ImageSet("", "", batch_size=5)))
    return [int(label) for batch in opened.loader.epoch() for label in np.asarray(batch.label)[batch.valid]]


def test_zero_shot_reads_prepared_shards(tmp_path, capsys):
    in_order = ("--no-shuffle", "--samples-per-shard", 7, "--workers", 2)
    assert prepare("cifar10", CIFAR, tmp_path / "cifar", *in_order) == 0
    assert labels(f"{tmp_path}/cifar") == labels(f"{tmp_path}/cifar/test") == TRUTH["cifar10"]["labels"]["test_batch"]
    assert len(labels(f"{tmp_path}/cifar/train")) == 100
    said = capsys.readouterr().err
    assert "train: 100 images; 50,000 were published" in said
    assert "test: 1 of 10 classes have no images, truck first" in said
    assert re.search(r"train: 100/100 images, [\d.]+/s, in 0:0", said)
    assert f"test: 20 images in {tmp_path}/cifar/test" in said


def test_the_same_command_again_writes_nothing_and_another_split_joins(tmp_path, capsys):
    assert prepare("pets", GOLDEN / "pets", tmp_path / "out", "--split", "test") == 0
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "test").iterdir()}
    assert prepare("pets", GOLDEN / "pets", tmp_path / "out", "--check-images", "--split", "train") == 0
    assert prepare("pets", GOLDEN / "pets", tmp_path / "out", "--split", "test") == 0
    assert f"test: already complete in {tmp_path}/out/test" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in written} == written
    found, expected = labels(f"{tmp_path}/out"), [label for _, label in TRUTH["pets"]["test"]]
    assert sorted(found) == sorted(expected)
    assert found != expected, "in random order, so that no shard or portion holds some classes only"


def test_broken_images_end_in_one_line_or_are_left_out(tmp_path, capsys):
    (tmp_path / "images" / "a").mkdir(parents=True)
    Image.new("RGB", (4, 4)).save(tmp_path / "images" / "a" / "1.jpg")
    (tmp_path / "images" / "a" / "2.jpg").write_bytes(b"not found")
    assert prepare("folder", tmp_path / "images", tmp_path / "out", "--split", "test") == 1
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.match(r"lit-het: .*/a/2\.jpg: not an image \(9 bytes .*; fix it, or skip .* with --skip-broken", line)
    assert not (tmp_path / "out" / "test").exists()
    assert prepare("folder", tmp_path / "images", tmp_path / "out", "--split", "test", "--skip-broken") == 0
    assert "test: 1 image in" in (said := capsys.readouterr().err)
    assert "1 broken image skipped" in said
    assert labels(f"{tmp_path}/out") == [0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cifar100", CIFAR, "OUT", "--labels", "coarse"), "cifar-10-python.tar.gz: holds no meta"),
        (("imagenet", GOLDEN, "OUT", "--devkit", "none.tar.gz"), "holds no images"),
        (("imagenet-r", CIFAR, "OUT"), "cifar-10-python.tar.gz: holds no images; name the official archive"),
        (("objectnet", CIFAR, "OUT"), "cifar-10-python.tar.gz: unpack it"),
        (("cifar100-c", CIFAR, "OUT"), "cifar-10-python.tar.gz: holds no labels.npy"),
        (("cifar10h", GOLDEN, "OUT"), "must hold cifar10h-probs.npy and cifar-10-python.tar.gz"),
        (("img2dataset", "no-such-folder", "OUT"), "no-such-folder: no tar file matches"),
        (("parquet", CIFAR, "OUT", "--image", "x"), "cifar-10-python.tar.gz: is not a parquet file"),
        (("parquet", "none.parquet", "OUT", "--image", "x"), "none.parquet: cannot be read"),
        (("folder", GOLDEN, GOLDEN / "out"), "would become a class; choose another output"),
        (("cifar10", CIFAR, CIFAR), "cannot be created (File exists)"),
    ],
)
def test_sources_that_cannot_be_prepared_are_a_one_line_error(tmp_path, capsys, arguments, message):
    assert prepare(*(tmp_path / "out" if argument == "OUT" else argument for argument in arguments)) == 1
    assert message in capsys.readouterr().err.strip().splitlines()[-1]
    assert not list(tmp_path.rglob("*.t*"))


@pytest.mark.parametrize(
    "arguments", [(), ("prepare",), ("prepare", "mnist"), ("prepare", "cifar10", "x", "y", "--label", "z")]
)
def test_invalid_arguments_print_the_usage(capsys, arguments):
    with pytest.raises(SystemExit, match="2"):
        main(["data", *arguments])
    assert "usage: lit-het" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "x.tar", "--workers", "-1"),
        ("index", "x.tar", "--workers", "0"),
        ("prepare", "cifar10", "x", "y", "--workers", "two"),
        ("prepare", "cifar10", "x", "y", "--samples-per-shard", "0"),
    ],
)
def test_a_number_below_one_is_refused_with_the_name_of_its_flag(capsys, arguments):
    with pytest.raises(SystemExit, match="2"):
        main(["data", *arguments])
    *_, flag, value = arguments
    assert f"argument {flag}: {value} is not a whole number of at least 1" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["../evil", "/evil", "a/b", "..", ".hidden", "", "a\nb"])
def test_a_split_is_one_folder_of_the_output(capsys, name):
    with pytest.raises(SystemExit, match="2"):
        main(["data", "prepare", "folder", "x", "y", "--split", name])
    assert f"argument --split: {name!r} is not the name of a folder, such as test" in capsys.readouterr().err


def test_help_names_every_source_and_its_flags(capsys):
    with pytest.raises(SystemExit, match="0"):
        prepare("--help")
    said = capsys.readouterr().out
    assert all(kind in said for kind in ("cifar10", "cifar100", "pets", "imagenet", "folder", "img2dataset", "parquet"))
    others = ("imagenet-v2", "imagenet-a", "imagenet-c", "cifar10-c", "cifar10h")
    assert all(f"\n    {kind} " in said for kind in others)
    with pytest.raises(SystemExit, match="0"):
        prepare("imagenet", "--help")
    said = capsys.readouterr().out
    assert all(flag in said for flag in ("--devkit", "--split", "--workers", "--shuffle"))


@pytest.fixture
def shards(tmp_path) -> Path:
    assert prepare("pets", GOLDEN / "pets", tmp_path / "pets", "--split", "test", "--samples-per-shard", 4) == 0
    return tmp_path / "pets" / "test"


def test_shards_are_indexed_once_and_then_the_new_and_the_changed_ones(shards, capsys):
    run = ["data", "index", str(shards), "--workers"]
    assert main([*run, "2"]) == 0
    assert "12 samples in 3 shards" in capsys.readouterr().err
    before = {path: path.stat().st_mtime_ns for path in shards.glob("*.npz")}
    assert len(before) == 3
    (shards / "2.tar").write_bytes((shards / "2.tar").read_bytes()[:2000])
    assert main([*run, "1"]) == 0
    changed = [path.name for path, time in before.items() if path.stat().st_mtime_ns != time]
    assert changed == ["2.tar.index.npz"]
    assert "1 times: truncated or damaged shard; see lit-het data check" in capsys.readouterr().err


def test_checking_lists_broken_samples_and_has_an_exit_code(shards, tmp_path, capsys):
    check = ["data", "check", str(shards), "--output", str(tmp_path / "faults.json")]
    assert main(check) == 0
    assert json.loads((tmp_path / "faults.json").read_text()) == []
    assert "all 12 samples can be used" in capsys.readouterr().err
    assert main([*check, "--captions", "txt"]) == 1  # pets have none
    assert "has no .txt" in capsys.readouterr().out
    assert main([*check, "--labels"]) == 0
    few = tmp_path / "few.txt"
    few.write_text("one class\n")
    assert main([*check, "--labels", str(few)]) == 1
    assert "label is out of range" in capsys.readouterr().out

    assert main(["data", "index", str(shards), "--checksum", "--workers", "1"]) == 0
    assert main([*check, "--checksum"]) == 0
    break_first_image(shards / "1.tar")
    assert main([*check, "--checksum"]) == 1
    table, errors = capsys.readouterr()
    assert "not an image" in table
    assert "other checksum" in table
    assert "2 defects; fix them" in errors
    found = json.loads((tmp_path / "faults.json").read_text())
    assert [(Path(row["shard"]).name, row["cause"], row["count"]) for row in found] == [
        ("1.tar", "not an image", 1),
        ("1.tar", "other checksum", 1),
    ]


def test_the_checksum_of_a_replaced_shard_differs_and_the_message_helps(shards, capsys):
    index = ["data", "index", str(shards), "--checksum", "--workers", "1"]
    check = ["data", "check", str(shards), "--checksum"]
    assert main(index) == 0
    assert main(index) == 0
    (shards / "0.tar").write_bytes((shards / "1.tar").read_bytes())
    recorded = shards / "0.tar.sha256"
    for command in (index, check):
        capsys.readouterr()
        assert main(command) == 1
        told = "".join(capsys.readouterr()).replace(f"{shards}/0", "0", 1)
        assert f"0.tar: differs from {recorded}; fetch or write the shard again or" in told
        assert f"remove {recorded} and run lit-het data index --checksum" in told
    recorded.unlink()
    assert main(index) == main(check) == 0


def test_a_checksum_that_holds_none_is_a_defect_with_a_way_out(shards, capsys):
    assert main(["data", "index", str(shards), "--checksum", "--workers", "1"]) == 0
    file = shards / "0.tar.sha256"
    for content in ("", "\n", "not a sum", "0123  0.tar"):
        file.write_text(content)
        assert main(["data", "check", str(shards), "--checksum"]) == 1
        assert f"{file} holds no SHA-256; remove {file} and run" in capsys.readouterr().out


def test_a_checksum_that_cannot_be_saved_is_a_one_line_error(shards, capsys, monkeypatch):
    def refuse(address: str, content: bytes) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(storage, "write", refuse)
    message = r"0\.tar\.sha256: cannot be written \(Permission denied\); leave out --checksum"
    with pytest.raises(UserError, match=message):
        save_checksum(f"{shards}/0.tar")


@pytest.mark.parametrize("damage", ["empty", "no tar", "gzip", "no captions"])
def test_shards_without_usable_samples_have_a_table_too(shards, tmp_path, capsys, damage):
    for path in shards.glob("*.tar"):
        content = path.read_bytes()
        changed = {"empty": bytes(10240), "no tar": b"<html>" * 99, "gzip": gzip.compress(content)}
        path.write_bytes(changed.get(damage, content))
    captions = ["--captions", "txt"] if damage == "no captions" else []
    found = tmp_path / "found.json"
    assert main(["data", "check", str(shards), "--output", str(found), *captions]) == 1
    table, errors = capsys.readouterr()
    assert len(table.splitlines()) == 1 + 3
    assert len(json.loads(found.read_text())) == 3
    assert "defects; fix them" in errors.splitlines()[-1]


def test_a_missing_output_folder_is_reported_before_anything_is_read(shards, tmp_path, capsys):
    assert main(["data", "check", str(shards), "--output", str(tmp_path / "none" / "x.json")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line == f"lit-het: no folder {tmp_path}/none for x.json; create it first"


def test_names_that_are_no_utf8_are_escaped_in_the_table(tmp_path, capsys):
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.USTAR_FORMAT, encoding="latin-1") as tar:
        for name in ("caf\u00e9.jpg", "th\u00e9.txt"):
            tar.addfile(tarfile.TarInfo(name))
    (tmp_path / "x.tar").rename(tmp_path / os.fsdecode(b"\xe9.tar"))
    # Captured output is strict UTF-8, as that of a terminal.
    assert main(["data", "check", str(tmp_path), "--output", str(tmp_path / "found.json")]) == 1
    said = capsys.readouterr().out
    assert rf"{tmp_path}/\xe9.tar: key th\xe9 has no .jpg" in said
    assert rf"{tmp_path}/\xe9.tar: key caf\xe9: " in said
    assert {row["shard"] for row in json.loads((tmp_path / "found.json").read_text())} == {rf"{tmp_path}/\xe9.tar"}


def labels_by_key(folder: Path) -> dict[str, bytes]:
    index = ShardIndex(expand(folder), [IMAGE, "cls"])
    return {index.key(number): content_or_raise(index.read([number], ["cls"])[0][0]) for number in range(len(index))}


def test_every_corruption_and_severity_becomes_a_split_with_the_labels_of_the_clean_one(tmp_path, capsys):
    assert prepare("cifar10", CIFAR, f"{tmp_path}/cifar", "--split", "test") == 0
    command = ["data", "corrupt", f"{tmp_path}/cifar/test", f"{tmp_path}/out", "--corruptions"]
    assert main([*command, "fog", "rain"]) == 1
    assert "lit-het: --corruptions rain is none of gaussian_noise" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()
    command += ["fog", "pixelate", "--severities", "1", "4", "--samples-per-shard", "8"]
    assert main(command) == 0
    assert labels_by_key(tmp_path / "out" / "fog" / "4") == labels_by_key(tmp_path / "cifar" / "test")
    assert (tmp_path / "out/fog/classnames.txt").read_text() == (tmp_path / "cifar/classnames.txt").read_text()
    assert sorted(path.name for path in (tmp_path / "out" / "pixelate").glob("[0-9]")) == ["1", "4"]
    assert "20 images in 4 sets" in capsys.readouterr().err
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*/*/*.tar")}
    assert len(written) == 4 * 3
    assert main(command) == 0
    assert {path: path.stat().st_mtime_ns for path in written} == written
