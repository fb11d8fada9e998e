"""Prometheus: reads the board and the status at every scrape, so that both always agree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from draft_trainer.sidecar.board import SECONDS_BUCKETS, Board, Counts, Durations
from draft_trainer.sidecar.http_server import HttpServer
from draft_trainer.sidecar.status import Status
from slipstream.access import Access
from slipstream.v1 import draft_trainer_pb2 as pb

PREFIX = "slipstream_trainer_"


class TrainerCollector(Collector):
    """Everything the trainer counts, as metric families.

    What is not known yet (no policy version, no loss, no verdict) has no series:
    a zero would be a measurement.
    """

    def __init__(self, board: Board, status: Status) -> None:
        self._board = board
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """One scrape."""
        counts = self._board.read()
        status, _ = self._status.read()
        yield from _counters(counts)
        yield from self._versions(status)
        yield _gauge("replay_bytes", "Bytes in the replay buffer.", status.replay_bytes)
        yield _gauge(
            "replay_capacity_bytes", "Bound of the replay buffer.", status.replay_capacity_bytes
        )
        yield _gauge(
            "samples_pending", "Samples accepted, not trained on yet.", status.samples_pending
        )
        yield _gauge(
            "samples_unsaved",
            "Samples trained on for the last time, kept until a training state has that.",
            self._status.samples_unsaved,
        )
        yield _labelled(
            "replay_directory",
            "1; the label says where the samples are kept.",
            "directory",
            [(self._status.samples_folder, 1)],
        )
        yield _gauge("idle", "1 while there is nothing to train on.", counts.idle)
        yield from _training(counts)
        yield from _gate(counts)
        yield _histogram("stage_seconds", "Seconds to stage on one server.", counts.stage_seconds)
        yield _histogram(
            "commit_seconds", "Seconds from commit to answer on one server.", counts.commit_seconds
        )

    def _versions(self, status: pb.TrainerStatus) -> Iterator[Metric]:
        yield _labelled(
            "draft_version",
            "Draft version: newest release, and the promoted one.",
            "which",
            [("newest", status.newest_release), ("promoted", status.promoted_release)],
        )
        if status.HasField("policy_version"):
            yield _gauge("policy_version", "Newest policy version known.", status.policy_version)
        against = self._status.trained_against
        if against is not None:
            yield _gauge(
                "trained_against_policy_version",
                "Newest policy version that the newest release was trained on.",
                against,
            )


def _counters(counts: Counts) -> Iterator[Metric]:
    samples = CounterMetricFamily(
        f"{PREFIX}samples", "Samples that arrived, by fate.", labels=["outcome"]
    )
    samples.add_metric(["accepted"], counts.samples_accepted)
    samples.add_metric(["duplicate"], counts.samples_duplicate)
    samples.add_metric(["refused"], counts.samples_refused)
    yield samples
    yield _counted(
        "samples_refused", "Refused samples, by field.", "field", counts.refused_by_field
    )
    yield _counter("samples_trained", "Samples trained on, once per epoch.", counts.samples_trained)
    yield _counted(
        "samples_evicted", "Samples given up, by reason.", "reason", counts.evicted_by_reason
    )
    yield _counter("samples_recorded", "Samples written to disk.", counts.samples_recorded)
    yield _counted(
        "recording_shed", "Samples not written to disk, by reason.", "reason", counts.recording_shed
    )
    yield _counted(
        "access_refused", "Calls refused for missing rights.", "reason", counts.access_refused
    )
    yield _counter("tokens_trained", "Step-0 anchors trained on.", counts.tokens_trained)
    yield _counter("train_steps", "Optimizer steps.", counts.train_steps)
    yield _counter(
        "train_steps_skipped", "Steps skipped: not finite or no anchor.", counts.train_steps_skipped
    )
    yield _counter("train_seconds", "Seconds in training steps.", counts.train_seconds)
    yield _counted("publishes", "Publishes, by outcome.", "outcome", counts.publishes)
    yield _counted("verdicts", "Gate verdicts.", "verdict", counts.gate_verdicts)


def _training(counts: Counts) -> Iterator[Metric]:
    if counts.loss is not None:
        yield _gauge("loss", "Training loss of the last step.", counts.loss)
    if counts.step_acceptance:
        yield _labelled(
            "expected_acceptance",
            "Expected acceptance in [0, 1] at each TTT step of the last training step.",
            "step",
            [(str(step), value) for step, value in enumerate(counts.step_acceptance)],
        )


def _gate(counts: Counts) -> Iterator[Metric]:
    gate = counts.gate
    if gate is None:
        return
    yield _gauge("gate_anchors", "Held-out anchors of the last verdict.", gate.anchors)
    lengths = [("candidate", gate.candidate), ("incumbent", gate.incumbent)]
    known = [(which, value) for which, value in lengths if value is not None]
    if known:
        yield _labelled(
            "gate_acceptance_length",
            "Expected acceptance length on held-out states at the last verdict.",
            "which",
            known,
        )
    if gate.half_width is not None:
        yield _gauge(
            "gate_half_width", "Half width of the paired difference's interval.", gate.half_width
        )


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(PREFIX + name, text, value=float(value))


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(PREFIX + name, text, value=float(value))


def _labelled(
    name: str, text: str, label: str, values: Iterable[tuple[str, float]]
) -> GaugeMetricFamily:
    family = GaugeMetricFamily(PREFIX + name, text, labels=[label])
    for key, value in values:
        family.add_metric([key], float(value))
    return family


def _counted(name: str, text: str, label: str, values: dict[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], value)
    return family


def _histogram(name: str, text: str, durations: Durations) -> HistogramMetricFamily:
    buckets, total = [], 0
    bounds = [*(str(bound) for bound in SECONDS_BUCKETS), "+Inf"]
    for bound, count in zip(bounds, durations.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    family = HistogramMetricFamily(PREFIX + name, text)
    family.add_metric([], buckets, durations.total)
    return family


class MetricsServer:
    """Serves ``/metrics`` over HTTP from its own registry.

    Args:
        collector: what is served.
        host: address to listen on.
        port: 0 for a free one.
        access: who may read it.

    Raises:
        RefusedError: the port cannot be had.
    """

    def __init__(self, collector: Collector, host: str, port: int, access: Access) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(collector)
        app = make_wsgi_app(registry)
        self._server = HttpServer(app, host, port, access, "server.metrics_port")
        self.url = f"{self._server.url}/metrics"

    def close(self, timeout: float) -> None:
        """Stop serving and free the port."""
        self._server.close(timeout)
