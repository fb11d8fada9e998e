"""A draft that cannot be published is refused with its reason; fleet, pointer and folder stay."""

from __future__ import annotations

import math
from collections.abc import Callable

import grpc
import pytest

from draft_trainer.releases.rollout_client import Failure
from slipstream.errors import RefusedError
from slipstream.readiness import not_ready_text
from slipstream.v1 import rollout_server_pb2 as pb
from tests.draft_trainer.fleet_rig import Rig
from tests.draft_trainer.registry_rig import flip_bit


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    rig = make_rig()
    rig.publisher.promote(1, pin=False)
    return rig


def test_a_damaged_release_is_not_promoted(rig: Rig) -> None:
    flip_bit(rig.root / "release-000002" / "model.safetensors")
    before = rig.pointer.now
    stages = [server.calls.copy() for server in rig.servers]
    with pytest.raises(RefusedError, match="is not the one released") as caught:
        rig.publisher.promote(2, pin=True)
    assert caught.value.code is grpc.StatusCode.DATA_LOSS
    assert rig.pointer.now == before and rig.served == [1, 1, 1]
    for server, then in zip(rig.servers, stages, strict=True):
        assert not [call for call in server.calls[len(then) :] if call[0] in ("Stage", "Commit")]
    assert rig.publisher.promote(3, pin=False).changes
    assert rig.served == [3, 3, 3]


def test_server_texts_are_bounded_and_one_line(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """They reach outcomes, events, the log and the status page."""
    evil = "x\n\x1b[2J2026 ERROR forged" + "y" * 100_000

    def lie(state: pb.ServerState) -> None:
        state.draft_kind = evil
        for number in range(100):
            state.staged.add(stage_id=evil, kind=pb.STAGE_KIND_POLICY)
            state.not_ready.add(
                reason=10 + number,
                acceptance_length=math.nan if number % 2 else 1e300,
                workers=range(10_000),
            )

    rig.servers[0].faults.lies = lie
    (state, *_) = rig.fleet.states().values()
    assert not isinstance(state, Failure)
    for text in (state.draft_kind, *(stage.stage_id for stage in state.staged)):
        assert "forged" in text and len(text) < 1000 and text.isprintable()
    said = not_ready_text(state.not_ready)
    assert len(said) < 1000 and said.isprintable() and "nan" not in said
    assert len(state.not_ready) < 20 and state.ByteSize() < 65536
    rig.heal()
    assert ("healed", 1) in rig.events()
    rig.servers[0].faults.stage = evil[:4000]
    result = rig.publisher.promote(2, pin=False)
    errors = [outcome.error for outcome in result.outcomes.values()]
    reasons = [event.reason for event in rig.pointer.state.events.since(0)]
    # The hostile server logs in this process, too.
    lines = [one.getMessage() for one in caplog.records if one.name.startswith("draft_trainer")]
    for text in (*errors, *reasons, *lines):
        assert text.isprintable() and len(text) < 4096
    assert "forged" in errors[0]
