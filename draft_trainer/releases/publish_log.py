"""What was done to the fleet and why: one JSON object a line beside the releases."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

logger = logging.getLogger(__name__)

FILE_NAME = "publishes.jsonl"
MAX_BYTES = 1 << 20


class PublishLog:
    """Appends; keeps the newest one to two MiB in two files. Thread-safe.

    Args:
        root: the registry's folder.
        on_note: told of every event too, with the arguments of ``note``.
    """

    def __init__(
        self, root: Path, on_note: Callable[[str, int, str], None] = lambda *event: None
    ) -> None:
        self._path = root / FILE_NAME
        self._on_note = on_note
        self._lock = threading.Lock()

    def note(self, event: str, version: int, reason: str) -> None:
        """Write one line, on disk on return.

        A disk that is full does not stop a roll back: the line then goes to the
        process's own log alone, as an error.

        Args:
            event: committed, stage_failed, rolled_back, healed and so on (docs/operations.md).
            version: the release that it is about.
            reason: for people.
        """
        self._on_note(event, version, reason)
        line = {"time": time.time(), "event": event, "draft_version": version, "reason": reason}
        try:
            with self._lock, self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
                if file.tell() >= MAX_BYTES:
                    self._path.replace(self._path.with_suffix(".jsonl.1"))
        except OSError as error:
            logger.error("%s: %s; not written: %s", self._path, error.strerror, line)
