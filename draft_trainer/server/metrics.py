"""Prometheus: reads the counters and the status at every scrape, so that both always agree.

Which metrics there are says ``metrics_catalogue``.

Every metric of the draft trainer. ``metrics`` fills them; docs/metrics.md is made from them.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from draft_trainer.counters import Counters
from draft_trainer.ingest.rings import Rings
from draft_trainer.releases.canary import Canary
from draft_trainer.server.status import Status
from slipstream.metrics import (
    Catalogue,
    Group,
    Label,
    Scrape,
    build_info,
    counter,
    gauge,
    histogram,
)
from slipstream.security import REASONS
from slipstream.serving import RefusedCalls

TRANSPORT = Label("transport", ("grpc", "shared_memory"))
WHICH = Label("which", ("newest", "promoted", "served"))
HEAL_REASON = Label("reason", ("other_version", "other_content", "not_ready"))
_GATED = "before the first verdict"
_STEPPED = "before the first step"
_ANNOUNCED = "before the first policy version"

PROCESS = Group(
    "Process",
    (
        build_info(),
        counter(
            "calls_refused",
            "Calls that ended with an error.",
            Label("method", text="of the service"),
            Label("code", text="the gRPC status"),
        ),
        counter(
            "access_refused",
            "Calls by those who had no right to them.",
            Label("reason", REASONS),
        ),
        gauge("training_failed", "1 once the training thread ended with an error."),
    ),
)

FEED = Group(
    "Feed",
    (
        counter(
            "samples",
            "Samples that arrived, by fate.",
            Label("outcome", ("accepted", "duplicate", "refused")),
        ),
        counter(
            "samples_refused",
            "Refused samples, by field.",
            Label("field", text="of VerifierStates, or of what there was no room in"),
        ),
        counter("received_bytes", "Bytes that arrived in streams of samples.", TRANSPORT),
        histogram(
            "acknowledgement_seconds",
            "Seconds from a sample's arrival to its acknowledgement, which follows its recording.",
        ),
        gauge("streams", "Open streams of samples.", TRANSPORT),
        gauge("sessions", "Open sessions of the current run."),
        gauge("rings", "Rings of shared memory.", Label("state", ("offered", "claimed"))),
        gauge("ring_capacity_bytes", "Memory of these rings."),
        counter("policy_announcements", "Policy versions that were announced."),
        counter("samples_trained", "Samples trained on, once per epoch."),
        counter(
            "samples_evicted",
            "Samples given up: `capacity` to make room, untrained; `stale` for a policy version "
            "too old, untrained; `unsaved` to make room, trained on but not in a training state "
            "yet; `undone` of those whose training was lost with a kill.",
            Label("reason", ("capacity", "stale", "unsaved", "undone")),
        ),
        gauge("samples_pending", "Samples accepted, not trained on yet."),
        gauge("samples_held_out", "Samples that never train and feed the gate."),
        gauge(
            "samples_unsaved",
            "Samples trained on for the last time, kept until a training state has that.",
        ),
        gauge("replay_bytes", "Bytes in the replay buffer."),
        gauge("replay_capacity_bytes", "Bound of the replay buffer."),
        gauge(
            "replay_directory",
            "1; the label says where the samples are kept.",
            Label("directory", text="a path"),
        ),
        counter("samples_recorded", "Samples written to disk (`recording.directory`)."),
        counter(
            "recording_shed",
            "Samples not written to disk, by reason.",
            Label("reason", ("queue_full", "busy", "capacity", "policy_forgotten", "write_failed")),
        ),
    ),
)

TRAINING = Group(
    "Training",
    (
        counter("tokens_trained", "Step-0 anchors trained on."),
        counter("train_steps", "Optimizer steps."),
        counter("train_steps_skipped", "Steps skipped: not finite or no anchor."),
        counter("train_seconds", "Time in training steps."),
        gauge("loss", "Training loss of the last step.", absent=_STEPPED),
        gauge(
            "expected_acceptance",
            "Expected acceptance in [0, 1] at each TTT step of the last training step.",
            Label("step", text="0-based"),
            absent=_STEPPED,
        ),
        gauge("idle", "1 while there is nothing to train on."),
    ),
)

VERSIONS = Group(
    "Versions and staleness",
    (
        gauge(
            "draft_version",
            "Draft version: the newest release, the promoted one, and the last that the whole "
            "fleet served.",
            WHICH,
        ),
        gauge(
            "trained_against_policy_version",
            "Newest policy version that these releases were trained on.",
            WHICH,
            absent="for a release that was trained on none, or whose manifest cannot be read",
        ),
        gauge("policy_version", "Newest policy version known.", absent=_ANNOUNCED),
        gauge(
            "policy_timestamp_seconds",
            "Unix time at which the newest policy version was announced to this process.",
            absent="until one is, also after a restart",
        ),
        gauge(
            "draft_served_timestamp_seconds",
            "Unix time at which the fleet was put on the release that it serves.",
            absent="until this process has done so",
        ),
        gauge(
            "draft_staleness_versions",
            "Policy versions that the served release is behind the newest one; a release that was "
            "trained on none counts as trained on version 0.",
            absent=_ANNOUNCED,
        ),
        gauge(
            "draft_staleness_seconds",
            "Time since the policy moved past what the served release was trained on; 0 while it "
            "has not. Counted from this process's start at the earliest.",
            absent=_ANNOUNCED,
        ),
    ),
)

GATE = Group(
    "Gate",
    (
        counter(
            "verdicts",
            "Gate verdicts.",
            Label("verdict", ("passed", "failed", "not_measured", "write_failed")),
        ),
        gauge(
            "gate_acceptance_length",
            "Expected acceptance length on held-out states at the last verdict; an estimate, not "
            "what is served.",
            Label("which", ("candidate", "incumbent")),
            absent=f"{_GATED}, or where that measured nothing",
        ),
        gauge(
            "gate_half_width",
            "Half width of the paired difference's interval.",
            absent=f"{_GATED}, or where that measured nothing",
        ),
        gauge("gate_anchors", "Held-out anchors of the last verdict.", absent=_GATED),
    ),
)

FLEET = Group(
    "Fleet",
    (
        gauge(
            "servers",
            "Rollout servers at the last look: `known` ones, `reachable` of them, `ready` of "
            "these, and `current`: reachable ones on the release that they should serve.",
            Label("state", ("known", "reachable", "ready", "current")),
            absent="before the first look",
        ),
        counter(
            "publishes",
            "Publishes, by how they ended: `committed` everywhere; `stage_failed` or "
            "`not_committed`, so that nothing changed; `policy_only` and `policy_failed` for a "
            "policy without a draft. Those that were undone are roll backs.",
            Label(
                "outcome",
                ("committed", "stage_failed", "not_committed", "policy_only", "policy_failed"),
            ),
        ),
        counter(
            "roll_backs",
            "Releases taken back: `commit_failed` where a server did not take it, `trial` where "
            "live acceptance fell, `by_hand`, and `interrupted` where the trainer ended between "
            "commits.",
            Label("reason", ("commit_failed", "trial", "by_hand", "interrupted")),
        ),
        counter(
            "trials",
            "Trials of releases, by how they ended.",
            Label("outcome", ("promoted", "undecided", "rolled_back")),
        ),
        gauge("trial_running", "1 while a release is on trial."),
        counter(
            "heals",
            "Servers put on the release that they should serve, by what was wrong: another draft "
            "version, other content under the same number, or a server that said that it is not "
            "ready.",
            HEAL_REASON,
        ),
        counter("heals_failed", "Attempts at that which failed; they are repeated.", HEAL_REASON),
        histogram("stage_seconds", "Seconds to stage on one server."),
        histogram("commit_seconds", "Seconds from commit to answer on one server."),
    ),
)

CATALOGUE = Catalogue(
    "Draft trainer",
    "slipstream_trainer_",
    "`server.metrics_port` of the trainer, 9464 unless configured otherwise; with `process_*` of "
    "the Prometheus client",
    (PROCESS, FEED, TRAINING, VERSIONS, GATE, FLEET),
)


class TrainerCollector(Collector):
    """Everything the trainer counts, as metric families.

    What is not known yet (no policy version, no loss, no verdict) has no series:
    a zero would be a measurement.

    Args:
        counters: of this process.
        status: versions and samples.
        rings: of shared memory.
        canary: whether a release is on trial.
        refused: calls.
    """

    def __init__(
        self,
        counters: Counters,
        status: Status,
        rings: Rings,
        canary: Canary,
        refused: RefusedCalls,
    ) -> None:
        self._counters = counters
        self._status = status
        self._rings = rings
        self._canary = canary
        self._refused = refused

    def collect(self) -> Iterator[Metric]:
        """One scrape."""
        counters, scrape = self._counters, Scrape(CATALOGUE)
        scrape.build()
        scrape.put("training_failed", bool(counters.training_error))
        for (method, code), count in sorted(self._refused.counts.items()):
            scrape.put("calls_refused", count, method, code)
        self._feed(scrape)
        scrape.put("loss", counters.loss)
        for step, acceptance in enumerate(counters.step_acceptance):
            scrape.put("expected_acceptance", acceptance, str(step))
        scrape.put("idle", counters.idle)
        self._versions(scrape)
        self._gate(scrape)
        scrape.put("trial_running", self._canary.trial is not None)
        counted = list(counters.registry.collect())
        names = {family.name for family in counted}
        yield from counted
        yield from (family for family in scrape.families() if family.name not in names)

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

    def _gate(self, scrape: Scrape) -> None:
        verdict = self._status.last_verdict
        if verdict is None:
            return
        scrape.put("gate_anchors", verdict.gate.anchors)
        if verdict.HasField("gate"):
            figures = verdict.gate
            scrape.put("gate_acceptance_length", figures.candidate_acceptance_length, "candidate")
            scrape.put("gate_acceptance_length", figures.incumbent_acceptance_length, "incumbent")
            scrape.put("gate_half_width", figures.difference_half_width)
