"""Prometheus: reads the board and the status at every scrape, so that both always agree.

Which metrics there are says ``metrics_catalogue``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from draft_trainer.feed.rings import Rings
from draft_trainer.releases.canary import Canary
from draft_trainer.sidecar.board import Board, Counts
from draft_trainer.sidecar.metrics_catalogue import CATALOGUE
from draft_trainer.sidecar.status import Status
from slipstream.limits import RefusedCalls
from slipstream.metric_families import Scrape

_ROLL_BACKS = {
    "rolled_back": "commit_failed",
    "canary_rolled_back": "trial",
    "rolled_back_by_hand": "by_hand",
    "interrupted": "interrupted",
}
_TRIALS = {
    "canary_promoted": "promoted",
    "canary_undecided": "undecided",
    "canary_rolled_back": "rolled_back",
}
_PUBLISHES = ("committed", "stage_failed", "not_committed", "policy_only", "policy_failed")


class TrainerCollector(Collector):
    """Everything the trainer counts, as metric families.

    What is not known yet (no policy version, no loss, no verdict) has no series:
    a zero would be a measurement.

    Args:
        board: the counters.
        status: versions and samples.
        rings: of shared memory.
        canary: whether a release is on trial.
        refused: calls.
    """

    def __init__(
        self, board: Board, status: Status, rings: Rings, canary: Canary, refused: RefusedCalls
    ) -> None:
        self._board = board
        self._status = status
        self._rings = rings
        self._canary = canary
        self._refused = refused

    def collect(self) -> Iterator[Metric]:
        """One scrape."""
        counts, scrape = self._board.read(), Scrape(CATALOGUE)
        scrape.build()
        scrape.put("training_failed", bool(counts.training_error))
        for (method, code), count in sorted(self._refused.counts.items()):
            scrape.put("calls_refused", count, method, code)
        _samples(scrape, counts)
        self._feed(scrape)
        _training(scrape, counts)
        self._versions(scrape)
        _gate(scrape, counts)
        _fleet(scrape, counts)
        scrape.put("trial_running", self._canary.trial is not None)
        yield from scrape.families()

    def _feed(self, scrape: Scrape) -> None:
        runs, store = self._status.runs, self._status.store
        rings = self._rings.counts
        # A stream claims its ring after it began and lets go of it before it ends.
        by_grpc = max(0, runs.streams - rings["claimed"])
        scrape.count("streams", {"grpc": by_grpc, "shared_memory": rings["claimed"]})
        scrape.put("sessions", runs.sessions)
        scrape.count("rings", rings)
        scrape.put("ring_capacity_bytes", self._rings.nbytes)
        scrape.put("samples_pending", store.pending)
        scrape.put("samples_held_out", store.held_out_samples)
        scrape.put("samples_unsaved", store.unsaved)
        scrape.put("replay_bytes", store.nbytes)
        scrape.put("replay_capacity_bytes", store.capacity_bytes)
        scrape.put("replay_directory", 1, str(store.folder))

    def _versions(self, scrape: Scrape) -> None:
        status = self._status
        releases = status.releases
        for which, (version, against) in releases.items():
            scrape.put("draft_version", version, which)
            scrape.put("trained_against_policy_version", against, which)
        scrape.put("policy_timestamp_seconds", status.policy_clock.newest_at)
        scrape.put("draft_served_timestamp_seconds", status.served_at)
        run = status.runs.current
        policy = None if run is None else run.latest_policy_version
        if policy is not None:
            against = releases["served"][1] or 0
            scrape.put("policy_version", policy)
            scrape.put("draft_staleness_versions", max(0, policy - against))
            scrape.put("draft_staleness_seconds", status.policy_clock.behind_seconds(against))


def _samples(scrape: Scrape, counts: Counts) -> None:
    outcomes = {
        "accepted": counts.samples_accepted,
        "duplicate": counts.samples_duplicate,
        "refused": counts.samples_refused,
    }
    scrape.count("samples", outcomes)
    scrape.count("samples_refused", counts.refused_by_field)
    scrape.count("received_bytes", counts.received_bytes)
    scrape.observe("acknowledgement_seconds", counts.acknowledgement_seconds)
    scrape.put("policy_announcements", counts.policy_announcements)
    scrape.put("samples_trained", counts.samples_trained)
    scrape.count("samples_evicted", counts.evicted_by_reason)
    scrape.put("samples_recorded", counts.samples_recorded)
    scrape.count("recording_shed", counts.recording_shed)
    scrape.count("access_refused", counts.access_refused)


def _training(scrape: Scrape, counts: Counts) -> None:
    scrape.put("tokens_trained", counts.tokens_trained)
    scrape.put("train_steps", counts.train_steps)
    scrape.put("train_steps_skipped", counts.train_steps_skipped)
    scrape.put("train_seconds", counts.train_seconds)
    scrape.put("loss", counts.loss)
    for step, acceptance in enumerate(counts.step_acceptance):
        scrape.put("expected_acceptance", acceptance, str(step))
    scrape.put("idle", counts.idle)


def _gate(scrape: Scrape, counts: Counts) -> None:
    scrape.count("verdicts", counts.gate_verdicts)
    if counts.gate is not None:
        scrape.put("gate_anchors", counts.gate.anchors)
        scrape.put("gate_acceptance_length", counts.gate.candidate, "candidate")
        scrape.put("gate_acceptance_length", counts.gate.incumbent, "incumbent")
        scrape.put("gate_half_width", counts.gate.half_width)


def _fleet(scrape: Scrape, counts: Counts) -> None:
    events = counts.publishes
    scrape.count("publishes", {event: events[event] for event in _PUBLISHES})
    scrape.count("roll_backs", {reason: events[e] for e, reason in _ROLL_BACKS.items()})
    scrape.count("trials", {outcome: events[e] for e, outcome in _TRIALS.items()})
    scrape.count("heals", counts.heals)
    scrape.count("heals_failed", counts.heals_failed)
    scrape.observe("stage_seconds", counts.stage_seconds)
    scrape.observe("commit_seconds", counts.commit_seconds)
    if counts.servers is not None:
        scrape.count("servers", asdict(counts.servers))
