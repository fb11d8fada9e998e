"""The trainer's status message: counters of the board, versions of the registry and the run."""

from __future__ import annotations

from draft_trainer.feed.session import Run, Runs
from draft_trainer.feed.store import SampleStore
from draft_trainer.releases.promotions import Promotions
from draft_trainer.releases.registry import Registry
from draft_trainer.sidecar.board import Board
from draft_trainer.sidecar.policy_clock import PolicyClock
from slipstream.refusal import RefusedError
from slipstream.v1 import draft_trainer_pb2 as pb


class Status:
    """Puts the status together from those who know. Thread-safe.

    Args:
        board: the counters.
        runs: the current run.
        promotions: the promoted release.
        newest_release: the newest release at start; ``released`` moves it on.
        trained_against: newest policy version that it was trained on, if any.
        store: the run's samples.
        registry: the releases.
    """

    def __init__(
        self,
        board: Board,
        runs: Runs,
        promotions: Promotions,
        newest_release: int,
        trained_against: int | None,
        store: SampleStore,
        registry: Registry,
    ) -> None:
        self._board = board
        self._runs = runs
        self._promotions = promotions
        self._newest = (newest_release, trained_against)
        self._store = store
        self._registry = registry
        self._against: dict[int, int | None] = {}
        run = runs.current
        self.policy_clock = PolicyClock(None if run is None else run.latest_policy_version)

    @property
    def newest_release(self) -> int:
        """The newest release."""
        return self._newest[0]

    @property
    def trained_against(self) -> int | None:
        """Newest policy version that the newest release was trained on; None if none."""
        return self._newest[1]

    @property
    def releases(self) -> dict[str, tuple[int, int | None]]:
        """The newest, the promoted and the last good release, each with the newest policy version
        that it was trained on; None for none, or where its manifest cannot be read."""
        now = self._promotions.now
        versions = {"newest": self._newest[0], "promoted": now.promoted, "served": now.last_good}
        known = dict([self._newest])
        for version in set(versions.values()) - {self._newest[0]}:
            known[version] = self._trained_against(version)
        self._against = known
        return {which: (version, known[version]) for which, version in versions.items()}

    @property
    def served_at(self) -> float | None:
        """See ``Promotions.served_at``."""
        return self._promotions.served_at

    @property
    def runs(self) -> Runs:
        """The current run, its sessions and streams."""
        return self._runs

    @property
    def store(self) -> SampleStore:
        """The run's samples."""
        return self._store

    def released(self, version: int, trained_against: int | None) -> None:
        """A release was written."""
        self._newest = (version, trained_against)
        self._board.touch()

    def policy_announced(self, run: Run) -> None:
        """A version became known; samples that are too old for it are gone."""
        latest = run.latest_policy_version
        if latest is not None and self.policy_clock.announced(latest):
            self._board.announced()

    def wait_beyond(self, revision: int, timeout: float) -> bool:
        """Block until something changed since ``revision``; False when ``timeout`` s passed."""
        return self._board.wait_beyond(revision, timeout)

    def read(self) -> tuple[pb.TrainerStatus, int]:
        """The status now, and the board's revision that it shows."""
        counts = self._board.read()
        promotion = self._promotions.now
        status = pb.TrainerStatus(
            samples_accepted=counts.samples_accepted,
            samples_duplicate=counts.samples_duplicate,
            samples_refused=counts.samples_refused,
            samples_evicted=counts.samples_evicted,
            replay_capacity_bytes=self._store.capacity_bytes,
            train_steps=counts.train_steps,
            train_steps_skipped=counts.train_steps_skipped,
            tokens_trained=counts.tokens_trained,
            train_seconds=counts.train_seconds,
            newest_release=self.newest_release,
            promoted_release=promotion.promoted,
            pinned=promotion.pinned,
            loss=counts.loss,
            step_acceptance=counts.step_acceptance,
            last_gate=counts.gate.text if counts.gate is not None else "",
            idle=counts.idle,
        )
        run = self._runs.current
        if run is not None:
            status.replay_bytes = self._store.nbytes
            status.samples_pending = self._store.pending
            latest = run.latest_policy_version
            if latest is not None:
                status.policy_version = latest
        return status, counts.revision

    def _trained_against(self, version: int) -> int | None:
        if version in self._against:
            return self._against[version]
        try:
            manifest = self._registry.get(version)
        except RefusedError:
            return None
        known = manifest.HasField("trained_against_policy_version")
        return manifest.trained_against_policy_version if known else None
