"""The background thread that keeps a run open and drains the outbox into it.

Sends on one stream what waits in the outbox, as many samples together as a batch may have.

Puts samples where the trainer reads them: into the ring, or into the message.

Which part of the ring is free: first in, first out, whatever the order of acknowledgements.

One StreamStates call: samples up within credits, acknowledgements down.
"""

from __future__ import annotations

import logging
import queue
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from policy_bridge.config import FLOAT8, BridgeConfig
from policy_bridge.model import PolicyModules
from policy_bridge.outbox import Outbox, Sample
from policy_bridge.session import Announcer, PolicySnapshot, Session, decode_session
from policy_bridge.stats import Counters
from policy_bridge.sync import describe
from slipstream.checksum import KINDS, Bytes, checksum_of, copy_hashed
from slipstream.errors import RefusedError, refused_from
from slipstream.layers import encode_layers
from slipstream.sample import ALIGNMENT, Layout
from slipstream.shm import HEADER_BYTES, RingFile
from slipstream.tensors import PIECE_BYTES, SCHEMA_VERSION, Parts, dtype_to_wire, frame, frames
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc


@dataclass
class _Part:
    start: int
    end: int
    free: bool = False


class RingSpace:
    """Hands out contiguous parts of [first, last) in order. Thread-safe.

    A part that is given back before an older one is used again only after that one.

    Args:
        first: first byte, a multiple of 64.
        last: one beyond the last byte.
    """

    def __init__(self, first: int, last: int) -> None:
        self._first = first
        self._last = last
        self._next = first
        self._parts: deque[_Part] = deque()
        self._by_start: dict[int, _Part] = {}
        self._changed = threading.Condition()

    @property
    def capacity(self) -> int:
        """Largest part there can be, in bytes."""
        return (self._last - self._first) // ALIGNMENT * ALIGNMENT

    @property
    def used(self) -> int:
        """Bytes that are handed out, gaps at the end of a round included."""
        with self._changed:
            if not self._parts:
                return 0
            span = self._next - self._parts[0].start
            return span if span > 0 else self._last - self._first + span

    def take(self, nbytes: int, timeout: float) -> int | None:
        """Start of a free part, a multiple of 64; None if there was none in time."""
        size = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        with self._changed:
            start = self._find(size)
            if start is None and timeout > 0:

                def found() -> bool:
                    nonlocal start
                    start = self._find(size)
                    return start is not None

                self._changed.wait_for(found, timeout)
            if start is None:
                return None
            part = _Part(start, start + size)
            self._parts.append(part)
            self._by_start[start] = part
            self._next = part.end
            return start

    def give_back(self, *starts: int) -> None:
        """The parts that begin here are free."""
        with self._changed:
            for start in starts:
                self._by_start.pop(start).free = True
            while self._parts and self._parts[0].free:
                self._parts.popleft()
            self._changed.notify_all()

    def _find(self, size: int) -> int | None:
        if not self._parts:
            return self._first if size <= self.capacity else None
        oldest = self._parts[0].start
        if self._next > oldest:
            if self._last - self._next >= size:
                return self._next
            # The rest at the end stays unused this time round.
            return self._first if oldest - self._first >= size else None
        return self._next if oldest - self._next >= size else None


DESCRIPTION_BYTES = 512
"""More than a sample's message takes without its block."""

# More than a piece of a payload takes beside its bytes.
_FIELD_BYTES = 16
# Samples that wait are described together: what the trainer does once for a batch, and its answer,
# cost it as much as a MiB of states. Inline four messages' worth of them was no faster than one.
_BATCH_BYTES = 16 << 20


@dataclass(frozen=True)
class Placed:
    """Where a sample's block is.

    Attributes:
        payload: pieces to append to the message's payload; none when it is in the ring.
        ring_bytes: of it in the ring.
    """

    payload: list[Bytes]
    ring_bytes: int


class Placement:
    """One stream's way of handing states over. Used by one thread, but for ``settled``.

    Args:
        session: of the stream; says what the trainer offers.
        config: which transport is wanted.
        distrusted: why shared memory is out of the question; empty when it is not.
    """

    def __init__(self, session: Session, config: BridgeConfig, distrusted: str = "") -> None:
        self._aux_layers = encode_layers(session.aux_layers)
        self._kind = next(kind for kind in KINDS if kind in session.checksums)
        self._ring: RingFile | None = None
        self.reason = distrusted
        if config.transport == "grpc":
            self.reason = 'transport = "grpc"'
        elif not distrusted:
            self._attach(session.shared_memory, Path(config.shared_memory))
        ring = self._ring
        self._space = None if ring is None else RingSpace(HEADER_BYTES, ring.nbytes)
        self._placed: dict[str, int] = {}
        self._facts: tuple[Layout, int, float, int] | None = None
        self._template = pb.VerifierStates()

    @property
    def transport(self) -> pb.Transport:
        """Where most of the states are."""
        return pb.TRANSPORT_GRPC if self._ring is None else pb.TRANSPORT_SHARED_MEMORY

    @property
    def name(self) -> str:
        """The same, as it is configured."""
        return "grpc" if self._ring is None else "shared_memory"

    @property
    def batch_bytes(self) -> int:
        """Bytes of states after which a message is full."""
        return _BATCH_BYTES if self._ring is not None else PIECE_BYTES

    @property
    def ring_bytes(self) -> tuple[int, int] | None:
        """Used and whole bytes of the ring; None where there is none."""
        return None if self._space is None else (self._space.used, self._space.capacity)

    def message_bytes(self, layout: Layout) -> int:
        """Most serialized bytes that describing a sample takes, its block included if inline."""
        nbytes = layout.nbytes
        if self._fits_ring(nbytes):
            return DESCRIPTION_BYTES
        return DESCRIPTION_BYTES + nbytes + (nbytes // PIECE_BYTES + 1) * _FIELD_BYTES

    def place(
        self,
        sample: Sample,
        payload_at: int,
        timeout: float,
        add: Callable[[], pb.VerifierStates],
    ) -> Placed | None:
        """Copy a sample into the ring, or prepare it for a payload, and describe it.

        Args:
            sample: on the CPU.
            payload_at: bytes that are in the message's payload already.
            timeout: seconds to wait for room in the ring.
            add: makes the description, empty; called once there is room.

        Returns:
            None if there was no room in time.

        Raises:
            RefusedError: the ring was truncated.
        """
        layout, payload = sample.layout, []
        if self._ring is not None and self._space is not None and self._fits_ring(layout.nbytes):
            offset = self._space.take(layout.nbytes, timeout)
            if offset is None:
                return None
            self._placed[sample.sample_id] = offset
            self._ring.check()
            block = self._ring.span(offset, layout.nbytes)
            checksum = copy_hashed(sample.block.numpy(), block, self._kind)
            memory = pb.MEMORY_RING
        else:
            memory, offset = pb.MEMORY_PAYLOAD, payload_at
            payload = [sample.block.numpy()]
            checksum = checksum_of(payload, self._kind)
        message = add()
        message.CopyFrom(self._common(sample, memory))
        message.sample_id = sample.sample_id
        packed = message.packed
        packed.checksum = checksum
        packed.span.offset = offset
        return Placed(payload, 0 if payload else layout.nbytes)

    def settled(self, *sample_ids: str) -> None:
        """The trainer has answered: their parts of the ring are free."""
        if self._space is not None:
            offsets = [self._placed.pop(sample_id, None) for sample_id in sample_ids]
            self._space.give_back(*[offset for offset in offsets if offset is not None])

    def close(self) -> None:
        """Let go of the ring."""
        if self._ring is not None:
            self._ring.close()

    def _common(self, sample: Sample, memory: pb.Memory) -> pb.VerifierStates:
        """The description without what differs from sample to sample.

        Made once for many that are alike: built up from its parts it is copied with each of them,
        which took a small sample 6 us, and takes 1.
        """
        layout = sample.layout
        facts = (layout, sample.policy_version, sample.temperature, int(memory))
        if facts != self._facts:
            self._facts = facts
            self._template = pb.VerifierStates(
                policy_version=sample.policy_version,
                temperature=sample.temperature,
                aux_layers=self._aux_layers,
                packed=pb.PackedStates(
                    tokens=layout.tokens,
                    hidden_size=layout.hidden_size,
                    states_dtype=dtype_to_wire(layout.dtype),
                    span=pb.Span(memory=memory, bytes=layout.nbytes),
                    checksum_kind=self._kind,
                ),
            )
        return self._template

    def _attach(self, offered: pb.SharedMemory, directory: Path) -> None:
        if not offered.name:
            self.reason = offered.absent_because or "the trainer offers none"
            return
        try:
            self._ring = RingFile.attach(directory, offered.name, offered.bytes, offered.nonce)
        except (RefusedError, OSError) as error:
            self.reason = str(error)

    def _fits_ring(self, nbytes: int) -> bool:
        return self._space is not None and nbytes <= self._space.capacity


_METHOD = pb.DESCRIPTOR.services_by_name["DraftTrainer"].methods_by_name["StreamStates"]


class StateStream:
    """Open from construction to ``close``, unless the trainer ends it before.

    Owns one thread, which reads answers. The credit bounds what waits in gRPC.

    Args:
        channel: to the trainer.
        header: the session, and how its states travel.
        on_acks: called from the reading thread.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        header: pb.StreamHeader,
        on_acks: Callable[[Sequence[pb.Ack]], None],
    ) -> None:
        self._on_acks = on_acks
        self._changed = threading.Condition()
        self._credit = 0
        self._waiting: set[str] = set()
        self._news = time.monotonic()
        self._open = True
        self._closing = False
        self.answered = False
        self.error: grpc.RpcError | None = None
        self._requests: queue.SimpleQueue[Parts | None] = queue.SimpleQueue()
        self._requests.put([frame(pb.StreamStatesRequest(header=header))])
        # Not through the stub, which would copy each payload into a message and out of it.
        call = channel.stream_stream(
            f"/{_METHOD.containing_service.full_name}/{_METHOD.name}",
            response_deserializer=pb.StreamStatesResponse.FromString,
        )
        # Joined when gRPC asks for it: a copy made earlier is in no cache by then.
        self._call = call(map(_joined, iter(self._requests.get, None)))
        self._reader = threading.Thread(target=self._read, name="slipstream-acks", daemon=True)
        self._reader.start()

    @property
    def is_open(self) -> bool:
        """Whether the trainer may still take samples here."""
        with self._changed:
            return self._open

    def wait_credit(self, size: int, timeout: float) -> bool:
        """Wait until ``size`` bytes may be sent. False: not in time, or the stream ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._credit >= size or not self._open, timeout)
            return self._open and self._credit >= size

    @property
    def credit(self) -> int:
        """Bytes that may be sent now."""
        with self._changed:
            return self._credit

    def send(self, request: pb.StreamStatesRequest, payload: Sequence[Bytes]) -> int:
        """Send a batch for which there is credit; the bytes of its messages."""
        with self._changed:
            if not self._waiting:
                self._news = time.monotonic()
            self._waiting.update([sample.sample_id for sample in request.batch.samples])
        sent = 0
        for parts in frames(request, payload):
            size = sum(map(len, parts))
            with self._changed:
                self._credit -= size
            self._requests.put(parts)
            sent += size
        return sent

    def silent_seconds(self) -> float:
        """Seconds without news while the first credit, or an acknowledgement, is due; else 0."""
        with self._changed:
            due = self._waiting or not self.answered
            return time.monotonic() - self._news if due else 0.0

    def nothing_due(self) -> bool:
        """Whether every sample sent here was answered: no credit will come back by itself."""
        with self._changed:
            return not self._waiting

    def close(self, timeout: float) -> None:
        """End the call and its thread."""
        self._closing = True
        self._requests.put(None)
        self._call.cancel()
        self._reader.join(timeout)

    def _read(self) -> None:
        try:
            for response in self._call:
                acks, credit = _contents(response)
                # Before the credit wakes the sender: its room in the ring is free then too.
                if acks:
                    self._on_acks(acks)
                with self._changed:
                    self.answered = True
                    self._news = time.monotonic()
                    self._credit += credit
                    self._waiting.difference_update([ack.sample_id for ack in acks])
                    self._changed.notify_all()
        except grpc.RpcError as error:
            if not self._closing:
                self.error = error
        except ValueError:
            # gRPC's answer to a call on a closed channel: the bridge is stopping.
            pass
        finally:
            with self._changed:
                self._open = False
                self._changed.notify_all()
            # Lets gRPC's request thread end.
            self._requests.put(None)


def _contents(response: pb.StreamStatesResponse) -> tuple[Sequence[pb.Ack], int]:
    kind = response.WhichOneof("kind")
    if kind == "acks":
        return response.acks.acks, response.acks.credit_bytes
    if kind == "ack":
        return [response.ack], 0
    return [], response.credit.bytes


def _joined(parts: Parts) -> bytes:
    return b"".join(parts)  # type: ignore[arg-type]


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


logger = logging.getLogger(__name__)

_FIRST_PAUSE = 0.05
_TICK_SHIPPER = 0.2
_JOIN_SECONDS = 5.0
_DIED = "shipper_died"


class Shipper:
    """Connects, ships, connects again; owned and closed by the bridge.

    After any lost stream the run is opened anew, because a restarted trainer
    answers on the same address with another session. Unacknowledged samples are
    then sent again under their old ids, which the trainer de-duplicates.

    Args:
        channel: to the trainer; the caller closes it to interrupt calls.
        modules: the policy that is captured.
        outbox: where samples wait.
        config: deadlines and names.
        counters: where everything is counted.
    """

    def __init__(
        self,
        channel: grpc.Channel,
        modules: PolicyModules,
        outbox: Outbox,
        config: BridgeConfig,
        counters: Counters,
    ) -> None:
        self._channel = channel
        self._stub = pb_grpc.DraftTrainerStub(channel)
        self._distrusted = ""
        self._announcer = Announcer(channel)
        self._modules = modules
        self._outbox = outbox
        self._config = config
        self._counters = counters
        self._changed = threading.Condition()
        self._session: Session | None = None
        self._placement: Placement | None = None
        self._connected = False
        self._attempted = False
        self._died = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="slipstream-shipper", daemon=True)
        self._thread.start()

    @property
    def session(self) -> Session | None:
        """The last run that was opened, whether the trainer is up now or not."""
        with self._changed:
            return self._session

    @property
    def connected(self) -> bool:
        """Whether a run is open now."""
        with self._changed:
            return self._connected

    @property
    def died(self) -> bool:
        """Whether the thread ended of an error that nobody foresaw; it does not come back."""
        with self._changed:
            return self._died

    @property
    def ring_bytes(self) -> tuple[int, int] | None:
        """See ``Placement.ring_bytes``; None while no stream is open."""
        placement = self._placement
        return None if placement is None else placement.ring_bytes

    def wait_connected(self, timeout: float) -> bool:
        """Wait for an open run; False if there is none, or will be none, by then."""
        with self._changed:
            self._changed.wait_for(lambda: self._connected or self._died, timeout)
            return self._connected

    def wait_first_attempt(self, timeout: float) -> None:
        """Wait until the trainer was reached, or was found to be unreachable, once."""
        with self._changed:
            self._changed.wait_for(lambda: self._attempted, timeout)

    def offer_policy(self, snapshot: PolicySnapshot) -> None:
        """Announce this version in the background, before its first sample."""
        for version in self._announcer.offer(snapshot):
            self._outbox.shed("policy_not_announced", version)

    def stop(self) -> None:
        """Tell the thread to end; the caller then closes the channel and calls ``join``."""
        self._stop.set()

    def join(self) -> bool:
        """Wait for the thread's end. False if it did not come."""
        self._thread.join(_JOIN_SECONDS)
        return not self._thread.is_alive()

    def _run(self) -> None:
        pause = _FIRST_PAUSE
        try:
            while not self._stop.is_set():
                try:
                    if self._connect_and_ship():
                        pause = _FIRST_PAUSE
                except grpc.RpcError as error:
                    self._note(refused_from(error) or error)
                except RefusedError as error:
                    self._note(error)
                except ValueError:
                    # gRPC's answer to a call on a closed channel.
                    if not self._stop.is_set():
                        raise
                self._set_connected(False)
                # Jitter, so that many bridges do not knock in step.
                self._stop.wait(pause * random.uniform(0.5, 1.0))
                pause = min(2 * pause, self._config.max_backoff_seconds)
        finally:
            self._set_connected(False)
            if not self._stop.is_set():
                self._mourn()

    def _mourn(self) -> None:
        """This thread ends of a mistake in the bridge: nobody may wait for what it held."""
        with self._changed:
            self._died = True
            self._changed.notify_all()
        self._counters.error("the bridge's thread to the trainer ended of an error; see the log")
        self._outbox.close(_DIED)

    def _connect_and_ship(self) -> bool:
        """One connection's life. Whether the trainer answered on its stream."""
        self._open_run()
        again = self._outbox.requeue_sent()
        session = self._require_session()
        placement = Placement(session, self._config, self._distrusted)
        self._placement = placement
        self._counters.transport(placement.name, placement.reason)
        header = pb.StreamHeader(session_id=session.session_id, transport=placement.transport)
        stream = StateStream(self._channel, header, lambda acks: self._on_acks(placement, acks))
        batches = Batches(
            *(stream, placement, self._outbox, self._config, self._counters),
            known=self._announcer.knows,
            stop=self._stop,
        )
        try:
            while stream.is_open and not self._stop.is_set():
                if stream.silent_seconds() > self._config.stall_seconds:
                    self._note(TimeoutError("the trainer does not answer on its stream of samples"))
                    break
                sample = self._outbox.peek(0.0)
                if sample is not None and sample.aux_layers != session.aux_layers:
                    # Of a window that was open, or was copied from, while the draft changed: the
                    # message would call its states those of the new one's layers.
                    self._outbox.give_up(sample, "draft_changed")
                    continue
                if self._announce_due(sample):
                    continue
                if sample is None:
                    # Round again with what comes: its version may have to be announced first.
                    self._outbox.peek(_TICK_SHIPPER)
                else:
                    sent = batches.send(sample)
                    self._counters.add(resent_samples=len(again.intersection(sent)))
        except RefusedError as error:
            self._distrust(error)
            raise
        finally:
            stream.close(_JOIN_SECONDS)
            self._placement = None
            placement.close()
        if stream.error is not None and not self._stop.is_set():
            refusal = refused_from(stream.error)
            self._distrust(refusal)
            self._note(refusal or stream.error)
        return stream.answered

    def _distrust(self, refusal: RefusedError | None) -> None:
        if refusal is not None and refusal.field == "shared_memory":
            self._distrusted = str(refusal)

    def _open_run(self) -> None:
        config = self._config
        response = self._stub.OpenRun(
            pb.OpenRunRequest(
                run_id=config.run_id,
                policy=self._modules.spec(config.model_name),
                client="policy_bridge",
                schema_version=SCHEMA_VERSION,
            ),
            timeout=config.rpc_seconds,
        )
        session = decode_session(response, self._modules)
        before = self.session
        other = before is not None and not before.same_shape(session)
        self._announcer.open_session(session, forget=other)
        self._counters.add(connects=1)
        with self._changed:
            self._session = session
        if other:
            # A trainer with another draft came up: old states do not fit it. Only now,
            # when new captures see its session, is what waits all there is of them.
            self._outbox.shed("draft_changed")
        self._set_connected(True)

    def _announce_due(self, sample: Sample | None) -> bool:
        """Announce a version if ``sample`` waits for it, or if nothing waits. Whether it did."""
        version = self._announcer.due(None if sample is None else sample.policy_version)
        if version is None:
            if sample is not None and not self._announcer.knows(sample.policy_version):
                self._outbox.shed("policy_not_announced", sample.policy_version)
                return True
            return False
        try:
            self._announcer.announce(version, self._config.announce_seconds)
        except grpc.RpcError as error:
            refusal = refused_from(error)
            # A trainer that restarted does not know the session: a new run mends that. One that
            # has too much to do just now ("server.max_calls") is asked again.
            if refusal is None or refusal.field.endswith("session_id"):
                raise
            if refusal.field.startswith("server."):
                raise
            self._note(refusal)
            self._announcer.give_up(version)
            self._outbox.shed("policy_refused", version)
        else:
            self._counters.add(announced=1)
        return True

    def _on_acks(self, placement: Placement, acks: Sequence[pb.Ack]) -> None:
        accepted = duplicate = 0
        for ack in acks:
            if ack.status == pb.ACK_STATUS_ACCEPTED:
                accepted += 1
            elif ack.status == pb.ACK_STATUS_DUPLICATE:
                duplicate += 1
            else:
                # In their order: refusals in a row count.
                self._counters.add(accepted=accepted, duplicate=duplicate)
                accepted = duplicate = 0
                refusal = RefusedError.from_proto(ack.refusal)
                if self._counters.refused(refusal.field):
                    logger.error("the trainer refuses samples: %s", refusal)
        self._counters.add(accepted=accepted, duplicate=duplicate)
        # Counted first: who waits for an empty outbox then reads the counters.
        names = [ack.sample_id for ack in acks]
        placement.settled(*names)
        self._outbox.settle(*names)

    def _require_session(self) -> Session:
        session = self.session
        if session is None:
            raise RefusedError("session", "none", "an open run", "open the run first")
        return session

    def _set_connected(self, value: bool) -> None:
        with self._changed:
            self._connected = value
            self._attempted = True
            self._changed.notify_all()

    def _note(self, error: Exception) -> None:
        if self._stop.is_set():
            return
        text = describe(error)
        refusal = error if isinstance(error, RefusedError) else None
        if self._counters.error(text, refusal):
            logger.log(logging.ERROR if refusal else logging.WARNING, "draft trainer: %s", text)
