"""The demo's view of a rollout server: generate, count, swap.

Generation goes through vLLM's OpenAI API; vLLM's speculative counters and swaps go through
Slipstream's control plane, as an operator's would.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import httpx
import torch

from examples.arithmetic_grpo.task import MAX_COMPLETION_TOKENS
from examples.local_services import RolloutServer
from slipstream.client import open_channel
from slipstream.tensors import ChunkAssembler
from slipstream.v1 import console_pb2 as console_pb
from slipstream.v1 import draft_trainer_pb2 as trainer_pb
from slipstream.v1 import draft_trainer_pb2_grpc as trainer_grpc
from slipstream.v1 import release_pb2 as release_pb
from slipstream.v1 import rollout_server_pb2 as rollout_pb

REQUEST_TIMEOUT = 300.0  # seconds
CALL_TIMEOUT = 60.0  # seconds
MAX_RELEASE_BYTES = 1 << 30


@dataclass(frozen=True)
class SpecCounters:
    """vLLM's speculative counters.

    Attributes:
        drafts: verification steps of requests that had a draft.
        draft_tokens: tokens proposed.
        accepted: tokens accepted.
        per_position: tokens accepted at each draft position.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    per_position: tuple[int, ...] = ()

    @classmethod
    def between(
        cls,
        before: Mapping[int, rollout_pb.AcceptanceCounters],
        after: Mapping[int, rollout_pb.AcceptanceCounters],
    ) -> SpecCounters:
        """Subtract two readings of ``RolloutServer.counters``."""
        nothing = rollout_pb.AcceptanceCounters()
        found = cls()
        for version, now in after.items():
            then = before.get(version, nothing)
            places = zip_longest(
                found.per_position,
                now.accepted_per_position,
                (-count for count in then.accepted_per_position),
                fillvalue=0,
            )
            found = cls(
                found.drafts + now.drafts - then.drafts,
                found.draft_tokens + now.draft_tokens - then.draft_tokens,
                found.accepted + now.accepted_tokens - then.accepted_tokens,
                tuple(map(sum, places)),
            )
        return found

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per verification step, bonus token included; None without drafts."""
        return 1 + self.accepted / self.drafts if self.drafts else None


@dataclass(frozen=True)
class Generation:
    """The results of one round of requests.

    Attributes:
        completions: token ids, in the order of the prompts, ``samples`` for each.
        seconds: wall time of the round.
        failed: why requests were not answered in full, one text each.
        counters: vLLM's counters over the round.
    """

    completions: list[list[int]]
    seconds: float
    failed: list[str]
    counters: SpecCounters

    @property
    def tokens(self) -> int:
        """Tokens generated."""
        return sum(map(len, self.completions))


@dataclass(frozen=True)
class Swap:
    """One live swap of the draft: seconds from call to answer, and in the worker."""

    draft_version: int
    call_seconds: float
    worker_seconds: float
    requests_in_flight: int


@dataclass
class RolloutClient:
    """Generates on one rollout server and swaps its draft to releases of the trainer.

    Attributes:
        server: that runs.
        trainer: address of the trainer; where no release is swapped to, of nothing that is called.
    """

    server: RolloutServer
    trainer: str
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _releases: dict[int, tuple[release_pb.ReleaseManifest, dict[str, torch.Tensor]]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        self._trainer_channel = open_channel(self.trainer)
        self._trainer = trainer_grpc.DraftTrainerStub(self._trainer_channel)
        # Below the 5 s after which vLLM's server closes an idle connection.
        limits = httpx.Limits(
            max_connections=256, max_keepalive_connections=256, keepalive_expiry=2.0
        )
        self._client = httpx.AsyncClient(
            base_url=self.server.http, timeout=REQUEST_TIMEOUT, limits=limits
        )

    def close(self) -> None:
        """Close every connection."""
        self._loop.run_until_complete(self._client.aclose())
        self._loop.close()
        self._trainer_channel.close()

    def status(self) -> trainer_pb.TrainerStatus:
        """Return the trainer's status."""
        return self._trainer.GetStatus(trainer_pb.GetStatusRequest(), timeout=CALL_TIMEOUT)

    def verdicts(self) -> Sequence[release_pb.Verdict]:
        """Return the gate's verdicts that the trainer keeps, oldest first."""
        request = console_pb.GetHistoryRequest()
        return self._trainer.GetHistory(request, timeout=CALL_TIMEOUT).verdicts

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        samples: int,
        *,
        temperature: float = 1.0,
        max_tokens: int = MAX_COMPLETION_TOKENS,
        swaps: Sequence[int] = (),
    ) -> tuple[Generation, list[Swap]]:
        """Generate ``samples`` completions of every prompt, all at once.

        Args:
            prompts: token ids, one request each.
            samples: completions per prompt.
            temperature: 0 is greedy.
            max_tokens: per completion.
            swaps: draft versions to swap to, one after the other, while the requests run.
        """
        return self._loop.run_until_complete(
            self._generate(prompts, samples, temperature, max_tokens, swaps)
        )

    def swap(self, draft_version: int) -> Swap:
        """Make a release live now; staging comes first and is not part of the latency."""
        return self._loop.run_until_complete(self._swap(draft_version, []))

    async def _generate(
        self,
        prompts: Sequence[Sequence[int]],
        samples: int,
        temperature: float,
        max_tokens: int,
        swaps: Sequence[int],
    ) -> tuple[Generation, list[Swap]]:
        before = self.server.counters()
        began = time.perf_counter()
        tasks = [
            asyncio.create_task(self._complete(prompt, samples, temperature, max_tokens))
            for prompt in prompts
        ]
        done_swaps = [await self._swap(version, tasks) for version in swaps]
        answers = await asyncio.gather(*tasks)
        seconds = time.perf_counter() - began
        counters = SpecCounters.between(before, self.server.counters())
        failed = [answer for answer in answers if isinstance(answer, str)]
        completions = [row for answer in answers if not isinstance(answer, str) for row in answer]
        return Generation(completions, seconds, failed, counters), done_swaps

    async def _complete(
        self, prompt: Sequence[int], samples: int, temperature: float, max_tokens: int
    ) -> list[list[int]] | str:
        """Token ids of each sample, or the reason why there are none."""
        body = {
            "model": "policy",
            "prompt": list(prompt),
            "n": samples,
            "max_tokens": max_tokens,
            "temperature": temperature,
            "return_token_ids": True,
        }
        try:
            answer = await self._client.post("/v1/completions", json=body)
            answer.raise_for_status()
        except httpx.HTTPError as error:
            return f"{type(error).__name__}: {error}"
        return [list(choice["token_ids"]) for choice in answer.json()["choices"]]

    async def _swap(
        self, version: int, tasks: Sequence[asyncio.Task[list[list[int]] | str]]
    ) -> Swap:
        stage_id = f"draft-{version}"
        await asyncio.to_thread(self._stage, stage_id, version)
        in_flight = sum(not task.done() for task in tasks)
        began = time.perf_counter()
        answer = await asyncio.to_thread(self.server.commit, stage_id)
        seconds = time.perf_counter() - began
        if answer.state.draft_version != version:
            raise RuntimeError(f"swap to {version}: the server serves {answer.state.draft_version}")
        return Swap(version, seconds, answer.worker_seconds, in_flight)

    def _stage(self, stage_id: str, version: int) -> None:
        manifest, tensors = self._fetch(version)
        against = (
            manifest.trained_against_policy_version
            if manifest.HasField("trained_against_policy_version")
            else None
        )
        self.server.stage(
            "draft",
            stage_id,
            version,
            tensors,
            specs=manifest.tensors,
            trained_against_policy_version=against,
        )

    def _fetch(self, version: int) -> tuple[release_pb.ReleaseManifest, dict[str, torch.Tensor]]:
        """A release from the trainer, once."""
        if version not in self._releases:
            request = trainer_pb.FetchReleaseRequest(draft_version=version)
            answers = self._trainer.FetchRelease(request, timeout=CALL_TIMEOUT)
            manifest = next(answers).manifest
            assembler = ChunkAssembler(manifest.tensors, MAX_RELEASE_BYTES)
            for answer in answers:
                assembler.feed(answer.chunk)
            # Only the two releases that the arms compare are kept.
            self._releases = {v: r for v, r in self._releases.items() if v == 0}
            self._releases[version] = (manifest, assembler.finish())
        return self._releases[version]
