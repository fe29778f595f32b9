"""The command line as a process: what ends it ends what it has started."""

import contextlib
import dataclasses
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest

from lit_het.cli.main import main
from lit_het.configs import parsing, quickstart_upstream
from lit_het.data_pipelines.data_config import LoaderConfig, Streaming
from lit_het.data_pipelines.shards.stream import Stream
from lit_het.errors import UserError
from lit_het.eval.evaluators import COMMANDS
from lit_het.eval.suite import EVALUATIONS
from lit_het.sharding import MeshConfig
from lit_het.training import train
from tests.cli.conftest import refusal


@pytest.fixture
def sleeping(tmp_path, monkeypatch) -> Iterator[Path]:
    """Makes training wait for a command that writes its process id into a file, and nothing else."""
    started = tmp_path / "started"
    command = f"pipe:sleep 1000 & echo $! > {started}; wait"

    def wait(*_: object, **__: object) -> None:
        stream = Stream(LoaderConfig((command,), threads=1, stream=Streaming(1)))
        with contextlib.closing(stream.batches()) as batches:
            next(batches)

    monkeypatch.setattr(parsing, "parse_config", lambda *_, **__: None)
    monkeypatch.setattr(train, "train", wait)
    # The parent process of the tests, such as nohup, may ignore them.
    usual = {signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield started
    for number, handler in before.items():
        signal.signal(number, handler)


def signalled(started: Path, *numbers: int) -> int:
    """The exit code of a run that gets signals once its command has started."""

    def send() -> None:
        while not (started.exists() and started.read_text().endswith("\n")):
            ended.wait(0.01)
        for number in numbers:
            os.kill(os.getpid(), number)

    ended = threading.Event()
    sender = threading.Thread(target=send)
    sender.start()
    try:
        return main(["train", "--config", "quickstart_upstream"])  # its content is not read
    finally:
        sender.join()


def wait_for_end(process: str) -> None:
    deadline = time.monotonic() + 5
    with contextlib.suppress(FileNotFoundError):
        while Path(f"/proc/{process}/cmdline").read_bytes():  # a process that was not waited for has an empty one
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGINT, 130)])
def test_a_signal_stops_the_commands_of_a_stream_with_a_one_line_message(sleeping, capsys, number, code):
    assert signalled(sleeping, number, number if number != signal.SIGINT else 0) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("; --resume continues from the newest checkpoint, if one was saved")
    wait_for_end(sleeping.read_text().strip())
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_hangup_that_is_ignored_stays_ignored(sleeping, capsys):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert signalled(sleeping, signal.SIGHUP, signal.SIGTERM) == 143
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.slow
def test_a_reader_that_goes_away_ends_a_command_quietly():
    command = [sys.executable, "-m", "lit_het.cli.main", "train", "--config", "quickstart_lit_het_xl", "--help"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # as `head` does after its first line
        assert process.stderr.read() == ""
        assert process.wait() == 1


def test_another_pipe_that_breaks_is_still_an_error(monkeypatch, tmp_path):
    def broken(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("lit_het.apps.report.report", broken)
    with pytest.raises(BrokenPipeError):
        main(["report", str(tmp_path)])


def test_every_evaluation_has_a_command():
    assert list(COMMANDS) == list(EVALUATIONS)


@pytest.mark.parametrize(
    ("arguments", "place", "line"),
    [
        (
            ["zero-shot", "--checkpoint", "run", "--data", "set"],
            "lit_het.configs.parsing.parse_evaluations",
            "lit-het: interrupted; finished evaluations are saved in the run's folder",
        ),
        (
            ["data", "index", "shards"],
            "lit_het.apps.data.index",
            "lit-het: interrupted; finished shards are saved; the same command continues",
        ),
        (["report", "run"], "lit_het.apps.report.report", "lit-het: interrupted"),
    ],
)
def test_an_interrupted_command_says_what_is_kept(monkeypatch, capsys, tmp_path, arguments, place, line):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for folder in ("run", "set", "shards"):
        (tmp_path / folder).mkdir()
    (tmp_path / "run" / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(place, interrupt)
    assert main(arguments) == 130
    assert capsys.readouterr().err == f"{line}\n"


@pytest.mark.parametrize(
    ("backend", "variable", "cache"), [("tpu", None, "cache/lit-het/compiled"), ("tpu", "", None), ("cpu", None, None)]
)
def test_compiled_programs_are_cached_on_accelerators_unless_the_user_sets_a_cache(
    monkeypatch, tmp_path, backend, variable, cache
):
    told = {}
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(jax.config, "update", told.__setitem__)
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    if variable is not None:
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", variable)
    with pytest.raises(UserError, match="mesh data x fsdp"):  # by then it is decided
        train.train(dataclasses.replace(quickstart_upstream.get_config(), mesh=MeshConfig(data=999)))
    assert told.get("jax_compilation_cache_dir") == cache


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("trian", "train"),
        ("data prepar", "prepare"),
        ("export --to huggingfac --checkpoint x --output y", "huggingface"),
    ],
)
def test_a_misspelt_choice_is_answered_with_the_one_that_was_meant(capsys, line, meant):
    with pytest.raises(SystemExit, match="2"):
        main(line.split())
    assert capsys.readouterr().err.rstrip().endswith(f"did you mean {meant}?")


@pytest.mark.parametrize("line", ["new project --tower {} --data x --captions txt", "import --from {} --to x"])
def test_the_name_of_a_repository_is_answered_with_its_address(capsys, line):
    assert "did you mean hf://google/siglip-base" in refusal(capsys, *line.format("google/siglip-base").split())


def test_train_repeats_a_file_that_was_given_without_its_flag(capsys):
    assert refusal(capsys, "train", "mine.py").endswith("such as --config mine.py")


def test_help_lists_every_command_in_one_group(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    listed = re.findall(r"^  ([a-z][a-z-]+)(?: |$)", capsys.readouterr().out, re.MULTILINE)
    assert len(listed) == len(set(listed)) == 36
