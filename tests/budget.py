"""A plug-in of pytest that reports the CPU seconds of each test, with those of its processes.

Wall time says little where three workers share two cores. The ticks of a worker and of all its
descendants are read after each phase; those of an ended process are in its parent's count. A server
that several tests share counts in the test that started it.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

LIMIT = 300.0
"""CPU seconds of a test in the fast tier: five times the longest, for machines that are slower."""
SHOWN = 25
_PROPERTY = "cpu_seconds"
_TICKS = os.sysconf("SC_CLK_TCK")


class Budget:
    """Fails a test of the fast tier that takes more than ``LIMIT``, and lists the longest tests."""

    def __init__(self) -> None:
        self._read = cpu_seconds()
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Charge what was used since the report before; a set-up pays what lies between two."""
        report = yield
        before, self._read = self._read, cpu_seconds()
        # A process whose parent has ended is no descendant any more.
        seconds = max(0.0, self._read - before)
        report.user_properties.append((_PROPERTY, seconds))
        if seconds > LIMIT and report.passed and item.get_closest_marker("slow") is None:
            report.outcome = "failed"
            report.longrepr = (
                f"{call.when}: took {seconds:.0f} CPU seconds, expected at most {LIMIT:.0f} in the "
                "fast tier. Next step: make it cheaper, or mark it slow"
            )
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up a test's phases, where they are reported."""
        self._seconds[report.nodeid] += dict(report.user_properties).get(_PROPERTY, 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the tests that took most."""
        longest = sorted(self._seconds.items(), key=lambda pair: -pair[1])[:SHOWN]
        total = sum(self._seconds.values())
        terminalreporter.section(f"{total:.0f} CPU seconds in tests; those that took most")
        for name, seconds in longest:
            terminalreporter.line(f"{seconds:7.1f}  {name}")


def cpu_seconds() -> float:
    """Sum the CPU seconds of this process and its descendants, ended ones included (proc(5))."""
    ticks: dict[int, int] = {}
    children: defaultdict[int, list[int]] = defaultdict(list)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            stat = (process / "stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        # After the name, which may hold spaces: state, ppid, ..., utime, stime, cutime, cstime.
        fields = stat.rpartition(")")[2].split()
        ticks[int(process.name)] = sum(map(int, fields[11:15]))
        children[int(fields[1])].append(int(process.name))
    total, family = 0, [os.getpid()]
    while family:
        member = family.pop()
        total += ticks.get(member, 0)
        family += children[member]
    return total / _TICKS
