"""Two real ``rollout-server`` processes, able to swap by our path and by vLLM's own."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from benchmarks.hot_swap import PEER_BACKEND
from examples.local_services import CALL_SECONDS, ROOT, RolloutServer, start_all

READY_SECONDS = 400.0


def two_cores() -> tuple[int | None, int | None]:
    """One for all processes of each server; None leaves them to the kernel."""
    cores = sorted(os.sched_getaffinity(0))
    return (cores[0], cores[1]) if len(cores) > 1 else (None, None)


class Server(RolloutServer):
    """One of them; ``core`` as in ``RolloutServer``, whose engine processes spin while they wait.

    float32, so that the distribution that torch computes is the servers' own.
    """

    def __init__(
        self, log: Path, *options: str, core: int | None, control: int | None = None
    ) -> None:
        paths = [str(ROOT), str(ROOT / "proto"), os.environ.get("PYTHONPATH", "")]
        super().__init__(
            log,
            *("--dtype", "float32", "--max-num-seqs", "64"),
            *("--weight-transfer-config", json.dumps({"backend": PEER_BACKEND})),
            *("--worker-extension-cls", "benchmarks.hot_swap.file_engine.WorkerExtension"),
            *options,
            control=control,
            core=core,
            env={
                "VLLM_CPU_OMP_THREADS_BIND": "nobind" if core is None else str(core),
                # For the peer's routes alone; a server that serves has none of them.
                "VLLM_SERVER_DEV_MODE": "1",
                "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            },
        )

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
        answer = httpx.post(self.http + path, params=params, json=body, timeout=CALL_SECONDS)
        answer.raise_for_status()


class Servers:
    """Several, for the length of a ``with`` block."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.all = tuple(servers)
        self._pool = ThreadPoolExecutor(len(self.all))

    def __enter__(self) -> Servers:
        try:
            start_all(self.all, READY_SECONDS)
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
