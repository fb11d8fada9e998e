"""The capture guard: decides whether the next window captures, and keeps the reason if it does not.

Bad input costs samples, never the training run. An error is a ``RefusedError``: a strict bridge
raises it to the caller; otherwise it is logged once, capture is off, and the reason is in the
statistics until its cause is gone.
"""

from __future__ import annotations

import logging
import math
import threading
from enum import Enum
from typing import TYPE_CHECKING

from policy_bridge.config import BridgeConfig
from slipstream.errors import RefusedError

if TYPE_CHECKING:
    from policy_bridge.connection import Connection
    from policy_bridge.session import Session
    from policy_bridge.stats import Counters

logger = logging.getLogger(__name__)

MAX_REFUSALS_IN_A_ROW = 16
"""Refused samples without an accepted one after which no more of a version are sent."""


class Cause(Enum):
    """The subject of a refusal; its value says when the refusal ends."""

    MODEL = "never: the policy cannot be captured"
    BRIDGE = "never: a thread of the bridge ended with an error"
    VERSION = "with a version that rises"
    TRAINER = "when the trainer takes the run, or at the next version"
    CALL = "with the next window whose calls are right"


def thread_ended(which: str) -> RefusedError:
    """The refusal of a bridge whose thread (``which``) ended with an unexpected error."""
    return RefusedError(
        "bridge",
        f"its thread {which} ended with an error",
        "a bridge whose threads run",
        "report the traceback that it printed; a PolicyBridge built anew captures again",
    )


def check_temperature(temperature: object) -> float:
    """Return ``temperature`` as a float. Raises RefusedError: it is not a finite number > 0."""
    try:
        number = float(temperature)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number <= 0:
        step = "pass the rollouts' temperature"
        raise RefusedError("temperature", repr(temperature), "a finite number > 0", step)
    return number


class CaptureGuard:
    """The state that decides what a bridge captures. Any thread may call ``refuse`` and ``clear``.

    Attributes:
        connection: to the trainer; None where the policy cannot be captured.
        version: the highest version whose sync ended well; None before it.
        session: the one for which the policy's matrices were copied at that sync; None if none.
    """

    def __init__(self, config: BridgeConfig, counters: Counters) -> None:
        self._config = config
        self._counters = counters
        self._lock = threading.Lock()
        self._refusals: dict[Cause, str] = {}
        self._logged: set[str] = set()
        self.connection: Connection | None = None
        self.version: int | None = None
        self.session: Session | None = None

    @property
    def connected(self) -> bool:
        """True while a run is open."""
        return self.connection is not None and self.connection.connected

    def refuse(self, cause: Cause, error: RefusedError) -> None:
        """Turn capture off. Raises ``error`` if the bridge is strict."""
        text = str(error)
        with self._lock:
            self._refusals[cause] = text
            # Once per field: the rest of the text may differ in every step.
            new = error.field not in self._logged
            self._logged.add(error.field)
        if new:
            logger.error("capture is off: %s", text)
        if self._config.strict:
            raise error

    def clear(self, cause: Cause) -> None:
        """Forget a refusal whose cause is gone."""
        with self._lock:
            self._refusals.pop(cause, None)

    def refusal(self, *causes: Cause) -> str:
        """The first refusal for one of ``causes`` (none given: for any); empty if there is none."""
        with self._lock:
            return next((self._refusals[c] for c in causes or Cause if c in self._refusals), "")

    def session_for(self, version: int) -> Session | None:
        """The run that ``version`` belongs to; None if it can belong to none."""
        session = None
        if self.connection is not None:
            if self.version is None:
                # At the first sync only: a loop must not wait for an absent trainer in every step.
                self.connection.wait_first_attempt(self._config.connect_seconds)
            session = self.connection.session
            self.check_trainer()
        known = session.latest_policy_version if session else None
        floor = self.version
        # A version that the trainer knows beyond this bridge's is from an earlier job or another
        # rank. Its newest may be ``version`` itself: of a resumed policy, or from that rank.
        if known is not None and known > (-1 if floor is None else floor) and version != known:
            floor = known
        if floor is not None and version <= floor:
            step = "count the policy's versions up, or choose another run_id"
            error = RefusedError("policy_version", version, f"> {floor}", step)
            self.refuse(Cause.VERSION, error)
            return None
        self.clear(Cause.VERSION)
        return session

    def synced(self, version: int, session: Session | None) -> None:
        """Record a sync that ended well; the policy's matrices were copied for ``session``."""
        self.version = max(version, self.version or 0)
        self.session = session
        self._counters.forgive_refusals()
        self.clear(Cause.TRAINER)

    def check_trainer(self) -> None:
        """Turn capture off if the trainer refuses what is sent, or if the sender thread ended."""
        refusal = self._counters.run_refusal
        count, field = self._counters.refused_in_a_row
        if self.connection is not None and self.connection.died:
            self.refuse(Cause.BRIDGE, thread_ended("to the trainer"))
        elif refusal is not None and not self.connected:
            self.refuse(Cause.TRAINER, refusal)
        elif count >= MAX_REFUSALS_IN_A_ROW:
            error = RefusedError(
                f"samples.{field}",
                f"{count} samples in a row refused for it",
                "samples that the trainer takes",
                "see the trainer's log; the next version is captured again",
            )
            self.refuse(Cause.TRAINER, error)
        elif self.connected:
            self.clear(Cause.TRAINER)

    def off_reason(self) -> str:
        """The reason why a window would capture nothing now; empty if it would capture."""
        refusal = self.refusal(Cause.MODEL, Cause.BRIDGE, Cause.VERSION, Cause.TRAINER)
        if refusal:
            return refusal
        if not self._config.bytes_per_step:
            return "bytes_per_step is 0"
        wanted = self.connection.session if self.connection is not None else None
        run_refusal = self._counters.run_refusal
        if wanted is None and run_refusal is not None:
            return str(run_refusal)
        if self.version is None:
            return "no policy version was synced yet"
        if wanted is None:
            return f"the draft trainer at {self._config.trainer} was not reached"
        if self.session is None or not self.session.same_shape(wanted):
            # Which rows to copy is known from the trainer: this version's were not copied.
            return (
                f"version {self.version} was synced before the draft trainer came, or without "
                "memory to copy its matrices"
            )
        return ""
