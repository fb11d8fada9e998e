"""The trainer's status and its past as messages: put together from all who know a part."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from draft_trainer.feed.session import Run, Runs, Session
from draft_trainer.feed.store import SampleStore
from draft_trainer.releases.canary import Trial
from draft_trainer.releases.promotions import Promotions
from draft_trainer.releases.registry import Registry
from draft_trainer.releases.verdicts import VerdictLog
from draft_trainer.sidecar.acceptance_history import SLOT_SECONDS, AcceptanceHistory
from draft_trainer.sidecar.board import Board, Counts
from draft_trainer.sidecar.events import EventLog
from draft_trainer.sidecar.fleet_view import FleetView
from draft_trainer.sidecar.moments import Moments
from draft_trainer.sidecar.policy_clock import PolicyClock
from slipstream.code_version import code_version
from slipstream.refusal import RefusedError
from slipstream.v1 import console_pb2
from slipstream.v1 import draft_trainer_pb2 as pb

VERDICTS_SHOWN = 100


@dataclass(frozen=True)
class Live:
    """Who knows about the fleet and its releases, beside their counters.

    Args:
        events: what happened.
        fleet: the servers as they were seen last.
        acceptance: what their drafts did.
        registry: manifests.
        verdicts: the gate's.
        trial: the one under way.
    """

    events: EventLog
    fleet: FleetView
    acceptance: AcceptanceHistory
    registry: Registry
    verdicts: VerdictLog
    trial: Callable[[], Trial | None]


class Status:
    """Puts the status together from those who know. Thread-safe.

    Args:
        board: the counters.
        runs: the current run.
        promotions: the promoted release.
        newest_release: the newest release at start; ``released`` moves it on.
        trained_against: newest policy version that it was trained on, if any.
        store: the run's samples.
        live: the fleet and its releases.
    """

    def __init__(
        self,
        board: Board,
        runs: Runs,
        promotions: Promotions,
        newest_release: int,
        trained_against: int | None,
        store: SampleStore,
        live: Live,
    ) -> None:
        self._board = board
        self._runs = runs
        self._promotions = promotions
        self._newest = (newest_release, trained_against)
        self._store = store
        self._live = live
        self._started_at = time.time()
        self._code_version = code_version()
        self._feeder: tuple[str, str] | None = None
        self._against: dict[int, int | None] = {}
        self.moments = Moments(self.moment)
        run = runs.current
        self.policy_clock = PolicyClock(None if run is None else run.latest_policy_version)

    @property
    def events(self) -> EventLog:
        """What happened."""
        return self._live.events

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

    def run_opened(self, session: Session) -> None:
        """A client feeds a run. One that connects again and again is told of once."""
        who = (session.run.run_id, session.client)
        if who != self._feeder:
            self._feeder = who
            self.events.note(
                console_pb2.EVENT_KIND_RUN_OPENED,
                policy_version=session.run.latest_policy_version,
                reason=f"run {who[0]} by {who[1] or 'a client without a name'}",
            )

    def policy_announced(self, run: Run) -> None:
        """A version became known; samples that are too old for it are gone."""
        latest = run.latest_policy_version
        if latest is not None and self.policy_clock.announced(latest):
            self._board.announced()
            self.events.note(console_pb2.EVENT_KIND_POLICY_ANNOUNCED, policy_version=latest)

    def wait_beyond(self, revision: int, timeout: float) -> bool:
        """Block until something changed since ``revision``; False when ``timeout`` s passed."""
        return self._board.wait_beyond(revision, timeout)

    def read(self) -> tuple[pb.TrainerStatus, int]:
        """The status now, and the board's revision that it shows."""
        status, counts = self._read()
        return status, counts.revision

    def _read(self) -> tuple[pb.TrainerStatus, Counts]:
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
            started_at=self._started_at,
            code_version=self._code_version,
            trained_against_policy_version=self.trained_against,
            last_minute=self._live.acceptance.last_minute(),
            trial=_trial(self._live.trial()),
            last_verdict=next(iter(self._live.verdicts.newest(1)), None),
            refused_by_field=counts.refused_by_field,
            evicted_by_reason=counts.evicted_by_reason,
            publishes=counts.publishes,
            verdicts=counts.gate_verdicts,
            training_error=counts.training_error,
        )
        run = self._runs.current
        if run is not None:
            status.run_id = run.run_id
            status.replay_bytes = self._store.nbytes
            status.samples_pending = self._store.pending
            latest = run.latest_policy_version
            if latest is not None:
                status.policy_version = latest
                status.staleness = max(0, latest - (self.releases["promoted"][1] or 0))
        for server in self._live.fleet.messages():
            for drafted in self._live.acceptance.last_minute(server.address):
                if drafted.draft_version == server.state.draft_version:
                    server.last_minute.CopyFrom(drafted)
            status.servers.append(server)
        return status, counts

    def moment(self) -> console_pb2.Moment:
        """The counters that plots are made of, now."""
        status, counts = self._read()
        drafts, accepted = self._live.acceptance.total
        known = status.HasField
        return console_pb2.Moment(
            time=time.time(),
            samples_accepted=status.samples_accepted,
            train_steps=status.train_steps,
            tokens_trained=status.tokens_trained,
            loss_total=counts.loss_total,
            replay_bytes=status.replay_bytes,
            samples_pending=status.samples_pending,
            policy_version=status.policy_version if known("policy_version") else None,
            promoted_release=status.promoted_release,
            staleness=status.staleness if known("staleness") else None,
            drafts=drafts,
            accepted_per_position=accepted,
        )

    def history(self) -> console_pb2.History:
        """What is remembered of the past."""
        recent, whole = self.moments.both()
        return console_pb2.History(
            recent=recent,
            whole=whole,
            acceptance=self._live.acceptance.cells(),
            servers=self._live.acceptance.servers(),
            verdicts=self._live.verdicts.newest(VERDICTS_SHOWN),
            moment_s=self.moments.seconds,
            slot_s=SLOT_SECONDS,
        )

    def _trained_against(self, version: int) -> int | None:
        if version in self._against:
            return self._against[version]
        try:
            manifest = self._live.registry.get(version)
        except RefusedError:
            return None
        known = manifest.HasField("trained_against_policy_version")
        return manifest.trained_against_policy_version if known else None


def _trial(trial: Trial | None) -> console_pb2.TrialView | None:
    if trial is None:
        return None
    return console_pb2.TrialView(
        draft_version=trial.version,
        incumbent_version=trial.incumbent,
        servers=trial.servers,
        others=trial.others,
    )
