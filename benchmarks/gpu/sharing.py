"""The sections in which a policy has a bridge to a trainer: what it costs, and what is lost."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks.draft_training.case import SHAPES
from benchmarks.gpu.bench import Bench, Figures, NotMeasuredError
from benchmarks.policy_stall.policy import TINY
from benchmarks.policy_stall.trainers import NO_TRAINING, REPLAY_BYTES, Trainer, write_draft
from policy_bridge import BridgeConfig, PolicyBridge

_FLUSH_SECONDS = 60.0
_STEPS = 8
_BEHIND_SECONDS = 1.0
_GPU_TRAINING = 'device = "cuda"\ngpu_memory_fraction = 0.3\n'
_SLEEP_HERTZ = 2e9  # A GPU's clock, at most.


@dataclass
class Passes:
    """Log-prob forward passes of a policy with a bridge to ``trainer``; version 1 is synced.

    A pass has ``ids`` [rows, tokens]; ``mask``, of the same shape, marks the sampled ones.
    """

    bench: Bench
    model: Any
    ids: torch.Tensor
    mask: torch.Tensor
    bridge: PolicyBridge
    trainer: Trainer

    @torch.no_grad()
    def one(self, taken: Any = None) -> float:
        """One pass; returns the seconds of ``taken.ship``, log-probs given."""
        logits = self.model(input_ids=self.ids, use_cache=False).logits
        chosen = logits[:, :-1].gather(-1, self.ids[:, 1:, None]).squeeze(-1)
        log_p = chosen.float() - logits[:, :-1].logsumexp(-1).float()
        begin = time.perf_counter()
        if taken is not None:
            taken.ship(self.ids, loss_mask=self.mask, sampled_logprobs=log_p)
        return time.perf_counter() - begin

    def seconds(self, window: Callable[[], AbstractContextManager[Any]]) -> float:
        """One pass until the policy's own stream is done; the copies on the bridge's go on."""
        self.one()
        self.bench.wait()
        begin = time.perf_counter()
        with window() as taken:
            self.one(taken)
        if self.bench.cuda:
            torch.cuda.current_stream(self.bench.device).synchronize()
        return time.perf_counter() - begin

    def sent(self) -> Figures:
        """Count what became of the samples, once all are sent.

        Raises NotMeasuredError: they are not sent in time, or windows took nothing.
        """
        if not self.bridge.flush(_FLUSH_SECONDS):
            raise NotMeasuredError(f"a window was not sent in {_FLUSH_SECONDS:.0f} s")
        stats = self.bridge.stats()
        missed = stats.captures_skipped + stats.captures_refused
        if missed or stats.capture_off_reason:
            why = stats.capture_off_reason or stats.last_error
            raise NotMeasuredError(f"{missed} windows took nothing: {why}")
        return {"accepted": stats.accepted, "samples shed": sum(stats.shed.values())}


@contextmanager
def passes(bench: Bench, training: str = NO_TRAINING) -> Iterator[Passes]:
    """A policy, a trainer with these settings in ``[training]``, and a bridge between them."""
    if bench.tiny:
        draft = TINY.parent / "draft"
        model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).to(bench.device)
        rows, tokens = 4, 48
    else:
        policy_folder, draft = bench.folder / "policy", bench.folder / "draft"
        with bench.device:
            # Eight layers of an 8B policy's 36: the cost of a window does not grow with them, so
            # that its share is seen at more than four times its size.
            model = Qwen3ForCausalLM(Qwen3Config(**policy_8b(layers=8))).to(torch.bfloat16)
        if not draft.exists():
            model.save_pretrained(policy_folder)
            write_draft(policy_folder, draft)
        rows, tokens = 8, 1024
    ids = torch.randint(3, model.config.vocab_size, (rows, tokens), device=bench.device)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[:, :8] = False
    # All windows are of one version, 4.3 GB of an 8B policy's states in ``capture``.
    replay = REPLAY_BYTES if bench.tiny else 9 << 30
    name = f"trainer-{time.monotonic_ns()}"
    options: Any = {"replay_bytes": replay, "training": training}
    with Trainer(name, bench.folder, draft, 0, **options) as trainer:
        trainer.wait_ready()
        config = BridgeConfig(
            trainer=trainer.address, run_id="gpu", bytes_per_step=sys.maxsize, sync_seconds=2.0
        )
        with PolicyBridge(model, config) as bridge:
            if not bridge.wait_connected(60.0):
                raise NotMeasuredError(f"the trainer was not reached: {bridge.stats().last_error}")
            with bridge.sync(1):
                pass
            yield Passes(bench, model, ids, mask, bridge, trainer)


def policy_8b(layers: int) -> dict[str, Any]:
    """Return the configuration of an 8B policy with so many layers."""
    names = ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"]
    names += ["num_key_value_heads", "head_dim"]
    sizes = {name: getattr(SHAPES["8B"], name) for name in names}
    return {
        **sizes,
        "num_hidden_layers": layers,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }


def capture(bench: Bench) -> Figures:
    """The policy's log-prob forward with and without a capture window, log-probs given."""
    off, on = [], []
    with passes(bench) as policy:
        for _ in range(4 if bench.tiny else 16):
            off.append(policy.seconds(nullcontext))
            on.append(policy.seconds(lambda: policy.bridge.capture(forwards=1)))
            # The next pair shares nothing with this window's copies.
            found = policy.sent()
        samples = len(policy.ids) * len(on)
    # The first window has the policy announced beside it.
    ratios = sorted(a / b for a, b in zip(on[1:], off[1:], strict=True))
    return {
        "forward with a window over one without": ratios[len(ratios) // 2],
        "seconds_without": sorted(off)[len(off) // 2],
        "share of the samples accepted": found["accepted"] / samples,
        "samples shed": found["samples shed"],
    }


def run_ahead(bench: Bench) -> Figures:
    """Windows of six passes whose host does not wait for a GPU that is a second behind."""
    # 1.6 of the 2 GiB that a window and the outbox hold.
    count, slowest = 6, 0.0
    with passes(bench) as policy:
        for forwards in (None, count):
            policy.seconds(nullcontext)
            with policy.bridge.capture(forwards=forwards) as window:
                if bench.cuda:
                    torch.cuda._sleep(int(_BEHIND_SECONDS * _SLEEP_HERTZ))
                # Later ones may wait for room in CUDA's own queue of launches.
                first, *_ = [policy.one(window) for _ in range(count)]
            slowest = max(slowest, first)
            figures = policy.sent()
        samples = 2 * count * len(policy.ids)
    return {
        "seconds of a ship": slowest,
        "share of a run-ahead's samples accepted": figures["accepted"] / samples,
        "samples shed by a run-ahead": figures["samples shed"],
    }


def shared(bench: Bench) -> Figures:
    """The policy's passes while a trainer trains beside it, over those before it began."""
    training = _GPU_TRAINING if bench.cuda else ""
    with passes(bench, training) as policy:

        def train(steps: float) -> list[float]:
            """Seconds of passes with windows, until the trainer has taken so many steps."""
            taken = []
            while policy.trainer.steps() < steps:
                if bench.seconds_left < 10.0:
                    raise NotMeasuredError(f"the trainer did not take {steps:.0f} steps in time")
                taken.append(policy.seconds(policy.bridge.capture))
            return taken

        alone = [policy.seconds(nullcontext) for _ in range(4 if bench.tiny else 16)]
        train(1.0)
        begin, first = time.monotonic(), policy.trainer.steps()
        beside = train(first + _STEPS)
        seconds = time.monotonic() - begin
    median_beside, median_alone = (sorted(v)[len(v) // 2] for v in (beside, alone))
    return {
        "pass beside a trainer over one alone": median_beside / median_alone,
        "seconds_alone": median_alone,
        "passes_beside": len(beside),
        "steps_a_second": _STEPS / seconds,
    }
