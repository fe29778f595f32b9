"""Shell commands in a configuration that others may have written run only where the user allows it."""

import re
import shutil

import pytest

from lit_het.configs import experiment
from lit_het.configs.parsing import parse_config
from lit_het.data_pipelines.data_config import Streaming, WeightedShards
from lit_het.errors import UserError
from lit_het.eval.sets import ImageSet
from lit_het.eval.suite import ZeroShotConfig
from lit_het.training.durations import Duration
from tests import tiny
from tests.cli.conftest import changed, refusal, run_command


@pytest.fixture(autouse=True)
def untrained():
    """The first samples of a stream are read before anything is trained."""
    with tiny.untrained():
        yield


@pytest.fixture
def with_command(lit_config, tmp_path):
    """A configuration of somebody else's in JSON whose shards leave a mark, the mark, and the command."""
    mark, shards = tmp_path / "mark", lit_config.data.shards[0]
    address = f"pipe:touch {mark}; cat {shards}/shard-000000.tar"
    config = changed(lit_config, data__shards=(address,), data__stream=Streaming(10), length=Duration(2))
    experiment.save(config, tmp_path / "config.json")
    return tmp_path / "config.json", mark, address


@pytest.mark.parametrize("mode", [(), ("--resume",), ("--start-or-resume",)])
def test_commands_in_json_run_only_where_the_user_allows_them(capsys, with_command, mode):
    path, mark, _ = with_command
    line = refusal(capsys, "train", "--config", path, *mode)
    assert "data.shards[0] is the shell command 'pipe:touch" in line
    assert "--allow-commands" in line
    assert not mark.exists()


@pytest.mark.slow
def test_commands_in_json_that_the_user_allows_are_run(with_command):
    path, mark, _ = with_command
    run_command("train", "--config", path, "--allow-commands")
    assert mark.exists()
    mark.unlink()
    run = experiment.load(path).run_dir  # one's own run that was interrupted
    tiny.edit_config(run, changed(experiment.load(path), length=Duration(3)))
    run_command("train", "--config", run / "config.json", "--resume", "--allow-commands")
    assert mark.exists()


@pytest.mark.parametrize("form", [("--data.shards", "{}"), ("--data.shards={}",)])
def test_commands_that_the_user_has_typed_are_run(with_command, form):
    path, mark, address = with_command
    run_command("train", "--config", path, *(part.format(address) for part in form))
    assert mark.exists()


def test_commands_in_a_list_of_shards_run_only_where_the_user_allows_them(capsys, with_command, tmp_path):
    path, mark, address = with_command
    listed = tmp_path / "shards.txt"
    listed.write_text(f"{address}\n")
    arguments = ("train", "--config", path, "--data.shards", listed)
    assert f"{listed}:1: 'pipe:touch" in (line := refusal(capsys, *arguments))
    assert "--allow-commands" in line
    assert not mark.exists()
    run_command(*arguments, "--allow-commands")
    assert mark.exists()


def test_no_other_command_runs_what_a_run_of_others_names(capsys, trained_lit, with_command, tmp_path):
    _, mark, address = with_command
    run = tmp_path / "theirs"
    shutil.copytree(trained_lit.run_dir, run)
    (tmp_path / "classnames.txt").write_text("a\nb\n")
    evaluations = (ZeroShotConfig(ImageSet("x", str(tmp_path), split=address)),)
    config = experiment.load(run / "config.json")
    config = changed(config, data__shards=(address,), data__stream=Streaming(10), evaluations=evaluations)
    tiny.edit_config(run, config)
    assert "cannot seek" in refusal(capsys, "embed", "--tower", run, "--output", tmp_path / "embeddings")
    assert "touch" in refusal(capsys, "evaluate", "--checkpoint", run)
    tiny.edit_config(run, changed(config, evaluations=(ZeroShotConfig(ImageSet("x", address)),)))
    assert "touch" in refusal(capsys, "evaluate", "--checkpoint", run)
    assert not mark.exists()


def test_commands_anywhere_else_in_json_are_named_with_their_field(lit_config, tmp_path):
    fields = {
        "evaluations[0].data.directory": {"evaluations": (ZeroShotConfig(ImageSet("x", "pipe:x")),)},
        "task.image_tower.weights": {"task__image_tower__weights": "pipe:x"},
        "data.mixture[0].shards[0]": {"data__mixture": (WeightedShards(("pipe:x",)),)},
    }
    for field, change in fields.items():
        experiment.save(changed(lit_config, **change), tmp_path / "config.json")
        with pytest.raises(UserError, match=re.escape(f"{field} is the shell command 'pipe:x'")):
            parse_config(tmp_path / "config.json", [])
