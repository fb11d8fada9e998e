"""The device that is measured, and the draft and the samples that it is measured with."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.draft_training.case import NUM_AUX, SHAPES, Case
from benchmarks.draft_training.ours import head_config
from draft_trainer.drafters.eagle3.head import Eagle3Head
from draft_trainer.drafters.policy import PolicyHead, PolicyHeads
from slipstream.sample import Sample
from slipstream.tensors import dtype_to_wire

K = 5
Figures = dict[str, Any]
_PIECE = 16 << 20
SELF_CHECK = Case("self-check", 32, 64, 4, 2, 8, 96, 48, rows=4, tokens=24, ttt_steps=K)
PARITY = Case("parity", 512, 1024, 8, 4, 64, 4096, 2048, rows=4, tokens=256, ttt_steps=K)


class NotMeasuredError(RuntimeError):
    """The reason why a section has no figures here."""


@dataclass
class Bench:
    """The state that the sections of a part share.

    Attributes:
        device: the one that is measured.
        tiny: shapes of a few kilobytes, to check the benchmark itself.
        folder: for files; it is removed afterwards.
        until: ``time.monotonic`` at which the part must have ended.
        ceilings: bytes or floating-point operations a second, by name.
    """

    device: torch.device
    tiny: bool
    folder: Path
    until: float
    ceilings: dict[str, float] = field(default_factory=dict)

    @property
    def cuda(self) -> bool:
        """True if it is a GPU."""
        return self.device.type == "cuda"

    @property
    def seconds_left(self) -> float:
        """The seconds until the part must have ended."""
        return self.until - time.monotonic()

    @property
    def case(self) -> Case:
        """The draft of an 8B policy, four rows of 2,048 tokens; in bfloat16 on a GPU."""
        case = SELF_CHECK if self.tiny else replace(SHAPES["8B"], rows=4, ttt_steps=K)
        return replace(case, dtype="bfloat16" if self.cuda else "float32")

    @property
    def parity_case(self) -> Case:
        """Small enough for float64 on a CPU."""
        return SELF_CHECK if self.tiny else PARITY

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.cuda:
            torch.cuda.synchronize(self.device)

    def seconds(self, action: Callable[[], object], times: int = 5) -> float:
        """Measure the seconds of one call, waited for, after one that is not counted."""
        action()
        self.wait()
        begin = time.perf_counter()
        for _ in range(times):
            action()
        self.wait()
        return (time.perf_counter() - begin) / times

    def peak_bytes(self, action: Callable[[], object]) -> int | None:
        """Measure the peak of the GPU's memory above what was held before; None on a CPU."""
        if not self.cuda:
            action()
            return None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        action()
        self.wait()
        return torch.cuda.max_memory_allocated(self.device) - before


def draft_of(case: Case, device: torch.device, seed: int = 0) -> Eagle3Head:
    """A random head, float32."""
    torch.manual_seed(seed)
    with device:
        return Eagle3Head(head_config(case), torch.arange(case.draft_vocab_size, dtype=torch.int64))


def rollouts(case: Case, seed: int = 0) -> tuple[list[Sample], PolicyHeads]:
    """Random states of one policy version, a sample a row; their teacher is a distribution.

    Tokens lie in the draft vocabulary, the first ids, and log Z is taken over it.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden, dtype = case.hidden_size, case.torch_dtype

    def normal(*shape: int, std: float = 1.0) -> torch.Tensor:
        """Drawn in a thread for each piece: torch draws in one, and some are of 600 M values."""
        whole = torch.empty(shape, dtype=dtype)
        pieces = whole.view(-1).split(_PIECE)
        seeds = torch.randint(1 << 62, (len(pieces),), generator=generator).tolist()

        def draw(piece: torch.Tensor, own: int) -> None:
            values = torch.empty(len(piece))
            piece.copy_(values.normal_(std=std, generator=torch.Generator().manual_seed(own)))

        with ThreadPoolExecutor() as pool:
            list(pool.map(draw, pieces, seeds))
        return whole

    lm_head = normal(case.draft_vocab_size, hidden, std=2.0 * hidden**-0.5)
    heads = PolicyHeads(1)
    heads.add(PolicyHead(1, lm_head, normal(case.vocab_size, hidden)), (b"lm_head", b"embed"))
    samples = []
    for row in range(case.rows):
        ids = torch.randint(case.draft_vocab_size, (case.tokens,), generator=generator)
        final = normal(case.tokens, hidden)
        logits = final @ lm_head.T
        picked = logits[:-1].float().gather(1, ids[1:, None])[:, 0]
        log_z = logits[:-1].float().logsumexp(-1)
        zero = torch.zeros(1)
        sample = Sample.pack(
            sample_id=str(row),
            policy_version=1,
            temperature=1.0,
            aux_layers=tuple(range(1, NUM_AUX + 1)),
            token_ids=ids,
            positions=torch.arange(case.tokens),
            segment_ids=torch.zeros(case.tokens, dtype=torch.int64),
            loss_mask=torch.arange(case.tokens) >= 4,
            aux=normal(case.tokens, NUM_AUX * hidden),
            final_hidden=final,
            sampled_logprobs=torch.cat([zero, picked - log_z]),
            sampled_logits=torch.cat([zero, picked]),
        )
        # Without it the teacher would be computed in float32.
        sample.header.logits_dtype = dtype_to_wire(dtype)
        samples.append(sample)
    return samples, heads
