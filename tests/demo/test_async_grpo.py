"""The asynchronous loop without vLLM: what is generated when, and how old it is."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.async_grpo.loop import Ahead, AsyncGrpo, AsyncSettings
from policy_bridge.adapters.completions import Completion

SETTINGS = AsyncSettings(steps=5, lag=1, prompts=2, samples=2, learning_rate=1e-4)


class Server:
    """Completions of the version that is live, and a bridge that makes versions live."""

    def __init__(self, fails: int | None = None) -> None:
        self.version = -1
        self.begun: list[int] = []
        self.shipped: list[dict[str, Any]] = []
        self._fails, self._lock = fails, threading.Lock()
        self._rng = random.Random(0)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Mapping[str, Any]
    ) -> list[Completion]:
        with self._lock:
            self.begun.append(self.version)
            if len(self.begun) == self._fails:
                raise httpx.ReadError("the server left")
            rows = [[self._rng.randrange(3, 20) for _ in range(5)] for _ in prompts]
        return [Completion(row, [-1.0] * len(row), ((0, self.version),)) for row in rows]

    # The bridge's side.

    def sync(self, version: int) -> Server:
        self.version = version
        return self

    def capture(self, training: bool) -> Server:
        assert training
        return self

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def push_policy(self) -> None:
        pass

    def ship(self, ids: torch.Tensor, **named: Any) -> None:
        self.shipped.append({"ids": ids, "version": self.version, **named})


@pytest.mark.parametrize("lag", [0, 1, 4])
def test_async_batch_starts_at_oldest_allowed_version(lag: int) -> None:
    server = Server()
    ahead = Ahead(server, replace(SETTINGS, lag=lag), seed=0)
    for index in range(SETTINGS.steps):
        server.version = index
        ahead.live(index)
        begun = min(index + lag, SETTINGS.steps - 1) + 1
        assert ahead._next == begun
        # Taken at once: what follows is begun by the next version at the earliest.
        generated = ahead.take(index)
        assert len(generated.groups) == SETTINGS.prompts
        ages = [index - row.spans[0][1] for _, _, rows in generated.groups for row in rows]  # type: ignore[operator]
        assert max(ages) <= lag
    ahead.close()
    assert len(server.begun) == SETTINGS.steps * SETTINGS.prompts


@pytest.fixture(scope="module")
def model(policy_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        policy_dir, dtype=torch.float32, attn_implementation="eager"
    )


def test_async_loop_ships_rollout_policy_versions(model: Any) -> None:
    server = Server(fails=3)
    steps = AsyncGrpo(model, server, server, SETTINGS, seed=0).run()  # type: ignore[arg-type]
    assert [step.step for step in steps] == [0, 1, 2, 3, 4] and server.version == 5
    assert sum(len(step.failed) for step in steps) == 1
    assert "ReadError" in next(text for step in steps for text in step.failed)
    assert max(step.lag for step in steps) <= 1
    rows = sum(len(shipped["ids"]) for shipped in server.shipped)
    assert rows == SETTINGS.steps * SETTINGS.prompts * SETTINGS.samples - SETTINGS.samples
    for shipped in server.shipped:
        ages = shipped["version"] - shipped["rollout_versions"]
        assert int(ages.min()) >= 0 and int(ages.max()) <= 1
        assert (shipped["loss_mask"].sum(1) == 5).all()
        # Of the pass itself, not the rollouts' own.
        assert not (shipped["sampled_logprobs"][shipped["loss_mask"]] == -1.0).any()
