"""Asks Prometheus again and again which alerts fire, and remembers when each did first."""

from __future__ import annotations

import threading
import time

import httpx

from examples.local_prometheus import LocalPrometheus

POLL_SECONDS = 0.25
_VARIANT = ("measure", "versions", "seen_by", "given_up_by")


class NotSeenError(AssertionError):
    """An alert did not fire in time."""


def named(labels: dict[str, str]) -> str:
    """An alert's name, and what tells rules of one name apart."""
    variants = [labels[name] for name in _VARIANT if name in labels]
    return " ".join((labels["alertname"], *variants))


class Sightings:
    """Owns one thread. Times are of the monotonic clock.

    Args:
        prometheus: that runs.
    """

    def __init__(self, prometheus: LocalPrometheus) -> None:
        self._prometheus = prometheus
        self._seen: dict[str, list[tuple[float, float]]] = {}
        self._changed = threading.Condition()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sightings", daemon=True)

    def start(self) -> None:
        """Begin. Once only."""
        self._thread.start()

    def stop(self) -> None:
        """End."""
        self._stopping.set()
        self._thread.join(30)

    @property
    def all(self) -> set[str]:
        """Every alert that fired so far."""
        with self._changed:
            return set(self._seen)

    def wait(self, alert: str, since: float, patience: float) -> float:
        """Seconds from ``since`` until the alert fired; at most ``patience`` seconds from now.

        Raises:
            NotSeenError: it did not.
        """

        def first() -> float | None:
            spans = self._seen.get(alert, [])
            return next((begin for begin, end in spans if end >= since), None)

        with self._changed:
            if not self._changed.wait_for(lambda: first() is not None, patience):
                raise NotSeenError(f"{alert} did not fire in {patience:.0f} s")
            found = first()
        assert found is not None
        return max(0.0, found - since)

    def _run(self) -> None:
        while not self._stopping.wait(POLL_SECONDS):
            try:
                alerts = self._prometheus.alerts()
            except httpx.TransportError:
                continue  # crowded machine; the next answer has it too
            now = time.monotonic()
            firing = {named(a["labels"]) for a in alerts if a["state"] == "firing"}
            with self._changed:
                for alert in firing:
                    spans = self._seen.setdefault(alert, [])
                    if spans and now - spans[-1][1] < 4 * POLL_SECONDS:
                        spans[-1] = (spans[-1][0], now)
                    else:
                        spans.append((now, now))
                self._changed.notify_all()
