"""Capture windows without a trainer: what is chosen lands in a list."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from policy_bridge.capture import Capture, NullCapture
from policy_bridge.config import ModulePaths
from policy_bridge.copier import Copier
from policy_bridge.model import PolicyModules, find_modules
from policy_bridge.session import Session
from policy_bridge.stats import Counters
from policy_bridge.weight_watch import watched
from slipstream.sample import Sample

from .doubles import DEADLINE

LAYERS = (1, 2)
Batch = dict[str, torch.Tensor]


def session_of(modules: PolicyModules, layers: Sequence[int] = LAYERS) -> Session:
    """A run with the whole vocabulary."""
    return Session("s", tuple(layers), torch.arange(modules.vocab_size), 512, None, ())


@dataclass
class Windows:
    """Makes windows on one model; ``samples`` holds what came out."""

    model: nn.Module
    layers: Sequence[int] = LAYERS
    paths: ModulePaths = field(default_factory=ModulePaths)
    budget_bytes: int = sys.maxsize
    training: bool = False
    samples: list[Sample] = field(default_factory=list)
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self.modules = find_modules(self.model, self.paths)
        self._numbers = itertools.count()

    def _take(self, sample: Sample, priority: int) -> bool:
        self.samples.append(sample)
        return True

    def open(self, **changes: Any) -> Capture:
        """A window."""
        values: dict[str, Any] = {
            "modules": self.modules,
            "session": session_of(self.modules, self.layers),
            "policy_version": 1,
            "moved": watched(self.modules.weights()),
            "temperature": 1.0,
            "budget_bytes": self.budget_bytes,
            "next_id": lambda: str(next(self._numbers)),
            "offer": self._take,
            "counters": self.counters,
            "probe": True,
            "training": self.training,
        }
        return Capture(**{**values, **changes})

    def of_row(self, data: Batch, row: int) -> Sample:
        """The sample of a row of a batch, by its tokens."""
        kept = data["attention_mask"][row].bool()
        ids = data["input_ids"][row][kept].tolist()
        (found,) = [s for s in self.samples if s.token_ids.tolist() == ids]
        return found


def logits_of(model: nn.Module, micro: Batch) -> torch.Tensor:
    """Return the logits of a Hugging Face model, or of one that returns a tensor."""
    out = model(micro["input_ids"], attention_mask=micro["attention_mask"])
    return out if isinstance(out, torch.Tensor) else out.logits


def own_logprobs(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return each token's log-prob given those before it, [B, S - 1], from logits [B, S, V]."""
    log_p = logits[:, :-1].float().log_softmax(-1)
    return log_p.gather(-1, ids[:, 1:, None].long()).squeeze(-1)


def loss_of(logits: torch.Tensor, micro: Batch) -> torch.Tensor:
    """Return a policy gradient's loss: the sum of log-probs where the loss mask is set."""
    return (own_logprobs(logits, micro["input_ids"]) * micro["loss_mask"][:, 1:]).sum()


def micro_batches(data: Batch) -> Iterator[Batch]:
    """The first two rows, then the third."""
    for rows in (slice(0, 2), slice(2, 3)):
        yield {key: value[rows] for key, value in data.items()}


Step = Callable[[nn.Module, Batch, Capture | NullCapture], None]


def step_on_given_logprobs(model: nn.Module, data: Batch, capture: Capture | NullCapture) -> None:
    """Ship the loop's own log-probs before each backward."""
    for micro in micro_batches(data):
        chosen = own_logprobs(logits_of(model, micro), micro["input_ids"])
        capture.ship(**micro, sampled_logprobs=chosen)
        # Inside the window, where checkpointing runs layers a second time.
        (chosen * micro["loss_mask"][:, 1:]).sum().backward()


def step_without_logprobs(model: nn.Module, data: Batch, capture: Capture | NullCapture) -> None:
    """Ship after each backward, and after a look at the policy that is no training pass."""
    for micro in micro_batches(data):
        loss_of(logits_of(model, micro), micro).backward()
        with torch.no_grad():
            logits_of(model, {key: value.flip(0) for key, value in micro.items()})
        capture.ship(**micro)


def step_on_packed_rows(model: nn.Module, data: Batch, capture: Capture | NullCapture) -> None:
    """All rows one after the other in one row, without padding."""
    kept = data["attention_mask"].bool()
    row = {key: data[key][kept][None] for key in ("input_ids", "loss_mask")}
    positions = torch.cat([torch.arange(length) for length in kept.sum(1).tolist()])[None]
    logits = model(row["input_ids"], position_ids=positions, use_cache=False).logits
    loss_of(logits, row).backward()
    capture.ship(**row, position_ids=positions)


def gradients(
    model: nn.Module, data: Batch, windows: Windows | None, step: Step = step_on_given_logprobs
) -> list[torch.Tensor]:
    """Return the gradients of a policy gradient's loss inside one window, or without one."""
    return gradients_in(NullCapture() if windows is None else windows.open(), model, data, step)


def gradients_in(
    window: Capture | NullCapture,
    model: nn.Module,
    data: Batch,
    step: Step = step_on_given_logprobs,
) -> list[torch.Tensor]:
    """The same inside a window that was opened by a bridge."""
    model.train()
    model.zero_grad(set_to_none=True)
    with window as capture:
        step(model, data, capture)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def assert_same_bits(plain: list[torch.Tensor], bridged: list[torch.Tensor]) -> None:
    """Every gradient, and there are some."""
    assert len(plain) == len(bridged) > 5
    assert all(torch.equal(a, b) for a, b in zip(plain, bridged, strict=True))
    assert any(bool(a.any()) for a in plain)


def hooks_on(model: nn.Module) -> int:
    """Forward hooks, before and after."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


class Streams:
    """torch.cuda's streams and events, which only note what they are asked for, and where."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.noted: list[tuple[str, bool]] = []
        self._caller = threading.get_ident()
        policy = SimpleNamespace(name="policy")
        side = SimpleNamespace(
            device="cuda:1",
            wait_event=lambda event: self.note(f"wait for {event.name}"),
            synchronize=lambda: self.note("synchronize"),
        )
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
        monkeypatch.setattr(torch.cuda, "stream", self._enter)
        monkeypatch.setattr(
            torch.cuda, "set_device", lambda device: self.note(f"set device {device}")
        )
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: policy)
        monkeypatch.setattr(torch.cuda, "Event", self._event)

    def copier(self) -> Copier:
        """One that chooses and copies in a thread of its own; its memory is not pinned."""
        made = Copier(torch.device("cuda"))
        made.pinned = False
        return made

    def note(self, what: str) -> None:
        self.noted.append((what, threading.get_ident() == self._caller))

    def _enter(self, stream: SimpleNamespace) -> AbstractContextManager[None]:
        self.note(f"enter a stream of {stream.device}")
        return nullcontext()

    def _event(self) -> SimpleNamespace:
        return SimpleNamespace(name="event", record=lambda on: self.note(f"record on {on.name}"))


def hold(side: Copier) -> threading.Event:
    """Keep the thread busy until the event is set."""
    begun, go_on = threading.Event(), threading.Event()

    def job() -> None:
        begun.set()
        assert go_on.wait(DEADLINE)

    assert side.put(job)
    assert begun.wait(DEADLINE)
    return go_on
