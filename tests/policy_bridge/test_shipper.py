"""Shipping to a trainer that is up, slow, hung, refusing, killed or restarted."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from policy_bridge import PolicyBridge
from policy_bridge.stream import StateStream
from slipstream.client import open_channel
from slipstream.errors import RefusedError
from slipstream.sample import Sample, layout_of
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc
from slipstream.v1 import release_pb2
from tests.waiting import until

from .conftest import Connect, batch, deliver, make_model, ship, sync
from .doubles import DEADLINE, FakeTrainer, Server

# One sample of batch((10,)): 10 tokens of 4 states of 32 float32.
SAMPLE_BYTES = layout_of(10, 3, 32, torch.float32).nbytes


def accounted(bridge: PolicyBridge) -> int:
    """Everything that was chosen: acknowledged, waiting or shed."""
    stats = bridge.stats()
    return (
        stats.accepted
        + stats.duplicate
        + stats.refused
        + stats.outbox_samples
        + sum(stats.shed.values())
    )


class Unread(pb_grpc.DraftTrainerServicer):
    """A trainer that grants a tebibyte, reads nothing, and sends news all the time."""

    def __init__(self) -> None:
        self.release = threading.Event()

    def StreamStates(self, requests: object, context: object) -> Iterator[pb.StreamStatesResponse]:  # noqa: N802
        yield pb.StreamStatesResponse(credit=pb.Credit(bytes=1 << 40))
        while not self.release.wait(0.05):
            yield pb.StreamStatesResponse()


def test_bytes_waiting_in_grpc_are_bounded() -> None:
    trainer, block = Unread(), np.zeros(1 << 20, np.uint8)
    with (
        Server(lambda s: pb_grpc.add_DraftTrainerServicer_to_server(trainer, s)) as server,
        open_channel(server.address) as channel,
    ):
        stream = StateStream(channel, pb.StreamHeader(), lambda _: None, lambda _: None)
        assert stream.wait_credit(len(block), DEADLINE)
        sent = 0
        # A wait that is in vain shows that nothing goes out any more.
        while sent < 200 and stream.wait_credit(len(block) + 64, 1.0):
            stream.send(pb.StreamStatesRequest(batch=pb.SampleBatch()), [block])
            sent += 1
        assert 60 <= sent < 100
        assert stream.is_open and stream.credit > 1 << 39
        trainer.release.set()
        stream.close(DEADLINE)


def test_version_announced_before_samples_sends_changed_tensors(
    trainer: FakeTrainer, connect: Connect
) -> None:
    model = make_model()
    bridge = connect(model=model)
    for version in (1, 2, 3):
        if version == 2:
            # Being busy does not mean that the trainer let go of what it had.
            busy = RefusedError("calls", 4, 4, "wait", reason=release_pb2.REFUSAL_REASON_BUSY)
            trainer.refuse_announcements = [busy]
        if version == 3:
            with torch.no_grad():
                model.lm_head.weight.mul_(1.5)
        sync(bridge, version)
        ship(bridge, model, batch((10, 10)))
        # Or a slow trainer would not be told of the version before the newest.
        assert bridge.flush(DEADLINE)
    firsts = [trainer.events.index(("announced", v)) for v in (1, 2, 3)]
    samples = [trainer.events.index(("sample", v)) for v in (1, 2, 3)]
    assert all(a < s for a, s in zip(firsts, samples, strict=True))
    both = {"lm_head.weight", "embed_tokens.weight"}
    assert trainer.chunks_sent == {1: both, 2: set(), 3: {"lm_head.weight"}}
    assert torch.equal(
        trainer.tensors[3]["lm_head.weight"], model.lm_head.weight[trainer.vocab_ids]
    )
    assert torch.equal(trainer.tensors[3]["embed_tokens.weight"], model.model.embed_tokens.weight)
    stats = bridge.stats()
    assert (stats.accepted, stats.announced, stats.connects) == (6, 3, 1)
    until(lambda: bridge.stats().sent_bytes == trainer.received_bytes)


def test_stream_credit_is_never_overdrawn(trainer: FakeTrainer, connect: Connect) -> None:
    model, data = make_model(), batch((10,) * 8)
    trainer.credit = 2 * SAMPLE_BYTES  # One message with its overhead, not two.
    bridge = connect(model=model, version=1)
    deliver(bridge, model, data)
    assert trainer.overdrawn == 0
    assert len(trainer.samples) == 8


def test_sample_larger_than_credit_does_not_block_others(
    trainer: FakeTrainer, connect: Connect
) -> None:
    model = make_model()
    trainer.credit = 2 * SAMPLE_BYTES
    bridge = connect(model=model, stall_seconds=0.3, version=1)
    deliver(bridge, model, batch((40, 10, 10)))
    assert bridge.stats().shed == {"no_credit": 1}
    assert len(trainer.samples) == 2
    assert trainer.overdrawn == 0


def test_close_interrupts_hanging_call(trainer: FakeTrainer, connect: Connect) -> None:
    model = make_model()
    trainer.hang.add("AnnouncePolicy")
    bridge = connect(model=model, version=1)
    ship(bridge, model, batch((10, 10)))
    trainer.wait_for(lambda: ("AnnouncePolicy", -1) in trainer.events)
    bridge.close()
    assert bridge.stats().shed == {"closed": 2}
    assert accounted(bridge) == 2
    trainer.release.set()


def test_trainer_without_acks_fills_bounded_outbox(trainer: FakeTrainer, connect: Connect) -> None:
    model, data = make_model(), batch((10,) * 4)
    trainer.ack = False
    bridge = connect(model=model, outbox_bytes=6 * SAMPLE_BYTES)
    for version in (1, 2, 3):
        sync(bridge, version)
        ship(bridge, model, data)
        assert bridge.stats().outbox_bytes <= 6 * SAMPLE_BYTES
        # Or the next version might come before this one is announced, and shed for that.
        trainer.wait_for(lambda v=version: len(trainer.samples) >= 4 * v)  # type: ignore[misc]
    stats = bridge.stats()
    # Version 2 sheds 2 of the 4 samples of version 1; version 3 the other 2, and 2 of version 2.
    assert stats.outbox_samples == 6
    assert sum(stats.shed.values()) == 6
    assert stats.shed["superseded"] == 6
    assert accounted(bridge) == 12


def test_refused_samples_counted_by_field_and_stream_continues(
    trainer: FakeTrainer, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    model, data = make_model(), batch((10, 7, 10, 7))
    trainer.refuse = lambda s: (
        RefusedError("token_ids", 7, 10, "send ten") if s.token_ids.shape[0] == 7 else None
    )
    bridge = connect(model=model, version=1)
    deliver(bridge, model, data)
    stats = bridge.stats()
    assert (stats.accepted, stats.refused) == (2, 2)
    assert stats.refused_by_field == {"token_ids": 2}
    assert sum("token_ids" in record.message for record in caplog.records) == 1


def test_close_drains_and_ends_every_thread(trainer: FakeTrainer, connect: Connect) -> None:
    model, data = make_model(), batch((10,) * 3)
    with connect(model=model, drain_seconds=DEADLINE) as bridge:
        sync(bridge, 1)
        ship(bridge, model, data)
    assert len(trainer.samples) == 3
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("slipstream-")]
    bridge.close()
    with pytest.raises(RefusedError, match="closed"):
        bridge.capture()


def test_interrupted_close_leaves_no_thread(
    trainer: FakeTrainer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the trainer has a stream of this run it takes no other."""
    model, data = make_model(), batch((10,) * 3)
    bridge = connect(model=model, version=1)
    deliver(bridge, model, data)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bridge._outbox, "wait_empty", interrupt)
    with pytest.raises(KeyboardInterrupt):
        bridge.close()
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("slipstream-")]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("strict", [False, True])
def test_exception_in_bridge_thread_costs_samples_not_run(
    trainer: FakeTrainer, connect: Connect, monkeypatch: pytest.MonkeyPatch, strict: bool
) -> None:
    """Before it was told, callers waited until their deadline for what nobody would send."""

    def mistake(*_: object) -> None:
        raise ZeroDivisionError("seeded by a test")

    monkeypatch.setattr("policy_bridge.connection.Connection._send_batch", mistake)
    model, data = make_model(), batch((10, 10))
    bridge = connect(model=model, strict=strict, version=1)
    deliver(bridge, model, data)
    assert not bridge.wait_connected(DEADLINE)
    assert bridge.stats().shed == {"shipper_died": 2}
    assert "see the log" in bridge.stats().last_error
    if strict:
        with pytest.raises(RefusedError, match="bridge: found its thread"):
            bridge.capture()
    else:
        ship(bridge, model, data)
        stats = bridge.stats()
        assert (stats.captures_skipped, stats.outbox_samples) == (1, 0)
        assert "a PolicyBridge built anew captures again" in stats.capture_off_reason
    bridge.close()
    assert accounted(bridge) == 2


def test_sample_ids_unique_over_bridges_of_run(trainer: FakeTrainer, connect: Connect) -> None:
    model, data = make_model(), batch((10,) * 3)
    for version in (1, 2):
        with connect(model=model, drain_seconds=DEADLINE) as bridge:
            sync(bridge, version)
            ship(bridge, model, data)
    assert len(trainer.samples) == len(trainer.received) == 6
    assert all(isinstance(s, Sample) for s in trainer.samples.values())


def test_sample_replacing_superseded_one_is_announced_first(
    trainer: FakeTrainer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, superseded = threading.Event(), threading.Event()

    def wait(*_: object) -> bool:
        waits.set()
        return superseded.wait(DEADLINE)

    monkeypatch.setattr("policy_bridge.connection.Connection._wait_to_send", wait)
    model, data = make_model(), batch((10,))
    bridge = connect(model=model, version=1)
    ship(bridge, model, data)
    assert waits.wait(DEADLINE)
    sync(bridge, 2)
    bridge._outbox.shed("superseded", 1)
    ship(bridge, model, data)
    assert bridge._copier.wait_idle(DEADLINE)
    superseded.set()
    assert bridge.flush(DEADLINE)
    stats = bridge.stats()
    assert (stats.accepted, stats.refused, stats.shed) == (1, 0, {"superseded": 1})
    assert trainer.events.index(("announced", 2)) < trainer.events.index(("sample", 2))
