"""The words of the reasons why a rollout server is not ready."""

from __future__ import annotations

import pytest

from slipstream.errors import MAX_TEXT_BYTES
from slipstream.readiness import not_ready_text
from slipstream.v1 import rollout_server_pb2 as pb


@pytest.mark.parametrize("reason", pb.NotReadyReason.values())
def test_every_reason_has_words_of_its_own(reason: pb.NotReadyReason) -> None:
    text = not_ready_text([pb.NotReady(reason=reason, workers=[0])])
    known = reason != pb.NOT_READY_REASON_UNSPECIFIED
    assert text.isprintable() and ("does not know" in text) is not known


def test_reasons_are_one_bounded_line() -> None:
    assert not_ready_text([]) == ""
    asleep = pb.NotReady(reason=pb.NOT_READY_REASON_ASLEEP, workers=[1, 3])
    other = pb.NotReady(reason=pb.NOT_READY_REASON_OTHER_DRAFT, draft_version=2)
    assert not_ready_text([asleep, other]) == (
        "draft read back from memory: worker 1: asleep, worker 3: asleep; "
        "serves draft 2, the fleet 0"
    )
    many = pb.NotReady(reason=pb.NOT_READY_REASON_ASLEEP, workers=range(1000))
    assert len(not_ready_text([many] * 100).encode()) <= MAX_TEXT_BYTES
    later = pb.NotReady.FromString(b"\x08\xe7\x07")  # Reason 999.
    assert "reason 999" in not_ready_text([later])
