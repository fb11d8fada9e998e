"""The limits themselves, with a clock of the test's."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator

import grpc
import pytest
import torch

from draft_trainer.server.calls import PatientRequests, WaitingRoom
from rollout_server.checkpoint import check_finite
from slipstream.errors import RefusedError
from slipstream.serving import CallRate, Places, RefusedCalls, Unreadable, reader
from slipstream.tensors import _varint, unframe
from slipstream.v1 import draft_trainer_pb2 as pb


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def refused(call: Callable[[], object]) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        call()
    return caught.value


def test_a_connection_has_two_seconds_worth_of_calls_and_others_lose_nothing() -> None:
    clock = Clock()
    rate = CallRate(10, clock)
    for _ in range(20):
        rate.spend("a")
    assert refused(lambda: rate.spend("a")).field == "server.calls_per_s"
    rate.spend("b")
    clock.now += 0.1
    rate.spend("a")
    refused(lambda: rate.spend("a"))
    clock.now += 1000.0
    for _ in range(20):
        rate.spend("a")
    refused(lambda: rate.spend("a"))


def test_places_come_back() -> None:
    places = Places()
    with places.taken("/s/M", 1):
        assert refused(lambda: places.taken("/s/M", 1).__enter__()).field == "server.max_calls"
        with places.taken("/s/N", 1):
            pass
    with places.taken("/s/M", 1):
        pass


def test_refusals_are_counted_each_and_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    calls = RefusedCalls(clock)
    code = grpc.StatusCode.INVALID_ARGUMENT
    with caplog.at_level(logging.WARNING):
        for _ in range(10_000):
            calls.note("/s/M", code, "client's\nforged line")
        assert len(caplog.messages) == 1
        clock.now = 61.0
        calls.note("/s/M", code, "again")
    assert calls.counts == {("M", "INVALID_ARGUMENT"): 10_001}
    assert caplog.messages[1] == "M refused (INVALID_ARGUMENT), 10000 since the last line: 'again'"
    assert "\n" not in caplog.messages[0]


def test_bytes_that_cannot_be_read_are_a_refusal() -> None:
    read = reader(pb.OpenRunRequest.FromString, "/s/OpenRun", 100)
    assert read(pb.OpenRunRequest(run_id="r").SerializeToString()).run_id == "r"
    for data, expected in ((b"\xff\xff", "protobuf"), (bytes(101), "at most 100 bytes")):
        unreadable = read(data)
        assert isinstance(unreadable, Unreadable)
        assert unreadable.refusal.field == "OpenRun request"
        assert expected in unreadable.refusal.expected


def test_a_frame_of_many_fields_or_a_long_batch_is_refused_before_it_is_parsed() -> None:
    assert refused(lambda: unframe(b"\x12\x00" * 17)).field == "request"
    batch = b"\x0a\x00" * (1 << 20)
    assert refused(lambda: unframe(b"\x1a" + _varint(len(batch)) + batch)).field == "batch"


def test_the_oldest_silent_call_gives_way_and_a_sound_one_is_heard() -> None:
    room = WaitingRoom(2)
    silent: list[queue.SimpleQueue[str]] = [queue.SimpleQueue() for _ in range(3)]
    calls = [PatientRequests(iter(q.get, ""), 60.0, 60.0) for q in silent]
    outcomes: queue.SimpleQueue[tuple[int, str]] = queue.SimpleQueue()

    def wait(number: int) -> None:
        try:
            outcomes.put((number, room.first(calls[number])))
        except RefusedError as error:
            outcomes.put((number, error.field))

    threads = [threading.Thread(target=wait, args=(number,)) for number in range(3)]
    for number in (0, 1):
        threads[number].start()
        while len(room._waiting) <= number:
            pass
    threads[2].start()
    assert outcomes.get(timeout=10) == (0, "server.max_calls")
    silent[2].put("sound")
    assert outcomes.get(timeout=10) == (2, "sound")
    silent[1].put("late")
    assert outcomes.get(timeout=10) == (1, "late")
    for call, each in zip(calls, silent, strict=True):
        call.close()
        each.put("")


def test_a_client_is_waited_for_so_long_and_no_longer() -> None:
    hold = threading.Event()

    def requests() -> Iterator[int]:
        yield 1
        hold.wait(30.0)

    waiting = PatientRequests(requests(), 0.05, 60.0)
    assert next(waiting) == 1
    error = refused(lambda: next(waiting))
    assert (error.field, error.code) == (
        "server.message_timeout_s",
        grpc.StatusCode.DEADLINE_EXCEEDED,
    )
    hold.set()
    waiting.close()


def test_a_call_that_ended_is_not_waited_for() -> None:
    ended = PatientRequests(iter(()), 600.0, 600.0)
    assert [next(ended, "over"), next(ended, "over"), *ended] == ["over", "over"]


def test_a_long_text_of_the_client_fits_the_trailers() -> None:
    error = RefusedError("name", "n" * 100_000, "≠" * 100_000, "send another one")
    sent = error.to_proto()
    assert len(sent.found) < 500 and sent.found.endswith("(100000 characters)")
    assert len(sent.expected.encode()) < 500
    assert len(error.for_wire().encode()) < 1600
    assert len(error.found) == 100_000, "whole where it stays on this machine"


def test_eight_bit_floats_are_looked_at_too() -> None:
    values = torch.ones(4).to(torch.float8_e4m3fn)
    check_finite("w", values)
    bad = torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn)
    assert "1 of 2" in refused(lambda: check_finite("w", bad)).found
