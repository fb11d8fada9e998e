"""The numbers in the trainer's scrapes."""

from __future__ import annotations

import urllib.request
from pathlib import Path

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from draft_trainer.counters import Counters, by_label
from draft_trainer.server.metrics import facts, trainer_registry
from slipstream.errors import Refusals, StatusCode
from slipstream.v1.console_pb2 import Diagnosis, TrialView
from slipstream.v1.draft_trainer_pb2 import TrainerStatus
from slipstream.v1.release_pb2 import GateFigures, SpanFigures, Verdict
from tests.draft_trainer.fleet_rig import Rig
from tests.draft_trainer.rig import Stream, make_config, request_of, rollouts, running
from tests.scraping import Samples, of, scrape, value

T = "slipstream_trainer_"


class Trainer:
    """The sources of a scrape, without a server."""

    def __init__(self) -> None:
        self.counters, self.refused, self.status = Counters(), Refusals(), TrainerStatus()
        self._registry = trainer_registry(self.counters, lambda: self.status, self.refused)

    def scrape(self) -> Samples:
        return scrape(self._registry)


def test_metrics_of_idle_trainer_have_no_values() -> None:
    samples = Trainer().scrape()
    for absent in (
        *("loss", "expected_acceptance", "policy_version", "policy_timestamp_seconds"),
        *("draft_staleness_versions", "draft_staleness_seconds", "draft_served_timestamp_seconds"),
        *("gate_acceptance_length", "gate_half_width", "gate_anchors", "servers"),
        *("draft_version", "trained_against_policy_version"),
    ):
        assert of(samples, T + absent) == {}, absent
    # Every reason is there from the start, or `increase` would miss its first event.
    assert of(samples, T + "roll_backs_total") == {
        (reason,): 0 for reason in ("commit_failed", "trial", "by_hand", "interrupted")
    }
    assert len(of(samples, T + "heals_total")) == 3
    assert of(samples, T + "samples_refused_total") == {("teacher",): 0}
    assert value(samples, T + "acknowledgement_seconds_count") == 0


def test_metrics_every_fact_has_a_series() -> None:
    trainer = Trainer()
    trainer.counters.refused("temperature")
    trainer.refused.note("/slipstream.v1.DraftTrainer/OpenRun", StatusCode.UNKNOWN, "x")
    trainer.status = TrainerStatus(
        **{"loss": 1.5, "step_acceptance": [0.75, 0.5], "replay_directory": "/samples"},
        **{"newest_release": 3, "promoted_release": 2, "served_release": 1, "served_at": 777.0},
        **{"trained_against_policy_version": 9, "promoted_trained_against": 8},
        **{"gain_per_version": 0.025, "generation_seconds_per_version": 30.0},
        **{"horizon_versions": 20, "training_seconds_per_version": 24.0, "training_share": 0.5},
        **{"served_trained_against": 0, "policy_version": 10, "policy_registered_at": 500.0},
        **{"served_staleness": 10, "served_staleness_seconds": 30.0},
        streams={"grpc": 1, "shared_memory": 2},
        servers_by_state={"known": 4, "reachable": 3, "ready": 2, "current": 1},
        trial=TrialView(draft_version=3),
        diagnosis=[Diagnosis(part="gate", severity=Diagnosis.SEVERITY_PROBLEM)],
        last_verdict=Verdict(
            gate=GateFigures(
                candidate_acceptance_length=2.5,
                incumbent_acceptance_length=2.25,
                difference_half_width=0.125,
                anchors=400,
                by_position=[
                    SpanFigures(
                        first_position=256,
                        candidate_acceptance_length=2.125,
                        incumbent_acceptance_length=2.0,
                    )
                ],
            )
        ),
    )
    samples = trainer.scrape()
    names = {name.removesuffix("_total") for name, _ in samples}
    assert {T + fact.name for fact in facts(trainer.refused)} <= names
    assert value(samples, T + "calls_refused_total", method="OpenRun", code="UNKNOWN") == 1
    assert of(samples, T + "servers") == {
        ("known",): 4,
        ("reachable",): 3,
        ("ready",): 2,
        ("current",): 1,
    }
    assert of(samples, T + "expected_acceptance") == {("0",): 0.75, ("1",): 0.5}
    assert of(samples, T + "gate_acceptance_length") == {("candidate",): 2.5, ("incumbent",): 2.25}
    assert of(samples, T + "gate_span_acceptance_length") == {
        ("256", "candidate"): 2.125,
        ("256", "incumbent"): 2.0,
    }
    assert of(samples, T + "trained_against_policy_version") == {
        ("newest",): 9,
        ("promoted",): 8,
        ("served",): 0,
    }
    assert of(samples, T + "streams") == {("grpc",): 1, ("shared_memory",): 2}
    assert value(samples, T + "trial_running") == 1
    assert value(samples, T + "draft_served_timestamp_seconds") == 777
    assert value(samples, T + "replay_directory", directory="/samples") == 1


def test_metrics_of_publish_and_heal(rig: Rig) -> None:
    assert rig.pointer.now.live_at is None
    rig.publisher.promote(2, pin=False)
    rig.heal()
    assert rig.counters.servers == {"known": 3, "reachable": 3, "ready": 3, "current": 3}
    assert rig.pointer.now.live_at is not None
    # Somebody else's commit, and a server that says that it is not ready.
    rig.put(0, 1)
    rig.servers[1].accept_nothing()
    rig.heal()
    assert by_label(rig.counters.heals) == {"other_version": 1, "not_ready": 1}
    rig.servers[2].stop()
    rig.heal()
    assert (rig.counters.servers["known"], rig.counters.servers["reachable"]) == (3, 2)


def test_metrics_endpoint_of_running_trainer(tmp_path: Path) -> None:
    config = make_config(tmp_path, server={"shared_memory": ""})
    with running(config, train=False) as (server, client):
        client.open()
        client.announce(5)
        with Stream(client) as stream:
            refused = rollouts(1, 77, version=5)[0].repacked(temperature=0.0)
            messages = [*rollouts(4, 0, 5), refused]
            sizes = [request_of(message).ByteSize() for message in messages]
            for message in messages:
                stream.send(message)
            samples = _openmetrics(f"{server._web.url}/metrics")
            assert of(samples, T + "streams") == {("grpc",): 1, ("shared_memory",): 0}
        assert value(samples, T + "samples_total", outcome="accepted") == 4
        assert value(samples, T + "samples_total", outcome="refused") == 1
        assert value(samples, T + "samples_refused_total", field="temperature") == 1
        assert value(samples, T + "received_bytes_total", transport="grpc") == sum(sizes)
        assert value(samples, T + "acknowledgement_seconds_count") == 5
        assert value(samples, T + "policy_announcements_total") == 1
        assert value(samples, T + "draft_staleness_versions") == 0
        assert value(samples, T + "sessions") == 1
        held = value(samples, T + "samples_held_out")
        pending = value(samples, T + "samples_pending")
        assert held is not None and pending is not None and held + pending == 4
        assert value(samples, "process_resident_memory_bytes")


def _openmetrics(url: str) -> Samples:
    request = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
        families = list(parse_openmetrics(answer.read().decode()))
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }
