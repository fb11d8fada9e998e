"""Which samples were taken before. The interface is what a durable ledger must also offer."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from typing import Protocol


class Ledger(Protocol):
    """Remembers the samples of every run that were accepted. Thread-safe."""

    def claim(self, run_id: str, sample_id: str) -> bool:
        """Record a sample; False when it was recorded before. Called before it is acknowledged."""

    def withdraw(self, run_id: str, sample_id: str) -> None:
        """Undo a claim of a sample that was not taken after all."""

    def knows(self, run_id: str, sample_id: str) -> bool:
        """Whether a sample is recorded."""


class MemoryLedger:
    """The last ``entries`` accepted samples, by a 16-byte digest of run and sample id.

    About 200 bytes an entry. A sample that is sent again after that many others,
    or after a restart, is not recognised.
    """

    def __init__(self, entries: int) -> None:
        self._entries = entries
        self._known: OrderedDict[bytes, None] = OrderedDict()
        self._lock = threading.Lock()

    def claim(self, run_id: str, sample_id: str) -> bool:
        """See ``Ledger``. Forgets the oldest entry when full."""
        key = _key(run_id, sample_id)
        with self._lock:
            if key in self._known:
                return False
            self._known[key] = None
            if len(self._known) > self._entries:
                self._known.popitem(last=False)
            return True

    def withdraw(self, run_id: str, sample_id: str) -> None:
        """See ``Ledger``."""
        with self._lock:
            self._known.pop(_key(run_id, sample_id), None)

    def knows(self, run_id: str, sample_id: str) -> bool:
        """See ``Ledger``."""
        with self._lock:
            return _key(run_id, sample_id) in self._known


def _key(run_id: str, sample_id: str) -> bytes:
    # The length keeps ("a", "bc") and ("ab", "c") apart.
    text = f"{len(run_id)}:{run_id}{sample_id}"
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
