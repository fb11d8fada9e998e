"""Whether the draft in a worker's memory is still the one that was committed.

A fingerprint of the draft's parameters is kept at every commit; a read-back takes
it again between two steps. It differs after sleep level 2 (the memory comes back
empty), after somebody else wrote into the draft, after a fault in the memory.

An XOR over the raw elements, one pass at the memory's speed. It tells damage, not
malice; the bytes that were staged are proved by their SHA-256 before. Parameters
that lie in the verifier's memory are left out: a policy push changes them. So are
those that a CPU build packs away at load (their parameters are empty).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

SAME, DIFFERS, ASLEEP = "same", "differs", "asleep"


@torch.no_grad()
def fingerprint(policy: nn.Module, draft: nn.Module) -> tuple[tuple[str, int], ...]:
    """(name, XOR of its elements) of every parameter that is the draft's own, sorted."""
    theirs = {
        parameter.untyped_storage().data_ptr()
        for parameter in policy.parameters()
        if parameter.numel()
    }
    return tuple(
        sorted(
            (name, element_hash(parameter))
            for name, parameter in draft.named_parameters()
            if parameter.numel() and parameter.untyped_storage().data_ptr() not in theirs
        )
    )


def element_hash(parameter: torch.Tensor) -> int:
    """XOR of a tensor's raw elements."""
    return int(torch.hash_tensor(parameter.detach()).item())


class ReadBack:
    """One worker's memory of what was committed.

    Args:
        worker: vLLM's ``Worker`` with a draft.
    """

    def __init__(self, worker: Any) -> None:
        self._worker = worker
        self.asleep = False
        self.lost = False
        self._committed = self._now()

    def committed(self) -> None:
        """The draft was just replaced; what is there now is right."""
        self._committed = self._now()
        self.lost = False

    def exchanged(self, hashes: Mapping[str, int]) -> None:
        """These parameters were just replaced by others, whose hashes were taken before.

        Nothing is read now: a pass over the draft would hold up the engine. The next
        ``check`` tells whether they arrived.
        """
        self._committed = tuple(sorted((dict(self._committed) | dict(hashes)).items()))
        self.lost = False

    @property
    def hashes(self) -> dict[str, int]:
        """Of every parameter, as it was committed."""
        return dict(self._committed)

    def check(self) -> str:
        """``SAME``, ``DIFFERS``, or ``ASLEEP`` while the memory must not be touched."""
        if self.asleep:
            return ASLEEP
        return DIFFERS if self.lost or self._now() != self._committed else SAME

    def _now(self) -> tuple[tuple[str, int], ...]:
        return fingerprint(self._worker.get_model(), self._worker.get_draft_model())


def watch_sleep(worker_class: type) -> None:
    """Make vLLM's ``Worker`` note that it sleeps, and that level 2 loses the draft."""
    sleep, wake_up = worker_class.sleep, worker_class.wake_up  # type: ignore[attr-defined]
    if getattr(sleep, "_slipstream", False):
        return

    def noted_sleep(self: Any, level: int = 1) -> None:
        read_back: ReadBack | None = getattr(self, "slipstream_read_back_state", None)
        if read_back is not None:
            read_back.asleep = True
            read_back.lost = read_back.lost or level >= 2
            # Sleep is there to free memory.
            if hasattr(self, "slipstream_spares"):
                self.slipstream_spares.drop()
        sleep(self, level)

    def noted_wake_up(self: Any, tags: list[str] | None = None) -> None:
        wake_up(self, tags)
        read_back: ReadBack | None = getattr(self, "slipstream_read_back_state", None)
        if read_back is not None and (tags is None or "weights" in tags):
            read_back.asleep = False

    noted_sleep._slipstream = True  # type: ignore[attr-defined]
    worker_class.sleep = noted_sleep  # type: ignore[attr-defined]
    worker_class.wake_up = noted_wake_up  # type: ignore[attr-defined]
