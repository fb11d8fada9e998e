"""A server of its own: a draft that vLLM would alias, then a clean end by a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from examples.arithmetic_grpo.processes import Service, free_port
from slipstream.tensors import digest
from tests.rollout_server.checkpoints import load, perturbed, write_draft
from tests.rollout_server.live import Live, prompts, until
from tests.rollout_server.test_owned_process import WAIT, alive

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def descendants(pid: int) -> set[int]:
    """Process ids below ``pid``, itself included, zombies not."""
    parents: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z":
            parents[int(status.parent.name)] = int(fields[1])
    found = {pid}
    while True:
        more = {child for child, parent in parents.items() if parent in found} - found
        if not more:
            return found & (parents.keys() | {pid})
        found |= more


def test_equal_heads_stay_apart_and_sigterm_cleans_up(  # type: ignore[no-untyped-def]
    serve, policy_dir: Path, tmp_path: Path
) -> None:
    policy = load(policy_dir)
    draft_dir = write_draft(tmp_path / "equal-head", policy_dir)
    assert torch.equal(load(draft_dir)["lm_head.weight"], policy["lm_head.weight"].float())
    (draft_dir / "manifest.json").write_text('{"draft_version": "5"}')
    live: Live = serve(draft=draft_dir, env={})
    assert live.state().draft_version == 5, "from manifest.json"
    before = live.generate(prompts(32))
    ruined = perturbed(load(draft_dir), scale=5.0, seed=1)
    live.stage("draft", "ruined", 6, ruined)
    live.commit("ruined")
    assert live.generate(prompts(32)) == before, "a draft commit must not reach the policy"

    # The draft has no embed_tokens: it uses the policy's, so a push moves both.
    live.stage("policy", "p", 1, perturbed(policy, scale=0.05, seed=2))
    live.commit("p")
    assert live.generate(prompts(32)) != before

    content = digest(ruined["fc.weight"]).hex()
    roots = (Path("/dev/shm"), Path(tempfile.gettempdir()))
    held = [path for root in roots for path in root.glob(f"slipstream-rollout-*/*/{content}.*")]
    assert len(held) == 1
    family = descendants(live.service.pid)
    assert len(family) >= 2, "the engine runs in processes of its own"
    assert live.service.stop() == 0
    until(lambda: not any(alive(pid) for pid in family))
    assert not held[0].parent.exists(), "staged weights are not left behind"


def test_sigterm_during_startup_ends_server(
    policy_dir: Path, draft_dir: Path, tmp_path: Path
) -> None:
    """vLLM's own handler raises where it gets swallowed: the server came up all the same."""
    control = free_port()
    service = Service(
        "rollout-server",
        [
            str(Path(sys.executable).parent / "rollout-server"),
            *("serve", str(policy_dir), "--draft", str(draft_dir)),
            *("--port", str(free_port()), "--control-port", str(control)),
            *("--max-model-len", "256", "--enforce-eager"),
        ],
        tmp_path / "log",
        f"127.0.0.1:{control}",
        {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
    )
    service.start()
    # The engine's own process is there, so the API server waits for it, deep in vLLM.
    until(lambda: len(descendants(service.pid)) >= 3)
    family = descendants(service.pid)
    assert service.stop(grace=30) == 128 + signal.SIGTERM
    until(lambda: not any(alive(pid) for pid in family))


# An engine core that loads weights, and its worker: neither listens to SIGTERM.
LOADING = """
import multiprocessing, signal, subprocess
from rollout_server import launch

def core(ready):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    worker = subprocess.Popen(["sleep", "600"])
    ready.send(True)
    worker.wait()

launch._CHILD_SECONDS = 0.0
launch.handle_early_signals(())
here, there = multiprocessing.Pipe()
multiprocessing.get_context("fork").Process(target=core, args=(there,)).start()
here.recv()
signal.raise_signal(signal.SIGTERM)
"""


def test_sigterm_during_startup_ends_workers_of_hung_core() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LOADING], stdout=subprocess.PIPE, start_new_session=True
    ) as launcher:
        try:
            # Until the last process that has the pipe is gone.
            launcher.communicate(timeout=WAIT)
        except subprocess.TimeoutExpired:
            os.killpg(launcher.pid, signal.SIGKILL)
            raise
    assert launcher.returncode == 128 + signal.SIGTERM
