"""Exit codes of commands that go wrong, or are stopped."""

import contextlib
import fcntl
import io
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lit_het.cli.main import main

COMMANDS = (
    *("", "--help", "--version", "nothing", "train --help", "data", "data nothing"),
    *("report", "report --nothing .", "report none", "data index none", "data index --workers x none"),
    *("data index damaged.tar", "data check damaged.tar", "export --checkpoint none --to nothing --output out"),
    *("train", "train --config none", "train --config broken.py", "train --config quickstart_upstream --help"),
    *("train --config quickstart_upstream --lenght 3", "train --config quickstart_upstream --length three"),
    *("train --config quickstart_upstream --task.mixup -1", "train --config quickstart_upstream --task.head none"),
    "train --config quickstart_upstream --run-dir in_use",
    *("zero-shot --data set", "zero-shot --checkpoint none --data set", "evaluate --checkpoint none"),
    *("plan --config quickstart_upstream", "plan --config quickstart_upstream --devices 0"),
    *(f"train --config stopped_by_{name}.py" for name in ("SIGINT", "SIGTERM", "SIGHUP")),
)


def recorded() -> dict[str, int | str | None]:
    """Returns the exit code of each command in a folder of unusable files."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), _unusable(), _usual_handlers():
        return {command: _code(command.split()) for command in COMMANDS}


@contextlib.contextmanager
def _unusable() -> Iterator[None]:
    """Fills the working directory with what commands cannot use, or are stopped by."""
    Path("damaged.tar").write_bytes(b"x" * 2048)
    Path("broken.py").write_text("def get_config():\n    return 1 / 0\n")
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        Path(f"stopped_by_{name}.py").write_text(
            f"import signal\n\n\ndef get_config():\n    signal.raise_signal(signal.{name})\n"
        )
    Path("in_use").mkdir()
    with Path("in_use/lock.json").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _usual_handlers() -> Iterator[None]:
    """The parent process of the tests, such as nohup, may ignore signals."""
    usual = {signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _code(command: list[str]) -> int | str | None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            return main(command)
        except SystemExit as end:
            return end.code or 0
