"""Sends on one stream what waits in the outbox, as many samples together as a batch may have."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from policy_bridge.config import FLOAT8, BridgeConfig
from policy_bridge.outbox import Outbox
from policy_bridge.placement import Placed, Placement
from policy_bridge.sample import Sample
from policy_bridge.stats import Counters
from policy_bridge.stream import StateStream
from slipstream.checksums import Bytes
from slipstream.refusal import RefusedError
from slipstream.v1 import draft_trainer_pb2 as pb

_TICK = 0.2
# A batch holds what waits, within this and ``Placement.batch_bytes``.
_SAMPLES = 128


class Batches:
    """Used by the shipper's thread, for the life of a stream.

    Args:
        stream: that they are sent on.
        placement: its own.
        outbox: where samples wait.
        config: deadlines and the states' dtype.
        counters: where everything is counted.
        known: whether the trainer has been told of a policy version.
        stop: set when the bridge is closed.
    """

    def __init__(
        self,
        stream: StateStream,
        placement: Placement,
        outbox: Outbox,
        config: BridgeConfig,
        counters: Counters,
        *,
        known: Callable[[int], bool],
        stop: threading.Event,
    ) -> None:
        self._stream = stream
        self._placement = placement
        self._outbox = outbox
        self._stall_seconds = config.stall_seconds
        self._float8 = config.states_dtype == FLOAT8
        self._counters = counters
        self._known = known
        self._stop = stop

    def send(self, first: Sample) -> list[str]:
        """Send ``first`` and what waits behind it; their ids. None where it cannot be sent now.

        Raises:
            RefusedError: the ring was truncated.
        """
        if not self._wait_credit(first, self._message_bytes(first)):
            return []
        credit, bound = self._stream.credit, self._placement.batch_bytes
        message = size = 0

        def fits(sample: Sample) -> bool:
            nonlocal message, size
            most = self._message_bytes(sample)
            if message and (size + most > bound or not self._goes_with(first, sample)):
                return False
            message += most
            size += max(most, sample.nbytes)
            return message <= credit

        samples = self._outbox.take(fits, _SAMPLES)
        request = pb.StreamStatesRequest()
        payload: list[Bytes] = []
        count = in_payload = in_ring = 0
        try:
            for sample in samples:
                shipped = sample.in_float8() if self._float8 else sample
                add = request.batch.samples.add
                placed = self._place(shipped, in_payload, add, wait=count == 0)
                if placed is None:
                    break
                count += 1
                payload += placed.payload
                in_payload += sum(map(len, placed.payload))
                in_ring += placed.ring_bytes
        except RefusedError:
            self._outbox.put_back(samples)
            raise
        self._outbox.put_back(samples[count:])
        if count:
            sent = self._stream.send(request, payload) + in_ring
            self._counters.add(sent_samples=count, sent_bytes=sent)
        return [sample.sample_id for sample in samples[:count]]

    def _goes_with(self, first: Sample, sample: Sample) -> bool:
        same = sample.aux_layers == first.aux_layers
        return same and self._known(sample.policy_version)

    def _message_bytes(self, sample: Sample) -> int:
        layout = sample.float8_layout if self._float8 else sample.layout
        return self._placement.message_bytes(layout)

    def _wait_credit(self, sample: Sample, size: int) -> bool:
        started = time.monotonic()
        while not self._stream.wait_credit(size, _TICK):
            if not self._worth_waiting(sample):
                return False
            late = time.monotonic() - started > self._stall_seconds
            if late and self._stream.nothing_due():
                # Larger than the trainer's whole window: it would block those behind it for ever.
                self._outbox.give_up(sample, "no_credit")
                return False
        return True

    def _place(
        self, sample: Sample, payload_at: int, add: Callable[[], pb.VerifierStates], *, wait: bool
    ) -> Placed | None:
        while True:
            placed = self._placement.place(sample, payload_at, _TICK if wait else 0.0, add)
            if placed is not None or not wait or not self._worth_waiting(sample):
                return placed

    def _worth_waiting(self, sample: Sample) -> bool:
        if self._stream.silent_seconds() > self._stall_seconds or self._stop.is_set():
            return False
        return self._outbox.holds(sample) and self._stream.is_open
