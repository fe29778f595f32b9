"""The log of a run's scalars: JSON lines and a TensorBoard file; records wait in memory while a disk is full."""

import functools
import json
import math
import platform
import struct
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lit_het import distributed, untrusted
from lit_het.console import message
from lit_het.errors import UserError
from lit_het.files import write_atomically

if TYPE_CHECKING:
    from lit_het.training.tracking import Tracker

_MOST_BYTES_OF_LINE = 2**20
# Larger whole numbers are not metrics.
_LARGEST = 2**63


class MetricLog:
    """Writes scalars to ``metrics.jsonl`` and to TensorBoard files in a run's directory; only on the main process.

    A resumed run removes records after its checkpoint, so that each step has one record.

    Args:
        directory: of the run.
        first_step: the step of the checkpoint that it continues from.
        tracker: also receives every record.
    """

    def __init__(self, directory: Path, *, first_step: int = 0, tracker: "Tracker | None" = None):
        self.path, self._tracker = directory / "metrics.jsonl", tracker
        self._writes = distributed.is_main_process()
        if not self._writes:
            return
        # A run that was killed has records after its last checkpoint; the resumed run computes these steps again.
        lines = [json.dumps(record) + "\n" for record in read_metrics(self.path) if record["step"] <= first_step]
        write_atomically(self.path, "".join(lines))
        board = directory / "tensorboard"
        board.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns() / 1e9:.6f}.{platform.node()}"
        self._lines, self._events = _AppendedFile(self.path), _AppendedFile(board / name)
        self._events.append(_event(file_version="brain.Event:2"))
        self._events.append(
            _event(step=first_step + 1, session_log={"status": "START"})
        )  # TensorBoard drops later records

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one record after ``step`` optimizer updates."""
        if self._writes:
            self._lines.append(json.dumps({"step": step, **metrics}).encode() + b"\n")
            # TensorBoard cannot draw values that are not finite, and warns of them.
            finite = [{"tag": name, "simple_value": value} for name, value in metrics.items() if math.isfinite(value)]
            self._events.append(_event(step=step, summary={"value": finite}))
            if self._tracker:
                self._tracker.log(step, metrics)

    def close(self) -> None:
        """Writes waiting records, and reports lost ones."""
        if self._writes:
            self._lines.close()
            self._events.close()
            if self._tracker:
                self._tracker.close()


class _AppendedFile:
    """A file that grows by whole records, which wait in memory while the disk is full."""

    # Not `tensorboardX.SummaryWriter` (2.6.5): its thread ends at the first error, and after ten more records the run
    # would wait forever.

    def __init__(self, path: Path):
        self._path = path
        self._size = path.stat().st_size if path.exists() else 0
        self._waiting = b""

    def append(self, record: bytes) -> None:
        waits, self._waiting = bool(self._waiting), self._waiting + record
        error = self._write()
        if error is not None and not waits:
            message(f"{self._path} cannot be written ({error.strerror}); its records wait in memory until it can be")

    def close(self) -> None:
        error = self._write() if self._waiting else None
        if error is not None:
            message(f"{self._path} cannot be written ({error.strerror}); its last records are lost")

    def _write(self) -> OSError | None:
        try:
            # Unbuffered: a buffer would be written a second time on close, and raise again.
            with self._path.open("r+b" if self._size else "wb", buffering=0) as file:
                file.truncate(self._size)  # removes half a record, written before the disk was full
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
    """Returns a TensorBoard record: the length, the event, and a CRC of each."""
    event, checksum = _tensorboard()
    content = event(wall_time=time.time(), **fields).SerializeToString()
    length = struct.pack("<Q", len(content))
    return b"".join([length, struct.pack("<I", checksum(length)), content, struct.pack("<I", checksum(content))])


@functools.cache
def _tensorboard() -> tuple[Callable[..., Any], Callable[[bytes], int]]:
    """Returns TensorBoard's event and its checksum, which readers of metrics need not import."""
    # tensorboardX (2.6.5) imports PyTorch wherever it is installed, for a class that is not used here: two seconds of
    # every start. None is Python's sign for a module that cannot be imported.
    if hidden := "torch" not in sys.modules:
        sys.modules["torch"] = None  # pyright: ignore[reportArgumentType]
    try:
        from tensorboardX.proto import event_pb2
        from tensorboardX.record_writer import masked_crc32c
    finally:
        if hidden:
            del sys.modules["torch"]
    return vars(event_pb2)["Event"], masked_crc32c  # the class is created at import: unknown to type checkers


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a ``metrics.jsonl``, without a last line that was cut off by a kill."""
    if not path.exists():
        return []
    records = []
    try:
        with untrusted.open_regular(path) as file:
            while (line := file.readline(_MOST_BYTES_OF_LINE + 2)).endswith(b"\n"):
                records.append(_record(line, f"{path}: line {len(records) + 1}"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read as JSON lines ({error.strerror})") from error
    # A last line without a line feed is incomplete.
    if len(line) > _MOST_BYTES_OF_LINE:
        raise UserError(f"{path}: line {len(records) + 1} is too long for a record; delete it")
    return records


def _record(line: bytes, place: str) -> dict[str, Any]:
    try:
        record = untrusted.parse_json(line, _MOST_BYTES_OF_LINE)
    except untrusted.Malformed as error:
        raise UserError(f"{place} cannot be read as JSON lines ({error}); delete it") from error
    if not isinstance(record, dict) or type(record.get("step")) is not int or not record["step"] < _LARGEST:
        raise UserError(f"{place} is not a record of a step; delete it")
    for name, value in record.items():
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or (type(value) is int and abs(value) > _LARGEST)
        ):
            raise UserError(f"{place}: {name[:100]!r} is {value!r:.50}, not a number; delete it")
    return record
