"""Rollouts all the time, shipped to the trainer while a bridge is there: the policy's side."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from transformers import AutoModelForCausalLM

from examples.arithmetic_grpo.grpo import log_prob_forward, pad_batch
from examples.arithmetic_grpo.sampling import prompt_ids
from examples.arithmetic_grpo.task import MAX_COMPLETION_TOKENS, sample_problem
from examples.arithmetic_grpo.tokenizer import PAD_ID
from examples.local_services import ARITHMETIC
from policy_bridge import BridgeConfig, DisabledBridge, PolicyBridge
from policy_bridge.adapters.completions import CompletionsClient
from policy_bridge.stats import BridgeStats

PROMPTS = 24
FED = 8
"""The prompts among these that are shipped."""


class PolicyLoop:
    """Owns one thread, in which everything that touches the policy happens.

    Args:
        urls: of the rollout servers' OpenAI APIs.

    Attributes:
        said_temperature: what the bridge is told; the rollouts are sampled at 1.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(
            ARITHMETIC / "policy", dtype=torch.float32
        )
        self.said_temperature = 1.0
        self._bridge: PolicyBridge | DisabledBridge = PolicyBridge.disabled()
        self._client = CompletionsClient(urls, "policy", seconds=120.0)
        self._stopping = threading.Event()
        self._feeding = False
        self._rng = random.Random(0)
        self._thread = ThreadPoolExecutor(1, "policy")
        self._next: Future[None] | None = None

    def start(self) -> None:
        """Begin to generate."""
        self._next = self._thread.submit(self._run)

    def stop(self) -> None:
        """End after the batch under way."""
        self._stopping.set()
        self._thread.shutdown()
        self._bridge.close()
        self._client.close()

    def stats(self) -> BridgeStats:
        """Return the statistics of the current bridge."""
        return self._bridge.stats()

    def use(self, urls: Sequence[str]) -> None:
        """Generate on these servers from now on."""

        def change() -> None:
            self._client.close()
            self._client = CompletionsClient(urls, "policy", seconds=120.0)

        self._do(change)

    def connect(self, config: BridgeConfig) -> None:
        """A new bridge in the place of the one before."""

        def change() -> None:
            self._bridge.close()
            self._bridge = PolicyBridge(self._model, config)

        self._do(change)

    def sync(self, version: int) -> None:
        """Push the policy to the bridge's servers as this version."""

        def change() -> None:
            with self._bridge.sync(version) as window:
                window.push_policy()

        self._do(change)

    def feed(self, on: bool) -> None:
        """Ship what is generated, or no longer."""

        def change() -> None:
            self._feeding = on

        self._do(change)

    def _do(self, order: Callable[[], None]) -> None:
        """Between two batches; raises what the order raises, or what ended the batches."""
        self._thread.submit(order).result(120)
        if self._next is not None and self._next.done():
            self._next.result()

    def _run(self) -> None:
        self._batch()
        if not self._stopping.is_set():
            self._next = self._thread.submit(self._run)

    def _batch(self) -> None:
        prompts = [prompt_ids(sample_problem(self._rng)) for _ in range(PROMPTS)]
        sampling = {"temperature": 1.0, "max_tokens": MAX_COMPLETION_TOKENS}
        completions = [c.token_ids for c in self._client.generate(prompts, sampling)]
        if not self._feeding:
            return
        batch = pad_batch(prompts[:FED], completions[:FED], torch.zeros(FED), PAD_ID)
        with self._bridge.capture(temperature=self.said_temperature) as capture, torch.no_grad():
            log_probs = log_prob_forward(self._model, batch.input_ids, batch.attention_mask)
            capture.ship(
                batch.input_ids,
                attention_mask=batch.attention_mask,
                loss_mask=batch.completion_mask,
                sampled_logprobs=log_probs,
            )
