"""The fault table over real vLLM servers, with requests in flight on every one of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from benchmarks.hot_swap.load import Load, Work, complete_all
from benchmarks.hot_swap.servers import READY_SECONDS, Server, two_cores
from benchmarks.publish_faults.faults import Fault
from benchmarks.publish_faults.rig import DRAFT, Rig
from benchmarks.publish_faults.server_process import DRAFTS
from draft_trainer.config import TrialConfig
from examples.arithmetic_grpo.sampling import held_out_problems, prompt_ids
from examples.local_services import start_all

IN_FLIGHT = 8
PROMPTS = 32
WORKER, ENGINE = "VLLM::Worker", "VLLM::EngineCore"
"""Titles of vLLM's processes."""


class VllmRig(Rig):
    """``rollout-server serve`` in place of the servers in memory; the trainer is the same.

    Args:
        folder: registry, logs.
    """

    # Trials end by live traffic, and would move the fleet between two looks at it. They have a
    # table of their own (``benchmarks.trials``).
    trial = TrialConfig(enabled=False)

    def __init__(self, folder: Path) -> None:
        cores = two_cores()
        super().__init__(folder, len(cores))
        size = (DRAFT / "model.safetensors").stat().st_size
        self.vllm = [
            Server(
                folder / f"rollout-server-{index}.log",
                *("--stage-bytes", str(int(DRAFTS * size))),
                core=core,
                control=port,
            )
            for index, (core, port) in enumerate(zip(cores, self._ports, strict=True))
        ]
        self.load: Load | None = None
        self._hit = 0

    def start(self) -> None:
        """Start what is not running, the servers at once; the first time, the load begins."""
        start_all([server for server in self.vllm if not server.service.alive], READY_SECONDS)
        if self.load is None:
            self.load = self._begin()
        if self._trainer is None or not self._trainer.is_alive():
            self.start_trainer()

    def watch(self, index: int) -> None:
        """Begin to count: all requests to the other servers must be served."""
        self._hit = index
        if self.load is not None:
            self.load.take()

    def check(self) -> None:
        """Check that no request failed on a server that was not hit, and that every greedy output
        is the policy's own."""
        assert self.load is not None
        for index, seen in enumerate(self.load.take()):
            assert index == self._hit or not seen.failed, f"server {index}: {seen.failed[:3]}"
            assert seen.greedy > 0, f"server {index} served nothing"
            assert not seen.different, f"server {index}: {seen.different} outputs differ"

    def pids(self, index: int, title: str) -> list[int]:
        """Return a server's processes of a title."""
        session = self.vllm[index].service.pid
        return [pid for pid in _session(session) if title in _title(pid)]

    def kill_server(self, index: int) -> None:
        """Kill every process of a server with SIGKILL."""
        if self.vllm[index].service.alive:
            os.killpg(self.vllm[index].service.pid, signal.SIGKILL)
            self.wait_ended(index)

    def wait_ended(self, index: int) -> None:
        """Wait until a server that has lost a process ends by itself."""
        self.vllm[index].service.wait_ended(60.0)

    def stop(self) -> None:
        """End every process."""
        if self.load is not None:
            self.load.kill()
        self._kill(self._trainer)
        for server in self.vllm:
            server.stop()
        for channel in self._channels:
            channel.close()

    def _begin(self) -> Load:
        prompts = [prompt_ids(problem) for problem in held_out_problems(PROMPTS)]
        plain = []
        for server in self.vllm:
            server.speculate(False)
            plain.append(complete_all(server.http, prompts, IN_FLIGHT))
            server.speculate(True)
        assert plain[0] == plain[-1], "the servers differ without speculation"
        http = tuple(server.http for server in self.vllm)
        return Load(Work(http, prompts, plain[0], IN_FLIGHT, sampled_tokens=1))


def _session(leader: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        try:
            if os.getsid(pid) == leader:
                found.append(pid)
        except ProcessLookupError:
            continue
    return found


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _struck(when: str, *titles: str) -> Fault:
    def inflict(rig: Rig, version: int, turn: int) -> None:
        assert isinstance(rig, VllmRig)
        index = turn % len(rig.addresses)
        pids = [pid for title in titles for pid in rig.pids(index, title)]
        assert pids, f"no {titles} of server {index}"
        rig.ask("arm", "strike", when, rig.addresses[index], pids)
        rig.ask("promote", version)
        rig.wait_ended(index)
        # What was armed must not strike the process that comes next.
        rig.kill_trainer()

    name = "engine worker" if titles == (WORKER,) else "engine process"
    return Fault(f"vLLM's {name} killed {when.replace(' ', ' the ')}", inflict, None)


def _whole(rig: Rig, version: int, turn: int) -> None:
    rig.kill_server(turn % len(rig.addresses))
    assert rig.ask("promote", version)["version"] == version


VLLM_FAULTS = (
    _struck("before stage", WORKER),
    _struck("during stage", WORKER),
    _struck("before commit", WORKER),
    _struck("during commit", WORKER),
    _struck("after commit", WORKER),
    _struck("during commit", ENGINE),
    Fault("vLLM server killed whole before the stage", _whole, True),
)
