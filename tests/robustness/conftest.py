"""Both services in processes of their own, and a sound client of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from tests.robustness.healthy import Feeder, Stager
from tests.robustness.services import Process, start_rollout_server, start_trainer

DEADLINE = 120.0
PATIENCE = 8.0
"""``server.message_timeout_s``: with a second, sound clients of a busy machine were refused too."""


Size = Callable[[int, int], int]


def pytest_addoption(parser: pytest.Parser) -> None:
    """pytest's hook."""
    parser.addoption(
        "--long",
        action="store_true",
        help="in tests/robustness: 100,000 damaged messages and crowds of 1,000 clients",
    )


@pytest.fixture(scope="package")
def size(request: pytest.FixtureRequest) -> Size:
    """Choose one of two sizes: the second in a run with ``--long``."""
    long = request.config.getoption("--long", default=False)
    return lambda short, longer: longer if long else short


@dataclass(frozen=True)
class Trainer:
    """A trainer and one who feeds it."""

    process: Process
    feeder: Feeder


@dataclass(frozen=True)
class Rollout:
    """A control plane and one who stages there."""

    process: Process
    stager: Stager


@contextmanager
def ended(process: Process) -> Iterator[Process]:
    """Ends it, which has to go well."""
    try:
        yield process
    finally:
        assert process.stop() == 0
    assert "Traceback" not in process.text, process.text


@pytest.fixture(scope="package")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    """Gives up on silent clients after ``PATIENCE``."""
    with ended(start_trainer(tmp_path_factory.mktemp("trainer"), seconds=PATIENCE)) as process:
        feeder = Feeder(process.health, DEADLINE)
        yield Trainer(process, feeder)
        feeder.close()


@pytest.fixture(scope="package")
def rollout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rollout]:
    """Gives up on silent clients after ``PATIENCE``."""
    started = start_rollout_server(tmp_path_factory.mktemp("rollout"), seconds=PATIENCE)
    with ended(started) as process:
        stager = Stager(process.health, DEADLINE)
        yield Rollout(process, stager)
        stager.close()
