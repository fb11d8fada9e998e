"""The numbers that a training process exposes of its bridge."""

from __future__ import annotations

from policy_bridge.metrics import FACTS, BridgeCollector
from policy_bridge.stats import Counters
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import release_pb2
from tests.scraping import of, scrape, value
from tests.waiting import until

from .conftest import Connect, batch, deliver, make_model, sync
from .doubles import DEADLINE, FakeTrainer

B = "slipstream_bridge_"


def test_metrics_of_bridge_that_ships(trainer: FakeTrainer, connect: Connect) -> None:
    model = make_model()
    bridge = connect(model=model)
    empty = scrape(BridgeCollector(bridge))
    assert value(empty, B + "policy_version") is None
    assert of(empty, B + "last_sync_seconds") == {}
    assert of(empty, B + "shed_samples_total")["outbox_full",] == 0
    sync(bridge, 3)
    deliver(bridge, model, batch((10, 10)))
    until(lambda: bridge.stats().sent_bytes > 0)
    samples, stats = scrape(BridgeCollector(bridge)), bridge.stats()
    assert value(samples, B + "connected") == 1
    assert value(samples, B + "policy_version") == 3
    assert value(samples, B + "syncs_total") == value(samples, B + "announced_policies_total") == 1
    assert of(samples, B + "acknowledgements_total") == {
        ("accepted",): 2,
        ("duplicate",): 0,
        ("refused",): 0,
    }
    assert value(samples, B + "captures_total", outcome="taken") == 1
    assert value(samples, B + "captured_tokens_total") == 20
    assert value(samples, B + "sent_bytes_total") == stats.sent_bytes > 0
    assert value(samples, B + "outbox_bytes") == 0
    capacity = value(samples, B + "outbox_capacity_bytes")
    assert capacity is not None and capacity > 1 << 20
    assert set(of(samples, B + "last_sync_seconds")) == {("prepare",), ("stage",), ("commit",)}
    assert value(samples, B + "transport", transport=stats.transport) == 1
    missing = {B + fact.name for fact in FACTS} - {
        name.removesuffix("_total") for name, _ in samples
    }
    assert missing == {
        B + "samples_refused",
    }


def test_metrics_shed_and_refused_by_reason() -> None:
    counters = Counters()
    counters.shed("outbox_full", 3, 300)
    counters.shed("superseded", 1, 50)
    for field in ("packed.checksum", "packed.span", "policy_version"):
        counters.refused(field)

    class Fake:
        def stats(self) -> object:
            return counters.snapshot(outbox_samples=4, capture_off_reason="the trainer refused")

    samples = scrape(BridgeCollector(Fake()))  # type: ignore[arg-type]
    shed = of(samples, B + "shed_samples_total")
    assert (shed["outbox_full",], shed["superseded",], sum(shed.values())) == (3, 1, 4)
    assert value(samples, B + "shed_bytes_total") == 350
    assert of(samples, B + "samples_refused_total") == {("packed",): 2, ("policy_version",): 1}
    assert value(samples, B + "capture_enabled") == 0
    assert value(samples, B + "outbox_samples") == 4


def test_metrics_dictionary_has_bridge_and_trainer_numbers(
    trainer: FakeTrainer, connect: Connect
) -> None:
    trainer.status = pb.TrainerStatus(
        train_steps=7,
        loss=1.5,
        step_acceptance=[0.5, 0.25],
        refused_by_field={"packed": 2},
        training_error="for people",
        training_waits_for=release_pb2.REFUSAL_REASON_DISK,
        servers=[{"address": "a:1"}],
    )
    model = make_model()
    bridge = connect(model=model, version=3)
    trainer.hang.add("GetStatus")
    # A trainer that does not answer is not waited for.
    found = bridge.metrics()
    assert not any(name.startswith("trainer/") for name in found)
    assert found["bridge/policy_version"] == 3 and found["bridge/connected"] == 1
    assert found["bridge/last_sync/commit_seconds"] >= 0
    assert "bridge/last_error" not in found
    trainer.hang.clear()
    trainer.release.set()
    until(lambda: "trainer/train_steps" in bridge.metrics())
    deliver(bridge, model, batch((10, 10)))
    found = bridge.metrics()
    assert found["bridge/accepted"] == 2
    assert found["trainer/train_steps"] == 7 and found["trainer/loss"] == 1.5
    assert found["trainer/step_acceptance/1"] == 0.25
    assert found["trainer/refused_by_field/packed"] == 2
    assert found["trainer/samples_pending"] == 0
    for name in ("policy_version", "training_error", "training_waits_for"):
        assert f"trainer/{name}" not in found
    assert 0 <= found["trainer/status_age_seconds"] < DEADLINE
    assert all(type(value) is float for value in found.values())
    bridge.close()
    assert bridge.metrics()["trainer/train_steps"] == 7
