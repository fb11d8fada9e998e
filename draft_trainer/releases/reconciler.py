"""The thread that keeps the fleet as it should be: judges trials, heals servers.

Publishes promoted releases at once, for fleets whose policy is not synced through Slipstream.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from draft_trainer.releases.canary import AcceptanceWatch, Canary
from draft_trainer.releases.publisher import Publisher
from slipstream.errors import RefusedError

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
"""Between two looks at who belongs to the fleet, where nobody is healed."""


class Reconciler:
    """Owns one thread and the watch's.

    Args:
        publisher: does the work, every part of it with a deadline.
        canary: asked whether a trial is under way.
        watch: live acceptance; follows the fleet's membership from here.
        seconds: between two rounds of healing; 0 for none.
        on_settled: called when a trial ended.
    """

    def __init__(
        self,
        publisher: Publisher,
        canary: Canary,
        watch: AcceptanceWatch,
        seconds: float,
        on_settled: Callable[[], None],
    ) -> None:
        self._publisher = publisher
        self._canary = canary
        self._watch = watch
        self._seconds = seconds
        self._on_settled = on_settled
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reconciler", daemon=True)

    def start(self) -> None:
        """Begin. Once only."""
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """End after the step under way; True when all threads ended within ``timeout`` seconds.

        The watch's threads end with their streams, for which the fleet is closed after this.
        """
        self._stopping.set()
        self._canary.begun.set()
        self._watch.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        revision, due = 0, time.monotonic()
        while not self._stopping.is_set():
            try:
                if time.monotonic() >= due:
                    self._watch.follow(self._publisher.addresses)
                    if self._seconds:
                        self._publisher.heal()
                    else:
                        self._watch.look()
                    due = time.monotonic() + (self._seconds or LOOK_SECONDS)
                if self._publisher.settle():
                    self._on_settled()
            except RefusedError as error:
                logger.warning("%s", error)
                self._stopping.wait(self._seconds or LOOK_SECONDS)
            left = max(0.0, due - time.monotonic())
            if self._canary.begun.wait(left):
                left = max(0.0, due - time.monotonic())
                revision = self._watch.wait_beyond(revision, left)


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
