"""What a capture window works from: the plan of the window, and one record a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from policy_bridge.batch import Span, spans_of
from policy_bridge.modules import PolicyModules
from policy_bridge.runner import Inline, Runner
from policy_bridge.sample import Sample
from policy_bridge.selection import Candidate, Selector
from policy_bridge.session import Session
from policy_bridge.tap import ForwardStates
from slipstream.packed import Numbers
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
        weights: ``PolicyModules.weights`` when that version was synced; empty: they are found
            again.
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
    weights: Sequence[torch.Tensor] = ()


@dataclass(frozen=True)
class Record:
    """A pass and what ``ship`` was told of it.

    Attributes:
        states: of the pass.
        token_ids, loss_mask, attention_mask, position_ids, logprobs, logits: [B, S], see
            ``Capture.ship``.
        acceptance: one number a sequence.
        host: of all that and of the sequences what is needed to choose, once it is on the host.
    """

    states: ForwardStates
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    logprobs: torch.Tensor | None
    logits: torch.Tensor | None
    acceptance: torch.Tensor | Sequence[float] | None
    host: HostRecord | None = None


@dataclass(frozen=True)
class HostRecord:
    """The numbers of a pass on the host, where the choice is made and samples are written.

    With numpy and once for the pass: torch operations on each short sequence were most of what
    a capture cost the policy's thread.

    Attributes:
        spans: the sequences.
        token_ids: int32 [B, S].
        loss_mask: bool [B, S].
        logprobs, logits: float32 [B, S]; None where they are to be computed for what is chosen.
    """

    spans: Sequence[Span]
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32] | None
    logits: NDArray[np.float32] | None

    @classmethod
    def of(cls, record: Record) -> HostRecord:
        """Of a pass. Raises RefusedError for masks or positions that are not of whole sequences."""
        shape = record.states.final.shape[:2]
        spans = spans_of(record.attention_mask, record.position_ids, (shape[0], shape[1]))
        return cls(
            spans=spans,
            # Copies in any case: the loop may write into its own before the samples are written.
            token_ids=record.token_ids.cpu().numpy().astype(np.int32),
            loss_mask=record.loss_mask.cpu().numpy().copy(),
            logprobs=_floats(record.logprobs),
            logits=_floats(record.logits),
        )


@dataclass(frozen=True)
class Chosen:
    """What goes out.

    Attributes:
        record: its pass, with its numbers on the host.
        candidate: which rows of it.
        numbers: its own, where they had to come from the weights as they were when it was chosen.
        priority: 0 to ``PRIORITIES`` - 1.
    """

    record: Record
    candidate: Candidate
    numbers: Numbers | None
    priority: int


def _floats(values: torch.Tensor | None) -> NDArray[np.float32] | None:
    return None if values is None else values.float().cpu().numpy().copy()
