"""The time of the quickstart: spent, still needed, and what of it is compilation."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import jax

from lit_het.apps.quickstart.evaluation import read_json
from lit_het.console import in_minutes, message
from lit_het.errors import UserError
from lit_het.files import write_atomically

# How much of all stages must be done until their times count as much as the first guess.
_TRUST = 0.25
# The event that JAX reports of each program.
_COMPILATION = "/jax/core/compile/backend_compile_duration"
# Seconds of the loop of `_slowness` where the expected times were measured.
_REFERENCE = 0.040


class Clock:
    """Sums the seconds of all stages over interruptions in ``stages.json``, which also stores seed and size.

    Attributes:
        seed: of the quickstart.
        stages: seconds by stage.
        compile_seconds: of these, spent by XLA.
    """

    def __init__(self, run_dir: Path, seed: int, fast: bool, expected: Sequence[float]):
        """Says how long it will take.

        Args:
            run_dir: folder of the quickstart.
            seed: must be that of earlier starts, as must ``fast``.
            fast: whether it is the short one.
            expected: seconds of each call of `stage`, on the machine of docs/quickstart.md.
        """
        self._path = run_dir / "stages.json"
        self.seed, self._fast = seed, fast
        self.stages: dict[str, float] = {}
        self.compile_seconds = 0.0
        self._expected, self._entered = expected, 0
        # Of the stages that this start has done: expected and real seconds.
        self._done = (_TRUST * sum(expected), _TRUST * sum(expected) * _slowness())
        # The first stage includes the time of imports: from the start of the process until now.
        self._uncounted = time.monotonic() - _process_start()
        run_dir.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            self._go_on(run_dir)
        message(f"about {self._left()} on this machine")

    def _go_on(self, run_dir: Path) -> None:
        before = read_json(self._path)
        if before.get("seed") != self.seed:
            raise UserError(
                f"{run_dir} was started with seed {before.get('seed')}; give this --seed or another --run-dir"
            )
        if bool(before.get("fast")) != self._fast:
            without = "without " * self._fast
            raise UserError(f"{run_dir} was started {without}--fast; start it so again or give another --run-dir")
        stages, compiling = before.get("stages"), before.get("compile_seconds", 0.0)
        if not isinstance(stages, dict) or not all(isinstance(x, int | float) for x in (compiling, *stages.values())):
            raise UserError(f"{self._path} contains no times of stages; delete it")
        self.stages, self.compile_seconds = stages, compiling

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Adds the time inside the context to stage ``name``, and says before how much time is left."""
        if self._entered:
            message(f"{name} ({self._entered + 1} of {len(self._expected)}), about {self._left()} left")
        began, expected = time.monotonic(), self._expected[self._entered]
        self._entered += 1
        jax.monitoring.register_event_duration_secs_listener(self._count)
        try:
            yield
        finally:
            jax.monitoring.unregister_event_duration_listener(self._count)
            spent = time.monotonic() - began
            if spent > expected / 10:  # or else an earlier start had done it
                self._done = (self._done[0] + expected, self._done[1] + spent)
            self.stages[name] = self.stages.get(name, 0.0) + spent + self._uncounted
            self._uncounted = 0.0
            written = {"seed": self.seed, "fast": self._fast, "stages": self.stages}
            write_atomically(self._path, json.dumps(written | {"compile_seconds": self.compile_seconds}) + "\n")

    def seconds(self) -> float:
        """Returns the total seconds of all stages."""
        return sum(self.stages.values())

    def _left(self) -> str:
        expected, real = self._done
        return in_minutes(sum(self._expected[self._entered :]) * real / expected)

    def _count(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        self.compile_seconds += duration_secs * (event == _COMPILATION)


def _slowness() -> float:
    """Returns the time that this machine takes over that of docs/quickstart.md, by a loop in Python.

    Two processors differed by a factor of 1.6 in the whole quickstart and of 2.8 in a product of matrices: most of the
    time are Python, compilation and small operations.
    """
    times = []
    for _ in range(5):
        began = time.monotonic()
        sum(number & 7 for number in range(500_000))
        times.append(time.monotonic() - began)
    return min(times) / _REFERENCE


def _process_start() -> float:
    """Returns the start time of this process on the monotonic clock."""
    import psutil

    return time.monotonic() - (time.time() - psutil.Process().create_time())
