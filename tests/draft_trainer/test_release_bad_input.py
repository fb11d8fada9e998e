"""What cannot be published is refused with its reason, and fleet, pointer and folder stay."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from draft_trainer.releases.client import Failure
from slipstream.errors import RefusedError
from tests.draft_trainer.fleet_rig import Rig
from tests.draft_trainer.registry_rig import flip


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Rig:
    rig = make_rig()
    rig.publisher.promote(1, pin=False)
    return rig


def flip_a_bit(path: Path) -> None:
    weights = path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)


def link_the_weights(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.rename(path.parent / "elsewhere")
    weights.symlink_to(path.parent / "elsewhere")


def link_the_folder(path: Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit": (flip_a_bit, "is not the one released"),
    "weights cut short": (
        lambda path: (path / "model.safetensors").write_bytes(b"short"),
        "as in the manifest",
    ),
    "a linked file": (link_the_weights, "symbolic link"),
    "a linked folder": (link_the_folder, "symbolic link"),
    "a pickle beside": (
        lambda path: (path / "pytorch_model.bin").write_bytes(b"\x80\x04N."),
        "a pickle",
    ),
    "another config.json": (
        lambda path: flip(path / "config.json", "1e-05", "1e-06"),
        "not the text in the manifest",
    ),
    "another release's number": (
        lambda path: flip(path / "manifest.json", '"draft_version": "2"', '"draft_version": "3"'),
        "as the folder",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_release_is_not_promoted(rig: Rig, damage: str) -> None:
    ruin, reason = DAMAGES[damage]
    ruin(rig.root / "release-000002")
    before = rig.promotions.now
    stages = [double.calls.copy() for double in rig.doubles]
    with pytest.raises(RefusedError, match=reason) as caught:
        rig.publisher.promote(2, pin=True)
    assert caught.value.code is grpc.StatusCode.DATA_LOSS
    assert rig.promotions.now == before and rig.served == [1, 1, 1]
    for double, then in zip(rig.doubles, stages, strict=True):
        assert not [call for call in double.calls[len(then) :] if call[0] in ("Stage", "Commit")]
    assert rig.publisher.promote(3, pin=False).changes
    assert rig.served == [3, 3, 3]


def test_an_unknown_release_is_refused(rig: Rig) -> None:
    before = rig.promotions.now
    for version in (7, 1 << 40):
        with pytest.raises(RefusedError, match="draft_version") as caught:
            rig.publisher.promote(version, pin=True)
        assert caught.value.code is grpc.StatusCode.NOT_FOUND
    assert rig.promotions.now == before and rig.served == [1, 1, 1]


@pytest.mark.parametrize("under_way", ["_staged_alone", "committed_alone"])
def test_a_promote_during_a_publish_is_refused_while_the_caller_waits(
    rig: Rig, under_way: str
) -> None:
    """And not done later, when the operator takes it for failed."""
    before, until = rig.promotions.now, time.monotonic()
    with getattr(rig.publisher, under_way)():
        for move in (
            lambda: rig.publisher.promote(2, pin=True, until=until),
            lambda: rig.publisher.roll_back("x", until=until),
        ):
            with pytest.raises(RefusedError, match="one publish at a time") as caught:
                move()
            assert caught.value.code is grpc.StatusCode.ABORTED
    assert rig.promotions.now == before and rig.served == [1, 1, 1]
    assert rig.publisher.promote(2, pin=False, until=until).changes, "there is nothing to wait for"


def test_texts_of_a_rollout_server_are_bounded_and_on_one_line(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """They reach outcomes, events, the log and the status page."""
    evil = "x\n\x1b[2J2026 ERROR forged" + "y" * 100_000
    rig.doubles[0].state.not_ready = evil
    rig.doubles[0].state.model = evil
    rig.doubles[0].state.draft_kind = evil
    (state, *_) = rig.fleet.states().values()
    assert not isinstance(state, Failure)
    for text in (state.not_ready, state.model, state.draft_kind):
        assert "forged" in text and len(text) < 1000 and text.isprintable()
    assert state.ByteSize() < 4096
    rig.heal()
    assert ("healed", 1) in rig.events()
    rig.doubles[0].faults.evil = evil[:4000]
    result = rig.publisher.promote(2, pin=False)
    errors = [outcome.error for outcome in result.outcomes.values()]
    reasons = [event.reason for event in rig.promotions.state.events.since(0)]
    for text in (*errors, *reasons, *caplog.messages):
        assert text.isprintable() and len(text) < 4096, text
    assert "forged" in errors[0]
