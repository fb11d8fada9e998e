"""Publishes promoted releases at once, for fleets whose policy is not synced through Slipstream."""

from __future__ import annotations

import logging
import threading

from draft_trainer.releases.publisher import Publisher
from slipstream.refusal import RefusedError

logger = logging.getLogger(__name__)


class AutoPublisher:
    """Owns one thread that publishes when it is told of a release; many at once become one.

    Args:
        publisher: does the work, every part of it with a deadline.
    """

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._due = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="auto-publish", daemon=True)

    def start(self) -> None:
        """Begin. Once only."""
        self._thread.start()

    def released(self, version: int) -> None:
        """A release was written and may have been promoted. Returns at once."""
        self._due.set()

    def stop(self, timeout: float) -> bool:
        """End after the publish under way; True when it ended within ``timeout`` seconds."""
        self._stopping.set()
        self._due.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            self._due.wait()
            if self._stopping.is_set():
                return
            self._due.clear()
            try:
                published = self._publisher.publish_promoted()
            except RefusedError as error:
                logger.warning("the promoted release was not published: %s", error)
                continue
            for address, outcome in published.outcomes.items():
                if outcome.error:
                    logger.warning("%s: %s", address, outcome.error)
