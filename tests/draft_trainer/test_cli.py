"""The command line with real processes: ready, asked, refused, ended."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from draft_trainer.cli.main import main, return_freed_memory
from draft_trainer.config import TrainerConfig
from draft_trainer.kernels.library import using_kernels
from draft_trainer.releases.reconcile import Reconciler
from draft_trainer.server.app import TrainerServer
from draft_trainer.training.device import training_device
from examples.arithmetic_grpo.processes import free_port
from slipstream.client import open_channel
from slipstream.v1 import draft_trainer_pb2 as pb
from tests.draft_trainer.rig import Client, Stream, make_config, raw_config, rollouts, running

PROGRAM = [
    sys.executable,
    "-c",
    "import sys; from draft_trainer.cli.main import main; sys.exit(main())",
]
DEADLINE = 300.0


def write_config(tmp_path: Path, **sections: dict[str, Any]) -> Path:
    lines = []
    for name, values in raw_config(tmp_path, **sections).items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    path = tmp_path / "trainer.toml"
    path.write_text("\n".join(lines))
    return path


Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *arguments: str) -> tuple[int, str]:
    """Exit code and stdout of a command, in this process: torch takes seconds to load."""
    code = main(arguments)
    return code, capsys.readouterr().out


def refused(capsys: Capture, *arguments: str) -> str:
    """stderr of a command that must end with 2: one line."""
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("draft-trainer: ")
    return line


@dataclass
class Process:
    """A serving draft-trainer."""

    popen: subprocess.Popen[str]
    address: str
    metrics: str

    def end(self, number: int) -> tuple[int, str]:
        """Its exit code after a signal, and its stderr."""
        self.popen.send_signal(number)
        _, errors = self.popen.communicate(timeout=DEADLINE)
        return self.popen.returncode, errors


@contextmanager
def serving(config: Path) -> Iterator[Process]:
    popen = subprocess.Popen(
        [*PROGRAM, "serve", "--config", str(config)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    watchdog = threading.Timer(DEADLINE, popen.kill)
    watchdog.start()
    try:
        assert popen.stdout is not None
        words = popen.stdout.readline().split()
        assert words[:2] == ["draft-trainer", "ready:"], popen.stderr and popen.stderr.read()
        values = dict(word.split("=", 1) for word in words[2:])
        yield Process(popen, values["grpc"], values["metrics"])
    finally:
        watchdog.cancel()
        if popen.poll() is None:
            popen.kill()
            popen.communicate()


def test_sigterm_while_training_exits_0(tmp_path: Path) -> None:
    with serving(write_config(tmp_path)) as process, open_channel(process.address) as channel:
        client = Client(channel)
        client.open()
        client.announce(1)
        stream = Stream(client).__enter__()
        for message in rollouts(60):
            assert stream.send(message).status == pb.ACK_STATUS_ACCEPTED
        code, errors = process.end(signal.SIGTERM)
        assert code == 0, errors
        assert "Traceback" not in errors
        # The stream is over, with a status or without.
        with pytest.raises((grpc.RpcError, StopIteration)):
            stream.send(rollouts(1, seed=1)[0])


HEAP = """
import ctypes, threading
from pathlib import Path
from draft_trainer.cli.main import return_freed_memory, tune_memory
tune_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4 // 1024
before = resident()
"""


def printed(script: str) -> list[int]:
    """Run a script on glibc's heap in a process of its own; the numbers that it prints, MiB."""
    command = [sys.executable, "-c", HEAP + script]
    found = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=True)
    return [*map(int, found.stdout.split())]


def test_freed_memory_kept_does_not_grow_with_threads() -> None:
    """Sixteen threads free 24 MiB each; glibc alone would keep what each of them had."""
    most, kept = printed("""
taken, measured, freed, done = (threading.Barrier(17, timeout=60) for _ in range(4))
def take():
    block = libc.malloc(24 << 20)
    libc.memset(block, 1, 24 << 20)
    taken.wait()
    measured.wait()
    libc.free(block)
    freed.wait()
    done.wait()
threads = [threading.Thread(target=take) for _ in range(16)]
for thread in threads:
    thread.start()
taken.wait()
most = resident() - before
measured.wait()
freed.wait()
print(most, resident() - before)
done.wait()
""")
    assert most >= 370, "the kernel counts pages of a thread in batches"
    assert kept < 300, "four arenas of 64 MiB, and some"


def test_memory_between_what_is_kept_is_returned() -> None:
    """Each of 40 blocks of 8 MiB lies behind a small one that is kept."""
    kept, left = printed("""
blocks = []
for _ in range(40):
    small, block = libc.malloc(64 << 10), libc.malloc(8 << 20)
    libc.memset(small, 1, 64 << 10)
    libc.memset(block, 1, 8 << 20)
    blocks.append(block)
for block in blocks:
    libc.free(block)
kept = resident() - before
return_freed_memory()
print(kept, resident() - before)
""")
    assert kept > 250, "else this test shows nothing"
    assert left < 20


@pytest.fixture
def serve_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """``draft-trainer serve`` in this process, which is told to stop as soon as it is ready."""
    config = write_config(tmp_path)
    monkeypatch.setattr("slipstream.serving.server.stop_signals", lambda: lambda: True)
    monkeypatch.setattr("draft_trainer.cli.main.tune_memory", lambda: None)
    with using_kernels("off"):
        yield lambda: main(["serve", "--config", str(config)])


def test_serve_returns_freed_memory_after_gates(
    serve_once: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[Callable[[], None]] = []
    start = TrainerServer.start

    def started(self: TrainerServer) -> None:
        called.append(self.loop.after_gate)
        start(self)

    monkeypatch.setattr(TrainerServer, "start", started)
    assert serve_once() == 0 and called == [return_freed_memory]


@pytest.mark.parametrize("full", [False, True])
def test_serve_without_stdout(
    serve_once: Callable[[], int], monkeypatch: pytest.MonkeyPatch, full: bool
) -> None:
    """A shell's >&- closes it; the disk of its file may be full."""
    with Path("/dev/full").open("w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout if full else None)
        assert serve_once() == 0


@pytest.mark.parametrize("error", [OSError("no"), RuntimeError("no thread")])
def test_serve_error_after_start_frees_registry(
    serve_once: Callable[[], int], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(self: Reconciler) -> None:
        raise error

    with monkeypatch.context() as failing:
        failing.setattr(Reconciler, "start", fail)
        if isinstance(error, OSError):
            assert serve_once() == 1
        else:
            with pytest.raises(RuntimeError, match="no thread"):
                serve_once()
    # Registry and samples are free again.
    assert serve_once() == 0


def test_promote_with_unreachable_server_exits_1(tmp_path: Path, capsys: Capture) -> None:
    config = make_config(tmp_path, publish={"rollout_servers": ["127.0.0.1:9"]})
    with running(config, train=False) as (server, _):
        code, text = run(capsys, "releases", "promote", "0", "--address", server.address)
        assert code == 1
        assert "127.0.0.1:9: unknown; unreachable" in text


def test_status_without_trainer_is_refused_by_address(capsys: Capture) -> None:
    line = refused(capsys, "status", "--address", "127.0.0.1:9")
    assert "127.0.0.1:9" in line and "a running draft-trainer" in line


@pytest.mark.parametrize("key", ["port", "metrics_port"])
def test_serve_port_in_use_exits_2(tmp_path: Path, capsys: Capture, key: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = write_config(tmp_path, server={key: port})
        line = refused(capsys, "serve", "--config", str(config))
        assert f"server.{key}: found 127.0.0.1:{port}" in line
        assert "free port" in line and "stop what listens there" in line


def test_serve_unusable_files_are_named(tmp_path: Path, capsys: Capture) -> None:
    def serve(**sections: dict[str, Any]) -> str:
        return refused(capsys, "serve", "--config", str(write_config(tmp_path, **sections)))

    line = refused(capsys, "serve", "--config", str(tmp_path / "absent.toml"))
    assert "--config" in line and "No such file" in line
    line = serve(draft={"initial": str(tmp_path / "nothing")})
    assert f"{tmp_path / 'nothing'}: found no such folder" in line
    (tmp_path / "file").write_text("")
    line = serve(draft={"registry": str(tmp_path / "file" / "registry")})
    assert "draft.registry" in line and "Not a directory" in line


def test_serve_without_gpu_is_refused(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    given = ("serve", "--config", str(write_config(tmp_path, training={"device": "cuda"})))
    assert 'training.device: found "cuda", and torch sees no GPU' in refused(capsys, *given)
    assert not (tmp_path / "registry").exists()
    code, out = run(capsys, *given, "--check")
    assert code == 1 and "torch sees no GPU" in out
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert training_device("cuda") == torch.device("cuda", 0)


def test_serve_check_prints_config_and_problems(tmp_path: Path, capsys: Capture) -> None:
    given = ("serve", "--config", str(write_config(tmp_path)), "--check")
    code, out = run(capsys, *given, "--set", "training.seed=7", "--set", "gate.min_gain=0.5")
    assert code == 0 and "# nothing keeps drafts from the fleet" in out
    shown = tomllib.loads(out)
    assert shown["training"]["seed"] == 7 and shown["gate"]["min_gain"] == 0.5
    assert shown.keys() == TrainerConfig.model_fields.keys()
    # Nothing was started, and so nothing is left.
    assert not (tmp_path / "registry").exists()
    code, out = run(capsys, *given, "--set", f'publish.rollout_servers=["127.0.0.1:{free_port()}"]')
    assert code == 1 and "start rollout-server serve with --control-port" in out
    # However it is listed.
    (listed := tmp_path / "fleet").write_text(f"127.0.0.1:{free_port()}\n")
    for entry, expected in (
        (listed, "start rollout-server serve with --control-port"),
        (tmp_path / "absent", "No such file"),
    ):
        code, out = run(capsys, *given, "--set", f'publish.rollout_servers=["file:{entry}"]')
        assert code == 1 and expected in out
    listed.write_text("")
    code, out = run(capsys, *given, "--set", f'publish.rollout_servers=["file:{listed}"]')
    assert code == 0 and f"waiting  file:{listed} no address yet" in out
    line = refused(capsys, *given, "--set", "publish.rollout_servers=['http://h:1']")
    assert "begins with http://, which a gRPC address does not" in line
