"""The fixtures of several test areas: a trained tiny policy, its draft, one real vLLM server."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
from xdist.scheduler import LoadFileScheduling

# Nothing is ever fetched from a hub; one torch thread per process keeps two cores fair.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before gRPC is imported: Ray forks its processes from ours.
import slipstream  # noqa: F401
from examples.local_services import ARITHMETIC as EXAMPLE
from tests.budget import Budget
from tests.machine import lacking
from tests.rollout_server.live import Live

ROOT = Path(__file__).resolve().parents[1]

# A shell that runs the tests in the background has SIGINT ignored, and every process that they
# start inherits that. Not per process by preexec_fn: gRPC's fork handlers then end some of them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def policy_dir() -> Path:
    """The tiny policy that was trained on arithmetic: its accuracy is known."""
    return EXAMPLE / "policy"


@pytest.fixture(scope="session")
def draft_dir() -> Path:
    """Release 0 of the demo: an EAGLE-3 head trained for ``policy_dir``."""
    return EXAMPLE / "draft"


# A rank's worker in its engine's process, as on GPUs: a third import of vLLM less for each start.
# vLLM's servers on CPUs read this variable for nothing else. These servers are forks of a process
# that has imported vLLM; those that the demo, the tutorial and test_process start are commands with
# a process for each, as users on CPUs have.
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@contextmanager
def servers(policy_dir: Path, draft_dir: Path, logs: Path) -> Iterator[Callable[..., Live]]:
    """``start(*extra options) -> Live``; every server is stopped at the end.

    float32, so that the exact probabilities that the tests compute in torch are the
    server's own and the statistical tests' null is exact.
    """
    started: list[Live] = []

    def start(
        *options: str,
        policy: Path = policy_dir,
        draft: Path = draft_dir,
        env: Mapping[str, str] = ONE_PROCESS,
        runner: str = "V1",
    ) -> Live:
        if runner == "V2" and "triton" in lacking():
            pytest.skip(lacking()["triton"])
        # 384 blocks hold two of 128 tokens for each request, and some for the prefix cache. The
        # gigabyte that vLLM would take instead is touched at once, by each of three servers: the
        # page cache went, and importing vLLM took two minutes.
        options = ("--dtype", "float32", "--num-gpu-blocks-override", "384", *options)
        log = logs / f"server-{len(started)}.log"
        forked = env == ONE_PROCESS
        named = {"policy": policy, "draft": draft, "env": env, "forked": forked}
        started.append(Live(log, *options, runner=runner, **named))
        started[-1].service.start()
        started[-1].service.wait_ready(600)
        return started[-1]

    try:
        yield start
    finally:
        for server in started:
            server.stop()


@pytest.fixture(scope="module")
def serve(
    policy_dir: Path, draft_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Live]]:
    """Starts servers of a test module's own: each holds 3 GB, so none outlives the module."""
    with servers(policy_dir, draft_dir, tmp_path_factory.mktemp("servers")) as start:
        yield start


@pytest.fixture(scope="session")
def server(
    policy_dir: Path, draft_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Live]:
    """One server, shared by every test that leaves it as it found it (release 0, speculating)."""
    with servers(policy_dir, draft_dir, tmp_path_factory.mktemp("server")) as start:
        yield start()


@pytest.fixture(scope="session")
def server_v2(
    policy_dir: Path, draft_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Live]:
    """``server`` with Model Runner V2 and asynchronous scheduling, as GPUs run vLLM."""
    with servers(policy_dir, draft_dir, tmp_path_factory.mktemp("server_v2")) as start:
        yield start(runner="V2")


@pytest.fixture(scope="session", params=["server", "server_v2"], ids=["V1", "V2"])
def live(request: pytest.FixtureRequest) -> Live:
    """``server`` and ``server_v2`` in turn."""
    live: Live = request.getfixturevalue(request.param)
    return live


def pytest_configure(config: pytest.Config) -> None:
    """pytest's hook."""
    config.pluginmanager.register(Budget())


def pytest_report_header() -> list[str]:
    """pytest's hook: says what is skipped on this machine."""
    return [f"skipped here: {what}" for what in lacking().values()]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """pytest's hook: says it again."""
    for what in lacking().values():
        terminalreporter.line(f"skipped here: {what}", yellow=True)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """pytest's hook: skips what vLLM cannot run for here."""
    engine = item.get_closest_marker("vllm") is not None
    for needed in ("libnuma", "memory"):
        what = lacking().get(needed)
        if what and (engine or (needed == "libnuma" and _IMPORTS_VLLM.search(_text(item.path)))):
            pytest.skip(what)


_MODULE_MARK = re.compile(r"(?m)^pytestmark = (\[\s*)?pytest\.mark\.vllm\b")
_IMPORTS_VLLM = re.compile(r"(?m)^\s*(import|from) vllm\b")
_text = cache(Path.read_text)


class OneEngineAtATime(LoadFileScheduling):
    """A file to a worker, but all tests that start vLLM to the same one.

    Two engines on two cores spin against each other: in parallel they took three times as long.
    Tests of vLLM's own classes share a worker too, which imports vLLM once for all of them.
    Not ``--dist loadgroup``: pytest-xdist 3.8 writes its groups where pytest 9.2 never looks.
    """

    def _split_scope(self, nodeid: str) -> str:
        file, _, test = nodeid.partition("::")
        text, name = _text(ROOT / file), test.partition("[")[0]
        # From the mark on, the first function is the one that it marks.
        marked = rf"(?ms)^@pytest\.mark\.vllm$((?!^def ).)*^def {name}\("
        if _MODULE_MARK.search(text) or re.search(marked, text):
            return "vllm"
        in_process = file.startswith("tests/rollout_server/") and _IMPORTS_VLLM.search(text)
        if in_process or file == "tests/deploy/test_rollout_options.py":
            return "engine modules"
        return file


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> OneEngineAtATime:
    """pytest-xdist's hook."""
    return OneEngineAtATime(config, log)
