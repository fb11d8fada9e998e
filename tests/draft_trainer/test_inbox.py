"""What a stream has read ahead: bounded, in order, taken several requests at a time."""

from __future__ import annotations

import threading

import pytest

from draft_trainer.server import stream as module
from draft_trainer.server.stream import Inbox, samples_in
from slipstream.errors import RefusedError
from slipstream.tensors import Framed, frame, unframe
from slipstream.v1 import draft_trainer_pb2 as pb

LONG = 60.0


def request(*names: str, nbytes: int = 64) -> Framed:
    """A batch of samples in the ring, of so many bytes each."""
    samples = [
        pb.VerifierStates(sample_id=name, packed=pb.PackedStates(span=pb.Span(bytes=nbytes)))
        for name in names
    ]
    return unframe(frame(pb.StreamStatesRequest(batch=pb.SampleBatch(samples=samples))))


def names(taken: list[module.Arrived]) -> list[str]:
    return [sample.sample_id for framed, _ in taken for sample in samples_in(framed.request)]


def test_what_waits_is_taken_together_and_in_order() -> None:
    inbox = Inbox(1 << 30)
    for at, name in enumerate("abc"):
        assert inbox.put(request(name), float(at), 0.0)
    taken = inbox.take(LONG)
    assert names(taken) == ["a", "b", "c"] and [at for _, at in taken] == [0.0, 1.0, 2.0]
    assert inbox.take(0.0) == []


def test_a_transaction_holds_so_many_samples_and_bytes() -> None:
    inbox = Inbox(1 << 30)
    for number in range(3):
        inbox.put(request(*[f"{number}-{n}" for n in range(400)]), 0.0, 0.0)
    assert [len(names(inbox.take(LONG))) for _ in range(2)] == [800, 400]
    for number in range(5):
        inbox.put(request(f"{number}", nbytes=6 << 20), 0.0, 0.0)
    assert [names(inbox.take(LONG)) for _ in range(2)] == [["0", "1", "2"], ["3", "4"]]


def test_who_waits_for_an_answer_is_not_kept_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    # Without an end the pause is: whoever takes waits for enough.
    monkeypatch.setattr(module, "_PAUSE", LONG)
    inbox = Inbox(4096)
    inbox.put(request("a", nbytes=512), 0.0, 0.0)
    late = threading.Thread(target=inbox.put, args=(request("b", nbytes=512), 0.0, LONG))
    late.start()
    # A quarter of what the client may have in flight.
    assert names(inbox.take(LONG)) == ["a", "b"]
    late.join(LONG)
    inbox.put(request("c"), 0.0, 0.0)
    ending = threading.Thread(target=inbox.end)
    ending.start()
    assert names(inbox.take(LONG)) == ["c"]
    ending.join(LONG)


def test_few_are_taken_after_the_pause() -> None:
    inbox = Inbox(1 << 30)
    inbox.put(request("a"), 0.0, 0.0)
    assert names(inbox.take(LONG)) == ["a"]


def test_an_error_comes_after_what_came_before_it() -> None:
    inbox = Inbox(1 << 30)
    inbox.put(request("a"), 0.0, 0.0)
    inbox.end(RefusedError("credit", 1, "0", "wait"))
    inbox.end()
    assert not inbox.done
    assert names(inbox.take(LONG)) == ["a"]
    # Nothing waits, and yet there is something to say.
    assert not inbox.done
    with pytest.raises(RefusedError, match="credit"):
        inbox.take(LONG)


def test_messages_are_bounded_and_an_end_wakes_who_waits_for_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_MOST_WAITING", 2)
    inbox = Inbox(1 << 30)
    assert inbox.put(request("a"), 0.0, 0.0) and inbox.put(request("b"), 0.0, 0.0)
    assert not inbox.put(request("c"), 0.0, 0.0) and not inbox.ended
    answers: list[bool] = []
    waiting = threading.Thread(target=lambda: answers.append(inbox.put(request("c"), 0.0, LONG)))
    waiting.start()
    inbox.end()
    waiting.join(LONG)
    assert answers == [False] and inbox.ended and not inbox.done
    assert names(inbox.take(LONG)) == ["a", "b"] and inbox.done
    assert inbox.take(LONG) == []
