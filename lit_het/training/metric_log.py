"""Where a run's scalars go: JSON lines and a TensorBoard file, whose records wait in memory while a disk is full."""

import json
import math
import platform
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lit_het import distributed, untrusted
from lit_het.console import say
from lit_het.errors import UserError
from lit_het.files import write_atomically

_MOST_BYTES_OF_LINE = 2**20
# Larger whole numbers are no figures.
_LARGEST = 2**63


class MetricLog:
    """Writes scalars to ``metrics.jsonl`` and to TensorBoard files in a run's directory.

    A resumed run drops the records of steps that its checkpoint does not cover: each step stands there once. Of several
    processes only the main one writes.
    """

    def __init__(self, directory: Path, *, first_step: int = 0):
        self.path = directory / "metrics.jsonl"
        self._writes = distributed.is_first()
        if not self._writes:
            return
        lines = [json.dumps(record) + "\n" for record in read_metrics(self.path) if record["step"] <= first_step]
        write_atomically(self.path, "".join(lines))
        board = directory / "tensorboard"
        board.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() / 1e9:.6f}.{platform.node()}"
        self._lines, self._events = _AppendedFile(self.path), _AppendedFile(board / name)
        self._events.append(_event(file_version="brain.Event:2"))
        self._events.append(_event(step=first_step + 1, session_log={"status": "START"}))  # drops what came later

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one record; ``step`` counts the optimizer updates done."""
        if self._writes:
            self._lines.append(json.dumps({"step": step, **metrics}).encode() + b"\n")
            # Of what is not finite TensorBoard draws nothing, and warns.
            finite = [{"tag": name, "simple_value": value} for name, value in metrics.items() if math.isfinite(value)]
            self._events.append(_event(step=step, summary={"value": finite}))

    def close(self) -> None:
        """Writes what still waits, and says what is lost."""
        if self._writes:
            self._lines.close()
            self._events.close()


class _AppendedFile:
    """A file that grows by whole records: what a full disk does not take waits for the next one.

    Not `tensorboardX.SummaryWriter`, whose thread ends with the first error (2.6.5): a run would wait for ever once ten
    records are in its queue.
    """

    def __init__(self, path: Path):
        self._path = path
        self._size = path.stat().st_size if path.exists() else 0
        self._waiting = b""

    def append(self, record: bytes) -> None:
        waits, self._waiting = bool(self._waiting), self._waiting + record
        error = self._write()
        if error is not None and not waits:
            say(f"{self._path} cannot be written ({error.strerror}); its records wait in memory until it can be")

    def close(self) -> None:
        error = self._write() if self._waiting else None
        if error is not None:
            say(f"{self._path} cannot be written ({error.strerror}); its last records are lost")

    def _write(self) -> OSError | None:
        try:
            # Without a buffer, which would be written, and raise, once more at the end.
            with self._path.open("r+b" if self._size else "wb", buffering=0) as file:
                file.truncate(self._size)  # of half a record that a full disk had room for
                file.seek(self._size)
                content = memoryview(self._waiting)
                while content:
                    content = content[file.write(content) :]
        except OSError as error:
            return error
        self._size += len(self._waiting)
        self._waiting = b""
        return None


def _event(**fields: Any) -> bytes:
    """Returns a record of TensorBoard's: an event with the length before it, and CRCs of both."""
    from tensorboardX.proto import event_pb2  # takes a second, which who only reads metrics need not wait
    from tensorboardX.record_writer import masked_crc32c

    events: Any = event_pb2  # its classes are made when it is imported
    content = events.Event(wall_time=time.time(), **fields).SerializeToString()
    length = struct.pack("<Q", len(content))
    return b"".join(
        [length, struct.pack("<I", masked_crc32c(length)), content, struct.pack("<I", masked_crc32c(content))]
    )


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a ``metrics.jsonl``; a last line cut short by a kill is left out.

    Raises:
        UserError: the file cannot be read, or a line is no record.
    """
    if not path.exists():
        return []
    records = []
    try:
        with untrusted.open_regular(path) as file:
            while (line := file.readline(_MOST_BYTES_OF_LINE + 2)).endswith(b"\n"):
                records.append(_record(line, f"{path}: line {len(records) + 1}"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read as JSON lines ({error.strerror})") from error
    # Whatever follows the last line feed was never completed.
    if len(line) > _MOST_BYTES_OF_LINE:
        raise UserError(f"{path}: line {len(records) + 1} is too long for a record of a step; delete it")
    return records


def _record(line: bytes, place: str) -> dict[str, Any]:
    try:
        record = untrusted.parse_json(line, _MOST_BYTES_OF_LINE)
    except untrusted.Malformed as error:
        raise UserError(f"{place} cannot be read as JSON lines ({error}); delete it") from error
    if not isinstance(record, dict) or type(record.get("step")) is not int or not record["step"] < _LARGEST:
        raise UserError(f"{place} is no record of a step; delete it")
    for name, value in record.items():
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or (type(value) is int and abs(value) > _LARGEST)
        ):
            raise UserError(f"{place}: {name[:100]!r} is {value!r:.50}, no number; delete it")
    return record
