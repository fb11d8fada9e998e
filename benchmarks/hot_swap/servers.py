"""Two real ``rollout-server`` processes, able to swap by our path and by vLLM's own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx

from benchmarks.hot_swap import PEER_BACKEND
from examples.arithmetic_grpo.processes import Service, free_port
from slipstream.client import open_channel
from slipstream.v1 import rollout_server_pb2 as pb
from slipstream.v1 import rollout_server_pb2_grpc as pb_grpc

ROOT = Path(__file__).resolve().parents[2]
READY_SECONDS = 400.0
CALL_SECONDS = 120.0
DRAFT_LENGTH = 3
MODEL = "policy"


class Server:
    """One of them.

    Args:
        policy: checkpoint directory.
        draft: checkpoint directory, draft version 0.
        log: output goes there.
        extra: more options.
        core: that all of its processes run on; None leaves them to the kernel. vLLM's own
            choice would be the same core for the workers of both servers, and its engine
            processes spin while they wait.
        control: port of the control plane; a free one if None.
    """

    def __init__(
        self,
        policy: Path,
        draft: Path,
        log: Path,
        extra: Sequence[str] = (),
        core: int | None = None,
        control: int | None = None,
    ) -> None:
        port, control = free_port(), control or free_port()
        argv = [
            *(() if core is None else ("taskset", "-c", str(core))),
            *(str(Path(sys.executable).parent / "rollout-server"), "serve", str(policy)),
            *("--draft", str(draft), "--draft-length", str(DRAFT_LENGTH)),
            *("--host", "127.0.0.1", "--port", str(port), "--control-port", str(control)),
            *("--served-model-name", MODEL, "--generation-config", "vllm", "--enforce-eager"),
            *("--max-model-len", "256", "--max-num-seqs", "64"),
            *("--weight-transfer-config", json.dumps({"backend": PEER_BACKEND})),
            *("--worker-extension-cls", "benchmarks.hot_swap.file_engine.WorkerExtension"),
            *extra,
        ]
        paths = [str(ROOT), str(ROOT / "proto"), os.environ.get("PYTHONPATH", "")]
        env = {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind" if core is None else str(core),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            # For the peer's routes alone; a server that serves has none of them.
            "VLLM_SERVER_DEV_MODE": "1",
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        }
        self.http = f"http://127.0.0.1:{port}"
        self.control = f"127.0.0.1:{control}"
        self.log = log
        self.service = Service("rollout-server", argv, log, self.control, env)
        self._client = httpx.Client(base_url=self.http, timeout=CALL_SECONDS)
        self._channel: grpc.Channel = open_channel(self.control)
        self.stub = pb_grpc.RolloutServerStub(self._channel)

    def stop(self) -> None:
        """End the process and every connection."""
        self._client.close()
        self._channel.close()
        self.service.stop()

    def speculate(self, enabled: bool) -> None:
        """Turn drafting on or off."""
        self.stub.SetSpeculation(pb.SetSpeculationRequest(enabled=enabled), timeout=CALL_SECONDS)

    def generated(self) -> float:
        """Tokens generated since start, by vLLM's own counter."""
        return self._metric("vllm:generation_tokens_total")

    def stall(self) -> tuple[float, float]:
        """Seconds that the engine stood still for draft commits, and how many there were."""
        name = 'slipstream_rollout_worker_stall_seconds_{}{{kind="draft"}}'
        return self._metric(name.format("sum")), self._metric(name.format("count"))

    def acceptance(self) -> dict[int, tuple[int, int]]:
        """Drafts and accepted tokens by draft version."""
        call = self.stub.WatchAcceptance(pb.WatchAcceptanceRequest(), timeout=CALL_SECONDS)
        report = next(iter(call))
        call.cancel()
        return {c.draft_version: (c.drafts, c.accepted_tokens) for c in report.counters}

    def three_calls(self, weights: Path) -> None:
        """vLLM's own way to replace a draft: freeze, three calls, go on.

        Raises:
            httpx.HTTPStatusError: one of them failed.
        """
        self._post("/pause", params={"mode": "keep"})
        self._post("/start_draft_weight_update")
        self._post("/update_weights", body={"update_info": {"path": str(weights)}})
        self._post("/finish_weight_update", body={})
        self._post("/resume")

    def _post(
        self, path: str, params: dict[str, str] | None = None, body: object | None = None
    ) -> None:
        self._client.post(path, params=params, json=body).raise_for_status()

    def _metric(self, name: str) -> float:
        """Sum of a metric's samples. Raises LookupError: it is not there."""
        lines = self._client.get("/metrics").text.splitlines()
        found = [float(line.rpartition(" ")[2]) for line in lines if line.startswith(name)]
        if not found:
            raise LookupError(name)
        return sum(found)


class Servers:
    """Several, for the length of a ``with`` block."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.all = tuple(servers)
        self._pool = ThreadPoolExecutor(len(self.all))

    def __enter__(self) -> Servers:
        try:
            for server in self.all:
                server.service.start()
            for server in self.all:
                server.service.wait_ready(READY_SECONDS)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End all of them."""
        for server in self.all:
            server.stop()
        self._pool.shutdown()

    def three_calls(self, weights: Path) -> None:
        """The peer's swap, on all at once."""
        list(self._pool.map(lambda server: server.three_calls(weights), self.all))
