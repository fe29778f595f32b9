"""Errors of samples name the flags of the command that reads them."""

import tarfile

import pytest

from lit_het.data_pipelines.shards.writing import write_tar
from tests.cli.conftest import last_line

ALLOWED = "where a fraction of 0 is allowed (lit-het data check lists them)"


@pytest.fixture(scope="module")
def one_broken(data, tmp_path_factory):
    """Shards of which one image cannot be read, with class names beside them."""
    folder = tmp_path_factory.mktemp("broken")
    with tarfile.open(min((data / "train").glob("*.tar"))) as tar:
        members = {member.name: content.read() for member in tar if (content := tar.extractfile(member))}
    keys = sorted({name.partition(".")[0] for name in members})
    samples = [{"__key__": key, **{kind: members[f"{key}.{kind}"] for kind in ("jpg", "txt", "cls")}} for key in keys]
    write_tar(folder / "shard.tar", [{**samples[0], "jpg": b"no image"}, *samples[1:]])
    (folder / "classnames.txt").write_bytes((data / "train" / "classnames.txt").read_bytes())
    return folder


def arguments_of(command, run, shards, output):
    table = ("--output", output / "found.csv")
    return {
        "select": ("data", "select", "--checkpoint", run, "--pool", shards, "--labels", "a,b", "--count", 3, *table),
        "score": ("data", "score", run, shards, *table),
        "benchmark": ("benchmark-uncertainty", run, "--data", shards, "--output", output / "page.html"),
        "zero-shot": ("zero-shot", "--checkpoint", run, "--data", shards),
        "embed": ("embed", "--tower", run, "--data", shards, "--output", output / "embeddings"),
    }[command]


@pytest.mark.parametrize(
    ("command", "way_out"),
    [
        ("select", "leave them out of the shards"),
        ("score", "leave them out of the shards"),
        ("benchmark", "leave them out of the shards"),
        ("zero-shot", "allow more with --max-bad-fraction"),
        ("embed", "allow more with --data.max-bad-fraction"),
    ],
)
def test_a_broken_image_names_only_flags_that_the_command_has(
    capsys, trained_lit, one_broken, tmp_path, command, way_out
):
    given = arguments_of(command, trained_lit.run_dir, one_broken, tmp_path)
    assert last_line(capsys, *given).endswith(f"1 bad of 20 samples, {ALLOWED}; fix them, or {way_out}")


def test_pairs_without_a_field_of_wrong_captions_are_one_line(capsys, trained_lit, data, tmp_path):
    given = arguments_of("benchmark", trained_lit.run_dir, data / "train", tmp_path)
    line = last_line(capsys, *given, "--pairs", data / "train")
    assert "0000.json: missing member" in line
    assert line.endswith("--pairs need the captions that --captions names, and a .json with the field of --wrong")
