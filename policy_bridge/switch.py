"""Whether capture is on, and why not: bad input costs samples, never the training run.

Strict or not, an error is a ``RefusedError``. Strict raises it to the caller. Otherwise
it is logged once, capture is off, and the reason stands in the statistics until the
cause is gone.
"""

from __future__ import annotations

import logging
import threading
from enum import Enum

from slipstream.refusal import RefusedError

logger = logging.getLogger(__name__)


class Cause(Enum):
    """What a refusal is about, and with it when it is over."""

    MODEL = "model"
    """The policy cannot be captured: never over."""
    VERSION = "version"
    """The policy's version went backwards: over with one that rises."""
    CALL = "call"
    """What a window was told or saw: over with the next window that is sound."""
    BRIDGE = "bridge"
    """The bridge's own thread ended of an error: never over."""
    TRAINER = "trainer"
    """What the trainer answered: over when it takes the run, or with the next version."""


class CaptureSwitch:
    """The refusals that stand. Thread-safe.

    Args:
        strict: raise them.
    """

    def __init__(self, strict: bool) -> None:
        self._strict = strict
        self._lock = threading.Lock()
        self._standing: dict[Cause, str] = {}
        self._logged: set[str] = set()

    def refuse(self, cause: Cause, error: RefusedError) -> None:
        """Turn capture off. Raises ``error`` if strict."""
        text = str(error)
        with self._lock:
            self._standing[cause] = text
            # By field: a shape in the text may differ in every step.
            new = error.field not in self._logged
            self._logged.add(error.field)
        if new:
            logger.error("capture is off: %s", text)
        if self._strict:
            raise error

    def clear(self, cause: Cause) -> None:
        """The cause is gone."""
        with self._lock:
            self._standing.pop(cause, None)

    def reason(self, *causes: Cause) -> str:
        """Why capture is off, the first of ``causes`` (all) that stands; empty if none."""
        with self._lock:
            return next((self._standing[c] for c in causes or Cause if c in self._standing), "")
