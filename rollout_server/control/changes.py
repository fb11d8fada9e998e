"""Changes of what the engine holds: what is asked of it, what came of it, and how it refuses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rollout_server.control.stages import WeightSource
from slipstream.errors import RefusedError


@dataclass(frozen=True)
class Change:
    """A change of one model, "draft" or "policy": its new weights, and those it has now."""

    kind: str
    new: WeightSource
    old: WeightSource

    def to_message(self) -> dict[str, Any]:
        """Return the change as plain data, for vLLM's RPC."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Change:
        """The inverse of ``to_message``."""
        new, old = (WeightSource.from_message(message[side]) for side in ("new", "old"))
        return cls(message["kind"], new, old)

    def undone(self) -> Change:
        """Return the change that puts the old weights back, whatever is there now.

        Not for weights that came by a transfer: a worker would wait for one that nobody sends.
        """
        return Change(self.kind, self.old, self.old)


@dataclass(frozen=True)
class Result:
    """The outcome of changes.

    Attributes:
        worker_seconds: time that the engine was paused, in the slowest worker.
        error: empty when everything was applied; else why nothing was.
        restored: False when even the old weights could not be put back, so that the models are not
            to be trusted.
        steps_before: of each engine core, verification steps of the draft before it
            (``AcceptanceTracker.switch``).
        seconds: from the call's arrival to the workers' answer.
        requests: of a policy: tokens of each request before it (``PolicySpans.commit``).
        received: whether, with ``error``, a weight transfer had begun: nobody sends it again.
    """

    worker_seconds: float
    error: str = ""
    restored: bool = True
    steps_before: tuple[int, ...] = (0,)
    seconds: float = 0.0
    requests: Mapping[str, int] = field(default_factory=dict)
    received: bool = False

    @classmethod
    def all_of(
        cls, results: Sequence[Result], changes: Sequence[Change]
    ) -> tuple[Result, list[Change]]:
        """Combine the results of several workers or engine cores.

        Returns:
            The sum of ``results``, and the changes that undo these if some applied them and others
            did not. None do if old weights came by a transfer: the sum is then not ``restored``.
        """
        result = cls(
            max(result.worker_seconds for result in results),
            "; ".join(dict.fromkeys(result.error for result in results if result.error)),
            all(result.restored for result in results),
            tuple(steps for result in results for steps in result.steps_before),
            requests={name: n for result in results for name, n in result.requests.items()},
            received=any(result.received for result in results),
        )
        if not (result.error and result.restored) or all(each.error for each in results):
            return result, []
        if any(change.old.transfer for change in changes):
            return replace(result, restored=False), []
        return result, [change.undone() for change in changes]

    def taken_back(self, results: Sequence[Result], undone: Sequence[Result]) -> Result:
        """Return this result as it is after all of ``results`` were given the old weights again.

        Those that had not applied the change have their old weights even if they refused that.
        """
        each = zip(results, undone, strict=True)
        done = all(undo.restored and (one.error or not undo.error) for one, undo in each)
        return replace(self, restored=done)


@dataclass(frozen=True)
class Description:
    """The workers' description of the models in memory; see ``worker.slipstream_describe``."""

    shares_embedding: bool
    shared: tuple[str, ...]
    served_dtype: str
    derived: tuple[str, ...] = ()
    runner: str = "V1"
    tied: tuple[str, ...] = ()


class UntrustedEngineError(Exception):
    """The weights in memory are unknown: the server must stop serving."""


class ReceivedError(RefusedError):
    """A commit that failed after a weight transfer had begun: nobody sends it again."""
