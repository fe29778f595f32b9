"""A plugin of pytest: CPU seconds and compiled programs of the tests, over all workers and the processes they start."""

import collections
import dataclasses
import os
from collections.abc import Generator
from typing import Any

import pytest

_COMPILED = "/jax/core/compile/backend_compile_duration"
_READ = "/jax/compilation_cache/cache_hits"
_LEVELS = {
    "folder": lambda test: os.path.dirname(test.partition("::")[0]),
    "file": lambda test: test.partition("::")[0],
}


@dataclasses.dataclass
class Costs:
    """Attributes are CPU seconds, XLA programs that were compiled or read from the cache, those read, and tests."""

    cpu: float = 0.0
    programs: int = 0
    read: int = 0
    tests: int = 0

    def __add__(self, other: "Costs") -> "Costs":
        return Costs(*(one + another for one, another in zip(*map(dataclasses.astuple, (self, other)), strict=True)))


def cpu_seconds(children: bool = True) -> float:
    """Returns the CPU time of this process, and of its children that have ended."""
    user, system, of_children, system_of_children, _ = os.times()
    return user + system + children * (of_children + system_of_children)


class Meter:
    """Measures the tests of a process and collects what workers have measured."""

    def __init__(self, level: str | None) -> None:
        self.level, self.total = level, 0.0
        self.tests: dict[str, Costs] = {}
        self._events = collections.Counter[str]()
        import jax.monitoring  # not before tests/conftest.py has set its environment

        jax.monitoring.register_event_listener(self._count)
        jax.monitoring.register_event_duration_secs_listener(self._count)

    def _count(self, event: str, *_: Any, **__: Any) -> None:
        self._events[event] += 1

    def _now(self) -> tuple[float, int, int]:
        return cpu_seconds(), self._events[_COMPILED], self._events[_READ]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        cpu, programs, read = self._now()
        result = yield
        after = self._now()
        self.tests[item.nodeid] = Costs(after[0] - cpu, after[1] - programs, after[2] - read, tests=1)
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        # Workers are children of the main process, and report for themselves.
        self.total += cpu_seconds(children=output is not None or not session.config.getoption("tx", None))
        if output is not None:  # of a worker
            output["costs"] = self.total, {test: dataclasses.astuple(costs) for test, costs in self.tests.items()}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        total, rows = getattr(node, "workeroutput", {}).get("costs", (0.0, {}))
        self.total += total
        self.tests |= {test: Costs(*row) for test, row in rows.items()}

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        write = terminalreporter.write_line
        if self.level:
            write(f"{'CPU s':>8} {'programs':>8} {'of cache':>8} {'tests':>6}")
            for name, costs in sorted(self._by_level(self.level).items(), key=lambda row: -row[1].cpu):
                write(f"{costs.cpu:8.1f} {costs.programs:8} {costs.read:8} {costs.tests:6}  {name}")
        every = sum(self.tests.values(), Costs())
        write(f"{self.total:.0f} CPU seconds; {every.programs:,} XLA programs, {every.read:,} of them from the cache")

    def _by_level(self, level: str) -> dict[str, Costs]:
        found: dict[str, Costs] = collections.defaultdict(Costs)
        for test, costs in self.tests.items():
            found[_LEVELS[level](test) if level in _LEVELS else test] += costs
        return found


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the flag that prints a table."""
    parser.addoption("--costs", choices=["folder", "file", "test"], help="print CPU seconds and programs of each")


def pytest_configure(config: pytest.Config) -> None:
    """Begins to measure."""
    config.pluginmanager.register(Meter(config.getoption("--costs")))
