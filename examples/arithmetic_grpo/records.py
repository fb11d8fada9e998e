"""The figures that the demo records at every step; plain data that becomes ``summary.json``."""

from __future__ import annotations

from dataclasses import dataclass, field

FROZEN, ADAPTED, OFF, MIXED = "frozen", "adapted", "off", "mixed"
ARMS = (FROZEN, ADAPTED, OFF, MIXED)
"""Drafts of release 0; of the newest release; no speculation; swapped between both in flight."""
NGRAM = "n-gram"
"""Drafts from the sequence's own tokens, on a server of its own, after the last step."""


@dataclass(frozen=True)
class ArmRecord:
    """One arm's share of a step.

    Attributes:
        requests, failed: requests sent, and those not answered in full.
        tokens, seconds: generated tokens, and the wall time of the arm's round.
        drafts, draft_tokens, accepted, per_position: vLLM's own counters over the round.
        reward, correct, style_share: means over the completions.
        surprise, surprise_variance: sum over the sampled tokens of log p(x) + H(p), and the sum of
            its variances, under the policy's own log-prob forward. The sum has mean 0 when tokens
            are drawn from the policy, whatever proposed them.
        entropy: sum over the sampled tokens of H(p), in nats.
        draft_version: release that drafted (the newest of those that did).
    """

    requests: int
    failed: int
    tokens: int
    seconds: float
    drafts: int
    draft_tokens: int
    accepted: int
    per_position: tuple[int, ...]
    reward: float
    correct: float
    style_share: float
    surprise: float
    surprise_variance: float
    entropy: float
    draft_version: int | None

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per verification step, bonus token included; None without drafts."""
        return 1 + self.accepted / self.drafts if self.drafts else None


@dataclass(frozen=True)
class SwapRecord:
    """One live swap. Seconds from call to answer and in the worker; ``kind`` says who asked."""

    step: int
    kind: str
    draft_version: int
    call_seconds: float
    worker_seconds: float
    requests_in_flight: int


@dataclass(frozen=True)
class StepRecord:
    """One GRPO step.

    Attributes:
        step: 0-based.
        policy_version: that generated the step's rollouts.
        draft_version: newest release that served.
        trained_against: policy version that release was trained against, None for release 0.
        arms: by name.
        seconds: wall time by phase: data, generation, log_prob, training, sync.
        draft_train_seconds: time that the sidecar trained meanwhile, in its own process.
        reward: mean over the step.
    """

    step: int
    policy_version: int
    draft_version: int
    trained_against: int | None
    arms: dict[str, ArmRecord]
    seconds: dict[str, float]
    draft_train_seconds: float
    reward: float


@dataclass
class RunRecord:
    """Everything of one run."""

    settings: dict[str, object]
    style: str = "ornate lines"
    """The name of what ``style_share`` counts."""
    steps: list[StepRecord] = field(default_factory=list)
    swaps: list[SwapRecord] = field(default_factory=list)
    speed: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Batch size -> arm -> tokens/s of each interleaved round, after the last step."""
    ngram_speed: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Likewise of the server that drafts n-grams: with them, and without speculation."""
    tokens_per_step: dict[str, float] = field(default_factory=dict)
    """A sequence's tokens per engine step of these rounds, by arm, with or without a draft."""
    start_seconds: float = 0.0
    total_seconds: float = 0.0
    bridge: dict[str, object] = field(default_factory=dict)
    trainer: dict[str, object] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)
    """The trainer's CPU seconds, how many of them others wanted, its peak memory, and the bytes of
    states sent per step."""
