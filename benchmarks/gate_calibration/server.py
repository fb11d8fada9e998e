"""One real vLLM server that is given one draft after the other, and asked how each is accepted."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from safetensors.torch import load_file

from draft_trainer.checkpoints.draft import WEIGHTS_FILE
from examples.arithmetic_grpo.processes import Service, free_port
from examples.arithmetic_grpo.rollouts import RolloutClient
from slipstream.client import open_channel, stage
from slipstream.v1 import rollout_server_pb2 as pb
from slipstream.v1 import rollout_server_pb2_grpc as pb_grpc

READY_SECONDS = 900.0
CALL_SECONDS = 60.0
_MODEL = "policy"


@dataclass(frozen=True)
class Acceptance:
    """One draft's counters in vLLM.

    Attributes:
        drafts: verification steps.
        accepted: tokens accepted.
        per_position: drafts of which at least 1, 2, ... tokens were accepted.
    """

    drafts: int
    accepted: int
    per_position: tuple[int, ...]

    @property
    def length(self) -> float:
        """Tokens per verification step, bonus token included."""
        return 1 + self.accepted / self.drafts

    @property
    def standard_error(self) -> float:
        """Of ``length``, verification steps taken as independent.

        The counters hold the whole distribution of the accepted tokens a of a step:
        E[a^2] = sum over s of (2 s - 1) P(a >= s).
        """
        mean = self.accepted / self.drafts
        square = sum((2 * s + 1) * n for s, n in enumerate(self.per_position)) / self.drafts
        return float(((square - mean**2) / self.drafts) ** 0.5)


class Server:
    """``rollout-server serve`` for the length of a ``with`` block.

    Args:
        policy: that it serves.
        draft: that it starts with, draft version 0.
        log: its output goes there.
        draft_length: tokens proposed per step.
        method: how they are drawn, "probabilistic" or "greedy".
    """

    def __init__(
        self,
        policy: Path,
        draft: Path,
        log: Path,
        draft_length: int = 3,
        method: str = "probabilistic",
    ) -> None:
        http, control = free_port(), free_port()
        argv = [
            *(str(Path(sys.executable).parent / "rollout-server"), "serve", str(policy)),
            *("--draft", str(draft), "--draft-length", str(draft_length)),
            *("--draft-sample-method", method),
            *("--host", "127.0.0.1", "--port", str(http), "--control-port", str(control)),
            *("--served-model-name", _MODEL, "--generation-config", "vllm"),
            *("--max-model-len", "256", "--max-num-seqs", "128", "--enforce-eager"),
        ]
        env = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        self._service = Service("rollout-server", argv, log, f"127.0.0.1:{control}", env)
        self._channel = open_channel(self._service.health)
        self._stub = pb_grpc.RolloutServerStub(self._channel)
        # It asks a trainer only for releases, of which there are none.
        self._client = RolloutClient(
            f"http://127.0.0.1:{http}", self._service.health, self._service.health, _MODEL
        )

    def __enter__(self) -> Server:
        self._service.start()
        try:
            self._service.wait_ready(READY_SECONDS)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def swap(self, version: int, draft: Path) -> None:
        """Stage a checkpoint's tensors and make them live. Raises grpc.RpcError: refused."""
        tensors = load_file(draft / WEIGHTS_FILE)
        name = f"draft-{version}"
        stage(
            self._stub,
            stage_id=name,
            kind=pb.STAGE_KIND_DRAFT,
            version=version,
            tensors=tensors,
            timeout=CALL_SECONDS,
        )
        self._stub.Commit(pb.CommitRequest(stage_ids=[name]), timeout=CALL_SECONDS)

    def rollouts(
        self, version: int, prompts: Sequence[Sequence[int]], samples: int
    ) -> tuple[Acceptance, list[list[int]]]:
        """Generate at temperature 1 and read this draft version's own counters.

        Args:
            version: that is live.
            prompts: token ids.
            samples: completions of each.

        Returns:
            The counters, and the completions: all of the first prompt, of the second, ...
        """
        generation, _ = self._client.generate(prompts, samples)
        if generation.failed:
            raise RuntimeError(f"{len(generation.failed)} requests failed: {generation.failed[0]}")
        call = self._stub.WatchAcceptance(pb.WatchAcceptanceRequest(), timeout=CALL_SECONDS)
        report = next(iter(call))
        call.cancel()
        [counters] = [found for found in report.counters if found.draft_version == version]
        acceptance = Acceptance(
            counters.drafts, counters.accepted_tokens, tuple(counters.accepted_per_position)
        )
        return acceptance, generation.completions

    def _stop(self) -> None:
        self._client.close()
        self._channel.close()
        self._service.stop()
