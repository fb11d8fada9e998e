"""A draft trainer and rollout servers as processes on this machine, for examples and tests."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import grpc
import httpx
import torch

from draft_trainer.drafters.ops import cpu_precision
from examples.arithmetic_grpo.processes import Service, free_port
from slipstream.client import open_channel, stage
from slipstream.errors import refused_from
from slipstream.tensors import spec_of
from slipstream.v1 import rollout_server_pb2 as pb
from slipstream.v1 import rollout_server_pb2_grpc as pb_grpc
from slipstream.v1 import tensor_pb2

ROOT = Path(__file__).resolve().parents[1]
ARITHMETIC = ROOT / "examples" / "arithmetic_grpo"
DRAFT_LENGTH = 3
READY_TIMEOUT = 240.0  # seconds; vLLM alone takes 12 to 36
CALL_SECONDS = 240.0
LOGPROBS = ("--logprobs-mode", "processed_logprobs")
"""The options for a loop that compares log-probabilities at its sampling temperature."""
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
Settings = Mapping[str, Mapping[str, object]]
SHORT: Settings = {
    "replay": {"held_out_fraction": 0.2, "max_epochs": 6},
    "training": {"learning_rate": 2e-3, "ttt_steps": DRAFT_LENGTH, "batch_tokens": 1024},
    # Examples and tests are too short for training to pay; they show that it works.
    "economy": {"mode": "always"},
}
"""A draft trainer's settings for few samples."""
T = TypeVar("T")


def script(name: str) -> str:
    """The console script beside this interpreter; on PATH where packages are in another folder."""
    beside = Path(sys.executable).parent / name
    return str(beside) if beside.exists() else name


def draft_trainer(
    out: Path,
    server: str,
    settings: Settings = SHORT,
    *,
    draft: Path = ARITHMETIC / "draft",
    metrics_port: int | None = None,
) -> Service:
    """``draft-trainer serve``.

    Args:
        out: where its configuration, log and releases go.
        server: control address of the rollout server that it publishes to.
        settings: the rest of its configuration, by section and key.
        draft: release 0.
        metrics_port: a free one if None.
    """
    port, config = free_port(), out / "draft-trainer.toml"
    named: Settings = {
        "server": {"port": port, "metrics_port": metrics_port or free_port()},
        "draft": {"initial": str(draft.resolve()), "registry": str((out / "releases").resolve())},
        "publish": {"rollout_servers": [server]},
    }
    lines = []
    for section in {**named, **settings}:
        lines.append(f"[{section}]")
        for key, value in {**named.get(section, {}), **settings.get(section, {})}.items():
            lines.append(f"{key} = {json.dumps(value)}")
    config.write_text("\n".join(lines) + "\n")
    command = [script("draft-trainer"), "serve", "--config", str(config)]
    log = out / "draft-trainer.log"
    return Service("draft-trainer", command, log, f"127.0.0.1:{port}", ONE_THREAD)


class RolloutServer:
    """``rollout-server serve`` as a process, and a client of its control plane.

    Args:
        log: its output goes there.
        options: more of its command line.
        policy: that it serves, under the name "policy".
        draft: that it starts with, draft version 0; None: the options say how it drafts.
        control: port of the control plane; a free one if None.
        core: that all of its processes run on; None leaves them to the kernel. vLLM's own choice
            would be the same core for the workers of several servers.
        env: added to its environment.

    Attributes:
        service: the process.
        http: base address of the OpenAI API.
        control: address of the control plane.
        stub: of the control plane.
    """

    def __init__(
        self,
        log: Path,
        *options: str,
        policy: Path = ARITHMETIC / "policy",
        draft: Path | None = ARITHMETIC / "draft",
        control: int | None = None,
        core: int | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        port = free_port()
        self.http, self.control = f"http://127.0.0.1:{port}", f"127.0.0.1:{control or free_port()}"
        control_port = self.control.rpartition(":")[2]
        command = [
            *(() if core is None else ("taskset", "-c", str(core))),
            *(script("rollout-server"), "serve", str(policy)),
            *(() if draft is None else ("--draft", str(draft))),
            # Drafts are compared at one length.
            *("--draft-length", str(DRAFT_LENGTH), "--speculation", "fixed"),
            *("--host", "127.0.0.1", "--port", str(port), "--control-port", control_port),
            *("--served-model-name", "policy", "--generation-config", "vllm"),
            *("--dtype", cpu_precision()),
            # Eager mode starts faster, and needs no C++ compiler.
            *("--max-model-len", "256", "--max-num-seqs", "128", "--enforce-eager"),
            *options,
        ]
        environment = ONE_THREAD | {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            **({} if core is None else {"VLLM_CPU_OMP_THREADS_BIND": str(core)}),
            **(env or {}),
        }
        self.service = Service("rollout-server", command, log, self.control, environment)
        self._channel = open_channel(self.control)
        self.stub = pb_grpc.RolloutServerStub(self._channel)

    def __enter__(self) -> RolloutServer:
        self.service.start()
        try:
            self.service.wait_ready(2 * READY_TIMEOUT)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the process and the connection to it."""
        self._channel.close()
        self.service.stop()

    def stage(
        self,
        kind: str,
        stage_id: str,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        specs: Sequence[tensor_pb2.TensorSpec] | None = None,
        **named: object,
    ) -> pb.StageResult:
        """Stage a "draft" or "policy"; ``specs``: where they are known. Raises RefusedError."""
        if specs is None:
            specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
        header = pb.StageHeader(
            stage_id=stage_id,
            kind=pb.STAGE_KIND_DRAFT if kind == "draft" else pb.STAGE_KIND_POLICY,
            version=version,
            tensors=specs,
            **named,  # type: ignore[arg-type]
        )
        return refused(lambda: stage(self.stub, header, tensors, timeout=CALL_SECONDS))

    def commit(self, *stage_ids: str) -> pb.CommitResponse:
        """Commit. Raises RefusedError."""
        request = pb.CommitRequest(stage_ids=stage_ids)
        return refused(lambda: self.stub.Commit(request, timeout=CALL_SECONDS))

    def swap(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Stage a draft and make it live. Raises RefusedError."""
        self.stage("draft", f"draft-{version}", version, tensors)
        self.commit(f"draft-{version}")

    def speculate(self, enabled: bool) -> pb.CommitResponse:
        """Turn drafting on or off."""
        request = pb.SetSpeculationRequest(enabled=enabled)
        return refused(lambda: self.stub.SetSpeculation(request, timeout=CALL_SECONDS))

    def state(self) -> pb.ServerState:
        """Return what is served."""
        return self.stub.GetState(pb.GetStateRequest(), timeout=CALL_SECONDS)

    def counters(self) -> dict[int, pb.AcceptanceCounters]:
        """vLLM's speculative counters by draft version."""
        return {counters.draft_version: counters for counters in self.acceptance().counters}

    def acceptance(self) -> pb.AcceptanceReport:
        """vLLM's speculative counters."""
        call = self.stub.WatchAcceptance(pb.WatchAcceptanceRequest(), timeout=CALL_SECONDS)
        report: pb.AcceptanceReport = next(iter(call))
        call.cancel()
        return report

    def step_sums(self, k: int, requests: int) -> tuple[float, float]:
        """Return the engine's steps of so many requests with ``k`` drafted tokens (0: without
        drafts), and their seconds, since the start. The server reads them once a second."""
        kind = "speculative" if k else "plain"
        # In the order in which /metrics has them.
        labels = {"draft_length": str(k), "kind": kind, "requests": str(requests)}
        name = "slipstream_rollout_engine_step"
        try:
            steps = self.metric(f"{name}s_total", **labels)
            return steps, self.metric(f"{name}_seconds_total", **labels)
        except LookupError:
            return 0.0, 0.0

    def metric(self, name: str, **labels: str) -> float:
        """One sample of ``/metrics``; of a name alone, without labels or whatever they are, the
        sum. Raises LookupError: it is not there."""
        pairs = ",".join(f'{key}="{value}"' for key, value in labels.items())
        exact = f"{name}{{{pairs}}}" if labels else name
        found = [
            float(value)
            for sample, _, value in (
                line.rpartition(" ")
                for line in httpx.get(f"{self.http}/metrics", timeout=30).text.splitlines()
            )
            if sample == exact or (not labels and sample.partition("{")[0] == name)
        ]
        if not found:
            raise LookupError(exact)
        return sum(found)


def start_all(servers: Sequence[RolloutServer], timeout: float) -> None:
    """Start servers beside one another and wait for each. Raises ServiceError."""
    for server in servers:
        server.service.start()
    for server in servers:
        server.service.wait_ready(timeout)


def refused(call: Callable[[], T]) -> T:
    """``call()``, with a refusal in a gRPC error raised as what it is."""
    try:
        return call()
    except grpc.RpcError as error:
        refusal = refused_from(error)
        if refusal is None:
            raise
        raise refusal from error
