"""Runs whose files were changed, damaged, or written by someone else."""

import dataclasses
import errno
import json
import os
import re
import shutil
import time
from pathlib import Path

import pytest

from lit_het.cli.main import main
from lit_het.configs import experiment
from lit_het.configs.parsing import parse_config
from lit_het.errors import TRY_AGAIN, UserError
from lit_het.eval.saved_runs import read_runs
from lit_het.models.opening import open_run
from lit_het.models.pretrained import abstract_params, load_pretrained
from lit_het.training.directory import config_path, load_config
from lit_het.training.log import read_metrics
from lit_het.training.train import train
from lit_het.weights.native.saved_step import SavedStep
from tests.weights.test_damage import flip


@pytest.fixture
def copied(trained_lit, tmp_path):
    """A copy of a finished run, and its configuration."""
    return Path(shutil.copytree(trained_lit.run_dir, tmp_path / "copy")), trained_lit


def test_a_changed_file_is_named_when_the_run_is_opened(copied, capsys):
    run, config = copied
    assert main(["checkpoint", "verify", str(run)]) == 0
    assert "whole: config.json, tokenizer.model" in capsys.readouterr().out
    flip(run / "tokenizer.model", 500)
    told = r"tokenizer\.model is not what the run wrote"
    for opening in (
        lambda: open_run(run),
        lambda: train(dataclasses.replace(config, run_dir=run), resume=True),
        lambda: load_pretrained(with_pretrained(config, run), abstract_params(config.task.build())),
        lambda: read_runs([run]),
    ):
        with pytest.raises(UserError, match=told):
            opening()
    assert main(["checkpoint", "verify", str(run)]) == 1
    assert "tokenizer.model is not what the run wrote" in capsys.readouterr().err
    flip(run / "config.json", 100)
    with pytest.raises(UserError, match=r"config\.json is not what the run wrote"):
        parse_config(run / "config.json", ())


def test_a_configuration_edited_by_hand_is_accepted_once_the_manifest_is_deleted(copied):
    run, _ = copied
    text = (run / "config.json").read_text()
    (run / "config.json").write_text(text.replace('"on_nonfinite": "stop"', '"on_nonfinite": "skip"'))
    with pytest.raises(UserError, match=r"config\.json is not what the run wrote: .* delete .*manifest\.json"):
        load_config(run)
    (run / "manifest.json").unlink()
    assert load_config(run).on_nonfinite == "skip"
    open_run(run)


def with_pretrained(config, run):
    return dataclasses.replace(config, pretrained=dataclasses.replace(config.pretrained, run=run))


def test_a_run_that_takes_its_parameters_from_itself_is_refused_at_once(copied, tmp_path):
    one, config = copied
    other = Path(shutil.copytree(one, tmp_path / "other"))
    for here, there in ((one, one), (one, other), (other, one)):
        (here / "manifest.json").unlink(missing_ok=True)
        experiment.save(with_pretrained(config, there), config_path(here))
        if here == there or (here, there) == (other, one):
            began = time.monotonic()
            with pytest.raises(UserError, match="leads back to"):
                open_run(here)
            with pytest.raises(UserError, match="leads back to"):
                load_pretrained(with_pretrained(config, here), abstract_params(config.task.build()))
            assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    ("field", "resumes", "told"),
    [
        ("position", True, "has no position in the data"),
        ("locked_checksum", True, "the locked parameters are not those"),
        ("locked_checksum", False, "are not those that"),
    ],
)
def test_a_checkpoint_whose_info_lacks_a_field_is_a_one_line_error(copied, field, resumes, told, monkeypatch):
    run, config = copied
    read_info = SavedStep.read_info

    def without(step):
        info, fingerprints = read_info(step)
        return {name: value for name, value in info.items() if name != field}, fingerprints

    monkeypatch.setattr(SavedStep, "read_info", without)
    with pytest.raises(UserError, match=told):
        train(dataclasses.replace(config, run_dir=run), resume=True) if resumes else open_run(run)


def test_a_start_on_a_full_disk_can_be_retried(copied, monkeypatch, capsys):
    run, _ = copied

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device", str(run / "config.json"))

    monkeypatch.setattr("lit_het.training.train.write_run_files", fail)
    assert main(["train", "--config", str(run / "config.json"), "--run-dir", str(run), "--resume"]) == TRY_AGAIN
    told = capsys.readouterr().err
    assert "config.json cannot be written (No space left on device); free the disk and start again" in told


VALUES = (None, True, -1, 10**30, float("nan"), float("inf"), "x", [], {}, {"type": "Nothing"}, {"type": []}, [3])


@pytest.mark.slow
def test_no_value_of_any_field_of_a_configuration_ends_in_a_traceback(trained_lit, tmp_path):
    path, fields = tmp_path / "config.json", experiment.to_dict(trained_lit)

    def changed(tree, place, value):
        return {**tree, place[0]: changed(tree[place[0]], place[1:], value)} if place else value

    def places(tree, place=()):
        yield place
        if isinstance(tree, dict):
            for name, child in tree.items():
                yield from places(child, (*place, name))

    refused = 0
    for place in places(fields):
        for value in VALUES:
            path.write_text(json.dumps(changed(fields, place, value)))
            try:
                experiment.load(path)
            except UserError as error:
                refused += "\n" not in str(error) and str(path) in str(error)
    assert refused > 500


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("width", 2**40), ("depth", 2**40), ("threads", 2**30), ("batch_size", 2**40), ("image_size", 20_000)),
        *(("run_dir", "/tmp/" + "a" * 300), ("run_dir", "a\0b"), ("run_dir", "\ud800")),
    ],
)
def test_a_value_beyond_any_model_or_path_is_named(trained_lit, tmp_path, field, value):
    text, changed = json.dumps(experiment.to_dict(trained_lit)), f'"{field}": {json.dumps(value)}'
    (tmp_path / "config.json").write_text(re.sub(rf'"{field}": ("[^"]*"|\d+)', lambda _: changed, text))
    with pytest.raises(UserError, match=rf"does not fit this version of lit-het: .*({field}|surrogates)"):
        experiment.load(tmp_path / "config.json")


@pytest.mark.parametrize("name", ["metrics.jsonl", "starts.jsonl"])
def test_a_named_pipe_in_a_run_is_a_one_line_error(copied, name, tmp_path):
    run, config = copied
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(UserError, match=rf"{name}.*(no|not a) regular file"):
        train(dataclasses.replace(config, run_dir=run), resume=True)
    if name == "metrics.jsonl":
        assert main(["report", str(run), "--output", str(tmp_path / "r.html")]) == 1


def test_half_written_files_of_a_killed_start_are_removed(copied):
    run, config = copied
    left = [run / f"{name}.partial-0123456789abcdef" for name in ("config.json", "metrics.jsonl")]
    for path in left:
        path.touch()
    train(dataclasses.replace(config, run_dir=run), resume=True)
    assert not any(path.exists() for path in left)


@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b"", b"null", b"3", b"[]", b'{"task": []}', b"{}", b"\xff", b'{"run_dir": 1e999}', b"9" * 5000],
)
def test_other_json_is_no_configuration(content, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=r"config\.json does not fit this version of lit-het: [^\n]*$") as refused:
        experiment.load(tmp_path / "config.json")
    assert "has no attribute" not in str(refused.value)


@pytest.mark.parametrize(
    "line",
    ["[" * 5000, "null", "{}", '{"step": "1"}', '{"step": 1, "loss": []}', '{"step": 1, "loss": 1' + "0" * 400 + "}"],
)
def test_a_line_that_is_no_record_of_metrics_is_named(line, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1, "train/loss": NaN}}\n{line}\n')
    with pytest.raises(UserError, match="line 2"):
        read_metrics(path)
