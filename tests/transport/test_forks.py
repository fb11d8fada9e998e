"""Child processes of a training process, while its bridge sends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from policy_bridge import BridgeConfig, PolicyBridge, bridge
from tests.draft_trainer.rig import make_config, running
from tests.policy_bridge.conftest import make_model
from tests.policy_bridge.doubles import FakeTrainer

SENDING = """
import subprocess, sys
import policy_bridge
from tests.transport.rig import samples, sending

given = samples(100)
with sending(sys.argv[1]) as sender:
    for number in range(100):
        sender.send(*(one.repacked(sample_id=f"{one.sample_id}-{number}") for one in given))
        for _ in range(4):
            ended = subprocess.run(["true"], preexec_fn=lambda: None, timeout=60)
            assert ended.returncode == 0, ended
    sender.flush()
    print(sender.stats().accepted)
"""


FORKING = """
import os, signal, sys
from policy_bridge import BridgeConfig, PolicyBridge
from tests.policy_bridge.conftest import batch, deliver, make_model, sync

model = make_model()
config = BridgeConfig(trainer=sys.argv[1], run_id="run", strict=True)
with PolicyBridge(model, config) as bridge:
    assert bridge.wait_connected(60)
    sync(bridge, 1)
    deliver(bridge, model, batch((9,)))
    child = os.fork()
    if not child:
        signal.alarm(60)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    deliver(bridge, model, batch((9,), seed=2))
    print(bridge.stats().accepted, bridge.stats().connects)
"""


def python(
    code: str, *arguments: str, fork_support: str | None = None
) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a process that has read no gRPC yet."""
    env = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    if fork_support is not None:
        env["GRPC_ENABLE_FORK_SUPPORT"] = fork_support
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_training_process_may_fork_while_bridge_sends(tmp_path: Path) -> None:
    """1 to 3 of 100 such children end by SIGABRT with gRPC's fork handlers.

    400 of them all live by chance with probability 0.02 at 1 of 100, 1e-6 at 3.4 as measured.
    """
    with running(make_config(tmp_path), train=False) as (server, client):
        client.open()
        client.announce(1)
        ended = python(SENDING, server.address)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert int(ended.stdout) == 10_000


def test_forked_child_exits_and_parent_bridge_goes_on() -> None:
    server = FakeTrainer().serve()
    try:
        ended = python(FORKING, server.address)
    finally:
        server.kill()
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout == "2 1\n"


@pytest.mark.parametrize(
    ("first", "fork_support", "disturbed"),
    [("", None, False), ("import grpc", None, True), ("", "1", True), ("import grpc", "0", False)],
)
def test_forks_disturbed_flag_follows_grpc_setting(
    first: str, fork_support: str | None, disturbed: bool
) -> None:
    code = f"{first}\nimport slipstream\nprint(slipstream.FORKS_DISTURBED)"
    assert python(code, fork_support=fork_support).stdout == f"{disturbed}\n"


@pytest.mark.parametrize("disturbed", [True, False])
def test_bridge_warns_if_grpc_disturbs_forks(
    disturbed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bridge, "FORKS_DISTURBED", disturbed)
    PolicyBridge(make_model(), BridgeConfig(trainer="127.0.0.1:1", run_id="run")).close()
    assert ("GRPC_ENABLE_FORK_SUPPORT=0" in caplog.text) is disturbed
