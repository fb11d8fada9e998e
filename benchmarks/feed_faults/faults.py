"""The rows of the table: what goes wrong between a policy and its trainer."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.feed_faults.rig import Rig
from slipstream.shm import HEADER_BYTES
from slipstream.v1 import draft_trainer_pb2 as pb
from tests.draft_trainer.rig import request_of

SHARED_MEMORY, GRPC = "shared_memory", "grpc"
_TRIES = 5


@dataclass(frozen=True)
class Fault:
    """One row.

    Args:
        name: of the row.
        inflict: makes it happen, and starts again what it ended. The random instants are the
            generator's.
        share: how often it comes among ``schedule``'s rows, in a round.
        transports: with which it makes sense.
        kills: how many trainers and how many policies.
    """

    name: str
    inflict: Callable[[Rig, random.Random], None]
    share: int = 1
    transports: tuple[str, ...] = (SHARED_MEMORY, GRPC)
    kills: tuple[int, int] = (0, 0)


def schedule(rounds: int, rng: random.Random) -> list[tuple[Fault, str]]:
    """Plan the faults: in each round every row as often as its share, in a random order.

    Args:
        rounds: every other one over shared memory, the rest over gRPC.
        rng: source of the orders.
    """
    plan = []
    for number in range(rounds):
        transport = (SHARED_MEMORY, GRPC)[number % 2]
        faults = [fault for fault in FAULTS if transport in fault.transports]
        rows = [(fault, transport) for fault in faults for _ in range(fault.share)]
        plan += rng.sample(rows, len(rows))
    return plan


def _pause(rng: random.Random, longest: float) -> None:
    """An instant at random."""
    time.sleep(rng.uniform(0.0, longest))


def _kill_trainer(rig: Rig, rng: random.Random) -> None:
    _pause(rng, 0.5)
    rig.kill_trainer()
    rig.start_trainer()
    rig.wait_ready()


def _kill_starting_trainer(rig: Rig, rng: random.Random) -> None:
    rig.kill_trainer()
    rig.start_trainer()
    _pause(rng, 1.0)
    rig.kill_trainer()
    rig.start_trainer()
    rig.wait_ready()


def _kill_policy(rig: Rig, rng: random.Random) -> None:
    _pause(rng, 0.5)
    rig.kill_policy()
    rig.start_policy(rig.transport)


def _kill_both(rig: Rig, rng: random.Random) -> None:
    _pause(rng, 0.5)
    rig.kill_policy()
    rig.kill_trainer()
    rig.start_policy(rig.transport)
    rig.start_trainer()
    rig.wait_ready()


def _drop_acknowledgements(rig: Rig, rng: random.Random) -> None:
    rig.wire.mute()
    rig.wait_for(lambda: rig.wire.swallowed > 0, "an answer is lost")
    _pause(rng, 0.5)
    assert rig.wire.reset()


def _drop_until_the_bridge_notices(rig: Rig, rng: random.Random) -> None:
    rig.records.refresh()
    before = rig.records.recognised
    # What is swallowed first may be HTTP/2's own words, and no answer yet: then nothing was
    # lost, and nothing is there to be recognised.
    for _ in range(_TRIES):
        rig.wire.mute()
        rig.wait_for(lambda: rig.wire.swallowed > 0, "an answer is lost")
        rig.wait_steps(10)
        rig.wire.reset()
        rig.wait_acknowledged()
        if rig.records.recognised > before:
            return
    raise AssertionError("no sample that was sent again is recognised")


def _deliver_twice(rig: Rig, rng: random.Random) -> None:
    rig.records.refresh()
    before = rig.records.repeated
    rig.signal_policy(signal.SIGUSR1)

    def repeated() -> bool:
        rig.records.refresh()
        return rig.records.repeated > before

    rig.wait_for(repeated, "an answer is delivered twice")


def _send_again(rig: Rig, rng: random.Random) -> None:
    rig.records.refresh()
    known = list(rig.records.acknowledged)
    with rig.other_stream() as (stream, sample):
        for name in rng.sample(known, min(8, len(known))):
            ack = stream.send(sample.repacked(sample_id=name))
            assert ack.status == pb.ACK_STATUS_DUPLICATE, f"{name}: {ack}"
            rig.records.answer(name, str(ack.status), "-")


def _reset(rig: Rig, rng: random.Random) -> None:
    for _ in range(3):
        _pause(rng, 0.3)
        rig.wire.reset()


def _flip_in_file(rig: Rig, rng: random.Random) -> None:
    before = rig.records.refused["packed.checksum"]
    written: list[int] = []
    # While a policy version is announced nothing is written, and nothing could be damaged.
    while sum(size > 0 for size in written) < _TRIES and len(written) < 10 * _TRIES:
        written.append(_flip_unread(rig))
        rig.wait_acknowledged()
        if rig.records.refused["packed.checksum"] > before:
            return
    raise AssertionError(f"no flipped byte was refused; bytes written meanwhile: {written}")


def _flip_unread(rig: Rig) -> int:
    """Flip a byte of a sample that the trainer has not read yet.

    Returns the bytes of such samples, 0 if there were none.

    A bridge that is about to announce a policy version sends nothing, and one that takes the
    stopped trainer for hung sends everything again through another file: this byte is not read.
    """
    rig.stop_trainer()
    try:
        descriptor = rig.shared_file()
        try:
            size = os.fstat(descriptor).st_size
            old = np.frombuffer(os.pread(descriptor, size, 0), dtype=np.uint8)
            rig.wait_steps(5)
            new = np.frombuffer(os.pread(descriptor, size, 0), dtype=np.uint8)
            changed = np.flatnonzero(new != old)
            if len(changed) <= HEADER_BYTES:
                return 0
            at = int(changed[0]) + 64
            os.pwrite(descriptor, bytes([new[at] ^ 1]), at)
            return len(changed)
        finally:
            os.close(descriptor)
    finally:
        rig.continue_trainer()


def _flip_in_message(rig: Rig, rng: random.Random) -> None:
    name = f"damaged-{rng.getrandbits(48):012x}"
    with rig.other_stream() as (stream, recorded):
        sample = recorded.repacked(sample_id=name)
        rig.records.anchors[name] = int(sample.loss_mask.sum()) - 1
        damaged = request_of(sample)
        payload = bytearray(damaged.payload)
        payload[len(payload) // 2] ^= 1
        damaged.payload = bytes(payload)
        ack = stream.send(damaged)
        assert ack.refusal.field == "packed.checksum", ack
        rig.records.answer(name, str(ack.status), ack.refusal.field)
        # Refused is not recorded: sent whole, it is new.
        ack = stream.send(sample)
        assert ack.status == pb.ACK_STATUS_ACCEPTED, ack
        rig.records.answer(name, str(ack.status), "-")


def _truncate_file(rig: Rig, rng: random.Random) -> None:
    _pause(rng, 0.5)
    descriptor = rig.shared_file()
    try:
        size = os.fstat(descriptor).st_size
        os.ftruncate(descriptor, rng.choice((0, size // 2, size - 4096)))
        rig.cut_short = True
    finally:
        os.close(descriptor)


def _hang(rig: Rig, rng: random.Random) -> None:
    rig.stop_trainer()
    try:
        rig.wait_steps(20)
    finally:
        rig.continue_trainer()


FAULTS: Sequence[Fault] = (
    Fault("trainer killed", _kill_trainer, 5, kills=(1, 0)),
    Fault("policy killed", _kill_policy, 5, kills=(0, 1)),
    Fault("both killed", _kill_both, kills=(1, 1)),
    Fault("trainer killed while it starts", _kill_starting_trainer, kills=(2, 0)),
    Fault("acknowledgements lost, connection reset", _drop_acknowledgements),
    Fault("acknowledgements lost for steps", _drop_until_the_bridge_notices),
    Fault("acknowledgements delivered twice", _deliver_twice),
    Fault("samples sent again by another stream", _send_again),
    Fault("connections reset three times", _reset),
    Fault("byte flipped in the ring", _flip_in_file, 2, (SHARED_MEMORY,)),
    Fault("byte flipped in a message", _flip_in_message, 2, (GRPC,)),
    Fault("ring truncated", _truncate_file, 2, (SHARED_MEMORY,)),
    Fault("trainer stopped for 20 steps", _hang),
)
