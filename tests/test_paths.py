from pathlib import Path

import pytest

from lit_het import paths
from lit_het.configs import experiment
from lit_het.errors import UserError


@pytest.mark.parametrize(
    ("name", "run"),
    [
        ("lit_so400m_het_xl", "lit_so400m_het_xl"),
        ("fine_tune_experts:data_set=pets,model=vmoe", "fine_tune_pets_vmoe_b32"),
    ],
)
def test_a_shipped_configuration_is_found_by_its_name_which_takes_arguments(tmp_path, monkeypatch, name, run):
    monkeypatch.chdir(tmp_path)
    assert experiment.load_module_config(Path(name)).run_dir == Path("runs") / run


def test_a_file_of_the_user_comes_before_a_shipped_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("quickstart_upstream").write_text("")
    assert paths.locate_config(Path("quickstart_upstream")) == Path("quickstart_upstream")


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(UserError, match=r"no configuration file lit_so.*lit_so400m_het_xl, lit_so400m_sigmoid"):
        paths.locate_config(Path("lit_so"))
    with pytest.raises(UserError, match=r"one: glyph_evaluations, linear_probe_imagenet, quickstart_evaluations$"):
        paths.locate_config(Path("lit_so400m_het_xl"), "get_evaluations")
    assert not {"__init__", "experiment", "glyph_evaluations"} & {*paths.shipped_configs()}


@pytest.mark.parametrize("address", ["gs://bucket/x", "hf://owner/model", "pipe:cat x", "memory://x.npz:img"])
def test_addresses_and_commands_are_not_checked(address):
    paths.require_file(address)
    paths.require_shards(address)
    paths.require_weights(address)


def test_patterns_are_left_to_the_reader_of_shards():
    for pattern in ("nowhere/{000..009}.tar", "nowhere/*.tar", "nowhere/[0-9].tar"):
        paths.require_shards(pattern)


def test_sources_of_weights_are_found_in_every_form(tmp_path):
    (tmp_path / "x.npz").touch()
    (tmp_path / "vmoe.index").touch()
    for name in ("x.npz", "x.npz:img", "vmoe", "vmoe.index"):
        paths.require_weights(str(tmp_path / name))
    with pytest.raises(UserError, match=r"y\.npz does not exist"):
        paths.require_weights(str(tmp_path / "y.npz:img"))


def test_paths_that_cannot_be_examined_are_left_to_their_reader():
    paths.require_file("x\0y")
    with pytest.raises(UserError, match="No such file"):
        paths.require_file("x" * 10_000)  # no file system has such a name


def test_the_runs_of_a_directory_are_itself_or_its_members_in_the_order_of_their_numbers(tmp_path):
    for number in (10, 2, 0):
        paths.member_dir(tmp_path, number).mkdir()
        (paths.member_dir(tmp_path, number) / "config.json").touch()
    (tmp_path / "member_of_another_kind").mkdir()
    assert paths.runs_in(tmp_path) == [tmp_path / f"member_{number}" for number in (0, 2, 10)]
    assert paths.runs_in(tmp_path / "member_2") == [tmp_path / "member_2"]
    (tmp_path / "member_2" / "config.json").unlink()
    with pytest.raises(UserError, match=r"member_2 holds no run; train it with --resume, or remove the folder"):
        paths.runs_in(tmp_path)
    with pytest.raises(UserError, match=r"nowhere/config\.json is missing"):
        paths.runs_in(tmp_path / "nowhere")
