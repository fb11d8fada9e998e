"""The trainer's counters: prometheus_client metrics, incremented where the event happens.

``server.status`` puts them into ``TrainerStatus``; ``/metrics`` serves their registry.
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram

from slipstream.metrics import unit_of
from slipstream.v1 import release_pb2

SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
ACKNOWLEDGEMENT_BUCKETS = (0.0005, 0.001, 0.0025, *SECONDS_BUCKETS[:-2])

MASS_BUCKETS = (0.25, 0.5, 0.8, 0.9, 0.95, 0.98, 1.02, 1.05, 1.1, 1.25, 2.0)

PREFIX = "slipstream_trainer_"

_FLEET_EVENTS = {
    "committed": ("publishes", "committed"),
    "stage_failed": ("publishes", "stage_failed"),
    "not_committed": ("publishes", "not_committed"),
    "policy_only": ("publishes", "policy_only"),
    "policy_failed": ("publishes", "policy_failed"),
    "rolled_back": ("roll_backs", "commit_failed"),
    "rolled_back_by_hand": ("roll_backs", "by_hand"),
    "interrupted": ("roll_backs", "interrupted"),
    "trial_passed": ("trials", "promoted"),
    "trial_undecided": ("trials", "undecided"),
    "trial_rolled_back": ("trials", "rolled_back"),
}
"""Events of a publish, each with the counter that counts it and its label."""


class Counters:
    """The trainer's counters, prometheus_client metrics on a registry of their own.

    A counter whose label values are known beforehand has a series for each from the start on:
    ``increase`` does not see the first event of a series that appears with it.

    Attributes:
        registry: holds every metric here, for ``/metrics``.
        loss: training loss of the last step; None before it.
        step_acceptance: expected acceptance at each TTT step of the last step, each in [0, 1].
        idle: whether no step is made: there is nothing to train on, or training is paused.
        training_error: why the training thread ended, or what it waits for; empty while it runs.
        training_waits_for: the reason of the refusal that it waits out, if it does.
        servers: rollout servers when they were last asked: "known" ones, "reachable" of them, of
            these "ready" ones and "current" ones, which serve the release that they should.
        newest_release: draft version of the newest release.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.loss: float | None = None
        self.step_acceptance: tuple[float, ...] = ()
        self.idle = True
        self.training_error = ""
        self.training_waits_for = release_pb2.REFUSAL_REASON_UNSPECIFIED
        self.servers: dict[str, int] = {}
        self.newest_release = 0

        self.samples = self._counter(
            "samples",
            "Samples that arrived, by outcome.",
            "outcome",
            ("accepted", "duplicate", "refused"),
        )
        self.samples_refused = self._counter(
            "samples_refused",
            "Refused samples: by field of VerifierStates, by the resource that was full, or "
            "`teacher`: their logits and log-probabilities are not those of the announced lm_head.",
            "field",
            ("teacher",),
        )
        self.teacher_mass = self._histogram(
            "teacher_mass_ratio",
            "Mass of a sample's teacher, exp(h W / T - log Z) summed over the `whole` vocabulary, "
            "where it must be 1, or over the `draft` vocabulary, where it is at most 1; refused "
            "samples included. More than 10 counts as 10; what is not a number is left out.",
            MASS_BUCKETS,
            "vocabulary",
            ("whole", "draft"),
        )
        self.received_bytes = self._counter(
            "received_bytes",
            "Bytes that arrived in streams of samples.",
            "transport",
            ("grpc", "shared_memory"),
        )
        self.acknowledgement_seconds = self._histogram(
            "acknowledgement_seconds",
            "Seconds from a sample's arrival to its acknowledgement, after which no kill loses it.",
            ACKNOWLEDGEMENT_BUCKETS,
        )
        self.policy_announcements = self._counter(
            "policy_announcements", "Policy versions that were registered."
        )
        self.samples_trained = self._counter(
            "samples_trained", "Samples trained on, once per epoch."
        )
        self.samples_evicted = self._counter(
            "samples_evicted",
            "Samples evicted: `capacity` to free space, untrained; `stale` for a policy version "
            "too old, untrained; `unneeded` for either of these while training is paused; "
            "`unsaved` to free space, trained on but not in a training state yet; `undone`, "
            "trained on, but that training was lost in a kill; `damaged` because bytes or row of "
            "the sample are not what was accepted.",
            "reason",
            ("capacity", "stale", "unneeded", "unsaved", "undone", "damaged"),
        )

        self.tokens_trained = self._counter("tokens_trained", "Step-0 anchors trained on.")
        self.tokens_outside = self._counter(
            "tokens_outside",
            "Of the anchors trained on, those whose next token the policy is expected to sample "
            "outside the draft vocabulary.",
        )
        self.train_steps = self._counter("train_steps", "Optimizer steps.")
        self.train_steps_skipped = self._counter(
            "train_steps_skipped", "Steps skipped: not finite or no anchor."
        )
        self.training_waits = self._counter(
            "training_waits", "Times that training waited because samples.db could not be written."
        )
        self.device_memory = self._counter(
            "out_of_memory",
            "Times that the training device had too little memory. It is tried again in passes of "
            "half the tokens; then a `step` waits, and the `gate` passes nothing.",
            "where",
            ("step", "gate"),
        )
        self.train_seconds = self._counter("train_seconds", "Time in training steps.")

        self.verdicts = self._counter(
            "verdicts",
            "Gate results.",
            "verdict",
            ("passed", "failed", "not_measured", "write_failed"),
        )
        self.publishes = self._counter(
            "publishes",
            "Publishes, by how they ended: `committed` everywhere; `stage_failed` or "
            "`not_committed`, so that nothing changed; `policy_only` and `policy_failed` for a "
            "policy without a draft. Those that were undone are roll backs.",
            "outcome",
            ("committed", "stage_failed", "not_committed", "policy_only", "policy_failed"),
        )
        self.roll_backs = self._counter(
            "roll_backs",
            "Releases rolled back: `commit_failed`, a server did not commit it, or it could not be "
            "recorded; `trial`, live acceptance was worse; `by_hand`; `interrupted`, the trainer "
            "ended between commits.",
            "reason",
            ("commit_failed", "trial", "by_hand", "interrupted"),
        )
        self.trials = self._counter(
            "trials",
            "Trials of releases, by how they ended.",
            "outcome",
            ("promoted", "undecided", "rolled_back"),
        )
        self.heals = self._counter(
            "heals",
            "Servers put on the release that they should serve, by what was wrong: another draft "
            "version, other content under the same number, or a server that reports that it is not "
            "ready.",
            "reason",
            ("other_version", "other_content", "not_ready"),
        )
        self.heals_failed = self._counter(
            "heals_failed",
            "Failed attempts to put a server on its release; they are repeated.",
            "reason",
            ("other_version", "other_content", "not_ready"),
        )
        self.staged_bytes = self._counter(
            "staged_bytes",
            "Bytes of releases that were sent to rollout servers which hold them since.",
        )
        self.stage_seconds = self._histogram(
            "stage_seconds", "Seconds to stage on one server.", SECONDS_BUCKETS
        )
        self.commit_seconds = self._histogram(
            "commit_seconds", "Seconds from commit to answer on one server.", SECONDS_BUCKETS
        )

    def refused(self, field: str) -> None:
        """Count a sample that was refused for ``field`` (one of the fixed names of ``ingest``)."""
        self.samples.labels("refused").inc()
        self.samples_refused.labels(field).inc()

    def trained(
        self,
        *,
        samples: int,
        tokens: int,
        tokens_outside: float,
        seconds: float,
        skipped: bool,
        loss: float | None,
        step_acceptance: Sequence[float],
    ) -> None:
        """Count an optimizer step, or one that was skipped for a non-finite loss or gradient."""
        self.train_seconds.inc(seconds)
        if skipped:
            self.train_steps_skipped.inc()
            return
        self.samples_trained.inc(samples)
        self.train_steps.inc()
        self.tokens_trained.inc(tokens)
        # A full vocabulary's probabilities may sum to a little more than 1.
        self.tokens_outside.inc(max(tokens_outside, 0.0))
        self.loss, self.step_acceptance = loss, tuple(step_acceptance)

    def published(self, event: str) -> None:
        """Count what was done to the fleet: a publish event, policy_only or policy_failed."""
        name, label = _FLEET_EVENTS[event]
        counter: Counter = getattr(self, name)
        counter.labels(label).inc()
        if event == "trial_rolled_back":
            self.roll_backs.labels("trial").inc()

    def training_waits_on(self, error: str, reason: release_pb2.RefusalReason) -> None:
        """Note the refusal that training waits out."""
        self.training_error, self.training_waits_for = f"training waits: {error}", reason

    def training_goes_on(self) -> None:
        """Note that training waits for nothing."""
        self.training_error = ""
        self.training_waits_for = release_pb2.REFUSAL_REASON_UNSPECIFIED

    def healed(self, reason: str, done: bool) -> None:
        """Count a server that was put on the release it should serve, or a failed attempt."""
        (self.heals if done else self.heals_failed).labels(reason).inc()

    def released(self, version: int) -> None:
        """Note that a release was written."""
        self.newest_release = version

    def _counter(
        self, name: str, text: str, label: str = "", values: Sequence[str] = ()
    ) -> Counter:
        labels = (label,) if label else ()
        counter = Counter(PREFIX + name, text, labels, unit=unit_of(name), registry=self.registry)
        for value in values:
            counter.labels(value)
        return counter

    def _histogram(
        self,
        name: str,
        text: str,
        buckets: Sequence[float],
        label: str = "",
        values: Sequence[str] = (),
    ) -> Histogram:
        labels = (label,) if label else ()
        made = Histogram(
            PREFIX + name,
            text,
            labels,
            unit=unit_of(name),
            registry=self.registry,
            buckets=buckets,
        )
        for value in values:
            made.labels(value)
        return made


def by_label(metric: Counter) -> dict[str, int]:
    """Return a metric's values by the value of its only label; those at 0 are absent."""
    return {
        next(iter(sample.labels.values())): int(sample.value)
        for sample in metric.collect()[0].samples  # type: ignore[index]
        if sample.value and not sample.name.endswith("_created")
    }


def total(metric: Counter) -> float:
    """Return the value of a metric without labels."""
    return metric.collect()[0].samples[0].value  # type: ignore[index,no-any-return]
