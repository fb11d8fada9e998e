"""What a capture window works from: the plan of the window, and one record a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from policy_bridge.batch import Span
from policy_bridge.modules import PolicyModules
from policy_bridge.sample import Sample
from policy_bridge.selection import Selector
from policy_bridge.session import Session
from policy_bridge.side_stream import Inline, Runner
from policy_bridge.tap import ForwardStates
from slipstream.refusal import RefusedError


def allocate(nbytes: int, priority: int) -> torch.Tensor:
    """Memory for a sample where no pool is given."""
    return torch.empty(nbytes, dtype=torch.uint8)


def raise_error(error: RefusedError) -> None:
    """What a strict window does with an error."""
    raise error


@dataclass(frozen=True)
class CapturePlan:
    """What stays the same over a window.

    Attributes:
        modules: the policy.
        session: what the trainer wants.
        policy_version: whose states these are.
        weights_stamp: ``PolicyModules.stamp`` when that version was synced.
        temperature: of the rollouts.
        budget_bytes: for the whole window.
        forwards: how many passes will be shipped, if known.
        states_dtype: what the states are cast to; None keeps theirs.
        selector: chooses.
        next_id: a fresh sample id.
        offer: hands a sample over with its priority, 0 to ``PRIORITIES`` - 1.
        reserve: memory of so many bytes for a sample of such a priority; None if there is
            no room for it.
        runner: where choosing and copying is done.
        refuse: told of a call that cannot be served; raises it if it should.
        done: told that a window ended well.
    """

    modules: PolicyModules
    session: Session
    policy_version: int
    weights_stamp: int
    temperature: float
    budget_bytes: int
    forwards: int | None
    states_dtype: torch.dtype | None
    selector: Selector
    next_id: Callable[[], str]
    offer: Callable[[Sample, int], bool]
    reserve: Callable[[int, int], torch.Tensor | None] = allocate
    runner: Runner = field(default_factory=Inline)
    refuse: Callable[[RefusedError], None] = raise_error
    done: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Record:
    """A pass and what ``ship`` was told of it.

    Attributes:
        states: of the pass.
        token_ids, loss_mask, attention_mask, position_ids, logprobs, logits: [B, S], see
            ``Capture.ship``.
        acceptance: one number a sequence.
        spans: the sequences, once they are known on the host.
    """

    states: ForwardStates
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    logprobs: torch.Tensor | None
    logits: torch.Tensor | None
    acceptance: torch.Tensor | Sequence[float] | None
    spans: Sequence[Span] = ()
