"""Samples between arrival and training: bounded in bytes, newest first, a share held out."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable
from dataclasses import dataclass

from draft_trainer.feed.sample import Sample, is_held_out
from slipstream.refusal import RefusedError, StatusCode


@dataclass
class _Entry:
    sample: Sample
    arrival: int
    held_out: bool
    times_drawn: int = 0


class ReplayBuffer:
    """Holds samples for training and for the gate. Thread-safe.

    Whether a sample is held out follows from its prompt alone (``Sample.group``), so a restart, a
    second trainer or a replayed stream never moves a sample from the held-out share into training,
    and a candidate is never judged on prompts whose other completions it was trained on: by
    sample, the gate saw gains of 0.4 in acceptance length that live rollouts did not have.

    Args:
        capacity_bytes: bound on the bytes of all samples held, held-out ones included.
        held_out_fraction: share of prompts that never train, in [0, 1).
        max_epochs: how often one sample is drawn at most; at least 1. A sample leaves the buffer
            when it has been drawn that often.
    """

    def __init__(self, capacity_bytes: int, held_out_fraction: float, max_epochs: int = 2) -> None:
        if capacity_bytes < 1:
            raise RefusedError("capacity_bytes", capacity_bytes, "at least 1", "raise it")
        if not 0.0 <= held_out_fraction < 1.0:
            raise RefusedError("held_out_fraction", held_out_fraction, "in [0, 1)", "lower it")
        if max_epochs < 1:
            raise RefusedError("max_epochs", max_epochs, "at least 1", "raise it")
        self.capacity_bytes = capacity_bytes
        self._held_out_fraction = held_out_fraction
        self._max_epochs = max_epochs
        self._lock = threading.Lock()
        self._entries: dict[str, _Entry] = {}
        self._arrivals = 0
        self._nbytes = 0
        self._evicted_untrained = 0

    def add(self, sample: Sample) -> None:
        """Take a sample, evicting what is oldest by policy version while over the bound.

        Raises:
            RefusedError: larger than the whole buffer, or its id is in the buffer.
        """
        size = sample.nbytes
        if size > self.capacity_bytes:
            raise RefusedError(
                f"sample {sample.sample_id!r}",
                f"{size} bytes",
                f"at most {self.capacity_bytes} bytes (the replay buffer)",
                "send shorter windows, or raise the replay buffer's capacity",
                StatusCode.RESOURCE_EXHAUSTED,
            )
        with self._lock:
            if sample.sample_id in self._entries:
                raise RefusedError(
                    "sample_id",
                    sample.sample_id,
                    "an id that is not in the replay buffer",
                    "give every sample an id of its own",
                    StatusCode.ALREADY_EXISTS,
                )
            held_out = self.is_held_out(sample.group)
            self._entries[sample.sample_id] = _Entry(sample, self._arrivals, held_out)
            self._arrivals += 1
            self._nbytes += size
            while self._nbytes > self.capacity_bytes:
                # Oldest version first; within a version what has been trained on goes first.
                victim = min(
                    self._entries.values(),
                    key=lambda e: (e.sample.policy_version, -e.times_drawn, e.arrival),
                )
                self._evict(victim)

    def draw(self, max_tokens: int, rng: random.Random) -> list[Sample]:
        """Samples to train on now, about ``max_tokens`` of them; each counts as trained once.

        The preference is for new policy versions and little-trained samples: one version of age
        weighs as much as one epoch; ties are broken by ``rng``.

        Args:
            max_tokens: bound on the sum of the samples' tokens. A first sample is returned even
                where it alone exceeds the bound.
            rng: breaks ties.

        Returns:
            Empty when nothing is left to train on.
        """
        with self._lock:
            entries = [e for e in self._entries.values() if not e.held_out]
            newest = max((e.sample.policy_version for e in entries), default=0)
            order = sorted(
                (newest - e.sample.policy_version + e.times_drawn, rng.random(), e.arrival)
                for e in entries
            )
            by_arrival = {e.arrival: e for e in entries}
            drawn: list[Sample] = []
            tokens = 0
            for _, _, arrival in order:
                entry = by_arrival[arrival]
                size = entry.sample.num_tokens
                if drawn and tokens + size > max_tokens:
                    break
                drawn.append(entry.sample)
                tokens += size
                entry.times_drawn += 1
                if entry.times_drawn >= self._max_epochs:
                    self._remove(entry)
            return drawn

    def held_out(self, newest_versions: int | None = None) -> list[Sample]:
        """Held-out samples, oldest arrival first.

        Args:
            newest_versions: only those of this many newest policy versions that have a held-out
                sample; None for all.
        """
        with self._lock:
            entries = [e for e in self._entries.values() if e.held_out]
        if newest_versions is not None:
            versions = sorted({e.sample.policy_version for e in entries})
            kept = set(versions[max(len(versions) - newest_versions, 0) :])
            entries = [e for e in entries if e.sample.policy_version in kept]
        return [e.sample for e in sorted(entries, key=lambda e: e.arrival)]

    def discard_versions(self, versions: Iterable[int]) -> None:
        """Drop samples of policy versions whose matrices are gone; counted as evictions."""
        gone = set(versions)
        with self._lock:
            for entry in [e for e in self._entries.values() if e.sample.policy_version in gone]:
                self._evict(entry)

    def is_held_out(self, group: str) -> bool:
        """Whether samples of this group are held out of training."""
        return is_held_out(group, self._held_out_fraction)

    @property
    def pending(self) -> int:
        """Training samples that were never drawn."""
        with self._lock:
            return sum(not e.held_out and e.times_drawn == 0 for e in self._entries.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all samples held."""
        with self._lock:
            return self._nbytes

    @property
    def evicted_untrained(self) -> int:
        """Training samples dropped without ever being drawn, since the start."""
        with self._lock:
            return self._evicted_untrained

    def __len__(self) -> int:
        with self._lock:
            return len(self._entries)

    def _evict(self, entry: _Entry) -> None:
        self._remove(entry)
        if not entry.held_out and entry.times_drawn == 0:
            self._evicted_untrained += 1

    def _remove(self, entry: _Entry) -> None:
        del self._entries[entry.sample.sample_id]
        self._nbytes -= entry.sample.nbytes
