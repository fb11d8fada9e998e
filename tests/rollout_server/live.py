"""What the live tests do to a running server: generate, stage, commit, read counters."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import grpc
import httpx
import torch

from slipstream.client import stage
from slipstream.errors import RefusedError, refused_from
from slipstream.v1 import rollout_server_pb2 as pb
from slipstream.v1 import rollout_server_pb2_grpc as pb_grpc

SECONDS = 240.0
IN_FLIGHT = 32
Completion = tuple[int, ...]
T = TypeVar("T")


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Token ids of prompts that all differ."""
    rng = random.Random(seed)
    return [[1, *(rng.randrange(3, 128) for _ in range(12))] for _ in range(count)]


@dataclass
class Live:
    """A running server."""

    stub: pb_grpc.RolloutServerStub
    http: str

    def generate(self, batch: Sequence[list[int]], tokens: int = 40) -> list[Completion]:
        """Greedy completions, ``IN_FLIGHT`` requests at a time. Raises on any failure."""
        # The server closes a connection that was idle for 5 s, httpx's own limit: a machine that
        # stood still used one just then.
        fresh = httpx.Limits(max_keepalive_connections=0)
        with (
            httpx.Client(base_url=self.http, timeout=120, limits=fresh) as client,
            ThreadPoolExecutor(IN_FLIGHT) as pool,
        ):

            def one(prompt: list[int]) -> Completion:
                answer = client.post(
                    "/v1/completions",
                    json={
                        "model": "policy",
                        "prompt": prompt,
                        "max_tokens": tokens,
                        "temperature": 0.0,
                        "ignore_eos": True,
                        "return_token_ids": True,
                    },
                )
                answer.raise_for_status()
                return tuple(answer.json()["choices"][0]["token_ids"])

            return list(pool.map(one, batch))

    @contextmanager
    def generating(self, batch: Sequence[list[int]]) -> Iterator[list[list[Completion]]]:
        """Requests in flight for as long as the block lasts, however fast the machine.

        ``batch`` is served over and over; each round's completions are appended to the
        list. The block starts with drafts flowing and its end waits for the last round.
        """
        rounds: list[list[Completion]] = []
        enough = threading.Event()

        def work() -> None:
            while not enough.is_set():
                rounds.append(self.generate(batch))

        before = sum(self.drafts().values())
        with ThreadPoolExecutor(1) as pool:
            worker = pool.submit(work)
            try:
                until(lambda: worker.done() or sum(self.drafts().values()) > before)
                yield rounds
            finally:
                enough.set()
            worker.result()

    def stage(
        self,
        kind: str,
        stage_id: str,
        version: int,
        tensors: Mapping[str, torch.Tensor],
        **named: object,
    ) -> pb.StageResult:
        """Stage; a refusal comes back as RefusedError."""
        return refused(
            lambda: stage(
                self.stub,
                stage_id=stage_id,
                kind=pb.STAGE_KIND_DRAFT if kind == "draft" else pb.STAGE_KIND_POLICY,
                version=version,
                tensors=tensors,
                timeout=SECONDS,
                **named,  # type: ignore[arg-type]
            )
        )

    def commit(self, *stage_ids: str) -> pb.CommitResponse:
        """Commit; a refusal comes back as RefusedError."""
        return refused(
            lambda: self.stub.Commit(pb.CommitRequest(stage_ids=stage_ids), timeout=SECONDS)
        )

    def speculate(self, enabled: bool) -> pb.CommitResponse:
        """SetSpeculation."""
        return self.stub.SetSpeculation(pb.SetSpeculationRequest(enabled=enabled), timeout=SECONDS)

    def state(self) -> pb.ServerState:
        """GetState."""
        return self.stub.GetState(pb.GetStateRequest(), timeout=SECONDS)

    def counters(self) -> dict[int, pb.AcceptanceCounters]:
        """The first report of WatchAcceptance, by draft version."""
        call = self.stub.WatchAcceptance(pb.WatchAcceptanceRequest(), timeout=SECONDS)
        report = next(iter(call))
        call.cancel()
        return {counters.draft_version: counters for counters in report.counters}

    def drafts(self) -> dict[int, int]:
        """Verification steps by draft version."""
        return {version: counters.drafts for version, counters in self.counters().items()}

    def metric(self, name: str, **labels: str) -> float:
        """One sample of /metrics. Raises LookupError: it is not there."""
        pairs = ",".join(f'{key}="{value}"' for key, value in labels.items())
        wanted = f"{name}{{{pairs}}}" if labels else name
        for line in httpx.get(f"{self.http}/metrics", timeout=30).text.splitlines():
            sample, _, value = line.rpartition(" ")
            if sample == wanted:
                return float(value)
        raise LookupError(wanted)


def refused(call: Callable[[], T]) -> T:
    """``call()``, with a refusal in a gRPC error raised as what it is."""
    try:
        return call()
    except grpc.RpcError as error:
        refusal = refused_from(error)
        if refusal is None:
            raise
        raise refusal from error


def until(condition: Callable[[], bool], seconds: float = 180.0) -> None:
    """Poll until ``condition``; AssertionError when it never holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition never held"
        time.sleep(0.02)


__all__ = ["Completion", "Live", "RefusedError", "prompts", "refused", "until"]
