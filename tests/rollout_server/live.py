"""The live tests' actions on a running server: generate, and read counters."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from examples.local_services import ROOT, RolloutServer, refused
from slipstream.errors import RefusedError
from slipstream.v1 import rollout_server_pb2 as pb
from tests.rollout_server.checkpoints import perturbed
from tests.rollout_server.forked import ForkedService
from tests.waiting import until

IN_FLIGHT = 32
Completion = tuple[int, ...]
TRITON = Path(sys.prefix) / "triton"
"""The folder in which `make test` installs Triton, which no other process finds."""
V2_ENV = {
    "PYTHONPATH": f"{ROOT / 'tests' / 'runner_v2'}:{TRITON}",
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "1",
}
"""The environment of a V2 server with asynchronous scheduling: tests/runner_v2 says how."""
V2_REQUESTS = 3
"""The requests a V2 server runs at once: the interpreter takes tens of ms a request and step."""


V2_SLOW = pytest.mark.parametrize(
    "live",
    ["server", pytest.param("server_v2", marks=pytest.mark.slow)],
    ids=["V1", "V2"],
    indirect=True,
)
"""The parameters of a test that the fast tier runs with V1 alone."""


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Token ids of prompts that all differ."""
    rng = random.Random(seed)
    return [[1, *(rng.randrange(3, 128) for _ in range(12))] for _ in range(count)]


class Live(RolloutServer):
    """A running server, as tests use it.

    Args:
        runner: vLLM's model runner: "V1", with synchronous scheduling, or "V2", with asynchronous.
        forked: it starts as a fork of a process that has imported vLLM (V1 alone).

    Attributes:
        client: of its OpenAI API, for any thread.
        runner: as given.
        batch: as many prompts as tests have in flight.
        tokens: of a completion.
        changes: that a test makes while requests run.
    """

    def __init__(
        self,
        *args: Any,
        runner: str = "V1",
        env: Mapping[str, str] | None = None,
        forked: bool = False,
        **named: Any,
    ) -> None:
        v2 = runner == "V2"
        if v2:
            args = (*args, "--max-num-seqs", str(V2_REQUESTS))
        super().__init__(*args, env={**(V2_ENV if v2 else {}), **(env or {})}, **named)
        self.runner = runner
        self.batch = prompts(V2_REQUESTS if v2 else 64)
        self.tokens, self.changes = (8, 6) if v2 else (40, 24)
        if v2:
            self.service = ForkedService.with_forked_engine(self.service)
        elif forked:
            self.service = ForkedService.instead_of(self.service)
        # A connection for each request: the server closes one that was idle for 5 s, and httpcore's
        # pool one that it has just given to another thread, as idle, too old or too many. One
        # client, because each loads the root certificates.
        self.client = httpx.Client(
            base_url=self.http,
            timeout=900,
            headers={"Connection": "close"},
            limits=httpx.Limits(),
        )

    def stop(self) -> None:
        """End the process and the connections to it."""
        self.client.close()
        super().stop()

    def complete(self, prompt: list[int] | list[list[int]], **body: object) -> list[Completion]:
        """Token ids of every choice of one request. Raises on any failure."""
        answer = self.client.post(
            "/v1/completions",
            json={"model": "policy", "prompt": prompt, "return_token_ids": True, **body},
        )
        answer.raise_for_status()
        return [tuple(choice["token_ids"]) for choice in answer.json()["choices"]]

    def generate(
        self,
        batch: Sequence[list[int]] | None = None,
        tokens: int | None = None,
        temperature: float = 0.0,
    ) -> list[Completion]:
        """Completions of ``batch``, by default the server's own, ``IN_FLIGHT`` requests at a time.

        Raises on any failure.
        """
        batch = self.batch if batch is None else batch

        def one(prompt: list[int]) -> Completion:
            sampling = {"temperature": temperature, "ignore_eos": True}
            return self.complete(prompt, max_tokens=tokens or self.tokens, **sampling)[0]

        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            return list(pool.map(one, batch))

    @contextmanager
    def generating(
        self, batch: Sequence[list[int]] | None = None, temperature: float = 0.0
    ) -> Iterator[list[list[Completion]]]:
        """Requests in flight for as long as the block lasts, however fast the machine.

        ``batch``, by default the server's own, is served over and over; each round's completions
        are appended to the list. The block starts with drafts flowing and its end waits for the
        last round.
        """
        rounds: list[list[Completion]] = []
        enough = threading.Event()

        def work() -> None:
            while not enough.is_set():
                rounds.append(self.generate(batch, temperature=temperature))

        before = sum(self.drafts().values())
        with ThreadPoolExecutor(1) as pool:
            worker = pool.submit(work)
            try:
                until(lambda: worker.done() or sum(self.drafts().values()) > before)
                yield rounds
            finally:
                enough.set()
            worker.result()

    def drafts(self) -> dict[int, int]:
        """Verification steps by draft version."""
        return {version: counters.drafts for version, counters in self.counters().items()}


def swap_many(
    live: Live, draft: Mapping[str, torch.Tensor], count: int, *, scale: float = 2.0
) -> Iterator[Mapping[str, torch.Tensor]]:
    """Commit versions 1 to ``count``, in turn a ``perturbed`` draft and the draft itself.

    Yields:
        The tensors that are live, after each commit. AssertionError: they were not prepared.
    """
    for number in range(1, count + 1):
        staged = perturbed(draft, scale=scale, seed=number) if number % 2 else draft
        result = live.stage("draft", f"swap-{number}", number, staged)
        assert result.not_prepared == "", "the standby copy takes the draft"
        live.commit(f"swap-{number}")
        yield staged


def lasting(state: pb.ServerState) -> pb.ServerState:
    """Without what changes by itself, once the engine's steps are read."""
    kept = pb.ServerState()
    kept.CopyFrom(state)
    kept.ClearField("engine_seconds")
    kept.ClearField("speed_up")
    return kept


__all__ = [
    "Completion",
    "Live",
    "RefusedError",
    "lasting",
    "prompts",
    "refused",
    "swap_many",
    "until",
]
