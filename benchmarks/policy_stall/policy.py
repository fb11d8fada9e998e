"""A policy that takes real steps: forward, backward, optimizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from policy_bridge import DisabledBridge, PolicyBridge

TINY = Path(__file__).resolve().parents[2] / "examples" / "arithmetic_grpo" / "policy"
LARGE = {
    "vocab_size": 8_192,
    "hidden_size": 768,
    "intermediate_size": 2_560,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
PROMPT = 8
_PAGE = 1024
"""Values, of four bytes or fewer."""


@dataclass(frozen=True)
class Case:
    """A policy and its batch.

    Attributes:
        name: ``tiny`` or ``large``.
        rows, tokens: of a step.
        make: builds it.
        bytes_per_step: what the bridge may ship of a step.
    """

    name: str
    rows: int
    tokens: int
    make: Callable[[], PreTrainedModel]
    bytes_per_step: int


def _tiny() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        TINY, dtype=torch.float32, attn_implementation="eager"
    )


def _large() -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**LARGE)).to(torch.bfloat16)


CASES = {
    # A micro-batch of the demo: 3 MiB of states, so that the bridge has to choose.
    "tiny": Case("tiny", 32, 64, _tiny, 2 << 20),
    "large": Case("large", 2, 64, _large, 64 << 20),
}


@dataclass
class Policy:
    """The model, its optimizer, and a state to begin again from.

    Args:
        case: what to build.
    """

    case: Case
    model: PreTrainedModel = field(init=False)

    def __post_init__(self) -> None:
        self.model = self.case.make().train()
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._generator = torch.Generator().manual_seed(0)
        self.next_batch()
        self.step(DisabledBridge())

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(p.numel() for p in self.model.parameters())

    def next_batch(self) -> None:
        """Draw the tokens of the next round."""
        shape = (self.case.rows, self.case.tokens)
        self._ids = torch.randint(3, self.model.config.vocab_size, shape, generator=self._generator)
        self._mask = torch.ones(shape, dtype=torch.bool)
        self._mask[:, :PROMPT] = False
        self._advantage = torch.randn(shape[0], 1, generator=self._generator)

    def pass_time(self) -> None:
        """Forward and backward alone; the next step starts from zeroed gradients."""
        logits = self.model(input_ids=self._ids, use_cache=False).logits
        logits.log_softmax(-1).mean().backward()

    def step(self, bridge: PolicyBridge | object, capture: bool = False) -> None:
        """One step; the gradients stay until the next one."""
        self._optimizer.zero_grad(set_to_none=False)
        window = (bridge if capture else DisabledBridge()).capture(forwards=1, training=True)  # type: ignore[attr-defined]
        with window as taken:
            logits = self.model(input_ids=self._ids, use_cache=False).logits
            log_p = logits[:, :-1].log_softmax(-1)
            chosen = log_p.gather(-1, self._ids[:, 1:, None]).squeeze(-1)
            taken.ship(self._ids, loss_mask=self._mask, sampled_logprobs=chosen)
        loss = -(chosen * self._advantage * self._mask[:, 1:]).mean()
        loss.backward()
        self._optimizer.step()

    @torch.no_grad()
    def restore(self, start: list[torch.Tensor]) -> None:
        """Begin again from what ``moving`` gave: weights and moments."""
        for kept, tensor in zip(start, self._moving(), strict=True):
            tensor.copy_(kept)

    def moving(self) -> list[torch.Tensor]:
        """A copy of all that a step changes."""
        return [tensor.detach().clone() for tensor in self._moving()]

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of the last step."""
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    @torch.no_grad()
    def touch(self) -> None:
        """Read a value of every page of what a step reads and writes.

        The host of a virtual machine is slow to return pages that were not used for a while.
        """
        for tensor in (*self._moving(), *self.gradients()):
            tensor.view(-1)[::_PAGE].sum()

    def _moving(self) -> list[torch.Tensor]:
        states = self._optimizer.state.values()
        moments = [t for state in states for t in state.values() if isinstance(t, torch.Tensor)]
        return [p.data for p in self.model.parameters()] + moments
